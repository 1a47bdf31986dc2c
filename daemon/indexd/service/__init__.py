"""The daemon: opens, recovers, runs its tasks, stops them in order.

``daemon``   Daemon: the tasks, the signals, the order of stopping
``recovering``  --recover: the same opening, then catch up and end
``state``    DATA/state: where a running daemon stands, for queries and status
``log``      structlog, set up once
"""

from indexd.service.daemon import run_daemon
from indexd.service.recovering import recover_now

__all__ = ["recover_now", "run_daemon"]
