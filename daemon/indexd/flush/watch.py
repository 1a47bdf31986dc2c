"""LogChangeDetector: notes single frames of what is built, and tells when the log no longer holds them (decision 7)."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.lookup import WATCHED_SIZE, Evidence, FrameReader, RangeChecksum, newest, thinned
from indexd.commitlog.segments import Segment, SegmentList
from indexd.errors import DiskError, DisturbedError, MissingStoreError
from indexd.storage.disk import Disk

# Frames are noted at least so far apart, but for the last one of all: catching up must not wait for reads.
_NOTE_EVERY = 64 << 10
_POINTS_MAX = 8192
# And it looks at every byte of the newest ones: there a log that is cut by a little is written on.
_TAIL_SIZE = 256 << 10
# Of the points each look takes only one in so many, in turn: an idle daemon is to stay idle.
_TURNS = 4
# The first frame of so many segments is kept, however close they lie.
_SEGMENTS_NOTED = 64


class LogChangeDetector:
    """Keeps the evidence of one data directory; ``list_log`` lists the segments as they are now.

    Raises DisturbedError when the log was cut or rewritten, DiskError when it cannot be read.
    """

    def __init__(self, disk: Disk, list_log: Callable[[], SegmentList]) -> None:
        self._disk = disk
        self._list_log = list_log
        self._log = SegmentList()
        self._points: list[Evidence] = []
        # The newest bytes that were built, without a gap or with one.
        self._tail: deque[RangeChecksum] = deque()
        self._turn = 0
        # The newest message that was built: physical offset, store timestamp, messages before it.
        self._newest: tuple[int, int, int] | None = None

    def take_over(self, points: tuple[Evidence, ...], tail: Iterable[RangeChecksum]) -> None:
        """Go on from evidence that was kept and is still true, and from the bytes that it was compared with."""
        self._points = list(points)
        self._tail = deque(tail)
        self._trim()

    def saw(self, batch: DispatchBatch, messages: int) -> None:
        """``batch`` is built, and ``messages`` are counted with it."""
        if batch.crc is None:
            self._tail.clear()
        else:
            self._tail.append(RangeChecksum(batch.begin_offset, batch.end_offset, batch.crc))
            self._trim()
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
            # Where the log begins once the segments before have expired: from there on it is compared and counted.
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
            # Without it there is less evidence, and what is built is no less true: a stop must not depend on the log.
            with suppress(DiskError, MissingStoreError):
                self._note(*self._newest)
        if self._points:
            self._thin()
        return tuple(self._points)

    def remember_tail(self, end: int) -> None:
        """All before physical offset ``end`` is built: remember its last bytes, if they were not noted as they came.

        Also those in between that could not be read: a broker may cut its log there, and write on.
        """
        tail: deque[RangeChecksum] = deque()
        for stretch in self._tail:
            if tail:
                tail.extend(self._as_it_stands(tail[-1].end, stretch.begin))
            tail.append(stretch)
        tail.extend(self._as_it_stands(tail[-1].end if tail else 0, end))
        self._tail = tail

    def _as_it_stands(self, begin: int, end: int) -> list[RangeChecksum]:
        # The last bytes of [begin, end), as they are now.
        segment = self._segment_at(end - 1) if begin < end else None
        if segment is None:
            return []
        begin = max(begin, end - _TAIL_SIZE, segment.base)
        with FrameReader(self._disk, self._log) as frames:
            return [RangeChecksum(begin, end, zlib.crc32(frames.read(begin, end)))]

    def check(self) -> None:
        """Look at the newest bytes and at some of the newest points; DisturbedError if the log has changed there."""
        if not self._points:
            return
        self._list()
        with FrameReader(self._disk, self._log) as frames:
            self._check_tail(frames)
            self._turn = (self._turn + 1) % _TURNS
            for point in newest(tuple(self._points), WATCHED_SIZE)[self._turn :: _TURNS]:
                if not self._has_expired(point.phy_offset) and not frames.holds(point):
                    self._doubt(point.phy_offset)

    def _check_tail(self, frames: FrameReader) -> None:
        # What is left of it, joined where it has no gap and is of one segment.
        runs: list[tuple[int, bytearray]] = []
        for begin, end, crc in self._tail:
            if self._has_expired(begin):
                continue
            data = frames.read(begin, end)
            if zlib.crc32(data) != crc:
                self._doubt(begin)
                continue
            first, run = runs[-1] if runs else (-1, bytearray())
            if first + len(run) != begin or self._log.at(first) != self._log.at(begin):
                runs.append((begin, bytearray(data)))
            else:
                run += data
        self._tail.clear()
        for first, run in runs[-2:]:
            end, kept = first + len(run), run[-_TAIL_SIZE:]
            self._tail.append(RangeChecksum(end - len(kept), end, zlib.crc32(kept)))

    def _trim(self) -> None:
        while self._tail and self._tail[-1].end - self._tail[0].end >= _TAIL_SIZE:
            self._tail.popleft()

    def _note(self, phy_offset: int, store_timestamp: int, messages: int) -> None:
        if self._points and self._points[-1].phy_offset >= phy_offset:
            return
        self._segment_at(phy_offset)
        with FrameReader(self._disk, self._log) as frames:
            point = frames.evidence(phy_offset, messages)
        if point is None or point.store_timestamp != store_timestamp:
            self._doubt(phy_offset)
            return
        self._points.append(point)
        if len(self._points) > _POINTS_MAX:
            self._thin()

    def _segment_at(self, phy_offset: int) -> Segment | None:
        if self._log.at(phy_offset) is None:
            self._list()
        return self._log.at(phy_offset)

    def _begins_segment(self, phy_offset: int) -> bool:
        segment = self._segment_at(phy_offset)
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
