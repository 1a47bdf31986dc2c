"""Where in the log messages of a time can stand: what the sparse indexes know, and the log confirms.

A time entry (T, o) is made together with an offset entry, the first at or behind the message o, and says that no
message up to there has a larger store time than T, and that o was the first of that time. So from that offset entry on
a scan for later times misses nothing, however the clock fell (spec kafka-index 8, 9); where it fell, it may be the rest
of one segment that is scanned, otherwise it is an interval or little more.

A bit may flip on a disk, and an exact answer must not lose messages by it. So the entries are held against the frames
between that offset entry and the one before it: their number, where the last begins, that the first of the largest time
is o, and that this time is T. One wrong bit in the two files of a segment cannot move the bound too far:

- in T: the log has another time at o;
- in o: it can only name a later message of the same time that was the largest of its interval too, and then it still
  stands before the next time entry, up to whose offset entry T is the largest time;
- in an offset entry: the number of frames, or where they lead, is another; also when it misled the search, because what
  is found then is that entry or its neighbour;
- in any other time entry: the search ends at an entry before, or at that one.

What does not hold, is missing or cannot be read gives no bound: the segment is scanned whole.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import islice
from struct import Struct

from indexd.errors import CorruptDataError, DiskError
from indexd.query.frames import Frame, FrameScan
from indexd.query.source import Look, QueryIndex
from indexd.sparse.format import (
    INT64_MAX,
    NO_TIMESTAMP,
    OFFSET_ENTRY,
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY,
    TIME_ENTRY_SIZE,
    SegmentMark,
    index_name,
    time_index_name,
)
from indexd.sparse.searching import search
from indexd.storage.disk import DiskFile

# No time entry tells of earlier messages.
_TIME_MIN = 0
# Of a segment whose largest time is in doubt: as late as can be, so that it is looked into.
_NOT_KNOWN = INT64_MAX


class TimeBound:
    """The bound of one query by key, found when it is asked for first."""

    def __init__(self, index: QueryIndex, look: Look) -> None:
        self._index = index
        self._look = look
        self._offset: int | None = None

    def is_before(self, phy_offset: int, timestamp: int) -> bool:
        """Whether all messages up to ``phy_offset`` that are still in the log are older than ``timestamp``.

        False where that is not known. What has expired may have been of any time.
        """
        if timestamp <= _TIME_MIN or self._look.frontier.sparse is None:
            return False
        if self._offset is None:
            begin = max(self._look.coverage.begin, self._look.coverage.log_begin or 0)
            found = scan_start(self._index, self._look, timestamp, begin)
            # At its very begin it says nothing about what came before.
            self._offset = found if found > begin else 0
        return phy_offset < self._offset


def scan_start(index: QueryIndex, look: Look, timestamp: int, begin: int) -> int:
    """A message's start from which a scan for store times of ``timestamp`` and later misses none behind ``begin``.

    The end of the coverage if there is none; ``begin`` is a message's start too. Segments that have no sparse index, or
    one that is in doubt, are to be scanned whole, and so are all for times before 1970.
    """
    size, end = index.log.segment_size, look.queue_coverage.end
    sparse = look.frontier.sparse
    if timestamp <= _TIME_MIN or sparse is None:
        return min(begin, end)
    marks = {mark.base: mark for mark in sparse.segments}
    sealed = {mark.base for mark in sparse.sealed}
    newest = sparse.segments[-1].base if sparse.segments else -1
    for base in range(begin - begin % size, end, size):
        mark = marks.get(base)
        try:
            if base in sealed and mark is not None:
                if _largest(index, look, mark) < timestamp:
                    continue
                position = _Pair(index, look, mark).position(timestamp)
            elif mark is not None or (base > newest and look.published is not None):
                pair = _Pair(index, look, mark or SegmentMark(base, 0, 0, 0))
                position = pair.extended(look.published).position(timestamp)
            else:
                position = 0
        except (CorruptDataError, DiskError):
            position = 0  # expired, not made yet, or damaged: the log itself has the answer
        return min(max(base + position, begin), end)
    return end


def _largest(index: QueryIndex, look: Look, mark: SegmentMark) -> int:
    # The largest store time of a sealed segment, _NOT_KNOWN if in doubt; kept as long as no file comes or goes.
    kept = index.largest_times.get()
    if mark.base not in kept:
        try:
            kept[mark.base] = _Pair(index, look, mark).largest()
        except (CorruptDataError, DiskError):
            kept[mark.base] = _NOT_KNOWN
    return kept[mark.base]


class _Pair:
    """The two files of a segment, of which so many entries hold. CorruptDataError for entries the log contradicts."""

    def __init__(self, index: QueryIndex, look: Look, mark: SegmentMark) -> None:
        self._index = index
        self._look = look
        self._mark = mark

    def extended(self, published: int | None) -> _Pair:
        """With the entries that a running daemon has added since: all for messages before ``published`` are whole.

        Both files up to the same offset entry: the time entries made together with it have no larger offset.
        """
        mark = self._mark
        if published is None:
            return self
        with self._open(index_name(mark.base)) as file:

            def is_behind(slot: int) -> bool:
                offset, position = _offset_entry(file, slot)
                return (offset, position) == (0, 0) or mark.base + position >= published

            offsets = _first(is_behind, mark.offset_entries, file.size() // OFFSET_ENTRY_SIZE)
            last = _offset_entry(file, offsets - 1)[0] if offsets else NO_TIMESTAMP
        with self._open(time_index_name(mark.base)) as file:

            def is_later(slot: int) -> bool:
                timestamp, offset = _time_entry(file, slot)
                return (timestamp, offset) == (0, 0) or offset > last

            # An entry of zeros says that the first message is of time 0, or nothing: the same, for later times.
            slots = file.size() // TIME_ENTRY_SIZE
            times = _first(is_later, max(mark.time_entries, min(offsets, slots, 1)), slots)
        return _Pair(self._index, self._look, SegmentMark(mark.base, mark.messages, offsets, times))

    def largest(self) -> int:
        """The largest store time of the sealed segment, which its last time entry names, in ms."""
        mark = self._mark
        if not mark.time_entries:
            return NO_TIMESTAMP
        with self._open(index_name(mark.base)) as offsets, self._open(time_index_name(mark.base)) as times:
            timestamp, ordinal = _time_entry(times, mark.time_entries - 1)
            slot = bisect_right(range(mark.offset_entries), ordinal, key=lambda slot: _offset_entry(offsets, slot)[0])
            first, position = self._place(offsets, slot - 1)
            if first <= ordinal:
                frames = self._frames(position, self._index.log.segment_size)
                frame = next(islice(frames, ordinal - first, None), None)
                if frame is not None and frame.store_timestamp == timestamp:
                    return timestamp
        raise self._doubt()

    def position(self, timestamp: int) -> int:
        """The byte position of a message of the segment before which all are older than ``timestamp``."""
        mark = self._mark
        with self._open(index_name(mark.base)) as offsets, self._open(time_index_name(mark.base)) as times:
            slot, _ = search(
                lambda slot: _time_entry(times, slot)[0], mark.time_entries, TIME_ENTRY_SIZE, timestamp - 1
            )
            if slot < 0:
                return 0
            largest, ordinal = _time_entry(times, slot)
            made = bisect_left(range(mark.offset_entries), ordinal, key=lambda slot: _offset_entry(offsets, slot)[0])
            last, end = self._place(offsets, made)
            if slot + 1 < mark.time_entries:
                later, behind = _time_entry(times, slot + 1)
                if later <= largest or behind <= last:
                    raise self._doubt()
            self._check(self._place(offsets, made - 1), (last, end), largest, ordinal)
            return end

    def _check(self, before: tuple[int, int], at: tuple[int, int], largest: int, ordinal: int) -> None:
        # The frames from one offset entry up to the next one, which was made together with this time entry.
        first, begin = before
        last, end = at
        if not (first <= ordinal <= last and begin <= end):
            raise self._doubt()
        count, phy_offset, newest = first, -1, NO_TIMESTAMP
        found = -1
        for frame in self._frames(begin, end + 1):
            if frame.store_timestamp > newest:
                newest, found = frame.store_timestamp, count
            count, phy_offset = count + 1, frame.phy_offset
        if (count - 1, phy_offset, newest, found) != (last, self._mark.base + end, largest, ordinal):
            raise self._doubt()

    def _place(self, offsets: DiskFile, slot: int) -> tuple[int, int]:
        # (ordinal, position) of an offset entry; before the first one, of the first message.
        if slot < 0:
            return 0, max(self._look.coverage.begin - self._mark.base, 0)
        ordinal, position = _offset_entry(offsets, slot)
        if slot >= self._mark.offset_entries or ordinal < 0 or not 0 <= position < self._index.log.segment_size:
            raise self._doubt()
        return ordinal, position

    def _frames(self, begin: int, end: int) -> Iterator[Frame]:
        base = self._mark.base
        return FrameScan(self._index.log, self._look.coverage.uncovered).frames(base + begin, base + end)

    def _doubt(self) -> CorruptDataError:
        return CorruptDataError(f"the sparse index of segment {self._mark.base} does not fit the log")

    def _open(self, name: str) -> DiskFile:
        return self._index.disk.open_read(self._index.files.sparse / name)


def _first(holds: Callable[[int], bool], low: int, high: int) -> int:
    return bisect_left(range(high), True, low, max(high, low), key=holds)


def _offset_entry(file: DiskFile, slot: int) -> tuple[int, int]:
    offset, position = _entry(file, OFFSET_ENTRY, slot)
    return offset, position


def _time_entry(file: DiskFile, slot: int) -> tuple[int, int]:
    timestamp, offset = _entry(file, TIME_ENTRY, slot)
    return timestamp, offset


def _entry(file: DiskFile, form: Struct, slot: int) -> tuple[int, ...]:
    data = file.pread(form.size, slot * form.size)
    if len(data) < form.size:
        raise CorruptDataError(f"sparse index {file.path} has no entry {slot}, but the frontier says so")
    return form.unpack(data)
