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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.errors import CorruptDataError, DiskError, UsageError
from indexd.kafka import kernel
from indexd.kafka.format import (
    LOG_SIZE_MAX,
    Fault,
    KafkaReport,
    KafkaSegment,
    Partition,
    WalkEnd,
    find_partitions,
    lock_log_directory,
    log_bytes,
    refuse_while_locked,
)
from indexd.kafka.records import LogWalk
from indexd.output import ProgressReporter
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

#: Kafka's defaults of index.interval.bytes and segment.index.bytes.
INTERVAL = 4096
MAX_INDEX_SIZE = 10 << 20
_ENDS_AS_WELL = "Kafka's recovery ends here as well"


@dataclass(frozen=True, slots=True)
class RecoveredSegment:
    """What recovery makes of a segment: the bytes of both files, from ``batches`` batches up to byte ``end``."""

    index: bytes
    time_index: bytes
    end: int
    batches: int


def recover_entries(walk: LogWalk, base: int, interval: int, max_index_size: int) -> RecoveredSegment:
    """Walk a segment as recovery does: to the first batch with a fault, which recovery cuts off with all behind it.

    CorruptDataError where Kafka's own recovery fails: offsets that do not fit the base, entries whose offsets do not
    rise. UsageError when an index would be longer than ``max_index_size`` bytes.
    """
    state, index, time_index = new_state(), b"", b""
    last, last_time, end, count = -1, 0, 0, 0
    for found in walk:
        faulty = np.flatnonzero(found[kernel.FAULT] != Fault.NONE)
        batches = found[:, : int(faulty[0])] if len(faulty) else found
        positions, sizes, last_offsets = batches[[kernel.POSITION, kernel.SIZE, kernel.LAST_OFFSET]]
        relative, rows = last_offsets - base, len(positions)
        if len(outside := np.flatnonzero((relative < 0) | (relative > INT32_MAX))):
            raise CorruptDataError(
                f"the batch at byte {positions[outside[0]]} ends with offset {last_offsets[outside[0]]}, "
                f"which cannot be held relative to the segment's base {base}",
                _ENDS_AS_WELL,
            )
        entries = np.empty((2, rows, 2), dtype=np.int64)
        _, *counts = segment_entries(
            positions, sizes, relative, batches[kernel.MAX_TIMESTAMP], 0, rows, interval, state, *entries
        )
        offsets, times = (entries[kind, :number] for kind, number in enumerate(counts))
        last, last_time = _rising(base, last, offsets[:, 0], 1), _rising(base, last_time, times[:, 1], 0)
        index += pack_entries(offsets, OFFSET_ENTRY_TYPE)
        time_index += pack_entries(times, TIME_ENTRY_TYPE)
        # The last slot is kept for the entry that recovery ends with.
        if max(len(index), len(time_index) + TIME_ENTRY_SIZE) > max_index_size:
            raise UsageError(
                f"the segment with base {base} needs longer indexes than the segment.index.bytes that was given",
                "give --max-index-size as the broker has it, and --interval as well",
            )
        if rows:
            end, count = int(positions[-1] + sizes[-1]), count + rows
        if len(faulty):
            break
    if (final := final_time_entry(state)) is not None:
        rows_of = np.array([final], dtype=np.int64)
        _rising(base, last_time, rows_of[:, 1], 0)
        time_index += pack_entries(rows_of, TIME_ENTRY_TYPE)
    return RecoveredSegment(index, time_index, end, count)


def _rising(base: int, before: int, offsets: NDArray[np.int64], least: int) -> int:
    # The last of them; each has to be so much more than the one before it.
    if len(rows := np.flatnonzero(np.diff(offsets, prepend=before) < least)):
        raise CorruptDataError(
            f"the offsets of the batches do not rise at offset {base + int(offsets[rows[0]])}", _ENDS_AS_WELL
        )
    return int(offsets[-1]) if len(offsets) else before


