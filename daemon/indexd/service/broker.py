"""Watches the broker: is it alive, does it index, where does its log end, which bounds what is read; what is unsafe.

A broker reads broker.conf once, at its start, and so does indexd. The broker's index files say what it does now: the
newest one's header grows with every key. What is unsafe is only said: it keeps the next
start from going on (exit 3), never a running daemon. Our files are our own, so a broker that indexes as well does
double work and no harm, while a stop would leave the hole that mode offload is there to avoid.

How far its log goes is asked by remoting request 28, GET_BROKER_RUNTIME_INFO, whose answer's body is ``{"table":
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from indexd.commitlog.segments import SegmentList, list_segments
from indexd.config import Config
from indexd.config.load import index_key, writes_index
from indexd.config.serving import is_peer, split_address
from indexd.config.units import RemotePath, printable
from indexd.errors import DiskError, IndexdError
from indexd.index.format import HEADER_SIZE, IndexHeader
from indexd.serve.remoting.command import FrameError, RemotingCommand, decode_command, encode_command
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock, listening, look_at_lock
from indexd.storage.names import is_index_name

GET_BROKER_RUNTIME_INFO = 28
_ANSWER_SIZE_MAX = 1 << 20
_TIMEOUT_SECONDS = 2.0
_OFFSET = re.compile(r"-1|[0-9]{1,18}", re.ASCII)
_REMARK_MAX = 200
_FAST_PORT_BELOW = 2
_HINT = "set broker_address"
# Between two questions of a reader that waits for the answer, and after the first question without one.
_ASK_SECONDS = 0.02
_RETRY_SECONDS_MIN = 0.5
# A reader whose questions bring nothing leaves them to whoever watches the broker, and asks if nobody does.
_SLACK_SECONDS = 2.0
# So many looks, a second from each other, a genuine offset may be behind the bytes.
_LOOKS = 3
NOT_ASKED = "it was not asked yet"
_REMEDY = "correct broker_address and send HUP"
# Between the last word of a broker that ends and the end of its lock.
_ENDING_SECONDS = 0.2


class Offsets(NamedTuple):
    """The physical offsets of the broker's first message, -1 where it names none, and behind its last one."""

    begin: int
    end: int


class SilentBrokerError(IndexdError):
    """There is no broker to ask, or it does not answer what it was asked."""

    default_hint = ""


