"""Watches the broker: is it alive, does it index, where does its log end, which bounds what is read; what is unsafe.

A broker reads broker.conf once, at its start, and so does indexd. What is unsafe is only said: it keeps the next
start from going on (exit 3), never a running daemon. Our files are our own, so a broker that indexes as well does
double work and no harm, while a stop would leave the hole that mode offload is there to avoid.

How far its log goes is asked by remoting request 28, GET_BROKER_RUNTIME_INFO, whose answer's body is ``{"table":
{"commitLogMinOffset": "0", "commitLogMaxOffset": "123", ...}}``. Whatever listens there may be anything: sizes are
bounded, and one deadline covers the whole exchange.

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

Around looks at the broker, the disk and the log's end, in a thread of its own. A look may hang, on a file system over a
network as on a broker that does not answer; then only these figures are old.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from indexd.commitlog.decoder import DecoderOptions, Message
from indexd.commitlog.format import EndOfFile
from indexd.commitlog.lookup import LogView
from indexd.commitlog.reader import LogReader
from indexd.commitlog.segments import LogLimit, list_segments, log_end
from indexd.config import Config
from indexd.config.load import writes_index
from indexd.config.serving import is_peer, split_address
from indexd.config.units import printable
from indexd.errors import IndexdError
from indexd.serve.remoting.command import FrameError, RemotingCommand, decode_command, encode_command
from indexd.storage.disk import Disk, used_ratio
from indexd.storage.lock import BrokerLock, listening, look_at_lock

if TYPE_CHECKING:
    from indexd.service.instance import Instance
    from indexd.service.state import LagMeter

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
        try:
            return self._ask(time.monotonic() + self._timeout)
        except OSError as error:
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
            self._socket.close()
        self._socket = None

    def _ask(self, deadline: float) -> Offsets:
        if self._socket is None:
            self._socket = socket.create_connection(split_address(self.address), timeout=_left(deadline))
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(encode_command(RemotingCommand(GET_BROKER_RUNTIME_INFO, self._opaque, language="PYTHON")))
        (size,) = struct.unpack(">I", _receive(self._socket, 4, deadline))
        if size > _ANSWER_SIZE_MAX:
            raise FrameError(f"an answer of {size} bytes")
        answer = decode_command(_receive(self._socket, size, deadline))
        if answer.opaque != self._opaque or not answer.is_response:
            raise ValueError("the answer is not to this question")
        if answer.code != 0:
            raise ValueError(f"refused with code {answer.code}: {printable(str(answer.remark)[:_REMARK_MAX])}")
        table: Any = None
        with suppress(ValueError, RecursionError, TypeError, LookupError):
            table = json.loads(answer.body)["table"]
        begin, end = (_offset(table, f"commitLog{which}Offset") for which in ("Min", "Max"))
        if end < 0:
            raise ValueError("the answer has no commitLogMaxOffset")
        return Offsets(begin, end)


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    answer = b""
    while len(answer) < size:
        connection.settimeout(_left(deadline))
        part = connection.recv(size - len(answer))
        if not part:
            raise ConnectionResetError("the connection was closed before an answer")
        answer += part
    return answer


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _offset(table: Any, name: str) -> int:
    text = table.get(name) if isinstance(table, dict) else None
    return int(text) if isinstance(text, str) and _OFFSET.fullmatch(text) else -1


def broker_address(config: Config) -> str:
    """Where the broker of the store is asked; SilentBrokerError says why that is not known."""
    if config.node.broker_address is not None:
        return config.node.broker_address
    if config.store.broker_conf is not None:
        address = f"{config.broker.broker_ip1 or '127.0.0.1'}:{config.broker.listen_port}"
        if not is_peer(address):
            raise SilentBrokerError(f"{address}, of broker_conf, is no address", _HINT)
        return address
    lock = lock_of(config)
    if not lock.alive or lock.pid is None:
        raise SilentBrokerError(lock.why or "no broker runs here", _HINT if lock.alive else "")
    try:
        ports = listening(lock.pid)
    except OSError as error:
        why = f"where the broker, pid {lock.pid}, listens cannot be seen ({error.strerror})"
        raise SilentBrokerError(why, _HINT) from error
    pairs = [port for port in sorted(ports) if port - _FAST_PORT_BELOW in ports]
    if len(pairs) != 1:
        what = "is not to be told from its other ports" if pairs else "is not there yet"
        raise SilentBrokerError(f"the listenPort of the broker, pid {lock.pid}, {what}", _HINT)
    return f"{ports[pairs[0]]}:{pairs[0]}"


def lock_of(config: Config) -> BrokerLock:
    """Whether a broker has the store open."""
    store = config.store.store
    if store is None:
        return BrokerLock(None, None, "unknown", "no store is given, only commitlog directories")
    return look_at_lock(store / "lock")


class BrokerLimit(LogLimit):
    """How far the log goes, by the broker. ``ask`` is for the reader's thread, ``refresh`` for who watches the broker.

    ``bounds``: nothing behind ``offset`` is believed; else the broker is asked about suspects alone.
    """

    def __init__(
        self, config: Config, disk: Disk, *, bounds: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._disk, self.bounds, self._clock = config, disk, bounds, clock
        self._lock = threading.Lock()
        self._admin: BrokerAdmin | None = None
        self._asked = self._next_ask = 0.0
        # Until the next question: longer each time that one brings nothing.
        self._pause = _ASK_SECONDS
        # Where the reader waits and what stands there; the same as it was before the last question that was answered.
        self._waits_for: tuple[int, bytes] | None = None
        self._answered_for: tuple[int, bytes] | None = None
        self._position: int | None = None
        # Where whole messages stood at the last look that the offset keeps back, and at how many looks in turn.
        self._held = (-1, 0)
        #: What the broker named last; None before the first time, and while a broker that was looked for is silent.
        self.offset: int | None = None
        #: Why there was no answer to the last question; None when there was one.
        self.silence: str | None = NOT_ASKED

    @property
    def address(self) -> str | None:
        """Where the broker is asked; None while it is not known."""
        return self._config.node.broker_address if self._admin is None else self._admin.address

    def ask(self, position: int, head: bytes = b"") -> int | None:
        """The offset, asked for anew when the last question is some time ago; a reader waits at ``position``.

        While ``head``, which stands there, is the same and the answers bring nothing, it is asked later each time.
        """
        self._position = position
        if self._waits_for != (position, head):
            self._waits_for = (position, head)
            if self.silence is None:
                self._pause, self._next_ask = _ASK_SECONDS, min(self._next_ask, self._asked + _ASK_SECONDS)
        if self._clock() >= self._next_ask:
            self.refresh()
        return self.offset

    def ends_at(self, position: int, head: bytes) -> bool:
        """Whether the broker, asked when ``head`` stood at ``position`` already, named that offset."""
        return self.offset == position and self._answered_for == (position, head)

    def holds_back(self, position: int, *, has_messages: bool) -> bool:
        """Every second or so: whether the offset has held the reader back at ``position`` for long.

        ``has_messages``: whole ones stand there, and it finds nothing that it may take.
        """
        is_held = has_messages and self.offset is not None
        self._held = (position, self._held[1] + 1 if is_held and position == self._held[0] else int(is_held))
        self._position = position
        return self._held[1] > _LOOKS

    def refresh(self) -> None:
        """Ask now."""
        with self._lock:
            waits_for = self._waits_for
            try:
                self.offset, self.silence = self._offsets().end, None
                self._answered_for = waits_for
            except IndexdError as error:
                self._forget()
                self.silence = error.line()
                self.offset = self.offset if self.bounds else None
            interval, self._asked = self._config.node.broker_check_interval, self._clock()
            if self.silence is not None:
                self._pause = min(max(2 * self._pause, _RETRY_SECONDS_MIN), max(interval, _RETRY_SECONDS_MIN))
            elif self._position is not None and self.offset is not None and self.offset <= self._position:
                self._pause = min(2 * self._pause, interval + _SLACK_SECONDS)
            else:
                self._pause = _ASK_SECONDS
            self._next_ask = self._asked + self._pause

    def unsafe(self, *, is_expected: bool) -> list[str]:
        """What is wrong with the offset, and what follows; ``is_expected``: the broker runs, so it should answer."""
        # The position before the offset: the reader may be asking, and goes on behind a later one.
        position, offset = self._position, self.offset
        if self.bounds and self.silence is not None and is_expected:
            is_free = "what is read is not bounded by it"
            what = is_free if offset is None else f"nothing behind {offset} is indexed until it does"
            return [f"the broker does not say how far its log goes ({self.silence}): {what}; see broker_address"]
        if not self.bounds or self.silence is not None or offset is None:
            return []
        says = f"the broker at {self.address} says that its log ends at {offset}"
        if self._held[1] > _LOOKS:
            stands = f"but on disk there are whole messages at {self._held[0]}"
            return [f"{says}, {stands}: it is another broker's, or the log was cut; {_REMEDY}"]
        if position is not None and offset < position:
            cut = f"{says} and it was read up to {position}, so it was cut"
            return [f"{cut}, and entries behind its end stay until something is written there; if not, {_REMEDY}"]
        return []

    def look(self) -> dict[str, Any]:
        """What ``board.broker`` holds, for who watches the broker; never raises, takes some two seconds at most.

        ``alive`` with ``pid``, ``how`` and ``why`` as BrokerLock has them; ``indexing``, whether the broker, or the
        next one that starts here, writes an index (None: it cannot be told), and ``indexingWhy``; ``address``,
        ``answers``, ``silence`` and ``maxOffset``: as it was asked last, None before that; ``unsafe``: texts, each
        naming the remedy.
        """
        lock, conf = lock_of(self._config), self._config.store.broker_conf
        indexing, why = None, "no broker.conf is given"
        if conf is not None:
            indexing = writes_index(self._config.broker, self._config.index.flavour)
            why = f"by {printable(str(conf))}{', when it starts' if lock.alive is False else ''}"
        if self.bounds:
            self.refresh()
        return {
            "alive": lock.alive,
            "pid": lock.pid,
            "how": lock.how,
            "why": lock.why,
            "indexing": indexing,
            "indexingWhy": why,
            "address": self.address,
            "answers": None if self.silence == NOT_ASKED else self.silence is None,
            "silence": None if self.silence == NOT_ASKED else self.silence,
            "maxOffset": self.offset,
            "checkedAt": int(time.time() * 1000),
            # A broker that is down or loads its store is expected to be silent.
            "unsafe": self.unsafe(is_expected=lock.how == "lock"),
        }

    def close(self) -> None:
        """Close the connection; the next question looks for the broker again."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        if self._admin is not None:
            self._admin.close()
        self._admin = None

    def _offsets(self) -> Offsets:
        before = self._log()
        if self._admin is None:
            self._admin = BrokerAdmin(broker_address(self._config))
        try:
            answer, after = self._admin.offsets(), self._log()
        except SilentBrokerError as error:
            raise SilentBrokerError(f"the broker at {self._admin.address}: {error.line()}") from None
        if before.begin <= max(answer.begin, 0) <= after.begin and before.begin <= answer.end <= after.end:
            return answer
        what = f"it is another store's: its log is [{answer.begin}, {answer.end})"
        raise SilentBrokerError(f"the broker at {self._admin.address}: {what}")

    def _log(self) -> Offsets:
        store = self._config.store
        log = list_segments(self._disk, store.commit_log_directories, store.segment_size)
        return Offsets(log.min_offset or 0, log.segments[-1].end if log.segments else 0)


