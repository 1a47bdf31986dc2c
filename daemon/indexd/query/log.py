"""The broker's log as queries see it: single messages (LogView), and frames in log order by their heads (FrameScan).

LogView lists the log again when the broker has added or removed segments. Kept caches what was made of a file or
directory until that changes.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from indexd.commitlog.decoder import DecoderOptions, Message, read_head
from indexd.commitlog.evidence import FrameReader, MessageLookup
from indexd.commitlog.format import BLANK_SIZE, MAGIC_BLANK, STAMPED_SIZE
from indexd.commitlog.segments import Segment
from indexd.errors import DiskError
from indexd.flush.frontier import Uncovered
from indexd.storage.disk import Disk, DiskFile, Stamp

T = TypeVar("T")
# A change so soon after another may leave the same time of the last write: the kernel's clock for that goes in steps of
# up to 10 ms. What is younger is not kept.
_SETTLED_NS = 50_000_000


class Kept(Generic[T]):
    """The value that ``make`` gives for ``path``; ``times_made`` tells whether it is still the one seen before."""

    def __init__(self, disk: Disk, path: Path, make: Callable[[], T]) -> None:
        self.times_made = 0
        self._disk = disk
        self._path = path
        self._make = make
        self._stamp: Stamp | None = None
        self._value: T

    def get(self) -> T:
        """The value as it is now; raises what ``make`` raises."""
        now = time.time_ns()
        try:
            stamp = self._disk.stamp(self._path)
        except DiskError:
            return self._make_again(None)  # whatever is wrong with it, ``make`` says it better
        if self._stamp is not None and stamp == self._stamp:
            return self._value
        return self._make_again(stamp if now - stamp.mtime_ns > _SETTLED_NS else None)

    def forget(self) -> None:
        """Make it again next time."""
        self._stamp = None

    def _make_again(self, stamp: Stamp | None) -> T:
        self._stamp = None
        self._value = self._make()
        self._stamp = stamp
        self.times_made += 1
        return self._value


# Times that one query may list the log anew: entries that point nowhere must not cost a listing each.
_LISTINGS_PER_QUERY = 2


class TimeUpError(Exception):
    """What ``LogView.check`` raises when a query has taken all the time that it has: a walk keeps what it found."""


_BLANK = struct.Struct(">II")


class Frame(NamedTuple):
    """One frame; offset and size in bytes, time in ms."""

    phy_offset: int
    size: int
    store_timestamp: int


class LogView(MessageLookup):
    """The log's messages by physical offset, listed again when it has grown; close it after use.

    Raises DiskError, UnsafeStoreError.
    """

    def __init__(self, disk: Disk, directories: tuple[Path, ...], segment_size: int, options: DecoderOptions) -> None:
        self._watched = [Kept(disk, directory, lambda: None) for directory in directories]
        self._changes_listed = self._changes()
        super().__init__(disk, directories, segment_size, options)
        self._listings_left = _LISTINGS_PER_QUERY
        self._is_stale = False
        #: Called for each message, entry and piece of log that a query looks at; what it raises ends the query.
        self.check: Callable[[], None] = _go_on

    @property
    def begin(self) -> int | None:
        """The first physical offset that is still there; None without segments."""
        return self.log.min_offset

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments as they were listed last, the oldest first."""
        return self.log.segments

    @property
    def frame_size_max(self) -> int:
        """Bytes of the largest frame that is believed."""
        return self._options.frame_size_max

    def frame_reader(self) -> FrameReader:
        """Single frames of the segments as they were listed last, to be held against evidence; close it after use."""
        return FrameReader(self._disk, self.log)

    def store_timestamp(self, phy_offset: int, size: int) -> int:
        """The store time of the message of ``size`` bytes there, -1 where the log has none (pickupStoreTimestamp)."""
        segments = self.segments
        if not segments or phy_offset < segments[0].base or phy_offset + size > segments[-1].end:
            return -1
        found = self.at(phy_offset)
        return found.store_timestamp if isinstance(found, Message) else -1

    def begin_query(self) -> None:
        """A new query: a log whose directories have changed is listed anew, and may be again."""
        self._listings_left = _LISTINGS_PER_QUERY
        changes = self._changes()
        if self._is_stale or changes != self._changes_listed:
            self.refresh()
            self._changes_listed = changes

    def refresh(self) -> None:
        """List the segments anew."""
        super().refresh()
        self._is_stale = False

    def frame_head(self, phy_offset: int) -> Frame | int:
        """The frame that begins there, by its head alone; where there is none, bytes to the end of the segment.

        Negative: they are no end of a log either, but bytes that nobody wrote so. 0: the segment is not there.
        """
        opened = self._file_at(phy_offset)
        if opened is None:
            return 0
        file, segment = opened
        data, left = file.pread(STAMPED_SIZE, phy_offset - segment.base), segment.end - phy_offset
        head = read_head(data)
        if head is not None and head.is_of_message(phy_offset) and head.size <= left:
            return Frame(phy_offset, head.size, head.store_timestamp)
        # A blank record over all that is left of the segment, or less than takes one. Zeros are where messages were.
        is_end = left < BLANK_SIZE or data[:BLANK_SIZE] == _BLANK.pack(left, MAGIC_BLANK)
        return left if is_end else -left

    def _file_at(self, phy_offset: int) -> tuple[DiskFile, Segment] | None:
        self.check()
        found = super()._file_at(phy_offset)
        if found is None and self._is_listed_anew(phy_offset):
            found = super()._file_at(phy_offset)
        return found

    def _is_listed_anew(self, phy_offset: int) -> bool:
        # Behind the last segment there may be another by now.
        if self.log.at(phy_offset) is not None:
            self._is_stale = True  # listed, but gone since
            return False
        is_behind = not self.segments or phy_offset >= self.segments[-1].end
        if is_behind and self._listings_left > 0:
            self._listings_left -= 1
            self.refresh()
            return True
        return False

    def has_expired(self, phy_offset: int) -> bool:
        """Whether an offset at which ``at`` found None was in the log once: it lies before the log's begin.

        Not where a segment is missing behind others: a broker removes only the oldest.
        """
        if self._is_stale:  # a listed segment has gone: was it the oldest?
            self.refresh()
        return 0 <= phy_offset < (self.begin or 0)

    def is_inside(self, phy_offset: int) -> bool:
        """Whether an offset lies between the log's begin and its end, be its segment there or not."""
        return bool(self.segments) and self.segments[0].base <= phy_offset < self.segments[-1].end

    def _changes(self) -> int:
        # Grows when a segment comes or goes.
        for directory in self._watched:
            directory.get()
        return sum(directory.times_made for directory in self._watched)


def _go_on() -> None:
    return


class FrameScan:
    """Walks the log; ``unreadable`` counts places where no frame stood, so that the rest of a segment was left out.

    A segment that is missing behind the log's begin is such a place too, and zeros before the end that was asked for.
    """

    def __init__(self, log: LogView, gaps: Sequence[Uncovered] = ()) -> None:
        self._log, self._gaps = log, gaps
        self.unreadable = 0

    def frames(self, begin: int, end: int) -> Iterator[Frame]:
        """The frames that start in ``[begin, end)``, without those in the gaps; ``begin`` must be a frame's start."""
        position = begin
        while position < end:
            found = self._log.frame_head(position)
            if isinstance(found, Frame):
                yield found
                position += found.size
                continue
            gap = next((gap for gap in self._gaps if gap.begin <= position < gap.end), None)
            if gap is not None:
                position = gap.end
                continue
            is_known = found > 0 or (found == 0 and self._log.has_expired(position))
            self.unreadable += not is_known
            position += self._log.segment_size - position % self._log.segment_size
