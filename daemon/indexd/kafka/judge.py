"""Each entry of an index held against the log: a verdict a slot.

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

from indexd.kafka import truth
from indexd.kafka.format import NO_TIMESTAMP, Outcome
from indexd.kafka.records import LogWalk
from indexd.kafka.slots import Slots
from indexd.kafka.truth import LogTruth


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
    exact = log.at_position.is_start & (log.at_position.last_offset == offsets)
    # The batch with the offset stands at or behind the position, and ends with the offset: nothing is skipped.
    safe = log.at_position.is_start & reached & (answers[:, truth.POSITION] > positions)
    safe &= answers[:, truth.LAST_OFFSET] == offsets
    verdicts = np.full(len(offsets), Verdict.MISMATCH, dtype=np.int64)
    of_a_set = np.flatnonzero(safe & ~exact)
    verdicts[of_a_set[_was_noted(answers[of_a_set], time_slots)]] = Verdict.OF_A_SET
    verdicts[~log.at_position.is_start] = Verdict.NOT_AT_A_BATCH
    verdicts[positions >= walk.end] = Verdict.BEHIND_THE_LOG
    if walk.outcome in _UNREADABLE:
        verdicts[(positions >= walk.end) & (positions < walk.log_size)] = Verdict.UNKNOWN
    verdicts[exact] = Verdict.EXACT
    verdicts[(offsets < 0) | (positions < 0)] = Verdict.OUT_OF_RANGE
    good = np.flatnonzero(verdicts <= Verdict.OF_A_SET)
    # Where the batch of the offset begins: the entry's own position, or further behind in a set.
    ends = np.where(exact, positions, answers[:, truth.POSITION])[good]
    falls = (np.diff(offsets[good]) <= 0) | (positions[good][1:] <= ends[:-1])
    verdicts[good[1:][falls]] = Verdict.NOT_RISING
    return verdicts


def _was_noted(answers: NDArray[np.int64], time_slots: Slots) -> NDArray[np.bool_]:
    """Whether the time index has what was the largest timestamp then, or nothing can be said about that."""
    timestamps, offsets = answers[:, truth.SO_FAR], answers[:, truth.SO_FAR_OFFSET]
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
    verdicts[answers[:, truth.BEFORE] >= timestamps] = Verdict.NOT_FIRST
    verdicts[answers[:, truth.TIMESTAMP] != timestamps] = Verdict.MISMATCH
    verdicts[answers[:, truth.LAST_OFFSET] != offsets] = Verdict.NOT_LAST_OF_BATCH
    verdicts[~reached] = Verdict.UNKNOWN if walk.outcome in _UNREADABLE else Verdict.BEHIND_THE_LOG
    verdicts[(offsets < 0) | (timestamps < 0)] = Verdict.OUT_OF_RANGE
    good = np.flatnonzero(verdicts == Verdict.EXACT)
    falls = (np.diff(timestamps[good]) <= 0) | (np.diff(offsets[good]) < 0)
    verdicts[good[1:][falls]] = Verdict.NOT_RISING
    return verdicts