class BrokerAdmin:
    """A connection that is kept; one thread at a time."""

    def __init__(self, address: str, timeout: float = _TIMEOUT_SECONDS) -> None:
        self.address = address
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._opaque = 0

    def offsets(self) -> Offsets:
        """Where the broker's log begins and ends; within the time-out. Raises SilentBrokerError.

        Everything before its end was written whole before the answer was sent.
        """
        deadline, was_kept = time.monotonic() + self._timeout, self._socket is not None
        try:
            return self._ask(deadline)
        except OSError as error:
            self.close()
            if was_kept and isinstance(error, ConnectionError):  # the broker drops one that is quiet for two minutes
                return self.offsets()
            is_late = isinstance(error, TimeoutError)
            why = f"no answer within {self._timeout:g} s" if is_late else error.strerror or str(error)
        except FrameError as error:
            why = f"what listens there does not speak RocketMQ's protocol: {printable(str(error))}"
        except ValueError as error:
            why = str(error)
        self.close()
        raise SilentBrokerError(why)

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
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(encode_command(RemotingCommand(GET_BROKER_RUNTIME_INFO, self._opaque, language="PYTHON")))
        (size,) = struct.unpack(">I", self._receive(4, deadline))
        if size > _ANSWER_SIZE_MAX:
            raise FrameError(f"an answer of {size} bytes")
        answer = decode_command(self._receive(size, deadline))
        if answer.opaque != self._opaque or not answer.is_response:
            raise ValueError("the answer is not to this question")
        if answer.code != 0:
            raise ValueError(f"refused with code {answer.code}: {printable(str(answer.remark)[:_REMARK_MAX])}")
        table: Any = None
        with suppress(ValueError, RecursionError, TypeError, LookupError):
            table = json.loads(answer.body)["table"]
        begin, end = (_offset(table, f"commitLog{which}Offset") for which in ("Min", "Max"))
        if end is None or end < 0:
            raise ValueError("the answer has no commitLogMaxOffset")
        return Offsets(-1 if begin is None else begin, end)

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._socket is not None
        answer = bytearray()
        while len(answer) < size:
            self._socket.settimeout(_left(deadline))
            part = self._socket.recv(min(size - len(answer), 65536))
            if not part:
                raise ConnectionResetError("the connection was closed before an answer")
            answer += part
        return bytes(answer)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _offset(table: Any, name: str) -> int | None:
    text = table.get(name) if isinstance(table, dict) else None
    return int(text) if isinstance(text, str) and _OFFSET.fullmatch(text) else None


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

    def offsets(self) -> Offsets:
        """What the broker of this store says. Raises IndexdError: why there is none to ask."""
        before = self._list_log()
        if self._admin is not None:
            with suppress(SilentBrokerError):
                return self._ask(self._admin, before)
        address = self._candidate()
        return self._ask(BrokerAdmin(address), before)

    def close(self) -> None:
        """Close the connection; the next question looks for the broker again."""
        if self._admin is not None:
            self._admin.close()
        self._admin = self.address = None

    def _ask(self, admin: BrokerAdmin, before: SegmentList) -> Offsets:
        self._admin, self.address = admin, admin.address
        try:
            answer, after = admin.offsets(), self._list_log()
            begin, end = before.min_offset or 0, after.segments[-1].end if after.segments else 0
            if begin <= max(answer.begin, 0) <= (after.min_offset or 0) and begin <= answer.end <= end:
                return answer
            raise SilentBrokerError(f"it is another store's: its log is [{answer.begin}, {answer.end})")
        except IndexdError as error:
            self.close()
            raise SilentBrokerError(f"the broker at {admin.address}: {error.line()}") from None

    def _candidate(self) -> str:
        # Where to ask.
        if self._config.node.broker_address is not None:
            return self._config.node.broker_address
        if self._config.store.broker_conf is not None:
            facts = self._config.broker
            address = f"{facts.broker_ip1 or '127.0.0.1'}:{facts.listen_port}"
            if not is_peer(address):
                raise SilentBrokerError(f"{address}, of broker_conf, is no address", _HINT)
            return address
        lock = self._look_at_lock()
        if not lock.alive:
            raise SilentBrokerError(lock.why or "no broker runs here")
        if lock.pid is None:
            raise SilentBrokerError(str(lock.why), _HINT)
        try:
            ports = listening(lock.pid)
        except OSError as error:
            what = f"where the broker, pid {lock.pid}, listens cannot be seen ({error.strerror})"
            raise SilentBrokerError(what, _HINT) from error
        pairs = [port for port in sorted(ports) if port - _FAST_PORT_BELOW in ports]
        if len(pairs) != 1:
            what = "is not to be told from its other ports" if pairs else "is not there yet"
            raise SilentBrokerError(f"the listenPort of the broker, pid {lock.pid}, {what}", _HINT)
        return f"{ports[pairs[0]]}:{pairs[0]}"


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
        if self.bounds and self.silence is not None and is_expected:
            silent = f"the broker at {self.address} does not say how far its log goes ({self.silence})"
            what = "what is read is not bounded by it"
            what = what if offset is None else f"nothing behind {offset} is indexed until it does"
            return [f"{silent}: {what}; see broker_address"]
        if not self.bounds or self.silence is not None or offset is None:
            return []
        says = f"the broker at {self.address} says that its log ends at {offset}"
        if self._stood[1] > _LOOKS:
            stands = f"but on disk there {'are whole messages' if self._has_messages else 'is no message'}"
            return [f"{says}, {stands} at {self._stood[0]}: it is another broker's, or the log was cut; {_REMEDY}"]
        if position is not None and offset < position:
            cut = f"{says} and it was read up to {position}, so it was cut"
            return [f"{cut}, and entries behind its end stay until something is written there; if not, {_REMEDY}"]
        return []

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._admin.close()

    def _question(self) -> None:
        waits_for, answer = self._waits_for, None
        try:
            answer = self._admin.offsets()
        except IndexdError as error:
            self.silence = error.line()
        self._asked = self._clock()
        if answer is not None:
            self._answered_for = waits_for
            self.offset, self.silence, self._retry = answer.end, None, _RETRY_SECONDS_MIN
            self._next_ask = self._asked + self._pause
            return
        if not self.bounds:
            self.offset = None
        self._next_ask = self._asked + self._retry
        self._retry = min(2 * self._retry, self._retry_max)


