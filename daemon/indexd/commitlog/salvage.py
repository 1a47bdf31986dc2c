"""Behind damage: where the next frame begins that proves itself by its own offset, its lengths and its checksums."""

from __future__ import annotations

import numpy as np

from indexd.commitlog.batcher import Batcher
from indexd.commitlog.cursor import SegmentCursor
from indexd.commitlog.format import HEAD_SIZE, Outcome
from indexd.commitlog.heads_kernel import find_frame
from indexd.commitlog.kernel import Rules


def next_proven(
    cursor: SegmentCursor, batcher: Batcher, rules: Rules, begin: int, window: int, not_before: int
) -> int | None:
    """The offset of the next proven frame behind ``begin`` in the open segment, or None.

    Frames with a store timestamp below ``not_before`` do not count: in a segment that is being written they are what an
    older and longer log has left behind.
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
        if _is_frame(cursor, batcher, rules, offset, window, not_before):
            return offset
        offset += 1
    return None


def _is_frame(cursor: SegmentCursor, batcher: Batcher, rules: Rules, offset: int, window: int, not_before: int) -> bool:
    assert cursor.segment is not None
    limit = cursor.fill(offset, window)
    found = batcher.decode(cursor.buffer, limit, offset, cursor.segment.end, rules)
    if found.batch is None and found.outcome is Outcome.NOT_YET_WRITTEN and found.total > limit:
        limit = cursor.fill(offset, found.total)
        found = batcher.decode(cursor.buffer, limit, offset, cursor.segment.end, rules)
    return found.batch is not None and int(found.batch.columns.store_timestamp[0]) >= not_before
