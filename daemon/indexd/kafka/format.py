"""Kafka's log directories: the heads of record batches, partitions and segments, the lock, and what reports share.

Record batches, as far as the indexes stand on them. Magic 2, since Kafka 0.11; big-endian, 61 bytes and the records
(never looked into: they may be compressed)::

     0 baseOffset         int64   offset of the first record, kept when compaction removes records
     8 batchLength        int32   bytes behind this field: the whole batch is 12 more
    12 partitionLeaderEpoch int32
    16 magic              int8    2
    17 crc                uint32  CRC-32C of everything from attributes to the end; not of the fields before
    21 attributes         int16   compression, timestamp type (bit 3: append time), transactional, control
    23 lastOffsetDelta    int32   last offset = baseOffset + this, kept when compaction removes records
    27 baseTimestamp      int64
    35 maxTimestamp       int64   the largest timestamp of a record, or the append time; ms, -1 if there is none
    43 producerId int64, 51 producerEpoch int16, 53 baseSequence int32
    57 recordsCount       int32   0 where compaction removed them all

Magic 0 and 1, before: one record, or a compressed set of records in a wrapper that looks like one::

     0 offset             int64   of a wrapper: the last one in it
     8 size               int32   bytes behind this field: the whole record is 12 more
    12 crc                uint32  CRC-32 of everything from magic to the end
    16 magic              int8    0 or 1
    17 attributes         int8
    18 timestamp          int64   magic 1 only; of a wrapper: the largest in it. The key and the value follow

Kafka writes it: the leader's and the followers' append, the cleaner, recovery's cut. A crash leaves half a batch at the
end or, where logs are preallocated, zeros. A segment is at most 2 GiB, its positions are 32 bits.

A log directory::

    LOGDIR/.lock                       locked by fcntl while a broker runs
    LOGDIR/.kafka_cleanshutdown        there after a clean stop, until the next start
    LOGDIR/TOPIC-N/BASE.log            BASE: 20 digits, the lower bound of the offsets in it
    LOGDIR/TOPIC-N/BASE.index, BASE.timeindex
    LOGDIR/TOPIC-N/...                 .txnindex, .snapshot, .checkpoint, leader-epoch-checkpoint, partition.metadata,
                                       and whatever ends in .deleted, .cleaned or .swap: known, and left alone

``.lock`` is held by an fcntl lock over the whole file as long as a broker runs. A check only asks whether somebody
holds it. It must not hold it itself: a broker that is started meanwhile would end because of it. Whoever changes files
holds it, and a broker that is started then ends with a clear message. The file is never made here: a copied directory
has none, and nobody else that could be met.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from indexd.errors import BusyError, UsageError
from indexd.findings import Finding, Findings
from indexd.sparse.format import INT32_MAX, INT64_MAX, PASSING_SUFFIXES
from indexd.storage.disk import Disk

MAGIC_V2 = 2
NO_TIMESTAMP = -1
# A batch is so many bytes longer than its length field says.
LOG_OVERHEAD = 12
# Kafka reads no head where so few bytes are left.
HEAD_SIZE_UP_TO_MAGIC = 17
HEAD_SIZE_V2 = 61
RECORD_OVERHEAD_V0 = 14
# A log is opened by Kafka only up to here: its positions are int32.
LOG_SIZE_MAX = INT32_MAX
LOCK_NAME = ".lock"
_SEGMENT_FILE = re.compile(r"([0-9]{20})\.(log|index|timeindex)")


class WalkEnd(IntEnum):
    """How a walk along a log ended, and what is behind the last batch."""

    END = 0  # nothing
    HALF = 1  # the beginning of a batch, or too little for one
    CORRUPT = 2  # no batch, and nothing that says where the next one begins
    ZEROS = 3  # zeros to the end of the file: preallocated, or lost with the page cache


class Fault(IntEnum):
    """What is wrong with a batch whose length leads to the next one all the same."""

    NONE = 0
    CRC = 1
    MAGIC = 2
    SIZE = 3  # too short for a batch of its magic


@dataclass(slots=True)
class KafkaReport:
    """What a pass over partitions has found: ``findings`` do not hold, or could not be rebuilt; --json calls them
    ``name``. ``notes`` are worth knowing and not wrong, or could not be asked. ``figures``, ``rows``: for --json.
    """

    partitions: int
    name: str
    figures: dict[str, int]
    findings: Findings = field(default_factory=Findings)
    notes: list[Finding] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, file: str, what: str, text: str) -> None:
        """One more note."""
        self.notes.append(Finding(file, 0, what, text))

    def to_json(self) -> dict[str, Any]:
        """The last line of ``--json``."""
        return {
            "kind": "summary",
            "partitions": self.partitions,
            **self.figures,
            "seconds": round(self.seconds, 3),
            self.name: len(self.findings),
            "counts": dict(sorted(self.findings.counts.items())),
            "notes": len(self.notes),
        }


@dataclass(frozen=True, slots=True)
class KafkaSegment:
    """One ``.log``, and where its two indexes are or would be."""

    base: int
    log: Path
    index: Path
    time_index: Path


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition's directory. ``name`` is what to call it, "" if it is the directory that was asked for.

    A broker appends to the last of the ``segments``. ``orphans`` are indexes without a log, ``passing`` files of a
    deletion, a cleaning or a swap that has not ended.
    """

    path: Path
    name: str
    segments: tuple[KafkaSegment, ...]
    orphans: tuple[str, ...]
    passing: tuple[str, ...]
    was_stopped_cleanly: bool

    def label(self, path: Path) -> str:
        """What to call one of its files: a path relative to the directory that was asked for."""
        return f"{self.name}/{path.name}" if self.name else path.name

    def note_passing(self, report: KafkaReport) -> None:
        """Say which files are left alone because a broker's next start removes or renames them."""
        for name in self.passing:
            report.note(self.label(self.path / name), "left_alone", "a deletion, cleaning or swap that has not ended")


