"""Splits: whatever the stretch, the tasks' messages together are those of one reader, each once and in order."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.cursor import SplitPoints
from indexd.commitlog.reader import Skipped
from indexd.config import Config, load
from indexd.errors import CorruptDataError, DisturbedError, UsageError
from indexd.recovery.open import decode_rules
from indexd.spark.splits import Split, SplitReader, check_chain, plan_splits
from indexd.storage.disk import Disk
from support.beside_log import frames, over_queues, spec, write
from support.commitlog_writer import FrameSpec, encode_frame
from support.small_log import BASE_TIME

SEGMENT_SIZE = 16 << 10
DISK = Disk()


def config_of(store: Path, *, segment_size: int = SEGMENT_SIZE, **more: str) -> Config:
    flags = {"store": str(store), "segment_size": str(segment_size), "data": str(store.parent / "data")}
    return load(flags | more, None, {"HOME": "/nowhere"})


def read(config: Config, splits: list[Split]) -> tuple[list[int], list[int], list[Skipped]]:
    """(physical offsets, where each split ended, what was passed over)."""
    found: list[int] = []
    ends, skipped = [], []
    for split in splits:
        reader = SplitReader(DISK, config, split)
        for item in reader:
            if isinstance(item, DispatchBatch):
                offsets = item.columns.phy_offset[: item.rows].tolist()
                assert all(split.begin <= offset < split.end for offset in offsets)
                found += offsets
            else:
                skipped.append(item)
        ends.append(reader.next_offset)
        if reader.ends_log:
            break
    return found, ends, skipped


def check(config: Config, store: Path, splits: list[Split], begin: int = 0, end: int = 1 << 62) -> None:
    wanted = [message.phy_offset for message in frames(store, config.store.segment_size)]
    found, ends, _ = read(config, splits)
    assert found == [offset for offset in wanted if begin <= offset < end]
    assert all(first.end == second.begin for first, second in pairwise(splits))
    assert all(split.begin < split.end for split in splits)
    assert check_chain(splits[: len(ends)], ends) == []


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four segments, the last one half full and one made ahead; 16 KiB each."""
    store = tmp_path_factory.mktemp("splits") / "store"
    write(store, over_queues(200, 6), SEGMENT_SIZE)
    (store / "commitlog" / f"{max(int(p.name) for p in (store / 'commitlog').iterdir()) + SEGMENT_SIZE:020d}").touch()
    return store


@pytest.mark.parametrize("size", [91, 500, 1000, 4096, SEGMENT_SIZE, 10 * SEGMENT_SIZE])
def test_splits_of_every_size_hold_each_message_once(log: Path, size: int) -> None:
    config = config_of(log)
    splits = plan_splits(DISK, config, size=size)
    assert len(splits) >= 3 * SEGMENT_SIZE // max(size, 400) // 2
    check(config, log, splits)


def test_every_byte_of_a_segment_is_a_boundary_once(log: Path) -> None:
    config = config_of(log)
    starts = [message.phy_offset for message in frames(log, SEGMENT_SIZE)]
    points = SplitPoints(DISK, config.store.commit_log_directories, SEGMENT_SIZE, decode_rules(config), 4096)
    for base in (0, SEGMENT_SIZE, 3 * SEGMENT_SIZE):
        ours = [start for start in starts if base <= start < base + SEGMENT_SIZE]
        for offset in range(base, base + SEGMENT_SIZE):
            wanted = next((start for start in ours if start >= offset), None)
            found = points.at(offset, base)
            assert found == wanted
    points.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_of_the_log_in_any_splits(log: Path, data: st.DataObject) -> None:
    config = config_of(log)
    end = data.draw(st.integers(0, 5 * SEGMENT_SIZE))
    begin = data.draw(st.integers(0, end))
    size = data.draw(st.integers(91, 2 * SEGMENT_SIZE))
    check(config, log, plan_splits(DISK, config, size=size, begin=begin, end=end), begin, end)


def lookalike(at: int, inner: FrameSpec, body: int) -> FrameSpec:
    """A message at ``at`` whose body holds, at byte ``body``, a whole message that claims to stand there."""
    frame = encode_frame(inner, at + 84 + body)
    return FrameSpec("T", bytes(body) + frame + bytes(50), store_timestamp=BASE_TIME)


def test_what_looks_like_a_message_inside_a_body_is_no_place_to_begin(tmp_path: Path) -> None:
    store = tmp_path / "store"
    end = 0
    for number in range(12):
        end = write(store, [lookalike(end, spec(number, body=300), 500 + 7 * number)], SEGMENT_SIZE)
        end = write(store, [spec(number)], SEGMENT_SIZE)
    write(store, over_queues(100, 2), SEGMENT_SIZE)
    config = config_of(store)
    for size in (91, 200, 333, 1000):
        check(config, store, plan_splits(DISK, config, size=size))


def test_behind_a_blank_record_lies_what_a_longer_log_has_left(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, [spec(number) for number in range(200)], SEGMENT_SIZE)
    cut = [message.phy_offset for message in frames(store, SEGMENT_SIZE) if message.phy_offset < SEGMENT_SIZE][-20]
    # The first message of the rewritten part does not fit any more: a blank record, and stale frames behind it.
    write(store, [spec(300, body=9000)], SEGMENT_SIZE, at=cut)
    config = config_of(store)
    for size in (91, 200, 333, 1000, 5000):
        check(config, store, plan_splits(DISK, config, size=size))


