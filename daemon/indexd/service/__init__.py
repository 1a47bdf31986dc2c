"""The daemon: opens, recovers, runs its tasks, stops them in order.

``start``     run and --recover: the lock, the abort flag, recovery, the event loop
``daemon``    Daemon: the tasks, the signals, the order of stopping, when systemd's watchdog is fed; scrubs
``broker``    what is known of the broker: whether it is alive, and indexes itself; how far its log goes; who looks
``instance``  Instance: what a process has from its lock to its end; its log, what systemd is told, what a HUP changes
``state``     DATA/state: where a running daemon stands, for queries and status; whether somebody touched its files
"""
