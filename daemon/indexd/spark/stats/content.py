"""What one stretch of the log holds: counted by topic and hour, by size, by key, tag and host, and by the clock.

``ContentCounter`` counts batches into arrays; ``Content`` is what comes of it: small, pickled to the driver, and merged
there with ``merge``, which is a pure function. Stretches merge only with the one behind them, since the clock's steps
between two of them count, too; apart from that it does not matter how the log was split, as far as the counts are exact
(``tally``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.dispatch import DispatchBatch, TopicTable
from indexd.errors import DisturbedError
from indexd.spark.stats.clock import Clock, Events
from indexd.spark.stats.content_kernel import CELL, GROW, NO_FRAME, SUMS, THIN, Cells, Wanted, count_rows, move_cells
from indexd.spark.stats.parts_kernel import BUCKETS
from indexd.spark.stats.tally import Counting, Sample, Tally

#: More pairs of topic and hour than this are not told apart by hour any more, in one stretch.
_CELLS_MAX = 1 << 18
_CELLS_FIRST = 1 << 10
# Tags and hosts are few where a store is as it should be.
_NAMES_CAPACITY = 1 << 12
# A stretch is counted with so many times the capacity that its result has.
_COUNTING_FACTOR = 4
#: What ``Wanted.topics`` calls every topic.
ALL_TOPICS: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """Which messages count, and how they are looked at.

    ``topics`` empty: all. Store times in ms, both ends included. ``silence``: so many ms without a message are one.
    ``capacity``: how many distinct keys a stretch keeps; twice as many need about twice the memory.
    """

    topics: tuple[str, ...] = ALL_TOPICS
    begin: int = -(1 << 63)
    end: int = (1 << 63) - 1
    silence: int = 60_000
    capacity: int = 1 << 14

    @property
    def is_everything(self) -> bool:
        """Nothing is left out."""
        return not self.topics and self.begin == -(1 << 63) and self.end == (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The counts of a stretch; ``cells`` by (topic's bytes, hours since 1970) in the order of CELL.

    ``sums`` in the order of SUMS. ``bodies`` int64 (2, BUCKETS): messages and body bytes by bucket of body size.
    """

    cells: dict[tuple[bytes, int], tuple[int, ...]]
    sums: tuple[int, ...]
    bodies: NDArray[np.int64]
    clock: Clock
    keys: Tally
    uniq_keys: Tally
    tags: Tally
    hosts: Tally
    key_sample: Sample
    uniq_sample: Sample
    #: Bytes of log that were passed over as unreadable (``--on-corrupt skip``).
    skipped_bytes: int = 0
    # What the merging of a job adds up.
    entries_of: tuple[int, ...] = field(default=())

    @classmethod
    def empty(cls, capacity: int) -> Content:
        """Of no message."""
        return cls(
            cells={},
            sums=(0,) * len(SUMS),
            bodies=np.zeros((2, BUCKETS), dtype=np.int64),
            clock=Clock(),
            keys=Tally.empty(capacity),
            uniq_keys=Tally.empty(capacity),
            tags=Tally.empty(_NAMES_CAPACITY),
            hosts=Tally.empty(_NAMES_CAPACITY),
            key_sample=Sample.empty(capacity),
            uniq_sample=Sample.empty(capacity),
        )

    def sum(self, name: str) -> int:
        """One of SUMS."""
        return self.sums[SUMS.index(name)]

    def total(self, name: str) -> int:
        """One of CELL over all topics and hours."""
        column = CELL.index(name)
        return sum(values[column] for values in self.cells.values())


def merge(one: Content, behind: Content) -> Content:
    """Of a stretch and the one behind it: associative, and of counts alone."""
    cells = dict(one.cells)
    for place, values in behind.cells.items():
        mine = cells.get(place)
        cells[place] = values if mine is None else tuple(a + b for a, b in zip(mine, values, strict=True))
    return Content(
        cells=cells,
        sums=tuple(a + b for a, b in zip(one.sums, behind.sums, strict=True)),
        bodies=one.bodies + behind.bodies,
        clock=one.clock.merged(behind.clock),
        keys=one.keys.merged(behind.keys),
        uniq_keys=one.uniq_keys.merged(behind.uniq_keys),
        tags=one.tags.merged(behind.tags),
        hosts=one.hosts.merged(behind.hosts),
        key_sample=one.key_sample.merged(behind.key_sample),
        uniq_sample=one.uniq_sample.merged(behind.uniq_sample),
        skipped_bytes=one.skipped_bytes + behind.skipped_bytes,
        entries_of=one.entries_of + behind.entries_of,
    )


