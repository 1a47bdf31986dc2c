"""The daemon: opens, recovers, runs its tasks, stops them in order.

``start``       lock, abort flag, recovery, event loop
``daemon``      Daemon: the tasks, the signals, the order of stopping
``heart``       what systemd is told, and when its watchdog is fed
``broker_watch``  what is known of the broker; from ``broker_indexing``, whether it indexes itself, and from
``broker_limit``  how far its log goes, asked with ``broker_admin``; where, if nobody says it, by ``broker_find``
``scrub``       when everything is read again, and how fast
``instance``    Instance: what a process has from its lock to its end
``reload``      what a HUP changes
``recovering``  --recover: the same opening, then catch up and end
``state``       DATA/state: where a running daemon stands, for queries and status
``progress``    how far a recovery is
``log``         structlog, set up once
"""