_EVERY_SECONDS = 1.0
# So long a start waits for the first look.
_FIRST_SECONDS = 3.0
# Of a look at the broker, what is worth an event when it changes.
_TOLD = ("alive", "indexing", "answers")


def limit_of(config: Config, disk: Disk) -> BrokerLimit:
    """The broker that is asked; one that the configuration names bounds what is read."""
    return BrokerLimit(config, disk, bounds=config.node.broker_address is not None)


class Around:
    """A context manager around the process's whole life; what it finds is on the board."""

    def __init__(
        self,
        instance: Instance,
        *,
        make_limit: Callable[[Config, Disk], BrokerLimit] = limit_of,
        every_seconds: float = _EVERY_SECONDS,
        first_seconds: float = _FIRST_SECONDS,
    ) -> None:
        self._instance, self._node, self._make_limit = instance, instance.config.node, make_limit
        self._every, self._first = every_seconds, first_seconds
        #: Who is asked how far the log goes.
        self.log_limit = make_limit(instance.config, instance.disk)
        # Who reads the log now.
        self._followed: list[tuple[LogReader, LagMeter]] = []
        self._broker_due = 0.0
        # What was said last of the broker, of what is unsafe, and of a look that failed.
        self._told: object = None
        self._unsafe: list[str] = []
        self._failure = ""
        self._leave, self._has_looked = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="around", daemon=True)

    def __enter__(self) -> Around:
        self._thread.start()
        self._has_looked.wait(self._first)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(self._first)

    def follow(self, reader: LogReader, meter: LagMeter) -> None:
        """Before its first poll: ``reader`` believes no more than the broker vouches for, as far as it is asked.

        From now on ``meter`` is told how far the log goes while the reader is behind.
        """
        reader.log_limit = self.log_limit
        with suppress(IndexdError):  # so that the first figures are those of the whole log
            meter.seen_end = log_end(self._instance.disk, reader.log, reader.position)
        self._followed = [(reader, meter)]

    def unfollow(self) -> None:
        """The reader is closed, or will be."""
        self._followed = []

    def look(self) -> None:
        """Once, at what is due."""
        with suppress(IndexdError):  # whoever writes there meets and reports it
            self._instance.board.disk_used_ratio = round(used_ratio(self._instance.config.store.data), 4)
        for reader, meter in self._followed:
            self._look_at_log(reader, meter)
        if time.monotonic() >= self._broker_due:
            self._look_at_broker()
            self._broker_due = time.monotonic() + self._instance.config.node.broker_check_interval

    def _run(self) -> None:
        while True:
            try:
                self.look()
                self._failure = ""
            except Exception as error:  # noqa: BLE001 - the index goes on, whatever cannot be looked at
                if repr(error) != self._failure:
                    self._failure = repr(error)
                    self._instance.log.error("look_failed", problem=self._failure)  # noqa: TRY400 - a line, no trace
            self._has_looked.set()
            if self._leave.wait(self._every):
                self.log_limit.close()
                return

    def _look_at_broker(self) -> None:
        if self._instance.config.node is not self._node:  # a HUP
            self.log_limit.close()
            self._node = self._instance.config.node
            self.log_limit = self._make_limit(self._instance.config, self._instance.disk)
            for reader, meter in self._followed:
                reader.log_limit, meter.held_at = self.log_limit, None
        found = self.log_limit.look()
        self._instance.board.broker = found
        told = tuple(found.get(key) for key in _TOLD)
        if told != self._told:
            self._told = told
            said = ("alive", "pid", "how", "why", "indexing", "indexingWhy", "address", "answers", "silence")
            self._instance.log.info("broker", **{key: found.get(key) for key in said})
        if found["unsafe"] and found["unsafe"] != self._unsafe:
            self._instance.log.warning("broker_unsafe", texts=found["unsafe"])
        self._unsafe = found["unsafe"]

    def _look_at_log(self, reader: LogReader, meter: LagMeter) -> None:
        limit = self.log_limit
        if meter.is_at_end and not limit.bounds:
            return
        with suppress(IndexdError):  # the reader meets it as well, and says so
            position, is_waiting = reader.position, meter.is_waiting and not reader.is_undecided
            seen = log_end(self._instance.disk, reader.log, position)
            if limit.bounds:
                has_messages = is_waiting and seen > position and self._has_messages(position, seen)
                meter.held_at = position if limit.holds_back(position, has_messages=has_messages) else None
            if not meter.is_at_end or meter.held_at == reader.position:
                meter.seen_end = seen

    def _has_messages(self, position: int, seen: int) -> bool:
        # What is left of a message that was never whole is none.
        store = self._instance.config.store
        options = DecoderOptions(check_crc=True)
        with closing(LogView(self._instance.disk, store.commit_log_directories, store.segment_size, options)) as lookup:
            found, segment = lookup.at(position), lookup.log.at(position)
        is_past_end = isinstance(found, EndOfFile) and segment is not None and seen > segment.end
        return is_past_end or isinstance(found, Message)
