"""What one stretch of the log holds: counted by topic and time, by size, by key, tag and host, and by the clock.

``ContentCounter`` counts batches into arrays; ``Content`` is what comes of it: small, pickled to the driver, and merged
there with ``merge``, which is a pure function. Stretches merge only with the one behind them, since the clock's steps
between two of them count, too; apart from that it does not matter how the log was split, as far as the counts are exact
(``tally``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.errors import DisturbedError
from indexd.spark.stats.buckets import HOUR, STEPS, step_for
from indexd.spark.stats.clock import Clock, Events
from indexd.spark.stats.content_kernel import (
    CELL,
    GROW,
    NO_BIN,
    NO_FRAME,
    SUMS,
    THIN,
    Cells,
    Wanted,
    count_rows,
    move_cells,
)
from indexd.spark.stats.parts_kernel import BUCKETS
from indexd.spark.stats.tally import Counting, Sample, Tally

#: More pairs of topic and bin than this make bins longer, and those of an hour are not told apart any more.
_CELLS_MAX = 1 << 18
_CELLS_FIRST = 1 << 10
# Tags and hosts are few where a store is as it should be.
_NAMES_CAPACITY = 1 << 12
# A stretch is counted with so many times the capacity that its result has.
_COUNTING_FACTOR = 4
Bins = dict[tuple[bytes, int], tuple[int, ...]]
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


@dataclass(frozen=True, eq=False)
class Content:
    """The counts of a stretch; ``bins`` by (topic's bytes, number of the ``step`` ms since 1970) in the order of CELL.

    ``step`` fits to the time from the least store time to the greatest, and is an hour at most.
    ``sums`` in the order of SUMS. ``bodies`` int64 (2, BUCKETS): messages and body bytes by bucket of body size.
    """

    bins: Bins
    step: int
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
            bins={},
            step=STEPS[0],
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
        """One of CELL over all topics and bins."""
        column = CELL.index(name)
        return sum(values[column] for values in self.bins.values())

    @cached_property
    def cells(self) -> Bins:
        """By (topic's bytes, hours since 1970)."""
        return _folded(self.bins, HOUR // self.step)


def merge(one: Content, behind: Content) -> Content:
    """Of a stretch and the one behind it: associative, and of counts alone."""
    clock = one.clock.merged(behind.clock)
    step = max(one.step, behind.step, _step_of(clock))
    bins = _folded(one.bins, step // one.step)
    _add_to(bins, _folded(behind.bins, step // behind.step))
    while len(bins) > _CELLS_MAX and step < HOUR:
        longer = STEPS[STEPS.index(step) + 1]
        bins, step = _folded(bins, longer // step), longer
    return Content(
        bins=bins,
        step=step,
        sums=tuple(a + b for a, b in zip(one.sums, behind.sums, strict=True)),
        bodies=one.bodies + behind.bodies,
        clock=clock,
        keys=one.keys.merged(behind.keys),
        uniq_keys=one.uniq_keys.merged(behind.uniq_keys),
        tags=one.tags.merged(behind.tags),
        hosts=one.hosts.merged(behind.hosts),
        key_sample=one.key_sample.merged(behind.key_sample),
        uniq_sample=one.uniq_sample.merged(behind.uniq_sample),
        skipped_bytes=one.skipped_bytes + behind.skipped_bytes,
        entries_of=one.entries_of + behind.entries_of,
    )


def _step_of(clock: Clock) -> int:
    return min(step_for(clock.greatest - clock.least), HOUR)


def _folded(bins: Bins, factor: int) -> Bins:
    # A copy in which so many bins are one.
    if factor == 1:
        return dict(bins)
    found: Bins = {}
    for (topic, number), values in bins.items():
        _add_to(found, {(topic, number if number == NO_BIN else number // factor): values})
    return found


def _add_to(bins: Bins, others: Bins) -> None:
    for place, values in others.items():
        mine = bins.get(place)
        bins[place] = values if mine is None else tuple(a + b for a, b in zip(mine, values, strict=True))


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
        self._step, self._folds = STEPS[0], False
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
                np.int64(self._step),
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
                self._make_room()
            elif status == NO_FRAME:
                raise DisturbedError(f"the log at {batch.columns.phy_offset[row]} was rewritten while it was read")

    def _make_room(self) -> None:
        # Longer bins where what was seen has outgrown them, else twice the size.
        is_full = int(self._cells.used[0]) >= _CELLS_MAX
        least = STEPS[STEPS.index(self._step) + 1] if is_full and self._step < HOUR else self._step
        if not self._fold(max(least, _step_of(self._events.result()))):
            self._cells = _moved(self._cells, 2, 1)
            self._folds = is_full

    def _fold(self, step: int) -> bool:
        # Whether that makes another table.
        factor, self._step = step // self._step, step
        if factor > 1:
            self._cells = _moved(self._cells, 1, factor)
        return factor > 1

    def content(self) -> Content:
        """What has been counted."""
        clock = self._events.result()
        self._fold(max(self._step, _step_of(clock)))
        keys, key_sample, uniq_keys, uniq_sample, tags, hosts = self._tables
        capacity = self._selection.capacity
        return Content(
            bins=self._bins(),
            step=self._step,
            sums=tuple(int(value) for value in self._sums),
            bodies=self._bodies.copy(),
            clock=clock,
            keys=keys.tally(capacity),
            uniq_keys=uniq_keys.tally(capacity),
            tags=tags.tally(_NAMES_CAPACITY),
            hosts=hosts.tally(_NAMES_CAPACITY),
            key_sample=key_sample.sample(),
            uniq_sample=uniq_sample.sample(),
            skipped_bytes=self._skipped_bytes,
            entries_of=(int(self._sums[SUMS.index("entries")]),),
        )

    def _bins(self) -> Bins:
        found = {}
        for place in np.flatnonzero(self._cells.topic >= 0):
            name = self._names[int(self._cells.topic[place])]
            values = tuple(int(value) for value in self._cells.values[place])
            found[name, int(self._cells.bin[place])] = values
        return found


def _make_cells(size: int) -> Cells:
    return Cells(
        topic=np.full(size, -1, dtype=np.int32),
        bin=np.zeros(size, dtype=np.int64),
        values=np.zeros((size, len(CELL)), dtype=np.int64),
        used=np.zeros(1, dtype=np.int64),
    )


def _moved(cells: Cells, times: int, factor: int) -> Cells:
    # So many times the size; the places follow from the size, so each is found anew.
    new = _make_cells(times * len(cells.topic))
    move_cells(cells, new, np.int64(factor))
    return new