class IndexingWatch:
    """Whether the broker indexes: by broker.conf as it was read, and by its newest index file, which counts more."""

    def __init__(self, config: Config, disk: Disk) -> None:
        self._config, self._disk = config, disk
        # The broker's process and its newest index file at the last look; whether that file grew meanwhile.
        self._seen: tuple[int, tuple[str, int] | None] | None = None
        self._grows = False

    def look(self, lock: BrokerLock) -> tuple[bool | None, str, list[str]]:
        """Whether the broker that ``lock`` is about, or the next one that starts here, indexes (None: it cannot be
        told), what that was concluded from, and what may go wrong.
        """
        store, flavour = self._config.store, self._config.index.flavour
        on, why = None, "no broker.conf is given"
        name = printable(str(store.broker_conf))
        if store.broker_conf is not None:
            on = writes_index(self._config.broker, flavour)
            why = f"by {name}, when it starts" if lock.alive is False else f"by {name}"
        if self._has_grown(lock):
            on, why = True, "its newest index file grows"
        if store.run_mode != "offload" or on is False:
            return on, why, []
        if on is None:
            return on, why, [f"mode offload, and it is not known whether the broker indexes: {why}"]
        remedy = f"set {index_key(flavour)}=false in {name} and restart the broker, or run in mode shadow"
        return on, why, [f"mode offload, but the broker writes an index of its own ({why}): {remedy}"]

    def _has_grown(self, lock: BrokerLock) -> bool:
        # Deleting the newest is no growth: a broker that starts after a crash does.
        before, self._seen = self._seen, (lock.pid or 0, self._look_at_newest()) if lock.alive else None
        if before is None or self._seen is None or before[0] != self._seen[0]:
            self._grows = False
        elif before[1] is not None and self._seen[1] is not None and self._seen[1] > before[1]:
            self._grows = True
        return self._grows

    def _look_at_newest(self) -> tuple[str, int] | None:
        # (name, entries) of the newest file.
        store = self._config.store.store
        if store is None:
            return None
        try:
            names = [name for name, _ in self._disk.list_dir(store / "index") if is_index_name(name)]
            if not names:
                return "", 0
            with self._disk.open_read(store / "index" / names[-1]) as file:
                header = file.pread(HEADER_SIZE, 0)
        except DiskError as error:
            return ("", 0) if error.is_missing else None
        return names[-1], IndexHeader.unpack(header).index_count if len(header) == HEADER_SIZE else 0


class BrokerWatch:
    """Looks when it is told to, from one thread."""

    def __init__(self, config: Config, disk: Disk) -> None:
        self._look_at_lock = partial(_lock_of, config.store.store)
        self._indexing = IndexingWatch(config, disk)
        address, interval = config.node.broker_address, config.node.broker_check_interval
        #: For the reader.
        self.log_limit = suspects_limit(config, disk) if address is None else BrokerLimit(address, interval)

    def look(self) -> dict[str, Any]:
        """What ``board.broker`` holds; never raises, takes some two seconds at most.

        ``alive`` with ``pid``, ``how`` and ``why`` as BrokerLock has them; ``indexing`` and ``indexingWhy`` as
        IndexingWatch concludes; ``address``, ``answers``, ``silence`` and ``maxOffset``: as it was asked last,
        None before that; ``unsafe``: texts, each naming the remedy.
        """
        lock = self._look_at_lock()
        indexing, why, unsafe = self._indexing.look(lock)
        limit = self.log_limit
        if limit.bounds:
            limit.refresh()
            if limit.silence is not None and lock.how == "lock":
                # One that is killed or stopped closes its connections a moment before its lock, or behind it.
                time.sleep(_ENDING_SECONDS)
                lock = self._look_at_lock()
            # A broker that is down or loads its store is expected to be silent.
            unsafe += limit.unsafe(is_expected=lock.how == "lock")
        return {
            "alive": lock.alive,
            "pid": lock.pid,
            "how": lock.how,
            "why": lock.why,
            "indexing": indexing,
            "indexingWhy": why,
            "address": limit.address,
            "answers": None if limit.silence == NOT_ASKED else limit.silence is None,
            "silence": None if limit.silence == NOT_ASKED else limit.silence,
            "maxOffset": limit.offset,
            "checkedAt": int(time.time() * 1000),
            "unsafe": unsafe,
        }

    def close(self) -> None:
        """Close the connection to the broker."""
        self.log_limit.close()


def suspects_limit(config: Config, disk: Disk) -> BrokerLimit:
    """For a command that reads the log once: the broker is asked about suspects alone; to be closed."""
    finder = BrokerFinder(config, partial(_lock_of, config.store.store), partial(list_log, config, disk))
    return BrokerLimit(finder, retry_max=config.node.broker_check_interval)


def _lock_of(store: Path | None) -> BrokerLock:
    if store is None or isinstance(store, RemotePath):
        what = "no store is given, only commitlog directories" if store is None else "the store is on another machine"
        return BrokerLock(None, None, "unknown", what)
    return look_at_lock(store / "lock")


def list_log(config: Config, disk: Disk) -> SegmentList:
    """The segments as they are now; raises IndexdError."""
    return list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
