"""OffsetTable and TimeTable: an index as arrays, for lookups by the million; and appends by the million.

They give exactly what ``OffsetIndex.lookup`` and ``TimeIndex.lookup`` give, one by one, whatever the entries are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from indexd.sparse.format import NO_TIMESTAMP, OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE
from indexd.sparse.lookup_kernel import encode_offsets, encode_times, lookup_exact, lookup_sorted
from indexd.sparse.offset_index import OffsetIndex
from indexd.sparse.time_index import TimeIndex

Int64s = NDArray[np.int64]

_OFFSET_ENTRY = np.dtype([("offset", ">i4"), ("position", ">i4")])
_TIME_ENTRY = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])
# Entries that are turned into bytes at a time: they stay in the cache.
_ENTRIES_PER_WRITE = 1 << 16


class _Table:
    """Keys and values in the order of the file, and what a lookup below all of them gives."""

    def __init__(self, keys: Int64s, values: Int64s, none: tuple[int, int], entry_size: int) -> None:
        self._keys = keys
        self._values = values
        self._none = np.array(none, dtype=np.int64)
        self._entry_size = entry_size
        self._is_sorted = bool(np.all(keys[1:] > keys[:-1]))

    def __len__(self) -> int:
        return len(self._keys)

    def _lookup(self, targets: Int64s) -> tuple[Int64s, Int64s]:
        keys, values = np.empty_like(targets), np.empty_like(targets)
        if self._is_sorted:
            lookup_sorted(self._keys, self._values, self._none, targets, keys, values)
        else:
            lookup_exact(self._keys, self._values, self._entry_size, self._none, targets, keys, values)
        return keys, values


class OffsetTable(_Table):
    """The entries of an OffsetIndex; ``data`` is its bytes, ``base`` its segment's base."""

    def __init__(self, data: bytes, base: int) -> None:
        entries = np.frombuffer(data, dtype=_OFFSET_ENTRY)
        # The sum wraps in 64 bits, as Kafka's does.
        offsets = entries["offset"].astype(np.int64) + np.int64(base)
        super().__init__(offsets, entries["position"].astype(np.int64), (base, 0), OFFSET_ENTRY_SIZE)

    def lookup(self, targets: Int64s) -> tuple[Int64s, Int64s]:
        """(offsets, positions) of the entries with the largest offset at most each target, else (base, 0)."""
        return self._lookup(targets)


class TimeTable(_Table):
    """The entries of a TimeIndex; ``data`` is its bytes, ``base`` its segment's base."""

    def __init__(self, data: bytes, base: int) -> None:
        entries = np.frombuffer(data, dtype=_TIME_ENTRY)
        offsets = entries["offset"].astype(np.int64) + np.int64(base)
        super().__init__(entries["timestamp"].astype(np.int64), offsets, (NO_TIMESTAMP, base), TIME_ENTRY_SIZE)

    def lookup(self, targets: Int64s) -> tuple[Int64s, Int64s]:
        """(timestamps, offsets) of the entries with the largest timestamp at most each target, else (-1, base)."""
        return self._lookup(targets)


def append_offsets(index: OffsetIndex, offsets: Int64s, positions: Int64s) -> None:
    """``index.append`` for each row; where it refuses one, those before are in, and its error is raised."""
    row = 0
    while row < len(offsets):
        out = np.empty((min(_ENTRIES_PER_WRITE, index.max_entries - index.entries), 2), dtype=np.uint32)
        base, last = np.int64(index.base), np.int64(index.last_offset)
        taken = int(encode_offsets(offsets[row:], positions[row:], base, index.entries > 0, last, out))
        if taken == 0:
            index.append(int(offsets[row]), int(positions[row]))
        index.extend(out[:taken].tobytes())
        row += taken


def append_times(index: TimeIndex, timestamps: Int64s, offsets: Int64s) -> None:
    """``index.maybe_append`` for each row; where it refuses one, those before are in, and its error is raised."""
    row = 0
    while row < len(offsets):
        room = max(index.max_entries - 1 - index.entries, 0)
        out = np.empty((min(_ENTRIES_PER_WRITE, room), 3), dtype=np.uint32)
        base, last, last_offset = np.int64(index.base), *np.array(index.last_entry, dtype=np.int64)
        taken, entries = encode_times(timestamps[row:], offsets[row:], base, index.entries > 0, last, last_offset, out)
        if taken == 0:
            index.maybe_append(int(timestamps[row]), int(offsets[row]))
        index.extend(out[: int(entries)].tobytes())
        row += int(taken)


def load_kernels() -> None:
    """Have the kernels of this module compiled, or loaded from where they are kept."""
    one, zero = np.zeros(1, np.int64), np.int64(0)
    OffsetTable(bytes(8), 0).lookup(one)
    OffsetTable(bytes(16), 0).lookup(one)
    encode_offsets(one, one, zero, False, zero, np.empty((1, 2), np.uint32))
    encode_times(one, one, zero, False, zero, zero, np.empty((1, 3), np.uint32))
