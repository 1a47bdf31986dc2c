"""Checks every index of a Kafka partition against its log, entry by entry; reads only, and only what nobody writes.

Kafka's own tool looks at the entries up to the first zero one. It says nothing about missing files, about what stands
behind the zeros, nor about whether a sealed segment's time index ends with its largest timestamp, by which a search by
time chooses the segment.

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
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.errors import CorruptDataError
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
    log_bytes,
    refuse_while_locked,
)
from indexd.kafka.rebuild import recover_entries
from indexd.kafka.records import Batches, LogWalk, Slots, read_slots
from indexd.output import ProgressReporter
from indexd.sparse.format import INT32_MAX
from indexd.sparse.kernel import OFFSET_ENTRY_TYPE, TIME_ENTRY_TYPE
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
EXACT, OF_A_SET, UNKNOWN, OUT_OF_RANGE, NOT_AT_A_BATCH, BEHIND_THE_LOG, MISMATCH, NOT_RISING = range(8)
NOT_LAST_OF_BATCH, NOT_FIRST = 8, 9
_OFFSET_WHAT = {
    OUT_OF_RANGE: ("offset_out_of_range", "the offset or the position is negative"),
    NOT_AT_A_BATCH: ("position_not_at_batch", "no batch begins at the position"),
    BEHIND_THE_LOG: ("position_behind_log", "the position is behind the log's last batch"),
    MISMATCH: ("offset_mismatch", "the batch at the position does not end with the offset"),
    NOT_RISING: ("offset_not_rising", "it is not behind the entry before it"),
}
_TIME_WHAT = {
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
        self._may_be_open = segment.is_last and not partition.was_stopped_cleanly

    def run(self, progress: ProgressReporter) -> int:
        """Returns the last offset in the log, base - 1 without any."""
        disk, segment, report = self._disk, self._segment, self._report
        slots = read_slots(disk, segment.index, OFFSET_ENTRY_TYPE, is_there=segment.has_index)
        times = read_slots(disk, segment.time_index, TIME_ENTRY_TYPE, is_there=segment.has_time_index)
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
        if segment.has_index:
            self._judged(segment.index, slots, judge_offset_slots(slots, times, truth, walk), _OFFSET_WHAT)
        if segment.has_time_index:
            self._time_index(times, truth, walk, is_whole=is_whole)
        if walk.log_size:  # Kafka makes the files of an empty segment when it first appends
            if not segment.has_index:
                self._find(segment.index, 0, "index_missing", "there is no OffsetIndex beside the log")
            if not segment.has_time_index:
                text = "there is no TimeIndex beside the log: Kafka makes an empty one and leaves it so"
                self._find(segment.time_index, 0, "time_index_missing", text)
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
        for path, data, is_there in (
            (segment.index, made.index, segment.has_index),
            (segment.time_index, made.time_index, segment.has_time_index),
        ):
            if is_there and (self._disk.stamp(path).size != len(data) or self._disk.read(path) != data):
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
        if is_whole and is_sound and len(slots.first) == slots.live and last != truth.max_timestamp:
            text = f"it ends with timestamp {last}, and the log goes up to {truth.max_timestamp}"
            if self._may_be_open:
                self._note(path, "not_closed", text)
            else:
                position = max(0, slots.live - 1) * slots.entry_size
                text += ": a search by time passes the segment over"
                self._find(path, position, "time_last_not_largest", text)

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

    def _find(self, path: Path, position: int, what: str, text: str) -> None:
        self._report.findings.add(self._partition.label(path), position, what, text)

    def _note(self, path: Path, what: str, text: str) -> None:
        self._report.note(self._partition.label(path), what, text)
