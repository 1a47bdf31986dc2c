"""The slots of an index file as arrays, and where its zeros begin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.sparse.format import OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE
from indexd.storage.disk import Disk, DiskFile

#: So many slots of a file are looked at, 32 MiB of an .index; one of Kafka's default size holds a third of that.
SLOTS_MAX = 1 << 22
_WINDOW_SLOTS = 1 << 16
_TIME_ENTRY = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """``live`` slots, then ``zeros`` unused ones (a tail of nothing but zeros), then ``ragged`` bytes of no slot.

    ``first`` and ``second`` hold the live slots, SLOTS_MAX of them at most: int64 relative offsets and positions of an
    .index, timestamps and relative offsets of a .timeindex.
    """

    live: int
    zeros: int
    ragged: int
    entry_size: int
    first: NDArray[np.int64]
    second: NDArray[np.int64]

    @property
    def judged(self) -> int:
        """How many slots are in the arrays."""
        return len(self.first)

    def without_first(self) -> Slots:
        """The same with no live slot at all: for a file whose only one turned out to be unused."""
        return Slots(0, self.zeros + self.live, self.ragged, self.entry_size, self.first[:0], self.second[:0])


NO_OFFSET_SLOTS = Slots(0, 0, 0, OFFSET_ENTRY_SIZE, np.empty(0, np.int64), np.empty(0, np.int64))
NO_TIME_SLOTS = Slots(0, 0, 0, TIME_ENTRY_SIZE, np.empty(0, np.int64), np.empty(0, np.int64))


def read_offset_slots(disk: Disk, path: Path) -> Slots:
    """Of an .index."""
    with disk.open_read(path) as file:
        size = file.size()
        live = _live(file, size, OFFSET_ENTRY_SIZE)
        data = file.pread(min(live, SLOTS_MAX) * OFFSET_ENTRY_SIZE, 0)
    pairs = np.frombuffer(data[: len(data) - len(data) % OFFSET_ENTRY_SIZE], dtype=">i4").astype(np.int64)
    slots = size // OFFSET_ENTRY_SIZE
    return Slots(live, slots - live, size % OFFSET_ENTRY_SIZE, OFFSET_ENTRY_SIZE, pairs[0::2], pairs[1::2])


def read_time_slots(disk: Disk, path: Path) -> Slots:
    """Of a .timeindex. The first slot counts as live even if all are zeros: it may be an entry of 1970."""
    with disk.open_read(path) as file:
        size = file.size()
        slots = size // TIME_ENTRY_SIZE
        live = min(max(_live(file, size, TIME_ENTRY_SIZE), 1), slots)
        data = file.pread(min(live, SLOTS_MAX) * TIME_ENTRY_SIZE, 0)
    rows = np.frombuffer(data[: len(data) - len(data) % TIME_ENTRY_SIZE], dtype=_TIME_ENTRY)
    timestamps, offsets = rows["timestamp"].astype(np.int64), rows["offset"].astype(np.int64)
    return Slots(live, slots - live, size % TIME_ENTRY_SIZE, TIME_ENTRY_SIZE, timestamps, offsets)


def _live(file: DiskFile, size: int, entry_size: int) -> int:
    """The number of slots up to the last that is not all zeros; looked for from the end, in bounded steps."""
    end = size // entry_size
    while end > 0:
        start = max(0, end - _WINDOW_SLOTS)
        window = np.frombuffer(file.pread((end - start) * entry_size, start * entry_size), dtype=np.uint8)
        used = np.flatnonzero(window)
        if len(used):
            return start + int(used[-1]) // entry_size + 1
        end = start
    return 0
