"""Spark's own Python daemon, which forks the workers, silent about a worker whose task was given up.

Run by Spark on this machine as ``python -m indexd.spark.workers``. When a job is cancelled, or another task of it
failed, the sockets of the tasks that still run are closed; without this each of them prints a traceback over the one
line that says what happened.
"""

from __future__ import annotations

from socket import socket

from pyspark import daemon

_ENDED = 1  # as for any worker that cannot go on: its process is not used again


def quiet_worker(sock: socket, authenticated: bool) -> int:
    """One task, as pyspark's own; what it writes into a closed socket is nobody's any more."""
    try:
        return _worker(sock, authenticated)
    except BrokenPipeError:
        return _ENDED


_worker = daemon.worker

if __name__ == "__main__":
    daemon.worker = quiet_worker
    daemon.manager()
