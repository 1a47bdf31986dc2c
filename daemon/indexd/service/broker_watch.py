"""Whether the broker writes an index of its own: by broker.conf, as it was when the broker started, and by its files.

A broker reads broker.conf once, at its start. A file that was changed later says what the next start brings. Its index
files say what it does now: the newest one's header grows with every key.

BrokerWatch: is the broker alive, does it index itself, how far does its log go, and what would be unsafe.

It only says so. What is unsafe keeps the next start from going on (exit 3), never a running daemon: our files are our
own, so a broker that indexes as well does double work and no harm, while a stop would leave the hole that mode offload
is there to avoid.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from indexd.commitlog.segments import SegmentList, list_segments
from indexd.config import Config
from indexd.config.facts import BrokerFacts
from indexd.config.load import DEFAULT, FACT_KEYS, INT_KEYS, TEXT_KEYS, index_key, read_broker_conf, writes_index
from indexd.config.units import RemotePath, printable
from indexd.errors import DiskError, UsageError
from indexd.service.broker_limit import NOT_ASKED, BrokerFinder, BrokerLimit
from indexd.storage.disk import Disk, Stamp
from indexd.storage.lock import BrokerLock, look_at_lock

# A JVM has not read its configuration yet when it is so young; and clocks of files are coarse.
_START_SLACK_SECONDS = 1.0
_INDEX_COUNT = struct.Struct(">36xi")
_NAME_DIGITS = 17


@dataclass(frozen=True, slots=True)
class Indexing:
    """``on`` is None when it cannot be told; ``why`` is what it was concluded from, ``unsafe`` what may go wrong."""

    on: bool | None
    why: str
    unsafe: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Conf:
    values: Mapping[str, object]
    facts: BrokerFacts
    changed: float


class IndexingWatch:
    """Looks at broker.conf when it changes, and at the broker's newest index file each time."""

    def __init__(self, config: Config, disk: Disk) -> None:
        self._config = config
        self._disk = disk
        self._path = config.store.broker_conf
        self._stamp: Stamp | None = None
        self._problem: str | None = None
        self._conf: _Conf | None = None
        self._read()
        self._first: _Conf | None = self._conf
        #: What held for the broker of this pid.
        self._held: tuple[int | None, BrokerFacts] | None = None
        self._newest: tuple[str, int] | None = None
        self._grown_by: int | None = None

    def look(self, lock: BrokerLock) -> Indexing:
        """What is known now of the broker that ``lock`` is about, or of the next one that starts here."""
        self._read()
        on, why = self._by_conf(lock)
        if self._has_grown(lock):
            on, why = True, "its newest index file grows"
        return Indexing(on, why, tuple(self._unsafe(on, why)))

    # broker.conf.

    def _read(self) -> None:
        # What was read before stays when it cannot be read any more.
        if self._path is None:
            return
        try:
            stamp = self._disk.stamp(self._path)
            if stamp == self._stamp and self._problem is None:
                return
            values, facts = read_broker_conf(self._path, "broker_conf", self._taken(), self._config.index.flavour)
        except (DiskError, UsageError) as error:
            self._problem = str(error)
            return
        self._stamp, self._problem = stamp, None
        self._conf = _Conf({key: given.value for key, given in values.items()}, facts, stamp.mtime_ns / 1e9)

    def _taken(self) -> set[str]:
        # Keys that something stronger than broker.conf has set.
        mine = f"{printable(str(self._path))} line "
        sources = self._config.provenance.items()
        return {key for key, source in sources if not source.startswith((DEFAULT, mine))}

    def _by_conf(self, lock: BrokerLock) -> tuple[bool | None, str]:
        conf, name = self._conf, printable(str(self._path))
        if conf is None:
            return None, self._problem or "no broker.conf is given"
        facts, why = conf.facts, f"by {name}"
        if lock.alive is False:
            self._held = None
            return writes_index(facts, self._config.index.flavour), f"{why}, when it starts"
        started = started_at(lock.pid)
        if started is not None and conf.changed > started + _START_SLACK_SECONDS:
            if self._held is None or self._held[0] != lock.pid:
                return None, f"{name} was changed after the broker's start, and what it said then is not known"
            facts, why = self._held[1], f"by {name} as it was at the broker's start"
        self._held = (lock.pid, facts)
        return writes_index(facts, self._config.index.flavour), why

    # Its index files.

    def _has_grown(self, lock: BrokerLock) -> bool:
        # Deleting the newest is no growth: a broker that starts after a crash does.
        if not lock.alive:
            self._newest = self._grown_by = None
            return False
        newest, before = self._look_at_newest(), self._newest
        self._newest = newest
        owner = lock.pid or 0
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
            names = [name for name, _ in self._disk.list_dir(store / "index") if _is_index_name(name)]
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
        conf, first, flavour = self._conf, self._first, self._config.index.flavour
        key, name = index_key(flavour), printable(str(self._path))
        if self._config.store.run_mode == "offload":
            remedy = f"set {key}=false in {name} and restart the broker, or run in mode shadow"
            if on:
                texts.append(f"mode offload, but the broker writes an index of its own ({why}): {remedy}")
            elif conf is not None and writes_index(conf.facts, flavour):
                texts.append(f"mode offload, but the broker indexes again from its next start on ({name}): {remedy}")
            elif on is None:
                texts.append(f"mode offload, and it is not known whether the broker indexes: {why}")
        if conf is None or first is None:
            return texts
        java = {ours: theirs for theirs, ours in (TEXT_KEYS | INT_KEYS).items()}
        for ours in sorted(conf.values.keys() | first.values.keys()):
            if conf.values.get(ours) != first.values.get(ours):
                value = printable(str(conf.values.get(ours, "its default")))[:100]
                texts.append(f"{name} now says {java[ours]}={value}: restart indexd when the broker restarts")
        if conf.facts.enable_dledger_commit_log and not first.facts.enable_dledger_commit_log:
            dledger = next(theirs for theirs, ours in FACT_KEYS.items() if ours == "enable_dledger_commit_log")
            texts.append(f"{name} now says {dledger}=true: such a log is not read")
        return texts


