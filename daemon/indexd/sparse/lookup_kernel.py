"""Many lookups at once, and many entries to bytes at once; compiled.

A single lookup waits for the memory at nearly every step. Here a block of them goes down together, step by step: their
loads do not depend on one another, so the memory serves many at the same time.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.sparse.format import INT32_MAX
from indexd.sparse.searching import WARM_SIZE

_BLOCK = 32
_WARM_SIZE = np.int64(WARM_SIZE)
_INT32_MAX = np.uint64(INT32_MAX)
_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)


@numba.njit(inline="always")
def _swap(x):  # type: ignore[no-untyped-def]
    # A number as the big-endian uint32 of a file; compiled, a shifted uint32 is a uint64: cut it back.
    x = np.uint64(x)
    return np.uint32(
        (x >> np.uint64(24) & np.uint64(0xFF))
        | ((x >> np.uint64(8)) & np.uint64(0xFF00))
        | ((x << np.uint64(8)) & np.uint64(0xFF0000))
        | ((x & np.uint64(0xFF)) << np.uint64(24))
    )


@numba.njit(nogil=True, cache=True, error_model="numpy")
def lookup_sorted(keys, values, none, targets, found_keys, found_values):  # type: ignore[no-untyped-def]
    """For each target the entry with the largest key at most it, else ``none``; ``keys`` must rise strictly.

    ``keys``, ``targets``, ``found_keys`` int64; ``values``, ``found_values`` of one type; ``none`` int64 (key, value).
    """
    count = np.uint64(len(targets))
    slots = np.zeros(_BLOCK, dtype=np.uint64)
    begin = _0
    while begin < count:
        lanes = min(np.uint64(_BLOCK), count - begin)
        for lane in range(lanes):
            slots[np.uint64(lane)] = _0
        size = np.uint64(len(keys))
        while size > _1:
            half = size >> _1
            for lane in range(lanes):
                at = np.uint64(lane)
                # No branch: which way it goes cannot be foreseen.
                step = half * np.uint64(keys[slots[at] + half] <= targets[begin + at])
                slots[at] += step
            size -= half
        for lane in range(lanes):
            at = np.uint64(lane)
            target = targets[begin + at]
            if len(keys) > 0 and keys[slots[at]] <= target:
                found_keys[begin + at] = keys[slots[at]]
                found_values[begin + at] = values[slots[at]]
            else:
                found_keys[begin + at] = none[_0]
                found_values[begin + at] = none[_1]
        begin += lanes


@numba.njit(nogil=True, forceinline=True)
def _search(keys, low, high, target):  # type: ignore[no-untyped-def]
    while low < high:
        middle = (low + high + np.int64(1)) >> np.int64(1)
        key = keys[np.uint64(middle)]
        if key == target:
            return middle
        if key > target:
            high = middle - np.int64(1)
        else:
            low = middle
    return low


@numba.njit(nogil=True, cache=True, error_model="numpy")
def lookup_exact(keys, values, entry_size, none, targets, found_keys, found_values):  # type: ignore[no-untyped-def]
    """The same for keys in any order: Kafka's own steps (spec 5), so what its classes find is found here."""
    last = np.int64(len(keys)) - np.int64(1)
    hot = max(np.int64(0), last - _WARM_SIZE // np.int64(entry_size))
    for row in range(len(targets)):
        at = np.uint64(row)
        target = targets[at]
        if last < np.int64(0):
            slot = np.int64(-1)
        elif keys[np.uint64(hot)] < target:
            slot = _search(keys, hot, last, target)
        elif keys[_0] > target:
            slot = np.int64(-1)
        else:
            slot = _search(keys, np.int64(0), hot, target)
        if slot < np.int64(0):
            found_keys[at] = none[_0]
            found_values[at] = none[_1]
        else:
            found_keys[at] = keys[np.uint64(slot)]
            found_values[at] = values[np.uint64(slot)]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def encode_offsets(offsets, positions, base, has_last, last_offset, out):  # type: ignore[no-untyped-def]
    """Entries of an OffsetIndex as bytes of the file: ``out`` uint32 (n, 2), filled from its front.

    ``offsets`` and ``positions`` int64; stops at the first row that append would refuse, or when ``out`` is full.
    Returns the rows taken. ``has_last``: there is an entry before, of ``last_offset``.
    """
    count = np.uint64(min(len(offsets), len(out)))
    row = _0
    while row < count:
        offset, position = offsets[row], positions[row]
        relative = np.uint64(offset) - np.uint64(base)
        is_32_bits = position >= np.int64(-0x80000000) and position <= np.int64(0x7FFFFFFF)
        if (has_last and offset <= last_offset) or relative > _INT32_MAX or not is_32_bits:
            break
        out[row, _0] = _swap(relative)
        out[row, _1] = _swap(np.uint64(position))
        has_last = True
        last_offset = offset
        row += _1
    return np.int64(row)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def encode_times(timestamps, offsets, base, has_last, last_timestamp, last_offset, out):  # type: ignore[no-untyped-def]
    """The same for a TimeIndex, ``out`` uint32 (n, 3): a row whose timestamp is the last one's gets no entry.

    Returns (rows taken, entries). ``last_timestamp`` is -1 without an entry before.
    """
    row = entry = _0
    while row < np.uint64(len(offsets)) and entry < np.uint64(len(out)):
        offset, timestamp = offsets[row], timestamps[row]
        if has_last and (offset < last_offset or timestamp < last_timestamp):
            break
        if timestamp > last_timestamp:
            relative = np.uint64(offset) - np.uint64(base)
            if relative > _INT32_MAX:
                break
            out[entry, _0] = _swap(np.uint64(timestamp) >> np.uint64(32))
            out[entry, _1] = _swap(np.uint64(timestamp) & np.uint64(0xFFFFFFFF))
            out[entry, _2] = _swap(relative)
            has_last = True
            last_timestamp = timestamp
            last_offset = offset
            entry += _1
        row += _1
    return np.int64(row), np.int64(entry)
