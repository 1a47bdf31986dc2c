"""Rebuilds both indexes of every segment as Kafka's recovery makes them, byte for byte (spec kafka-index 8).

Recovery starts with empty indexes and no timestamp known, walks from position 0 by the sparse indexes' kernel, and
ends with the largest timestamp as the last time entry; both files are trimmed to their entries. The log is never
changed: recovery would cut it where it cannot be read on; here the indexes are built up to there and the report says
so. A file that already has the right bytes is left alone; any other is replaced by a rename, so that a reader finds the
old or the new one, whole; the new one gets the owner and the mode of the segment's log.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.errors import CorruptDataError, DiskError, UsageError
from indexd.findings import Findings
from indexd.kafka.format import (
    LOG_SIZE_MAX,
    Fault,
    Note,
    OnProgress,
    Outcome,
    Partition,
    Progress,
    Segment,
    find_partitions,
    lock_log_directory,
    log_bytes,
    refuse_while_locked,
)
from indexd.kafka.records import Batches, LogWalk
from indexd.sparse.format import INT32_MAX, OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE
from indexd.sparse.kernel import (
    OFFSET_ENTRY_TYPE,
    TIME_ENTRY_TYPE,
    final_time_entry,
    new_state,
    pack_entries,
    segment_entries,
)
from indexd.storage.disk import Disk

_ENDS_AS_WELL = "Kafka's recovery ends here as well"


def refuse_interval(interval: int) -> None:
    """UsageError for a number that index.interval.bytes cannot have."""
    if not 0 <= interval <= INT32_MAX:
        raise UsageError(f"--interval {interval} is not index.interval.bytes: 0 to {INT32_MAX}")


class Recovered:
    """What recovery makes of a segment: ``put`` its sound batches from the first on, then ``finish``.

    ``index`` and ``time_index`` are the bytes of the files, of ``end`` bytes and ``batches`` batches of the log.
    CorruptDataError where Kafka's own recovery fails: offsets that do not fit the base, entries whose offsets do not
    rise. UsageError when an index would be longer than ``max_index_size`` bytes.
    """

    def __init__(self, base: int, interval: int, max_index_size: int) -> None:
        self.index = b""
        self.time_index = b""
        self.end = self.batches = 0
        self._base = base
        self._interval = interval
        self._max_index_size = max_index_size
        self._state = new_state()
        self._last = (-1, 0)  # the last offset entry's offset, and the last time entry's

    @property
    def offset_entries(self) -> int:
        """Of ``index``."""
        return len(self.index) // OFFSET_ENTRY_SIZE

    @property
    def time_entries(self) -> int:
        """Of ``time_index``."""
        return len(self.time_index) // TIME_ENTRY_SIZE

    def put(self, batches: Batches) -> None:
        """The next batches, one at least."""
        relative = batches.last_offset - self._base
        outside = np.flatnonzero((relative < 0) | (relative > INT32_MAX))
        if len(outside):
            row = int(outside[0])
            raise CorruptDataError(
                f"the batch at byte {batches.position[row]} ends with offset {batches.last_offset[row]}, which cannot "
                f"be held relative to the segment's base {self._base}",
                _ENDS_AS_WELL,
            )
        rows = len(batches)
        offset_entries = np.empty((rows, 2), dtype=np.int64)
        time_entries = np.empty((rows, 2), dtype=np.int64)
        _, count, time_count = segment_entries(
            batches.position, batches.size, relative, batches.max_timestamp, 0, rows, self._interval, self._state,
            offset_entries, time_entries,
        )  # fmt: skip
        self._add(offset_entries[: int(count)], time_entries[: int(time_count)])
        # The last slot is kept for the entry that recovery ends with.
        if max(len(self.index), len(self.time_index) + TIME_ENTRY_SIZE) > self._max_index_size:
            raise UsageError(
                f"the segment with base {self._base} needs longer indexes than the segment.index.bytes that was given",
                "give --max-index-size as the broker has it, and --interval as well",
            )
        self.end, self.batches = int(batches.position[-1] + batches.size[-1]), self.batches + rows

    def finish(self) -> None:
        """The final time entry, which may take the last slot."""
        final = final_time_entry(self._state)
        if final is not None:
            self._add(np.empty((0, 2), dtype=np.int64), np.array([final], dtype=np.int64))

    def _add(self, offset_entries: NDArray[np.int64], time_entries: NDArray[np.int64]) -> None:
        last, last_time = self._last
        for before, offsets, rise_min in ((last, offset_entries[:, 0], 1), (last_time, time_entries[:, 1], 0)):
            row = np.flatnonzero(np.diff(offsets, prepend=before) < rise_min)
            if len(row):
                offset = self._base + int(offsets[row[0]])
                raise CorruptDataError(f"the offsets of the batches do not rise at offset {offset}", _ENDS_AS_WELL)
        self._last = (
            int(offset_entries[-1, 0]) if len(offset_entries) else last,
            int(time_entries[-1, 1]) if len(time_entries) else last_time,
        )
        self.index += pack_entries(offset_entries, OFFSET_ENTRY_TYPE)
        self.time_index += pack_entries(time_entries, TIME_ENTRY_TYPE)


def recover_entries(walk: LogWalk, base: int, interval: int, max_index_size: int) -> Recovered:
    """Walk a segment as recovery does: to the first batch with a fault, which recovery cuts off with all behind it."""
    made = Recovered(base, interval, max_index_size)
    for batches in walk:
        faulty = np.flatnonzero(batches.fault != Fault.NONE)
        sound = batches.first(int(faulty[0])) if len(faulty) else batches
        if len(sound):
            made.put(sound)
        if len(faulty):
            break
    made.finish()
    return made


#: Kafka's defaults of index.interval.bytes and segment.index.bytes.
INTERVAL = 4096
MAX_INDEX_SIZE = 10 << 20


class RebuiltSegment(NamedTuple):
    """One segment: its log's label, how far it was read, the entries made, and whether a file had to be written."""

    file: str
    read_bytes: int
    log_bytes: int
    batches: int
    offset_entries: int
    time_entries: int
    is_changed: bool

    def to_json(self) -> dict[str, Any]:
        """Its line of ``--json``, without its kind."""
        return {
            "file": self.file,
            "readBytes": self.read_bytes,
            "logBytes": self.log_bytes,
            "batches": self.batches,
            "offsetEntries": self.offset_entries,
            "timeEntries": self.time_entries,
            "changed": self.is_changed,
        }


