"""Log and entries side by side, message by message; and chains walked as the broker walks them. Compiled.

Entries are rows of five big-endian uint32 as in ``index.kernel``, in the order of their physical offsets; ``numbers``
are their entry numbers. What each key came to stands in ``taken``, one byte a key of the batch.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.index.kernel import swap, time_diff_at

#: What an entry can be besides right; the order is that of ``match.KINDS``.
WITHOUT_MESSAGE, WITHOUT_KEY, WRONG_HASH, TWICE, TIME_DIFFERENCE = range(5)
#: What a key can be in ``taken``: without an entry, findable, with an entry that no walk reaches.
MISSING, FINDABLE, UNREACHABLE = range(3)
#: Of each kind so many are put down one by one, the first in log order.
NOTED_MAX = 100
#: Columns of ``noted``: entry number, kind, what stands there, what should, physical offset of the entry.
NOTED_COLUMNS = 5

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_4 = np.uint64(4)
_SIGN = np.uint32(0x80000000)
_LOW = np.uint64(0xFFFFFFFF)


@numba.njit(inline="always")
def _phy_at(entries, at):  # type: ignore[no-untyped-def]
    return np.int64(np.uint64(swap(entries[at, _1])) << np.uint64(32) | np.uint64(swap(entries[at, _2])))


@numba.njit(nogil=True, error_model="numpy")
def _note(kind, number, value, wanted, phy, strays, counts, noted):  # type: ignore[no-untyped-def]
    if kind <= WRONG_HASH:
        strays[_0], strays[_1] = min(strays[_0], phy), max(strays[_1], phy)
        strays[_2] += np.int64(1)
    # The last of ``counts`` is how many rows of ``noted`` are taken.
    rows = np.uint64(len(counts)) - _1
    counts[np.uint64(kind)] += np.int64(1)
    if counts[np.uint64(kind)] <= np.int64(NOTED_MAX):
        at = np.uint64(counts[rows])
        noted[at, _0] = np.int64(number)
        noted[at, _1] = np.int64(kind)
        noted[at, _2] = np.int64(value)
        noted[at, _3] = np.int64(wanted)
        noted[at, _4] = phy
        counts[rows] += np.int64(1)


@numba.njit(nogil=True, error_model="numpy")
def _take(key_hashes, first, last, expected, key_hash, is_findable, taken):  # type: ignore[no-untyped-def]
    # (outcome, the key that is expected next): 0 taken, 1 once more, 2 of no key.
    if expected < last and key_hashes[expected] == key_hash and taken[expected] == np.uint8(MISSING):
        taken[expected] = np.uint8(FINDABLE) if is_findable else np.uint8(UNREACHABLE)
        return 0, expected + _1
    known = False
    key = first
    while key < last:
        if key_hashes[key] == key_hash:
            known = True
            if taken[key] == np.uint8(MISSING):
                taken[key] = np.uint8(FINDABLE) if is_findable else np.uint8(UNREACHABLE)
                return 0, max(expected, key + _1)
        key += _1
    if not known:
        return 2, expected
    key = first
    while is_findable and key < last:
        if key_hashes[key] == key_hash and taken[key] == np.uint8(UNREACHABLE):
            taken[key] = np.uint8(FINDABLE)
            break
        key += _1
    return 1, expected


@numba.njit(nogil=True, error_model="numpy", forceinline=True)
def _take_whole(key_hashes, first, last, phy, time_diff, entries, numbers, at, last_number, taken):  # type: ignore[no-untyped-def]
    """The rule: every key of a message has its entry, in order, and nothing else points there; how many, or 0.

    Those of a file's first and last entry are for the careful way, as is whatever is not of the rule.
    """
    count, high = last - first, swap(np.uint32(np.uint64(phy) >> np.uint64(32)))
    low, seconds = swap(np.uint32(np.uint64(phy) & _LOW)), swap(np.uint32(time_diff))
    if at + count >= np.uint64(len(entries)) or np.uint64(numbers[at]) == _1:
        return _0
    i = _0
    while i < count:
        entry, key = at + i, first + i
        if (
            entries[entry, _2] != low
            or entries[entry, _1] != high
            or swap(entries[entry, _0]) != np.uint32(key_hashes[key])
            or entries[entry, _3] != seconds
            or taken[key] != np.uint8(MISSING)
            or np.uint64(numbers[entry]) == last_number
        ):
            return _0
        i += _1
    if entries[at + count, _2] == low and entries[at + count, _1] == high:
        return _0
    while first < last:
        taken[first] = np.uint8(FINDABLE)
        first += _1
    return count


@numba.njit(nogil=True, error_model="numpy")
def _take_each(  # type: ignore[no-untyped-def]
    columns, row, first, last, expected, time_diff, entries, numbers, at, findable, header, taken, times,
    strays, counts, noted,
):  # fmt: skip
    # The entries of one message, one after the other.
    phy, timestamp, key_hashes = columns.phy_offset[row], columns.store_timestamp[row], columns.key_hash
    end, known, last_number = np.uint64(len(entries)), np.uint64(len(findable)), np.uint64(header[1])
    while at < end and _phy_at(entries, at) == phy:
        key_hash, number = swap(entries[at, _0]), np.uint64(numbers[at])
        is_findable = number >= known or findable[number] != np.uint8(0)
        outcome, expected = _take(key_hashes, first, last, expected, key_hash, is_findable, taken)
        if outcome == 1:
            _note(TWICE, number, np.int64(key_hash), np.int64(0), phy, strays, counts, noted)
        elif outcome == 2 and expected < last and taken[expected] == np.uint8(MISSING):
            wanted = np.int64(key_hashes[expected])
            _note(WRONG_HASH, number, np.int64(key_hash), wanted, phy, strays, counts, noted)
            expected += _1
        elif outcome == 2:
            _note(WITHOUT_KEY, number, np.int64(key_hash), np.int64(0), phy, strays, counts, noted)
        if number == _1:
            times[_0] = timestamp
        elif swap(entries[at, _3]) != time_diff:
            stored = np.int64(swap(entries[at, _3]))
            _note(TIME_DIFFERENCE, number, stored, np.int64(time_diff), phy, strays, counts, noted)
        if number == last_number:
            times[_1] = timestamp
        at += _1
    return at, expected


@numba.njit(nogil=True, cache=True, error_model="numpy")
def match_rows(  # type: ignore[no-untyped-def]
    columns, row, rows, skip_mask, entries, numbers, at, findable, header, taken, times, strays, counts, noted
):
    """Hold ``entries[at:]`` against the messages ``row`` .. ``rows - 1``; returns (row, at) where one of them ended.

    ``findable`` has a byte an entry number, 0 for entries that no walk reaches; numbers behind its end are reached.
    ``header``: begin timestamp, number of the last entry, and the message whose entries may go on in the next window
    (its offset, at first -1, and which of its keys is due); ``times`` gets the store timestamps of the messages of
    entry 1 and of that last entry. A time difference is judged against the begin timestamp, that of entry 1 never (spec
    rocketmq-store 3.4). ``strays``, the smallest and largest offset of entries of no key and their number, ``counts``
    and ``noted`` go on from call to call.
    """
    phy_offsets, timestamps, sys_flags = columns.phy_offset, columns.store_timestamp, columns.sys_flag
    key_starts, key_hashes = columns.key_start, columns.key_hash
    row, rows, at = np.uint64(row), np.uint64(rows), np.uint64(at)
    end, known, last_number = np.uint64(len(entries)), np.uint64(len(findable)), np.uint64(header[1])
    while row < rows and at < end:
        phy = phy_offsets[row]
        entry_phy = _phy_at(entries, at)
        if entry_phy > phy:
            row += _1
            continue
        if entry_phy < phy:
            key_hash, number = swap(entries[at, _0]), np.uint64(numbers[at])
            _note(WITHOUT_MESSAGE, number, np.int64(key_hash), np.int64(0), entry_phy, strays, counts, noted)
            at += _1
            continue
        timestamp = timestamps[row]
        first, last = np.uint64(key_starts[row]), np.uint64(key_starts[row + _1])
        if (skip_mask >> (np.int64(sys_flags[row]) & np.int64(0xC))) & np.int64(1) != np.int64(0):
            last = first
        time_diff = time_diff_at(timestamp, header[_0])
        if known == _0 and header[_2] != phy:
            whole = _take_whole(key_hashes, first, last, phy, time_diff, entries, numbers, at, last_number, taken)
            if whole != _0:
                header[_2], header[_3] = phy, np.int64(whole)
                at += whole
                row += _1
                continue
        expected = first
        if header[_2] == phy:
            expected = min(first + np.uint64(header[_3]), last)
        while expected < last and taken[expected] != np.uint8(MISSING):
            expected += _1
        at, expected = _take_each(
            columns, row, first, last, expected, time_diff, entries, numbers, at, findable, header, taken, times,
            strays, counts, noted,
        )  # fmt: skip
        header[_2], header[_3] = phy, np.int64(expected - first)
        if at < end:
            row += _1
    return row, at


@numba.njit(nogil=True, error_model="numpy")
def _is_elsewhere(key_hashes, key_starts, row, key, taken):  # type: ignore[no-untyped-def]
    # The message has this key twice, and one entry is enough to find it.
    other, last = np.uint64(key_starts[row]), np.uint64(key_starts[row + _1])
    while other < last:
        if key_hashes[other] == key_hashes[key] and taken[other] == np.uint8(FINDABLE):
            return True
        other += _1
    return False


@numba.njit(nogil=True, cache=True, error_model="numpy")
def count_missing(columns, row, rows, skip_mask, taken, missing, totals):  # type: ignore[no-untyped-def]
    """What the messages ``row`` .. ``rows - 1`` came to: keys of each that no query finds into ``missing``.

    -1 there: the message has no keys that are indexed. ``totals`` grows by messages, messages with keys, keys, keys
    that are not findable, and those of them that have an entry.
    """
    key_starts, key_hashes, sys_flags = columns.key_start, columns.key_hash, columns.sys_flag
    row, rows = np.uint64(row), np.uint64(rows)
    while row < rows:
        key, last = np.uint64(key_starts[row]), np.uint64(key_starts[row + _1])
        totals[_0] += np.int64(1)
        if key == last or (skip_mask >> (np.int64(sys_flags[row]) & np.int64(0xC))) & np.int64(1) != np.int64(0):
            missing[row] = np.int32(-1)
        else:
            totals[_1] += np.int64(1)
            totals[_2] += np.int64(last - key)
            lost = np.int32(0)
            while key < last:
                if taken[key] != np.uint8(FINDABLE) and not _is_elsewhere(key_hashes, key_starts, row, key, taken):
                    lost += np.int32(1)
                    if taken[key] == np.uint8(UNREACHABLE):
                        totals[_4] += np.int64(1)
                key += _1
            missing[row] = lost
            totals[_3] += np.int64(lost)
        row += _1


@numba.njit(nogil=True, cache=True, error_model="numpy")
def walk_chains(chosen, slots, key_hashes, previous, time_diffs, stamps, findable):  # type: ignore[no-untyped-def]
    """Walk the chains of the ``chosen`` slots (uint32) as selectPhyOffset does, marking what it meets in ``findable``.

    The columns of the entries have a row an entry number, row 0 unused: ``key_hashes`` uint32, ``previous`` and
    ``time_diffs`` int32; ``slots`` int32. An entry of another slot is passed through and not marked. ``stamps``
    (uint32, zeros, a row an entry) ends a walk that meets itself. Numbers outside the columns end it, as does a
    negative time difference (spec rocketmq-store 3.7).
    """
    hash_slot_num, count = np.uint32(len(slots)), np.int64(len(key_hashes))
    walk = _0
    while walk < np.uint64(len(chosen)):
        slot = chosen[walk]
        walk += _1
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
