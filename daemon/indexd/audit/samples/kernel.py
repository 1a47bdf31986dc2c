"""Messages of a batch that have one of some key hashes, found on the way: compiled."""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

#: Messages a hash of which so many and one are written down in a stretch: enough to tell that there are more.
ROWS_MAX = 1024
# A byte for the low bits of a hash: few hashes of the log need the search behind it. Fits into the first cache.
_SIEVE_SIZE = 1 << 14

_MASK = np.uint32(_SIEVE_SIZE - 1)
_1 = np.uint64(1)


def sieve_of(hashes: NDArray[np.uint32]) -> NDArray[np.uint8]:
    """What ``find_sampled`` asks first: 1 where the low bits of one of the ``hashes`` point."""
    sieve = np.zeros(_SIEVE_SIZE, dtype=np.uint8)
    sieve[hashes & _MASK] = 1
    return sieve


@numba.njit(nogil=True, cache=True, error_model="numpy")
def find_sampled(columns, row, rows, skip_mask, hashes, sieve, counts, latest, found):  # type: ignore[no-untyped-def]
    """Messages ``row`` .. ``rows - 1`` with a key hash in ``hashes`` (uint32, ascending); returns how many pairs.

    A pair in ``found`` (int64, as many rows as the messages have keys) is the hash's place in ``hashes`` and the
    message's row. ``counts`` of a hash grows up to ROWS_MAX + 1 from call to call; a message that has it twice counts
    once: ``latest`` is the physical offset that each hash was met at, at first -1. Types in ``skip_mask`` are not met.
    """
    phy_offsets, sys_flags = columns.phy_offset, columns.sys_flag
    key_starts, key_hashes = columns.key_start, columns.key_hash
    row, rows, pairs = np.uint64(row), np.uint64(rows), np.uint64(0)
    key, end = np.uint64(key_starts[row]), np.uint64(key_starts[rows])
    size = np.uint64(len(hashes))
    while key < end:
        key_hash = key_hashes[key]
        if sieve[np.uint64(key_hash & _MASK)] != np.uint8(0):
            at, above = np.uint64(0), size
            while at < above:
                middle = (at + above) >> _1
                if hashes[middle] < key_hash:
                    at = middle + _1
                else:
                    above = middle
            if at < size and hashes[at] == key_hash and counts[at] <= np.int64(ROWS_MAX):
                while np.uint64(key_starts[row + _1]) <= key:
                    row += _1
                is_skipped = (skip_mask >> (np.int64(sys_flags[row]) & np.int64(0xC))) & np.int64(1) != np.int64(0)
                if not is_skipped and latest[at] != phy_offsets[row]:
                    latest[at] = phy_offsets[row]
                    counts[at] += np.int64(1)
                    found[pairs, np.uint64(0)] = np.int64(at)
                    found[pairs, _1] = np.int64(row)
                    pairs += _1
        key += _1
    return pairs
