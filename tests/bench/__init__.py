"""The measurements behind ``scripts/bench``: indexd beside RocketMQ's own classes, on one machine, in one run.

::

    __main__    the command line: which parts, in which order; cleans up
    ground      the work directory, the store that the parts share, the environment of what is started
    indexd      starts the installed command, reads /proc/PID of it
    machine     what the disk and the page cache alone allow
    rebuild     messages/s of a whole index, against RocketMQ's IndexService
    tail        lag, memory and the writer's slowdown while RocketMQ writes at full speed
    idle        what a daemon costs when nothing happens
    start       how long a query takes from the shell
    recover     the start after kill -9 over a nearly full open index file, against RocketMQ's own; clean starts
    keyed       the store that it needs
    restart     RocketMQ's half of it
    clean       starts with 50 index files
    report      tables, JSON lines, verdicts

It is no test: numbers that miss a target are shown, not judged by the exit status.
"""
