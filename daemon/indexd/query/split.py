"""Places to read the log in parallel from: each the start of a message, the messages up to the next counted."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from indexd.errors import DiskError, UsageError
from indexd.query.source import QueryIndex
from indexd.sparse.format import OFFSET_ENTRY, OFFSET_ENTRY_SIZE, SegmentMark, index_name


@dataclass(frozen=True, slots=True)
class Split:
    """``messages`` stand in log bytes ``[begin, end)``, the first of them at ``begin``."""

    begin: int
    end: int
    messages: int


def split_log(index: QueryIndex, size: int) -> tuple[Split, ...]:
    """The durably indexed log in stretches of about ``size`` bytes, none over two segments, from the oldest on.

    Exact to one entry of the sparse indexes; ranges that were passed over are inside, their messages not counted.
    UsageError without sparse indexes.
    """
    if size < 1:
        raise UsageError(f"the log cannot be split into stretches of {size} bytes", "give a size of at least 1")
    frontier = index.look().frontier
    if frontier.sparse is None:
        raise UsageError(
            f"{index.files.data} holds no sparse indexes", "run the daemon with sparse = true to have them built"
        )
    splits: list[Split] = []
    for mark in frontier.sparse.segments:
        end = min(mark.base + frontier.segment_size, frontier.sparse.phy_offset)
        points = [*_points(index, mark, size, end - mark.base), (end - mark.base, mark.messages)]
        for (position, ordinal), (next_position, next_ordinal) in pairwise(points):
            splits.append(Split(mark.base + position, mark.base + next_position, next_ordinal - ordinal))
    return tuple(splits)


def _points(index: QueryIndex, mark: SegmentMark, size: int, end: int) -> list[tuple[int, int]]:
    # (position, ordinal): the segment's begin, and the last entry at or before each multiple of size.
    points = [(0, 0)]
    try:
        file = index.disk.open_read(index.files.sparse / index_name(mark.base))
    except DiskError as error:
        if not error.is_missing:
            raise
        return points  # expired meanwhile
    with file:

        def entry(slot: int) -> tuple[int, int]:
            ordinal, position = OFFSET_ENTRY.unpack(file.pread(OFFSET_ENTRY_SIZE, slot * OFFSET_ENTRY_SIZE))
            return position, ordinal

        for target in range(size, end, size):
            slot = bisect_right(range(mark.offset_entries), target, key=lambda slot: entry(slot)[0]) - 1
            if slot >= 0 and entry(slot) > points[-1]:
                points.append(entry(slot))
    return points
