"""putKey over whole batches, and the comparison of entries with messages; compiled.

Slots and entries are held as the bytes of the file: uint32 arrays of big-endian numbers, an entry being five of them
(key hash, phy offset high, phy offset low, time difference, previous entry), so that writing needs no conversion.
``state`` is the header, six int64 in the order of the file. Every index is uint64 (ARCHITECTURE.md, decision 1).
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog.bytes_kernel import swap

DONE, FILE_FULL, BUFFER_FULL = range(3)

BEGIN_TIMESTAMP, END_TIMESTAMP, BEGIN_PHY_OFFSET, END_PHY_OFFSET, USED_SLOT_COUNT, INDEX_COUNT = range(6)

# Slots of a page that is written as one: 4096 bytes.
SLOTS_PER_PAGE_SHIFT = 10

# Keys whose slots are looked up ahead of their puts.
BLOCK = 128
_PAGE_SHIFT = np.uint64(SLOTS_PER_PAGE_SHIFT)
_0, _1, _2, _3 = (np.uint64(number) for number in range(4))
_INT_MAX, _THOUSAND = np.int64(0x7FFFFFFF), np.int64(1000)


@numba.njit(inline="always")
def time_diff_at(store_timestamp, begin_timestamp):  # type: ignore[no-untyped-def]
    """Seconds since the header's CURRENT begin timestamp, clamped into int32 (spec 3.4, step 3)."""
    if begin_timestamp <= np.int64(0):
        return np.uint32(0)
    # Unsigned, because it wraps as Java's does; compiled, an overflow of signed numbers means anything.
    diff = np.int64(np.uint64(store_timestamp) - np.uint64(begin_timestamp))
    if diff <= np.int64(0):
        return np.uint32(0)
    diff //= _THOUSAND
    return np.uint32(min(diff, _INT_MAX))


@numba.njit(inline="always")
def _keep_counts(state, count, used_slots):  # type: ignore[no-untyped-def]
    state[4] += used_slots
    state[5] = np.int64(count)


@numba.njit(inline="always")
def _write_entry(entries, at, key_hash, phy, time_diff, swapped_old):  # type: ignore[no-untyped-def]
    entries[at, _0] = swap(key_hash)
    entries[at, _1] = swap(np.uint32(np.uint64(phy) >> np.uint64(32)))
    entries[at, np.uint64(2)] = swap(np.uint32(np.uint64(phy) & np.uint64(0xFFFFFFFF)))
    entries[at, np.uint64(3)] = swap(time_diff)
    entries[at, np.uint64(4)] = swapped_old


@numba.njit(nogil=True, error_model="numpy", forceinline=True)
def touch(key_hashes, start, end, slots, hash_slot_num, block):  # type: ignore[no-untyped-def]
    """The slots of the next keys, and a look at each.

    These loads do not depend on one another, so the memory serves many at once; the puts that follow find their slots
    in the cache. What is seen is stored, or it would not be read.
    """
    seen = np.uint32(0)
    for i in range(start, end):
        slot = key_hashes[i] % hash_slot_num
        block[i - start] = slot
        seen |= slots[np.uint64(slot)]
    block[np.uint64(BLOCK)] = seen


