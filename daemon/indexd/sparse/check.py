"""Checks sparse indexes against what the frontier says of them: sizes, order of entries, nothing else there.

What can be said without the log: an entry lies behind the one before it, more than an interval of log on, and inside
its segment. Reads only, a window at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.errors import DiskError
from indexd.findings import KEPT_MAX, Findings
from indexd.output import find_nonzero
from indexd.sparse.format import (
    NO_TIMESTAMP,
    TIME_ENTRY_SIZE,
    ActiveMark,
    SegmentMark,
    SparseMark,
    index_name,
    own_base,
    time_index_name,
)
from indexd.sparse.kernel import OFFSET_ENTRY_TYPE, TIME_ENTRY_TYPE, unpack_entries
from indexd.storage.disk import Disk, DiskFile

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
) -> Findings:
    """Everything that does not hold; the words as in ``consumequeue.check.check_queues``."""
    findings, name = Findings(), "sparse"
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


def check_sparse_mark(mark: SparseMark, segment_size: int) -> list[str]:
    """What no builder writes: more messages than a segment holds, more entries than messages."""
    found = [
        f"{list(segment)} is nothing that a segment can be"
        for segment in mark.segments
        if segment.base % segment_size
        or segment.base >= mark.phy_offset
        or not 1 <= segment.messages <= segment_size // FRAME_SIZE_MIN
        or not 0 <= segment.offset_entries < segment.messages
        or not 0 <= segment.time_entries <= segment.offset_entries + 1
    ]
    active = mark.active
    if active is not None and not (
        0 <= active.bytes_since <= segment_size
        and 0 <= active.max_timestamp_offset < mark.segments[-1].messages
        and active.last_timestamp <= active.max_timestamp
    ):
        found.append(f"{list(active)} is nothing that building can go on with")
    return found


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
            self._check_entries(unpack_entries(data, self.type), first)
            on_bytes(len(data))
        if there < self._entries:
            return
        self.check_end(self.before)
        if self._place.is_at_rest and is_growing:
            self._check_rest(file, wanted)

    def _check_entries(self, rows: NDArray[np.int64], first: int) -> None:
        if not len(rows):
            return
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
        first, found = find_nonzero(file, position, file.size())
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
