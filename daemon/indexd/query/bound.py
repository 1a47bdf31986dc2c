"""Where in the log messages of a time can stand: what the sparse indexes know without reading a frame.

A time entry (T, o) says that no message before o has a store time of T or more; entries are only added together with
offset entries, so the largest time of all messages up to an offset entry is that of the last time entry then. From this
follows a place before which every message is older, however the clock fell, and it is one interval of log, or little
more, before the first that is not (spec kafka-index 8, 9).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from struct import Struct

from indexd.errors import CorruptDataError, DiskError
from indexd.query.source import Look, QueryIndex
from indexd.sparse.format import (
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

    The end of the coverage if there is none; ``begin`` is a message's start too. Segments that have no sparse index are
    to be scanned whole, and so are all for times before 1970.
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
                if _largest(index, mark) < timestamp:
                    continue
                position = _Pair(index, mark).position(timestamp)
            elif mark is not None or (base > newest and look.published is not None):
                pair = _Pair(index, mark or SegmentMark(base, 0, 0, 0))
                position = pair.extended(look.published).position(timestamp)
            else:
                position = 0
        except DiskError as error:
            if not error.is_missing:
                raise
            position = 0  # expired, or not made yet
        return min(max(base + position, begin), end)
    return end


def _largest(index: QueryIndex, mark: SegmentMark) -> int:
    # The largest store time of a sealed segment; kept as long as no file comes or goes.
    kept = index.largest_times.get()
    if mark.base not in kept:
        with index.disk.open_read(index.files.sparse / time_index_name(mark.base)) as file:
            kept[mark.base] = _time_entry(file, mark.time_entries - 1)[0] if mark.time_entries else NO_TIMESTAMP
    return kept[mark.base]


class _Pair:
    """The two files of a segment, of which so many entries hold."""

    def __init__(self, index: QueryIndex, mark: SegmentMark) -> None:
        self._index = index
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
        return _Pair(self._index, SegmentMark(mark.base, mark.messages, offsets, times))

    def position(self, timestamp: int) -> int:
        """The byte position of a message of the segment before which all are older than ``timestamp``."""
        mark = self._mark
        with self._open(index_name(mark.base)) as offsets:
            offset = self._first_offset(timestamp)
            if offset is None:
                slot = mark.offset_entries - 1
            else:
                slot, _ = search(
                    lambda slot: _offset_entry(offsets, slot)[0], mark.offset_entries, OFFSET_ENTRY_SIZE, offset
                )
            return _offset_entry(offsets, slot)[1] if slot >= 0 else 0

    def _first_offset(self, timestamp: int) -> int | None:
        # An offset up to which all messages are older, but perhaps itself; None: all up to the last offset entry are.
        count = self._mark.time_entries
        with self._open(time_index_name(self._mark.base)) as times:
            slot, _ = search(lambda slot: _time_entry(times, slot)[0], count, TIME_ENTRY_SIZE, timestamp)
            if slot >= 0:
                found, offset = _time_entry(times, slot)
                if found == timestamp:
                    return offset
            # A larger time came after the offset entry before this one, and that is what a scan may start at.
            return _time_entry(times, slot + 1)[1] - 1 if slot + 1 < count else None

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