def wanted_topics(topics: TopicTable, selection: Selection) -> NDArray[np.uint8]:
    """1 for each topic id that is selected."""
    if not selection.topics:
        return np.ones(max(len(topics), 1), dtype=np.uint8)
    names = {topic.encode("utf-8", "surrogateescape") for topic in selection.topics}
    known = [topics.raw_name(number) in names for number in range(len(topics))]
    return np.array(known or [False], dtype=np.uint8)


class ContentCounter:
    """Counts batches in log order; one owner. Raises DisturbedError when the log changes while it is read."""

    def __init__(self, selection: Selection, skip_mask: int) -> None:
        self._selection = selection
        self._skip_mask = skip_mask
        self._names: list[bytes] = []
        self._cells = _make_cells(_CELLS_FIRST)
        self._folds = False
        self._sums = np.zeros(len(SUMS), dtype=np.int64)
        self._bodies = np.zeros((2, BUCKETS), dtype=np.int64)
        self._events = Events(selection.silence)
        capacity = selection.capacity
        self._tables = (
            Counting(_COUNTING_FACTOR * capacity, is_sample=False),
            Counting(capacity, is_sample=True),
            Counting(_COUNTING_FACTOR * capacity, is_sample=False),
            Counting(capacity, is_sample=True),
            Counting(_NAMES_CAPACITY, is_sample=False),
            Counting(_NAMES_CAPACITY, is_sample=False),
        )
        self._skipped_bytes = 0

    def skip(self, size: int) -> None:
        """So many bytes of the log were passed over."""
        self._skipped_bytes += size

    def add(self, batch: DispatchBatch, frames: NDArray[np.uint8]) -> None:
        """Count a batch; ``frames`` are the bytes of the log from its ``begin_offset`` on."""
        for number in range(len(self._names), len(batch.topics)):
            self._names.append(batch.topics.raw_name(number))
        row = 0
        tables = tuple(counting.table for counting in self._tables)
        base = np.uint64(batch.begin_offset)
        topics = wanted_topics(batch.topics, self._selection)
        while row < batch.rows:
            wanted = Wanted(
                topics,
                np.int64(self._selection.begin),
                np.int64(self._selection.end),
                np.int64(self._selection.silence),
                np.int64(self._skip_mask),
                self._folds,
            )
            status, row = count_rows(
                frames, base, batch.columns, row, batch.rows, wanted, self._cells, self._sums, self._bodies,
                self._events.clock, self._events.rows, tables,
            )  # fmt: skip
            if status == THIN:
                self._events.thin_out()
                for counting in self._tables:
                    counting.thin_out()
            elif status == GROW:
                self._cells = _grown(self._cells)
                self._folds = int(self._cells.used[0]) >= _CELLS_MAX
            elif status == NO_FRAME:
                raise DisturbedError(f"the log at {batch.columns.phy_offset[row]} was rewritten while it was read")

    def content(self) -> Content:
        """What has been counted."""
        keys, key_sample, uniq_keys, uniq_sample, tags, hosts = self._tables
        capacity = self._selection.capacity
        return Content(
            cells=self._cell_values(),
            sums=tuple(int(value) for value in self._sums),
            bodies=self._bodies.copy(),
            clock=self._events.result(),
            keys=keys.tally(capacity),
            uniq_keys=uniq_keys.tally(capacity),
            tags=tags.tally(_NAMES_CAPACITY),
            hosts=hosts.tally(_NAMES_CAPACITY),
            key_sample=key_sample.sample(),
            uniq_sample=uniq_sample.sample(),
            skipped_bytes=self._skipped_bytes,
            entries_of=(int(self._sums[SUMS.index("entries")]),),
        )

    def _cell_values(self) -> dict[tuple[bytes, int], tuple[int, ...]]:
        found = {}
        for place in np.flatnonzero(self._cells.topic >= 0):
            name = self._names[int(self._cells.topic[place])]
            values = tuple(int(value) for value in self._cells.values[place])
            found[name, int(self._cells.hour[place])] = values
        return found


def _make_cells(size: int) -> Cells:
    return Cells(
        topic=np.full(size, -1, dtype=np.int32),
        hour=np.zeros(size, dtype=np.int64),
        values=np.zeros((size, len(CELL)), dtype=np.int64),
        used=np.zeros(1, dtype=np.int64),
    )


def _grown(cells: Cells) -> Cells:
    # Twice the size; the places follow from the size, so each is found anew.
    new = _make_cells(2 * len(cells.topic))
    move_cells(cells.topic, cells.hour, cells.values, new.topic, new.hour, new.values)
    new.used[0] = cells.used[0]
    return new
