"""Spark's own Python daemon, which forks the workers, silent about a worker whose task was given up.

Run by Spark on this machine as ``python -m indexd.spark.workers``. When a job is cancelled, another task of it failed,
or the reader has enough rows, the sockets of the tasks that still run are closed; without this each of them prints a
traceback, over the one line that says what happened or over nothing at all.
"""

from __future__ import annotations

import sys
from socket import socket
from typing import Any

from pyspark import daemon

_ENDED = 1  # as for any worker that cannot go on: its process is not used again


def quiet_worker(sock: socket, authenticated: bool) -> int:
    """One task, as pyspark's own; what it writes into a closed socket is nobody's any more."""
    try:
        return _worker(sock, authenticated)
    except BrokenPipeError:
        return _ENDED


def quiet_print(*words: object, **more: Any) -> None:
    """What pyspark's daemon prints, but for the traceback of a closed socket, inside whose ``except`` it is called."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError):
        print(*words, **more)  # noqa: T201 - it stands for pyspark's own


_worker = daemon.worker

if __name__ == "__main__":
    daemon.worker = quiet_worker
    vars(daemon)["print"] = quiet_print  # before the builtin, for that module alone
    daemon.manager()
