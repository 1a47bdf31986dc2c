"""A broker as it is seen from beside it: what answers remoting requests as a test tells it, what holds STORE/lock."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from indexd.commitlog.segments import LogLimit
from indexd.service.broker import BrokerAdmin, SilentBrokerError
from support.remoting import Command, Peer

#: What is done with a request: the connection, and the request.
Answer = Callable[[socket.socket, Command], None]


def frame(header: object, body: bytes = b"", kind: int = 0) -> bytes:
    """A frame with a JSON header; bytes are taken as they are."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack(">II", 4 + len(text) + len(body), kind << 24 | len(text)) + text + body


def well(offset: object, begin: str = "0", **changed: object) -> Answer:
    """The answer of a broker whose log is [``begin``, ``offset``); ``changed`` are other members of its header."""

    def answer(connection: socket.socket, request: Command) -> None:
        header = {"code": 0, "flag": 1, "language": "JAVA", "opaque": request.opaque, "version": 477, **changed}
        table = {"brokerVersionDesc": "V5_4_0", "commitLogMinOffset": begin, "commitLogMaxOffset": offset}
        connection.sendall(frame(header, json.dumps({"table": table}).encode()))

    return answer


def said(broker: BrokerAdmin) -> Any:
    """The offsets that it names, or why it names none."""
    try:
        return broker.offsets()
    except SilentBrokerError as error:
        return error.line()


def raw(data: bytes) -> Answer:
    """Bytes, whatever was asked."""
    return lambda connection, _: connection.sendall(data)


class FakeBroker(Peer):
    """A peer of which ``answer``, which may be replaced at any time, does all that is done with a request."""

    def __init__(self, answer: Answer, port: int = 0) -> None:
        super().__init__(port=port)
        self.answer = answer

    def _take(self, connection: socket.socket, number: int, command: Command) -> None:
        self._note(lambda: self.requests.append((number, command)))
        self.answer(connection, command)


class Named(LogLimit):
    """A LogLimit: a broker that is asked about suspects and names ``offset``, None while it does not answer.

    ``is_fresh``: its answer is newer than what stands in the log. ``asked`` is where.
    """

    bounds = False

    def __init__(self, offset: int | None = None) -> None:
        self.offset = offset
        self.is_fresh = True
        self.asked: list[int] = []

    def ask(self, position: int, head: bytes = b"") -> int | None:
        self.asked.append(position)
        return self.offset

    def ends_at(self, position: int, head: bytes) -> bool:
        return self.is_fresh and self.offset == position


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
