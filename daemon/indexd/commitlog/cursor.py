"""Reads bytes of the segment in which a reader stands: SegmentCursor one piece at a time, ReadAhead many in advance.

SegmentCursor knows files and nothing of frames. Segments expire, appear and are listed twice while it is at work.

ReadAhead is for catching up, when much is left. It looks for a head some MiB ahead FIRST and then reads everything up
to it. If the frames lead exactly there, the head is theirs, and they were complete when it was seen: one read does.
A range stands on its own, so with workers the next ones are read and decoded while this one is built.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import Batcher, DispatchBatch
from indexd.commitlog.format import BLANK_SIZE, FRAME_SIZE_MIN, STAMPED_SIZE
from indexd.commitlog.kernel import Rules, find_frame, store_timestamp_at
from indexd.commitlog.segments import Segment, SegmentList, WrittenEnd, first_written, list_segments
from indexd.errors import MissingOk
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.page_cache import ReadPages


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
        self._file: DiskFile | None = None
        self._written_end = WrittenEnd()
        self._pages: ReadPages | None = None
        self.log = SegmentList()
        self.segment: Segment | None = None
        self.buffer: NDArray[np.uint8] = np.empty(read_size, dtype=np.uint8)

    def refresh(self) -> None:
        """List the segments again: new ones, expired ones."""
        self.log = list_segments(self._disk, self._directories, self._segment_size)

    def is_replaced(self) -> bool:
        """Whether the open segment is no longer the file of its name: a broker that cuts its log removes segments.

        One that has expired is none of these: it can still be read to its end.
        """
        if self._file is None or self.segment is None or self.segment.base < (self.log.min_offset or 0):
            return False
        with MissingOk():
            return self._disk.stamp(self._file.path).inode != self._file.stamp().inode
        return True

    def holds(self, offset: int) -> bool:
        """Whether the open segment holds ``offset``."""
        return self.segment is not None and self.segment.base <= offset < self.segment.end

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

    def _first_bytes(self, segment: Segment) -> bytes | None:
        # None for one that is not there any more.
        with MissingOk(), self._disk.open_read(segment.path) as file:
            return file.pread(BLANK_SIZE, 0)
        return None

    def next_total_size(self) -> int:
        """The total size that the first frame of the next segment claims; 0 where it holds nothing or is not there."""
        assert self.segment is not None
        later = self.log.at(self.segment.end)
        data = None if later is None else self._first_bytes(later)
        return int.from_bytes((data or b"")[:4], "big")

    def next_is_in_use(self) -> bool:
        """Whether a later segment holds anything: then the open one is closed for good.

        A broker prepares one or two segments ahead, and a damaged disk may have blanked several: all are looked at.
        """
        assert self.segment is not None
        later = self.log.after(self.segment.end)
        while later is not None:
            data = self._first_bytes(later)
            if data is None:
                self.refresh()
                return False
            if any(data):
                return True
            later = self.log.after(later.end)
        return False

    def later_is_written(self) -> bool:
        """The same, wherever in a later segment: a damaged disk may have blanked its begin. Raises DiskError."""
        assert self.segment is not None
        for later in self.log.segments:
            if later.base >= self.segment.end:
                with self._disk.open_read(later.path) as file:
                    if first_written(file, later, later.base) > later.base:
                        return True
        return False

    def fill(self, offset: int, size: int) -> int:
        """Fill the buffer from ``offset`` on with at most ``size`` bytes of the open segment; how many there are."""
        assert self.segment is not None
        size = min(size, self.segment.end - offset)
        if size > len(self.buffer):
            self.buffer = np.empty(size, dtype=np.uint8)
        return self.read_into(self.buffer[:size], offset)

    def read_into(self, target: NDArray[np.uint8], offset: int) -> int:
        """Read bytes of the open segment somewhere else; how many there are."""
        assert self.segment is not None
        assert self._file is not None
        return self._file.pread_into(target.data, offset - self.segment.base)

    def has_bytes(self, offset: int) -> bool:
        """Whether anything but zeros stands at ``offset`` in the open segment."""
        return bool(self.buffer[: self.fill(offset, BLANK_SIZE)].any())

    def is_written(self, offset: int) -> bool:
        """Whether anything but zeros stands at ``offset`` in the open segment or behind it."""
        assert self.segment is not None
        assert self._file is not None
        return self._written_end.of(self._file, self.segment, offset) > offset

    def spare_pages(self) -> None:
        """Give page cache back from now on, if the open segment is so old that this is wanted; before it is read."""
        assert self.segment is not None
        assert self._file is not None
        if self._drop_behind is not None and self.segment.end + self._drop_behind <= self.log.segments[-1].end:
            self._pages = ReadPages(self._file, self.segment.size)

    def give_back(self, until: int) -> int:
        """Everything of the open segment before ``until`` was read; the bytes of page cache given back now."""
        if self._pages is None or self.segment is None:
            return 0
        return self._pages.give_back(until - self.segment.base, is_last=until >= self.segment.end)

    def close(self) -> None:
        """Close the open segment; what was read of it ahead, by the kernel or by us, is given back, too."""
        if self._pages is not None and self.segment is not None:
            self._pages.give_back(self.segment.size, is_last=True)
        if self._file is not None:
            self._file.close()
        self._file = self._pages = self.segment = None


# How much is searched for a head: longer than most frames. A longer frame there costs a second read, nothing else.
_PROBE_SIZE = 32 << 10
# Ranges that are decoded and not taken yet.
_DEPTH = 6


class _Range(NamedTuple):
    """Bytes ``[begin, begin + size)`` of the log, behind which a head with the store time ``newest`` was seen."""

    begin: int
    size: int
    segment_end: int
    newest: int


class ReadAhead:
    """Reads from a cursor's open segment; ``stop`` must be called before that is closed."""

    def __init__(self, cursor: SegmentCursor, read_size: int, workers: int) -> None:
        self._cursor = cursor
        self._read_size = max(read_size, 2 * _PROBE_SIZE)
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "ahead") if workers else None
        self._probe: NDArray[np.uint8] = np.empty(_PROBE_SIZE, dtype=np.uint8)
        # What one worker reads into and decodes with.
        self._tools: SimpleQueue[tuple[NDArray[np.uint8], Batcher]] = SimpleQueue()
        self._running: deque[Future[DispatchBatch | None]] = deque()
        self._next_begin = 0

    def take(self, position: int, rules: Rules, *, sum_up: bool = False) -> DispatchBatch | None:
        """The messages from ``position`` on, or None when they cannot be had this way: read in the ordinary one.

        ``sum_up`` as for Batcher.decode.
        """
        if self._tools.empty() and not self._running:
            size = self._read_size
            for _ in range(max(self._workers, 1)):
                self._tools.put((np.empty(size, dtype=np.uint8), Batcher(size // FRAME_SIZE_MIN + 1)))
        if self._pool is None:
            found = self._find_range(position)
            return None if found is None else self._decode(found, rules, sum_up=sum_up)
        if not self._running:
            self._next_begin = position
        while len(self._running) < _DEPTH and (found := self._find_range(self._next_begin)) is not None:
            self._running.append(self._pool.submit(self._decode, found, rules, sum_up=sum_up))
            self._next_begin = found.begin + found.size
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

    def _find_range(self, position: int) -> _Range | None:
        # None where no head is seen in time before the segment ends.
        segment, begin = self._cursor.segment, position + self._read_size - _PROBE_SIZE
        if segment is None or begin + _PROBE_SIZE > segment.end:
            return None
        count = self._cursor.read_into(self._probe, begin)
        at = int(find_frame(self._probe, np.uint64(0), np.uint64(count), np.uint64(begin)))
        if at + STAMPED_SIZE > count:
            return None
        return _Range(position, begin + at - position, segment.end, int(store_timestamp_at(self._probe, np.uint64(at))))

    def _decode(self, found: _Range, rules: Rules, *, sum_up: bool) -> DispatchBatch | None:
        buffer, batcher = tools = self._tools.get()
        try:
            if self._cursor.read_into(buffer[: found.size], found.begin) != found.size:
                return None
            batch = batcher.decode(buffer, found.size, found.begin, found.segment_end, rules, sum_up=sum_up).batch
        finally:
            self._tools.put(tools)
        # Times that never fall up to the head's: no frame of it is of an older log.
        if batch is None or batch.end_offset != found.begin + found.size:
            return None
        times = batch.columns.store_timestamp[: batch.rows]
        return batch if bool((times[1:] >= times[:-1]).all()) and int(times[-1]) <= found.newest else None
