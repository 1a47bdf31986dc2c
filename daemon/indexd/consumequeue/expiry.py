"""Expiry: what of a queue only points before the log's begin (spec rocketmq-store 5.5, 5.8).

Decides and reads; the store removes. Most queues are decided without a look at the disk: by where their newest message
ends and where the first one that counts stands.
"""

from __future__ import annotations

from pathlib import Path

from indexd.consumequeue.format import UNIT_SIZE, file_name
from indexd.consumequeue.kernel import MAX_PHY_OFFSET
from indexd.consumequeue.queues import Queues
from indexd.storage.disk import Disk, DiskFile


def expire_queue(disk: Disk, queues: Queues, slot: int, min_phy_offset: int) -> list[Path] | None:
    """Move the queue's first file and first unit on; the files that it has left, or None if nothing has changed.

    All units must be written. A message never reaches over the begin of a segment, so the one that ends at or before
    ``min_phy_offset`` also stands before it.
    """
    if queues.min_phy[slot] >= min_phy_offset or queues.min[slot] >= queues.written[slot]:
        return None
    end = queues.written[slot]
    last_file = (end - 1) // queues.file_units * queues.file_units
    if queues.state[slot, MAX_PHY_OFFSET] <= min_phy_offset:
        return _move(queues, slot, last_file, end, -1)
    first = queues.first[slot]
    while first < last_file and _phy_offset(disk, queues, slot, first + queues.file_units - 1) < min_phy_offset:
        first += queues.file_units
    begin = max(first, queues.min[slot])
    with disk.open_read(_path(queues, slot, first)) as file:
        minimum, phy_offset = first_at(file, begin - first, min(end - first, queues.file_units), min_phy_offset)
    return _move(queues, slot, first, first + minimum, phy_offset)


def _move(queues: Queues, slot: int, first: int, minimum: int, phy_offset: int) -> list[Path] | None:
    old_first, old_min = queues.first[slot], queues.min[slot]
    queues.first[slot], queues.min[slot], queues.min_phy[slot] = first, minimum, phy_offset
    if (first, minimum) == (old_first, old_min):
        return None
    return [_path(queues, slot, offset) for offset in range(old_first, first, queues.file_units)]


def _path(queues: Queues, slot: int, first: int) -> Path:
    return queues.directories[slot] / file_name(first * UNIT_SIZE)


def _phy_offset(disk: Disk, queues: Queues, slot: int, offset: int) -> int:
    begin = offset // queues.file_units * queues.file_units
    with disk.open_read(_path(queues, slot, begin)) as file:
        return _phy_offset_at(file, offset - begin)


def _phy_offset_at(file: DiskFile, index: int) -> int:
    return int.from_bytes(file.pread(8, index * UNIT_SIZE), "big", signed=True)


def first_at(file: DiskFile, low: int, high: int, phy_offset: int) -> tuple[int, int]:
    """The first of the file's units ``[low, high)`` at ``phy_offset`` or behind it, and where its message stands.

    ``high`` and -1 without one. The units' physical offsets rise; blank ones come first and say 0.
    """
    found = -1
    while low < high:
        middle = (low + high) // 2
        here = _phy_offset_at(file, middle)
        if here < phy_offset:
            low = middle + 1
        else:
            high, found = middle, here
    return low, found
