"""How many entries each slot of an index file would have, without building the file; compiled.

Beside the counts, the entries of a sample of slots are kept whole, so that queries can be tried on them.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.kernel import decode_properties
from indexd.spark.stats.parts_kernel import OF_TOPIC, bucket_of, entry_fingerprints, fingerprint, frame_parts, mix

DONE, FILE_OVER, GROW, NO_FRAME = range(4)
#: Entries of a sampled slot in one file that are kept; a slot with more is kept as overlong, and not tried.
SLOT_ENTRIES_MAX = 2048
#: ``state``: entries so far in this file, longest chain, its slot and newest entry, first and last store time, kept.
STATE = ("entries", "longest", "slot", "phy_offset", "key_hash", "begin", "end", "kept", "overlong")
_ENTRIES, _LONGEST, _SLOT, _PHY, _HASH, _BEGIN, _END, _KEPT, _OVERLONG = (np.uint64(i) for i in range(9))
_0 = np.uint64(0)
_1 = np.uint64(1)


class Kept(NamedTuple):
    """The entries of sampled slots: number in the file (1 is the first), key hash, fingerprint, offset, store time."""

    number: NDArray[np.int32]
    key_hash: NDArray[np.uint32]
    prints: NDArray[np.uint64]
    phy_offset: NDArray[np.int64]
    store_timestamp: NDArray[np.int64]


@numba.njit(nogil=True, cache=True, forceinline=True)
def is_sampled(slot, mask):  # type: ignore[no-untyped-def]
    """Whether a slot (uint64) is in the sample: its mixed number ends in the zero bits that ``mask`` asks for."""
    return mix(slot + _1) & mask == _0


@numba.njit(nogil=True, forceinline=True)
def _row_prints(buffer, base, phy, size, want_uniq_key, want_tags, spans, prints):  # type: ignore[no-untyped-def]
    # (is a frame, how many): the fingerprints of a row's entries.
    pos = np.uint64(phy) - base
    is_frame, _, topic, topic_end, properties = frame_parts(buffer, pos, np.uint64(size), np.uint64(len(buffer)))
    if not is_frame:
        return False, _0
    decode_properties(buffer, properties, pos + np.uint64(size), spans)
    topic_print = fingerprint(buffer, topic, topic_end, OF_TOPIC)
    return True, entry_fingerprints(buffer, spans, topic_print, want_uniq_key, want_tags, prints)


@numba.njit(nogil=True, forceinline=True)
def _put(state, count, slot, key_hash, phy, timestamp):  # type: ignore[no-untyped-def]
    # One more entry of the file; ``count`` is the length of its chain now.
    if state[_ENTRIES] == np.int64(0):
        state[_BEGIN] = timestamp
    state[_END] = timestamp
    state[_ENTRIES] += np.int64(1)
    if count > state[_LONGEST]:
        state[_LONGEST] = count
        state[_SLOT] = np.int64(slot)
        state[_PHY] = phy
        state[_HASH] = np.int64(key_hash)


@numba.njit(nogil=True, forceinline=True)
def _is_full(kept, overlong, state):  # type: ignore[no-untyped-def]
    return state[_KEPT] >= np.int64(len(kept.number)) or state[_OVERLONG] >= np.int64(len(overlong))


@numba.njit(nogil=True, forceinline=True)
def _keep(kept, overlong, state, count, slot, key_hash, value, phy, timestamp):  # type: ignore[no-untyped-def]
    # An entry of a sampled slot, unless the slot has too many of them.
    if count <= np.int64(SLOT_ENTRIES_MAX):
        at = np.uint64(state[_KEPT])
        kept.number[at] = np.int32(state[_ENTRIES])
        kept.key_hash[at] = np.uint32(key_hash)
        kept.prints[at] = value
        kept.phy_offset[at] = phy
        kept.store_timestamp[at] = timestamp
        state[_KEPT] += np.int64(1)
    elif count == np.int64(SLOT_ENTRIES_MAX + 1):
        overlong[np.uint64(state[_OVERLONG])] = np.int64(slot)
        state[_OVERLONG] += np.int64(1)


@numba.njit(nogil=True, cache=True)
def count_chains(buffer, base, columns, row, rows, key, flavour, room, slots, mask, kept, overlong, state):  # type: ignore[no-untyped-def]
    """Count the entries from (``row``, ``key``) on, ``key`` being -1 at the start of a row, until ``room`` are counted.

    ``flavour`` is int64 (skip mask, unique keys are indexed, tags are); ``slots`` uint32 with a count each, ``mask``
    chooses the sample. Returns (status, row, key): FILE_OVER when ``room`` is used up, GROW when ``kept`` or
    ``overlong`` are full: call again with larger ones.
    """
    phy_offsets, sizes, store_timestamps = columns.phy_offset, columns.size, columns.store_timestamp
    sys_flags, key_starts, key_hashes = columns.sys_flag, columns.key_start, columns.key_hash
    hash_slot_num = np.uint64(len(slots))
    spans = np.zeros(12, dtype=np.uint64)
    prints = np.zeros(32767 // 2 + 8, dtype=np.uint64)
    left = np.int64(room)
    row = np.uint64(row)
    while row < np.uint64(rows):
        transaction = np.int64(sys_flags[row]) & np.int64(0xC)
        if (flavour[_0] >> transaction) & np.int64(1):
            row += _1
            continue
        first = key_starts[row]
        if key < np.int64(0):
            key = first
        has_prints = False
        while key < key_starts[row + _1]:
            if left == np.int64(0):
                return FILE_OVER, row, key
            key_hash = np.uint64(key_hashes[np.uint64(key)])
            slot = key_hash % hash_slot_num
            in_sample = is_sampled(slot, mask)
            if in_sample:
                if _is_full(kept, overlong, state):
                    return GROW, row, key
                if not has_prints:
                    has_prints, found = _row_prints(
                        buffer, base, phy_offsets[row], sizes[row], flavour[_1] != 0, flavour[np.uint64(2)] != 0,
                        spans, prints,
                    )  # fmt: skip
                    if not has_prints or np.int64(found) != key_starts[row + _1] - first:
                        return NO_FRAME, row, key
            phy, timestamp = phy_offsets[row], store_timestamps[row]
            count = slots[slot] + np.uint32(1)
            slots[slot] = count
            _put(state, np.int64(count), slot, key_hash, phy, timestamp)
            if in_sample:
                _keep(
                    kept,
                    overlong,
                    state,
                    np.int64(count),
                    slot,
                    key_hash,
                    prints[np.uint64(key - first)],
                    phy,
                    timestamp,
                )
            left -= np.int64(1)
            key += np.int64(1)
        key = np.int64(-1)
        row += _1
    return DONE, row, np.int64(-1)


@numba.njit(nogil=True, cache=True)
def chain_lengths(slots, counts):  # type: ignore[no-untyped-def]
    """Slots by bucket of length into ``counts[0]``, their entries into ``counts[1]``; the sum of squared lengths."""
    squares = np.float64(0)
    for number in range(len(slots)):
        length = np.uint64(slots[np.uint64(number)])
        bucket = bucket_of(length)
        counts[_0, bucket] += np.int64(1)
        counts[_1, bucket] += np.int64(length)
        squares += np.float64(length) * np.float64(length)
    return squares
