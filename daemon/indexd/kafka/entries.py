"""The entries that Kafka's recovery gives a segment, as the bytes of both files (spec kafka-index 8).

The rule itself is the sparse indexes' own kernel. Recovery starts with empty indexes and no timestamp known, walks from
position 0, and ends with the largest timestamp as the last time entry; both files are trimmed to their entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from indexd.errors import CorruptDataError, UsageError
from indexd.kafka.format import Fault
from indexd.kafka.records import Batches, LogWalk
from indexd.sparse.format import INT32_MAX, OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE
from indexd.sparse.kernel import final_time_entry, new_state, segment_entries

_TIME_ENTRY = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])


def refuse_interval(interval: int) -> None:
    """UsageError for a number that index.interval.bytes cannot have."""
    if not 0 <= interval <= INT32_MAX:
        raise UsageError(f"--interval {interval} is not index.interval.bytes: 0 to {INT32_MAX}")


class RecoveredEntries:
    """Feed it the sound batches of a segment from its first on; ``finish`` gives (.index, .timeindex).

    CorruptDataError where Kafka's own recovery fails: offsets that do not fit the base, entries whose offsets do not
    rise. UsageError when an index would be longer than ``max_index_size`` bytes.
    """

    def __init__(self, base: int, interval: int, max_index_size: int) -> None:
        self._base = base
        self._interval = interval
        self._offset_entries_max = max_index_size // OFFSET_ENTRY_SIZE
        # The last slot is kept for the entry that recovery ends with.
        self._time_entries_max = max_index_size // TIME_ENTRY_SIZE - 1
        self._state = new_state()
        self._index: list[bytes] = []
        self._time_index: list[bytes] = []
        self._last = (-1, 0)  # the last offset entry's offset, and the last time entry's
        self.offset_entries = 0
        self.time_entries = 0

    def put(self, batches: Batches) -> None:
        """The next batches."""
        relative = batches.last_offset - self._base
        outside = np.flatnonzero((relative < 0) | (relative > INT32_MAX))
        if len(outside):
            row = int(outside[0])
            raise CorruptDataError(
                f"the batch at byte {batches.position[row]} ends with offset {batches.last_offset[row]}, which cannot "
                f"be held relative to the segment's base {self._base}",
                "Kafka's recovery ends here as well",
            )
        rows = len(batches)
        offset_entries = np.empty((rows, 2), dtype=np.int64)
        time_entries = np.empty((rows, 2), dtype=np.int64)
        _, count, time_count = segment_entries(
            batches.position, batches.size, relative, batches.max_timestamp, 0, rows, self._interval, self._state,
            offset_entries, time_entries,
        )  # fmt: skip
        self._add(offset_entries[: int(count)], time_entries[: int(time_count)])

    def finish(self) -> tuple[bytes, bytes]:
        """Both files, whole; with the final time entry, which may take the last slot."""
        final = final_time_entry(self._state)
        if final is not None:
            self._refuse_falling(self._last[1], np.array([final[1]], dtype=np.int64), 0)
            self._time_index.append(np.array([final], dtype=_TIME_ENTRY).tobytes())
            self.time_entries += 1
        return b"".join(self._index), b"".join(self._time_index)

    def _add(self, offset_entries: NDArray[np.int64], time_entries: NDArray[np.int64]) -> None:
        self._refuse_falling(self._last[0], offset_entries[:, 0], 1)
        self._refuse_falling(self._last[1], time_entries[:, 1], 0)
        if len(offset_entries):
            self._last = (int(offset_entries[-1, 0]), self._last[1])
        if len(time_entries):
            self._last = (self._last[0], int(time_entries[-1, 1]))
        self.offset_entries += len(offset_entries)
        self.time_entries += len(time_entries)
        if self.offset_entries > self._offset_entries_max or self.time_entries > self._time_entries_max:
            raise UsageError(
                f"the segment with base {self._base} needs longer indexes than the segment.index.bytes that was given",
                "give --max-index-size as the broker has it, and --interval as well",
            )
        self._index.append(offset_entries.astype(">i4").tobytes())
        packed = np.empty(len(time_entries), dtype=_TIME_ENTRY)
        packed["timestamp"], packed["offset"] = time_entries[:, 0], time_entries[:, 1]
        self._time_index.append(packed.tobytes())

    def _refuse_falling(self, last: int, offsets: NDArray[np.int64], rise_min: int) -> None:
        row = np.flatnonzero(np.diff(offsets, prepend=last) < rise_min)
        if len(row):
            raise CorruptDataError(
                f"the offsets of the batches do not rise at offset {self._base + int(offsets[row[0]])}",
                "Kafka's recovery ends here as well",
            )


@dataclass(frozen=True, slots=True)
class Recovered:
    """What recovery makes of a segment: the bytes of both files, and of how many log bytes and batches."""

    index: bytes
    time_index: bytes
    end: int
    batches: int

    @property
    def offset_entries(self) -> int:
        """Of ``index``."""
        return len(self.index) // OFFSET_ENTRY_SIZE

    @property
    def time_entries(self) -> int:
        """Of ``time_index``."""
        return len(self.time_index) // TIME_ENTRY_SIZE


def recover_entries(walk: LogWalk, base: int, interval: int, max_index_size: int) -> Recovered:
    """Walk a segment as recovery does: to the first batch with a fault, which recovery cuts off with all behind it."""
    entries = RecoveredEntries(base, interval, max_index_size)
    end = count = 0
    for batches in walk:
        faulty = np.flatnonzero(batches.fault != Fault.NONE)
        sound = batches.first(int(faulty[0])) if len(faulty) else batches
        if len(sound):
            entries.put(sound)
            end = int(sound.position[-1] + sound.size[-1])
            count += len(sound)
        if len(faulty):
            break
    index, time_index = entries.finish()
    return Recovered(index, time_index, end, count)
