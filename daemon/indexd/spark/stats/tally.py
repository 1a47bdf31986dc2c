"""How often each text occurs, in bounded memory, of stretches that are counted apart and merged.

A **Tally** is for the most frequent ones. While the distinct texts fit its capacity it is exact. Beyond that it is a
Misra-Gries summary: when it is full, a number is taken off every count and what falls to nothing is forgotten, so a
count may be too low by at most ``error``, and a text that is missing occurs at most ``error`` times. A second pass
(``count_known``) then counts the candidates exactly.

A **Sample** is for how many distinct texts there are, and how many of them occur once, twice or more often: it keeps
exactly the texts whose 64-bit fingerprint ends in ``level`` zero bits, with exact counts, at the lowest level at which
they fit. Which these are depends on the texts alone: however the log is split and in whatever order the parts are
merged, the same ones are kept. Level 0 is all of them, exactly; above, estimates are off by about 1/sqrt(kept).

Texts are told apart by 64-bit fingerprints; among 10^9 distinct ones two meet with a probability of 3 %.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexd.spark.stats.content_kernel import Table
from indexd.spark.stats.table_kernel import COLUMNS, COUNT, FIRST, PRINT, refill

#: The most keys that one message can bring: half of the longest properties text, and one each of the others.
ROOM = 32767 // 2 + 8
LEVEL_MAX = 63
#: Fingerprints, counts, offsets of the first messages.
Columns = tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Counts by fingerprint, rising; ``firsts`` is the physical offset of the first message with it."""

    prints: NDArray[np.uint64]
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    capacity: int
    #: No count is too low by more than this; 0: they are exact, and none is missing.
    error: int = 0

    @classmethod
    def empty(cls, capacity: int) -> Tally:
        """Of nothing."""
        return cls(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64), capacity)

    @property
    def is_exact(self) -> bool:
        """Every text is there with its true count."""
        return self.error == 0

    def merged(self, other: Tally) -> Tally:
        """Of both stretches together."""
        capacity = min(self.capacity, other.capacity)
        prints, counts, firsts = _united(self, other)
        return Tally(prints, counts, firsts, capacity, self.error + other.error).within(capacity)

    def within(self, capacity: int) -> Tally:
        """At most ``capacity`` of them, the most frequent, less what the first of the others had (Misra-Gries)."""
        if len(self.prints) <= capacity:
            return self
        taken = int(np.partition(self.counts, -capacity - 1)[-capacity - 1])
        kept = self.counts > taken
        return Tally(self.prints[kept], self.counts[kept] - taken, self.firsts[kept], self.capacity, self.error + taken)

    def top(self, number: int) -> list[int]:
        """Indexes of the most frequent, most frequent first; of equals the one that stands first in the log."""
        order = np.lexsort((self.prints, self.firsts, -self.counts))
        return [int(index) for index in order[:number]]


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Exact counts of the texts whose fingerprint ends in ``level`` zero bits, rising by fingerprint."""

    prints: NDArray[np.uint64]
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    capacity: int
    level: int = 0

    @classmethod
    def empty(cls, capacity: int) -> Sample:
        """Of nothing."""
        return cls(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64), capacity)

    @property
    def is_exact(self) -> bool:
        """It holds every text."""
        return self.level == 0

    @property
    def scale(self) -> int:
        """How many texts each one that was kept stands for."""
        return 1 << self.level

    @property
    def distinct(self) -> int:
        """How many distinct texts there are, about."""
        return len(self.prints) * self.scale

    @property
    def spread(self) -> float:
        """The relative standard error of ``distinct``; 0 when it is exact."""
        return 0.0 if self.is_exact else 1 / max(len(self.prints), 1) ** 0.5

    def merged(self, other: Sample) -> Sample:
        """Of both stretches together."""
        level = max(self.level, other.level)
        prints, counts, firsts = _united(self.at_level(level), other.at_level(level))
        return Sample(prints, counts, firsts, min(self.capacity, other.capacity), level).fitted()

    def at_level(self, level: int) -> Sample:
        """What is left of it at a higher level."""
        if level == self.level:
            return self
        kept = self.prints & np.uint64((1 << level) - 1) == 0
        return Sample(self.prints[kept], self.counts[kept], self.firsts[kept], self.capacity, level)

    def fitted(self) -> Sample:
        """At the lowest level at which it fits its capacity."""
        found = self
        while len(found.prints) > found.capacity and found.level < LEVEL_MAX:
            found = found.at_level(found.level + 1)
        return found


class Counting:
    """A counting table that a kernel adds to, and its thinning out: as a Tally, or as a Sample."""

    def __init__(self, capacity: int, *, is_sample: bool) -> None:
        self._capacity = capacity
        self._is_sample = is_sample
        self._error = 0
        self._level = 0
        size = 1 << (2 * (capacity + ROOM) - 1).bit_length()
        self.table = Table(
            rows=np.zeros((size, COLUMNS), dtype=np.uint64),
            used=np.zeros(1, dtype=np.int64),
            limits=np.array([capacity, 0], dtype=np.uint64),
        )

    def thin_out(self) -> None:
        """Make room, if more are used than the capacity."""
        if int(self.table.used[0]) <= self._capacity:
            return
        kept: Tally | Sample
        if self._is_sample:
            kept = self.sample()
            self._level = kept.level
            self.table.limits[1] = kept.scale - 1
        else:
            # Down to half, so that it is long until the next time.
            kept = self.tally(self._capacity // 2)
            self._error = kept.error
        refill(self.table.rows, self.table.used, table_rows(kept.prints, kept.counts, kept.firsts))

    def tally(self, capacity: int) -> Tally:
        """What was counted, the most frequent ``capacity`` of it."""
        return Tally(*self._sorted(), capacity, self._error).within(capacity)

    def sample(self) -> Sample:
        """What was counted, as a sample."""
        return Sample(*self._sorted(), self._capacity, self._level).fitted()

    def _sorted(self) -> Columns:
        rows = self.table.rows
        kept = rows[np.flatnonzero(rows[:, PRINT])]
        kept = kept[np.argsort(kept[:, PRINT])]
        return kept[:, PRINT].copy(), kept[:, COUNT].astype(np.int64), kept[:, FIRST].astype(np.int64)


def table_rows(prints: NDArray[np.uint64], counts: NDArray[np.int64], firsts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Rows of a counting table with these columns."""
    rows = np.zeros((len(prints), COLUMNS), dtype=np.uint64)
    rows[:, PRINT], rows[:, COUNT], rows[:, FIRST] = prints, counts, firsts
    return rows


def _united(one: Tally | Sample, other: Tally | Sample) -> Columns:
    prints, where = np.unique(np.concatenate([one.prints, other.prints]), return_inverse=True)
    counts = np.zeros(len(prints), dtype=np.int64)
    np.add.at(counts, where, np.concatenate([one.counts, other.counts]))
    firsts = np.full(len(prints), np.iinfo(np.int64).max)
    np.minimum.at(firsts, where, np.concatenate([one.firsts, other.firsts]))
    return prints, counts, firsts
