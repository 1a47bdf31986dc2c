"""Asks the broker how far its log goes, and bounds or confirms by that what the reader takes (BrokerLimit).

The question is remoting request 28, GET_BROKER_RUNTIME_INFO. A frame is ``i32 length | i32 type and header size |
header | body`` (spec rocketmq-store 9.1); headers are JSON here, and the answer's body is ``{"table":
{"commitLogMinOffset": "0", "commitLogMaxOffset": "123", ...}}``. Whatever listens there may be anything: sizes are
bounded, one deadline covers the whole exchange, and nothing is asked again here but on a connection that the broker had
closed meanwhile.

The broker is found by ``broker_address`` or broker.conf, else by the process that holds the store's lock. Nothing is
sent to a port that is not known to be the broker's own: its port for replicas takes any bytes for a replica's
acknowledgement. A broker listens on ``listenPort`` and, for what must not wait, on the port two below.

Without ``broker_address`` the broker is looked for when it is asked, and its answer is for that question alone: what
nobody doubts is read as if it had not been asked.

With ``broker_address`` the reader believes nothing behind the offset that the broker named last. While it does not
answer, that offset stays, however long: what a broker that died left behind it is told from a longer, older log by the
broker alone, when it is back. A broker that never answered bounds nothing, so that one that is down does not keep a
first index from being built. What such a broker cuts afterwards is found as without an address, by what the index
stands on.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from indexd.commitlog.segments import SegmentList
from indexd.config import Config
from indexd.config.serving import is_peer, split_address
from indexd.config.units import printable
from indexd.errors import IndexdError
from indexd.storage.lock import BrokerLock, listening

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


_FAST_PORT_BELOW = 2
_HINT = "set broker_address"


class BrokerFinder:
    """``find`` and ``offsets`` are for one thread at a time."""

    def __init__(
        self, config: Config, look_at_lock: Callable[[], BrokerLock], list_log: Callable[[], SegmentList]
    ) -> None:
        self._config = config
        self._look_at_lock = look_at_lock
        self._list_log = list_log
        self._admin: BrokerAdmin | None = None
        #: Where the broker answered last; None before the first time, and while it does not.
        self.address: str | None = None

    def offsets(self) -> Offsets | str:
        """What the broker of this store says, or why there is none to ask."""
        try:
            before = self._list_log()
            if self._admin is not None:
                answer = self._ask(before)
                if isinstance(answer, Offsets):
                    return answer
                self.close()
            address, why = self._candidate()
            if address is None:
                return why
            self.address, self._admin = address, BrokerAdmin(address)
            answer = self._ask(before)
        except IndexdError as error:
            answer = error.line()
        if isinstance(answer, str):
            self.close()
        return answer

    def close(self) -> None:
        """Close the connection; the next question looks for the broker again."""
        if self._admin is not None:
            self._admin.close()
        self._admin = self.address = None

    def _ask(self, before: SegmentList) -> Offsets | str:
        assert self._admin is not None
        answer = self._admin.offsets()
        if isinstance(answer, str):
            return f"the broker at {self.address}: {answer}"
        after = self._list_log()
        begin, end = before.min_offset or 0, after.segments[-1].end if after.segments else 0
        if begin <= max(answer.begin, 0) <= (after.min_offset or 0) and begin <= answer.end <= end:
            return answer
        return f"the broker at {self.address} is another store's: its log is [{answer.begin}, {answer.end})"

    def _candidate(self) -> tuple[str | None, str]:
        # Where to ask, or None and why not.
        if self._config.node.broker_address is not None:
            return self._config.node.broker_address, ""
        if self._config.store.broker_conf is not None:
            facts = self._config.broker
            address = f"{facts.broker_ip1 or '127.0.0.1'}:{facts.listen_port}"
            return (address, "") if is_peer(address) else (None, f"{address}, of broker_conf, is no address: {_HINT}")
        lock = self._look_at_lock()
        if not lock.alive:
            return None, lock.why or "no broker runs here"
        if lock.pid is None:
            return None, f"{lock.why}: {_HINT}"
        try:
            ports = listening(lock.pid)
        except OSError as error:
            return None, f"where the broker, pid {lock.pid}, listens cannot be seen ({error.strerror}): {_HINT}"
        pairs = [port for port in sorted(ports) if port - _FAST_PORT_BELOW in ports]
        if len(pairs) != 1:
            what = "is not to be told from its other ports" if pairs else "is not there yet"
            return None, f"the listenPort of the broker, pid {lock.pid}, {what}: {_HINT}"
        return f"{ports[pairs[0]]}:{pairs[0]}", ""


# Between two questions of a reader that waits for the answer, and after the first question without one.
_ASK_SECONDS = 0.02
_RETRY_SECONDS_MIN = 0.5
# A reader whose questions bring nothing leaves them to whoever watches the broker, and asks if nobody does.
_SLACK_SECONDS = 2.0
# So many looks, a second from each other, a genuine offset may be behind the bytes.
_LOOKS = 3
NOT_ASKED = "it was not asked yet"
_REMEDY = "correct broker_address and send HUP"


class BrokerLimit:
    """``ask`` is for the reader's thread, ``refresh`` for whoever watches the broker."""

    def __init__(
        self, broker: str | BrokerFinder, retry_max: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._admin = BrokerAdmin(broker) if isinstance(broker, str) else broker
        #: Nothing behind ``offset`` is believed; else it is asked about suspects alone.
        self.bounds = isinstance(broker, str)
        self._clock = clock
        self._lock = threading.Lock()
        self._retry_max = max(retry_max, _RETRY_SECONDS_MIN)
        self._retry = _RETRY_SECONDS_MIN
        self._asked = self._next_ask = 0.0
        # Where the reader waits and what stands there, and how long it leaves between two questions about that.
        self._waits_for: tuple[int, bytes] | None = None
        # The same, as it was before the last question that was answered.
        self._answered_for: tuple[int, bytes] | None = None
        self._pause = _ASK_SECONDS
        self._position: int | None = None
        # Where the reader was at the last look, at how many looks in turn it could not go on, and what stood there.
        self._stood = (-1, 0)
        self._has_messages = False
        #: What the broker named last; None before the first time, and while a broker that was looked for is silent.
        self.offset: int | None = None
        #: Why there was no answer to the last question; None when there was one.
        self.silence: str | None = NOT_ASKED

    def ask(self, position: int, head: bytes = b"") -> int | None:
        """The offset, asked for anew when the last question is some time ago; a reader waits at ``position``.

        While ``head``, which stands there, is the same and the answers bring nothing, it is asked later each time.
        """
        self._position = position
        if self._waits_for != (position, head):
            self._waits_for = (position, head)
            if self.silence is None:
                self._next_ask = min(self._next_ask, self._asked + _ASK_SECONDS)
            self._pause = _ASK_SECONDS
        if self._clock() >= self._next_ask and self._lock.acquire(blocking=False):  # else it is just being asked
            try:
                self._question()
                if self.offset is not None and self.offset <= position:
                    self._pause = min(2 * self._pause, self._retry_max + _SLACK_SECONDS)
            finally:
                self._lock.release()
        return self.offset

    def ends_at(self, position: int, head: bytes) -> bool:
        """Whether the broker, asked when ``head`` stood at ``position`` already, named that offset."""
        return self.offset == position and self._answered_for == (position, head)

    @property
    def address(self) -> str | None:
        """Where the broker is asked; None while it is not known."""
        return self._admin.address

    def compare(self, position: int, *, is_waiting: bool, has_messages: bool) -> bool:
        """Every second or so, with the log as it is on disk: whether the offset holds the reader back for long.

        The reader is at ``position``; ``is_waiting``: it finds nothing there that it may take. ``has_messages``: whole
        ones stand there.
        """
        offset = self.offset
        is_odd = is_waiting and offset is not None and (has_messages or position < offset)
        looks = self._stood[1] + 1 if is_odd and position == self._stood[0] else int(is_odd)
        self._stood, self._position, self._has_messages = (position, looks), position, has_messages
        return looks > _LOOKS and has_messages

    def refresh(self) -> None:
        """Ask now."""
        with self._lock:
            self._question()

    def unsafe(self, *, is_expected: bool) -> list[str]:
        """What is wrong with the offset, and what follows; ``is_expected``: the broker runs, so it should answer."""
        position = self._position  # before the offset: the reader may be asking, and goes on behind a later one
        offset = self.offset
        if not self.bounds:
            return []
        if self.silence is not None and is_expected:
            silent = f"the broker at {self.address} does not say how far its log goes ({self.silence})"
            if offset is None:
                return [f"{silent}: what is read is not bounded by it; see broker_address"]
            return [f"{silent}: nothing behind {offset} is indexed until it does; see broker_address"]
        if self.silence is not None or offset is None:
            return []
        says = f"the broker at {self.address} says that its log ends at {offset}"
        if self._stood[1] > _LOOKS:
            return [f"{says}, {self._contradiction(offset)}: it is another broker's, so {_REMEDY}"]
        if position is not None and offset < position:
            cut = f"{says} and it was read up to {position}, so it was cut"
            return [f"{cut}, and entries behind its end stay until something is written there; if not, {_REMEDY}"]
        return []

    def _contradiction(self, offset: int) -> str:
        position = self._stood[0]
        if not self._has_messages:
            return f"but on disk there is no message at {position}"
        if offset > position:
            return f"but the message at {position} goes beyond that"
        return f"but whole messages stand at {position} (not indexed; or the log was cut and they are left of it)"

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._admin.close()

    def _question(self) -> None:
        waits_for = self._waits_for
        answer = self._admin.offsets()
        self._asked = self._clock()
        if isinstance(answer, Offsets):
            self._answered_for = waits_for
            self.offset, self.silence, self._retry = answer.end, None, _RETRY_SECONDS_MIN
            self._next_ask = self._asked + self._pause
        else:
            self.silence = answer
            if not self.bounds:
                self.offset = None
            self._next_ask = self._asked + self._retry
            self._retry = min(2 * self._retry, self._retry_max)
