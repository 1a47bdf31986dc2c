"""SegmentCursor: the segment file that a reader stands in, and the bytes of it that are at hand.

Knows files and nothing of frames. Segments expire, appear and are listed twice while it is at work.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.format import BLANK_SIZE
from indexd.commitlog.segments import Segment, SegmentList, list_segments
from indexd.errors import DiskError
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
        self._pages: ReadPages | None = None
        self.log = SegmentList((), ())
        self.segment: Segment | None = None
        self.buffer: NDArray[np.uint8] = np.empty(read_size, dtype=np.uint8)

    def __repr__(self) -> str:
        return f"SegmentCursor({self.segment.path.name if self.segment else None})"

    def refresh(self) -> None:
        """List the segments again: new ones, expired ones."""
        self.log = list_segments(self._disk, self._directories, self._segment_size)

    def is_replaced(self) -> bool:
        """Whether the open segment is no longer the file of its name: a broker that cuts its log removes segments.

        One that has expired is none of these: it can still be read to its end.
        """
        if self._file is None or self.segment is None or self.segment.base < (self.log.min_offset or 0):
            return False
        try:
            return self._disk.stamp(self._file.path).inode != self._file.stamp().inode
        except DiskError as error:
            if not error.is_missing:
                raise
            return True

    def holds(self, offset: int) -> bool:
        """Whether the open segment holds ``offset``."""
        return self.segment is not None and self.segment.base <= offset < self.segment.end

    def open(self, offset: int) -> bool:
        """Open the segment that holds ``offset``; False if there is none, or if it expired just now."""
        self.close()
        segment = self.log.at(offset)
        if segment is None:
            self.refresh()
            segment = self.log.at(offset)
        if segment is None:
            return False
        try:
            self._file = self._disk.open_read(segment.path)
        except DiskError as error:
            if not error.is_missing:
                raise
            self.refresh()
            return False
        self.segment = segment
        return True

    def next_is_in_use(self) -> bool:
        """Whether a later segment holds anything: then the open one is closed for good.

        A broker prepares one or two segments ahead, and a damaged disk may have blanked several: all are looked at.
        """
        assert self.segment is not None
        later = self.log.after(self.segment.end)
        while later is not None:
            try:
                with self._disk.open_read(later.path) as file:
                    if any(file.pread(BLANK_SIZE, 0)):
                        return True
            except DiskError as error:
                if not error.is_missing:
                    raise
                self.refresh()
                return False
            later = self.log.after(later.end)
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

    def spare_pages(self) -> None:
        """Give page cache back from now on, if the open segment is so old that this is wanted; before it is read."""
        assert self.segment is not None
        assert self._file is not None
        if self._is_far(self.segment):
            self._pages = ReadPages(self._file, self.segment.size)

    def _is_far(self, segment: Segment) -> bool:
        return self._drop_behind is not None and segment.end + self._drop_behind <= self.log.segments[-1].end

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
