"""Sparse indexes compared with the log: the entries that the log comes to against those that are there.

Entries are compared as they come, so that a segment of any size takes no more memory than one call of the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.flush.frontier import Frontier
from indexd.sparse.format import ActiveMark, SegmentMark, SparseMark, index_name, time_index_name
from indexd.sparse.kernel import (
    MESSAGES,
    OFFSET_ENTRY_TYPE,
    TIME_ENTRY_TYPE,
    active_mark,
    final_time_entry,
    message_entries,
    new_state,
    pack_entries,
    unpack_entries,
)
from indexd.storage.disk import Disk

_ENTRIES = 8192


@dataclass(frozen=True, slots=True)
class EntryDifference:
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

    def take(self, batch: DispatchBatch) -> Iterator[EntryDifference]:
        """The messages of the next stretch; what differs in the segments that end before it."""
        offsets, row = batch.columns.phy_offset, 0
        while row < batch.rows:
            base = int(offsets[row]) - int(offsets[row]) % self._segment_size
            if self._segment is None or base != self._segment.base:
                yield from self._end()
                self._segment = _Segment(base, self._interval, self._files(base))
            row = self._segment.put(batch, row, base + self._segment_size)

    def finish(self) -> Iterator[EntryDifference]:
        """No message is left: what differs in the last segment, and segments of which no message came."""
        yield from self._end()
        for base in self._marks:
            yield EntryDifference(index_name(base), 0, "the log has no message of this segment")

    def _files(self, base: int) -> tuple[_ComparedFile, _ComparedFile] | None:
        mark = self._marks.get(base)
        if mark is None:
            return None
        return (
            _ComparedFile(self._disk, self._directory / index_name(base), OFFSET_ENTRY_TYPE, mark.offset_entries),
            _ComparedFile(self._disk, self._directory / time_index_name(base), TIME_ENTRY_TYPE, mark.time_entries),
        )

    def _end(self) -> Iterator[EntryDifference]:
        segment, self._segment = self._segment, None
        if segment is None:
            return
        mark = self._marks.pop(segment.base, None)
        if mark is None or segment.files is None:
            text = f"the segment has {segment.messages} messages, and the frontier names no sparse indexes of it"
            yield EntryDifference(index_name(segment.base), 0, text)
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


def _differs(mark: SegmentMark, segment: _Segment, active: ActiveMark | None) -> Iterator[EntryDifference]:
    # What the frontier alone says.
    if mark.messages != segment.messages:
        text = f"the segment has {segment.messages} messages, but the frontier says {mark.messages}"
        yield EntryDifference(index_name(mark.base), 0, text)
    elif active is not None and active != segment.active():
        text = f"building would go on with {active}, but the log comes to {segment.active()}"
        yield EntryDifference(index_name(mark.base), 0, text)


class _Segment:
    # The segment whose messages come; ``files`` None where the frontier names none.
    def __init__(self, base: int, interval: int, files: tuple[_ComparedFile, _ComparedFile] | None) -> None:
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
        return active_mark(self._state)

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


class _ComparedFile:
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
        wanted = pack_entries(rows, self._entry)
        width = self._entry.itemsize
        found = self._read(max(min(self._wanted, self._entries) - first, 0) * width, first * width)
        if found != wanted:
            there = unpack_entries(found, self._entry)
            wrong = np.flatnonzero((there != rows[: len(there)]).any(axis=1))
            self._differs_at = first + (int(wrong[0]) if len(wrong) else len(there))

    def difference(self) -> EntryDifference | None:
        """The first one, once all entries have come."""
        width = self._entry.itemsize
        if self._differs_at is not None:
            text = f"entry {self._differs_at} of {self._entries} is not what the log comes to"
            return EntryDifference(self.path.name, self._differs_at * width, text)
        if self._wanted < self._entries:
            text = f"{self._entries} entries, but the log comes to {self._wanted}"
            return EntryDifference(self.path.name, self._wanted * width, text)
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


class SparseFindings:
    """What verify says of the sparse indexes, compared with the log from ``begin`` to the frontier's end."""

    name, folder = "sparse", "sparse"

    def __init__(self, _: Config, disk: Disk, root: Path, frontier: Frontier, begin: int) -> None:
        self.findings, self.left_out = Findings(), list[str]()
        mark: SparseMark = frontier.outputs[self.name]
        self._is_ahead = mark.phy_offset > frontier.phy_offset
        self._sparse = SparseComparison(disk, root, frontier.segment_size, mark, begin)

    def take(self, batch: DispatchBatch) -> None:
        """The next range of the log."""
        self._add(self._sparse.take(batch))

    def finish(self, *, is_whole: bool) -> None:
        """No message is left; not ``is_whole``: the log could not be read to the end."""
        if is_whole and self._is_ahead:
            self.left_out.append("the growing pair of sparse indexes: the disk refused before all of a drain was built")
        elif is_whole:
            self._add(self._sparse.finish())
        if gone := self._sparse.gone:
            self.left_out.append(f"{len(gone)} files of sparse indexes, {gone[0]} first: they are not there")

    def _add(self, differences: Iterator[EntryDifference]) -> None:
        for found in differences:
            self.findings.add(f"sparse/{found.name}", found.position, "entry-log", found.text)
