"""Checks every index of a Kafka partition against its log, entry by entry, and rebuilds it as Kafka's recovery does.

Kafka's own tool looks at the entries up to the first zero one. It says nothing about missing files, about what stands
behind the zeros, nor about whether a sealed segment's time index ends with its largest timestamp, by which a search by
time chooses the segment. A check reads only, and only what nobody writes.

LogTruth gathers in one pass and bounded memory what the log says to each entry, which asks two questions: which batch
begins at its position, and which is the first whose last offset is not before its offset. The questions are sorted once
and answered in the order of the log, so entries may stand in any order.

An offset entry is exact when the batch that begins at its position ends with its offset. Kafka 3.9.0 and 4.0.0 wrote
one entry for a whole set of batches, (last offset of the set, position of its first batch): lookups from it are right
although it is not exact, because no batch before the position has that offset. Such an entry is told from a wrong one
by the time index, which had the largest timestamp up to the same offset put in at the same moment.

A time entry is exact when the first batch that had the timestamp, larger than all before, ends with its offset. Nothing
less will do: a lookup skips what stands before it.

Whether an entry should be there at all depends on an interval that no file names, so that is not asked.

Recovery (spec kafka-index 8) starts with empty indexes and no timestamp known, walks from position 0 by the sparse
indexes' kernel, and ends with the largest timestamp as the last time entry; both files are trimmed to their entries. A
rebuild never changes the log: recovery would cut it where it cannot be read on; here the indexes are built up to there
and the report says so. A file that already has the right bytes is left alone; any other is replaced by a rename, so
that a reader finds the old or the new one, whole; the new one gets the owner and the mode of the segment's log.
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
from indexd.findings import KEPT_MAX, Findings
from indexd.kafka import kernel
from indexd.kafka.format import (
    LOG_SIZE_MAX,
    NO_TIMESTAMP,
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
from indexd.kafka.records import Batches, LogWalk, Slots, read_slots
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

#: Columns of Questions.answers: of the first batch that reaches the number that was asked for its position, last offset
#: and largest timestamp; the largest timestamp of all batches before it; the largest up to and with it, and the last
#: offset of the batch that had that first. Offsets are relative to the base.
POSITION, LAST_OFFSET, TIMESTAMP, BEFORE, SO_FAR, SO_FAR_OFFSET = range(6)


class Questions:
    """Which batch is the first that reaches each number, a position or relative offset.

    ``is_reached``: there is such a batch; ``answers`` (n, 6) by the names above.
    """

    def __init__(self, asked: NDArray[np.int64]) -> None:
        self._order = np.argsort(asked, kind="stable")
        self._sorted = asked[self._order]
        self._next = 0
        self.is_reached = np.zeros(len(asked), dtype=np.bool_)
        self.answers = np.full((len(asked), 6), -1, dtype=np.int64)

    def put(self, reach: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        """Answer by the next batches; ``reach``, which rises, is how far each reaches, ``columns`` (6, rows)."""
        end = int(np.searchsorted(self._sorted, reach[-1], side="right"))
        if end > self._next:
            rows = np.searchsorted(reach, self._sorted[self._next : end])
            slots = self._order[self._next : end]
            self.is_reached[slots] = True
            self.answers[slots] = columns[:, rows].T
            self._next = end


class LogTruth:
    """``put`` all batches of a segment; then the questions are answered. Offsets in here are relative to ``base``."""

    def __init__(
        self, base: int, positions: NDArray[np.int64], offsets: NDArray[np.int64], time_offsets: NDArray[np.int64]
    ) -> None:
        self.at_position, self.by_offset, self.by_time_offset = map(Questions, (positions, offsets, time_offsets))
        self.max_timestamp, self._max_timestamp_offset = NO_TIMESTAMP, 0
        self._base, self._reach = base, -1

    def put(self, batches: Batches) -> None:
        """The next batches. The timestamp of one with a fault is not believed where it would rule over others."""
        position, fault, timestamps = batches[[kernel.POSITION, kernel.FAULT, kernel.MAX_TIMESTAMP]]
        last = batches[kernel.LAST_OFFSET] - self._base
        reach = np.maximum(np.maximum.accumulate(last), self._reach)
        believed = np.where(fault == Fault.NONE, timestamps, NO_TIMESTAMP)
        so_far = np.maximum.accumulate(np.concatenate(([self.max_timestamp], believed)))
        # The row that set the maximum, carried forward to the rows behind it.
        setter = np.maximum.accumulate(np.where(np.diff(so_far) > 0, np.arange(len(last)), -1))
        so_far_offset = np.where(setter >= 0, last[np.maximum(setter, 0)], self._max_timestamp_offset)
        columns = np.stack((position, last, timestamps, so_far[:-1], so_far[1:], so_far_offset))
        self.at_position.put(position, columns)
        self.by_offset.put(reach, columns)
        self.by_time_offset.put(reach, columns)
        self.max_timestamp, self._max_timestamp_offset = int(so_far[-1]), int(so_far_offset[-1])
        self._reach = int(reach[-1])


#: Of one slot; from OUT_OF_RANGE on it is wrong. OF_A_SET: lookups are right, as Kafka 3.9.0 and 4.0.0 wrote it.
#: UNKNOWN: it points behind the place where the log cannot be read on.
(
    EXACT,
    OF_A_SET,
    UNKNOWN,
    OUT_OF_RANGE,
    NOT_AT_A_BATCH,
    BEHIND_THE_LOG,
    MISMATCH,
    NOT_RISING,
    NOT_LAST_OF_BATCH,
    NOT_FIRST,
    MISSING,
) = range(11)
_OFFSET_WHAT = {
    MISSING: ("index_missing", "there is no OffsetIndex beside the log"),
    OUT_OF_RANGE: ("offset_out_of_range", "the offset or the position is negative"),
    NOT_AT_A_BATCH: ("position_not_at_batch", "no batch begins at the position"),
    BEHIND_THE_LOG: ("position_behind_log", "the position is behind the log's last batch"),
    MISMATCH: ("offset_mismatch", "the batch at the position does not end with the offset"),
    NOT_RISING: ("offset_not_rising", "it is not behind the entry before it"),
}
_TIME_WHAT = {
    MISSING: (
        "time_index_missing",
        "there is no TimeIndex beside the log: Kafka makes an empty one and leaves it so",
    ),
    OUT_OF_RANGE: ("time_out_of_range", "the timestamp or the offset is negative"),
    BEHIND_THE_LOG: ("time_offset_behind_log", "the log has no such offset"),
    NOT_LAST_OF_BATCH: ("time_offset_not_last", "no batch ends with the offset"),
    MISMATCH: ("time_mismatch", "the batch that ends with the offset has another timestamp"),
    NOT_FIRST: ("time_not_first", "a batch before the offset has this timestamp or a larger one"),
    NOT_RISING: ("time_not_rising", "it is not behind the entry before it"),
}
_FAULT_WHAT = {
    Fault.CRC: ("batch_crc", "the checksum of the batch does not hold"),
    Fault.MAGIC: ("batch_magic", "the batch has an unknown magic"),
    Fault.SIZE: ("batch_size", "the batch is shorter than its own head"),
}
# A wrong length looks like half a batch too, and what is behind it may be whole.
_UNREADABLE = (WalkEnd.HALF, WalkEnd.CORRUPT)


def judge_offset_slots(slots: Slots, time_slots: Slots, log: LogTruth, walk: LogWalk) -> NDArray[np.int64]:
    """What each of the slots is that were read, by the names above."""
    offsets, positions = slots.first, slots.second
    at_position, answers = log.at_position.answers, log.by_offset.answers
    is_start = log.at_position.is_reached & (at_position[:, POSITION] == positions)
    exact = is_start & (at_position[:, LAST_OFFSET] == offsets)
    # The batch with the offset stands behind the position, and ends with the offset: nothing is skipped.
    safe = is_start & log.by_offset.is_reached & (answers[:, POSITION] > positions)
    verdicts = np.full(len(offsets), MISMATCH)
    of_a_set = np.flatnonzero(safe & ~exact & (answers[:, LAST_OFFSET] == offsets))
    # The time index has what was the largest timestamp then, or says nothing about that.
    known = set(zip(time_slots.first.tolist(), time_slots.second.tolist(), strict=True))
    pairs = map(tuple, answers[of_a_set][:, [SO_FAR, SO_FAR_OFFSET]].tolist())
    was_noted = [not known or pair[0] == NO_TIMESTAMP or pair in known for pair in pairs]
    verdicts[of_a_set[np.array(was_noted, dtype=np.bool_)]] = OF_A_SET
    verdicts[~is_start] = NOT_AT_A_BATCH
    verdicts[positions >= walk.end] = BEHIND_THE_LOG
    if walk.outcome in _UNREADABLE:
        verdicts[(positions >= walk.end) & (positions < walk.log_size)] = UNKNOWN
    verdicts[exact] = EXACT
    verdicts[(offsets < 0) | (positions < 0)] = OUT_OF_RANGE
    good = np.flatnonzero(verdicts <= OF_A_SET)
    # Where the batch of the offset begins: the entry's own position, or further behind in a set.
    ends = np.where(exact, positions, answers[:, POSITION])[good]
    falls = (np.diff(offsets[good]) <= 0) | (positions[good][1:] <= ends[:-1])
    verdicts[good[1:][falls]] = NOT_RISING
    return verdicts


def judge_time_slots(slots: Slots, log: LogTruth, walk: LogWalk) -> NDArray[np.int64]:
    """The same for a TimeIndex."""
    timestamps, offsets, answers = slots.first, slots.second, log.by_time_offset.answers
    verdicts = np.full(len(offsets), EXACT)
    verdicts[answers[:, BEFORE] >= timestamps] = NOT_FIRST
    verdicts[answers[:, TIMESTAMP] != timestamps] = MISMATCH
    verdicts[answers[:, LAST_OFFSET] != offsets] = NOT_LAST_OF_BATCH
    verdicts[~log.by_time_offset.is_reached] = UNKNOWN if walk.outcome in _UNREADABLE else BEHIND_THE_LOG
    verdicts[(offsets < 0) | (timestamps < 0)] = OUT_OF_RANGE
    good = np.flatnonzero(verdicts == EXACT)
    falls = (np.diff(timestamps[good]) <= 0) | (np.diff(offsets[good]) < 0)
    verdicts[good[1:][falls]] = NOT_RISING
    return verdicts


def check(
    directory: Path,
    disk: Disk,
    *,
    interval: int | None = None,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> KafkaReport:
    """Check the partition that ``directory`` is, or all partitions of the log directory that it is.

    With ``interval`` (index.interval.bytes) a note says which files differ from what recovery would make with it.
    UsageError if it is neither a partition nor a log directory, BusyError if a broker holds its lock before or after.
    """
    started, partitions = time.monotonic(), find_partitions(disk, directory)
    refuse_while_locked(disk, directory)
    progress = ProgressReporter(on_progress, log_bytes(disk, partitions))
    report = KafkaReport(len(partitions), "findings", {"segments": 0, "batches": 0, "entries": 0, "bytes": 0})
    for partition in partitions:
        partition.note_passing(report)
        last_offset, others = -1, Findings()
        for name in partition.orphans:
            text = "there is no log beside this index: Kafka removes it at its next start"
            others.add(partition.label(partition.path / name), 0, "orphan", text)
        for segment in partition.segments:
            if last_offset >= segment.base:
                text = f"the segment begins at offset {segment.base}, the one before it goes on to {last_offset}"
                others.add(partition.label(segment.log), 0, "segments_overlap", text)
            checked = _SegmentCheck(disk, partition, segment, report)
            last_offset = checked.run(progress)
            if interval is not None:
                checked.compare(interval)
        report.findings.merge(others)
    refuse_while_locked(disk, directory)  # a broker that was started meanwhile has written under our eyes
    report.seconds = time.monotonic() - started
    return report


class _SegmentCheck:
    # Adds to the report what it finds in one segment.
    def __init__(self, disk: Disk, partition: Partition, segment: KafkaSegment, report: KafkaReport) -> None:
        self._disk, self._partition, self._segment, self._report = disk, partition, segment, report
        # A broker that was killed leaves the newest segment's files as they grow; its next start builds them again.
        self._may_be_open = segment is partition.segments[-1] and not partition.was_stopped_cleanly

    def run(self, progress: ProgressReporter) -> int:
        """Returns the last offset in the log, base - 1 without any."""
        disk, segment, report = self._disk, self._segment, self._report
        slots = read_slots(disk, segment.index, OFFSET_ENTRY_TYPE)
        times = read_slots(disk, segment.time_index, TIME_ENTRY_TYPE)
        truth = LogTruth(segment.base, slots.second, slots.first, times.second)
        found, last_offset = Findings(), segment.base - 1
        with disk.open_read(segment.log) as file:
            walk = LogWalk(file, segment.base, progress)
            for batches in walk:
                report.figures["batches"] += batches.shape[1]
                truth.put(batches)
                self._log_batches(batches, last_offset, found)
                last_offset = int(batches[kernel.LAST_OFFSET, -1])
        progress(walk.log_size - walk.end)
        self._log_end(walk, found)
        is_whole = walk.outcome in (WalkEnd.END, WalkEnd.ZEROS) and not found
        report.findings.merge(found)
        self._judged(segment.index, slots, judge_offset_slots(slots, times, truth, walk), _OFFSET_WHAT)
        self._time_index(times, truth, walk, is_whole=is_whole)
        for path, read, words in ((segment.index, slots, _OFFSET_WHAT), (segment.time_index, times, _TIME_WHAT)):
            if walk.log_size and not read.is_there:  # Kafka makes the files of an empty segment when it first appends
                report.findings.add(self._partition.label(path), 0, *words[MISSING])
        report.figures["segments"] += 1
        report.figures["bytes"] += walk.log_size
        report.figures["entries"] += slots.live + times.live
        return last_offset

    def compare(self, interval: int) -> None:
        """Note which files are not what recovery makes."""
        segment = self._segment
        try:
            with self._disk.open_read(segment.log) as file:
                made = recover_entries(LogWalk(file, segment.base), segment.base, interval, INT32_MAX)
        except CorruptDataError as error:
            self._note(segment.log, "not_compared", str(error))
            return
        for path, data in ((segment.index, made.index), (segment.time_index, made.time_index)):
            if self._disk.exists(path) and not is_same(self._disk, path, data):
                self._note(path, "differs", f"it is not what recovery with index.interval.bytes={interval} makes")

    def _log_batches(self, batches: Batches, last_offset: int, found: Findings) -> None:
        label, base = self._partition.label(self._segment.log), self._segment.base
        position, fault, first, last = batches[[kernel.POSITION, kernel.FAULT, kernel.BASE_OFFSET, kernel.LAST_OFFSET]]
        for row in np.flatnonzero(fault != Fault.NONE):
            found.add(label, int(position[row]), *_FAULT_WHAT[Fault(int(fault[row]))])
        is_foreign = (first < base) | (last - base < 0) | (last - base > INT32_MAX)
        before = np.concatenate(([last_offset], last[:-1]))
        for row in np.flatnonzero(is_foreign | (first <= before) | (last < first)):
            what, text = "offset_not_rising", f"do not follow {int(before[row])}"
            if is_foreign[row]:
                what, text = "offset_foreign", f"cannot be of a segment with base {base}"
            text = f"the offsets {first[row]} to {last[row]} of the batch {text}"
            found.add(label, int(position[row]), what, text)

    def _log_end(self, walk: LogWalk, found: Findings) -> None:
        label, left = self._partition.label(self._segment.log), walk.log_size - walk.end
        if walk.outcome == WalkEnd.ZEROS and self._may_be_open:
            self._note(self._segment.log, "not_closed", f"{left} zero bytes, as of a preallocated log")
        elif walk.outcome != WalkEnd.END:
            what, text = {
                WalkEnd.HALF: ("log_half_batch", f"the last {left} bytes are no whole batch"),
                WalkEnd.ZEROS: ("log_zeros", f"the log ends in {left} zero bytes"),
                WalkEnd.CORRUPT: ("log_corrupt", f"no batch begins here: {left} bytes cannot be read"),
            }[walk.outcome]
            if walk.fault != Fault.NONE:
                what, text = _FAULT_WHAT[walk.fault]
                text += f", and its length leads to no other: {left} bytes cannot be read"
            found.add(label, walk.end, what, text)
        if walk.log_size > LOG_SIZE_MAX:
            text = f"the log has {walk.log_size} bytes, more than the 2 GiB that positions of 32 bits reach"
            found.add(label, LOG_SIZE_MAX, "log_too_long", text)

    def _time_index(self, slots: Slots, truth: LogTruth, walk: LogWalk, *, is_whole: bool) -> None:
        path, verdicts = self._segment.time_index, judge_time_slots(slots, truth, walk)
        is_sound = self._judged(path, slots, verdicts, _TIME_WHAT)
        last = int(slots.first[-1]) if len(slots.first) else NO_TIMESTAMP
        if is_whole and is_sound and slots.is_there and len(slots.first) == slots.live and last != truth.max_timestamp:
            text = f"it ends with timestamp {last}, and the log goes up to {truth.max_timestamp}"
            if self._may_be_open:
                self._note(path, "not_closed", text)
            else:
                position = max(0, slots.live - 1) * slots.entry_size
                text += ": a search by time passes the segment over"
                self._report.findings.add(self._partition.label(path), position, "time_last_not_largest", text)

    def _judged(self, path: Path, slots: Slots, verdicts: NDArray[np.int64], words: dict[int, tuple[str, str]]) -> bool:
        # Whether nothing is wrong.
        found, label, base = Findings(), self._partition.label(path), self._segment.base
        wrong = np.flatnonzero(verdicts >= OUT_OF_RANGE)
        for slot in wrong[:KEPT_MAX].tolist():
            what, text = words[int(verdicts[slot])]
            first, second = int(slots.first[slot]), int(slots.second[slot])
            entry = f"timestamp {first}, offset {base + second}"
            if words is _OFFSET_WHAT:
                entry = f"offset {base + first}, position {second}"
            found.add(label, slot * slots.entry_size, what, f"entry {slot} ({entry}): {text}")
        for value, count in zip(*np.unique(verdicts[wrong[KEPT_MAX:]], return_counts=True), strict=True):
            found.count(words[int(value)][0], int(count))
        if of_sets := int(np.count_nonzero(verdicts == OF_A_SET)):
            text = f"{of_sets} entries name the last offset of a set of batches, as Kafka 3.9.0 and 4.0.0 wrote them"
            self._note(path, "entries_of_sets", f"{text}: lookups are right")
        if unknown := int(np.count_nonzero(verdicts == UNKNOWN)):
            text = f"{unknown} entries point behind the place where the log cannot be read on"
            self._note(path, "not_judged", text)
        if slots.live > len(slots.first):
            text = f"{slots.live - len(slots.first)} entries behind the first {len(slots.first)}"
            self._note(path, "not_judged", text)
        if slots.ragged:
            text = f"the file ends in {slots.ragged} bytes that are no entry: it has to be a multiple of "
            position = (slots.live + slots.zeros) * slots.entry_size
            found.add(label, position, "ragged_length", f"{text}{slots.entry_size}")
        if slots.zeros and self._may_be_open and not found:
            self._note(path, "not_closed", f"{slots.zeros} unused entries of zeros, as of a file that still grows")
        elif slots.zeros:
            text = f"{slots.zeros} unused entries of zeros behind {slots.live} real ones, and Kafka counts them in"
            if words is _OFFSET_WHAT:
                text += ": its lookups scan from the segment's begin"
            found.add(label, slots.live * slots.entry_size, "zero_tail", text)
        self._report.findings.merge(found)
        return not found

    def _note(self, path: Path, what: str, text: str) -> None:
        self._report.note(self._partition.label(path), what, text)


# --- rebuilt

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
    interval: int = 4096,
    max_index_size: int = 10 << 20,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> KafkaReport:
    """Rebuild the partition that ``directory`` is, or all partitions of the log directory that it is.

    In place the log directory is locked meanwhile; with ``out`` the files are written there, a directory for each
    partition of a log directory, and nothing is changed in ``directory``. Findings are what could not be rebuilt, or
    not to the log's end. BusyError while a broker holds the lock, UsageError for a wrong directory, or a segment that
    needs longer indexes than ``max_index_size``; that and ``interval`` are Kafka's by default.
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
    if left and walk.outcome == WalkEnd.ZEROS and made.end == walk.end and segment is partition.segments[-1]:
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


def is_same(disk: Disk, path: Path, data: bytes) -> bool:
    """Whether a file holds exactly this."""
    return disk.stamp(path).size == len(data) and disk.read(path) == data


def _write(disk: Disk, segment: KafkaSegment, path: Path, data: bytes, *, is_in_place: bool) -> bool:
    # Whether the file had to be written.
    if disk.exists(path) and is_same(disk, path, data):
        return False
    if not is_in_place:
        disk.make_dir(path.parent)
    elif os.geteuid() not in (0, segment.log.stat().st_uid):
        # With the log's owner and mode: the broker must be able to write it, whoever runs this.
        error = PermissionError(errno.EPERM, "its log belongs to another user")
        raise DiskError("replace an index of", segment.log, error)
    disk.write_atomically(path, data, like=segment.log if is_in_place else None)
    return True
