"""Where things lie on the drawing of a log: offsets, holes that lie close together, times on its axis, files."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.audit.holes import Hole
from indexd.audit.page.bands import lanes_of
from indexd.audit.page.scale import Scale, apart, time_ticks
from indexd.audit.page.strip import marks_of, scale_of
from support.audit_reports import NOON, Made

OFFSETS = st.integers(0, 1 << 50)


@given(begin=OFFSETS, size=OFFSETS, before=OFFSETS, behind=OFFSETS, offsets=st.lists(OFFSETS, max_size=20))
def test_places_rise_with_offsets_and_stay_inside(
    begin: int, size: int, before: int, behind: int, offsets: list[int]
) -> None:
    scale = Scale(begin, begin + size + 1, max(begin - before, 0), begin + size + 1 + behind)
    places = [scale.at(offset) for offset in sorted(offsets)]
    assert all(0 <= place <= 100 for place in places)
    assert all(one <= other + 1e-9 for one, other in pairwise(places))


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5), st.integers(1, 1000)), max_size=200))
def test_every_hole_is_in_one_mark_and_marks_stand_apart(found: list[tuple[int, int, int]]) -> None:
    holes, at = [], 0
    for before, size, keys in found:
        holes.append(Hole(at + before, at + before, 0, 0, 1, keys, at + before + size))
        at += before + size
    marks = marks_of(holes, Scale(0, at + 1, 0, at + 1))
    assert [number for mark in marks for number in mark.holes] == list(range(len(holes)))
    assert all(mark.number in mark.holes and mark.first < mark.behind <= 100.2 for mark in marks)
    assert all(one.behind <= other.first + 1e-9 for one, other in pairwise(marks))
    assert all(0 < mark.share <= 1 for mark in marks)
    for mark in marks:
        assert holes[mark.number].keys == max(holes[number].keys for number in mark.holes)


@given(
    known=st.lists(st.tuples(st.integers(0, 10**6), st.integers(-(2**63), 2**63)), max_size=30),
    begin=st.integers(0, 10**6),
)
def test_the_axis_survives_any_clock(known: list[tuple[int, int]], begin: int) -> None:
    ticks = time_ticks(Scale(begin, 10**6 + 1, begin, 10**6 + 1), known)
    assert len(ticks) < 15
    assert all(0 <= tick.at <= 100 for tick in ticks)
    assert all(one.at <= other.at for one, other in pairwise(ticks))


@pytest.mark.parametrize("span", [7, 900, 55_000, 3_600_000, 86_400_000, 30 * 86_400_000, 6 * 365 * 86_400_000])
def test_times_on_the_axis_are_round_and_true(span: int) -> None:
    ticks = time_ticks(Scale(0, 1000, 0, 1000), [(0, NOON + 1), (1000, NOON + 1 + span)])
    assert 2 <= len(ticks) <= 9
    if span == 3_600_000:
        assert all(tick.text.endswith("0") for tick in ticks)
        assert ticks[1].at - ticks[0].at == pytest.approx(100 / 6, abs=0.2)


def test_words_that_stand_too_close_are_left_out() -> None:
    assert list(apart([0, 1, 2, 5, 5.5, 9], 3)) == [0, 3, 5]


def test_files_over_the_same_log_stand_below_one_another() -> None:
    made = Made(8, 2, 0)
    made.files.append(replace(made.files[0], name="20261120220000001"))
    report = made.report()
    lanes = lanes_of(report, scale_of(report))
    assert [len(lane) for lane in lanes] == [2, 1]
    many = Made(4000, 3000, 0).report()
    (lane,) = lanes_of(many, scale_of(many))
    assert sum(band.files for band in lane) == 3000
    assert len(lane) < 400
