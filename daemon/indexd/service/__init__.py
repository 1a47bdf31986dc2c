"""The daemon: opens, recovers, runs its tasks, stops them in order.

``start``       lock, abort flag, recovery, event loop
``daemon``      Daemon: the tasks, the signals, the order of stopping
``watchdog``    what systemd is told, when its watchdog is fed; looks at disk, broker and the log's end
``broker_watch``  what is known of the broker: whether it is alive, and indexes itself
``broker_limit``  how far its log goes, asked where it listens
``scrub``       when everything is read again, and how fast
``instance``    Instance: what a process has from its lock to its end
``reload``      what a HUP changes
``recovering``  --recover: the same opening, then catch up and end
``state``       DATA/state: where a running daemon stands, for queries and status
``progress``    how far a recovery is
``log``         structlog, set up once
"""
