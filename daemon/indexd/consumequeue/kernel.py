"""Compiled: putMessagePositionInfo over whole batches, and units sorted by queue (spec rocketmq-store 5.2).

Units are held as the bytes of the file: rows of five uint32 of big-endian numbers (phy offset high and low, size, tags
code high and low), so that writing needs no conversion. A queue is a slot: a number from 0 in order of appearance,
found by its key (store-wide topic number, queue id) in an open hash table. Every index is uint64.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog.bytes_kernel import swap
from indexd.consumequeue import format as unit

DONE, NEW_QUEUE, BUFFER_FULL = range(3)

#: Columns of a queue's state: its next unit, where its newest message ends in the log, units that are not written; the
#: physical offset of the first message that has no unit, or stands at another one than its queue offset, -1 for none.
NEXT, MAX_PHY_OFFSET, PENDING, MOVED_FROM = range(4)
#: Places of the counters: rows that came to a unit, and those that did not, by why.
UNITS, REPEATS, GAPS, BATCH_MESSAGES, NAMELESS, LEFT_OUT = range(6)

_0, _1, _2, _3, _4, _32 = (np.uint64(number) for number in (0, 1, 2, 3, 4, 32))
_LOW_32 = np.uint64(0xFFFFFFFF)
_NEXT, _MAX_PHY_OFFSET, _PENDING, _MOVED_FROM = _0, _1, _2, _3
_INNER_BATCH = np.int32(unit.FLAG_INNER_BATCH)
_TRANSACTION, _PREPARED, _ROLLBACK = np.int32(0xC), np.int32(0x4), np.int32(0xC)
_ENTERS, _NO_MESSAGE = np.int64(-1), np.int64(-2)


@numba.njit(nogil=True, forceinline=True)
def _find(key, table_keys, table_slots):  # type: ignore[no-untyped-def]
    # The place of a key in the table, or the empty place where it belongs; there is always one.
    mask = np.uint64(len(table_slots)) - _1
    at = key * np.uint64(0x9E3779B97F4A7C15)
    at = (at ^ (at >> _32)) & mask
    while table_slots[at] != np.int32(0) and table_keys[at] != key:
        at = (at + _1) & mask
    return at


@numba.njit(nogil=True, cache=True)
def add_queues(keys, first, count, table_keys, table_slots):  # type: ignore[no-untyped-def]
    """Put the queues of slots ``[first, count)`` into the table, as slot + 1; it must keep empty places."""
    for slot in range(np.uint64(first), np.uint64(count)):
        at = _find(keys[slot], table_keys, table_slots)
        table_keys[at] = keys[slot]
        table_slots[at] = np.int32(slot) + np.int32(1)


@numba.njit(inline="always")
def _write_unit(units, at, phy, size, tags_code):  # type: ignore[no-untyped-def]
    units[at, _0] = swap(np.uint32(np.uint64(phy) >> _32))
    units[at, _1] = swap(np.uint32(np.uint64(phy) & _LOW_32))
    units[at, _2] = swap(np.uint32(np.uint64(size) & _LOW_32))
    units[at, _3] = swap(np.uint32(np.uint64(tags_code) >> _32))
    units[at, _4] = swap(np.uint32(np.uint64(tags_code) & _LOW_32))


@numba.njit(nogil=True, forceinline=True)
def _why_none(flags, number):  # type: ignore[no-untyped-def]
    # Whether a message enters a queue at all; the counter of those like it if not.
    transaction = flags & _TRANSACTION
    if transaction == _PREPARED or transaction == _ROLLBACK:
        return _NO_MESSAGE
    if flags & _INNER_BATCH:
        return np.int64(BATCH_MESSAGES)
    return np.int64(NAMELESS) if number < np.int32(0) else _ENTERS


@numba.njit(nogil=True, forceinline=True)
def _is_repeat(state, queue, phy, end, queue_offset, counters):  # type: ignore[no-untyped-def]
    # Rule 1, and the check of the queue offset, which RocketMQ does not make of offset 0. What moves is noted.
    if end <= state[queue, _MAX_PHY_OFFSET]:
        return True
    cur = state[queue, _NEXT]
    if queue_offset != cur and state[queue, _MOVED_FROM] < np.int64(0):
        state[queue, _MOVED_FROM] = phy
    if queue_offset > cur:
        counters[GAPS] += 1
    return queue_offset != np.int64(0) and queue_offset < cur


@numba.njit(nogil=True, cache=True)
def put_units(  # type: ignore[no-untyped-def]
    columns, rows, begin, numbers, table_keys, table_slots, is_closed, state, units, slots, used, touched, counters
):
    """Take rows of a batch from ``begin`` on until they end (DONE), a queue is new, or ``units`` is full.

    ``numbers``: the store-wide number of each topic id, -1 for a name that no folder can have; a ``is_closed`` store
    takes no new queue. ``units`` (n, 5) and ``slots`` (n) hold ``used[0]`` units that are not written yet, ``touched``
    the ``used[1]`` queues that they belong to, in order of their first one; ``state`` is (queues, 4). Returns
    (status, row): the first row that was not taken.
    """
    phy_offsets, sizes, queue_offsets, queue_ids = (
        columns.phy_offset, columns.size, columns.queue_offset, columns.queue_id
    )  # fmt: skip
    topic_ids, tags_codes, sys_flags = columns.topic_id, columns.tags_code, columns.sys_flag
    at, queues, room = np.uint64(used[0]), np.uint64(used[1]), np.uint64(len(units))
    status, stop = DONE, rows
    for row in range(np.uint64(begin), np.uint64(rows)):
        number = numbers[np.uint64(topic_ids[row])]
        why = _why_none(sys_flags[row], number)
        if why != _ENTERS:
            if why != _NO_MESSAGE:
                counters[np.uint64(why)] += 1
            continue
        key = np.uint64(number) << _32 | (np.uint64(queue_ids[row]) & _LOW_32)
        slot = table_slots[_find(key, table_keys, table_slots)]
        if slot == np.int32(0) and is_closed:
            counters[LEFT_OUT] += 1
            continue
        if slot == np.int32(0) or at >= room:
            status, stop = (NEW_QUEUE if slot == np.int32(0) else BUFFER_FULL), np.int64(row)
            break
        queue = np.uint64(slot) - _1
        phy, queue_offset = phy_offsets[row], queue_offsets[row]
        end = phy + np.int64(sizes[row])
        if _is_repeat(state, queue, phy, end, queue_offset, counters):
            counters[REPEATS] += 1
            continue
        _write_unit(units, at, phy, sizes[row], tags_codes[row])
        slots[at] = slot - np.int32(1)
        at += _1
        if state[queue, _PENDING] == np.int64(0):
            touched[queues] = slot - np.int32(1)
            queues += _1
        state[queue, _NEXT] += np.int64(1)
        state[queue, _MAX_PHY_OFFSET] = end
        state[queue, _PENDING] += np.int64(1)
    counters[UNITS] += np.int64(at) - used[0]
    used[0], used[1] = np.int64(at), np.int64(queues)
    return status, stop


@numba.njit(nogil=True, cache=True)
def group_units(units, slots, used, touched, state, grouped, lengths):  # type: ignore[no-untyped-def]
    """Sort the ``used[0]`` units by queue into ``grouped``, each queue's in order, the queues as in ``touched``.

    ``lengths[i]`` becomes how many belong to queue ``touched[i]``; nothing is pending afterwards.
    """
    at = np.int64(0)
    for i in range(np.uint64(used[1])):
        queue = np.uint64(touched[i])
        lengths[i] = state[queue, _PENDING]
        state[queue, _PENDING] = at
        at += lengths[i]
    for i in range(np.uint64(used[0])):
        queue = np.uint64(slots[i])
        target = np.uint64(state[queue, _PENDING])
        state[queue, _PENDING] += np.int64(1)
        for column in range(_0, np.uint64(5)):
            grouped[target, column] = units[i, column]
    for i in range(np.uint64(used[1])):
        state[np.uint64(touched[i]), _PENDING] = np.int64(0)
    used[0] = used[1] = np.int64(0)
