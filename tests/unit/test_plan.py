"""What is on disk -> what is kept, replayed and removed: a row a case."""

from __future__ import annotations

from dataclasses import replace

import pytest

from indexd.flush.frontier import Frontier
from indexd.index.format import FileMark, IndexHeader, IndexLayout
from indexd.recovery.recover import OnDisk, plan_recovery

LAYOUT = IndexLayout(10, 20)
SIZE = LAYOUT.file_size
A = FileMark("20260101000000001", IndexHeader(1, 2, 0, 100, 3, 20), full=True)
B = FileMark("20260101000000002", IndexHeader(2, 3, 100, 200, 3, 20), full=True)
C = FileMark("20260101000000003", IndexHeader(3, 4, 200, 300, 3, 7), full=False)
FRONTIER = Frontier("/s", ("/s/commitlog",), 1 << 20, "5.4", LAYOUT, phy_offset=400, outputs={"index": (A, B, C)})


def on_disk(**changes: object) -> OnDisk:
    sizes = {mark.name: SIZE for mark in (A, B, C)}
    headers = {mark.name: mark.header for mark in (A, B, C)}
    return replace(OnDisk(abort=False, frontier=FRONTIER, sizes=sizes, headers=headers), **changes)  # type: ignore[arg-type]


def test_a_clean_stop_leaves_nothing_to_do() -> None:
    plan = plan_recovery(on_disk())
    assert plan.is_clean
    assert (plan.keep, plan.phy_offset) == ((A, B, C), 400)


def test_after_a_crash_the_open_file_alone_is_replayed() -> None:
    plan = plan_recovery(on_disk(abort=True))
    assert (plan.keep, plan.replay, plan.delete, plan.phy_offset, plan.cut) == ((A, B), (C,), (), 400, False)


def test_forced_replays_all() -> None:
    plan = plan_recovery(on_disk(), forced=True)
    assert (plan.keep, plan.replay) == ((), (A, B, C))


def test_a_header_that_differs_is_replayed_even_after_a_clean_stop() -> None:
    headers = {A.name: A.header, B.name: replace(B.header, index_count=3), C.name: C.header}
    plan = plan_recovery(on_disk(headers=headers))
    assert (plan.keep, plan.replay) == ((A, C), (B,))


def test_files_that_the_frontier_does_not_name_go() -> None:
    sizes = {mark.name: SIZE for mark in (A, B, C)} | {"20260101000000009": SIZE}
    plan = plan_recovery(on_disk(sizes=sizes))
    assert plan.delete == ("20260101000000009",)
    assert not plan.is_clean


@pytest.mark.parametrize("size", [None, SIZE - 1, SIZE + 1, 0])
def test_a_missing_or_cut_file_ends_what_is_kept(size: int | None) -> None:
    sizes = {A.name: SIZE, C.name: SIZE} | ({} if size is None else {B.name: size})
    plan = plan_recovery(on_disk(sizes=sizes))
    assert plan.cut
    assert (plan.keep, plan.phy_offset) == ((A,), None)
    assert plan.delete == tuple(sorted(set(sizes) - {A.name}))
    assert B.name in plan.reason


def test_a_missing_file_that_pointed_to_expired_messages_only_is_no_loss() -> None:
    sizes = {B.name: SIZE, C.name: SIZE}
    assert plan_recovery(on_disk(sizes=sizes, log_begin=101)).keep == (B, C)
    assert plan_recovery(on_disk(sizes=sizes, log_begin=100)).cut


def test_without_a_frontier_everything_goes() -> None:
    plan = plan_recovery(on_disk(frontier=None))
    assert plan.delete == (A.name, B.name, C.name)
    assert plan.phy_offset is None
