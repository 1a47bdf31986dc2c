"""Every unit of a queue held against the one before it; compiled."""

from __future__ import annotations

import numba
import numpy as np

from indexd.consumequeue.format import UNIT_SIZE

PHY_NEGATIVE, PHY_ORDER, SIZE, BLANK = range(4)
#: Places of the state, which goes on from window to window: where the last message ends in the log, rows of
#: ``found`` that are taken, whether a unit that is not blank has been seen.
END, FOUND, BEGUN = range(3)

_0 = np.uint64(0)
_1 = np.uint64(1)
_BLANK_SIZE = np.int64(2147483647)


@numba.njit(nogil=True, forceinline=True)
def _load(data, at, count):  # type: ignore[no-untyped-def]
    # ``count`` bytes of a big-endian number.
    value = _0
    i = _0
    while i < count:
        value = value << np.uint64(8) | np.uint64(data[at + i])
        i += _1
    return value


@numba.njit(nogil=True, cache=True)
def check_units(data, offset, min_offset, state, counts, found):  # type: ignore[no-untyped-def]
    """Judge the whole units of ``data`` (uint8), the first one being unit ``offset`` of its queue.

    Blank units may stand before ``min_offset``, and only before all others.
    ``counts`` has a place for every code; a row of ``found`` is (unit, code, what stands there, what is the least).
    """
    units = np.uint64(len(data)) // np.uint64(UNIT_SIZE)
    i = _0
    while i < units:
        at = i * np.uint64(UNIT_SIZE)
        phy = np.int64(_load(data, at, np.uint64(8)))
        size = np.int64(np.int32(np.uint32(_load(data, at + np.uint64(8), np.uint64(4)))))
        code, value, least = np.int64(-1), phy, state[END]
        if phy == np.int64(0) and size == _BLANK_SIZE:
            if state[BEGUN] or np.int64(offset) + np.int64(i) >= np.int64(min_offset):
                code = np.int64(BLANK)
        elif phy < np.int64(0):
            code, least = np.int64(PHY_NEGATIVE), np.int64(0)
        elif size <= np.int64(0):
            code, value, least = np.int64(SIZE), size, np.int64(1)
        else:
            if phy < state[END]:
                code = np.int64(PHY_ORDER)
            # Also of one that stands too low: one that stands too high must not make all behind it look wrong.
            state[END] = phy + size
        if phy != np.int64(0) or size != _BLANK_SIZE:
            state[BEGUN] = 1
        if code >= np.int64(0):
            counts[np.uint64(code)] += 1
            row = np.uint64(state[FOUND])
            if row < np.uint64(len(found)):
                found[row, _0] = np.int64(offset) + np.int64(i)
                found[row, _1] = code
                found[row, np.uint64(2)] = value
                found[row, np.uint64(3)] = least
                state[FOUND] += 1
        i += _1