def test_frames_behind_the_end_of_a_cut_log_end_the_task_or_are_passed_over_to(tmp_path: Path) -> None:
    """They may be what a longer log has left, or this log's behind damage: without the broker nobody can tell."""
    store = tmp_path / "store"
    end = write(store, [spec(number) for number in range(60)], SEGMENT_SIZE)
    older = [message.phy_offset for message in frames(store, SEGMENT_SIZE)]
    assert end < SEGMENT_SIZE
    end = write(store, [spec(300, body=77)], SEGMENT_SIZE, at=older[10])
    behind = [offset for offset in older if offset > end]
    stopping, skipping = config_of(store), config_of(store, on_corrupt="skip")
    for size in (91, 333, 1000, SEGMENT_SIZE):
        with pytest.raises(CorruptDataError, match=f"corrupt at offset {end} of"):
            read(stopping, plan_splits(DISK, stopping, size=size))
        found, _, gaps = read(skipping, plan_splits(DISK, skipping, size=size))
        assert found == older[:11] + behind
        assert [(gap.begin, gap.end) for gap in gaps] == [(end, behind[0])]


def test_damage_is_passed_over_as_one_reader_does_or_ends_the_task(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, over_queues(200, 3), SEGMENT_SIZE)
    found = [message for message in frames(store, SEGMENT_SIZE) if message.phy_offset > 2000]
    with (store / "commitlog" / f"{0:020d}").open("r+b") as file:
        file.seek(found[3].phy_offset)
        file.write(b"\xff" * (found[4].phy_offset - found[3].phy_offset + 50))
    skipping = config_of(store, on_corrupt="skip")
    whole = read(skipping, plan_splits(DISK, skipping, size=10 * SEGMENT_SIZE))
    assert [(gap.begin, gap.end) for gap in whole[2]] == [(found[3].phy_offset, found[5].phy_offset)]
    for size in (91, 200, 1000, 4096):
        splits = plan_splits(DISK, skipping, size=size)
        again = read(skipping, splits)
        assert (again[0], again[2]) == (whole[0], whole[2])
    stopping = config_of(store)
    with pytest.raises(CorruptDataError, match=f"corrupt at offset {found[3].phy_offset}"):
        read(stopping, plan_splits(DISK, stopping, size=1000))


@pytest.mark.parametrize("damage", ["noise", "zeros", "gone"])
def test_a_segment_that_is_damaged_as_a_whole_is_passed_over_once(tmp_path: Path, damage: str) -> None:
    store = tmp_path / "store"
    write(store, over_queues(300, 3), SEGMENT_SIZE)
    path = store / "commitlog" / f"{2 * SEGMENT_SIZE:020d}"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(random.Random(1).randbytes(SEGMENT_SIZE) if damage == "noise" else bytes(SEGMENT_SIZE))
    config = config_of(store, on_corrupt="skip")
    whole = read(config, [Split(0, 1 << 40)])
    assert [(gap.begin, gap.end) for gap in whole[2]] == [(2 * SEGMENT_SIZE, 3 * SEGMENT_SIZE)]
    for size in (333, 4096, SEGMENT_SIZE):
        splits = plan_splits(DISK, config, size=size)
        found, ends, gaps = read(config, splits)
        assert found == whole[0]
        assert [(gap.begin, gap.end) for gap in gaps] == [(2 * SEGMENT_SIZE, 3 * SEGMENT_SIZE)]
        assert check_chain(splits[: len(ends)], ends) == []


def test_without_a_size_there_are_splits_for_all_slots(tmp_path: Path) -> None:
    store = tmp_path / "store"
    segment_size = 64 << 20
    (store / "commitlog").mkdir(parents=True)
    write(store, over_queues(5000, 3), segment_size)
    config = config_of(store, segment_size=segment_size)
    splits = plan_splits(DISK, config, slots=2)
    assert splits == [Split(0, segment_size)], "it is cut where messages are, and they end before 16 MiB"
    check(config, store, splits)


def test_a_log_that_expired_or_has_holes_is_no_silent_result(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write(store, over_queues(300, 3), SEGMENT_SIZE)
    config = config_of(store)
    splits = plan_splits(DISK, config, size=4096)
    (store / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(DisturbedError, match="expired while it was read"):
        read(config, splits)
    (store / "commitlog" / f"{2 * SEGMENT_SIZE:020d}").unlink()
    with pytest.raises(CorruptDataError, match="missing"):
        read(config, plan_splits(DISK, config, size=4096))
    skipping = config_of(store, on_corrupt="skip")
    _, _, gaps = read(skipping, plan_splits(DISK, skipping, size=4096))
    assert [(gap.begin, gap.end) for gap in gaps] == [(2 * SEGMENT_SIZE, 3 * SEGMENT_SIZE)]


def test_a_size_of_nothing_is_refused_and_no_log_is_no_split(tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    config = config_of(tmp_path / "store")
    with pytest.raises(UsageError, match="stretches of 0 bytes"):
        plan_splits(DISK, config, size=0)
    assert plan_splits(DISK, config) == []
