"""The kernel that finds sampled messages on the way, against its plain twin."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexd.audit.samples.kernel import ROWS_MAX, find_sampled, sieve_of
from indexd.commitlog.batcher import make_columns

ROLLBACK_MASK = 1 << 0xC


@given(
    keyed=st.lists(st.tuples(st.sampled_from([0, 4, 8, 12]), st.lists(st.integers(0, 12), max_size=5)), max_size=30),
    wanted=st.sets(st.integers(0, 14), min_size=1),
    cut=st.integers(0, 30),
)
def test_the_kernel_is_its_plain_twin(keyed: list[tuple[int, list[int]]], wanted: set[int], cut: int) -> None:
    # Some share the low bits that the sieve looks at.
    hashes = [number if number % 2 else number << 14 for number in range(15)]
    columns = make_columns(max(len(keyed), 1), sum(len(keys) for _, keys in keyed))
    columns.key_start[0] = key = 0
    expected = []
    for row, (flag, keys) in enumerate(keyed):
        columns.phy_offset[row], columns.sys_flag[row] = 100 * row, flag
        columns.key_hash[key : key + len(keys)] = [hashes[number] for number in keys]
        key += len(keys)
        columns.key_start[row + 1] = key
        met = dict.fromkeys(number for number in keys if number in wanted)
        expected += [(hashes[number], row) for number in met if flag != 0xC]
    chosen = np.array(sorted(hashes[number] for number in wanted), dtype=np.uint32)
    counts, latest = np.zeros(len(chosen), np.int64), np.full(len(chosen), -1, np.int64)
    found, cut = np.empty((max(key, 1), 2), np.int64), min(cut, len(keyed))
    pairs: list[tuple[int, int]] = []
    for first, last in ((0, cut), (cut, len(keyed))):
        number = find_sampled(columns, first, last, ROLLBACK_MASK, chosen, sieve_of(chosen), counts, latest, found)
        pairs += [(int(chosen[at]), row) for at, row in found[: int(number)].tolist()]
    assert pairs == expected
    assert counts.sum() == len(expected)


def test_of_a_hash_there_is_an_end() -> None:
    columns = make_columns(ROWS_MAX + 10, ROWS_MAX + 10)
    columns.phy_offset[:] = np.arange(ROWS_MAX + 10)
    columns.sys_flag[:] = 0
    columns.key_start[:] = np.arange(ROWS_MAX + 11)
    columns.key_hash[:] = 5
    columns.key_hash[ROWS_MAX + 8] = 6
    chosen = np.array([5, 6], dtype=np.uint32)
    counts, latest = np.zeros(2, np.int64), np.full(2, -1, np.int64)
    found = np.empty((ROWS_MAX + 10, 2), np.int64)
    pairs = find_sampled(columns, 0, ROWS_MAX + 10, ROLLBACK_MASK, chosen, sieve_of(chosen), counts, latest, found)
    assert found[: int(pairs)].tolist() == [[0, row] for row in range(ROWS_MAX + 1)] + [[1, ROWS_MAX + 8]]
