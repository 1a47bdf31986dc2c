"""Split points: where inside a segment reading can begin, exactly, without any index.

A frame proves itself: its own physical offset is where it stands. But a body may hold what looks like a frame, and
behind a blank record may lie what a longer log has left. Both are told by what stands before: a frame or a blank record
that reaches beyond the point. Where there is one, and in the segment being written, the heads are walked from a point
that is known.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from indexd.commitlog.batcher import Batcher
from indexd.commitlog.cursor import SegmentCursor
from indexd.commitlog.format import HEAD_SIZE
from indexd.commitlog.kernel import Rules, is_enclosed, walk_heads
from indexd.commitlog.segments import Segment, SegmentList
from indexd.commitlog.tail import NEVER, next_proven
from indexd.errors import DiskError
from indexd.storage.disk import Disk

_U64 = np.uint64


class SplitPoints:
    """Finds them. ``window`` bytes are read at a time; ``drop_behind`` as in ReaderOptions.

    Raises DiskError, UnsafeStoreError. One owner, no locks.
    """

    def __init__(
        self,
        disk: Disk,
        directories: tuple[Path, ...],
        segment_size: int,
        rules: Rules,
        window: int = 4 << 20,
        drop_behind: int | None = None,
    ) -> None:
        self._cursor = SegmentCursor(disk, directories, segment_size, window, drop_behind)
        self._rules = rules._replace(check_crc=True)
        self._batcher = Batcher(1)
        self._window = window
        self._cursor.refresh()

    @property
    def log(self) -> SegmentList:
        """The segments as they were listed at the start."""
        return self._cursor.log

    def is_in_use(self, offset: int) -> bool:
        """Whether the segment that holds ``offset`` is there and holds anything: a broker makes one ahead."""
        return self._open(offset) and any(self._cursor.buffer[: self._cursor.fill(self._segment.base, 8)])

    def at(self, offset: int, known: int) -> int | None:
        """Where the first message at or behind ``offset`` begins, in the segment that holds it.

        ``known``: where a message begins in this segment, or the segment itself, at or before ``offset``. None where
        the log cannot be followed that far: it ends before, the segment does, or bytes are no frame.
        """
        if offset == known:
            return offset
        if not self._open(offset):
            return None
        if not self._cursor.next_is_in_use():
            return self._walk(offset, known)
        found = next_proven(self._cursor, self._batcher, self._rules, offset - 1, self._window, NEVER)
        if found is None:
            return self._walk(offset, known)
        return self._walk(offset, known) if self._is_enclosed(found) else found

    def close(self) -> None:
        """Close what is open."""
        self._cursor.close()

    @property
    def _segment(self) -> Segment:
        assert self._cursor.segment is not None
        return self._cursor.segment

    def _open(self, offset: int) -> bool:
        if self._cursor.holds(offset):
            return True
        if not self._cursor.open(offset):
            return False
        # A point is proven by what stands up to a whole frame before it.
        self._cursor.spare_pages()
        return True

    def _is_enclosed(self, offset: int) -> bool:
        begin = max(offset - int(self._rules.frame_size_max), self._segment.base)
        while begin < offset:
            # Heads that straddle two windows are seen in the second.
            limit = self._cursor.fill(begin, min(self._window, offset - begin))
            if limit == 0:
                raise DiskError("read", self._segment.path, OSError("it is shorter than it was"))
            if is_enclosed(self._cursor.buffer, _U64(limit), _U64(begin), _U64(self._segment.end), _U64(offset)):
                return True
            begin += limit if begin + limit >= offset else max(limit - HEAD_SIZE, 1)
        return False

    def _walk(self, offset: int, known: int) -> int | None:
        while known < offset:
            found = self._step(known, self._window, offset)
            if found is None:
                return None
            known = found
        # A message must stand there, begun at least: not a blank record, or what a longer log has left.
        return known if self._step(known, HEAD_SIZE, known + 1) is not None else None

    def _step(self, known: int, size: int, offset: int) -> int | None:
        # Along the heads of so many bytes; None if none follows.
        limit = self._cursor.fill(known, size)
        end, largest = _U64(self._segment.end), self._rules.frame_size_max
        taken, goes_on = walk_heads(self._cursor.buffer, _U64(limit), _U64(known), end, largest, _U64(offset))
        return known + int(taken) if goes_on and int(taken) else None
