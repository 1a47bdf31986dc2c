"""Checkpoint and frontier: their bytes, what they refuse, when they are written, and what a start keeps by them."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.commitlog.segments import SegmentList
from indexd.errors import CorruptDataError, DiskError, IndexdError, UnsafeStoreError
from indexd.flush.frontier import (
    CHECKPOINT_SIZE,
    UNCOVERED_MAX,
    Frontier,
    StoreCheckpoint,
    Uncovered,
    add_uncovered,
    read_frontier,
)
from indexd.flush.pipeline import LogChangeDetector, Pipeline
from indexd.index.file import IndexService
from indexd.index.format import FLAVOURS, FileMark, IndexHeader, IndexLayout
from indexd.recovery.recover import OnDisk, plan_recovery
from indexd.storage.disk import Disk, Stamp
from indexd.storage.names import DataFiles
from support.commitlog_writer import FrameSpec
from support.goldens import unpack
from support.sim_disk import Fault, SimDisk
from support.strategies import Sample
from support.twins import batches, encode

LAYOUT = IndexLayout(10, 20)
FRESH = Frontier("/store", ("/store/commitlog",), 1 << 20, "5.4", LAYOUT)


def test_a_broker_s_checkpoint_is_read_and_written_back_alike(tmp_path: Path) -> None:
    golden = unpack("rocketmq-5.4-clean", tmp_path)
    data = (golden.root / "checkpoint").read_bytes()
    checkpoint = StoreCheckpoint.unpack(data, golden.root)
    full = golden.index_files()[-2].read_bytes()
    assert checkpoint.index_msg_timestamp == struct.unpack(">q", full[8:16])[0]
    assert checkpoint.pack() == data
    assert len(data) == CHECKPOINT_SIZE


def test_a_short_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptDataError, match="39 bytes"):
        StoreCheckpoint.unpack(bytes(39), tmp_path / "checkpoint")


headers = st.builds(IndexHeader, *([st.integers(0, 2**62)] * 4), st.integers(0, 100), st.integers(1, 100))
frontiers = st.builds(
    Frontier,
    st.text(),
    st.lists(st.text()).map(tuple),
    st.integers(1, 2**40),
    st.sampled_from(sorted(FLAVOURS)),
    st.builds(IndexLayout, st.integers(1, 2**31), st.integers(2, 2**31)),
    *([st.integers(0, 2**62)] * 4),
    st.lists(st.builds(Uncovered, st.integers(0, 9), st.integers(10, 20), st.text())).map(tuple),
    st.lists(
        st.builds(FileMark, st.text("0123456789", min_size=17, max_size=17), headers, st.booleans()),
        unique_by=lambda m: m.name,
    ).map(lambda marks: {"index": tuple(sorted(marks, key=lambda mark: mark.name))}),
)


@given(frontiers)
def test_a_frontier_survives_its_json(frontier: Frontier) -> None:
    row = json.loads(json.dumps(frontier.to_json("1")))
    assert Frontier.from_json(row, Path("frontier")) == frontier


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values, st.sampled_from(sorted(FRESH.to_json("1"))), json_values)
def test_whatever_stands_in_a_frontier_nothing_but_our_errors_comes_out(junk: object, key: str, value: object) -> None:
    for row in (junk, FRESH.to_json("1") | {key: value}):
        with suppress(IndexdError):
            Frontier.from_json(row, Path("frontier"))


def test_a_newer_format_is_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "frontier"
    path.write_text(json.dumps(FRESH.to_json("9.9") | {"format": 2}))
    with pytest.raises(UnsafeStoreError, match=r"written by indexd 9\.9") as caught:
        read_frontier(Disk(), path)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"9" * 5000, b'{"format": "1"}'])
def test_a_damaged_frontier_is_corrupt_data(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "frontier"
    path.write_bytes(data)
    with pytest.raises(CorruptDataError):
        read_frontier(Disk(), path)


def test_uncovered_ranges_merge_and_stay_bounded() -> None:
    gaps: tuple[Uncovered, ...] = ()
    for begin in range(0, 20 * UNCOVERED_MAX, 10):
        gaps = add_uncovered(gaps, Uncovered(begin, begin + 5, "corrupt"))
    assert len(gaps) == UNCOVERED_MAX
    assert gaps[0].begin == 0
    assert gaps[-1].end == 20 * UNCOVERED_MAX - 5
    assert add_uncovered((Uncovered(0, 5, "a"),), Uncovered(5, 9, "a")) == (Uncovered(0, 9, "a"),)
    assert add_uncovered((), Uncovered(5, 5, "a")) == ()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_full_file_that_cannot_be_synced_is_named_nowhere_and_stays_to_be_synced(nth: int) -> None:
    """Full files are closed at once, and synced by their names: the last of three is the open one."""
    disk, files = SimDisk(Path("/simulated")), DataFiles(Path("/simulated/data"))
    disk.make_dir(files.index)
    service = IndexService(disk, files.index, IndexLayout(3, 5), FLAVOURS["5.4"])
    pipeline = Pipeline(disk, files, [service], FRESH, LogChangeDetector(disk, SegmentList))
    samples = [Sample(FrameSpec("T", properties={"KEYS": f"k{number}"}, store_timestamp=5)) for number in range(10)]
    for batch in batches(encode(samples), "5.4", [20]):
        service.build(batch)
    progress = pipeline.mark()
    assert [mark.full for mark in progress.frontier.index] == [True, True, False]
    paths = tuple(files.index / mark.name for mark in progress.frontier.index)
    disk.faults = [Fault("fsync", "EIO", "index/*", nth=nth)]
    with pytest.raises(DiskError, match=f"fsync {paths[nth - 1]}"):
        pipeline.persist(progress)
    assert pipeline.frontier == FRESH
    assert not disk.exists(files.frontier)
    assert not disk.exists(files.checkpoint)
    assert pipeline.mark().marks[0].unsynced == paths
    service.close()


# --- what is on disk -> what is kept, replayed and removed: a row a case ---

SIZE = LAYOUT.file_size
A = FileMark("20260101000000001", IndexHeader(1, 2, 0, 100, 3, 20), full=True)
B = FileMark("20260101000000002", IndexHeader(2, 3, 100, 200, 3, 20), full=True)
C = FileMark("20260101000000003", IndexHeader(3, 4, 200, 300, 3, 7), full=False)
WITH_FILES = Frontier("/s", ("/s/commitlog",), 1 << 20, "5.4", LAYOUT, phy_offset=400, outputs={"index": (A, B, C)})

HERE = {mark.name: SIZE for mark in (A, B, C)}


def on_disk(**changes: object) -> OnDisk:
    sizes: Any = changes.pop("sizes", HERE)
    stamps = {name: Stamp(size, 0, 0) for name, size in sizes.items()}
    headers = {mark.name: mark.header for mark in (A, B, C)}
    return replace(OnDisk(abort=False, frontier=WITH_FILES, stamps=stamps, headers=headers), **changes)  # type: ignore[arg-type]


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
