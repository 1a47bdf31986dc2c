"""Compiled: putMessagePositionInfo over whole batches, and units sorted by queue (spec rocketmq-store 5.2).

Units are held as the bytes of the file: rows of five uint32 of big-endian numbers (phy offset high and low, size, tags
code high and low), so that writing needs no conversion. A queue is a slot: a number from 0 in order of appearance,
found by its key (store-wide topic number, queue id) in an open hash table. Every index is uint64.
"""

from __future__ import annotations

import sys

import numba
import numpy as np

from indexd.consumequeue import format as unit

if sys.byteorder != "little":  # the swap below assumes it, and every machine that runs RocketMQ has it
    raise ImportError("indexd runs on little-endian machines only")

DONE = 0
NEW_QUEUE = 1
BUFFER_FULL = 2

#: Columns of a queue's state: its next unit, where its newest message ends in the log, units that are not written; the
#: physical offset of the first message that has no unit, or stands at another one than its queue offset, -1 for none.
NEXT, MAX_PHY_OFFSET, PENDING, MOVED_FROM = range(4)
#: Places of the counters: rows that came to a unit, and those that did not, by why.
UNITS, REPEATS, GAPS, BATCH_MESSAGES, NAMELESS, LEFT_OUT = range(6)

_0 = np.uint64(0)
_1 = np.uint64(1)
_LOW_32 = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_NEXT, _MAX_PHY_OFFSET = np.uint64(NEXT), np.uint64(MAX_PHY_OFFSET)
_PENDING, _MOVED_FROM = np.uint64(PENDING), np.uint64(MOVED_FROM)
_INNER_BATCH = np.int32(unit.FLAG_INNER_BATCH)
_TRANSACTION = np.int32(0xC)
_PREPARED = np.int32(0x4)
_ROLLBACK = np.int32(0xC)
_ENTERS = np.int64(-1)
_NO_MESSAGE = np.int64(-2)


@numba.njit(inline="always")
def _swap(x):  # type: ignore[no-untyped-def]
    # Compiled, a shifted uint32 is a uint64 with more bits than it should have: cut it back.
    return np.uint32(
        (x >> np.uint32(24))
        | ((x >> np.uint32(8)) & np.uint32(0xFF00))
        | ((x << np.uint32(8)) & np.uint32(0xFF0000))
        | (x << np.uint32(24))
    )


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
    slot = np.uint64(first)
    while slot < np.uint64(count):
        at = _find(keys[slot], table_keys, table_slots)
        table_keys[at] = keys[slot]
        slot += _1
        table_slots[at] = np.int32(slot)


@numba.njit(inline="always")
def _write_unit(units, at, phy, size, tags_code):  # type: ignore[no-untyped-def]
    units[at, _0] = _swap(np.uint32(np.uint64(phy) >> _32))
    units[at, _1] = _swap(np.uint32(np.uint64(phy) & _LOW_32))
    units[at, np.uint64(2)] = _swap(np.uint32(np.uint64(size) & _LOW_32))
    units[at, np.uint64(3)] = _swap(np.uint32(np.uint64(tags_code) >> _32))
    units[at, np.uint64(4)] = _swap(np.uint32(np.uint64(tags_code) & _LOW_32))


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
    columns, rows, row, numbers, table_keys, table_slots, is_closed, state, units, slots, used, touched, counters
):
    """Take rows of a batch from ``row`` on until they end (DONE), a queue is new, or ``units`` is full.

    ``numbers``: the store-wide number of each topic id, -1 for a name that no folder can have; a ``is_closed`` store
    takes no new queue. ``units`` (n, 5) and ``slots`` (n) hold ``used[0]`` units that are not written yet, ``touched``
    the ``used[1]`` queues that they belong to, in order of their first one; ``state`` is (queues, 4). Returns
    (status, row): the first row that was not taken.
    """
    phy_offsets, sizes, queue_offsets, queue_ids = (
        columns.phy_offset, columns.size, columns.queue_offset, columns.queue_id
    )  # fmt: skip
    topic_ids, tags_codes, sys_flags = columns.topic_id, columns.tags_code, columns.sys_flag
    row = np.uint64(row)
    at, queues, room = np.uint64(used[0]), np.uint64(used[1]), np.uint64(len(units))
    status = DONE
    while row < np.uint64(rows):
        number = numbers[np.uint64(topic_ids[row])]
        why = _why_none(sys_flags[row], number)
        if why != _ENTERS:
            if why != _NO_MESSAGE:
                counters[np.uint64(why)] += 1
            row += _1
            continue
        key = np.uint64(number) << _32 | (np.uint64(queue_ids[row]) & _LOW_32)
        slot = table_slots[_find(key, table_keys, table_slots)]
        if slot == np.int32(0):
            if not is_closed:
                status = NEW_QUEUE
                break
            counters[LEFT_OUT] += 1
            row += _1
            continue
        if at >= room:
            status = BUFFER_FULL
            break
        queue = np.uint64(slot) - _1
        phy, queue_offset, cur = phy_offsets[row], queue_offsets[row], state[queue, _NEXT]
        end = phy + np.int64(sizes[row])
        if _is_repeat(state, queue, phy, end, queue_offset, counters):
            counters[REPEATS] += 1
            row += _1
            continue
        _write_unit(units, at, phy, sizes[row], tags_codes[row])
        slots[at] = slot - np.int32(1)
        at += _1
        if state[queue, _PENDING] == np.int64(0):
            touched[queues] = slot - np.int32(1)
            queues += _1
        state[queue, _NEXT] = cur + np.int64(1)
        state[queue, _MAX_PHY_OFFSET] = end
        state[queue, _PENDING] += np.int64(1)
        row += _1
    before, used[0], used[1] = used[0], np.int64(at), np.int64(queues)
    counters[UNITS] += used[0] - before
    return status, row


@numba.njit(nogil=True, cache=True)
def group_units(units, slots, used, touched, state, grouped, lengths):  # type: ignore[no-untyped-def]
    """Sort the ``used[0]`` units by queue into ``grouped``, each queue's in order, the queues as in ``touched``.

    ``lengths[i]`` becomes how many belong to queue ``touched[i]``; nothing is pending afterwards.
    """
    at = np.int64(0)
    i = _0
    while i < np.uint64(used[1]):
        queue = np.uint64(touched[i])
        lengths[i] = state[queue, _PENDING]
        state[queue, _PENDING] = at
        at += lengths[i]
        i += _1
    i = _0
    while i < np.uint64(used[0]):
        queue = np.uint64(slots[i])
        target = np.uint64(state[queue, _PENDING])
        state[queue, _PENDING] = np.int64(target) + np.int64(1)
        grouped[target, _0] = units[i, _0]
        grouped[target, _1] = units[i, _1]
        grouped[target, np.uint64(2)] = units[i, np.uint64(2)]
        grouped[target, np.uint64(3)] = units[i, np.uint64(3)]
        grouped[target, np.uint64(4)] = units[i, np.uint64(4)]
        i += _1
    i = _0
    while i < np.uint64(used[1]):
        state[np.uint64(touched[i]), _PENDING] = np.int64(0)
        i += _1
    used[0] = used[1] = np.int64(0)
