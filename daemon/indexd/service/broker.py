"""Watches the broker: is it alive, does it index, where does its log end, which bounds what is read; what is unsafe.

A broker reads broker.conf once, at its start. A file that was changed later says what the next start brings. Its index
files say what it does now: the newest one's header grows with every key. What is unsafe is only said: it keeps the next
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
import os
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
from indexd.config import BrokerFacts, Config
from indexd.config.load import DEFAULT, index_key, read_broker_conf, writes_index
from indexd.config.serving import is_peer, split_address
from indexd.config.units import RemotePath, printable
from indexd.errors import DiskError, IndexdError, UsageError
from indexd.serve.remoting.command import FrameError, RemotingCommand, decode_command, encode_command
from indexd.storage.disk import Disk, Stamp
from indexd.storage.lock import BrokerLock, listening, look_at_lock

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
# A JVM has not read its configuration yet when it is so young; and clocks of files are coarse.
_START_SLACK_SECONDS = 1.0
_INDEX_COUNT = struct.Struct(">36xi")
_INDEX_NAME = re.compile("[0-9]{17}", re.ASCII)
# Between the last word of a broker that ends and the end of its lock.
_ENDING_SECONDS = 0.2


class Offsets(NamedTuple):
    """The physical offsets of the broker's first message, -1 where it names none, and behind its last one."""

    begin: int
    end: int


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
        deadline, was_kept = time.monotonic() + self._timeout, self._socket is not None
        try:
            return self._ask(deadline)
        except ConnectionError as error:
            self.close()
            if was_kept:  # the broker drops one that is quiet for two minutes
                return self.offsets()
            return error.strerror or str(error)
        except TimeoutError:
            why = f"no answer within {self._timeout:g} s"
        except OSError as error:
            why = error.strerror or str(error)
        except FrameError as error:
            why = f"what listens there does not speak RocketMQ's protocol: {printable(str(error))}"
        except ValueError as error:
            why = str(error)
        self.close()
        return why

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


class IndexingWatch:
    """Looks at broker.conf when it changes, and at the broker's newest index file each time."""

    def __init__(self, config: Config, disk: Disk) -> None:
        self._config, self._disk, self._path = config, disk, config.store.broker_conf
        self._name = printable(str(self._path))
        self._stamp: Stamp | None = None
        self._problem: str | None = None
        #: What broker.conf says, and what held for the broker of this pid.
        self._facts: BrokerFacts | None = None
        self._held: tuple[int | None, BrokerFacts] | None = None
        self._newest: tuple[str, int] | None = None
        self._grown_by: int | None = None
        self._read()

    def look(self, lock: BrokerLock) -> tuple[bool | None, str, list[str]]:
        """Whether the broker that ``lock`` is about, or the next one that starts here, indexes (None: it cannot be
        told), what that was concluded from, and what may go wrong.
        """
        self._read()
        on, why = self._by_conf(lock)
        if self._has_grown(lock):
            on, why = True, "its newest index file grows"
        return on, why, self._unsafe(on, why)

    # broker.conf.

    def _read(self) -> None:
        # What was read before stays when it cannot be read any more.
        if self._path is None:
            return
        try:
            stamp = self._disk.stamp(self._path)
            if stamp != self._stamp or self._problem is not None:
                # Keys that something stronger than broker.conf has set are not the file's.
                weaker = (DEFAULT, f"{self._name} line ")
                taken = {key for key, source in self._config.provenance.items() if not source.startswith(weaker)}
                _, self._facts = read_broker_conf(self._path, "broker_conf", taken, self._config.index.flavour)
                self._stamp, self._problem = stamp, None
        except (DiskError, UsageError) as error:
            self._problem = str(error)

    def _by_conf(self, lock: BrokerLock) -> tuple[bool | None, str]:
        facts, why, flavour = self._facts, f"by {self._name}", self._config.index.flavour
        if facts is None or self._stamp is None:
            return None, self._problem or "no broker.conf is given"
        if lock.alive is False:
            self._held = None
            return writes_index(facts, flavour), f"{why}, when it starts"
        started = started_at(lock.pid)
        if started is not None and self._stamp.mtime_ns / 1e9 > started + _START_SLACK_SECONDS:
            if self._held is None or self._held[0] != lock.pid:
                return None, f"{self._name} was changed after the broker's start, and what it said then is not known"
            facts, why = self._held[1], f"{why} as it was at the broker's start"
        self._held = (lock.pid, facts)
        return writes_index(facts, flavour), why

    # Its index files.

    def _has_grown(self, lock: BrokerLock) -> bool:
        # Deleting the newest is no growth: a broker that starts after a crash does.
        if not lock.alive:
            self._newest = self._grown_by = None
            return False
        newest, before = self._look_at_newest(), self._newest
        self._newest, owner = newest, lock.pid or 0
        if newest is not None and before is not None and newest > before:
            self._grown_by = owner
        elif self._grown_by != owner:
            self._grown_by = None
        return self._grown_by is not None

    def _look_at_newest(self) -> tuple[str, int] | None:
        # (name, entries) of the newest file.
        store = self._config.store.store
        if store is None:
            return None
        try:
            names = [name for name, _ in self._disk.list_dir(store / "index") if _INDEX_NAME.fullmatch(name)]
            if not names:
                return "", 0
            with self._disk.open_read(store / "index" / names[-1]) as file:
                header = file.pread(_INDEX_COUNT.size, 0)
        except DiskError as error:
            return ("", 0) if error.is_missing else None
        return names[-1], _INDEX_COUNT.unpack(header)[0] if len(header) == _INDEX_COUNT.size else 0

    # What may go wrong.

    def _unsafe(self, on: bool | None, why: str) -> list[str]:
        texts = [] if self._problem is None else [f"{self._problem}: the next start of indexd is refused"]
        flavour, facts, name = self._config.index.flavour, self._facts, self._name
        if self._config.store.run_mode == "offload":
            remedy = f"set {index_key(flavour)}=false in {name} and restart the broker, or run in mode shadow"
            if on:
                texts.append(f"mode offload, but the broker writes an index of its own ({why}): {remedy}")
            elif facts is not None and writes_index(facts, flavour):
                texts.append(f"mode offload, but the broker indexes again from its next start on ({name}): {remedy}")
            elif on is None:
                texts.append(f"mode offload, and it is not known whether the broker indexes: {why}")
        return texts


def started_at(pid: int | None) -> float | None:
    """When a process of this machine began, in seconds since the epoch; None when it cannot be seen."""
    if pid is None:
        return None
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()
    except OSError:
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


class BrokerWatch:
    """Looks when it is told to, from one thread."""

    def __init__(self, config: Config, disk: Disk) -> None:
        self._look_at_lock = partial(_lock_of, config.store.store)
        self._indexing = IndexingWatch(config, disk)
        address, interval = config.node.broker_address, config.node.broker_check_interval
        finder = BrokerFinder(config, self._look_at_lock, partial(list_log, config, disk))
        #: For the reader.
        self.log_limit = BrokerLimit(finder if address is None else address, retry_max=interval)

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
