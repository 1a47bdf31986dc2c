"""Where things lie on the drawing of a log: offsets, holes that lie close together, times on its axis, files."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from indexd.audit.strip import Scale, apart, boxes_of, known_times, scale_of
from support.audit_reports import Made

OFFSETS = st.integers(0, 1 << 50)


@given(begin=OFFSETS, size=OFFSETS, before=OFFSETS, behind=OFFSETS, offsets=st.lists(OFFSETS, max_size=20))
def test_places_rise_with_offsets_and_stay_inside(
    begin: int, size: int, before: int, behind: int, offsets: list[int]
) -> None:
    scale = Scale(begin, begin + size + 1, max(begin - before, 0), begin + size + 1 + behind)
    places = [scale.at(offset) for offset in sorted(offsets)]
    assert all(0 <= place <= 100 for place in places)
    assert all(one <= other + 1e-9 for one, other in pairwise(places))


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5)), max_size=200), st.sampled_from([1.0, 100.0]))
def test_every_range_is_in_one_box_and_boxes_stand_apart(found: list[tuple[int, int]], column: float) -> None:
    ranges, at = [], 0
    for before, size in found:
        ranges.append((at + before, at + before + size))
        at += before + size
    boxes = boxes_of(Scale(0, at + 1, 0, at + 1), ranges, column)
    assert [number for box in boxes for number in box.numbers] == list(range(len(ranges)))
    assert all(box.first < box.behind <= 100 for box in boxes)
    assert all(one.behind <= other.first + 1e-9 for one, other in pairwise(boxes))
    assert all(box.behind - box.first < column for box in boxes if len(box.numbers) > 1)


def test_a_clock_that_went_back_has_no_place_on_the_axis() -> None:
    report = Made(8, 2, 0).report()
    first, *rest = report.standing.segments
    odd = replace(report.standing, segments=(first, replace(rest[0], store_timestamp=5), *rest[1:]))
    points = known_times(replace(report, standing=odd), scale_of(report))
    assert [offset for offset, _ in points] == [first.begin, *(segment.begin for segment in rest[1:])]


def test_words_that_stand_too_close_are_left_out() -> None:
    assert list(apart([0, 1, 2, 5, 5.5, 9], 3)) == [0, 3, 5]
