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


HERE = {mark.name: SIZE for mark in (A, B, C)}
CHANGED = {A.name: A.header, B.name: replace(B.header, index_count=3), C.name: C.header}
OTHER = "20260101000000009"


@pytest.mark.parametrize(
    ("changes", "forced", "keep", "replay", "delete", "phy_offset"),
    [
        # A clean stop leaves nothing to do; after a crash the open file alone is replayed; --recover replays all.
        ({}, False, (A, B, C), (), (), 400),
        ({"abort": True}, False, (A, B), (C,), (), 400),
        ({}, True, (), (A, B, C), (), 400),
        # A header that is not ours, or a file that its checksums deny, is replayed even after a clean stop.
        ({"headers": CHANGED}, False, (A, C), (B,), (), 400),
        ({"damaged": frozenset({A.name})}, False, (B, C), (A,), (), 400),
        # What the frontier does not name goes; without a frontier all of it.
        ({"sizes": HERE | {OTHER: SIZE}}, False, (A, B, C), (), (OTHER,), 400),
        ({"frontier": None}, False, (), (), (A.name, B.name, C.name), None),
        # A missing or cut file ends what is kept, but for one that pointed to expired messages only.
        ({"sizes": {A.name: SIZE, C.name: SIZE}}, False, (A,), (), (C.name,), None),
        *(
            ({"sizes": HERE | {B.name: size}}, False, (A,), (), (B.name, C.name), None)
            for size in (SIZE - 1, SIZE + 1, 0)
        ),
        ({"sizes": {B.name: SIZE, C.name: SIZE}, "log_begin": 101}, False, (B, C), (), (), 400),
        ({"sizes": {B.name: SIZE, C.name: SIZE}, "log_begin": 100}, False, (), (), (B.name, C.name), None),
    ],
)
def test_what_is_kept_replayed_and_removed(
    changes: dict[str, object],
    forced: bool,
    keep: tuple[FileMark, ...],
    replay: tuple[FileMark, ...],
    delete: tuple[str, ...],
    phy_offset: int | None,
) -> None:
    plan = plan_recovery(on_disk(**changes), forced=forced)
    assert (plan.keep, plan.replay, plan.delete, plan.phy_offset) == (keep, replay, delete, phy_offset)
    assert plan.cut == (phy_offset is None and "frontier" not in changes)
    first = next((mark.name for mark in (A, B, C) if mark not in (*keep, *replay)), "")
    assert first in plan.reason or not plan.cut
    assert plan.is_clean == (not replay and not delete)