@numba.njit(nogil=True, cache=True, error_model="numpy")
def put_batch(columns, rows, row, key, skip_mask, counts_every_put, slots, pages, entries, index_num, state):  # type: ignore[no-untyped-def]
    """Index rows from (``row``, ``key``) on until they end, the file is full, or ``entries`` is.

    ``key`` is -1 at the start of a row, else the next key's position in ``columns.key_hash`` (a message that straddles
    two files). ``entries`` is a (n, 5) window that this call fills from its front; ``pages`` marks the 4096-byte pages
    of the slot area that changed. Returns (status, row, key, entries written).
    """
    # Taken out of the tuple once: a field of a tuple costs two reference counts at every access.
    phy_offsets, store_timestamps, sys_flags = columns.phy_offset, columns.store_timestamp, columns.sys_flag
    key_starts, key_hashes = columns.key_start, columns.key_hash
    row = np.uint64(row)
    hash_slot_num, room = np.uint32(len(slots)), np.uint64(len(entries))
    written, count, used_slots = _0, np.uint64(state[5]), np.int64(0)
    all_keys = np.uint64(key_starts[np.uint64(rows)])
    block = np.empty(BLOCK + 1, dtype=np.uint32)
    block_start = block_end = _0
    while row < np.uint64(rows):
        phy = phy_offsets[row]
        timestamp = store_timestamps[row]
        if key < np.int64(0):
            # RocketMQ makes sure of a file with room before it looks at the message at all (spec 4.2, step 1).
            if count >= np.uint64(index_num):
                _keep_counts(state, count, used_slots)
                return FILE_FULL, row, key, written
            # The skip rule, and the transaction types that the flavour leaves out (spec 4.2, steps 2 and 3).
            if phy < state[3] or skip_mask >> (np.int64(sys_flags[row]) & np.int64(0xC)) & np.int64(1) != np.int64(0):
                row += _1
                continue
            key = key_starts[row]
        at = np.uint64(key)
        last = np.uint64(key_starts[row + _1])
        while at < last:
            if count >= np.uint64(index_num) or written >= room:
                _keep_counts(state, count, used_slots)
                return (FILE_FULL if count >= np.uint64(index_num) else BUFFER_FULL), row, np.int64(at), written
            if at >= block_end:
                block_start = at
                block_end = min(at + np.uint64(BLOCK), all_keys)
                touch(key_hashes, block_start, block_end, slots, hash_slot_num, block)
            key_hash = key_hashes[at]
            slot = np.uint64(block[at - block_start])
            old = slots[slot]
            _write_entry(entries, written, key_hash, phy, time_diff_at(timestamp, state[0]), old)
            slots[slot] = swap(np.uint32(count))
            pages[slot >> _PAGE_SHIFT] = np.uint8(1)
            if count <= _1:
                # Behind the time difference: a rolled file's first entry counts from the previous file's end.
                state[2] = phy
                state[0] = timestamp
            if old == np.uint32(0) or counts_every_put:
                used_slots += np.int64(1)
            count += _1
            written += _1
            at += _1
            state[3] = phy
            state[1] = timestamp
        row += _1
        key = np.int64(-1)
    _keep_counts(state, count, used_slots)
    return DONE, row, np.int64(-1), written


@numba.njit(nogil=True, cache=True, error_model="numpy")
def count_right(phy_offsets, timestamps, rows, key_hashes, first, entries, numbers, begin, first_begin):  # type: ignore[no-untyped-def]
    """How many entries are those of the keys from ``first`` on, up to the first that is not as it must be.

    Of each key ``rows`` says which message has it. Time differences count from ``begin``; that of entry 1 from
    ``first_begin``, and is as it is if that is negative.
    """
    keys, row, due = rows[first:], np.int64(-1), np.uint32(0)
    hashes, count = key_hashes[first:], min(len(entries), len(keys))
    for i in range(np.uint64(count)):
        if keys[i] != row:
            row = keys[i]
            phy_offset = np.uint64(phy_offsets[np.uint64(row)])
            high, low = np.uint32(phy_offset >> np.uint64(32)), np.uint32(phy_offset & np.uint64(0xFFFFFFFF))
            due = time_diff_at(timestamps[np.uint64(row)], begin)
        time_diff = swap(entries[i, _3])
        is_due = time_diff == due
        if numbers[i] == np.int32(1):
            is_due = first_begin < np.int64(0) or time_diff == time_diff_at(timestamps[np.uint64(row)], first_begin)
        if (
            swap(entries[i, _0]) != hashes[i]
            or swap(entries[i, _1]) != high
            or swap(entries[i, _2]) != low
            or not is_due
        ):
            return np.int64(i)
    return np.int64(count)
