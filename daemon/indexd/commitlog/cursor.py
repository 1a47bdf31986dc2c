"""Reads bytes of the segment in which a reader stands: SegmentCursor one piece at a time, ReadAhead many in advance.

Segments expire, appear and are listed twice while SegmentCursor is at work.

ReadAhead is for catching up, when much is left. It looks for a head some MiB ahead FIRST and then reads everything up
to it. If the frames lead exactly there, the head is theirs, and they were complete when it was seen: one read does.
A range stands on its own, so with workers the next ones are read and decoded while this one is built.

SplitPoints finds where inside a segment reading can begin, exactly, without any index. A frame proves itself: its own
physical offset is where it stands. But a body may hold what looks like a frame, and behind a blank record may lie what
a longer log has left. Both are told by what stands before: a frame or a blank record that reaches beyond the point.
Where there is one, and in the segment being written, the heads are walked from a point that is known.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import NEVER, Batcher, DecodeResult, DispatchBatch
from indexd.commitlog.format import BLANK_SIZE, FRAME_SIZE_MIN, HEAD_SIZE, STAMPED_SIZE, Outcome
from indexd.commitlog.kernel import Rules, find_frame, is_enclosed, store_timestamp_at, walk_heads
from indexd.commitlog.segments import NO_SEGMENT, SegmentList, WrittenEnd, first_written, list_segments
from indexd.errors import DiskError, MissingOk
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.page_cache import ReadPages

_U64 = np.uint64


class SegmentCursor:
    """One open segment and a buffer that is filled from it again and again. Raises DiskError, UnsafeStoreError.

    ``drop_behind`` as in ReaderOptions.
    """

    def __init__(
        self,
        disk: Disk,
        directories: tuple[Path, ...],
        segment_size: int,
        read_size: int,
        drop_behind: int | None = None,
    ) -> None:
        self._disk = disk
        self._directories = directories
        self._segment_size = segment_size
        self._drop_behind = drop_behind
        self._file: DiskFile  # while a segment is open
        self._written_end = WrittenEnd()
        self._pages: ReadPages | None = None
        self.log = SegmentList()
        #: The one that is open.
        self.segment = NO_SEGMENT
        self.buffer: NDArray[np.uint8] = np.empty(read_size, dtype=np.uint8)

    def refresh(self) -> None:
        """List the segments again: new ones, expired ones."""
        self.log = list_segments(self._disk, self._directories, self._segment_size)

    def is_replaced(self) -> bool:
        """Whether the open segment is no longer the file of its name: a broker that cuts its log removes segments.

        One that has expired is none of these: it can still be read to its end.
        """
        if self.segment is NO_SEGMENT or self.segment.base < (self.log.min_offset or 0):
            return False
        with MissingOk():
            return self._disk.stamp(self._file.path).inode != self._file.stamp().inode
        return True

    def holds(self, offset: int) -> bool:
        """Whether the open segment holds ``offset``."""
        return self.segment.base <= offset < self.segment.end

    def open(self, offset: int) -> bool:
        """Open the segment that holds ``offset``; False if there is none, or if it expired just now."""
        self.close()
        if self.log.at(offset) is None:
            self.refresh()
        segment = self.log.at(offset)
        if segment is not None:
            with MissingOk():
                self._file = self._disk.open_read(segment.path)
                self.segment = segment
                return True
            self.refresh()
        return False

    def next_total_size(self) -> int:
        """The total size that the first frame of the next segment claims; 0 where it holds nothing or is not there."""
        later = self.log.at(self.segment.end)
        if later is not None:
            with MissingOk(), self._disk.open_read(later.path) as file:
                return int.from_bytes(file.pread(4, 0), "big")
        return 0

    def next_is_in_use(self, *, anywhere: bool = False) -> bool:
        """Whether a later segment holds anything: then the open one is closed for good.

        A broker prepares one or two segments ahead, and a damaged disk may have blanked several, or the begin of one:
        all are looked at, with ``anywhere`` to their ends.
        """
        for later in self.log.after(self.segment.end):
            with MissingOk(), self._disk.open_read(later.path) as file:
                if any(file.pread(BLANK_SIZE, 0)) or (anywhere and first_written(file, later, later.base) > later.base):
                    return True
        return False

    def fill(self, offset: int, size: int) -> int:
        """Fill the buffer from ``offset`` on with at most ``size`` bytes of the open segment; how many there are."""
        size = min(size, self.segment.end - offset)
        if size > len(self.buffer):
            self.buffer = np.empty(size, dtype=np.uint8)
        return self.read_into(self.buffer[:size], offset)

    def read_into(self, target: NDArray[np.uint8], offset: int) -> int:
        """Read bytes of the open segment somewhere else; how many there are."""
        return self._file.pread_into(target.data, offset - self.segment.base)

    def is_written(self, offset: int) -> bool:
        """Whether anything but zeros stands at ``offset`` in the open segment or behind it."""
        return self._written_end.of(self._file, self.segment, offset) > offset

    def decode(
        self,
        batcher: Batcher,
        rules: Rules,
        offset: int,
        size: int,
        largest: int | None = None,
        *,
        sum_up: bool = False,
    ) -> tuple[int, DecodeResult]:
        """The frames in ``size`` bytes at ``offset`` of the open segment, or one that is longer, up to ``largest``.

        With how many bytes of them are there.
        """
        while True:
            limit = self.fill(offset, size)
            found = batcher.decode(self.buffer, limit, offset, self.segment.end, rules, sum_up=sum_up)
            is_cut = found.batch is None and found.outcome is Outcome.NOT_YET_WRITTEN and found.total > limit
            if not is_cut or found.total == size or (largest is not None and found.total > largest):
                return limit, found
            size = found.total

    def next_proven(self, batcher: Batcher, rules: Rules, begin: int, window: int, not_before: int) -> int | None:
        """The offset of the next frame behind ``begin`` that proves itself by its offset, lengths and checksums.

        Those with a store timestamp below ``not_before`` do not count: in a segment that is being written they are what
        an older and longer log has left behind. None if the open segment has none.
        """
        offset = begin + 1
        while offset < self.segment.end:
            limit = self.fill(offset, window)
            at = int(find_frame(self.buffer, _U64(0), _U64(limit), _U64(offset)))
            if at >= limit:
                # A head that straddles two windows is found in the second.
                offset += max(limit - HEAD_SIZE + 1, 1)
                continue
            offset += at
            _, found = self.decode(batcher, rules, offset, window)
            if found.batch is not None and int(found.batch.columns.store_timestamp[0]) >= not_before:
                return offset
            offset += 1
        return None

    def spare_pages(self) -> None:
        """Give page cache back from now on, if the open segment is so old that this is wanted; before it is read."""
        if self._drop_behind is not None and self.segment.end + self._drop_behind <= self.log.segments[-1].end:
            self._pages = ReadPages(self._file, self.segment.size)

    def give_back(self, until: int) -> int:
        """Everything of the open segment before ``until`` was read; the bytes of page cache given back now."""
        if self._pages is None:
            return 0
        return self._pages.give_back(until - self.segment.base, is_last=until >= self.segment.end)

    def close(self) -> None:
        """Close the open segment; what was read of it ahead, by the kernel or by us, is given back, too."""
        if self.segment is not NO_SEGMENT:
            self.give_back(self.segment.end)
            self._file.close()
        self._pages, self.segment = None, NO_SEGMENT


# How much is searched for a head: longer than most frames. A longer frame there costs a second read, nothing else.
_PROBE_SIZE = 32 << 10
# Ranges that are decoded and not taken yet.
_DEPTH = 6


class ReadAhead:
    """Reads from a cursor's open segment; ``stop`` must be called before that is closed."""

    def __init__(self, cursor: SegmentCursor, read_size: int, workers: int) -> None:
        self._cursor = cursor
        self._read_size = max(read_size, 2 * _PROBE_SIZE)
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "ahead") if workers else None
        self._probe: NDArray[np.uint8] = np.empty(_PROBE_SIZE, dtype=np.uint8)
        # What each worker reads into and decodes with.
        self._tools: SimpleQueue[tuple[NDArray[np.uint8], Batcher]] = SimpleQueue()
        self._running: deque[Future[DispatchBatch | None]] = deque()
        self._next_begin = 0

    def take(self, position: int, rules: Rules, *, sum_up: bool = False) -> DispatchBatch | None:
        """The messages from ``position`` on, or None when they cannot be had this way: read in the ordinary one.

        ``sum_up`` as for Batcher.decode.
        """
        if self._tools.empty() and not self._running:  # at first: most readers never come here
            size = self._read_size
            for _ in range(max(self._workers, 1)):
                self._tools.put((np.empty(size, dtype=np.uint8), Batcher(size // FRAME_SIZE_MIN + 1)))
        if self._pool is None:
            found = self._find_range(position)
            return None if found is None else self._decode(position, *found, rules, sum_up=sum_up)
        if not self._running:
            self._next_begin = position
        while len(self._running) < _DEPTH and (found := self._find_range(self._next_begin)) is not None:
            self._running.append(self._pool.submit(self._decode, self._next_begin, *found, rules, sum_up=sum_up))
            self._next_begin += found[0]
        batch = self._running.popleft().result() if self._running else None
        if batch is None or batch.begin_offset != position:
            self.stop()
            return None
        return batch

    def stop(self) -> None:
        """Until no worker reads any more; what they have read is forgotten."""
        for future in self._running:
            future.exception()
        self._running.clear()

    def _find_range(self, position: int) -> tuple[int, int] | None:
        # How many bytes from there on end at a head, and its store time; None where none is seen in time before the
        # segment ends.
        begin = position + self._read_size - _PROBE_SIZE
        if begin + _PROBE_SIZE > self._cursor.segment.end:
            return None
        count = self._cursor.read_into(self._probe, begin)
        at = int(find_frame(self._probe, _U64(0), _U64(count), _U64(begin)))
        if at + STAMPED_SIZE > count:
            return None
        return begin + at - position, int(store_timestamp_at(self._probe, _U64(at)))

    def _decode(self, begin: int, size: int, newest: int, rules: Rules, *, sum_up: bool) -> DispatchBatch | None:
        buffer, batcher = tools = self._tools.get()
        try:
            if self._cursor.read_into(buffer[:size], begin) != size:
                return None
            batch = batcher.decode(buffer, size, begin, self._cursor.segment.end, rules, sum_up=sum_up).batch
        finally:
            self._tools.put(tools)
        # Times that never fall up to the head's: no frame of it is of an older log.
        if batch is None or batch.end_offset != begin + size:
            return None
        times = batch.columns.store_timestamp[: batch.rows]
        return batch if bool((times[1:] >= times[:-1]).all()) and int(times[-1]) <= newest else None


class SplitPoints(SegmentCursor):
    """Finds them in the segments as they were listed at the start; ``window`` bytes are read at a time.

    ``drop_behind`` as in ReaderOptions.

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
        super().__init__(disk, directories, segment_size, window, drop_behind)
        self._rules = rules._replace(check_crc=True)
        self._batcher = Batcher(1)
        self._window = window
        self.refresh()

    def is_in_use(self, offset: int) -> bool:
        """Whether the segment that holds ``offset`` is there and holds anything: a broker makes one ahead."""
        return self._open(offset) and any(self.buffer[: self.fill(self.segment.base, 8)])

    def at(self, offset: int, known: int) -> int | None:
        """Where the first message at or behind ``offset`` begins, in the segment that holds it.

        ``known``: where a message begins in this segment, or the segment itself, at or before ``offset``. None where
        the log cannot be followed that far: it ends before, the segment does, or bytes are no frame.
        """
        if offset == known:
            return offset
        if not self._open(offset):
            return None
        found = None
        if self.next_is_in_use():
            found = self.next_proven(self._batcher, self._rules, offset - 1, self._window, NEVER)
        return self._walk(offset, known) if found is None or self._is_enclosed(found) else found

    def _open(self, offset: int) -> bool:
        if not self.holds(offset) and self.open(offset):
            # A point is proven by what stands up to a whole frame before it.
            self.spare_pages()
        return self.holds(offset)

    def _is_enclosed(self, offset: int) -> bool:
        begin = max(offset - int(self._rules.frame_size_max), self.segment.base)
        while begin < offset:
            # Heads that straddle two windows are seen in the second.
            limit = self.fill(begin, min(self._window, offset - begin))
            if limit == 0:
                raise DiskError("read", self.segment.path, OSError("it is shorter than it was"))
            if is_enclosed(self.buffer, _U64(limit), _U64(begin), _U64(self.segment.end), _U64(offset)):
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
        limit = self.fill(known, size)
        end, largest = _U64(self.segment.end), self._rules.frame_size_max
        taken, goes_on = walk_heads(self.buffer, _U64(limit), _U64(known), end, largest, _U64(offset))
        return known + int(taken) if goes_on and int(taken) else None
