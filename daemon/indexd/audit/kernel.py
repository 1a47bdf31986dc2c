"""Chains of an index file walked as the broker walks them, compiled."""

from __future__ import annotations

import numba
import numpy as np

_SIGN = np.uint32(0x80000000)
_LOW = np.uint64(0xFFFFFFFF)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def walk_chains(chosen, slots, key_hashes, previous, time_diffs, stamps, findable):  # type: ignore[no-untyped-def]
    """Walk the chains of the ``chosen`` slots (uint32) as selectPhyOffset does, marking what it meets in ``findable``.

    The columns of the entries have a row an entry number, row 0 unused: ``key_hashes`` uint32, ``previous`` and
    ``time_diffs`` int32; ``slots`` int32. An entry of another slot is passed through and not marked. ``stamps``
    (uint32, zeros, a row an entry) ends a walk that meets itself. Numbers outside the columns end it, as does a
    negative time difference (spec rocketmq-store 3.7).
    """
    hash_slot_num, count = np.uint32(len(slots)), np.int64(len(key_hashes))
    walk = np.uint64(0)
    while walk < np.uint64(len(chosen)):
        slot = chosen[walk]
        walk += np.uint64(1)
        number = np.int64(slots[np.uint64(slot)])
        while np.int64(0) < number < count and np.uint64(stamps[np.uint64(number)]) != walk:
            at = np.uint64(number)
            stamps[at] = np.uint32(walk & _LOW)
            if time_diffs[at] < np.int32(0):
                break
            key_hash = key_hashes[at]
            if key_hash & _SIGN == np.uint32(0) and np.uint32(key_hash % hash_slot_num) == slot:
                findable[at] = np.uint8(1)
            number = np.int64(previous[at])
