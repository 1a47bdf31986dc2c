"""Reads single frames: FrameReader to tell whether the log is still what was indexed, MessageLookup for queries.

A broker that lost power, or a replica that follows another master, cuts its log and writes on from there. The bytes
behind the cut stay in their segment until they are overwritten, so nothing in the log itself says where it was cut.
Evidence is what a frame was when it was indexed; the first one that the log no longer holds is where to look.

Neither needs the compiler or numpy; few files are open at a time.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from indexd.commitlog.decoder import Decoded, DecoderOptions, Framed, check_frame, decode_frame
from indexd.commitlog.format import FLAG_BORN_HOST_V6, HEAD_SIZE, NotYetWritten
from indexd.commitlog.segments import Segment, SegmentList, WrittenEnd, list_segments
from indexd.errors import DiskError
from indexd.storage.disk import Disk, DiskFile

# Of a larger frame this many bytes are looked at: a look at every point must stay a matter of milliseconds.
_BYTES_MAX = 64 << 10
# Points that lie closer together than this allows are thinned: dense at the end of the log, sparse far behind it.
_NEAR_GAP = 4 << 20
_STEPS_BACK = 16
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

    def __init__(self, disk: Disk, log: SegmentList) -> None:
        self._disk = disk
        self._log = log
        self._segment: Segment | None = None
        self._file: DiskFile | None = None

    def __enter__(self) -> FrameReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def evidence(self, phy_offset: int, messages: int = 0) -> Evidence | None:
        """What stands at ``phy_offset`` now; None if no frame of that offset does, or its segment is not there."""
        file = self._open(phy_offset)
        if file is None or self._segment is None:
            return None
        position = phy_offset - self._segment.base
        data = file.pread(4096, position)
        size = int.from_bytes(data[:4], "big", signed=True)
        if len(data) < HEAD_SIZE or size < HEAD_SIZE or int.from_bytes(data[28:36], "big") != phy_offset:
            return None
        if len(data) < size:
            data = file.pread(min(size, _BYTES_MAX), position)
        data = data[: min(size, _BYTES_MAX)]
        at = 68 if int.from_bytes(data[36:40], "big") & FLAG_BORN_HOST_V6 else 56
        store_timestamp = int.from_bytes(data[at : at + 8], "big", signed=True)
        return Evidence(phy_offset, size, store_timestamp, zlib.crc32(data), messages)

    def holds(self, point: Evidence) -> bool:
        """Whether the log still says what ``point`` says."""
        return self.evidence(point.phy_offset, point.messages) == point

    def read(self, begin: int, end: int) -> bytes:
        """The bytes ``[begin, end)`` of one segment; fewer if they are not all there."""
        file = self._open(begin)
        if file is None or self._segment is None:
            return b""
        return file.pread(end - begin, begin - self._segment.base)

    def _open(self, phy_offset: int) -> DiskFile | None:
        segment = self._log.at(phy_offset)
        if segment != self._segment or self._file is None:
            if self._file is not None:
                self._file.close()
            self._segment, self._file = segment, None
            if segment is not None:
                try:
                    self._file = self._disk.open_read(segment.path)
                except DiskError as error:
                    if not error.is_missing:
                        raise
        return self._file


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


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far a log agrees with evidence: the last point that does, and the first behind it that does not.

    Points before the log's begin say nothing. ``differs`` None: every point of the log agrees.
    """

    agrees: Evidence | None
    differs: Evidence | None


def compare(disk: Disk, log: SegmentList, points: tuple[Evidence, ...], near: int) -> Agreement:
    """The first point that the log no longer holds, looked for among those within ``near`` bytes of the last one.

    A log is cut by removing whole segments, and by writing over the rest of one: stale frames behind that may still
    agree, but only in that segment. So if the oldest of the near points agrees (``near``: two segments), older ones do.
    """
    present = tuple(point for point in points if point.phy_offset >= (log.min_offset or 0))
    if not present:
        return Agreement(None, None)
    with FrameReader(disk, log) as frames:
        recent = newest(present, near)
        if not frames.holds(recent[0]):
            recent = present
        agrees = None
        for point in recent:
            if not frames.holds(point):
                return Agreement(agrees, point)
            agrees = point
    return Agreement(agrees, None)


