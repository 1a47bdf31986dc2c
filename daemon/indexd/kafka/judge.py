"""Judges each entry of an index by the log (a Verdict a slot), and puts into words what does not hold.

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

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from indexd.findings import KEPT_MAX, Findings
from indexd.kafka.format import LOG_SIZE_MAX, NO_TIMESTAMP, Fault, Outcome
from indexd.kafka.records import Batches, LogWalk, Slots
from indexd.sparse.format import INT32_MAX, TIME_ENTRY_SIZE

#: Columns of Questions.answers: of the first batch that reaches the number that was asked for its position,
#: last offset and largest timestamp; the largest timestamp of all batches before it; the largest up to and with it, and
#: the last offset of the batch that had that first. Offsets are relative to the base.
POSITION, LAST_OFFSET, TIMESTAMP, BEFORE, SO_FAR, SO_FAR_OFFSET = range(6)
_COLUMNS = 6


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
        if end <= self._next:
            return
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


WRONG = Verdict.OUT_OF_RANGE
# A wrong length looks like half a batch too, and what is behind it may be whole.
_UNREADABLE = (Outcome.HALF, Outcome.CORRUPT)


def judge_offset_slots(slots: Slots, time_slots: Slots, log: LogTruth, walk: LogWalk) -> NDArray[np.int64]:
    """A Verdict for each of the slots that were read."""
    offsets, positions = slots.first, slots.second
    reached, answers = log.by_offset.is_reached, log.by_offset.answers
    is_start = log.at_position.is_reached & (log.at_position.answers[:, POSITION] == positions)
    exact = is_start & (log.at_position.answers[:, LAST_OFFSET] == offsets)
    # The batch with the offset stands at or behind the position, and ends with the offset: nothing is skipped.
    safe = is_start & reached & (answers[:, POSITION] > positions)
    safe &= answers[:, LAST_OFFSET] == offsets
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
    timestamps, offsets = answers[:, SO_FAR], answers[:, SO_FAR_OFFSET]
    if not len(answers) or not time_slots.live:
        return np.ones(len(answers), dtype=np.bool_)
    known = set(zip(time_slots.first.tolist(), time_slots.second.tolist(), strict=True))
    pairs = zip(timestamps.tolist(), offsets.tolist(), strict=True)
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


def slot_findings(label: str, slots: Slots, verdicts: NDArray[np.int64], base: int, found: Findings) -> None:
    """The wrong slots of an OffsetIndex, or of a TimeIndex."""
    is_time = slots.entry_size == TIME_ENTRY_SIZE
    words = _TIME_WHAT if is_time else _OFFSET_WHAT
    wrong = np.flatnonzero(verdicts >= WRONG)
    for slot in wrong[:KEPT_MAX].tolist():
        what, text = words[Verdict(int(verdicts[slot]))]
        first, second = int(slots.first[slot]), int(slots.second[slot])
        entry = f"timestamp {first}, offset {base + second}" if is_time else f"offset {base + first}, position {second}"
        found.add(label, slot * slots.entry_size, what, f"entry {slot} ({entry}): {text}")
    for value, count in zip(*np.unique(verdicts[wrong[KEPT_MAX:]], return_counts=True), strict=True):
        found.count(words[Verdict(int(value))][0], int(count))


def tail_findings(label: str, slots: Slots, found: Findings) -> None:
    """What follows the entries of an index that nobody appends to any more."""
    if slots.zeros:
        position = slots.live * slots.entry_size
        text = f"{slots.zeros} unused entries of zeros behind {slots.live} real ones, and Kafka counts them in"
        if slots.entry_size != TIME_ENTRY_SIZE:
            text += ": its lookups scan from the segment's begin"
        found.add(label, position, "zero_tail", text)


def length_findings(label: str, slots: Slots, found: Findings) -> None:
    """A length that no index has, growing or not."""
    if slots.ragged:
        position = (slots.live + slots.zeros) * slots.entry_size
        text = f"the file ends in {slots.ragged} bytes that are no entry: it has to be a multiple of {slots.entry_size}"
        found.add(label, position, "ragged_length", text)


_FAULT_WHAT = {
    Fault.CRC: ("batch_crc", "the checksum of the batch does not hold"),
    Fault.MAGIC: ("batch_magic", "the batch has an unknown magic"),
    Fault.SIZE: ("batch_size", "the batch is shorter than its own head"),
}


class LogFindings:
    """``put`` each stretch of batches of one segment, then ``end``; ``label`` is what to call the log."""

    def __init__(self, base: int, label: str, findings: Findings) -> None:
        self.last_offset = base - 1
        self._base = base
        self._label = label
        self._findings = findings

    def put(self, batches: Batches) -> None:
        """The next batches."""
        for row in np.flatnonzero(batches.fault != Fault.NONE):
            what, text = _FAULT_WHAT[Fault(int(batches.fault[row]))]
            self._findings.add(self._label, int(batches.position[row]), what, text)
        relative = batches.last_offset - self._base
        is_foreign = (batches.base_offset < self._base) | (relative < 0) | (relative > INT32_MAX)
        before = np.concatenate(([self.last_offset], batches.last_offset[:-1]))
        falls = (batches.base_offset <= before) | (batches.last_offset < batches.base_offset)
        for row in np.flatnonzero(is_foreign | falls):
            first, last = int(batches.base_offset[row]), int(batches.last_offset[row])
            if is_foreign[row]:
                what, text = "offset_foreign", f"cannot be of a segment with base {self._base}"
            else:
                what, text = "offset_not_rising", f"do not follow {int(before[row])}"
            position = int(batches.position[row])
            self._findings.add(self._label, position, what, f"the offsets {first} to {last} of the batch {text}")
        self.last_offset = int(batches.last_offset[-1])

    def end(self, walk: LogWalk, *, zeros_are_wrong: bool) -> None:
        """How the walk ended."""
        left = walk.log_size - walk.end
        if walk.outcome == Outcome.CORRUPT and walk.fault != Fault.NONE:
            what, text = _FAULT_WHAT[walk.fault]
            self._add(walk, what, f"{text}, and its length leads to no other: {left} bytes cannot be read")
        elif walk.outcome == Outcome.CORRUPT:
            self._add(walk, "log_corrupt", f"no batch begins here: {left} bytes cannot be read")
        elif walk.outcome == Outcome.HALF:
            self._add(walk, "log_half_batch", f"the last {left} bytes are no whole batch")
        elif walk.outcome == Outcome.ZEROS and zeros_are_wrong:
            self._add(walk, "log_zeros", f"the log ends in {left} zero bytes")
        if walk.log_size > LOG_SIZE_MAX:
            text = f"the log has {walk.log_size} bytes, more than the 2 GiB that positions of 32 bits reach"
            self._findings.add(self._label, LOG_SIZE_MAX, "log_too_long", text)

    def _add(self, walk: LogWalk, what: str, text: str) -> None:
        self._findings.add(self._label, walk.end, what, text)
