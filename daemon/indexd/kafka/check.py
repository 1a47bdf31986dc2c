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
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexd.errors import CorruptDataError
from indexd.findings import KEPT_MAX, Findings
from indexd.kafka.format import (
    LOG_SIZE_MAX,
    NO_TIMESTAMP,
    Fault,
    Note,
    OnProgress,
    Outcome,
    Partition,
    Progress,
    Segment,
    find_partitions,
    log_bytes,
    refuse_while_locked,
)
from indexd.kafka.rebuild import recover_entries, refuse_interval
from indexd.kafka.records import Batches, LogWalk, Slots, read_slots
from indexd.sparse.format import INT32_MAX
from indexd.sparse.kernel import OFFSET_ENTRY_TYPE, TIME_ENTRY_TYPE
from indexd.storage.disk import Disk

#: Columns of Questions.answers: of the first batch that reaches the number that was asked for its position,
#: last offset and largest timestamp; the largest timestamp of all batches before it; the largest up to and with it, and
#: the last offset of the batch that had that first. Offsets are relative to the base.
POSITION, LAST_OFFSET, TIMESTAMP, BEFORE, SO_FAR, SO_FAR_OFFSET = range(6)
_COLUMNS = 6
# A wrong length looks like half a batch too, and what is behind it may be whole.
_UNREADABLE = (Outcome.HALF, Outcome.CORRUPT)


class Questions:
    """Which batch is the first that reaches each number, a position or relative offset.

    ``is_reached``: there is such a batch; ``answers`` (n, 6) by the names above.
    """

    def __init__(self, asked: NDArray[np.int64]) -> None:
        self._order = np.argsort(asked, kind="stable")
        self._sorted = asked[self._order]
        self._next = 0
        self.is_reached = np.zeros(len(asked), dtype=np.bool_)
        self.answers = np.full((len(asked), _COLUMNS), -1, dtype=np.int64)

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
        self.at_position = Questions(positions)
        self.by_offset = Questions(offsets)
        self.by_time_offset = Questions(time_offsets)
        self.max_timestamp = NO_TIMESTAMP
        self._max_timestamp_offset = 0
        self._base = base
        self._reach = -1

    def put(self, batches: Batches) -> None:
        """The next batches. The timestamp of one with a fault is not believed where it would rule over others."""
        last = batches.last_offset - self._base
        reach = np.maximum(np.maximum.accumulate(last), self._reach)
        believed = np.where(batches.fault == Fault.NONE, batches.max_timestamp, NO_TIMESTAMP)
        so_far = np.maximum(np.maximum.accumulate(believed), self.max_timestamp)
        before = np.concatenate(([self.max_timestamp], so_far[:-1]))
        # The row that set the maximum, carried forward to the rows behind it.
        setter = np.maximum.accumulate(np.where(so_far > before, np.arange(len(last)), -1))
        so_far_offset = np.where(setter >= 0, last[np.maximum(setter, 0)], self._max_timestamp_offset)
        columns = np.stack((batches.position, last, batches.max_timestamp, before, so_far, so_far_offset))
        self.at_position.put(batches.position, columns)
        self.by_offset.put(reach, columns)
        self.by_time_offset.put(reach, columns)
        self.max_timestamp, self._max_timestamp_offset = int(so_far[-1]), int(so_far_offset[-1])
        self._reach = int(reach[-1])


class Verdict(IntEnum):
    """Of one slot; from OUT_OF_RANGE on it is wrong."""

    EXACT = 0
    OF_A_SET = 1  # lookups are right: as Kafka 3.9.0 and 4.0.0 wrote it
    UNKNOWN = 2  # it points behind the place where the log cannot be read on
    OUT_OF_RANGE = 3
    NOT_AT_A_BATCH = 4
    BEHIND_THE_LOG = 5
    MISMATCH = 6
    NOT_RISING = 7
    NOT_LAST_OF_BATCH = 8
    NOT_FIRST = 9


_OFFSET_WHAT = {
    Verdict.OUT_OF_RANGE: ("offset_out_of_range", "the offset or the position is negative"),
    Verdict.NOT_AT_A_BATCH: ("position_not_at_batch", "no batch begins at the position"),
    Verdict.BEHIND_THE_LOG: ("position_behind_log", "the position is behind the log's last batch"),
    Verdict.MISMATCH: ("offset_mismatch", "the batch at the position does not end with the offset"),
    Verdict.NOT_RISING: ("offset_not_rising", "it is not behind the entry before it"),
}
_TIME_WHAT = {
    Verdict.OUT_OF_RANGE: ("time_out_of_range", "the timestamp or the offset is negative"),
    Verdict.BEHIND_THE_LOG: ("time_offset_behind_log", "the log has no such offset"),
    Verdict.NOT_LAST_OF_BATCH: ("time_offset_not_last", "no batch ends with the offset"),
    Verdict.MISMATCH: ("time_mismatch", "the batch that ends with the offset has another timestamp"),
    Verdict.NOT_FIRST: ("time_not_first", "a batch before the offset has this timestamp or a larger one"),
    Verdict.NOT_RISING: ("time_not_rising", "it is not behind the entry before it"),
}
_FAULT_WHAT = {
    Fault.CRC: ("batch_crc", "the checksum of the batch does not hold"),
    Fault.MAGIC: ("batch_magic", "the batch has an unknown magic"),
    Fault.SIZE: ("batch_size", "the batch is shorter than its own head"),
}


