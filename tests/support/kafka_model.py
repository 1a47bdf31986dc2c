"""How a Kafka segment feeds its indexes, a batch at a time: plain twins of the kernels (spec kafka-index 8 and 9).

``Entries`` holds the rule alone, on Python lists. ``Segment`` drives our index classes and kernels through what
Kafka's LogSegment does, for the goldens. A batch is a row with position, size, baseOffset, lastOffset, maxTimestamp and
timestamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from indexd.sparse.kernel import LAST_TIMESTAMP, MAX_TIMESTAMP, MAX_TIMESTAMP_OFFSET, new_state, segment_entries
from indexd.sparse.sparse_index import OffsetIndex, TimeIndex
from indexd.storage.disk import Disk


@dataclass
class Entries:
    """The per-batch rule; offsets as they are given, relative or not."""

    interval: int
    offsets: list[tuple[int, int]] = field(default_factory=list)
    times: list[tuple[int, int]] = field(default_factory=list)
    bytes_since: int = 0
    largest: tuple[int, int] | None = None

    def put(self, position: int, size: int, last_offset: int, timestamp: int) -> None:
        """One batch."""
        if timestamp > (-1 if self.largest is None else self.largest[0]):
            self.largest = (timestamp, last_offset)
        if self.bytes_since > self.interval:
            self.offsets.append((last_offset, position))
            self._put_time()
            self.bytes_since = 0
        self.bytes_since += size

    def roll(self) -> None:
        """No more batches."""
        self._put_time()

    def _put_time(self) -> None:
        if self.largest is not None and (not self.times or self.largest[0] > self.times[-1][0]):
            self.times.append(self.largest)


class Segment:
    """A segment over files in ``directory``; ``per_call`` indexes once a call, as Kafka 3.9.0 and 4.0.0 do."""

    def __init__(self, directory: Path, base: int, interval: int, max_index_size: int) -> None:
        disk = Disk()
        self.offset_index = OffsetIndex.open(disk, directory / f"{base:020d}.index", base, max_index_size)
        self.time_index = TimeIndex.open(disk, directory / f"{base:020d}.timeindex", base, max_index_size)
        self.per_call = False
        self._base, self._max_index_size = base, max_index_size
        self._interval = interval
        self._batches: list[dict[str, Any]] = []
        self._state = new_state()

    def append(self, batches: Sequence[dict[str, Any]]) -> None:
        """One call with so many batches."""
        self._batches += batches
        self._index(self._merged(batches) if self.per_call else batches)

    def truncate_to(self, offset: int) -> int:
        """Drop the batches that reach ``offset``; the bytes of log that they took."""
        kept = [batch for batch in self._batches if batch["lastOffset"] < offset]
        dropped: int = sum(batch["size"] for batch in self._batches[len(kept) :])
        self._batches = kept
        for index in (self.offset_index, self.time_index):
            index.truncate_to(offset)
            index.resize(self._max_index_size)
        self._state = new_state()
        last = self.time_index.last_entry
        self._state[MAX_TIMESTAMP], self._state[MAX_TIMESTAMP_OFFSET] = last.timestamp, last.offset - self._base
        self._state[LAST_TIMESTAMP] = last.timestamp
        begin = self.offset_index.lookup(last.offset).position
        for batch in kept:
            if batch["position"] >= begin and batch["maxTimestamp"] > self._state[MAX_TIMESTAMP]:
                self._state[MAX_TIMESTAMP] = batch["maxTimestamp"]
                self._state[MAX_TIMESTAMP_OFFSET] = batch["lastOffset"] - self._base
        return dropped

    def roll(self) -> None:
        """The last time entry, and both files trimmed."""
        largest = int(self._state[MAX_TIMESTAMP]), self._base + int(self._state[MAX_TIMESTAMP_OFFSET])
        self.time_index.maybe_append(*largest, skip_full_check=True)
        self.offset_index.trim_to_valid_size()
        self.time_index.trim_to_valid_size()

    def recover(self) -> None:
        """Both indexes from the log alone."""
        for index in (self.offset_index, self.time_index):
            index.entries = 0
            index.resize(self._max_index_size)
        self._state = new_state()
        self._index(self._batches)
        self.roll()

    def find_offset_by_timestamp(self, timestamp: int, start: int) -> tuple[int, int] | None:
        """The first record at ``timestamp`` or later and at offset ``start`` or behind it."""
        found = self.time_index.lookup(timestamp)
        position = self.offset_index.lookup(max(found.offset, start)).position
        for batch in self._batches:
            if batch["position"] < position or batch["maxTimestamp"] < timestamp:
                continue
            for offset, each in enumerate(batch["timestamps"], batch["baseOffset"]):
                if each >= timestamp and offset >= start:
                    return each, offset
        return None

    def close(self) -> None:
        """Close both files as they are."""
        self.offset_index.close()
        self.time_index.close()

    def _index(self, batches: Sequence[dict[str, Any]]) -> None:
        def column(name: str, minus: int = 0) -> np.ndarray[Any, np.dtype[np.int64]]:
            return np.array([batch[name] - minus for batch in batches], dtype=np.int64)

        rows = len(batches)
        offsets, times = np.empty((rows, 2), np.int64), np.empty((rows, 2), np.int64)
        taken, offset_count, time_count = segment_entries(
            column("position"),
            column("size"),
            column("lastOffset", self._base),
            column("maxTimestamp"),
            0,
            rows,
            self._interval,
            self._state,
            offsets,
            times,
        )
        assert taken == rows
        for relative, position in offsets[:offset_count].tolist():
            self.offset_index.append(self._base + relative, position)
        for timestamp, relative in times[:time_count].tolist():
            self.time_index.maybe_append(timestamp, self._base + relative)

    def _merged(self, batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        # A call as one batch, from the first one's position to the last one's offset; but the largest timestamp keeps
        # the offset of the batch that has it.
        largest = max(batches, key=lambda batch: batch["maxTimestamp"])
        if largest["maxTimestamp"] > self._state[MAX_TIMESTAMP]:
            self._state[MAX_TIMESTAMP] = largest["maxTimestamp"]
            self._state[MAX_TIMESTAMP_OFFSET] = largest["lastOffset"] - self._base
        size = sum(batch["size"] for batch in batches)
        return [
            {
                "position": batches[0]["position"],
                "size": size,
                "lastOffset": batches[-1]["lastOffset"],
                "maxTimestamp": -1,
            }
        ]
