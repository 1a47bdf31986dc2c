"""What the log comes to, held against the pairs that are there; nothing is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.dispatch import DispatchBatch
from indexd.errors import DiskError
from indexd.sparse.format import (
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY_SIZE,
    SegmentMark,
    SparseMark,
    index_name,
    time_index_name,
)
from indexd.sparse.kernel import final_time_entry, message_entries, new_state
from indexd.storage.disk import Disk

_ENTRIES = 8192
_TIME_ENTRY = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])


@dataclass(frozen=True, slots=True)
class Difference:
    """From byte ``position`` of a file on it is not what the log comes to; ``text`` says how."""

    name: str
    position: int
    text: str


class SparseComparison:
    """Takes the batches of the log from the begin of a segment on, and compares each segment when it is over."""

    def __init__(self, disk: Disk, directory: Path, segment_size: int, mark: SparseMark) -> None:
        self._disk, self._directory, self._segment_size = disk, directory, segment_size
        self._interval = mark.interval
        self._marks = {segment.base: segment for segment in mark.segments}
        self._growing = mark.segments[-1].base if mark.active is not None else None
        self._base: int | None = None
        self._state = new_state()
        self._offsets: list[NDArray[np.int64]] = []
        self._times: list[NDArray[np.int64]] = []

    def take(self, batch: DispatchBatch) -> Iterator[Difference]:
        """The messages of the next stretch; what differs in the segments that end before it."""
        offsets = batch.columns.phy_offset
        row = 0
        while row < batch.rows:
            base = int(offsets[row]) - int(offsets[row]) % self._segment_size
            if base != self._base:
                yield from self.finish()
                self._base = base
            row = self._put(batch, row, base)

    def finish(self) -> Iterator[Difference]:
        """No message is left: what differs in the last segment."""
        if self._base is None:
            return
        base, self._base = self._base, None
        mark = self._marks.pop(base, None)
        messages = int(self._state[4])
        if base != self._growing:
            last = final_time_entry(self._state)
            self._times += [np.array([last], dtype=np.int64)] if last is not None else []
        pairs = [np.concatenate([np.empty((0, 2), dtype=np.int64), *rows]) for rows in (self._offsets, self._times)]
        self._state, self._offsets, self._times = new_state(), [], []
        if mark is None:
            yield Difference(index_name(base), 0, f"no sparse indexes, but the segment has {messages} messages")
        else:
            yield from self._compare(mark, messages, *pairs)

    def left(self) -> tuple[int, ...]:
        """The bases of segments of which no message came."""
        return tuple(self._marks)

    def _put(self, batch: DispatchBatch, row: int, base: int) -> int:
        offsets, times = np.empty((_ENTRIES, 2), dtype=np.int64), np.empty((_ENTRIES, 2), dtype=np.int64)
        columns = batch.columns
        row, offset_count, time_count = message_entries(
            columns.phy_offset,
            columns.size,
            columns.store_timestamp,
            row,
            batch.rows,
            base,
            base + self._segment_size,
            self._interval,
            self._state,
            offsets,
            times,
        )
        self._offsets.append(offsets[: int(offset_count)])
        self._times.append(times[: int(time_count)])
        return int(row)

    def _compare(
        self, mark: SegmentMark, messages: int, offsets: NDArray[np.int64], times: NDArray[np.int64]
    ) -> Iterator[Difference]:
        if mark.messages != messages:
            text = f"{messages} messages in the segment, but the frontier says {mark.messages}"
            yield Difference(index_name(mark.base), 0, text)
        rows = np.empty(len(times), dtype=_TIME_ENTRY)
        rows["timestamp"], rows["offset"] = times[:, 0], times[:, 1]
        for name, size, count, wanted in (
            (index_name(mark.base), OFFSET_ENTRY_SIZE, mark.offset_entries, offsets.astype(">i4").tobytes()),
            (time_index_name(mark.base), TIME_ENTRY_SIZE, mark.time_entries, rows.tobytes()),
        ):
            found = self._read(name, count * size)
            if found != wanted:
                at = next(
                    (at for at in range(0, len(wanted), size) if found[at : at + size] != wanted[at : at + size]), -1
                )
                at = min(len(found), len(wanted)) // size * size if at < 0 else at
                yield Difference(name, at, f"entry {at // size} of {count} is not what the log comes to")

    def _read(self, name: str, size: int) -> bytes:
        try:
            with self._disk.open_read(self._directory / name) as file:
                return file.pread(size, 0)
        except DiskError as error:
            if not error.is_missing:
                raise
            return b""
