"""A rebuild by tasks makes what the one-process rebuild makes, byte for byte, however log and index are cut."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.format import Corrupt
from indexd.config import Config
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import BusyError, CorruptDataError, DisturbedError, IndexdError, UnsafeStoreError
from indexd.output import Output
from indexd.spark.rebuild.job import MANIFEST, OutputTask, chain
from indexd.spark.rebuild.runs import Run, write_run
from indexd.spark.splits import Split, plan_splits
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import building_of
from indexd.verify import verify
from support import small_log
from support.beside_log import OddMessage, frames, odd_messages, some_messages, write, write_odd
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.fake_broker import Named
from support.goldens import GOLDENS, Golden, unpack
from support.reopened import config_for, reopen
from support.same_index import assert_same_index
from support.small_log import BASE_TIME, messages, write_log
from support.spark_rebuild import (
    SPLIT_SIZE,
    assert_same_data,
    assert_same_rebuild,
    by_one,
    by_tasks,
    failing,
    files_of,
    frontier_of,
    run_here,
)

SEGMENT_SIZE = 16 << 10


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    # Thousands of small files are made here, and no machine fails.
    monkeypatch.setattr(os, "fsync", lambda fd: None)


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
    assert_same_rebuild(config_of(golden, tmp_path / "data"), tmp_path, [20_000])


@pytest.mark.parametrize(
    ("flavour", "hash_slot_num", "index_num"),
    [("3.x", 1, 2), ("4.0", 7, 3), ("4.7", 500, 100), ("5.4", 100, 20_000), ("5.4", 7, 3)],
)
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
    ("count", "queues", "keys"),
    [
        (300, 9, {"consume_queue": "false"}),
        (300, 9, {"sparse": "false"}),
        (300, 9, {"consume_queue": "false", "sparse": "false"}),
        (1500, 1, {"queues_max": 1000, "consume_queue_file_size": 200}),
        (1500, 20, {"queues_max": 1000, "consume_queue_file_size": 20}),
        (1500, 300, {"queues_max": 299, "consume_queue_file_size": 200}),
        (1500, 300, {"queues_max": 100, "consume_queue_file_size": 200}),
        (1500, 300, {"queues_max": 1, "consume_queue_file_size": 20}),
        (1500, 40, {"queues_max": 7, "consume_queue_file_size": 60}),
        (1000, 5, {"sparse_interval": 0}),
        (1000, 5, {"sparse_interval": 1000}),
        (1000, 5, {"sparse_interval": 1 << 20}),
    ],
)
def test_some_outputs_alone_queues_that_are_left_out_and_intervals(
    tmp_path: Path, count: int, queues: int, keys: dict[str, object]
) -> None:
    write_odd(tmp_path / "store", odd_messages(count, queues), SEGMENT_SIZE)
    assert_same_rebuild(odd_config(tmp_path, **keys), tmp_path, [0, 3000])


def test_a_long_split_whose_batches_count_topics_differently(tmp_path: Path) -> None:
    # What is read ahead has a table of topics of its own, so one id is two topics.
    ours = [OddMessage(b"A" if number < 700 else b"B", number % 3, body_size=300) for number in range(1500)]
    ours[0] = OddMessage(b"B")
    write_odd(tmp_path / "store", ours, 1 << 20)
    assert_same_rebuild(odd_config(tmp_path, segment_size=1 << 20, read_bytes=64 << 10), tmp_path, [0])


@pytest.mark.parametrize(("kind", "parts"), [(ConsumeQueueStore, 4), (SparseService, 1)])
def test_what_a_task_makes_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Output[Any]], parts: int
) -> None:
    write_odd(tmp_path / "store", odd_messages(500, 30), SEGMENT_SIZE)
    config = odd_config(tmp_path)
    runs = [write_run(config, tmp_path / "runs", split) for split in plan_splits(Disk(), config)]
    synced: set[Path] = set()
    monkeypatch.setattr(DiskFile, "fsync", lambda file: synced.add(file.path))
    monkeypatch.setattr(Disk, "sync_dir", lambda disk, path: synced.add(path))
    tasks = OutputTask.plan(kind, tmp_path / "attempts", 4)
    for task in tasks:
        task.work(config, [run for run in runs if isinstance(run, Run)])
        assert {task.directory, *task.directory.rglob("*")} <= synced
    assert len({path.name for path in (tmp_path / "attempts").iterdir()}) == len(tasks) == parts


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
        assert_same_rebuild(config, root, [data.draw(st.integers(1, 2048))])


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


def refused(tmp_path: Path, at: str, **keys: object) -> None:
    """Splits of any size end in this error, and leave nothing."""
    for size in (0, 5000):
        with pytest.raises(CorruptDataError, match=at):
            by_tasks(odd_config(tmp_path, **keys), tmp_path / "out", size)
        assert not (tmp_path / "out").exists()


def test_a_corrupt_log_ends_it_or_is_passed_over_as_told(tmp_path: Path) -> None:
    offsets = write_messages(tmp_path / "store", 600)
    broken = [offsets[40], offsets[41], offsets[200], next(one for one in offsets if one >= 3 * SEGMENT_SIZE)]
    for offset in broken:
        damage(tmp_path / "store", offset, bytes(range(1, 41)))
    refused(tmp_path, f"the log is corrupt at offset ({'|'.join(map(str, broken))}) of")
    found = assert_same_rebuild(odd_config(tmp_path, on_corrupt="skip"), tmp_path / "skip", [0, 2000])
    assert found.skipped_bytes > 0


@pytest.mark.parametrize("damage", ["gone", "noise", "zeros"])
def test_a_segment_that_is_missing_or_is_no_log(tmp_path: Path, damage: str) -> None:
    write_messages(tmp_path / "store", 600)
    path = tmp_path / "store/commitlog" / f"{2 * SEGMENT_SIZE:020d}"
    path.unlink()
    if damage != "gone":
        path.write_bytes(random.Random(1).randbytes(SEGMENT_SIZE) if damage == "noise" else bytes(SEGMENT_SIZE))
    refused(tmp_path, "the log|segment")
    found = assert_same_rebuild(odd_config(tmp_path, on_corrupt="skip"), tmp_path / "skip", [0, 3333])
    assert found.skipped_bytes == SEGMENT_SIZE


def test_a_log_that_ends_in_zeros_in_half_a_frame_or_in_bytes_that_are_none(tmp_path: Path) -> None:
    store = tmp_path / "store"
    offsets = write_messages(store, 250)
    config = odd_config(tmp_path)
    last = frames(store, SEGMENT_SIZE)[-1]
    whole = assert_same_rebuild(config, tmp_path / "zeros", [0, 3000])
    assert whole.phy_offset == last.phy_offset + last.size
    damage(store, offsets[-1] + 50, bytes(last.size - 50))
    half = assert_same_rebuild(config, tmp_path / "half", [0, 3000])
    assert half.messages == whole.messages - 1
    damage(store, offsets[-1], bytes(range(1, 100)))
    found = assert_same_rebuild(config, tmp_path / "none", [0, 3000])
    assert found.unreadable is not None
    assert found.unreadable.offset == offsets[-1]


@pytest.fixture
def cut_log(tmp_path: Path) -> tuple[list[int], int, int]:
    """A log that was cut in its last segment and written on from there.

    Where each message began, where it was cut, and where what was written since ends.
    """
    offsets = write_messages(tmp_path / "store", 250)
    inside = [one for one in offsets if one > offsets[-1] // SEGMENT_SIZE * SEGMENT_SIZE]
    at = inside[len(inside) // 4]
    later = [replace(one, store_timestamp=one.store_timestamp + 10_000_000) for one in islice(messages(2), 3)]
    return offsets, at, write(tmp_path / "store", later, SEGMENT_SIZE, at=at)


def test_frames_behind_the_end_of_a_cut_log_end_it_or_are_passed_over_to_and_unproven(
    tmp_path: Path, cut_log: tuple[list[int], int, int]
) -> None:
    offsets, at, end = cut_log
    damage(tmp_path / "store", end, bytes(8))
    behind = [one for one in offsets if one >= end + 8]
    refused(tmp_path, f"the log is corrupt at offset {end} of")
    with pytest.raises(CorruptDataError, match=f"the log is corrupt at offset {end} of"):
        by_one(odd_config(tmp_path), tmp_path / "out")
    found = assert_same_rebuild(odd_config(tmp_path, on_corrupt="skip"), tmp_path / "skip", [0, 3000])
    assert found.messages == sum(one < at for one in offsets) + 3 + len(behind)
    assert found.skipped_bytes == behind[0] - end
    assert found.unproven_bytes == found.phy_offset - behind[0]


@pytest.mark.parametrize("size", [0, 2000])
@pytest.mark.parametrize("kind", ["older", "half a frame", "the clock", "garbage"])
def test_the_broker_is_asked_as_one_process_asks_it(
    tmp_path: Path, cut_log: tuple[list[int], int, int], kind: str, size: int
) -> None:
    store, (_, _, end) = tmp_path / "store", cut_log
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


# --- the job: the chain of its runs, what it leaves when it fails, and what comes after it ---


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_log(tmp_path / "store", 3000)
    return config_for(tmp_path / "store", tmp_path / "data")


@pytest.mark.parametrize("error", [DeprecationWarning("any"), IndexdError("ours"), KeyboardInterrupt()])
def test_a_job_that_fails_anywhere_leaves_nothing_and_is_run_again(
    config: Config, tmp_path: Path, error: BaseException
) -> None:
    out = tmp_path / "out"
    by_one(config, tmp_path / "one")
    by_tasks(config, tmp_path / "whole", SPLIT_SIZE)
    tasks = json.loads((tmp_path / "whole" / MANIFEST).read_bytes())["tasks"]
    for at in (0, tasks // 2, tasks - 1):
        with pytest.raises(type(error)):
            by_tasks(config, out, SPLIT_SIZE, failing(at, error))
        assert not out.exists()
        assert not building_of(out).exists()
    # What one that was killed has left is replaced.
    (building_of(out) / "runs" / "old").mkdir(parents=True)
    (building_of(out) / "index").mkdir()
    (building_of(out) / "index" / "20260101000000000").write_bytes(b"half")
    by_tasks(config, out, SPLIT_SIZE)
    assert_same_data(config, out, tmp_path / "one")
    assert not building_of(out).exists()


def test_one_rebuild_at_a_time(config: Config, tmp_path: Path) -> None:
    building_of(tmp_path / "out").mkdir()
    lock = DirectoryLock(building_of(tmp_path / "out") / "lock")
    lock.acquire()
    with pytest.raises(BusyError, match=f"pid {os.getpid()}"):
        by_tasks(config, tmp_path / "out")
    lock.release()


@pytest.mark.parametrize(
    ("stage", "error", "says"),
    [(1, UnsafeStoreError, "is not there for the driver"), (2, IndexdError, "does not hold what was written")],
)
def test_what_a_task_says_is_held_against_what_is_there(
    config: Config, tmp_path: Path, stage: int, error: type[IndexdError], says: str
) -> None:
    """Executors that see another file system are told apart."""
    stages, out = [], tmp_path / "out"

    def run(work: Callable[[Any], Any], items: Sequence[Any], **more: Any) -> list[Any]:
        found = run_here(work, items, **more)
        stages.append(found)
        if len(stages) == stage:
            path = next(building_of(out).glob("runs/*/topics" if stage == 1 else "attempts/index-*/index"))
            path.unlink()
            path.with_name("index").write_bytes(bytes(100))
        return found

    with pytest.raises(error, match=says):
        by_tasks(config, out, SPLIT_SIZE, run)
    assert not out.exists()


def test_the_daemon_goes_on_from_it_and_verify_finds_it_sound(config: Config, tmp_path: Path) -> None:
    data = tmp_path / "data"
    by_tasks(config, data, SPLIT_SIZE)
    assert not verify(config, Disk(), deep=True, on_progress=lambda *_: None).findings.counts
    end = frontier_of(data).phy_offset
    with CommitLogWriter(tmp_path / "store/commitlog", small_log.SEGMENT_SIZE, start_offset=end) as writer:
        for spec in islice(messages(3), 900):
            writer.append(replace(spec, store_timestamp=spec.store_timestamp + 10**7))
    reopened = reopen(config)
    assert (reopened.resumed_at, reopened.resumed_messages, reopened.messages) == (end, 3000, 3900)
    by_one(config, tmp_path / "one")
    assert files_of(data) == files_of(tmp_path / "one")
    assert not verify(config, Disk(), deep=True, on_progress=lambda *_: None).findings.counts


def test_an_empty_out_is_replaced_and_nothing_of_the_job_is_left(config: Config, tmp_path: Path) -> None:
    out = tmp_path / "deep/er/out"
    out.mkdir(parents=True)
    by_tasks(config, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint", "consumequeue", "frontier", "index", "manifest.json", "sparse"
    ]  # fmt: skip
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def run_at(begin: int, end: int, next_offset: int | None = None, **keys: Any) -> Run:
    return Run(Split(begin, end), Path("x"), next_offset=end if next_offset is None else next_offset, **keys)


def chained(runs: Sequence[Run | CorruptDataError], *behind: Split) -> list[Run]:
    return chain([*(run.split for run in runs if isinstance(run, Run)), *behind], runs, 0)


def test_runs_that_chain_up_to_the_logs_end() -> None:
    whole = [run_at(0, 100), run_at(100, 150), run_at(150, 200), run_at(200, 300, 260, ends_log=True)]
    broken, behind = CorruptDataError("at 300"), Split(300, 400)
    assert chained([*whole, broken], behind) == whole
    cut = run_at(200, 300, 260, unreadable=Corrupt(260, "why"))
    assert chained([*whole[:3], cut, broken], behind) == [*whole[:3], cut]
    # A log that has changed meanwhile.
    for runs in ([run_at(100, 200)], [run_at(0, 100, 110), run_at(100, 200)]):
        with pytest.raises(DisturbedError, match="changed while it was read"):
            chained(runs)