def judge_offset_slots(slots: Slots, time_slots: Slots, log: LogTruth, walk: LogWalk) -> NDArray[np.int64]:
    """A Verdict for each of the slots that were read."""
    offsets, positions = slots.first, slots.second
    reached, answers = log.by_offset.is_reached, log.by_offset.answers
    is_start = log.at_position.is_reached & (log.at_position.answers[:, POSITION] == positions)
    exact = is_start & (log.at_position.answers[:, LAST_OFFSET] == offsets)
    # The batch with the offset stands at or behind the position, and ends with the offset: nothing is skipped.
    safe = is_start & reached & (answers[:, POSITION] > positions) & (answers[:, LAST_OFFSET] == offsets)
    verdicts = np.full(len(offsets), Verdict.MISMATCH, dtype=np.int64)
    of_a_set = np.flatnonzero(safe & ~exact)
    verdicts[of_a_set[_was_noted(answers[of_a_set], time_slots)]] = Verdict.OF_A_SET
    verdicts[~is_start] = Verdict.NOT_AT_A_BATCH
    verdicts[positions >= walk.end] = Verdict.BEHIND_THE_LOG
    if walk.outcome in _UNREADABLE:
        verdicts[(positions >= walk.end) & (positions < walk.log_size)] = Verdict.UNKNOWN
    verdicts[exact] = Verdict.EXACT
    verdicts[(offsets < 0) | (positions < 0)] = Verdict.OUT_OF_RANGE
    good = np.flatnonzero(verdicts <= Verdict.OF_A_SET)
    # Where the batch of the offset begins: the entry's own position, or further behind in a set.
    ends = np.where(exact, positions, answers[:, POSITION])[good]
    falls = (np.diff(offsets[good]) <= 0) | (positions[good][1:] <= ends[:-1])
    verdicts[good[1:][falls]] = Verdict.NOT_RISING
    return verdicts


def _was_noted(answers: NDArray[np.int64], time_slots: Slots) -> NDArray[np.bool_]:
    """Whether the time index has what was the largest timestamp then, or nothing can be said about that."""
    if not len(answers) or not time_slots.live:
        return np.ones(len(answers), dtype=np.bool_)
    known = set(zip(time_slots.first.tolist(), time_slots.second.tolist(), strict=True))
    pairs = map(tuple, answers[:, [SO_FAR, SO_FAR_OFFSET]].tolist())
    return np.array([pair[0] == NO_TIMESTAMP or pair in known for pair in pairs], dtype=np.bool_)


def judge_time_slots(slots: Slots, log: LogTruth, walk: LogWalk) -> NDArray[np.int64]:
    """The same for a TimeIndex."""
    timestamps, offsets = slots.first, slots.second
    reached, answers = log.by_time_offset.is_reached, log.by_time_offset.answers
    verdicts = np.full(len(offsets), Verdict.EXACT, dtype=np.int64)
    verdicts[answers[:, BEFORE] >= timestamps] = Verdict.NOT_FIRST
    verdicts[answers[:, TIMESTAMP] != timestamps] = Verdict.MISMATCH
    verdicts[answers[:, LAST_OFFSET] != offsets] = Verdict.NOT_LAST_OF_BATCH
    verdicts[~reached] = Verdict.UNKNOWN if walk.outcome in _UNREADABLE else Verdict.BEHIND_THE_LOG
    verdicts[(offsets < 0) | (timestamps < 0)] = Verdict.OUT_OF_RANGE
    good = np.flatnonzero(verdicts == Verdict.EXACT)
    falls = (np.diff(timestamps[good]) <= 0) | (np.diff(offsets[good]) < 0)
    verdicts[good[1:][falls]] = Verdict.NOT_RISING
    return verdicts