def _is_index_name(name: str) -> bool:
    return len(name) == _NAME_DIGITS and name.isascii() and name.isdigit()


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


# While nobody holds the lock, a broker that loads its store is looked for so often.
_PROCESSES_SECONDS = 60.0
# Between the last word of a broker that ends and the end of its lock.
_ENDING_SECONDS = 0.2


class BrokerWatch:
    """Looks when it is told to, from one thread."""

    def __init__(self, config: Config, disk: Disk) -> None:
        self._store = config.store.store
        # What a look into all processes found when nobody held the lock, and when the next one is due.
        self._nobody = BrokerLock(False, None, "none")
        self._processes_due = 0.0
        self._indexing = IndexingWatch(config, disk)
        address, interval = config.node.broker_address, config.node.broker_check_interval
        finder = BrokerFinder(config, self._look_at_lock, partial(list_log, config, disk))
        #: For the reader.
        self.log_limit = BrokerLimit(finder if address is None else address, retry_max=interval)

    def look(self) -> dict[str, Any]:
        """What ``board.broker`` holds; never raises, takes some two seconds at most.

        ``alive`` with ``pid``, ``how`` and ``why`` as BrokerLock has them; ``indexing`` and ``indexingWhy`` as Indexing
        has them; ``address``, ``answers``, ``silence`` and ``maxOffset``: as it was asked last, None before that;
        ``unsafe``: texts, each naming the remedy.
        """
        lock = self._look_at_lock()
        indexing = self._indexing.look(lock)
        limit, unsafe = self.log_limit, list(indexing.unsafe)
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
            "indexing": indexing.on,
            "indexingWhy": indexing.why,
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

    def _look_at_lock(self) -> BrokerLock:
        if self._store is not None and time.monotonic() < self._processes_due:
            lock = look_at_lock(self._store / "lock", proc=None)
            return self._nobody if lock.how == "none" else lock
        lock = _lock_of(self._store)
        if lock.how in ("none", "unknown"):
            self._nobody, self._processes_due = lock, time.monotonic() + _PROCESSES_SECONDS
        return lock


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
