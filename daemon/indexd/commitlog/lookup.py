"""Reads single frames: FrameReader and Evidence, to tell whether the log is as it was indexed; LogView, for queries.

A broker that lost power, or a replica that follows another master, cuts its log and writes on from there. The bytes
behind the cut stay in their segment until they are overwritten, so nothing in the log itself says where it was cut.
Evidence is what a frame was when it was indexed; the first one that the log no longer holds is where to look.

LogView is the log as queries and recovery see it, message by message, listed again when it has grown. Cached keeps what
was made of a file or directory until that changes. None of it needs the compiler or numpy; few files are open at once.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Generic, NamedTuple, Self, TypeVar

from indexd.commitlog.decoder import (
    Decoded,
    DecoderOptions,
    Framed,
    FrameHead,
    Message,
    check_frame,
    decode_frame,
    read_head,
)
from indexd.commitlog.format import (
    BLANK_SIZE,
    FRAME_SIZE_MIN,
    HEAD_SIZE,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    STAMPED_SIZE,
    NotYetWritten,
)
from indexd.commitlog.segments import Segment, SegmentList, WrittenEnd, list_segments
from indexd.errors import DiskError, MissingOk
from indexd.storage.disk import Disk, DiskFile, Stamp

T = TypeVar("T")
Found = TypeVar("Found")
# A change so soon after another may leave the same time of the last write: the kernel's clock for that goes in steps of
# up to 10 ms. What is younger is not kept.
_SETTLED_NS = 50_000_000


class Cached(Generic[T]):
    """The value that ``make`` gives for ``paths``; ``times_made`` tells whether it is still the one seen before."""

    def __init__(self, disk: Disk, paths: Sequence[Path], make: Callable[[], T]) -> None:
        self.times_made = 0
        #: Of the paths when they were looked at last; None if one of them could not be.
        self.seen: list[Stamp] | None = None
        self._disk = disk
        self._paths = paths
        self._make = make
        self._stamps: list[Stamp] | None = None
        self._value: T

    def get(self) -> T:
        """The value as it is now; raises what ``make`` raises."""
        now, self.seen = time.time_ns(), None
        with suppress(DiskError):  # whatever is wrong with it, ``make`` says it better
            self.seen = [self._disk.stamp(path) for path in self._paths]
        stamps = self.seen
        if stamps is None or stamps != self._stamps:
            self._stamps = None
            self._value = self._make()
            is_settled = stamps is not None and all(now - stamp.mtime_ns > _SETTLED_NS for stamp in stamps)
            self._stamps = stamps if is_settled else None
            self.times_made += 1
        return self._value

    def forget(self) -> None:
        """Make it again next time."""
        self._stamps = None


# Of a larger frame this many bytes are looked at: a look at every point must stay a matter of milliseconds.
_BYTES_MAX = 64 << 10
# Points that lie closer together than this allows are thinned: dense at the end of the log, sparse far behind it.
_NEAR_GAP = 4 << 20
_STEPS_BACK = 16
#: One read brings most messages whole; a longer one takes a second.
FIRST_READ = 4096
# So many files at most a reader keeps open.
_OPEN_MAX = 16
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


class RangeChecksum(NamedTuple):
    """Bytes ``[begin, end)`` of one segment and their CRC-32 when they were read."""

    begin: int
    end: int
    crc: int


class FrameReader:
    """Reads single frames; holds segments open, so close it soon: one may be replaced under its name."""

    def __init__(self, disk: Disk, log: SegmentList) -> None:
        self._disk = disk
        self.log = log
        self._files: dict[int, DiskFile] = {}
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
        data = self.read(phy_offset, phy_offset + FIRST_READ)
        head = read_head(data)
        if head is None or head.phy_offset != phy_offset or not HEAD_SIZE <= head.size < 1 << 31:
            return None
        size = min(head.size, _BYTES_MAX)
        if len(data) < size:
            data = self.read(phy_offset, phy_offset + size)
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
                if len(self._files) >= _OPEN_MAX:
                    self._files.pop(next(iter(self._files))).close()
                self._files[segment.base] = file
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
    last = 1 << 64
    for i in range(len(ordered) - 1, -1, -1):
        distance = end - ordered[i].phy_offset
        if last - ordered[i].phy_offset >= max(min(distance >> 4, _NEAR_GAP), distance >> 6):
            kept.add(i)
            last = ordered[i].phy_offset
    return tuple(ordered[i] for i in sorted(kept)) if ordered else ()


def newest(points: tuple[Evidence, ...], distance: int) -> tuple[Evidence, ...]:
    """The points that lie within ``distance`` bytes of the last one."""
    return tuple(point for point in points if point.phy_offset >= points[-1].phy_offset - distance)


# Times that one query may list the log anew: entries that point nowhere must not cost a listing each.
_LISTINGS_PER_QUERY = 2


class TimeUpError(Exception):
    """What ``LogView.check`` raises when a query has taken all the time that it has: a walk keeps what it found."""


_BLANK = struct.Struct(">II")


class LogView(FrameReader):
    """The log's messages by physical offset, listed again when it has grown; close it after use.

    Raises DiskError, UnsafeStoreError.
    """

    def __init__(self, disk: Disk, directories: tuple[Path, ...], segment_size: int, options: DecoderOptions) -> None:
        self.options, self._checked = options, replace(options, check_crc=True)
        #: Bytes of each segment.
        self.segment_size = segment_size
        self._listed = Cached(disk, directories, lambda: list_segments(disk, directories, segment_size))
        super().__init__(disk, self._listed.get())
        self._written_end = WrittenEnd()
        self._listings_left = _LISTINGS_PER_QUERY
        #: Called for each message, entry and piece of log that a query looks at; what it raises ends the query.
        self.check: Callable[[], None] = lambda: None

    @property
    def begin(self) -> int | None:
        """The first physical offset that is still there; None without segments."""
        return self.log.min_offset

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments as they were listed last, the oldest first."""
        return self.log.segments

    def at(self, phy_offset: int) -> Decoded | None:
        """What stands at ``phy_offset``; None when its segment has expired or is not there yet."""
        return self._found(
            phy_offset, self.segment_size, lambda data, end: decode_frame(data, 0, phy_offset, end, self.options)
        )

    def frame(self, phy_offset: int, size_max: int) -> Framed | None:
        """The same as bytes, its CRCs checked; NotYetWritten, ``needed`` set, for one of more than ``size_max`` bytes.

        Such a frame is not read.
        """
        found = self._found(phy_offset, size_max, lambda data, end: check_frame(data, phy_offset, end, self._checked))
        if isinstance(found, bytes) and len(found) > size_max:
            return NotYetWritten(phy_offset, len(found))
        return found

    def _found(self, phy_offset: int, size_max: int, judge: Callable[[bytes, int], Found]) -> Found | None:
        opened = self._file_at(phy_offset)
        if opened is None:
            return None
        file, segment = opened
        position = phy_offset - segment.base
        data = file.pread(min(FIRST_READ, segment.size - position), position)
        found = judge(data, segment.end)
        if isinstance(found, NotYetWritten) and len(data) < found.needed <= size_max:
            found = judge(file.pread(found.needed, position), segment.end)
        return found

    def written_end(self, phy_offset: int) -> int:
        """The physical offset behind the last byte of its segment that is not zero; itself if none is from there on."""
        opened = self._file_at(phy_offset)
        return phy_offset if opened is None else self._written_end.of(*opened, phy_offset)

    def open_files(self) -> Iterator[tuple[int, int]]:
        """(first physical offset, descriptor) of each file that is open now."""
        for base in sorted(self._files):
            yield base, self._files[base].fileno()

    def store_timestamp(self, phy_offset: int) -> int:
        """The store time of the message there, -1 where the log has none (pickupStoreTimestamp)."""
        found = self.at(phy_offset)
        return found.store_timestamp if isinstance(found, Message) else -1

    def begin_query(self) -> None:
        """A new query: a log whose directories have changed is listed anew, and may be again."""
        self._listings_left = _LISTINGS_PER_QUERY
        times_listed = self._listed.times_made
        self.log = self._listed.get()
        if self._listed.times_made != times_listed:
            self.close()

    def refresh(self) -> None:
        """List the segments anew; files that were open are closed."""
        self._listed.forget()
        self.log = self._listed.get()
        self.close()

    def frame_head(self, phy_offset: int) -> FrameHead | int:
        """The frame that begins there, by its head alone; where there is none, bytes to the end of the segment.

        Negative: they are no end of a log either, but bytes that nobody wrote so. 0: the segment is not there.
        """
        opened = self._file_at(phy_offset)
        if opened is None:
            return 0
        file, segment = opened
        data, left = file.pread(STAMPED_SIZE, phy_offset - segment.base), segment.end - phy_offset
        head = read_head(data)
        is_message = head is not None and head.magic in (MAGIC_V1, MAGIC_V2) and head.phy_offset == phy_offset
        if head is not None and is_message and FRAME_SIZE_MIN <= head.size <= left:
            return head
        # A blank record over all that is left of the segment, or less than takes one. Zeros are where messages were.
        is_end = left < BLANK_SIZE or data[:BLANK_SIZE] == _BLANK.pack(left, MAGIC_BLANK)
        return left if is_end else -left

    def _file_at(self, phy_offset: int) -> tuple[DiskFile, Segment] | None:
        self.check()
        found = super()._file_at(phy_offset)
        # It may be in a segment that is new, or its own may have gone since they were listed.
        if found is None and self._listings_left > 0 and phy_offset >= (self.begin or 0):
            self._listings_left -= 1
            self.refresh()
            found = super()._file_at(phy_offset)
        return found

    def has_expired(self, phy_offset: int) -> bool:
        """Whether an offset at which ``at`` found None was in the log once: it lies before the log's begin.

        Not where a segment is missing behind others: a broker removes only the oldest.
        """
        return 0 <= phy_offset < (self.begin or 0)

    def is_inside(self, phy_offset: int) -> bool:
        """Whether an offset lies between the log's begin and its end, be its segment there or not."""
        return bool(self.segments) and self.segments[0].base <= phy_offset < self.segments[-1].end
