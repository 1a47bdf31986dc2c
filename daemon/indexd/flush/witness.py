"""Witness: notes single frames of what is built, and tells when the log no longer holds them (decision 7)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.evidence import Evidence, FrameReader, newest, thinned
from indexd.commitlog.segments import SegmentList
from indexd.errors import DisturbedError, MissingStoreError
from indexd.storage.disk import Disk

# Frames are noted at least so far apart, but for the last one of all: catching up must not wait for reads.
_NOTE_EVERY = 64 << 10
# A running daemon looks at the points of so many bytes behind the last one at each drain.
_WATCHED = 64 << 20
_POINTS_MAX = 8192
# And it looks at every byte of the newest ones: there a log that is cut by a little is written on.
_TAIL_SIZE = 1 << 20
# The first frame of so many segments is kept, however close they lie.
_SEGMENTS_NOTED = 64


class Witness:
    """Keeps the evidence of one data directory; ``list_log`` lists the segments as they are now.

    Raises DisturbedError when the log was cut or rewritten, DiskError when it cannot be read.
    """

    def __init__(self, disk: Disk, list_log: Callable[[], SegmentList], points: tuple[Evidence, ...] = ()) -> None:
        self._disk = disk
        self._list_log = list_log
        self._log = SegmentList((), ())
        self._points = list(points)
        # The newest bytes that were built: begin, end, CRC-32.
        self._tail: tuple[int, int, int] | None = None
        # The newest message that was built: physical offset, store timestamp, messages before it.
        self._newest: tuple[int, int, int] | None = None

    def __repr__(self) -> str:
        return f"Witness({len(self._points)} points, last={self._points[-1] if self._points else None})"

    def saw(self, batch: DispatchBatch, messages: int) -> None:
        """``batch`` is built, and ``messages`` are counted with it."""
        if not batch.rows:
            return
        offsets, times = batch.columns.phy_offset, batch.columns.store_timestamp
        before = messages - batch.rows

        def message(row: int) -> tuple[int, int, int]:
            return int(offsets[row]), int(times[row]), before + row

        # Where the clock goes back, frames of an older and longer log may begin: a writer would go on right there.
        back = np.flatnonzero(np.diff(times[: batch.rows]) < 0)
        if self._newest is not None and times[0] < self._newest[1]:
            self._note(*self._newest)
            self._note(*message(0))
        elif not self._points or self._begins_segment(int(offsets[0])):
            self._note(*message(0))
        if len(back):
            self._note(*message(int(back[-1])))
            self._note(*message(int(back[-1]) + 1))
        self._newest = message(batch.rows - 1)
        if not self._points or self._newest[0] - self._points[-1].phy_offset >= _NOTE_EVERY:
            self._note(*self._newest)

    def points(self) -> tuple[Evidence, ...]:
        """All of it, the newest message included, thinned."""
        if self._newest is not None:
            self._note(*self._newest)
        if self._points:
            self._thin()
        return tuple(self._points)

    def remember_tail(self, end: int) -> None:
        """All before physical offset ``end`` is built: remember its last bytes."""
        if self._tail is not None and self._tail[1] == end:
            return
        self._tail = None
        if self._log.at(end - 1) is None:
            self._list()
        segment = self._log.at(end - 1)
        if segment is not None:
            begin = max(end - _TAIL_SIZE, segment.base)
            with FrameReader(self._disk, self._log) as frames:
                crc = frames.checksum(begin, end)
            self._tail = None if crc is None else (begin, end, crc)

    def check(self) -> None:
        """Look at the newest points; DisturbedError if the log says something else there now."""
        if not self._points:
            return
        self._list()
        with FrameReader(self._disk, self._log) as frames:
            if self._tail is not None and not self._has_expired(self._tail[0]):
                begin, end, crc = self._tail
                if frames.checksum(begin, end) != crc:
                    self._doubt(begin)
            for point in newest(tuple(self._points), _WATCHED):
                if not self._has_expired(point.phy_offset) and not frames.holds(point):
                    self._doubt(point.phy_offset)

    def _note(self, phy_offset: int, store_timestamp: int, messages: int) -> None:
        if self._points and self._points[-1].phy_offset >= phy_offset:
            return
        if self._log.at(phy_offset) is None:
            self._list()
        with FrameReader(self._disk, self._log) as frames:
            point = frames.evidence(phy_offset, messages)
        if point is None or point.store_timestamp != store_timestamp:
            self._doubt(phy_offset)
            return
        self._points.append(point)
        if len(self._points) > _POINTS_MAX:
            self._thin()

    def _begins_segment(self, phy_offset: int) -> bool:
        # Where the log begins once the segments before have expired: from there on it is compared and counted.
        if self._log.at(phy_offset) is None:
            self._list()
        segment = self._log.at(phy_offset)
        return segment is not None and segment.base == phy_offset

    def _thin(self) -> None:
        bases = {segment.base for segment in self._log.segments[-_SEGMENTS_NOTED:]}
        self._points = list(thinned(self._points, self._points[-1].phy_offset, bases))

    def _list(self) -> None:
        self._log = self._list_log()
        if not self._log.segments:
            raise MissingStoreError("the commitlog holds no segment any more", "mount or restore it")

    def _has_expired(self, phy_offset: int) -> bool:
        return self._log.min_offset is not None and phy_offset < self._log.min_offset

    def _doubt(self, phy_offset: int) -> None:
        # Segments expire between a look at the list and a look into them.
        self._list()
        if not self._has_expired(phy_offset):
            raise DisturbedError(f"the log was cut or rewritten: at offset {phy_offset} it is not what was indexed")
