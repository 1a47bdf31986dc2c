"""Every unit of a ConsumeQueue file looked at once: which stand for messages, and whether they rise. Compiled.

Units are rows of five big-endian uint32, as they lie in the file: phy offset high and low, size, tags code high and
low.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.index.kernel import swap

#: Places of the state of a file; PREVIOUS alone goes on into the next file of the queue. FIRST and LAST are units that
#: stand for messages, -1 without one; LOWEST and HIGHEST the physical offsets of such; BREAKS where they do not rise or
#: others stand between them; EXPIRED how many point before the log.
PREVIOUS, FIRST, LAST, LOWEST, HIGHEST, BREAKS, EXPIRED, STATE_SIZE = range(8)
#: What a unit can be besides right, in itself or by the one before it.
NEGATIVE, ORDER, KIND_COUNT = range(3)
#: Columns of ``found``: the unit, its physical offset, that of the unit before.
FOUND_COLUMNS = 3

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_4 = np.uint64(4)
_32 = np.uint64(32)
_ZERO = np.uint32(0)
_BLANK_SIZE = np.uint32(2147483647)


@numba.njit(nogil=True, cache=True)
def scan_units(units, first, log_begin, state, counts, found):  # type: ignore[no-untyped-def]
    """Go through ``units`` (n, 5) of a file, the first one of which is unit ``first`` of its queue.

    Zeros were never written, and blank units stand for no message: neither counts. ``counts`` has a place a kind, and
    ``found`` (kinds, rows, columns) takes the first rows of each; both go on from file to file.
    """
    for at in range(len(units)):
        i = np.uint64(at)
        high, low, size = units[i, _0], units[i, _1], units[i, _2]
        if high == _ZERO and low == _ZERO:
            if swap(size) == _BLANK_SIZE:
                continue
            if size == _ZERO and units[i, _3] == _ZERO and units[i, _4] == _ZERO:
                continue
        phy = np.int64(np.uint64(swap(high)) << _32 | np.uint64(swap(low)))
        unit = np.int64(first) + np.int64(at)
        kind = np.int64(-1)
        if phy < np.int64(0):
            kind = np.int64(NEGATIVE)
        elif phy < state[PREVIOUS]:
            kind = np.int64(ORDER)
        if kind >= np.int64(0):
            row = counts[kind]
            if row < np.int64(found.shape[1]):
                found[kind, row, 0] = unit
                found[kind, row, 1] = phy
                found[kind, row, 2] = state[PREVIOUS]
            counts[kind] += np.int64(1)
            state[BREAKS] += np.int64(1)
        if kind == np.int64(NEGATIVE):
            continue
        if state[FIRST] < np.int64(0):
            state[FIRST], state[LOWEST], state[HIGHEST] = unit, phy, phy
        elif state[LAST] != unit - np.int64(1):
            state[BREAKS] += np.int64(1)
        state[LAST], state[PREVIOUS] = unit, phy
        state[LOWEST] = min(state[LOWEST], phy)
        state[HIGHEST] = max(state[HIGHEST], phy)
        if phy < np.int64(log_begin):
            state[EXPIRED] += np.int64(1)
