"""One question to the broker: how far its log goes (remoting request 28, GET_BROKER_RUNTIME_INFO).

A frame is ``i32 length | i32 type and header size | header | body`` (spec rocketmq-store 9.1); we speak JSON headers
only, and the answer's body is ``{"table": {"commitLogMinOffset": "0", "commitLogMaxOffset": "123", ...}}``. Whatever
listens there may be anything: sizes are bounded, one deadline covers the whole exchange, and nothing is asked again
here but on a connection that the broker had closed meanwhile.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from contextlib import suppress
from typing import NamedTuple

from indexd.config.serving import split_address
from indexd.config.units import printable

GET_BROKER_RUNTIME_INFO = 28
_ANSWER_SIZE_MAX = 1 << 20
_TIMEOUT_SECONDS = 2.0
_OFFSET = re.compile(r"-1|[0-9]{1,18}", re.ASCII)
_REMARK_MAX = 200
_RESPONSE_FLAG = 1


class Offsets(NamedTuple):
    """The physical offsets of the broker's first message, -1 where it names none, and behind its last one."""

    begin: int
    end: int


class _NoAnswerError(Exception):
    """Why there is no answer; stays in this module."""


class _GoneError(_NoAnswerError):
    """The connection is closed: the broker drops one that is quiet for two minutes."""


class BrokerAdmin:
    """A connection that is kept; one thread at a time."""

    def __init__(self, address: str, timeout: float = _TIMEOUT_SECONDS) -> None:
        self.address = address
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._opaque = 0

    def offsets(self) -> Offsets | str:
        """Where the broker's log begins and ends, or why there is no answer; within the time-out.

        Everything before its end was written whole before the answer was sent.
        """
        deadline = time.monotonic() + self._timeout
        was_kept = self._socket is not None
        try:
            try:
                return self._ask(deadline)
            except _GoneError:
                if not was_kept:
                    raise
                self.close()
                return self._ask(deadline)
        except _NoAnswerError as error:
            self.close()
            return str(error)
        except TimeoutError:
            self.close()
            return f"no answer within {self._timeout:g} s"
        except OSError as error:
            self.close()
            return error.strerror or str(error)

    def close(self) -> None:
        """Close the connection; the next question opens one."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()
        self._socket = None

    def _ask(self, deadline: float) -> Offsets:
        if self._socket is None:
            self._socket = socket.create_connection(split_address(self.address), timeout=_left(deadline))
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        header = {
            "code": GET_BROKER_RUNTIME_INFO, "flag": 0, "language": "PYTHON", "opaque": self._opaque,
            "serializeTypeCurrentRPC": "JSON", "version": 0,
        }  # fmt: skip
        text = json.dumps(header).encode()
        try:
            self._socket.settimeout(_left(deadline))
            self._socket.sendall(struct.pack(">II", 4 + len(text), len(text)) + text)
            size, word = struct.unpack(">II", self._receive(8, deadline))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise _GoneError(error.strerror) from None
        if word >> 24 or not word <= size - 4 <= _ANSWER_SIZE_MAX:
            raise _NoAnswerError("what listens there does not speak RocketMQ's protocol")
        answer = self._receive(size - 4, deadline)
        return _offsets_of(answer[:word], answer[word:], self._opaque)

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._socket is not None
        answer = bytearray()
        while len(answer) < size:
            self._socket.settimeout(_left(deadline))
            part = self._socket.recv(min(size - len(answer), 65536))
            if not part:
                raise _GoneError("the connection was closed before an answer")
            answer += part
        return bytes(answer)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _offsets_of(header: bytes, body: bytes, opaque: int) -> Offsets:
    row = _parse(header)
    flag = row.get("flag")
    if row.get("opaque") != opaque or not isinstance(flag, int) or not flag & _RESPONSE_FLAG:
        raise _NoAnswerError("the answer is not to this question")
    if row.get("code") != 0:
        remark = printable(str(row.get("remark"))[:_REMARK_MAX])
        raise _NoAnswerError(f"refused with code {printable(str(row.get('code'))[:20])}: {remark}")
    table = _parse(body).get("table")
    if not isinstance(table, dict):
        table = {}
    end = _offset(table.get("commitLogMaxOffset"))
    if end is None or end < 0:
        raise _NoAnswerError("the answer has no commitLogMaxOffset")
    begin = _offset(table.get("commitLogMinOffset"))
    return Offsets(-1 if begin is None else begin, end)


def _offset(text: object) -> int | None:
    return int(text) if isinstance(text, str) and _OFFSET.fullmatch(text) else None


def _parse(text: bytes) -> dict[str, object]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise _NoAnswerError("the answer is no JSON object")
    return row
