"""How far a log goes, as seen from outside: for figures alone, never for what is read or believed.

The reader knows exactly, but only once it is there; while it is behind, what is left can be told without reading it.
"""

from __future__ import annotations

from indexd.commitlog.format import BLANK_SIZE
from indexd.commitlog.segments import Segment, SegmentList
from indexd.errors import DiskError
from indexd.storage.disk import Disk, DiskFile

# What is looked at a step: of 1 GiB, 18 of them.
_BLOCK_SIZE = 4096


def log_end(disk: Disk, log: SegmentList, known: int) -> int:
    """The physical offset behind the last byte that is not zero, at least ``known``. Raises DiskError.

    Found by halving: a log is written from the front. A body with 4 KiB of zeros in the newest segment may hide what
    is behind it; and what is left of a longer log that was cut counts as written.
    """
    for segment in reversed(log.segments):
        if segment.end <= known:
            break
        try:
            with disk.open_read(segment.path) as file:
                if known <= segment.base and not any(file.pread(BLANK_SIZE, 0)):
                    continue  # made ahead, nothing is in it
                return max(end_within(file, segment, max(known, segment.base)), known)
        except DiskError as error:
            if not error.is_missing:
                raise
    return known


def end_within(file: DiskFile, segment: Segment, known: int) -> int:
    """Behind the last byte of a segment that is not zero, found by halving; everything before ``known`` is written."""
    # Blocks before ``low`` are written, those from ``high`` on are not.
    low = (known - segment.base) // _BLOCK_SIZE
    high = -(-segment.size // _BLOCK_SIZE)
    while low < high:
        middle = (low + high) // 2
        if not is_zero(file.pread(_BLOCK_SIZE, middle * _BLOCK_SIZE)):
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return segment.base
    last = file.pread(_BLOCK_SIZE, (low - 1) * _BLOCK_SIZE).rstrip(b"\0")
    return segment.base + (low - 1) * _BLOCK_SIZE + len(last)


def is_zero(data: bytes) -> bool:
    """Whether no byte is another, some GB a second."""
    return data == bytes(len(data))
