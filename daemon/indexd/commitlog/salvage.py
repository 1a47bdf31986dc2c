"""Behind damage: where the next frame begins that proves itself by its own offset, its lengths and its checksums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from indexd.commitlog.cursor import SegmentCursor
from indexd.commitlog.format import HEAD_SIZE
from indexd.commitlog.heads_kernel import find_frame


def next_proven(cursor: SegmentCursor, begin: int, window: int, is_frame: Callable[[int, int], int]) -> int | None:
    """The offset of the next proven frame behind ``begin`` in the open segment, or None.

    ``is_frame(offset, limit)`` judges the cursor's buffer, whose first ``limit`` bytes stand at ``offset``: 0 no frame,
    1 a frame, more: it has to see as many bytes.
    """
    assert cursor.segment is not None
    offset = begin + 1
    while offset < cursor.segment.end:
        limit = cursor.fill(offset, window)
        at = int(find_frame(cursor.buffer, np.uint64(0), np.uint64(limit), np.uint64(offset)))
        if at >= limit:
            # A head that straddles two windows is found in the second.
            offset += max(limit - HEAD_SIZE + 1, 1)
            continue
        offset += at
        found = is_frame(offset, cursor.fill(offset, window))
        if found > 1:
            found = is_frame(offset, cursor.fill(offset, found))
        if found == 1:
            return offset
        offset += 1
    return None
