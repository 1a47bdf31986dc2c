"""Stage two of ConsumeQueues makes what the one-process rebuild makes, wherever the log was split."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.reader import Skipped
from indexd.config import Config
from indexd.consumequeue.store import ConsumeQueueStore, QueueCounters
from indexd.errors import DisturbedError, IndexdError
from indexd.spark.rebuild import stage_two
from indexd.spark.rebuild.stage_two import QueuesResult, QueuesTask
from indexd.spark.splits import Split, SplitReader, plan_splits
from indexd.storage.disk import Disk, DiskFile
from support.goldens import GOLDENS, unpack
from support.odd_log import OddMessage, odd_messages, some_messages, write_odd
from support.reopened import config_for
from support.spark_stages import OneProcess, assert_same, make_runs, one_process, splits_at

SEGMENT_SIZE = 64 << 10


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("goldens")


def odd_store(root: Path, count: int, queues: int, **keys: object) -> tuple[Config, list[int]]:
    """A log in segments of 64 KiB, and where its messages begin."""
    offsets = write_odd(root / "store", odd_messages(count, queues), SEGMENT_SIZE)
    keys = {"segment_size": SEGMENT_SIZE, "consume_queue_file_size": 200} | keys
    return config_for(root / "store", root / "data", **keys), offsets


def check(config: Config, cuts: list[int], root: Path, expected: OneProcess | None = None) -> None:
    expected = expected or one_process(config, root / "one")
    assert_same(config, make_runs(config, splits_at(config, cuts), root / "runs"), root / "out", expected)


@pytest.mark.parametrize("size", [None, 40_000])
@pytest.mark.parametrize("name", GOLDENS)
def test_the_stores_that_rocketmq_wrote(goldens: Path, tmp_path: Path, name: str, size: int | None) -> None:
    golden = unpack(name, goldens)
    config = config_for(
        golden.root,
        tmp_path / "data",
        segment_size=golden.segment_size,
        consume_queue_file_size=golden.queue_file_size,
        flavour=golden.flavour,
    )
    runs = make_runs(config, plan_splits(Disk(), config, size=size), tmp_path / "runs")
    assert size is None or len(runs) > len(golden.segments())
    found = assert_same(config, runs, tmp_path / "out", one_process(config, tmp_path / "one"))
    wanted = {(row["topic"], row["queueId"]) for row in golden.messages()}
    assert {(mark.topic, mark.queue_id) for mark in found.result.mark.queues} <= wanted


@pytest.mark.parametrize(
    ("queues", "queues_max", "file_size"),
    [(1, 1000, 200), (20, 1000, 20), (300, 1000, 6000), (300, 299, 200), (300, 100, 200), (300, 1, 20), (40, 7, 60)],
)
def test_queues_of_any_number_and_those_that_are_left_out(
    tmp_path: Path, queues: int, queues_max: int, file_size: int
) -> None:
    config, offsets = odd_store(tmp_path, 3000, queues, queues_max=queues_max, consume_queue_file_size=file_size)
    check(config, offsets[1::700], tmp_path)


def test_exactly_as_many_queues_as_there_may_be(tmp_path: Path) -> None:
    queues = [(topic, number) for topic in (b"A", b"B") for number in range(3)]
    messages = [OddMessage(*queue) for queue in queues * 3]
    offsets = write_odd(tmp_path / "store", messages, SEGMENT_SIZE)
    for queues_max in range(1, 8):
        root = tmp_path / str(queues_max)
        config = config_for(tmp_path / "store", root / "data", segment_size=SEGMENT_SIZE, queues_max=queues_max)
        check(config, offsets[1:-1:5], root)


def test_every_place_of_a_small_log_as_a_split(tmp_path: Path) -> None:
    config, offsets = odd_store(tmp_path, 40, 9, queues_max=7, consume_queue_file_size=60)
    expected = one_process(config, tmp_path / "one")
    for cut in offsets:
        check(config, [cut], tmp_path / str(cut), expected)
    check(config, offsets, tmp_path / "all", expected)


@settings(max_examples=30)
@given(some_messages(), st.data())
def test_any_log_split_anywhere(messages: list[OddMessage], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        offsets = write_odd(root / "store", messages, 2048)
        config = config_for(
            root / "store",
            root / "data",
            segment_size=2048,
            consume_queue_file_size=20 * data.draw(st.integers(1, 4)),
            queues_max=data.draw(st.integers(1, 6)),
            sparse_interval=data.draw(st.sampled_from([0, 100, 300])),
        )
        check(config, data.draw(st.lists(st.sampled_from(offsets))), root)


@pytest.mark.parametrize("removed", [1, 3])
def test_a_log_whose_beginning_has_expired(tmp_path: Path, removed: int) -> None:
    config, offsets = odd_store(tmp_path, 1500, 30)
    for path in sorted((tmp_path / "store/commitlog").iterdir())[:removed]:
        path.unlink()
    check(config, [cut for cut in offsets[::200] if cut >= removed * SEGMENT_SIZE], tmp_path)


@pytest.mark.parametrize("missing", [False, True])
def test_stretches_that_are_passed_over(tmp_path: Path, missing: bool) -> None:
    config, offsets = odd_store(tmp_path, 1500, 30, on_corrupt="skip")
    log = tmp_path / "store/commitlog"
    broken = [offsets[100], offsets[101], offsets[700], offsets[900]]
    for offset in broken:
        with (log / f"{offset // SEGMENT_SIZE * SEGMENT_SIZE:020d}").open("r+b") as file:
            file.seek(offset % SEGMENT_SIZE)
            file.write(bytes(range(1, 41)))
    if missing:
        (log / f"{2 * SEGMENT_SIZE:020d}").unlink()
    cuts = [cut for cut in offsets[1::150] if cut not in broken and not (missing and cut // SEGMENT_SIZE == 2)]
    expected = one_process(config, tmp_path / "one")
    assert expected.rebuilt.skipped_bytes > (SEGMENT_SIZE if missing else 0)
    check(config, cuts, tmp_path, expected)


def test_every_count_is_that_of_one_store(tmp_path: Path) -> None:
    config, offsets = odd_store(tmp_path, 2000, 60, queues_max=40)
    splits = splits_at(config, offsets[::300])
    store = ConsumeQueueStore(Disk(), tmp_path / "q", 200, 40)
    for split in splits:
        for found in SplitReader(Disk(), config, split):
            assert not isinstance(found, Skipped)
            store.build(found)
    store.flush()
    store.close()
    runs = make_runs(config, splits, tmp_path / "runs")
    found = assert_same(config, runs, tmp_path / "out", one_process(config, tmp_path / "one"))
    counters = store.counters
    assert found.result.counters == counters
    seen = (counters.units, counters.repeats, counters.gaps, counters.batch_messages, counters.nameless)
    assert min(*seen, counters.left_out) > 0


def test_a_long_split_whose_batches_count_topics_differently(tmp_path: Path) -> None:
    # What is read ahead has a table of topics of its own, so one id is two topics.
    messages = [OddMessage(b"A" if number < 700 else b"B", number % 3, body_size=300) for number in range(1500)]
    messages[0] = OddMessage(b"B")
    write_odd(tmp_path / "store", messages, 1 << 20)
    config = config_for(tmp_path / "store", tmp_path / "data", segment_size=1 << 20, read_bytes=64 << 10)
    (split,) = splits_at(config, [])
    tables = {found.topics for found in SplitReader(Disk(), config, split) if not isinstance(found, Skipped)}
    assert {tuple(map(table.raw_name, range(2))) for table in tables} == {(b"A", b"B"), (b"B", b"A")}
    check(config, [], tmp_path)


def test_a_log_without_messages(tmp_path: Path) -> None:
    (tmp_path / "store/commitlog").mkdir(parents=True)
    config = config_for(tmp_path / "store", tmp_path / "data")
    found = assert_same(config, [], tmp_path / "out", one_process(config, tmp_path / "one"))
    assert found.result == QueuesResult(found.result.mark, QueueCounters())


def test_small_logs_take_few_tasks_and_big_buckets_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, offsets = odd_store(tmp_path, 1000, 100)
    runs = make_runs(config, splits_at(config, offsets[::100]), tmp_path / "runs")
    (task,) = QueuesTask.plan(runs, config, tmp_path)
    monkeypatch.setattr(stage_two, "_ROWS_PER_TASK", 1)
    tasks = QueuesTask.plan(runs, config, tmp_path)
    assert [one.buckets for one in tasks] == [(bucket,) for bucket in task.buckets]
    assert sum(one.rows for one in tasks) == task.rows
    assert len({one.directory for one in tasks}) == len(tasks) > 10
    assert_same(config, runs, tmp_path / "out", one_process(config, tmp_path / "one"))


def test_all_that_a_task_makes_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, offsets = odd_store(tmp_path, 500, 30)
    runs = make_runs(config, splits_at(config, offsets[::100]), tmp_path / "runs")
    synced: set[Path] = set()
    sync_file, sync_dir = DiskFile.fsync, Disk.sync_dir
    monkeypatch.setattr(DiskFile, "fsync", lambda file: (synced.add(file.path), sync_file(file)))
    monkeypatch.setattr(Disk, "sync_dir", lambda disk, path: (synced.add(path), sync_dir(disk, path)))
    (task,) = QueuesTask.plan(runs, config, tmp_path / "attempts")
    built = task.work(runs)
    assert {task.directory, *task.directory.rglob("*")} <= synced
    synced.clear()
    QueuesTask.commit(Disk(), [built], tmp_path / "out")
    assert {path.parent.parent for path in (tmp_path / "out").rglob("*") if path.is_file()} <= synced
    assert {tmp_path, tmp_path / "out"} <= synced


def test_what_was_not_planned_is_refused(tmp_path: Path) -> None:
    config, offsets = odd_store(tmp_path, 500, 30)
    runs = make_runs(config, splits_at(config, offsets[::100]), tmp_path / "runs")
    tasks = QueuesTask.plan(runs, config, tmp_path / "attempts")
    built = [task.work(runs) for task in tasks]
    done = built[0]
    less = replace(done.counters, messages=done.counters.messages - 1)
    for wrong in (replace(done, marks=done.marks[1:]), replace(done, counters=less)):
        with pytest.raises(IndexdError, match=r"holds \d+ queues of \d+ rows, planned were"):
            QueuesTask.collect(runs, tasks, [wrong, *built[1:]], config)
    mark = done.marks[0]
    other = replace(done, marks=(mark._replace(topic="Other"), *done.marks[1:]))
    with pytest.raises(IndexdError, match="that the runs begin with"):
        QueuesTask.collect(runs, tasks, [other, *built[1:]], config)


def test_a_stretch_that_expired_under_a_task_ends_it(tmp_path: Path) -> None:
    config, _ = odd_store(tmp_path, 50, 3)
    (run,) = make_runs(config, [Split(0, SEGMENT_SIZE)], tmp_path / "runs")
    expired = replace(run, skipped=(Skipped(0, 100, "the log begins behind it", is_expired=True),))
    with pytest.raises(DisturbedError, match="the log up to 100 expired"):
        QueuesTask.plan([expired], config, tmp_path)
