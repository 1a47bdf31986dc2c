"""Tells by single frames whether the log is still what was indexed: Evidence, and FrameReader, which reads them.

A broker that lost power, or a replica that follows another master, cuts its log and writes on from there. The bytes
behind the cut stay in their segment until they are overwritten, so nothing in the log itself says where it was cut.
Evidence is what a frame was when it was indexed; the first one that the log no longer holds is where to look.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Self

from indexd.commitlog.decoder import read_head
from indexd.commitlog.format import HEAD_SIZE
from indexd.commitlog.segments import Segment, SegmentList
from indexd.errors import MissingOk
from indexd.storage.disk import Disk, DiskFile

# Of a larger frame this many bytes are looked at: a look at every point must stay a matter of milliseconds.
_BYTES_MAX = 64 << 10
# Points that lie closer together than this allows are thinned: dense at the end of the log, sparse far behind it.
_NEAR_GAP = 4 << 20
_STEPS_BACK = 16
#: One read brings most messages whole; a longer one takes a second.
FIRST_READ = 4096
# Of all readers, so that no two states of any two of them are taken for the same.
_STATES = count()
#: A running daemon looks at the points of so many bytes behind the last one.
WATCHED_SIZE = 64 << 20


@dataclass(frozen=True, slots=True)
class Evidence:
    """One frame: physical offset, total size in bytes, store timestamp in ms, CRC-32 of its (first 64 KiB of) bytes.

    ``messages`` is how many were counted before it.
    """

    phy_offset: int
    size: int
    store_timestamp: int
    crc: int
    messages: int


class Stretch(NamedTuple):
    """Bytes ``[begin, end)`` of one segment and their CRC-32 when they were read."""

    begin: int
    end: int
    crc: int


class FrameReader:
    """Reads single frames; holds one segment open, so close it soon: a segment may be replaced under its name."""

    #: So many files at most are open at a time.
    open_max = 1

    def __init__(self, disk: Disk, log: SegmentList) -> None:
        self._disk = disk
        self.log = log
        self._files: OrderedDict[int, DiskFile] = OrderedDict()
        #: Another number whenever other files are open.
        self.files_opened = next(_STATES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every file."""
        self.files_opened = next(_STATES)
        while self._files:
            self._files.popitem()[1].close()

    def evidence(self, phy_offset: int, messages: int = 0) -> Evidence | None:
        """What stands at ``phy_offset`` now; None if no frame of that offset does, or its segment is not there."""
        opened = self._file_at(phy_offset)
        if opened is None:
            return None
        file, segment = opened
        position = phy_offset - segment.base
        data = file.pread(FIRST_READ, position)
        head = read_head(data)
        if head is None or head.phy_offset != phy_offset or not HEAD_SIZE <= head.size < 1 << 31:
            return None
        size = min(head.size, _BYTES_MAX)
        if len(data) < size:
            data = file.pread(size, position)
        return Evidence(phy_offset, head.size, head.store_timestamp, zlib.crc32(data[:size]), messages)

    def holds(self, point: Evidence) -> bool:
        """Whether the log still says what ``point`` says."""
        return self.evidence(point.phy_offset, point.messages) == point

    def read(self, begin: int, end: int) -> bytes:
        """The bytes ``[begin, end)`` of one segment; fewer if they are not all there."""
        opened = self._file_at(begin)
        if opened is None:
            return b""
        file, segment = opened
        return file.pread(end - begin, begin - segment.base)

    def _file_at(self, phy_offset: int) -> tuple[DiskFile, Segment] | None:
        # None for a segment that has expired or is not there yet.
        segment = self.log.at(phy_offset)
        if segment is None:
            return None
        with MissingOk():
            if segment.base not in self._files:
                file = self._disk.open_read(segment.path)
                self.files_opened = next(_STATES)
                if len(self._files) >= self.open_max:
                    self._files.popitem(last=False)[1].close()
                self._files[segment.base] = file
            self._files.move_to_end(segment.base)
            return self._files[segment.base], segment
        return None


def thinned(points: Iterable[Evidence], end: int, always: Collection[int] = ()) -> tuple[Evidence, ...]:
    """``points``, in log order, without those that lie too close: a few hundred for a log of terabytes.

    At a distance d from ``end`` about one per d/16 bytes is kept, one per 4 MiB from 64 MiB on, one per d/64 from
    256 MiB on; the first and the last always are, and so are those at the physical offsets ``always`` and the newest at
    which the clock went back.
    """
    ordered = sorted(points, key=lambda point: point.phy_offset)
    back = [i for i in range(1, len(ordered)) if ordered[i].store_timestamp < ordered[i - 1].store_timestamp]
    kept = {i for i, point in enumerate(ordered) if point.phy_offset in always}
    kept |= {0, len(ordered) - 1, *back[-_STEPS_BACK:], *(i - 1 for i in back[-_STEPS_BACK:])}
    last = None
    for i in range(len(ordered) - 1, -1, -1):
        distance = end - ordered[i].phy_offset
        gap = max(min(distance >> 4, _NEAR_GAP), distance >> 6)
        if last is None or last - ordered[i].phy_offset >= gap:
            kept.add(i)
            last = ordered[i].phy_offset
    return tuple(ordered[i] for i in sorted(kept)) if ordered else ()


def newest(points: tuple[Evidence, ...], distance: int) -> tuple[Evidence, ...]:
    """The points that lie within ``distance`` bytes of the last one."""
    return tuple(point for point in points if point.phy_offset >= points[-1].phy_offset - distance)