def newest(points: tuple[Evidence, ...], distance: int) -> tuple[Evidence, ...]:
    """The points that lie within ``distance`` bytes of the last one."""
    return tuple(point for point in points if point.phy_offset >= points[-1].phy_offset - distance)


_OPEN_FILES_MAX = 16
# One read brings most messages whole; a longer one takes a second.
_FIRST_READ = 4096
# Of all lookups, so that no two states of any two of them are taken for the same.
_STATES = count()


class MessageLookup:
    """Reads single frames of a log; close it after use."""

    def __init__(self, disk: Disk, directories: tuple[Path, ...], segment_size: int, options: DecoderOptions) -> None:
        self._disk = disk
        self._options = options
        self._directories = directories
        self._files: OrderedDict[Path, DiskFile] = OrderedDict()
        #: Another number whenever other files are open.
        self.files_opened = next(_STATES)
        #: Bytes of each segment.
        self.segment_size = segment_size
        self._written_end = WrittenEnd()
        self.refresh()

    def refresh(self) -> None:
        """List the segments anew; files that were open are closed."""
        self.close()
        self.log: SegmentList = list_segments(self._disk, self._directories, self.segment_size)
        # All are of one size, and begin at a multiple of it.
        self._segments = {segment.base: segment for segment in self.log.segments}

    def at(self, phy_offset: int) -> Decoded | None:
        """What stands at ``phy_offset``; None when its segment has expired or is not there yet."""
        opened = self._file_at(phy_offset)
        if opened is None:
            return None
        file, segment = opened
        position = phy_offset - segment.base
        size = min(_FIRST_READ, segment.size - position)
        found = self._decode(file, size, position, segment.end, phy_offset)
        if isinstance(found, NotYetWritten) and found.needed > size >= HEAD_SIZE:
            found = self._decode(file, found.needed, position, segment.end, phy_offset)
        return found

    def frame(self, phy_offset: int, size_max: int) -> Framed | None:
        """The same as bytes, its CRCs checked; NotYetWritten, ``needed`` set, for one of more than ``size_max`` bytes.

        Such a frame is not read.
        """
        opened = self._file_at(phy_offset)
        if opened is None:
            return None
        file, segment = opened
        position = phy_offset - segment.base
        data = file.pread(min(_FIRST_READ, segment.size - position), position)
        found = check_frame(data, phy_offset, segment.end, self._options)
        if isinstance(found, NotYetWritten) and len(data) < found.needed <= size_max:
            found = check_frame(file.pread(found.needed, position), phy_offset, segment.end, self._options)
        if isinstance(found, bytes) and len(found) > size_max:
            return NotYetWritten(phy_offset, len(found))
        return found

    def written_end(self, phy_offset: int) -> int:
        """The physical offset behind the last byte of its segment that is not zero; itself if none is from there on."""
        opened = self._file_at(phy_offset)
        if opened is None:
            return phy_offset
        return self._written_end.of(*opened, phy_offset)

    def _file_at(self, phy_offset: int) -> tuple[DiskFile, Segment] | None:
        segment = self._segments.get(phy_offset - phy_offset % self.segment_size)
        if segment is None:
            return None
        try:
            return self._open(segment.path), segment
        except DiskError as error:
            if not error.is_missing:
                raise
            return None

    def _decode(self, file: DiskFile, size: int, position: int, segment_end: int, phy_offset: int) -> Decoded:
        return decode_frame(file.pread(size, position), 0, phy_offset, segment_end, self._options)

    def _open(self, path: Path) -> DiskFile:
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path]
        self.files_opened = next(_STATES)
        if len(self._files) >= _OPEN_FILES_MAX:
            self._files.popitem(last=False)[1].close()
        file = self._files[path] = self._disk.open_read(path)
        return file

    def open_files(self) -> Iterator[tuple[int, int]]:
        """(first physical offset, descriptor) of each file that is open now."""
        for segment in self.log.segments:
            file = self._files.get(segment.path)
            if file is not None:
                yield segment.base, file.fileno()

    def close(self) -> None:
        """Close every file."""
        self.files_opened = next(_STATES)
        for file in self._files.values():
            file.close()
        self._files.clear()
