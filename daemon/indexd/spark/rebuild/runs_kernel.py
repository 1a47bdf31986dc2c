"""Rows sorted by queue bucket, and the first row of each queue; compiled.

A bucket is a number below BUCKETS that a queue's name and id hash into. Rows that enter no queue at any broker,
prepared and rolled back transactions, are in none.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.consumequeue import format as unit

#: How many buckets there are; a power of two.
BUCKETS = 128
#: The shift that leaves a 64-bit hash its bucket, and the factor that makes that hash.
BUCKET_SHIFT = 64 - 7
HASH_FACTOR = 0x9E3779B97F4A7C15

_0 = np.uint64(0)
_1 = np.uint64(1)
_32 = np.uint64(32)
_LOW_32 = np.uint64(0xFFFFFFFF)
_FACTOR = np.uint64(HASH_FACTOR)
_SHIFT = np.uint64(BUCKET_SHIFT)
_NONE = np.uint8(BUCKETS)
_TRANSACTION = np.int32(0xC)
_PREPARED = np.int32(0x4)
_ROLLBACK = np.int32(0xC)
_INNER_BATCH = np.int32(unit.FLAG_INNER_BATCH)
_OFFSET_MAX = np.int64(unit.OFFSET_MAX)


@numba.njit(nogil=True, cache=True)
def sort_rows(topic_ids, queue_ids, sys_flags, topic_hashes, buckets, starts, order):  # type: ignore[no-untyped-def]
    """``order``: the rows by bucket, those of one in log order; ``starts[b]``: where bucket b begins in it.

    ``topic_hashes`` by topic id; ``buckets`` is room for a uint8 a row; ``starts`` has BUCKETS + 1 places.
    """
    rows = np.uint64(len(topic_ids))
    starts[:] = np.uint32(0)
    row = _0
    while row < rows:
        transaction = sys_flags[row] & _TRANSACTION
        if transaction == _PREPARED or transaction == _ROLLBACK:
            buckets[row] = _NONE
        else:
            name = np.uint64(topic_hashes[np.uint64(topic_ids[row])])
            hashed = (name << _32 | (np.uint64(queue_ids[row]) & _LOW_32)) * _FACTOR
            bucket = hashed >> _SHIFT
            buckets[row] = np.uint8(bucket)
            starts[bucket + _1] += np.uint32(1)
        row += _1
    places = np.zeros(BUCKETS, dtype=np.uint32)
    bucket = _0
    while bucket < np.uint64(BUCKETS):
        places[bucket] = starts[bucket]
        starts[bucket + _1] += starts[bucket]
        bucket += _1
    row = _0
    while row < rows:
        bucket = np.uint64(buckets[row])
        if bucket < np.uint64(BUCKETS):
            order[np.uint64(places[bucket])] = np.uint32(row)
            places[bucket] += np.uint32(1)
        row += _1


@numba.njit(nogil=True, cache=True)
def first_rows(topic_ids, queue_ids, sys_flags, queue_offsets, row, table, known, found):  # type: ignore[no-untyped-def]
    """Look for queues that ``table`` does not know among the rows from ``row`` on; (next row, how many) were found.

    ``found`` holds the rows with which they begin. It stops when ``found`` is full, or more than half of ``table``, an
    open hash table of (topic id, queue id) + 1 with ``known[0]`` entries whose size is a power of two.
    """
    rows, mask = np.uint64(len(topic_ids)), np.uint64(len(table)) - _1
    row, count = np.uint64(row), _0
    while row < rows:
        flags = sys_flags[row]
        transaction = flags & _TRANSACTION
        begins = (
            transaction != _PREPARED
            and transaction != _ROLLBACK
            and flags & _INNER_BATCH == np.int32(0)
            and queue_offsets[row] >= np.int64(0)
            and queue_offsets[row] <= _OFFSET_MAX
        )
        if begins:
            key = (np.uint64(topic_ids[row]) << _32 | (np.uint64(queue_ids[row]) & _LOW_32)) + _1
            at = key * _FACTOR
            at = (at ^ (at >> _32)) & mask
            while table[at] != _0 and table[at] != key:
                at = (at + _1) & mask
            if table[at] == _0:
                if count == np.uint64(len(found)) or np.uint64(known[0]) * np.uint64(2) >= np.uint64(len(table)):
                    break
                table[at] = key
                known[0] += 1
                found[count] = np.uint32(row)
                count += _1
        row += _1
    return row, count
