"""A rebuild by tasks as a job: the chain of its runs, what it leaves when it fails, and what comes after it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.format import Corrupt
from indexd.config import Config
from indexd.errors import BusyError, CorruptDataError, DisturbedError, IndexdError, UnsafeStoreError
from indexd.spark.rebuild.job import MANIFEST, Unreadable, chain
from indexd.spark.rebuild.runs import Run
from indexd.spark.splits import Split
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import building_of
from indexd.verify import verify
from support.commitlog_writer import CommitLogWriter
from support.reopened import config_for, reopen
from support.small_log import SEGMENT_SIZE, messages, write_log
from support.spark_rebuild import (
    SPLIT_SIZE,
    assert_same_data,
    by_one,
    by_tasks,
    failing,
    files_of,
    frontier_of,
    run_here,
)

Work = Callable[[Any], Any]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write_log(tmp_path / "store", 3000)
    return config_for(tmp_path / "store", tmp_path / "data")


@pytest.fixture
def one(config: Config, tmp_path: Path) -> Path:
    """What one process makes of the log."""
    by_one(config, tmp_path / "one")
    return tmp_path / "one"


def before(stage: int, act: Callable[[list[Any]], None]) -> Callable[..., list[Any]]:
    """Does something before the tasks of a stage run, which is given the results of the stage before."""
    stages: list[list[Any]] = []

    def run(work: Work, items: Sequence[Any], **more: Any) -> list[Any]:
        if len(stages) == stage:
            act(stages[-1] if stages else [])
        stages.append(run_here(work, items, **more))
        return stages[-1]

    return run


@pytest.mark.parametrize("error", [DeprecationWarning("any"), IndexdError("ours"), KeyboardInterrupt()])
def test_a_job_that_fails_anywhere_leaves_nothing_and_is_run_again(
    config: Config, one: Path, tmp_path: Path, error: BaseException
) -> None:
    out = tmp_path / "out"
    by_tasks(config, tmp_path / "whole", SPLIT_SIZE)
    tasks = json.loads((tmp_path / "whole" / MANIFEST).read_bytes())["tasks"]
    for at in (0, 1, tasks // 2, tasks - 3, tasks - 1):
        with pytest.raises(type(error)):
            by_tasks(config, out, SPLIT_SIZE, failing(at, error))
        assert not out.exists()
        assert not building_of(out).exists()
    # What one that was killed has left is replaced.
    (building_of(out) / "runs" / "old").mkdir(parents=True)
    (building_of(out) / "index").mkdir()
    (building_of(out) / "index" / "20260101000000000").write_bytes(b"half")
    by_tasks(config, out, SPLIT_SIZE)
    assert_same_data(config, out, one)
    assert not building_of(out).exists()


def test_a_second_rebuild_into_the_same_directory_waits_for_none(config: Config, tmp_path: Path) -> None:
    left = building_of(tmp_path / "out")
    left.mkdir()
    (left / "runs").mkdir()
    lock = DirectoryLock(left / "lock")
    lock.acquire()
    with pytest.raises(BusyError, match=f"pid {os.getpid()}"):
        by_tasks(config, tmp_path / "out")
    assert (left / "runs").exists()
    lock.release()
    by_tasks(config, tmp_path / "out")


def test_executors_that_see_another_file_system_are_told_apart(config: Config, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for content in (None, b"another"):

        def hide(_: list[Any], content: bytes | None = content) -> None:
            (building_of(out) / "job").unlink()
            if content is not None:
                (building_of(out) / "job").write_bytes(content)

        with pytest.raises(UnsafeStoreError, match="is not what the driver sees") as error:
            by_tasks(config, out, SPLIT_SIZE, before(0, hide))
        assert "share" in error.value.line()

    def remove(runs: list[Run]) -> None:
        (runs[0].path / "topics").unlink()

    def run(work: Work, items: Sequence[Any], **more: Any) -> list[Any]:
        found = run_here(work, items, **more)
        remove(found)
        return found

    with pytest.raises(UnsafeStoreError, match="is not there for the driver"):
        by_tasks(config, out, SPLIT_SIZE, run)
    assert not out.exists()


def test_what_a_task_says_is_held_against_what_is_there(config: Config, tmp_path: Path) -> None:
    def cut(directory: Path) -> None:
        os.truncate(next(directory.glob("index-*/index")), 100)

    def run(work: Work, items: Sequence[Any], **more: Any) -> list[Any]:
        found = run_here(work, items, **more)
        if not isinstance(found[0], Run):
            cut(building_of(tmp_path / "out") / "attempts")
        return found

    with pytest.raises(IndexdError, match="does not hold what was written"):
        by_tasks(config, tmp_path / "out", SPLIT_SIZE, run)
    assert not (tmp_path / "out").exists()


def test_the_daemon_goes_on_from_it_and_verify_finds_it_sound(config: Config, tmp_path: Path) -> None:
    data = tmp_path / "data"
    by_tasks(config, data, SPLIT_SIZE)
    report = verify(config, Disk(), deep=True, on_progress=lambda *_: None)
    assert not report.findings.counts
    end = frontier_of(data).phy_offset
    with CommitLogWriter(tmp_path / "store/commitlog", SEGMENT_SIZE, start_offset=end) as writer:
        for spec in islice(messages(3), 900):
            writer.append(replace(spec, store_timestamp=spec.store_timestamp + 10**7))
    reopened = reopen(config)
    assert (reopened.resumed_at, reopened.resumed_messages) == (end, 3000)
    assert reopened.messages == 3900
    by_one(config, tmp_path / "one")
    assert files_of(data) == files_of(tmp_path / "one")
    report = verify(config, Disk(), deep=True, on_progress=lambda *_: None)
    assert not report.findings.counts


def test_an_empty_out_is_replaced_and_nothing_of_the_job_is_left(config: Config, one: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep/er/out"
    out.mkdir(parents=True)
    started = time.time()
    by_tasks(config, out)
    assert_same_data(config, out, one)
    assert sorted(path.name for path in out.iterdir()) == [
        "checkpoint", "consumequeue", "frontier", "index", "manifest.json", "sparse"
    ]  # fmt: skip
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    names = [path.name for path in sorted((out / "index").iterdir())]
    assert names[0] >= time.strftime("%Y%m%d%H%M%S", time.localtime(started))


def run_at(begin: int, end: int, next_offset: int | None = None, **keys: Any) -> Run:
    return Run(Split(begin, end), Path("x"), next_offset=end if next_offset is None else next_offset, **keys)


def test_runs_that_chain_up_to_the_logs_end() -> None:
    whole = [run_at(0, 100), run_at(100, 150), run_at(150, 200), run_at(200, 300, 260, ends_log=True)]
    assert chain(whole, 0) == whole
    assert chain([], 0) == []
    unreadable = Unreadable(Split(300, 400), CorruptDataError("at 300"))
    assert chain([*whole, unreadable], 0) == whole
    cut = run_at(200, 300, 260, unreadable=Corrupt(260, "why"))
    assert chain([*whole[:3], cut, unreadable], 0) == [*whole[:3], cut]
    with pytest.raises(CorruptDataError, match="at 300"):
        chain([*whole[:3], run_at(200, 300), unreadable], 0)


@pytest.mark.parametrize("runs", [[run_at(100, 200)], [run_at(0, 100, 110), run_at(100, 200)]])
def test_runs_that_do_not_chain_are_of_a_log_that_has_changed(runs: list[Run]) -> None:
    with pytest.raises(DisturbedError, match="changed while it was read"):
        chain(runs, 0)
