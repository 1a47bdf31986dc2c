"""Reads the entries and slots of an index file as arrays, walks all of them, and brings a file back to what holds.

Entries are append-only, so the rest of a file follows from them: they are read in order, each is held against the slots
as they were at that moment, and slots and header are written again where they differ. Under a second for 20,000,000.
"""

from __future__ import annotations

import zlib
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.index.check_kernel import CODES, FOUND, LAST_PHY_OFFSET, USED_SLOT_COUNT, check_entries
from indexd.index.format import (
    ENTRY_SIZE,
    HEADER_SIZE,
    FileMark,
    Flavour,
    IndexEntry,
    IndexHeader,
    IndexLayout,
    unpack_entry,
)
from indexd.output import clear_behind
from indexd.storage.disk import DiskFile

ENTRIES_PER_READ = 1 << 20
_FOUND_MAX = 1000


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
    return bisect_left(
        range(high), phy_offset, low, high, key=lambda number: phy_offset_of(read_entries(file, layout, number, 1)[0])
    )


def phy_offset_of(entry: NDArray[np.uint32]) -> int:
    """The physical offset of one row of ``read_entries``."""
    return int.from_bytes(entry[1:3].tobytes(), "big", signed=True)


@dataclass(slots=True)
class WalkedEntries:
    """What the entries before ``number`` come to: the slots as they must be, numbers of the header, what is wrong.

    ``found`` and ``counts`` as ``check_entries`` leaves them; ``crc`` of the entries' bytes, where it was asked for.
    """

    number: int
    slots: NDArray[np.uint32]
    used_slot_count: int
    first: IndexEntry | None
    last: IndexEntry | None
    found: NDArray[np.int64]
    counts: NDArray[np.int64]
    crc: int


def walk_entries(
    file: DiskFile,
    layout: IndexLayout,
    header: IndexHeader,
    flavour: Flavour,
    on_read: Callable[[int], object],
    *,
    sound_only: bool = False,
) -> WalkedEntries:
    """Hold every entry against those before it; reads only, and says how much.

    ``sound_only`` ends before the first one that does not hold, and sums up the bytes of those that do.
    """
    slots, counts = np.zeros(layout.hash_slot_num, dtype=np.uint32), np.zeros(CODES, dtype=np.int64)
    state, found = np.zeros(3, dtype=np.int64), np.empty((1 if sound_only else _FOUND_MAX, 4), dtype=np.int64)
    state[LAST_PHY_OFFSET] = header.begin_phy_offset
    number, crc = 1, 0
    first = last = None
    count = min(header.index_count, layout.index_num)
    while number < count:
        entries = read_entries(file, layout, number, min(count - number, ENTRIES_PER_READ))
        on_read(entries.nbytes)
        check_entries(
            entries, number, slots, flavour.counts_every_put, layout.index_num,
            header.begin_phy_offset, header.end_phy_offset, state, counts, found,
        )  # fmt: skip
        if len(entries) == 0:
            break
        if sound_only and state[FOUND]:
            sound = replace(header, index_count=int(found[0, 0]))
            return walk_entries(file, layout, sound, flavour, int, sound_only=True)
        if sound_only:
            crc = zlib.crc32(entries.data, crc)
        first = first or unpack_entry(entries[0].tobytes())
        last = unpack_entry(entries[-1].tobytes())
        number += len(entries)
    used = int(state[USED_SLOT_COUNT])
    return WalkedEntries(number, slots, used, first, last, found[: int(state[FOUND])], counts, crc)


class Replayed(NamedTuple):
    """What holds of a file: its mark, cut to the entries that hold, and the slots that belong to them."""

    mark: FileMark
    slots: NDArray[np.uint32]


def replay_file(
    file: DiskFile,
    mark: FileMark,
    layout: IndexLayout,
    flavour: Flavour,
    on_read: Callable[[int], object] = int,
) -> Replayed:
    """Which of a mark's entries hold, and the slots rebuilt from them; reads only, and says how much.

    Nothing holds when the first entry, or the last of a whole file, is not where the header says: a file of another.
    """
    header = mark.header
    walked = walk_entries(file, layout, header, flavour, on_read, sound_only=True)
    if walked.first is not None and walked.last is not None:
        is_whole = walked.number == header.index_count
        is_other = walked.first.phy_offset != header.begin_phy_offset
        if is_other or (is_whole and walked.last.phy_offset != header.end_phy_offset):
            walked = walk_entries(file, layout, replace(header, index_count=1), flavour, int, sound_only=True)
    kept = replace(header, used_slot_count=walked.used_slot_count, index_count=walked.number)
    is_full = mark.full and walked.number == header.index_count
    return Replayed(FileMark(mark.name, kept, is_full, 0, walked.crc, zlib.crc32(walked.slots.data)), walked.slots)


def write_back(file: DiskFile, replayed: Replayed, layout: IndexLayout) -> bool:
    """Make the file what ``replayed`` says, durably; True if header or slots had to be changed.

    Behind the last entry of a file that is not full there are zeros then.
    """
    header, changed = replayed.mark.header, False
    if IndexHeader.unpack(file.pread(HEADER_SIZE, 0)) != header:
        file.pwrite(header.pack(), 0)
        changed = True
    if not np.array_equal(read_slots(file, layout), replayed.slots):
        file.pwrite(replayed.slots.view(np.uint8).data, layout.slot_position(0))
        changed = True
    if not replayed.mark.full:
        clear_behind(file, layout.entry_position(header.index_count))
    if changed or not replayed.mark.full:
        file.fsync()
    return changed
