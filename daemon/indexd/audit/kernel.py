"""Chains of an index file walked as the broker walks them, compiled."""

from __future__ import annotations

import numba
import numpy as np

_SIGN = np.uint32(0x80000000)


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
