"""A rebuild by tasks makes what the one-process rebuild makes, byte for byte, however log and index are cut."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.flush.pipeline import OUTPUTS
from indexd.recovery.rebuild import Rebuilt
from indexd.spark.rebuild import stage_two
from indexd.spark.rebuild.job import StageOne, work
from indexd.spark.rebuild.runs import Run
from indexd.spark.rebuild.stage_two import OutputTask
from indexd.spark.splits import plan_splits
from indexd.storage.disk import Disk, DiskFile
from support import small_log
from support.beside_log import OddMessage, frames, odd_messages, some_messages, write, write_odd
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.fake_broker import Named
from support.goldens import GOLDENS, Golden, unpack
from support.reopened import config_for
from support.same_index import assert_same_index
from support.small_log import BASE_TIME, messages, write_log
from support.spark_rebuild import assert_same_rebuild, by_one, by_tasks, frontier_of

SEGMENT_SIZE = 16 << 10


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    # Thousands of small files are made here, and no machine fails.
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    # So that each output comes to several tasks.
    monkeypatch.setattr(stage_two, "_MESSAGES_PER_TASK", 300)


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("goldens")


def config_of(golden: Golden, data: Path, **keys: object) -> Config:
    sizes = {
        "segment_size": golden.segment_size,
        "consume_queue_file_size": golden.queue_file_size,
        "hash_slot_num": golden.hash_slot_num,
        "index_num": golden.index_num,
        "flavour": golden.flavour,
    }
    return config_for(golden.root, data, **sizes | keys)


def odd_config(root: Path, **keys: object) -> Config:
    return config_for(root / "store", root / "data", **{"segment_size": SEGMENT_SIZE, "index_num": 100} | keys)


def write_messages(store: Path, count: int, seed: int = 1) -> list[int]:
    """Keys that repeat, several a message or none, transactions; where each message begins."""
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        return [writer.append(one) for one in islice(messages(seed), count)]


@pytest.mark.parametrize("name", GOLDENS)
def test_the_stores_that_rocketmq_wrote(goldens: Path, tmp_path: Path, name: str) -> None:
    golden = unpack(name, goldens)
    assert_same_rebuild(config_of(golden, tmp_path / "data"), tmp_path, [0, 7777])


@pytest.mark.parametrize("flavour", ["3.x", "4.0", "4.7", "5.4"])
@pytest.mark.parametrize(("hash_slot_num", "index_num"), [(1, 2), (7, 3), (500, 100), (100, 20_000)])
def test_every_flavour_and_files_of_many_sizes(
    tmp_path: Path, flavour: str, hash_slot_num: int, index_num: int
) -> None:
    write_messages(tmp_path / "store", 150)
    config = odd_config(tmp_path, flavour=flavour, hash_slot_num=hash_slot_num, index_num=index_num)
    found = assert_same_rebuild(config, tmp_path, [0, 1000])
    assert (found.files > 30) == (index_num < 10)


@pytest.mark.parametrize("last", ["key", "no key", "prepared", "rolled back"])
def test_a_last_file_that_is_just_full(tmp_path: Path, last: str) -> None:
    # 9 messages with an entry each fill three files; whatever comes behind them begins a fourth.
    ours = [FrameSpec("T", b"x", {"KEYS": f"k{number}"}, store_timestamp=BASE_TIME + number) for number in range(9)]
    if last != "key":
        flag = {"no key": 0, "prepared": 0x4, "rolled back": 0xC}[last]
        keys = {} if last == "no key" else {"KEYS": "k"}
        ours.append(FrameSpec("T", b"x", keys, sys_flag=flag, store_timestamp=BASE_TIME + 99))
    write(tmp_path / "store", ours, SEGMENT_SIZE)
    config = odd_config(tmp_path, index_num=4, flavour="3.x")
    assert assert_same_rebuild(config, tmp_path, [0, 91, 200]).files == (3 if last == "key" else 4)


@pytest.mark.parametrize(
    "keys", [{"consume_queue": "false"}, {"sparse": "false"}, {"consume_queue": "false", "sparse": "false"}]
)
def test_some_outputs_alone(tmp_path: Path, keys: dict[str, str]) -> None:
    write_messages(tmp_path / "store", 300)
    assert_same_rebuild(odd_config(tmp_path, **keys), tmp_path, [0, 3000])


@pytest.mark.parametrize(
    ("queues", "queues_max", "file_size"),
    [(1, 1000, 200), (20, 1000, 20), (300, 299, 200), (300, 100, 200), (300, 1, 20), (40, 7, 60)],
)
def test_queues_of_any_number_and_those_that_are_left_out(
    tmp_path: Path, queues: int, queues_max: int, file_size: int
) -> None:
    write_odd(tmp_path / "store", odd_messages(1500, queues), SEGMENT_SIZE)
    config = odd_config(tmp_path, queues_max=queues_max, consume_queue_file_size=file_size)
    assert_same_rebuild(config, tmp_path, [0, 5000])


@pytest.mark.parametrize("interval", [0, 1000, 1 << 20])
def test_sparse_indexes_of_segments_built_apart(tmp_path: Path, interval: int) -> None:
    write_odd(tmp_path / "store", odd_messages(1000, 5), SEGMENT_SIZE)
    assert_same_rebuild(odd_config(tmp_path, sparse_interval=interval), tmp_path, [0, 3000])


def test_a_long_split_whose_batches_count_topics_differently(tmp_path: Path) -> None:
    # What is read ahead has a table of topics of its own, so one id is two topics.
    ours = [OddMessage(b"A" if number < 700 else b"B", number % 3, body_size=300) for number in range(1500)]
    ours[0] = OddMessage(b"B")
    write_odd(tmp_path / "store", ours, 1 << 20)
    assert_same_rebuild(odd_config(tmp_path, segment_size=1 << 20, read_bytes=64 << 10), tmp_path, [0])


@pytest.mark.parametrize("name", ["consumeQueue", "sparse"])
def test_what_a_task_makes_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_odd(tmp_path / "store", odd_messages(500, 30), SEGMENT_SIZE)
    config = odd_config(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "job").write_text("word")
    stage = StageOne(config, tmp_path / "runs", tmp_path / "job", "word")
    runs = [run for run in (work(stage, split) for split in plan_splits(Disk(), config)) if isinstance(run, Run)]
    synced: set[Path] = set()
    monkeypatch.setattr(DiskFile, "fsync", lambda file: synced.add(file.path))
    monkeypatch.setattr(Disk, "sync_dir", lambda disk, path: synced.add(path))
    monkeypatch.setattr(stage_two, "_MESSAGES_PER_TASK", 100)
    (kind,) = (kind for kind in OUTPUTS if kind.name == name)
    tasks = OutputTask.plan(kind, runs, config, tmp_path / "attempts")
    assert len(tasks) > 2
    for task in tasks:
        task.work(runs)
        assert {task.directory, *task.directory.rglob("*")} <= synced
    assert len({path.name for path in (tmp_path / "attempts").iterdir()}) == len(tasks)


@settings(max_examples=40, deadline=None)
@given(some_messages(), st.data())
def test_any_log_in_splits_of_any_size(ours: list[OddMessage], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_odd(root / "store", ours, 2048)
        config = odd_config(
            root,
            segment_size=2048,
            index_num=data.draw(st.integers(2, 20)),
            hash_slot_num=data.draw(st.integers(1, 9)),
            flavour=data.draw(st.sampled_from(["3.x", "4.0", "4.7", "5.4"])),
            queues_max=data.draw(st.integers(1, 12)),
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(stage_two, "_MESSAGES_PER_TASK", data.draw(st.sampled_from([10, 1000])))
            assert_same_rebuild(config, root, [data.draw(st.integers(1, 2048))])


def test_runs_of_many_batches(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 3000)
    config = odd_config(tmp_path, segment_size=small_log.SEGMENT_SIZE, read_bytes=64 << 10)
    assert_same_rebuild(config, tmp_path, [0, 100_000])


def test_logs_without_messages(tmp_path: Path) -> None:
    (tmp_path / "store/commitlog").mkdir(parents=True)
    config = odd_config(tmp_path)
    assert assert_same_rebuild(config, tmp_path / "a", [0]).files == 0
    (tmp_path / "store/commitlog" / f"{SEGMENT_SIZE:020d}").write_bytes(bytes(SEGMENT_SIZE))
    assert assert_same_rebuild(config, tmp_path / "b", [0]).phy_offset == SEGMENT_SIZE


def damage(store: Path, offset: int, data: bytes) -> None:
    base = offset // SEGMENT_SIZE * SEGMENT_SIZE
    with (store / "commitlog" / f"{base:020d}").open("r+b") as file:
        file.seek(offset - base)
        file.write(data)


def test_a_corrupt_log_ends_it_or_is_passed_over_as_told(tmp_path: Path) -> None:
    offsets = write_messages(tmp_path / "store", 600)
    broken = [offsets[40], offsets[41], offsets[200], next(one for one in offsets if one >= 3 * SEGMENT_SIZE)]
    for offset in broken:
        damage(tmp_path / "store", offset, bytes(range(1, 41)))
    config = odd_config(tmp_path)
    for size in (0, 1000):
        with pytest.raises(CorruptDataError, match=f"the log is corrupt at offset ({'|'.join(map(str, broken))}) of"):
            by_tasks(config, tmp_path / "out", size)
        assert not (tmp_path / "out").exists()
    found = assert_same_rebuild(odd_config(tmp_path, on_corrupt="skip"), tmp_path / "skip", [0, 300, 1000, 5000])
    assert found.skipped_bytes > 0


def test_a_segment_that_is_missing_or_was_never_written(tmp_path: Path) -> None:
    write_messages(tmp_path / "store", 600)
    log = tmp_path / "store/commitlog"
    (log / f"{SEGMENT_SIZE:020d}").unlink()
    (log / f"{3 * SEGMENT_SIZE:020d}").write_bytes(bytes(SEGMENT_SIZE))
    for size in (0, 1000):
        with pytest.raises(CorruptDataError):
            by_tasks(odd_config(tmp_path), tmp_path / "out", size)
    found = assert_same_rebuild(odd_config(tmp_path, on_corrupt="skip"), tmp_path / "skip", [0, 1000])
    assert found.skipped_bytes >= 2 * SEGMENT_SIZE


def tail(config: Config, root: Path) -> Rebuilt:
    return assert_same_rebuild(config, root, [0, 500, 3000])


def test_a_log_that_ends_in_zeros_in_half_a_frame_or_in_bytes_that_are_none(tmp_path: Path) -> None:
    store = tmp_path / "store"
    offsets = write_messages(store, 250)
    config = odd_config(tmp_path)
    last = frames(store, SEGMENT_SIZE)[-1]
    whole = tail(config, tmp_path / "zeros")
    assert whole.phy_offset == last.phy_offset + last.size
    damage(store, offsets[-1] + 50, bytes(last.size - 50))
    half = tail(config, tmp_path / "half")
    assert half.messages == whole.messages - 1
    damage(store, offsets[-1], bytes(range(1, 100)))
    found = tail(config, tmp_path / "none")
    assert found.unreadable is not None
    assert found.unreadable.offset == offsets[-1]


def test_frames_behind_the_end_of_a_cut_log_end_it_or_are_passed_over_to_and_unproven(tmp_path: Path) -> None:
    store = tmp_path / "store"
    offsets = write_messages(store, 600)
    inside = [one for one in offsets if one > offsets[-1] // SEGMENT_SIZE * SEGMENT_SIZE]
    at = inside[len(inside) // 4]
    later = [replace(one, store_timestamp=one.store_timestamp + 10_000_000) for one in islice(messages(2), 3)]
    end = write(store, later, SEGMENT_SIZE, at=at)
    damage(store, end, bytes(8))
    behind = [one for one in offsets if one >= end + 8]
    for size in (0, 500, 3000):
        with pytest.raises(CorruptDataError, match=f"the log is corrupt at offset {end} of"):
            by_tasks(odd_config(tmp_path), tmp_path / "out", size)
        assert not (tmp_path / "out").exists()
    with pytest.raises(CorruptDataError, match=f"the log is corrupt at offset {end} of"):
        by_one(odd_config(tmp_path), tmp_path / "out")
    found = tail(odd_config(tmp_path, on_corrupt="skip"), tmp_path / "skip")
    assert found.messages == sum(one < at for one in offsets) + len(later) + len(behind)
    assert found.skipped_bytes == behind[0] - end
    assert found.unproven_bytes == found.phy_offset - behind[0]


@pytest.mark.parametrize("size", [0, 500, 3000])
@pytest.mark.parametrize("kind", ["older", "half a frame", "the clock", "garbage"])
def test_the_broker_is_asked_as_one_process_asks_it(tmp_path: Path, kind: str, size: int) -> None:
    store = tmp_path / "store"
    offsets = write_messages(store, 600)
    inside = [one for one in offsets if one > offsets[-1] // SEGMENT_SIZE * SEGMENT_SIZE]
    at = inside[len(inside) // 4]
    spec = next(messages(2))
    later = [replace(spec, store_timestamp=spec.store_timestamp + 10_000_000 + number) for number in range(3)]
    end = write(store, later, SEGMENT_SIZE, at=at)
    if kind in ("half a frame", "garbage"):
        damage(store, end, bytes(60) if kind == "half a frame" else b"\x7f" * 60)
    elif kind == "the clock":
        end = write(store, islice(messages(3), 5), SEGMENT_SIZE, at=end)
    one = by_one(odd_config(tmp_path), tmp_path / "one", Named(end))
    found = by_tasks(odd_config(tmp_path), tmp_path / "many", size, log_limit=Named(end))
    assert (one.phy_offset, one.unproven_bytes, one.unreadable) == (end, 0, None)
    assert (found.phy_offset, found.messages, found.unproven_bytes, found.unreadable) == (end, one.messages, 0, None)
    ours, theirs = frontier_of(tmp_path / "many"), frontier_of(tmp_path / "one")
    assert ours.stale_head is not None
    assert (ours.stale_head, ours.uncovered, ours.messages) == (theirs.stale_head, (), theirs.messages)
    assert_same_index(tmp_path / "many", tmp_path / "one")