def rebuild(
    directory: Path,
    disk: Disk,
    *,
    out: Path | None = None,
    interval: int = INTERVAL,
    max_index_size: int = MAX_INDEX_SIZE,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> KafkaReport:
    """Rebuild the partition that ``directory`` is, or all partitions of the log directory that it is.

    In place the log directory is locked meanwhile; with ``out`` the files are written there, a directory for each
    partition of a log directory, and nothing is changed in ``directory``. Findings are what could not be rebuilt, or
    not to the log's end. BusyError while a broker holds the lock, UsageError for a wrong directory, or a segment that
    needs longer indexes than ``max_index_size``.
    """
    started, partitions = time.monotonic(), find_partitions(disk, directory)
    report = KafkaReport(len(partitions), "problems", {"segments": 0, "changed": 0, "bytes": 0})
    with ExitStack() as stack:
        if out is None:
            stack.enter_context(lock_log_directory(disk, directory))
            partitions = find_partitions(disk, directory)
        else:
            if any((out / partition.name).resolve() == partition.path.resolve() for partition in partitions):
                raise UsageError(f"--out {out} is where the segments are", "leave it out to rebuild in place")
            refuse_while_locked(disk, directory)
        progress = ProgressReporter(on_progress, log_bytes(disk, partitions))
        for partition in partitions:
            partition.note_passing(report)
            for name in partition.orphans:
                report.note(partition.label(partition.path / name), "orphan", "an index without a log is left as it is")
            target = None if out is None else out / partition.name
            for segment in partition.segments:
                _rebuild_segment(disk, partition, segment, target, report, progress, interval, max_index_size)
    if out is not None:
        refuse_while_locked(disk, directory)
    report.seconds = time.monotonic() - started
    return report


def _rebuild_segment(
    disk: Disk,
    partition: Partition,
    segment: KafkaSegment,
    out: Path | None,
    report: KafkaReport,
    progress: ProgressReporter,
    interval: int,
    max_index_size: int,
) -> None:
    # Builds, writes what differs, and puts into the report what came of it.
    label = partition.label(segment.log)
    try:
        with disk.open_read(segment.log) as file:
            walk = LogWalk(file, segment.base, progress)
            if walk.log_size > LOG_SIZE_MAX:
                raise CorruptDataError(f"{walk.log_size} bytes are more than positions of 32 bits reach")
            made = recover_entries(walk, segment.base, interval, max_index_size)
    except CorruptDataError as error:
        report.findings.add(label, 0, "refused", f"its indexes are left as they are: {error}")
        return
    progress(walk.log_size - walk.end)
    left = walk.log_size - made.end
    if left and walk.outcome == WalkEnd.ZEROS and made.end == walk.end and segment.is_last:
        report.note(label, "not_closed", f"{left} zero bytes, as of a preallocated log")
    elif left:
        text = f"built up to here; the {left} bytes behind are no whole batches, and Kafka's recovery cuts them off"
        report.findings.add(label, made.end, "log_not_whole", text)
    is_changed = False
    for path, data in ((segment.index, made.index), (segment.time_index, made.time_index)):
        is_changed |= _write(disk, segment, path if out is None else out / path.name, data, is_in_place=out is None)
    report.figures["segments"] += 1
    report.figures["changed"] += is_changed
    report.figures["bytes"] += made.end
    report.rows.append(
        {
            "file": label,
            "readBytes": made.end,
            "logBytes": walk.log_size,
            "batches": made.batches,
            "offsetEntries": len(made.index) // OFFSET_ENTRY_SIZE,
            "timeEntries": len(made.time_index) // TIME_ENTRY_SIZE,
            "changed": is_changed,
        }
    )


def _write(disk: Disk, segment: KafkaSegment, path: Path, data: bytes, *, is_in_place: bool) -> bool:
    # Whether the file had to be written.
    if disk.exists(path) and disk.stamp(path).size == len(data) and disk.read(path) == data:
        return False
    if not is_in_place:
        disk.make_dir(path.parent)
    elif os.geteuid() not in (0, segment.log.stat().st_uid):
        # With the log's owner and mode: the broker must be able to write it, whoever runs this.
        error = PermissionError(errno.EPERM, "its log belongs to another user")
        raise DiskError("replace an index of", segment.log, error)
    disk.write_atomically(path, data, like=segment.log if is_in_place else None)
    return True