@dataclass(slots=True)
class CheckReport:
    """``findings`` are what does not hold. ``batches`` and ``bytes`` are of the logs, ``entries`` of both indexes."""

    findings: Findings = field(default_factory=Findings)
    notes: list[Note] = field(default_factory=list)
    partitions: int = 0
    segments: int = 0
    batches: int = 0
    entries: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The summary: the last line of ``--json``."""
        return {
            "kind": "summary",
            "partitions": self.partitions,
            "segments": self.segments,
            "batches": self.batches,
            "entries": self.entries,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "findings": len(self.findings),
            "counts": dict(sorted(self.findings.counts.items())),
            "notes": len(self.notes),
        }


class SegmentCheck:
    """``run`` adds to a report what it finds; with ``interval`` the files are compared with a rebuild as well."""

    def __init__(
        self, disk: Disk, partition: Partition, segment: Segment, report: CheckReport, interval: int | None
    ) -> None:
        self._disk, self._partition, self._segment, self._report = disk, partition, segment, report
        self._interval = interval
        # A broker that was killed leaves the newest segment's files as they grow; its next start builds them again.
        self._may_be_open = segment.is_last and not partition.was_stopped_cleanly

    def run(self, progress: Progress) -> int:
        """Returns the last offset in the log, base - 1 without any."""
        segment, report = self._segment, self._report
        slots = read_slots(self._disk, segment.index if segment.has_index else None, OFFSET_ENTRY_TYPE)
        times = read_slots(self._disk, segment.time_index if segment.has_time_index else None, TIME_ENTRY_TYPE)
        truth = LogTruth(segment.base, slots.second, slots.first, times.second)
        found, missing, last_offset = Findings(), Findings(), segment.base - 1
        with self._disk.open_read(segment.log) as file:
            walk = LogWalk(file, segment.base, progress.within)
            for batches in walk:
                report.batches += len(batches)
                truth.put(batches)
                self._log_batches(batches, last_offset, found)
                last_offset = int(batches.last_offset[-1])
        progress.finish(walk.log_size)
        self._log_end(walk, found)
        is_whole = walk.outcome in (Outcome.END, Outcome.ZEROS) and not found
        report.findings.merge(found)
        if segment.has_index:
            verdicts = judge_offset_slots(slots, times, truth, walk)
            report.findings.merge(self._judged(segment.index, slots, verdicts, _OFFSET_WHAT))
        elif walk.log_size:  # Kafka makes the files of an empty segment when it first appends
            missing.add(self._label(segment.index), 0, "index_missing", "there is no OffsetIndex beside the log")
        if segment.has_time_index:
            report.findings.merge(self._time_index(times, truth, walk, is_whole=is_whole))
        elif walk.log_size:
            text = "there is no TimeIndex beside the log: Kafka makes an empty one and leaves it so"
            missing.add(self._label(segment.time_index), 0, "time_index_missing", text)
        report.findings.merge(missing)
        if self._interval is not None:
            self._compare(self._interval)
        report.segments += 1
        report.bytes += walk.log_size
        report.entries += slots.live + times.live
        return last_offset

    def _log_batches(self, batches: Batches, last_offset: int, found: Findings) -> None:
        label, base = self._label(self._segment.log), self._segment.base
        for row in np.flatnonzero(batches.fault != Fault.NONE):
            found.add(label, int(batches.position[row]), *_FAULT_WHAT[Fault(int(batches.fault[row]))])
        relative = batches.last_offset - base
        is_foreign = (batches.base_offset < base) | (relative < 0) | (relative > INT32_MAX)
        before = np.concatenate(([last_offset], batches.last_offset[:-1]))
        falls = (batches.base_offset <= before) | (batches.last_offset < batches.base_offset)
        for row in np.flatnonzero(is_foreign | falls):
            what, text = "offset_not_rising", f"do not follow {int(before[row])}"
            if is_foreign[row]:
                what, text = "offset_foreign", f"cannot be of a segment with base {base}"
            text = f"the offsets {batches.base_offset[row]} to {batches.last_offset[row]} of the batch {text}"
            found.add(label, int(batches.position[row]), what, text)

    def _log_end(self, walk: LogWalk, found: Findings) -> None:
        label, left = self._label(self._segment.log), walk.log_size - walk.end
        if walk.outcome == Outcome.CORRUPT and walk.fault != Fault.NONE:
            what, text = _FAULT_WHAT[walk.fault]
            found.add(label, walk.end, what, f"{text}, and its length leads to no other: {left} bytes cannot be read")
        elif walk.outcome == Outcome.CORRUPT:
            found.add(label, walk.end, "log_corrupt", f"no batch begins here: {left} bytes cannot be read")
        elif walk.outcome == Outcome.HALF:
            found.add(label, walk.end, "log_half_batch", f"the last {left} bytes are no whole batch")
        elif walk.outcome == Outcome.ZEROS and self._may_be_open:
            self._note(self._segment.log, "not_closed", f"{left} zero bytes, as of a preallocated log")
        elif walk.outcome == Outcome.ZEROS:
            found.add(label, walk.end, "log_zeros", f"the log ends in {left} zero bytes")
        if walk.log_size > LOG_SIZE_MAX:
            text = f"the log has {walk.log_size} bytes, more than the 2 GiB that positions of 32 bits reach"
            found.add(label, LOG_SIZE_MAX, "log_too_long", text)

    def _time_index(self, slots: Slots, truth: LogTruth, walk: LogWalk, *, is_whole: bool) -> Findings:
        path = self._segment.time_index
        verdicts = judge_time_slots(slots, truth, walk)
        if slots.live == 1 and not (slots.first[0] or slots.second[0] or verdicts[0] == Verdict.EXACT):
            slots, verdicts = slots.without_first(), verdicts[:0]
        found = self._judged(path, slots, verdicts, _TIME_WHAT)
        last = int(slots.first[-1]) if slots.judged else NO_TIMESTAMP
        if is_whole and not found and slots.judged == slots.live and last != truth.max_timestamp:
            text = f"it ends with timestamp {last}, and the log goes up to {truth.max_timestamp}"
            if self._may_be_open:
                self._note(path, "not_closed", text)
            else:
                position = max(0, slots.live - 1) * slots.entry_size
                text += ": a search by time passes the segment over"
                found.add(self._label(path), position, "time_last_not_largest", text)
        return found

    def _judged(
        self, path: Path, slots: Slots, verdicts: NDArray[np.int64], words: dict[Verdict, tuple[str, str]]
    ) -> Findings:
        found, label, base = Findings(), self._label(path), self._segment.base
        wrong = np.flatnonzero(verdicts >= Verdict.OUT_OF_RANGE)
        for slot in wrong[:KEPT_MAX].tolist():
            what, text = words[Verdict(int(verdicts[slot]))]
            first, second = int(slots.first[slot]), int(slots.second[slot])
            entry = f"timestamp {first}, offset {base + second}"
            if words is _OFFSET_WHAT:
                entry = f"offset {base + first}, position {second}"
            found.add(label, slot * slots.entry_size, what, f"entry {slot} ({entry}): {text}")
        for value, count in zip(*np.unique(verdicts[wrong[KEPT_MAX:]], return_counts=True), strict=True):
            found.count(words[Verdict(int(value))][0], int(count))
        self._slot_notes(path, slots, verdicts)
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
        return found

    def _slot_notes(self, path: Path, slots: Slots, verdicts: NDArray[np.int64]) -> None:
        of_sets, unknown = (int(np.count_nonzero(verdicts == kind)) for kind in (Verdict.OF_A_SET, Verdict.UNKNOWN))
        if of_sets:
            text = f"{of_sets} entries name the last offset of a set of batches, as Kafka 3.9.0 and 4.0.0 wrote them"
            self._note(path, "entries_of_sets", f"{text}: lookups are right")
        if unknown:
            self._note(path, "not_judged", f"{unknown} entries point behind the place where the log cannot be read on")
        if slots.live > slots.judged:
            self._note(path, "not_judged", f"{slots.live - slots.judged} entries behind the first {slots.judged}")

    def _compare(self, interval: int) -> None:
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

    def _label(self, path: Path) -> str:
        return self._partition.label(path)

    def _note(self, path: Path, what: str, text: str) -> None:
        self._report.notes.append(Note(self._label(path), what, text))


def check(
    directory: Path, disk: Disk, *, interval: int | None = None, on_progress: OnProgress | None = None
) -> CheckReport:
    """Check the partition that ``directory`` is, or all partitions of the log directory that it is.

    With ``interval`` (index.interval.bytes) a note says which files differ from what recovery would make with it.
    UsageError if it is neither a partition nor a log directory, BusyError if a broker holds its lock before or after.
    """
    if interval is not None:
        refuse_interval(interval)
    started = time.monotonic()
    partitions = find_partitions(disk, directory)
    refuse_while_locked(disk, directory)
    progress = Progress(on_progress, log_bytes(disk, partitions))
    report = CheckReport(partitions=len(partitions))
    for partition in partitions:
        report.notes += partition.passing_notes()
        others = Findings()
        for name in partition.orphans:
            text = "there is no log beside this index: Kafka removes it at its next start"
            others.add(partition.label(partition.path / name), 0, "orphan", text)
        last_offset = -1
        for segment in partition.segments:
            if last_offset >= segment.base:
                text = f"the segment begins at offset {segment.base}, the one before it goes on to {last_offset}"
                others.add(partition.label(segment.log), 0, "segments_overlap", text)
            last_offset = SegmentCheck(disk, partition, segment, report, interval).run(progress)
        report.findings.merge(others)
    refuse_while_locked(disk, directory)  # a broker that was started meanwhile has written under our eyes
    report.seconds = time.monotonic() - started
    return report