@dataclass(slots=True)
class RebuildReport:
    """``problems`` are what could not be rebuilt, or not to the log's end; the rest is as Kafka's recovery makes it."""

    problems: Findings = field(default_factory=Findings)
    notes: list[Note] = field(default_factory=list)
    segments: list[RebuiltSegment] = field(default_factory=list)
    partitions: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The summary: the last line of ``--json``."""
        return {
            "kind": "summary",
            "partitions": self.partitions,
            "segments": len(self.segments),
            "changed": sum(segment.is_changed for segment in self.segments),
            "bytes": sum(segment.read_bytes for segment in self.segments),
            "seconds": round(self.seconds, 3),
            "problems": len(self.problems),
            "counts": dict(sorted(self.problems.counts.items())),
            "notes": len(self.notes),
        }


def rebuild(
    directory: Path,
    disk: Disk,
    *,
    out: Path | None = None,
    interval: int = INTERVAL,
    max_index_size: int = MAX_INDEX_SIZE,
    on_progress: OnProgress | None = None,
) -> RebuildReport:
    """Rebuild the partition that ``directory`` is, or all partitions of the log directory that it is.

    In place the log directory is locked meanwhile; with ``out`` the files are written there, a directory for each
    partition of a log directory, and nothing is changed in ``directory``. BusyError while a broker holds the lock,
    UsageError for a wrong directory or number, or a segment that needs longer indexes than ``max_index_size``.
    """
    refuse_interval(interval)
    if not TIME_ENTRY_SIZE <= max_index_size <= INT32_MAX:
        raise UsageError(f"--max-index-size {max_index_size} is not segment.index.bytes: 12 to {INT32_MAX}")
    started = time.monotonic()
    partitions = find_partitions(disk, directory)
    report = RebuildReport(partitions=len(partitions))
    with ExitStack() as stack:
        if out is None:
            stack.enter_context(lock_log_directory(disk, directory))
            partitions = find_partitions(disk, directory)
        else:
            _refuse_out(out, partitions)
            refuse_while_locked(disk, directory)
        progress = Progress(on_progress, log_bytes(disk, partitions))
        for partition in partitions:
            report.notes += partition.passing_notes()
            report.notes += [
                Note(partition.label(partition.path / name), "orphan", "an index without a log is left as it is")
                for name in partition.orphans
            ]
            target = partition.path if out is None else out / partition.name
            for segment in partition.segments:
                _rebuild_segment(disk, partition, segment, target, report, progress, interval, max_index_size)
    if out is not None:
        refuse_while_locked(disk, directory)
    report.seconds = time.monotonic() - started
    return report


def _refuse_out(out: Path, partitions: list[Partition]) -> None:
    for partition in partitions:
        if (out / partition.name).resolve() == partition.path.resolve():
            raise UsageError(f"--out {out} is where the segments are", "leave it out to rebuild in place")


def _rebuild_segment(
    disk: Disk,
    partition: Partition,
    segment: Segment,
    target: Path,
    report: RebuildReport,
    progress: Progress,
    interval: int,
    max_index_size: int,
) -> None:
    # Builds, writes what differs into the folder ``target``, and puts into the report what came of it.
    label, problems = partition.label(segment.log), Findings()
    try:
        with disk.open_read(segment.log) as file:
            walk = LogWalk(file, segment.base, progress.within)
            if walk.log_size > LOG_SIZE_MAX:
                raise CorruptDataError(f"{walk.log_size} bytes are more than positions of 32 bits reach")
            made = recover_entries(walk, segment.base, interval, max_index_size)
            progress.finish(walk.log_size)
    except CorruptDataError as error:
        problems.add(label, 0, "refused", f"its indexes are left as they are: {error}")
    else:
        left = walk.log_size - made.end
        if left and walk.outcome == Outcome.ZEROS and made.end == walk.end and segment.is_last:
            report.notes.append(Note(label, "not_closed", f"{left} zero bytes, as of a preallocated log"))
        elif left:
            text = f"built up to here; the {left} bytes behind are no whole batches, and Kafka's recovery cuts them off"
            problems.add(label, made.end, "log_not_whole", text)
        files = ((target / segment.index.name, made.index), (target / segment.time_index.name, made.time_index))
        changed = [_write(disk, segment, path, data) for path, data in files]
        counts = (made.batches, made.offset_entries, made.time_entries)
        report.segments.append(RebuiltSegment(label, made.end, walk.log_size, *counts, any(changed)))
    report.problems.merge(problems)


def _write(disk: Disk, segment: Segment, path: Path, data: bytes) -> bool:
    # Whether the file had to be written.
    is_in_place = path.parent == segment.directory
    if disk.exists(path):
        if disk.stamp(path).size == len(data) and disk.read(path) == data:
            return False
    elif not is_in_place:
        disk.make_dir(path.parent)
    if is_in_place:
        # With the log's owner and mode: the broker must be able to write it, whoever runs this.
        _refuse_owner(segment.log)
    disk.write_atomically(path, data, like=segment.log if is_in_place else None)
    return True


def _refuse_owner(log: Path) -> None:
    if os.geteuid() not in (0, log.stat().st_uid):
        error = PermissionError(errno.EPERM, "its log belongs to another user")
        raise DiskError("replace an index of", log, error)
