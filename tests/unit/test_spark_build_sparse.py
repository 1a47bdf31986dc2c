"""Stage two of sparse indexes makes what the one-process rebuild makes, wherever the log was split."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.config import Config
from indexd.errors import IndexdError
from indexd.spark.rebuild import stage_two
from indexd.spark.rebuild.runs import Run
from indexd.spark.rebuild.stage_two import SparseTask
from indexd.spark.splits import Split
from indexd.sparse.format import SparseMark
from indexd.storage.disk import Disk, DiskFile
from support.odd_log import OddMessage, odd_messages, some_messages, write_odd
from support.reopened import config_for
from support.spark_stages import assert_same, make_runs, one_process, splits_at

SEGMENT_SIZE = 64 << 10


def store_of(root: Path, messages: list[OddMessage], interval: int, **keys: object) -> tuple[Config, list[int]]:
    """A log in segments of 64 KiB, and where its messages begin."""
    offsets = write_odd(root / "store", messages, SEGMENT_SIZE)
    keys = {"segment_size": SEGMENT_SIZE, "sparse_interval": interval} | keys
    return config_for(root / "store", root / "data", **keys), offsets


def runs_of(config: Config, cuts: list[int], root: Path) -> list[Run]:
    return make_runs(config, splits_at(config, cuts), root / "runs")


@pytest.mark.parametrize("per_task", [1, 500, 1 << 20])
@pytest.mark.parametrize("interval", [0, 1000, 4096, 1 << 20])
def test_segments_built_apart_are_those_built_in_one_go(
    tmp_path: Path, interval: int, per_task: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_two, "_MESSAGES_PER_TASK", per_task)
    config, offsets = store_of(tmp_path, odd_messages(2000, 5), interval)
    runs = runs_of(config, offsets[::150], tmp_path)
    expected = one_process(config, tmp_path / "one")
    found = assert_same(config, runs, tmp_path / "out", expected)
    assert len(found.mark.segments) > 4
    assert found.mark.active is not None
    tasks = SparseTask.plan(runs, config, tmp_path)
    assert len(tasks) == {1: len(found.mark.segments), 1 << 20: 1}.get(per_task, len(tasks))
    assert [task.grows for task in tasks] == [False] * (len(tasks) - 1) + [True]


def test_every_place_of_a_small_log_as_a_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_two, "_MESSAGES_PER_TASK", 1)
    messages = [replace(message, body_size=2000) for message in odd_messages(50, 3)]
    config, offsets = store_of(tmp_path, messages, 5000)
    expected = one_process(config, tmp_path / "one")
    for cut in offsets:
        root = tmp_path / str(cut)
        assert_same(config, runs_of(config, [cut], root), root / "out", expected)


@settings(max_examples=30)
@given(some_messages(30), st.data())
def test_any_log_split_anywhere(messages: list[OddMessage], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_two, "_MESSAGES_PER_TASK", data.draw(st.integers(1, 12)))
        root = Path(name)
        offsets = write_odd(root / "store", messages, 2048)
        interval = data.draw(st.sampled_from([0, 100, 300, 5000]))
        config = config_for(root / "store", root / "data", segment_size=2048, sparse_interval=interval)
        cuts = data.draw(st.lists(st.sampled_from(offsets)))
        assert_same(config, runs_of(config, cuts, root), root / "out", one_process(config, root / "one"))


def test_the_newest_pair_is_that_of_the_last_segment_with_messages(tmp_path: Path) -> None:
    # The broker has made the next segment ahead, and the log ends exactly with a blank record.
    config, offsets = store_of(tmp_path, odd_messages(1000, 5), 1000)
    end = next(at for at, offset in enumerate(offsets) if offset >= SEGMENT_SIZE)
    for path in sorted((tmp_path / "store/commitlog").iterdir())[1:]:
        path.write_bytes(bytes(SEGMENT_SIZE))
    runs = make_runs(config, [Split(0, offsets[50]), Split(offsets[50], SEGMENT_SIZE)], tmp_path / "runs")
    found = assert_same(config, runs, tmp_path / "out", one_process(config, tmp_path / "one"))
    assert [segment.messages for segment in found.mark.segments] == [end]
    assert found.mark.phy_offset < SEGMENT_SIZE


@pytest.mark.parametrize("number", [0, 2, -1])
def test_a_segment_of_which_nothing_can_be_read(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_two, "_MESSAGES_PER_TASK", 1)
    config, offsets = store_of(tmp_path, odd_messages(1500, 5), 1000, on_corrupt="skip")
    # Of the newest one nobody can say that it is a segment at all: there the log ends.
    path = sorted((tmp_path / "store/commitlog").iterdir())[number]
    path.write_bytes(bytes(range(1, 129)) * (SEGMENT_SIZE // 128))
    cuts = [cut for cut in offsets[1::150] if cut // SEGMENT_SIZE != int(path.name) // SEGMENT_SIZE]
    expected = one_process(config, tmp_path / "one")
    assert expected.rebuilt.skipped_bytes == (SEGMENT_SIZE if number >= 0 else 0)
    assert_same(config, runs_of(config, cuts, tmp_path), tmp_path / "out", expected)


def test_a_log_without_messages(tmp_path: Path) -> None:
    config = config_for(tmp_path / "store", tmp_path / "data", sparse_interval=7)
    assert SparseTask.plan([], config, tmp_path) == []
    assert SparseTask.collect([], [], config) == SparseMark(7)


def test_all_that_a_task_makes_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, offsets = store_of(tmp_path, odd_messages(1000, 5), 1000)
    runs = runs_of(config, offsets[::100], tmp_path)
    synced: set[Path] = set()
    sync_file, sync_dir = DiskFile.fsync, Disk.sync_dir
    monkeypatch.setattr(DiskFile, "fsync", lambda file: (synced.add(file.path), sync_file(file)))
    monkeypatch.setattr(Disk, "sync_dir", lambda disk, path: (synced.add(path), sync_dir(disk, path)))
    (task,) = SparseTask.plan(runs, config, tmp_path / "attempts")
    built = task.work(runs)
    assert {task.directory, *task.directory.iterdir()} <= synced
    synced.clear()
    SparseTask.commit(Disk(), [built], tmp_path / "out")
    assert {tmp_path, tmp_path / "out"} <= synced


def test_what_was_not_planned_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_two, "_MESSAGES_PER_TASK", 1)
    config, offsets = store_of(tmp_path, odd_messages(1000, 5), 1000)
    runs = runs_of(config, offsets[::100], tmp_path)
    tasks = SparseTask.plan(runs, config, tmp_path / "attempts")
    built = [task.work(runs) for task in tasks]
    first = built[0].segments[0]
    fewer = replace(built[0], segments=(first._replace(messages=first.messages - 1),))
    with pytest.raises(IndexdError, match="planned were"):
        SparseTask.collect(tasks, [fewer, *built[1:]], config)
    with pytest.raises(IndexdError, match="planned were"):
        SparseTask.collect(tasks, [built[-1], *built[1:]], config)
    with pytest.raises(IndexdError, match="out of order or twice"):
        SparseTask.collect([tasks[0], *tasks], [built[0], *built], config)
