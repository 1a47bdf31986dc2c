"""A rebuild by tasks as a job: what it leaves when it fails, what a second one takes over, and what comes after it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from indexd.config import Config
from indexd.errors import BusyError, CorruptDataError, IndexdError, UnsafeStoreError, UsageError
from indexd.spark.rebuild.runs import Run
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import building_of
from indexd.verify import verify
from support.commitlog_writer import CommitLogWriter
from support.reopened import config_for, reopen
from support.small_log import SEGMENT_SIZE, messages, write_log
from support.spark_rebuild import SPLIT_SIZE, assert_same_data, by_one, by_tasks, fail, files_of, frontier_of, run_here

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
def test_a_job_that_fails_anywhere_is_run_again_or_resumed(
    config: Config, one: Path, tmp_path: Path, error: BaseException
) -> None:
    tasks = by_tasks(config, tmp_path / "whole", SPLIT_SIZE).tasks
    splits = len(fail(config, tmp_path / "probe", tasks - 1, error))
    assert tasks - splits >= 3
    for at in (0, 1, splits - 1, splits, splits + 1, tasks - 1):
        out = tmp_path / f"out-{at}"
        runs = fail(config, out, at, error)
        assert len(runs) == min(at, splits)
        found = by_tasks(config, out, SPLIT_SIZE, resume=at % 2 == 0)
        # That of the log's end is never taken over: the log may have grown.
        assert found.resumed == (min(at, splits - 1) if at % 2 == 0 else 0)
        assert_same_data(config, out, one)
        assert not building_of(out).exists()


def test_attempts_that_are_made_twice_do_no_harm(config: Config, one: Path, tmp_path: Path) -> None:
    def twice(work: Work, items: Sequence[Any], **more: Any) -> list[Any]:
        first = run_here(work, items[1::2], **more)
        return [*run_here(work, items[:-1], **more), first[-1] if len(items) % 2 == 0 else work(items[-1])]

    by_tasks(config, tmp_path / "out", SPLIT_SIZE, twice)
    assert_same_data(config, tmp_path / "out", one)


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


def test_targets_that_are_refused(config: Config, one: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not empty"):
        by_tasks(config, one)
    with pytest.raises(UnsafeStoreError, match="inside the store"):
        by_tasks(config, tmp_path / "store/out")
    assert files_of(one)
    assert not building_of(one).exists()


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
        runs[0].path.unlink()

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

    def damaged(runs: list[Run]) -> None:
        os.truncate(runs[3].path, runs[3].size - 1)
        with runs[3].path.open("ab") as file:
            file.write(b"?")

    with pytest.raises(CorruptDataError, match=r"\.run is no run"):
        by_tasks(config, tmp_path / "out", SPLIT_SIZE, before(1, damaged))


def test_progress_only_grows_and_ends_at_all_bytes(config: Config, tmp_path: Path) -> None:
    from indexd.spark.rebuild.job import rebuild

    told: list[tuple[int, int]] = []
    rebuild(config, Disk(), tmp_path / "out", run_here, lambda *now: told.append(now), slots=2)
    assert told == sorted(told)
    assert len(told) > 3
    total = len(list((tmp_path / "store/commitlog").iterdir())) * SEGMENT_SIZE
    assert told[-1] == (total, total)


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


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x40]))


def test_a_run_that_is_not_whole_is_made_again(config: Config, one: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs = fail(config, out, 8, IndexdError("x"))
    for path, place in zip(runs[:4], (9, 0.5, -60, -1), strict=True):
        size = path.stat().st_size
        flip(path, int(place * size) if isinstance(place, float) else place % size)
    os.truncate(runs[4], 100)
    runs[5].write_bytes(b"")
    runs[6].with_name("0-1.xyz.run").write_bytes(b"no run")
    assert by_tasks(config, out, SPLIT_SIZE, resume=True).resumed == 2
    assert_same_data(config, out, one)


def test_runs_of_another_configuration_or_another_log_are_not_taken_over(config: Config, tmp_path: Path) -> None:
    root = tmp_path
    other = {"flavour": "3.x", "message_delay_level": "1s 2s", "sparse": "false", "verify_crc": "true"}
    for key, value in other.items():
        assert fail(config, root / key, 5, IndexdError("x"))
        changed = config_for(root / "store", root / "data", **{key: value})
        assert by_tasks(changed, root / key, SPLIT_SIZE, resume=True).resumed == 0, key
    assert fail(config, root / "size", 5, IndexdError("x"))
    assert by_tasks(config, root / "size", SPLIT_SIZE // 2, resume=True).resumed == 0
    runs = fail(config, root / "log", 9, IndexdError("x"))
    # Two segments are written anew: whatever was built from them is no longer true.
    log = root / "store/commitlog"
    for path in sorted(log.iterdir())[1:]:
        path.unlink()
    with CommitLogWriter(log, SEGMENT_SIZE, start_offset=SEGMENT_SIZE) as writer:
        for spec in islice(messages(7), 1500):
            writer.append(replace(spec, store_timestamp=spec.store_timestamp + 10**7))
    found = by_tasks(config, root / "log", SPLIT_SIZE, resume=True)
    assert 0 < found.resumed < len(runs)
    by_one(config, root / "anew")
    assert_same_data(config, root / "log", root / "anew")


def test_what_was_read_before_a_corrupt_place_is_taken_over_by_one_that_may_skip_it(
    config: Config, tmp_path: Path
) -> None:
    with (tmp_path / "store/commitlog" / f"{SEGMENT_SIZE:020d}").open("r+b") as file:
        file.seek(1000)
        file.write(bytes(range(1, 200)))
    with pytest.raises(CorruptDataError) as expected:
        by_one(config, tmp_path / "one")
    with pytest.raises(CorruptDataError) as error:
        by_tasks(config, tmp_path / "out", SPLIT_SIZE)
    assert error.value.line() == f"{expected.value.line()}; --resume goes on with what is finished"
    skipping = config_for(tmp_path / "store", tmp_path / "data", on_corrupt="skip")
    found = by_tasks(skipping, tmp_path / "out", SPLIT_SIZE, resume=True)
    assert found.resumed > 5
    by_one(skipping, tmp_path / "skipped")
    assert_same_data(config, tmp_path / "out", tmp_path / "skipped")
