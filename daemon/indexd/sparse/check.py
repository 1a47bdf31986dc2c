"""The pairs held against what the frontier says of them: sizes, order of entries, nothing else there. Reads only.

What can be said without the log: an entry lies behind the one before it, more than an interval of log on, and inside
its segment. Files are read a window at a time.

What the log comes to, held against the pairs that are there; nothing is written.

Entries are compared as they come, so that a segment of any size takes no more memory than one call of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.errors import DiskError
from indexd.findings import KEPT_MAX, Findings
from indexd.sparse.format import (
    NO_TIMESTAMP,
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY_SIZE,
    ActiveMark,
    SegmentMark,
    SparseMark,
    index_name,
    own_base,
    time_index_name,
)
from indexd.sparse.kernel import (
    BYTES_SINCE,
    LAST_TIMESTAMP,
    MAX_TIMESTAMP,
    MAX_TIMESTAMP_OFFSET,
    MESSAGES,
    final_time_entry,
    message_entries,
    new_state,
)
from indexd.storage.disk import Disk, DiskFile

#: Entries as they lie in the files; offsets relative.
OFFSET_ENTRY_TYPE = np.dtype([("offset", ">i4"), ("position", ">i4")])
TIME_ENTRY_TYPE = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])

_ENTRIES_PER_READ = 1 << 16


def check_sparse(
    disk: Disk,
    directory: Path,
    segment_size: int,
    mark: SparseMark,
    *,
    is_at_rest: bool,
    is_owned: bool,
    on_bytes: Callable[[int], None],
    name: str = "sparse",
) -> Findings:
    """Everything that does not hold; the words as in ``consumequeue.check.check_queues``."""
    findings = Findings()
    for segment in mark.segments:
        active = mark.active if segment is mark.segments[-1] else None
        place = _Place(segment, active, segment_size, mark.interval, is_at_rest=is_at_rest)
        for file in (_OffsetFile(place, findings, name), _TimeFile(place, findings, name)):
            file.check(disk, directory, on_bytes)
    if not is_owned:
        named = {segment.base for segment in mark.segments}
        for other, _ in disk.list_dir(directory) if disk.exists(directory) else ():
            base = own_base(other)
            if base is not None and base not in named:
                findings.add(f"{name}/{other}", 0, "file-unnamed", "the frontier does not name it, and no daemon runs")
    return findings


@dataclass(frozen=True, slots=True)
class _Place:
    # A segment, and what may be asked of its files.
    segment: SegmentMark
    active: ActiveMark | None
    segment_size: int
    interval: int
    is_at_rest: bool


class _File:
    # One file of a pair. ``before`` is the entry before the window, as two int64; at first one that any may follow.
    type: np.dtype[np.void]
    before: NDArray[np.int64]

    def __init__(self, place: _Place, findings: Findings, name: str, file_name: str, entries: int) -> None:
        self._place, self._findings = place, findings
        self._file_name, self._name = file_name, f"{name}/{file_name}"
        self._entries = entries

    def check(self, disk: Disk, directory: Path, on_bytes: Callable[[int], None]) -> None:
        """Add to the findings what does not hold."""
        try:
            with disk.open_read(directory / self._file_name) as file:
                self._check(file, on_bytes)
        except DiskError as error:
            if not error.is_missing:
                raise
            self._findings.add(self._name, 0, "file-missing", "the frontier names it, but it is not there")

    def rules(self, rows: NDArray[np.int64], before: NDArray[np.int64]) -> list[tuple[str, int, NDArray[np.bool_]]]:
        """What of ``rows`` (entries, 2) cannot be, ``before`` being the ones before each: kind, place in the entry."""
        raise NotImplementedError

    def check_end(self, last: NDArray[np.int64]) -> None:
        """The last entry, or what stands for it, against what building would go on with."""

    def _check(self, file: DiskFile, on_bytes: Callable[[int], None]) -> None:
        size, wanted, width = file.size(), self._entries * self.type.itemsize, self.type.itemsize
        is_growing = self._place.active is not None
        if size < wanted or (size > wanted and not is_growing):
            text = f"{size} bytes, but {self._entries} entries take {wanted}"
            self._findings.add(self._name, min(size, wanted), "file-size", text)
        there = min(self._entries, size // width)
        for first in range(0, there, _ENTRIES_PER_READ):
            data = file.pread(min(there - first, _ENTRIES_PER_READ) * width, first * width)
            self._check_entries(np.frombuffer(data, self.type, len(data) // width), first)
            on_bytes(len(data))
        if there < self._entries:
            return
        self.check_end(self.before)
        if self._place.is_at_rest and is_growing:
            self._check_rest(file, wanted)

    def _check_entries(self, entries: NDArray[np.void], first: int) -> None:
        if not len(entries):
            return
        rows = np.stack([entries[field].astype(np.int64) for field in entries.dtype.names or ()], axis=1)
        before = np.concatenate([self.before[np.newaxis], rows[:-1]])
        for what, at, wrong in self.rules(rows, before):
            found = np.flatnonzero(wrong)
            for index in found[:KEPT_MAX].tolist():
                text = f"entry {first + index}: {self._words(rows[index])} behind {self._words(before[index])}"
                self._findings.add(self._name, (first + index) * self.type.itemsize + at, what, text)
            self._findings.count(what, max(len(found) - KEPT_MAX, 0))
        self.before = rows[-1]

    def _words(self, row: NDArray[np.int64]) -> str:
        names = self.type.names or ()
        return ", ".join(f"{name} {value}" for name, value in zip(names, row.tolist(), strict=True))

    def _check_rest(self, file: DiskFile, position: int) -> None:
        # Most of it was never written, and reads as zeros without a look at the disk.
        size, first, found = file.size(), 0, 0
        while (position := file.next_data(position)) < size:
            rest = np.frombuffer(file.pread(_ENTRIES_PER_READ * self.type.itemsize, position), np.uint8)
            wrong = np.flatnonzero(rest)
            if len(wrong):
                first, found = first or position + int(wrong[0]), found + len(wrong)
            position += max(len(rest), 1)
        if found:
            text = f"{found} bytes behind the last entry, {self._entries - 1}, are not zero"
            self._findings.add(self._name, first, "behind-last-entry", text)


class _OffsetFile(_File):
    # A segment's first message has no entry, so the first one lies behind offset 0 at position 0.
    type = OFFSET_ENTRY_TYPE

    def __init__(self, place: _Place, findings: Findings, name: str) -> None:
        super().__init__(place, findings, name, index_name(place.segment.base), place.segment.offset_entries)
        self.before = np.zeros(2, dtype=np.int64)

    def rules(self, rows: NDArray[np.int64], before: NDArray[np.int64]) -> list[tuple[str, int, NDArray[np.bool_]]]:
        place, offsets, positions = self._place, rows[:, 0], rows[:, 1]
        is_outside = (offsets < 0) | (offsets >= place.segment.messages)
        least = np.where(is_outside, 1, offsets) * FRAME_SIZE_MIN
        is_misplaced = (positions < least) | (positions > place.segment_size - FRAME_SIZE_MIN)
        falls, is_near = offsets <= before[:, 0], positions - before[:, 1] <= place.interval
        return [
            ("entry-offset", 0, is_outside),
            ("entry-position", 4, is_misplaced),
            ("entry-order", 0, falls & ~is_outside),
            ("entry-distance", 4, is_near & ~is_misplaced),
        ]


class _TimeFile(_File):
    # The first message may have one; a timestamp below 0 never has.
    type = TIME_ENTRY_TYPE

    def __init__(self, place: _Place, findings: Findings, name: str) -> None:
        super().__init__(place, findings, name, time_index_name(place.segment.base), place.segment.time_entries)
        self.before = np.array([NO_TIMESTAMP, -1], dtype=np.int64)

    def rules(self, rows: NDArray[np.int64], before: NDArray[np.int64]) -> list[tuple[str, int, NDArray[np.bool_]]]:
        timestamps, offsets = rows[:, 0], rows[:, 1]
        is_outside = (offsets < 0) | (offsets >= self._place.segment.messages)
        return [
            ("entry-offset", 8, is_outside),
            ("entry-order", 0, timestamps <= before[:, 0]),
            ("entry-order", 8, (offsets <= before[:, 1]) & ~is_outside),
        ]

    def check_end(self, last: NDArray[np.int64]) -> None:
        active = self._place.active
        if active is not None and int(last[0]) != active.last_timestamp:
            text = f"the last entry's timestamp is {last[0]}, not {active.last_timestamp} as the frontier says"
            self._findings.add(self._name, max(self._entries - 1, 0) * TIME_ENTRY_SIZE, "segment-end", text)


assert (OFFSET_ENTRY_TYPE.itemsize, TIME_ENTRY_TYPE.itemsize) == (OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE)


_ENTRIES = 8192


@dataclass(frozen=True, slots=True)
class Difference:
    """From byte ``position`` of a file on it is not what the log comes to; ``text`` says how."""

    name: str
    position: int
    text: str


class SparseComparison:
    """Takes the batches of the log from the begin of a segment on; gives each segment's differences when it is over.

    ``gone`` are files that were not there when they were to be read: they may have expired meanwhile.
    """

    def __init__(self, disk: Disk, directory: Path, segment_size: int, mark: SparseMark, begin: int) -> None:
        self._disk, self._directory, self._segment_size = disk, directory, segment_size
        self._interval, self._active = mark.interval, mark.active
        self._marks = {segment.base: segment for segment in mark.segments if segment.base >= begin}
        self._growing = mark.segments[-1].base if mark.active is not None else None
        self._segment: _Segment | None = None
        self.gone: list[str] = []

    def __repr__(self) -> str:
        return f"SparseComparison({self._segment}, {len(self._marks)} more)"

    def take(self, batch: DispatchBatch) -> Iterator[Difference]:
        """The messages of the next stretch; what differs in the segments that end before it."""
        offsets, row = batch.columns.phy_offset, 0
        while row < batch.rows:
            base = int(offsets[row]) - int(offsets[row]) % self._segment_size
            if self._segment is None or base != self._segment.base:
                yield from self._end()
                self._segment = _Segment(base, self._interval, self._files(base))
            row = self._segment.put(batch, row, base + self._segment_size)

    def finish(self) -> Iterator[Difference]:
        """No message is left: what differs in the last segment, and segments of which no message came."""
        yield from self._end()
        for base in self._marks:
            yield Difference(index_name(base), 0, "the log has no message of this segment")

    def _files(self, base: int) -> tuple[_CompareFile, _CompareFile] | None:
        mark = self._marks.get(base)
        if mark is None:
            return None
        return (
            _CompareFile(self._disk, self._directory / index_name(base), OFFSET_ENTRY_TYPE, mark.offset_entries),
            _CompareFile(self._disk, self._directory / time_index_name(base), TIME_ENTRY_TYPE, mark.time_entries),
        )

    def _end(self) -> Iterator[Difference]:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        mark = self._marks.pop(segment.base, None)
        if mark is None or segment.files is None:
            text = f"the segment has {segment.messages} messages, and the frontier names no sparse indexes of it"
            yield Difference(index_name(segment.base), 0, text)
            return
        is_growing = segment.base == self._growing
        if not is_growing:
            segment.roll()
        for file in segment.files:
            if file.is_gone:
                self.gone.append(file.path.name)
            elif (difference := file.difference()) is not None:
                yield difference
        yield from _differs(mark, segment, self._active if is_growing else None)


def _differs(mark: SegmentMark, segment: _Segment, active: ActiveMark | None) -> Iterator[Difference]:
    # What the frontier alone says.
    if mark.messages != segment.messages:
        text = f"the segment has {segment.messages} messages, but the frontier says {mark.messages}"
        yield Difference(index_name(mark.base), 0, text)
    elif active is not None and active != segment.active():
        text = f"building would go on with {active}, but the log comes to {segment.active()}"
        yield Difference(index_name(mark.base), 0, text)


class _Segment:
    # The segment whose messages come; ``files`` None where the frontier names none.
    def __init__(self, base: int, interval: int, files: tuple[_CompareFile, _CompareFile] | None) -> None:
        self.base, self.files = base, files
        self._interval = interval
        self._state = new_state()
        self._offsets = np.empty((_ENTRIES, 2), dtype=np.int64)
        self._times = np.empty((_ENTRIES, 2), dtype=np.int64)

    def __repr__(self) -> str:
        return f"_Segment({self.base}, messages={self.messages}, {self.active()})"

    @property
    def messages(self) -> int:
        """So far."""
        return int(self._state[MESSAGES])

    def active(self) -> ActiveMark:
        """What building would go on with."""
        fields = (BYTES_SINCE, MAX_TIMESTAMP, MAX_TIMESTAMP_OFFSET, LAST_TIMESTAMP)
        return ActiveMark(*(int(self._state[field]) for field in fields))

    def put(self, batch: DispatchBatch, row: int, end: int) -> int:
        """Rows before physical offset ``end`` from ``row`` on, as many as fit; the first that was not taken."""
        columns = batch.columns
        row, offset_count, time_count = message_entries(
            columns,
            row,
            batch.rows,
            self.base,
            end,
            self._interval,
            self._state,
            self._offsets,
            self._times,
        )
        if self.files is not None:
            for file, rows in zip(
                self.files, (self._offsets[: int(offset_count)], self._times[: int(time_count)]), strict=True
            ):
                file.expect(rows)
        return int(row)

    def roll(self) -> None:
        """The last time entry of a segment that is over."""
        last = final_time_entry(self._state)
        if last is not None and self.files is not None:
            self.files[1].expect(np.array([last], dtype=np.int64))


class _CompareFile:
    # Up to ``entries`` of a file are believed to be there; the rest is not looked at.
    def __init__(self, disk: Disk, path: Path, entry: np.dtype[np.void], entries: int) -> None:
        self.path = path
        self.is_gone = False
        self._disk, self._entry, self._entries = disk, entry, entries
        self._wanted = 0
        self._differs_at: int | None = None

    def expect(self, rows: NDArray[np.int64]) -> None:
        """These entries come next."""
        if not len(rows):
            return
        first, self._wanted = self._wanted, self._wanted + len(rows)
        if self.is_gone or self._differs_at is not None:
            return
        wanted = np.empty(len(rows), dtype=self._entry)
        for column, field in enumerate(self._entry.names or ()):
            wanted[field] = rows[:, column]
        width = self._entry.itemsize
        found = self._read(max(min(self._wanted, self._entries) - first, 0) * width, first * width)
        if found != wanted.tobytes():
            there = np.frombuffer(found, self._entry, len(found) // width)
            wrong = np.flatnonzero(there != wanted[: len(there)])
            self._differs_at = first + (int(wrong[0]) if len(wrong) else len(there))

    def difference(self) -> Difference | None:
        """The first one, once all entries have come."""
        width = self._entry.itemsize
        if self._differs_at is not None:
            text = f"entry {self._differs_at} of {self._entries} is not what the log comes to"
            return Difference(self.path.name, self._differs_at * width, text)
        if self._wanted < self._entries:
            text = f"{self._entries} entries, but the log comes to {self._wanted}"
            return Difference(self.path.name, self._wanted * width, text)
        return None

    def _read(self, size: int, position: int) -> bytes:
        try:
            with self._disk.open_read(self.path) as file:
                return file.pread(size, position)
        except DiskError as error:
            if not error.is_missing:
                raise
            self.is_gone = True
            return b""
