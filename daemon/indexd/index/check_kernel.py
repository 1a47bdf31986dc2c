"""Holds the entries of an index file against one another: what recovery trusts, and what ``indexd verify`` asks.

It writes down what is wrong and goes on as if the entry were right, so that one wrong entry does not make wrong ones of
all that follow; compiled. Entries and slots are uint32 arrays of big-endian numbers, as in ``kernel``.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog.bytes_kernel import signed_32, swap
from indexd.index.kernel import BLOCK, touch

CODES = 9
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
) = range(CODES)

# Where the numbers that outlive a window stand in ``state``.
USED_SLOT_COUNT, LAST_PHY_OFFSET, FOUND = range(3)

_0, _1, _2, _3, _4 = (np.uint64(number) for number in range(5))
_SIGN = np.uint32(0x80000000)


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
def _phy_code(phy, begin_phy, end_phy):  # type: ignore[no-untyped-def]
    if phy < np.int64(0):
        return PHY_NEGATIVE
    return PHY_OUTSIDE if phy < begin_phy or phy > end_phy else PHY_ORDER


@numba.njit(nogil=True, error_model="numpy")
def _previous_code(previous, number, index_num):  # type: ignore[no-untyped-def]
    if previous < np.int64(0) or previous >= np.int64(index_num):
        return PREVIOUS_RANGE
    if previous == np.int64(number):
        return PREVIOUS_ITSELF
    return PREVIOUS_LATER if previous > np.int64(number) else PREVIOUS


@numba.njit(nogil=True, cache=True, error_model="numpy")
def check_entries(entries, number, slots, counts_every_put, index_num, begin_phy, end_phy, state, counts, found):  # type: ignore[no-untyped-def]
    """Hold the ``entries`` window, whose first entry has ``number``, against ``slots``, which it moves on.

    ``begin_phy`` and ``end_phy`` are the header's; ``state`` holds what goes on into the next window: used slot count,
    phy offset of the last sane entry (at first ``begin_phy``), rows of ``found`` that are taken. ``counts`` has a place
    for every code; a row of ``found`` is (entry number, code, what stands there, what should).
    """
    number = np.uint64(number)
    rows, hash_slot_num = np.uint64(len(entries)), np.uint32(len(slots))
    block, hashes = np.empty(BLOCK + 1, dtype=np.uint32), np.empty(BLOCK, dtype=np.uint32)
    block_start = block_end = _0
    last_phy, used = state[LAST_PHY_OFFSET], np.int64(0)
    for i in range(rows):
        if i >= block_end:
            block_start = np.uint64(i)
            block_end = min(i + np.uint64(BLOCK), rows)
            for at in range(np.uint64(block_end - block_start)):
                hashes[at] = swap(entries[block_start + np.uint64(at), _0])
            touch(hashes, _0, block_end - block_start, slots, hash_slot_num, block)
        key_hash = hashes[i - block_start]
        time_diff = swap(entries[i, _3])
        phy = np.int64(np.uint64(swap(entries[i, _1])) << np.uint64(32) | np.uint64(swap(entries[i, _2])))
        if phy < last_phy or phy > end_phy:
            code = _phy_code(phy, begin_phy, end_phy)
            _note(code, number, phy, last_phy, state, counts, found)
            if code == PHY_ORDER:
                last_phy = phy
        else:
            last_phy = phy
        if time_diff & _SIGN:
            _note(TIME_NEGATIVE, number, signed_32(np.uint64(time_diff)), np.int64(0), state, counts, found)
        if key_hash & _SIGN:
            # It belongs to no slot, so nothing is known about its previous entry.
            _note(HASH_NEGATIVE, number, signed_32(np.uint64(key_hash)), np.int64(0), state, counts, found)
        else:
            slot = np.uint64(block[i - block_start])
            old = slots[slot]
            if entries[i, _4] != old:
                previous = signed_32(np.uint64(swap(entries[i, _4])))
                code = _previous_code(previous, number, index_num)
                _note(code, number, previous, np.int64(swap(old)), state, counts, found)
            if old == np.uint32(0) or counts_every_put:
                used += np.int64(1)
            slots[slot] = swap(np.uint32(number))
        number += _1
    state[LAST_PHY_OFFSET] = last_phy
    state[USED_SLOT_COUNT] += used


@numba.njit(nogil=True, cache=True, error_model="numpy")
def walk_chains(slots, key_hashes, previous, time_diffs, stamps, findable):  # type: ignore[no-untyped-def]
    """Walk the chain of each of the ``slots`` (int32) as selectPhyOffset does, marking what it meets in ``findable``.

    The columns of the entries have a row an entry number, row 0 unused: ``key_hashes`` uint32, ``previous`` and
    ``time_diffs`` int32. An entry of another slot is passed through and not marked. ``stamps`` (uint32, zeros, a row an
    entry) ends a walk that meets itself. Numbers outside the columns end it, as does a negative time difference (spec
    rocketmq-store 3.7).
    """
    hash_slot_num, count = np.uint32(len(slots)), np.int64(len(key_hashes))
    for slot in range(len(slots)):
        number, walk = np.int64(slots[np.uint64(slot)]), np.uint32(slot + 1)
        while np.int64(0) < number < count and stamps[np.uint64(number)] != walk:
            at = np.uint64(number)
            stamps[at] = walk
            if time_diffs[at] < np.int32(0):
                break
            key_hash = key_hashes[at]
            if key_hash & _SIGN == np.uint32(0) and np.uint32(key_hash % hash_slot_num) == np.uint32(slot):
                findable[at] = np.uint8(1)
            number = np.int64(previous[at])
