"""The measurements behind ``scripts/bench``: indexd beside RocketMQ's and Kafka's classes, on one machine, in one run.

::

    __main__    the command line: which parts, in which order; cleans up
    ground      the work directory, the store that the parts share, what the disk alone allows; tables, JSON, verdicts
    indexd      starts the installed command, reads /proc/PID of it
    rebuild     messages/s of a whole index, against RocketMQ's IndexService
    queues      what ConsumeQueues and sparse indexes cost it
    tail        lag, memory and the writer's slowdown while RocketMQ writes at full speed
    idle        what a daemon costs when nothing happens
    start       how long a query takes from the shell
    recover     the start after kill -9 over a nearly full open index file, against RocketMQ's own; clean starts
    keyed       the store that it needs, and RocketMQ's half of it
    clean       starts with 50 index files
    key         queries by key in process
    source      rows a second of the Spark data source, beside its kernels without Spark
    spark       the rebuild on Spark, beside one process and RocketMQ's IndexService

It is no test: numbers that miss a target are shown, not judged by the exit status.
"""
