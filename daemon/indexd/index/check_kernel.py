"""The entries of an index file held against one another: what ``indexd verify`` asks of 20,000,000 of them; compiled.

The twin of ``replay_entries`` that does not stop at the first wrong entry: it writes down what is wrong and goes on as
if the entry were right, so that one wrong entry does not make wrong ones of all that follow. Entries and slots are
uint32 arrays of big-endian numbers, as in ``kernel``.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.index.kernel import swap

#: What an entry can break; the order is that of ``check.ENTRY_KINDS``.
(
    HASH_NEGATIVE,
    PHY_NEGATIVE,
    PHY_OUTSIDE,
    PHY_ORDER,
    TIME_NEGATIVE,
    PREVIOUS_ITSELF,
    PREVIOUS_LATER,
    PREVIOUS_RANGE,
    PREVIOUS,
) = range(9)

# Where the numbers that outlive a window stand in ``state``.
USED_SLOT_COUNT, LAST_PHY_OFFSET, FOUND = range(3)

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_4 = np.uint64(4)
_SIGN = np.uint32(0x80000000)
# Entries whose slots are looked up ahead, so that the memory serves many of those loads at once (kernel._touch).
_BLOCK = np.uint64(128)


@numba.njit(inline="always")
def _signed(x):  # type: ignore[no-untyped-def]
    # A uint32 as the int32 that it stands for.
    return np.int64(x) - (np.int64(1) << np.int64(32) if x & _SIGN else np.int64(0))


@numba.njit(nogil=True, error_model="numpy")
def _note(code, number, value, wanted, state, counts, found):  # type: ignore[no-untyped-def]
    counts[np.uint64(code)] += np.int64(1)
    at = np.uint64(state[FOUND])
    if at < np.uint64(len(found)):
        found[at, _0] = np.int64(number)
        found[at, _1] = np.int64(code)
        found[at, _2] = value
        found[at, _3] = wanted
        state[FOUND] += np.int64(1)


@numba.njit(nogil=True, error_model="numpy")
def _judge_phy(phy, number, begin_phy, end_phy, state, counts, found):  # type: ignore[no-untyped-def]
    if phy < np.int64(0):
        _note(PHY_NEGATIVE, number, phy, state[LAST_PHY_OFFSET], state, counts, found)
    elif phy < begin_phy or phy > end_phy:
        _note(PHY_OUTSIDE, number, phy, state[LAST_PHY_OFFSET], state, counts, found)
    else:
        if phy < state[LAST_PHY_OFFSET]:
            _note(PHY_ORDER, number, phy, state[LAST_PHY_OFFSET], state, counts, found)
        state[LAST_PHY_OFFSET] = phy


@numba.njit(nogil=True, error_model="numpy")
def _judge_previous(previous, old, number, index_num, state, counts, found):  # type: ignore[no-untyped-def]
    if previous < np.int64(0) or previous >= np.int64(index_num):
        code = PREVIOUS_RANGE
    elif previous == np.int64(number):
        code = PREVIOUS_ITSELF
    elif previous > np.int64(number):
        code = PREVIOUS_LATER
    else:
        code = PREVIOUS
    _note(code, number, previous, old, state, counts, found)


@numba.njit(nogil=True, error_model="numpy", forceinline=True)
def _touch(entries, start, end, slots, block):  # type: ignore[no-untyped-def]
    # The slots of the next entries and a look at each; what is seen is stored, or it would not be read.
    hash_slot_num = np.uint32(len(slots))
    seen = np.uint32(0)
    i = start
    while i < end:
        slot = swap(entries[i, _0]) % hash_slot_num
        block[i - start] = slot
        seen |= slots[np.uint64(slot)]
        i += _1
    block[_BLOCK] = seen


@numba.njit(nogil=True, cache=True, error_model="numpy")
def check_entries(entries, number, slots, counts_every_put, index_num, begin_phy, end_phy, state, counts, found):  # type: ignore[no-untyped-def]
    """Hold the ``entries`` window, whose first entry has ``number``, against ``slots``, which it moves on.

    ``begin_phy`` and ``end_phy`` are the header's; ``state`` holds what goes on into the next window: used slot count,
    phy offset of the last sane entry (at first ``begin_phy``), rows of ``found`` that are taken. ``counts`` has a place
    for every code; a row of ``found`` is (entry number, code, what stands there, what should).
    """
    number = np.uint64(number)
    rows = np.uint64(len(entries))
    block = np.empty(_BLOCK + _1, dtype=np.uint32)
    block_start = block_end = _0
    last_phy, used = state[LAST_PHY_OFFSET], np.int64(0)
    i = _0
    while i < rows:
        if i >= block_end:
            block_start = i
            block_end = min(i + _BLOCK, rows)
            _touch(entries, block_start, block_end, slots, block)
        key_hash = swap(entries[i, _0])
        high = swap(entries[i, _1])
        time_diff = swap(entries[i, _3])
        phy = np.int64(np.uint64(high) << np.uint64(32) | np.uint64(swap(entries[i, _2])))
        if phy < last_phy or phy > end_phy:
            state[LAST_PHY_OFFSET] = last_phy
            _judge_phy(phy, number, begin_phy, end_phy, state, counts, found)
            last_phy = state[LAST_PHY_OFFSET]
        else:
            last_phy = phy
        if time_diff & _SIGN:
            _note(TIME_NEGATIVE, number, _signed(time_diff), np.int64(0), state, counts, found)
        if key_hash & _SIGN:
            # It belongs to no slot, so nothing is known about its previous entry.
            _note(HASH_NEGATIVE, number, _signed(key_hash), np.int64(0), state, counts, found)
        else:
            slot = np.uint64(block[i - block_start])
            old = slots[slot]
            if entries[i, _4] != old:
                previous = _signed(swap(entries[i, _4]))
                _judge_previous(previous, np.int64(swap(old)), number, index_num, state, counts, found)
            if old == np.uint32(0) or counts_every_put:
                used += np.int64(1)
            slots[slot] = swap(np.uint32(number))
        number += _1
        i += _1
    state[LAST_PHY_OFFSET] = last_phy
    state[USED_SLOT_COUNT] += used
