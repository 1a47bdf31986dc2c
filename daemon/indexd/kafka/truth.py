"""LogTruth: what the log says to each entry of its indexes, gathered in one pass and bounded memory.

An entry asks two questions: which batch begins at its position, and which is the first whose last offset is not before
its offset. The questions are sorted once and answered in the order of the log, so entries may stand in any order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexd.kafka.format import NO_TIMESTAMP, Fault
from indexd.kafka.records import Batches

#: Columns of OffsetQuestions.answers: of the first batch whose last offset is not before the asked one its position,
#: last offset and largest timestamp; the largest timestamp of all batches before it; the largest up to and with it, and
#: the last offset of the batch that had that first. Offsets are relative to the base.
POSITION, LAST_OFFSET, TIMESTAMP, BEFORE, SO_FAR, SO_FAR_OFFSET = range(6)
_COLUMNS = 6


class PositionQuestions:
    """Asked: positions. ``is_start``: a batch begins there; ``last_offset`` is its own, relative."""

    def __init__(self, positions: NDArray[np.int64]) -> None:
        self._order = np.argsort(positions, kind="stable")
        self._sorted = positions[self._order]
        self._next = 0
        self.is_start = np.zeros(len(positions), dtype=np.bool_)
        self.last_offset = np.full(len(positions), -1, dtype=np.int64)

    def put(self, positions: NDArray[np.int64], last_offsets: NDArray[np.int64]) -> None:
        """Answer by the next batches."""
        end = int(np.searchsorted(self._sorted, positions[-1], side="right"))
        if end <= self._next:
            return
        asked = self._sorted[self._next : end]
        rows = np.minimum(np.searchsorted(positions, asked), len(positions) - 1)
        hits = np.flatnonzero(positions[rows] == asked)
        slots = self._order[self._next : end][hits]
        self.is_start[slots] = True
        self.last_offset[slots] = last_offsets[rows[hits]]
        self._next = end


class OffsetQuestions:
    """Asked: relative offsets. ``is_reached``: there is such a batch; ``answers`` (n, 6) by the names above."""

    def __init__(self, offsets: NDArray[np.int64]) -> None:
        self._order = np.argsort(offsets, kind="stable")
        self._sorted = offsets[self._order]
        self._next = 0
        self.is_reached = np.zeros(len(offsets), dtype=np.bool_)
        self.answers = np.full((len(offsets), _COLUMNS), -1, dtype=np.int64)

    def put(self, reach: NDArray[np.int64], columns: NDArray[np.int64]) -> None:
        """Answer by the next batches; ``reach`` is the largest last offset up to each, ``columns`` (6, rows)."""
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
        self.at_position = PositionQuestions(positions)
        self.by_offset = OffsetQuestions(offsets)
        self.by_time_offset = OffsetQuestions(time_offsets)
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
        self.at_position.put(batches.position, last)
        self.by_offset.put(reach, columns)
        self.by_time_offset.put(reach, columns)
        self.max_timestamp, self._max_timestamp_offset = int(so_far[-1]), int(so_far_offset[-1])
        self._reach = int(reach[-1])
