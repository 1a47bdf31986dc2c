"""The daemon: opens, recovers, runs its tasks, stops them in order.

``start``       lock, abort flag, recovery, event loop
``daemon``      Daemon: the tasks, the signals, the order of stopping
``starts``      unclean starts that came to nothing: a crash loop ends by itself
``watch``       what somebody else does to the data directory of a running daemon
``reload``      what a HUP changes
``recovering``  --recover: the same opening, then catch up and end
``state``       DATA/state: where a running daemon stands, for queries and status
``progress``    how far a recovery is
``log``         structlog, set up once
"""

from indexd.service.recovering import recover_now
from indexd.service.start import run_daemon

__all__ = ["recover_now", "run_daemon"]
