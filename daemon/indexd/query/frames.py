"""Frames in log order by their heads alone: where each stands, its size and its store time, some GB a second of log."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from indexd.commitlog.format import BLANK_SIZE, FLAG_BORN_HOST_V6, FRAME_SIZE_MIN, MAGIC_BLANK, MAGIC_V1, MAGIC_V2
from indexd.commitlog.segments import Segment
from indexd.errors import DiskError
from indexd.flush.frontier import Uncovered
from indexd.query.log import LogView
from indexd.storage.disk import DiskFile

# Total size, magic; physical offset, sysFlag; the rest up to the store time of a message with an IPv6 born host.
_HEAD = struct.Struct(">iI20xqI")
_BLANK = struct.Struct(">iI")
_STORE_TIMESTAMP = struct.Struct(">q")
_HEAD_SIZE = 76
_FIRST_READ = 16 << 10
_READ_MAX = 1 << 20


class Frame(NamedTuple):
    """One frame; offset and size in bytes, time in ms."""

    phy_offset: int
    size: int
    store_timestamp: int


class FrameScan:
    """Walks the log; ``unreadable`` counts places where no frame stood, so that the rest of a segment was left out.

    A segment that is missing behind the log's begin is such a place too, and zeros before the end that was asked for.
    """

    def __init__(self, log: LogView, gaps: Sequence[Uncovered] = ()) -> None:
        self._log = log
        self._gaps = gaps
        self.unreadable = 0

    def frames(self, begin: int, end: int) -> Iterator[Frame]:
        """The frames that start in ``[begin, end)``, without those in the gaps; ``begin`` must be a frame's start."""
        for segment in self._log.segments:
            if segment.end > begin and segment.base < end:
                self._pass_over(begin, segment.base)
                yield from self._of_segment(segment, max(begin, segment.base), min(end, segment.end))
                begin = segment.end
        self._pass_over(begin, end)

    def _of_segment(self, segment: Segment, begin: int, end: int) -> Iterator[Frame]:
        try:
            file = self._log.open_segment(segment)
        except DiskError as error:
            if not error.is_missing:
                raise
            self._pass_over(begin, end)
            return
        with file:
            yield from self._of_file(file, segment, begin, end)

    def _pass_over(self, begin: int, end: int) -> None:
        # Bytes of segments that are not there: expired, known to be left out, or lost.
        if begin < end and not self._log.has_expired(begin):
            self.unreadable += not any(gap.begin <= begin and end <= gap.end for gap in self._gaps)

    def _of_file(self, file: DiskFile, segment: Segment, begin: int, end: int) -> Iterator[Frame]:
        data, first, size = b"", begin, _FIRST_READ
        position = begin
        while position < end:
            at = position - first
            if at + _HEAD_SIZE > len(data) and first + len(data) < segment.end:
                self._log.check()
                data, first, at = file.pread(size, position - segment.base), position, 0
                size = min(size * 2, _READ_MAX)
            frame = _frame(data, at, position, segment.end)
            if frame is not None:
                yield frame
                position += frame.size
                continue
            gap = next((gap for gap in self._gaps if gap.begin <= position < gap.end), None)
            if gap is None:
                self.unreadable += not _is_end(data, at, segment.end - position)
                return
            position = gap.end


def _frame(data: bytes, at: int, phy_offset: int, segment_end: int) -> Frame | None:
    if at + _HEAD_SIZE > len(data):
        return None
    size, magic, written_for, sys_flag = _HEAD.unpack_from(data, at)
    if magic not in (MAGIC_V1, MAGIC_V2) or written_for != phy_offset:
        return None
    if size < FRAME_SIZE_MIN or phy_offset + size > segment_end:
        return None
    (store_timestamp,) = _STORE_TIMESTAMP.unpack_from(data, at + (68 if sys_flag & FLAG_BORN_HOST_V6 else 56))
    return Frame(phy_offset, size, store_timestamp)


def _is_end(data: bytes, at: int, left: int) -> bool:
    # A blank record over all that is left of the segment, or less than takes one. Zeros are where messages were.
    return left < BLANK_SIZE or _BLANK.unpack(data[at : at + BLANK_SIZE].ljust(BLANK_SIZE, b"\0")) == (
        left,
        MAGIC_BLANK,
    )
