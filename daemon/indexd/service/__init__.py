"""The daemon: opens, recovers, runs its tasks, stops them in order.

``start``       lock, abort flag, recovery, event loop
``daemon``      Daemon: the tasks, the signals, the order of stopping
``heart``       what systemd is told, and when its watchdog is fed
``pulse``       Pulse: whether the stages move
``telling``     problems and events: logged and counted
``around``      Around: looks at the broker, the disk and the log's end
``broker_watch``  what is known of the broker; from ``broker_indexing``, whether it indexes itself, and from
``broker_limit``  how far its log goes, asked with ``broker_admin``; where, if nobody says it, by ``broker_find``
``scrub``       when everything is read again, and how fast
``limits``      the disk watermark
``instance``    Instance: what a process has from its lock to its end
``starts``      unclean starts that came to nothing: a crash loop ends by itself
``watch``       what somebody else does to the data directory of a running daemon
``reload``      what a HUP changes
``recovering``  --recover: the same opening, then catch up and end
``state``       DATA/state: where a running daemon stands, for queries and status
``lag``         LagMeter: how far behind, in bytes, milliseconds and messages
``progress``    how far a recovery is
``notify``      READY, STATUS, WATCHDOG and STOPPING, for systemd
``log``         structlog, set up once
``journal``     the same lines as entries of journald
"""

from indexd.service.recovering import recover_now
from indexd.service.start import run_daemon

__all__ = ["recover_now", "run_daemon"]
