"""What lies in a Kafka log directory: partitions, and the segments of each with the files that belong to them.

::

    LOGDIR/.lock                       locked by fcntl while a broker runs
    LOGDIR/.kafka_cleanshutdown        there after a clean stop, until the next start
    LOGDIR/TOPIC-N/BASE.log            BASE: 20 digits, the lower bound of the offsets in it
    LOGDIR/TOPIC-N/BASE.index, BASE.timeindex
    LOGDIR/TOPIC-N/...                 .txnindex, .snapshot, .checkpoint, leader-epoch-checkpoint, partition.metadata,
                                       and whatever ends in .deleted, .cleaned or .swap: known, and left alone
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from indexd.errors import DiskError, UsageError
from indexd.kafka.format import LOG_SUFFIX
from indexd.sparse.format import (
    INT64_MAX,
    NAME_DIGITS,
    OFFSET_SUFFIX,
    PASSING_SUFFIXES,
    TIME_SUFFIX,
    index_name,
    time_index_name,
)
from indexd.storage.disk import Disk

LOCK_NAME = ".lock"
CLEAN_STOP_NAME = ".kafka_cleanshutdown"
_TO_BE_REMOVED = "-delete"


@dataclass(frozen=True, slots=True)
class Segment:
    """One ``.log`` and what stands beside it. ``is_last``: the partition's newest, which a broker appends to."""

    directory: Path
    base: int
    is_last: bool
    has_index: bool
    has_time_index: bool

    @property
    def log(self) -> Path:
        """The file of batches."""
        return self.directory / f"{self.base:0{NAME_DIGITS}d}{LOG_SUFFIX}"

    @property
    def index(self) -> Path:
        """The OffsetIndex, there or not."""
        return self.directory / index_name(self.base)

    @property
    def time_index(self) -> Path:
        """The TimeIndex, there or not."""
        return self.directory / time_index_name(self.base)


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition's directory. ``name`` is what to call it, "" if it is the directory that was asked for.

    ``orphans`` are indexes without a log, ``passing`` files of a deletion, a cleaning or a swap that has not ended.
    """

    path: Path
    name: str
    segments: tuple[Segment, ...]
    orphans: tuple[str, ...]
    passing: tuple[str, ...]
    was_stopped_cleanly: bool

    def label(self, path: Path) -> str:
        """What to call one of its files: a path relative to the directory that was asked for."""
        return f"{self.name}/{path.name}" if self.name else path.name


def find_partitions(disk: Disk, directory: Path) -> list[Partition]:
    """The partition that ``directory`` is, or all that lie in it, by name; UsageError if it is neither."""
    if not disk.exists(directory):
        raise UsageError(f"there is nothing at {directory}", "check the path")
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", "give a partition's directory, or a Kafka log directory")
    own = _partition(disk, directory, "", _log_directories(directory))
    if own is not None:
        return [own]
    found = []
    for path in _subdirectories(directory):
        partition = None if path.name.endswith(_TO_BE_REMOVED) else _partition(disk, path, path.name, [directory])
        if partition is not None:
            found.append(partition)
    if not found:
        raise UsageError(
            f"{directory} holds no segment of Kafka's, and no partition",
            "give a partition's directory, or a Kafka log directory",
        )
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
    """Where the log directory of a partition may be: its parent as named, and as it is once links are followed."""
    return list(dict.fromkeys((partition.absolute().parent, partition.resolve().parent)))


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return sorted(path for path in directory.iterdir() if path.is_dir())
    except OSError as error:
        raise DiskError("list", directory, error) from error


def _base(name: str, suffix: str) -> int | None:
    digits = name.removesuffix(suffix)
    is_base = name.endswith(suffix) and len(digits) == NAME_DIGITS and digits.isascii() and digits.isdecimal()
    return int(digits) if is_base and int(digits) <= INT64_MAX else None


def _partition(disk: Disk, path: Path, name: str, log_directories: list[Path]) -> Partition | None:
    names = list(disk.stamps(path))
    bases = {
        suffix: {base for file in names if (base := _base(file, suffix)) is not None}
        for suffix in (LOG_SUFFIX, OFFSET_SUFFIX, TIME_SUFFIX)
    }
    logs = sorted(bases[LOG_SUFFIX])
    orphans = [index_name(base) for base in bases[OFFSET_SUFFIX] - bases[LOG_SUFFIX]]
    orphans += [time_index_name(base) for base in bases[TIME_SUFFIX] - bases[LOG_SUFFIX]]
    if not logs and not orphans:
        return None
    segments = tuple(
        Segment(path, base, base == logs[-1], base in bases[OFFSET_SUFFIX], base in bases[TIME_SUFFIX]) for base in logs
    )
    passing = tuple(file for file in names if file.endswith(PASSING_SUFFIXES))
    was_stopped_cleanly = any(disk.exists(place / CLEAN_STOP_NAME) for place in log_directories)
    return Partition(path, name, segments, tuple(sorted(orphans)), passing, was_stopped_cleanly)
