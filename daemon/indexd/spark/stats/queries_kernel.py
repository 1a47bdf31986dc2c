"""What RocketMQ would answer to queries for the keys of one slot, held against what the log says; compiled.

``queryOffset`` and ``selectPhyOffset`` of spec rocketmq-store 3.6, 3.7 and 4.5, on entries that are known to share a
slot and so are all that a walk along it meets.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

#: Of each kind of range: queries, wrong ones, and why; a wrong one may have several reasons, a repeat is none.
TALLY = ("asked", "wrong", "limit", "missed", "collision", "outside", "repeated")
_ASKED, _WRONG, _LIMIT, _MISSED, _COLLISION, _OUTSIDE, _REPEATED = (np.uint64(i) for i in range(7))
_0 = np.uint64(0)
_1 = np.uint64(1)
_TIME_MAX = np.int64((1 << 63) - 1)


class Entries(NamedTuple):
    """Sorted by slot, then by place in the index, oldest first. ``seen`` is the time that an index reads, ms.

    ``file`` counts in the order of the files; ``group`` says where each slot's entries begin, and one more.
    """

    file: NDArray[np.int64]
    key_hash: NDArray[np.uint32]
    prints: NDArray[np.uint64]
    phy_offset: NDArray[np.int64]
    store_timestamp: NDArray[np.int64]
    seen: NDArray[np.int64]
    group: NDArray[np.int64]


@numba.njit(nogil=True, cache=True, forceinline=True)
def _is_time_matched(first, last, begin, end):  # type: ignore[no-untyped-def]
    return (
        (begin < first and end > last)
        or (first <= begin and begin <= last)
        or (first <= end and end <= last)
    )  # fmt: skip


@numba.njit(nogil=True, cache=True)
def select(entries, start, stop, begins, ends, key_hash, begin, end, max_num, found):  # type: ignore[no-untyped-def]
    """The broker's answer: indexes of entries into ``found``, in its order; how many. ``begins``, ``ends``: headers."""
    count = np.int64(0)
    newest = stop
    file = np.int64(len(begins)) - np.int64(1)
    while file >= np.int64(0):
        first = newest
        while first > start and entries.file[np.uint64(first - 1)] == file:
            first -= np.int64(1)
        if _is_time_matched(begins[np.uint64(file)], ends[np.uint64(file)], begin, end):
            at = newest - np.int64(1)
            while at >= first and count < max_num:
                i = np.uint64(at)
                seen = entries.seen[i]
                if entries.key_hash[i] == key_hash and begin <= seen and seen <= end:
                    found[np.uint64(count)] = at
                    count += np.int64(1)
                if seen < begin:
                    break
                at -= np.int64(1)
        newest = first
        if begins[np.uint64(file)] < begin or count >= max_num:
            break
        file -= np.int64(1)
    return count


@numba.njit(nogil=True, cache=True)
def _judge(entries, start, stop, begins, ends, asked, begin, end, max_num, found, tally):  # type: ignore[no-untyped-def]
    # One query for the key of entry ``asked``.
    value, key_hash = entries.prints[np.uint64(asked)], entries.key_hash[np.uint64(asked)]
    right = np.int64(0)
    last = np.int64(-1)
    at = start
    while at < stop:
        i = np.uint64(at)
        timestamp = entries.store_timestamp[i]
        if entries.prints[i] == value and timestamp >= begin and timestamp <= end and entries.phy_offset[i] != last:
            right += np.int64(1)
            last = entries.phy_offset[i]
        at += np.int64(1)
    count = select(entries, start, stop, begins, ends, key_hash, begin, end, max_num, found)
    hits = np.int64(0)
    last = np.int64(-1)
    collides = is_outside = repeats = False
    for number in range(count):
        i = np.uint64(found[np.uint64(number)])
        timestamp = entries.store_timestamp[i]
        if entries.prints[i] != value:
            collides = True
        elif timestamp < begin or timestamp > end:
            is_outside = True
        elif entries.phy_offset[i] == last:
            repeats = True
        else:
            hits += np.int64(1)
            last = entries.phy_offset[i]
    tally[_ASKED] += np.int64(1)
    tally[_WRONG] += np.int64(hits < right or collides or is_outside)
    tally[_LIMIT] += np.int64(hits < right and count >= max_num)
    tally[_MISSED] += np.int64(hits < right and count < max_num)
    tally[_COLLISION] += np.int64(collides)
    tally[_OUTSIDE] += np.int64(is_outside)
    tally[_REPEATED] += np.int64(repeats)


@numba.njit(nogil=True, cache=True)
def judge(entries, begins, ends, spans, max_num, tallies):  # type: ignore[no-untyped-def]
    """Ask for every key of every slot, in every range of each of ``spans`` (int64 ms, 0: all of time) that it is in.

    ``tallies`` int64 (spans, len(TALLY)) is added to. A range is ``[k * span, k * span + span - 1]``.
    """
    found = np.zeros(max_num, dtype=np.int64)
    for number in range(len(entries.group) - 1):
        start, stop = entries.group[np.uint64(number)], entries.group[np.uint64(number) + _1]
        at = start
        while at < stop:
            i = np.uint64(at)
            for kind in range(len(spans)):
                span = spans[np.uint64(kind)]
                begin, end = np.int64(0), _TIME_MAX
                if span > np.int64(0):
                    begin = entries.store_timestamp[i] // span * span
                    end = begin + span - np.int64(1)
                # Each key and range once: by its first entry there.
                is_first = entries.store_timestamp[i] >= begin and entries.store_timestamp[i] <= end
                before = at - np.int64(1)
                while is_first and before >= start:
                    j = np.uint64(before)
                    timestamp = entries.store_timestamp[j]
                    if entries.prints[j] == entries.prints[i] and timestamp >= begin and timestamp <= end:
                        is_first = False
                    before -= np.int64(1)
                if is_first:
                    _judge(entries, start, stop, begins, ends, at, begin, end, max_num, found, tallies[np.uint64(kind)])
            at += np.int64(1)
