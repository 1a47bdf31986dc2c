"""The entries and slots of an index file as arrays, read by number, and the search for a physical offset among them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexd.index.format import ENTRY_SIZE, IndexLayout
from indexd.storage.disk import DiskFile

ENTRIES_PER_READ = 1 << 20


def read_entries(file: DiskFile, layout: IndexLayout, number: int, count: int) -> NDArray[np.uint32]:
    """Entries ``number`` .. ``number + count - 1`` as rows of five big-endian uint32; fewer if the file is short."""
    entries = np.empty((count, 5), dtype=np.uint32)
    size = file.pread_into(entries.reshape(-1).view(np.uint8).data, layout.entry_position(number))
    return entries[: size // ENTRY_SIZE]


def read_slots(file: DiskFile, layout: IndexLayout) -> NDArray[np.uint32]:
    """All slots, zeros where the file is short."""
    slots = np.zeros(layout.hash_slot_num, dtype=np.uint32)
    file.pread_into(slots.view(np.uint8).data, layout.slot_position(0))
    return slots


def first_entry_at(file: DiskFile, layout: IndexLayout, low: int, high: int, phy_offset: int) -> int:
    """The first entry of ``low`` .. ``high - 1`` of a message at ``phy_offset`` or behind it, or ``high``.

    Offsets never fall along a file.
    """
    while low < high:
        middle = (low + high) // 2
        if phy_offset_of(read_entries(file, layout, middle, 1)[0]) < phy_offset:
            low = middle + 1
        else:
            high = middle
    return low


def phy_offset_of(entry: NDArray[np.uint32]) -> int:
    """The physical offset of one row of ``read_entries``."""
    return int.from_bytes(entry[1:3].tobytes(), "big", signed=True)


def time_diff_of(entry: NDArray[np.uint32]) -> int:
    """The time difference, s, of one row of ``read_entries``."""
    return int.from_bytes(entry[3:4].tobytes(), "big", signed=True)
