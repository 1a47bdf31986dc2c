"""A counting table: fingerprint -> how often, and where first; open addressing over one array, compiled.

``rows`` uint64 (a power of two, 4): fingerprint (0 = free), count, physical offset of the first, unused: what belongs
together lies in one cache line. ``used[0]`` int64 is how many rows are taken. Whoever adds sees to it that there is
always a free one.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

import numba
import numpy as np

PRINT, COUNT, FIRST = (np.uint64(i) for i in range(3))
COLUMNS = 4
_0 = np.uint64(0)
_1 = np.uint64(1)
_SHIFT = np.uint64(32)


@numba.njit(nogil=True, forceinline=True)
def find_place(rows, value):  # type: ignore[no-untyped-def]
    """Where a fingerprint stands, or the free row where it would."""
    mask = np.uint64(len(rows)) - _1
    place = (value ^ value >> _SHIFT) & mask
    while rows[place, PRINT] != _0 and rows[place, PRINT] != value:
        place = (place + _1) & mask
    return place


@numba.njit(nogil=True, forceinline=True)
def add(rows, used, value, first):  # type: ignore[no-untyped-def]
    """Count ``value`` once more; ``first`` (uint64) is the offset of the message, kept where it is a new one."""
    place = find_place(rows, value)
    if rows[place, PRINT] == _0:
        rows[place, PRINT] = value
        rows[place, COUNT] = _0
        rows[place, FIRST] = first
        used[_0] += np.int64(1)
    rows[place, COUNT] += _1


@numba.njit(nogil=True, cache=True)
def refill(rows, used, kept):  # type: ignore[no-untyped-def]
    """Empty the table and put the rows ``kept`` into it."""
    rows[:, PRINT] = _0
    for number in range(len(kept)):
        i = np.uint64(number)
        rows[find_place(rows, kept[i, PRINT])] = kept[i]
    used[_0] = np.int64(len(kept))
