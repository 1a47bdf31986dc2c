"""Holes: runs of messages whose keys are not findable, and how they grow together where tasks meet.

A hole goes on until a message comes whose keys are all findable; messages without keys neither end nor begin one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: So many of the largest are kept; all are counted.
HOLES_MAX = 1000
_PRUNE_AT = 4 * HOLES_MAX


@dataclass(frozen=True, slots=True)
class Hole:
    """Messages from physical offset ``begin`` on; ``last`` is where the last of them begins, ``end`` where it ends.

    ``messages`` are those with a key that is not findable, ``keys`` those keys, of which ``unreachable`` have an entry
    that no walk meets. Times: smallest and largest store timestamp of these messages, ms. ``end`` is 0 until somebody
    has looked.
    """

    begin: int
    last: int
    begin_timestamp: int
    end_timestamp: int
    messages: int
    keys: int
    end: int = 0
    unreachable: int = 0

    @property
    def size(self) -> int:
        """Bytes of log, those of other messages in between included."""
        return self.end - self.begin

    def joined(self, later: Hole) -> Hole:
        """This one and one behind it, with no findable message between them."""
        return Hole(
            self.begin,
            later.last,
            min(self.begin_timestamp, later.begin_timestamp),
            max(self.end_timestamp, later.end_timestamp),
            self.messages + later.messages,
            self.keys + later.keys,
            later.end,
            self.unreachable + later.unreachable,
        )

    def to_json(self) -> dict[str, Any]:
        """A line of ``--json``."""
        return {
            "kind": "hole",
            "beginOffset": self.begin,
            "endOffset": self.end,
            "bytes": self.size,
            "beginTimestamp": self.begin_timestamp,
            "endTimestamp": self.end_timestamp,
            "messages": self.messages,
            "keys": self.keys,
            "unreachableKeys": self.unreachable,
        }


@dataclass(slots=True)
class Holes:
    """The holes of a stretch. The first and the last may go on in the stretches beside it, so they stand apart.

    ``is_open_before``: no findable message before the first hole; ``is_open_behind``: none behind the last one.
    ``seen`` is whether there was any message with keys at all. ``count`` are the inner ones, kept or not.
    """

    first: Hole | None = None
    last: Hole | None = None
    count: int = 0
    is_open_before: bool = False
    is_open_behind: bool = False
    seen: bool = False
    inner: list[Hole] = field(default_factory=list)

    def whole(self) -> None:
        """A message, or many, whose keys are all findable."""
        self.seen = True
        self.is_open_behind = False

    def add(self, hole: Hole) -> None:
        """Messages behind all that was seen before, none of them findable."""
        if not self.seen:
            self.is_open_before = True
        if self.last is not None and self.is_open_behind:
            self._replace_last(self.last.joined(hole))
        else:
            self._append(hole)
        self.seen = self.is_open_behind = True

    def merge(self, later: Holes) -> None:
        """Take over the next stretch of the log."""
        if not later.seen:
            return
        if later.first is None:
            self.whole()
            return
        if not later.is_open_before:
            self.whole()
        self.add(later.first)
        if later.last != later.first:
            self.whole()
            for hole in later.inner:
                self._append_inner(hole)
            self.count += later.count - len(later.inner)
            assert later.last is not None
            self.add(later.last)
        self.is_open_behind = later.is_open_behind

    def all(self) -> tuple[list[Hole], int]:
        """The largest ones in log order, and how many there are."""
        ends = [hole for hole in dict.fromkeys((self.first, self.last)) if hole is not None]
        kept = sorted([*self.inner, *ends], key=_smallness)[:HOLES_MAX]
        return sorted(kept, key=lambda hole: hole.begin), self.count + len(ends)

    def close(self, ends: dict[int, int]) -> None:
        """Give each kept hole its end: ``ends`` says where a message ends, by where it begins."""
        one = self.first == self.last
        self.first = self.first and replace(self.first, end=ends[self.first.last])
        self.last = self.first if one else self.last and replace(self.last, end=ends[self.last.last])
        self.inner = [replace(hole, end=ends[hole.last]) for hole in self.inner]

    def kept(self) -> list[Hole]:
        """The holes whose ends are of interest."""
        self._prune()
        return [hole for hole in (self.first, self.last, *self.inner) if hole is not None]

    def _replace_last(self, hole: Hole) -> None:
        if self.first == self.last:
            self.first = hole
        self.last = hole

    def _append(self, hole: Hole) -> None:
        if self.first is None:
            self.first = hole
        elif self.last is not None and self.last != self.first:
            self._append_inner(self.last)
        self.last = hole

    def _append_inner(self, hole: Hole) -> None:
        self.inner.append(hole)
        self.count += 1
        if len(self.inner) >= _PRUNE_AT:
            self._prune()

    def _prune(self) -> None:
        self.inner = sorted(self.inner, key=_smallness)[:HOLES_MAX]


def _smallness(hole: Hole) -> tuple[int, int, int]:
    return -hole.keys, -hole.messages, hole.begin


def add_rows(
    holes: Holes,
    phy_offsets: NDArray[np.int64],
    timestamps: NDArray[np.int64],
    missing: NDArray[np.int32],
    unreachable: NDArray[np.int64] | None = None,
) -> None:
    """The rows of a batch into ``holes``; ``missing``: keys of each that are not findable, -1 for one without.

    ``unreachable``: keys of each that have an entry which no walk meets; such a key may be findable by another one.
    """
    rows = np.flatnonzero(missing >= 0)
    if len(rows) == 0:
        return
    lost = missing[rows]
    if not lost.any():
        holes.whole()
        return
    is_lost = lost > 0
    begins = np.flatnonzero(np.diff(is_lost, prepend=~is_lost[:1]))
    keys = np.add.reduceat(lost, begins, dtype=np.int64)
    broken = np.zeros_like(lost) if unreachable is None else np.minimum(lost, unreachable[rows])
    reachless = np.add.reduceat(broken, begins, dtype=np.int64)
    oldest, newest = (ufunc.reduceat(timestamps[rows], begins) for ufunc in (np.minimum, np.maximum))
    bounds = [*begins.tolist(), len(rows)]
    for run, (first, behind) in enumerate(pairwise(bounds)):
        if not is_lost[first]:
            holes.whole()
            continue
        begin, last = int(phy_offsets[rows[first]]), int(phy_offsets[rows[behind - 1]])
        times = int(oldest[run]), int(newest[run])
        holes.add(Hole(begin, last, *times, behind - first, int(keys[run]), unreachable=int(reachless[run])))
