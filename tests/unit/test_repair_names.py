"""Names of new index files: times, strictly between those that stay, and before those that a broker makes later."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.repair.ranges import Wanted, names_between

NOON = "20260101120000000"


def is_time(name: str) -> bool:
    try:
        datetime.datetime.strptime(name[:14], "%Y%m%d%H%M%S").replace(tzinfo=datetime.UTC)
    except ValueError:
        return False
    return len(name) == 17


names = st.one_of(
    st.integers(10**15, 10**17 - 1).map(lambda number: f"{number:017d}"),
    st.integers(631_152_000_000, 4_102_444_800_000).map(
        lambda ms: f"{datetime.datetime.fromtimestamp(ms // 1000, datetime.UTC):%Y%m%d%H%M%S}{ms % 1000:03d}"
    ),
)


@given(
    st.none() | names,
    st.none() | names,
    st.lists(st.integers(0, 5), max_size=4),
    st.lists(names, max_size=6, unique=True),
    st.sets(names, max_size=3),
    st.integers(-(2**63), 2**63 - 1),
)
def test_names_are_new_times_in_order_between_their_neighbours(
    low: str | None, high: str | None, counts: list[int], own: list[str], others: set[str], timestamp: int
) -> None:
    wanted = [Wanted(count, tuple(own[2 * number : 2 * number + 2])) for number, count in enumerate(counts)]
    taken = (others | {name for name in (low, high) if name}) - {name for one in wanted for name in one.own}
    found = names_between(low, high, wanted, taken, timestamp)
    if found is None:
        assert high is not None or timestamp > 0 or (low or "") > "9999"
        return
    assert [len(one) for one in found] == [one.count for one in wanted]
    flat = [name for one in found for name in one]
    assert flat == sorted(set(flat))
    assert all(map(is_time, flat))
    assert not taken & set(flat)
    assert all((low is None or low < name) and (high is None or name < high) for name in flat)


def test_the_names_of_files_that_go_are_taken_first() -> None:
    own = ("20260101000000000", "20260102000000000")
    assert names_between("20250101000000000", NOON[:4] + "0201000000000", [Wanted(2, own)], (), 0) == [own]
    assert names_between(None, None, [Wanted(1, own)], (), 0) == [own[:1]]
    # One that is missing comes behind them, as a broker would have named it.
    assert names_between(None, None, [Wanted(3, own)], (), 0) == [(*own, "20260102000000001")]


def test_a_later_range_lies_behind_what_an_earlier_one_keeps_if_it_is_not_built() -> None:
    found = names_between(None, None, [Wanted(1, ("20260101000000000", "20260105000000000")), Wanted(1)], (), 0)
    assert found == [("20260101000000000",), ("20260105000000001",)]


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        ("20260101000000000", "20260101000000003", 2, ("20260101000000001", "20260101000000002")),
        ("20260101000000000", "20260101000000002", 2, None),
        ("20260101000000000", "20260101000000001", 1, None),
        # Over the end of a second, a day, a leap year's February; and from names that are no times.
        ("20240228235959999", "20240229000000002", 2, ("20240229000000000", "20240229000000001")),
        ("20260101000060000", None, 1, ("20260101000100000",)),
        ("20260001000000000", None, 1, ("20260101000000000",)),
        ("20261399999999999", None, 1, ("20270101000000000",)),
        ("99991231235959999", None, 1, None),
        (None, "20260101000000000", 1, ("20251231235959998",)),
    ],
)
def test_between(low: str | None, high: str | None, count: int, expected: tuple[str, ...] | None) -> None:
    far = 4_000_000_000_000 if low is None else 0
    found = names_between(low, high, [Wanted(count)], (), far)
    assert found == (None if expected is None else [expected])


def test_there_is_room_before_own_names_where_there_is_none_behind() -> None:
    found = names_between("20260101000000000", "20260101000000009", [Wanted(2, ("20260101000000008",))], (), 0)
    assert found == [("20260101000000001", "20260101000000002")]


def test_without_neighbours_they_sort_before_what_a_broker_makes_in_any_time_zone() -> None:
    now = datetime.datetime(2026, 3, 1, 5, 0, tzinfo=datetime.UTC)
    found = names_between(None, None, [Wanted(2)], (), int(now.timestamp() * 1000))
    assert found == [("20260228170000000", "20260228170000001")]
    earliest = now.astimezone(datetime.timezone(datetime.timedelta(hours=-12)))
    assert found[0][0] <= f"{earliest:%Y%m%d%H%M%S}000"


def test_digits_of_another_script() -> None:
    arabic = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
    low, high = "20260101000000000".translate(arabic), "20260101000000005".translate(arabic)
    assert names_between(low, high, [Wanted(1)], (), 0) == [("20260101000000001".translate(arabic),)]
    # A broker sorts by code point, so all of those come behind ASCII ones.
    assert names_between("20260101000000000", low, [Wanted(1)], (), 0) == [("20260101000000001",)]


def test_a_range_never_takes_a_name_that_an_older_one_still_has() -> None:
    low, own, high = f"{NOON[:-1]}3", f"{NOON[:-1]}6", f"{NOON[:-1]}8"
    wanted = [Wanted(1, (own,)), Wanted(2)]
    assert names_between(low, high, wanted, (), 0) == [(f"{NOON[:-1]}4",), (f"{NOON[:-1]}5", f"{NOON[:-1]}7")]
