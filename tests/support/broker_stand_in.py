"""A process that does to STORE/lock what a broker does: opens it, locks its first byte later, and dies."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: Opens the lock file as a broker does, locks it when told to, and ends with its input.
STAND_IN = """
import fcntl, sys
file = open(sys.argv[1], sys.argv[2])
print(flush=True)
for word in sys.stdin:
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    print(flush=True)
"""


class StandIn:
    """Another process with STORE/lock open; ``start`` locks it, as the end of a broker's loading."""

    def __init__(self, path: Path, mode: str = "r+") -> None:
        command = [sys.executable, "-c", STAND_IN, str(path), mode, "org.apache.rocketmq.broker.BrokerStartup"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        self.pid = self._process.pid

    def start(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def stand_in(path: Path, mode: str = "r+") -> Iterator[StandIn]:
    process = StandIn(path, mode)
    try:
        yield process
    finally:
        process.kill()
