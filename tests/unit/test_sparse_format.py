"""Names, marks and files of the sparse indexes, beyond what Kafka's own cases say."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.errors import CorruptDataError
from indexd.sparse.format import (
    ActiveMark,
    SegmentMark,
    SparseMark,
    base_of_name,
    index_name,
    own_base,
    search,
    signed_64,
    time_index_name,
)
from indexd.sparse.sparse_index import OffsetIndex
from indexd.storage.disk import Disk

INT64S = st.integers(0, 2**63 - 1)

# --- names ---


def test_bases_of_names() -> None:
    assert base_of_name("00000000000000032450.index.deleted") == 32450
    assert base_of_name("-5.timeindex") == -5
    assert base_of_name("7") == 7
    for name in ("", ".index", "x.index", "9223372036854775808.index", "1_0.index", " 1.index"):
        with pytest.raises(ValueError, match="number"):
            base_of_name(name)


def test_our_own_names() -> None:
    assert own_base(index_name(5)) == own_base(time_index_name(5)) == 5
    for name in (
        "5.index",
        index_name(5) + ".deleted",
        "x" + index_name(5),
        f"{5:020d}",
        f"{5:020d}.log",
        "٣" * 20 + ".index",
    ):
        assert own_base(name) is None
    assert own_base(f"{2**63:020d}.index") is None


@given(st.integers(-(2**65), 2**65))
def test_numbers_wrap_as_javas(number: int) -> None:
    assert -(2**63) <= signed_64(number) < 2**63
    assert (signed_64(number) - number) % 2**64 == 0


# --- marks ---

COUNTS = st.integers(0, 2**31 - 1)
SEGMENTS = st.lists(st.builds(SegmentMark, INT64S, COUNTS, COUNTS, COUNTS), max_size=4, unique_by=lambda s: s.base)
ACTIVE = st.builds(ActiveMark, *[st.integers(-(2**63) + 1, 2**63 - 1)] * 4)


@given(INT64S, INT64S, SEGMENTS, st.one_of(st.none(), ACTIVE))
def test_a_mark_to_json_and_back(
    interval: int, phy_offset: int, segments: list[SegmentMark], active: ActiveMark | None
) -> None:
    mark = SparseMark(interval, phy_offset, tuple(sorted(segments)), active if segments else None)
    assert SparseMark.from_json(mark.to_json()) == mark
    assert len(mark.sealed) == len(segments) - (mark.active is not None)


GOOD: dict[str, Any] = {
    "interval": 1,
    "phyOffset": 9,
    "segments": [[0, 1, 2, 3], [8, 1, 0, 0]],
    "active": [1, -1, 0, -1],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": -1},
        {"interval": "1"},
        {"interval": True},
        {"interval": 1.5},
        {"phyOffset": -1},
        {"phyOffset": 1 << 64},
        {"phyOffset": None},
        {"segments": [[0, 1, 2]]},
        {"segments": [[0, 1, 2, -3]]},
        {"segments": [[8, 1, 2, 3], [0, 1, 2, 3]]},
        {"segments": [[8, 1, 2, 3], [8, 1, 2, 3]]},
        {"segments": [5]},
        {"segments": None},
        {"segments": []},
        {"active": [1, 2, 3]},
        {"active": "abcd"},
        {"active": 5},
    ],
)
def test_a_mark_that_nobody_wrote(wrong: dict[str, Any]) -> None:
    SparseMark.from_json(GOOD)
    with pytest.raises((ValueError, TypeError, KeyError)):
        SparseMark.from_json(GOOD | wrong)
    for key in GOOD:
        with pytest.raises(KeyError):
            SparseMark.from_json({name: value for name, value in GOOD.items() if name != key})
    for row in (None, 5, [], "x"):
        with pytest.raises((ValueError, TypeError, KeyError)):
            SparseMark.from_json(row)


# --- searching ---


@given(
    st.lists(st.integers(-50, 50), max_size=40, unique=True), st.integers(-60, 60), st.sampled_from([8, 12, 2048, 4096])
)
def test_a_search_on_keys_in_order_is_any_search(keys: list[int], target: int, entry_size: int) -> None:
    keys.sort()
    below = [slot for slot, key in enumerate(keys) if key <= target]
    above = [slot for slot, key in enumerate(keys) if key >= target]
    largest, smallest = search(keys.__getitem__, len(keys), entry_size, target)
    assert largest == (below[-1] if below else -1)
    # Kafka's steps may end beside an exact match without having looked at it.
    assert smallest in (above[:2] if target in keys else above[:1]) or smallest == -1
    assert smallest >= 0 or not above or target == keys[-1]


# --- files ---


def test_an_index_has_the_entries_that_it_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack(">6i", 1, 9, 2, 9, 3, 9))
    with Disk().open_read(path) as file:
        assert [OffsetIndex(file, 100).entry(slot) for slot in range(3)] == [(101, 9), (102, 9), (103, 9)]
        assert OffsetIndex(file, 100, 2).last_entry == (102, 9)
        with pytest.raises(CorruptDataError):
            OffsetIndex(file, 100, 4)


def test_reading_needs_no_numpy() -> None:
    code = "import sys, indexd.sparse.sparse_index; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
