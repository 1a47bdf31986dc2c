"""rebuild: both indexes of every segment as Kafka's recovery makes them, byte for byte (spec kafka-index 8).

The log is never changed. Recovery would cut it where it cannot be read on; here the indexes are built up to there and
the report says so. A file that already has the right bytes is left alone; any other is replaced by a rename, so that
a reader finds the old or the new one, whole; the new one gets the owner and the mode of the segment's log.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import ExitStack
from pathlib import Path

from indexd.errors import CorruptDataError, DiskError, UsageError
from indexd.findings import Findings
from indexd.kafka.check import Note, OnProgress, Progress, RebuildReport, RebuiltSegment, passing_notes
from indexd.kafka.format import (
    LOG_SIZE_MAX,
    LogDirectoryLock,
    Outcome,
    Partition,
    Segment,
    find_partitions,
    log_bytes,
    refuse_while_locked,
)
from indexd.kafka.records import LogWalk, Recovered, recover_entries, refuse_interval
from indexd.sparse.format import INT32_MAX, TIME_ENTRY_SIZE
from indexd.storage.disk import Disk

#: Kafka's defaults of index.interval.bytes and segment.index.bytes.
INTERVAL = 4096
MAX_INDEX_SIZE = 10 << 20


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
            stack.enter_context(LogDirectoryLock(disk, directory))
            partitions = find_partitions(disk, directory)
        else:
            _refuse_out(out, partitions)
            refuse_while_locked(disk, directory)
        progress = Progress(on_progress, log_bytes(disk, partitions))
        for partition in partitions:
            report.notes += passing_notes(partition)
            report.notes += [
                Note(partition.label(partition.path / name), "orphan", "an index without a log is left as it is")
                for name in partition.orphans
            ]
            target = partition.path if out is None else out / partition.name
            rebuilding = _PartitionRebuild(disk, partition, target, report, interval, max_index_size)
            for segment in partition.segments:
                rebuilding.run(segment, progress)
    if out is not None:
        refuse_while_locked(disk, directory)
    report.seconds = time.monotonic() - started
    return report


def _refuse_out(out: Path, partitions: list[Partition]) -> None:
    for partition in partitions:
        if (out / partition.name).resolve() == partition.path.resolve():
            raise UsageError(f"--out {out} is where the segments are", "leave it out to rebuild in place")


class _PartitionRebuild:
    """The segments of one partition, one after the other."""

    def __init__(
        self, disk: Disk, partition: Partition, target: Path, report: RebuildReport, interval: int, max_index_size: int
    ) -> None:
        self._disk = disk
        self._partition = partition
        self._target = target
        self._report = report
        self._interval = interval
        self._max_index_size = max_index_size

    def run(self, segment: Segment, progress: Progress) -> None:
        """Build, write what differs, and put into the report what came of it."""
        label = self._partition.label(segment.log)
        problems = Findings()
        try:
            with self._disk.open_read(segment.log) as file:
                walk = LogWalk(file, segment.base, progress.within)
                if walk.log_size > LOG_SIZE_MAX:
                    raise CorruptDataError(f"{walk.log_size} bytes are more than positions of 32 bits reach")
                made = recover_entries(walk, segment.base, self._interval, self._max_index_size)
                progress.finish(walk.log_size)
        except CorruptDataError as error:
            problems.add(label, 0, "refused", f"its indexes are left as they are: {error}")
        else:
            self._note_end(walk, made, label, problems, may_end_in_zeros=segment.is_last)
            changed = [
                self._write(segment, path, data)
                for path, data in ((segment.index, made.index), (segment.time_index, made.time_index))
            ]
            counts = (made.batches, made.offset_entries, made.time_entries)
            self._report.segments.append(RebuiltSegment(label, made.end, walk.log_size, *counts, any(changed)))
        self._report.problems.merge(problems)

    def _note_end(
        self, walk: LogWalk, made: Recovered, label: str, problems: Findings, *, may_end_in_zeros: bool
    ) -> None:
        left = walk.log_size - made.end
        if not left:
            return
        if walk.outcome == Outcome.ZEROS and made.end == walk.end and may_end_in_zeros:
            self._report.notes.append(Note(label, "not_closed", f"{left} zero bytes, as of a preallocated log"))
        else:
            text = f"built up to here; the {left} bytes behind are no whole batches, and Kafka's recovery cuts them off"
            problems.add(label, made.end, "log_not_whole", text)

    def _write(self, segment: Segment, path: Path, data: bytes) -> bool:
        """Whether the file had to be written."""
        target = self._target / path.name
        if self._disk.exists(target):
            if self._disk.stamp(target).size == len(data) and self._disk.read(target) == data:
                return False
        elif self._target != self._partition.path:
            self._disk.make_dir(self._target)
        if self._target == self._partition.path:
            # With the log's owner and mode: the broker must be able to write it, whoever runs this.
            _refuse_owner(segment.log)
            self._disk.write_atomically(target, data, like=segment.log)
        else:
            self._disk.write_atomically(target, data)
        return True


def _refuse_owner(log: Path) -> None:
    if os.geteuid() not in (0, log.stat().st_uid):
        error = PermissionError(errno.EPERM, "its log belongs to another user")
        raise DiskError("replace an index of", log, error)