def find_partitions(disk: Disk, directory: Path) -> list[Partition]:
    """The partition that ``directory`` is, or all that lie in it, by name; UsageError if it is neither."""
    hint = "give a partition's directory, or a Kafka log directory"
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", hint)
    if (own := _partition(disk, directory, "", _log_directories(directory))) is not None:
        return [own]
    folders = [directory / name for name in disk.list_dirs(directory) if not name.endswith("-delete")]
    found = [one for path in folders if (one := _partition(disk, path, path.name, [directory])) is not None]
    if not found:
        raise UsageError(f"{directory} holds no segment of Kafka's, and no partition", hint)
    return found


def log_bytes(disk: Disk, partitions: list[Partition]) -> int:
    """The size of all their logs."""
    return sum(disk.stamp(segment.log).size for partition in partitions for segment in partition.segments)


def lock_paths(disk: Disk, directory: Path) -> list[Path]:
    """The lock files of the log directories that ``directory`` is or belongs to, as far as there are any."""
    is_partition = _partition(disk, directory, "", []) is not None
    places = _log_directories(directory) if is_partition else [directory]
    return [place / LOCK_NAME for place in places if disk.exists(place / LOCK_NAME)]


def _log_directories(partition: Path) -> list[Path]:
    # Where the log directory of a partition may be: its parent as named, and as it is once links are followed.
    return list(dict.fromkeys((partition.absolute().parent, partition.resolve().parent)))


def _partition(disk: Disk, path: Path, name: str, log_directories: list[Path]) -> Partition | None:
    names = list(disk.stamps(path))
    files = {match[0]: match for match in map(_SEGMENT_FILE.fullmatch, names) if match and int(match[1]) <= INT64_MAX}
    bases = sorted(match[1] for match in files.values() if match[2] == "log")
    orphans = sorted(name for name, match in files.items() if match[1] not in bases)
    if not bases and not orphans:
        return None
    kinds = ("log", "index", "timeindex")
    segments = [KafkaSegment(int(base), *(path / f"{base}.{kind}" for kind in kinds)) for base in bases]
    return Partition(
        path,
        name,
        tuple(segments),
        tuple(orphans),
        tuple(file for file in names if file.endswith(PASSING_SUFFIXES)),
        any(disk.exists(place / ".kafka_cleanshutdown") for place in log_directories),
    )


# struct flock of Linux on 64-bit machines: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")
_HINT = "stop the broker first: a partition can only be looked at while nobody writes it"


def refuse_while_locked(disk: Disk, directory: Path) -> None:
    """BusyError if another process holds the lock of the log directory that ``directory`` is or belongs to."""
    for path in lock_paths(disk, directory):
        with disk.open_read(path) as file:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(file.fileno(), fcntl.F_GETLK, asked))
        if kind != fcntl.F_UNLCK:
            owner = f"process {pid}" if pid > 0 else "another process"
            raise BusyError(f"{path} is locked by {owner}", _HINT)


@contextmanager
def lock_log_directory(disk: Disk, directory: Path) -> Iterator[None]:
    """Hold the lock itself; BusyError if another process holds it."""
    refuse_while_locked(disk, directory)
    with ExitStack() as files:
        for path in lock_paths(disk, directory):
            file = files.enter_context(disk.open_write(path))
            try:
                fcntl.lockf(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                raise BusyError(f"{path} is locked by another process", _HINT) from None
        yield
