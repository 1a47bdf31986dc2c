"""Whether the broker writes an index of its own: by broker.conf, as it was when the broker started, and by its files.

A broker reads broker.conf once, at its start. A file that was changed later says what the next start brings. Its index
files say what it does now: the newest one's header grows with every key.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from indexd.config import Config
from indexd.config.broker_conf import FACT_KEYS, INT_KEYS, TEXT_KEYS, read_broker_conf
from indexd.config.facts import BrokerFacts
from indexd.config.load import DEFAULT, index_key, writes_index
from indexd.config.units import printable
from indexd.errors import DiskError, UsageError
from indexd.storage.broker_lock import BrokerLock
from indexd.storage.disk import Disk, Stamp

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
