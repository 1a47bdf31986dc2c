"""Exports without Spark: what a target may be, and what is left there when something fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.decoder import Message
from indexd.config import Config
from indexd.errors import BusyError, CorruptDataError, DiskError, UnsafeStoreError, UsageError
from indexd.spark.export import outputs
from indexd.storage.lock import DirectoryLock
from support.exporting import (
    config_of,
    export_here,
    files_of,
    logged,
    row_of,
    rows_of,
    run_here,
    with_shape,
)
from support.small_log import write_log

COUNT = 1500


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of two segments."""
    found = tmp_path_factory.mktemp("store")
    write_log(found, COUNT)
    return found


@pytest.fixture
def config(store: Path, tmp_path: Path) -> Config:
    return config_of(store, tmp_path / "data")


def test_a_target_that_holds_something_is_refused(config: Config, store: Path, tmp_path: Path) -> None:
    to = tmp_path / "out"
    export_here(config, to)
    before = files_of(to)
    with pytest.raises(UsageError, match="holds an export"):
        export_here(config, to)
    assert files_of(to) == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").touch()
    for mode in ("error", "overwrite", "append"):
        with pytest.raises(UsageError, match=r"letter\.txt"):
            export_here(config, tmp_path / "mine", mode=mode)
    assert files_of(tmp_path / "mine") == ["letter.txt"]
    with pytest.raises(UsageError, match="is a file"):
        export_here(config, tmp_path / "mine/letter.txt")
    with pytest.raises(UnsafeStoreError, match="inside the store"):
        export_here(config, store / "out")
    assert not (store / "out").exists()
    (to / "_manifest.json").write_text("{}")
    with pytest.raises(CorruptDataError, match="no manifest"):
        export_here(config, to, mode="append")


def test_overwrite_replaces_all_of_it(config: Config, tmp_path: Path) -> None:
    to = tmp_path / "out"
    export_here(config, to, shape=with_shape(partition_by=("topic",)))
    export_here(config, to, mode="overwrite", topics=frozenset({"OrderPaid"}))
    assert {row["topic"] for row in rows_of(to)} == {"OrderPaid"}
    assert [path.name for path in to.iterdir() if path.is_dir()] == []
    assert "_SUCCESS" in files_of(to)


def test_append_goes_on_where_the_last_one_ended(store: Path, tmp_path: Path) -> None:
    grown, to = tmp_path / "store/commitlog", tmp_path / "out"
    grown.mkdir(parents=True)
    config = config_of(grown.parent, tmp_path / "data")
    *first, last = sorted((store / "commitlog").iterdir())
    for path in first:
        shutil.copy(path, grown)
    export_here(config, to, mode="append")
    assert export_here(config, to, mode="append").rows == 0
    shutil.copy(last, grown)
    found = export_here(config, to, mode="append")
    assert (found.begin_offset, found.end_offset) == (int(last.name), _end(logged(store)))
    assert rows_of(to) == [_without(row_of(message), "body") for message in logged(store)]
    with pytest.raises(UsageError, match="other columns"):
        export_here(config, to, mode="append", columns=("phyOffset",))
    with pytest.raises(UsageError, match="other columns or partitions"):
        export_here(config, to, mode="append", shape=with_shape(partition_by=("day",)))
    (grown / last.name).unlink()
    with pytest.raises(UnsafeStoreError, match="the log ends at"):
        export_here(config, to, mode="append")


def _end(messages: list[Message]) -> int:
    return messages[-1].phy_offset + messages[-1].size


def _without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


def test_a_task_that_runs_twice_leaves_one_result(store: Path, config: Config, tmp_path: Path) -> None:
    def twice(spark: object, work: Any, items: Any, **_: object) -> Any:
        run_here(spark, work, items[:2])
        return run_here(spark, work, items)

    found = export_here(config, tmp_path / "out", run=twice)
    assert [row["phyOffset"] for row in rows_of(tmp_path / "out")] == [m.phy_offset for m in logged(store)]
    assert found.rows == COUNT
    assert len(files_of(tmp_path / "out")) == found.files + 2


@pytest.mark.parametrize("mode", ["error", "overwrite", "append"])
def test_a_job_that_fails_leaves_what_was_there(config: Config, tmp_path: Path, mode: str) -> None:
    def fails(spark: object, work: Any, items: Any, **_: object) -> Any:
        run_here(spark, work, items[:2])
        raise DiskError("read", Path("segment"), OSError(5, "it broke"))

    to = tmp_path / "out"
    if mode != "error":
        export_here(config, to)
    before = {name: (to / name).read_bytes() for name in files_of(to)}
    with pytest.raises(DiskError, match="it broke"):
        export_here(config, to, mode=mode, run=fails)
    assert {name: (to / name).read_bytes() for name in files_of(to)} == before
    assert to.exists() == (mode != "error")
    assert export_here(config, to, mode="overwrite").rows == COUNT


def test_a_full_disk_in_a_task_is_one_line_and_leaves_nothing(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = outputs.DiskFile.pwrite

    def full(file: outputs.DiskFile, data: Any, position: int) -> None:
        if position + memoryview(data).nbytes > 10_000:
            raise DiskError("write", file.path, OSError(errno.ENOSPC, "No space left on device"))
        pwrite(file, data, position)

    monkeypatch.setattr(outputs.DiskFile, "pwrite", full)
    with pytest.raises(DiskError, match="No space left") as caught:
        export_here(config, tmp_path / "out")
    assert caught.value.is_full
    monkeypatch.undo()
    assert files_of(tmp_path) == []


def test_killed_anywhere_it_can_be_run_again(tmp_path: Path) -> None:
    """Before every step that changes a name, in a copy of this process."""
    store = tmp_path / "store"
    write_log(store, 60)
    config = config_of(store, tmp_path / "data")
    columns = ("phyOffset", "topic")
    wanted = [{name: row_of(message)[name] for name in columns} for message in logged(store)]
    export_here(config, tmp_path / "before", columns=columns)
    for mode in ("error", "overwrite", "append"):
        steps = 0
        while True:
            to = tmp_path / f"{mode}-{steps}"
            if mode != "error":
                shutil.copytree(tmp_path / "before", to)
            if _killed_in_a_fork(config, to, mode, steps):
                break
            had_success = (to / "_SUCCESS").exists()
            if had_success:
                assert rows_of(to) == wanted
            again = "error" if mode == "error" and not (to / "_manifest.json").exists() else "append"
            export_here(config, to, mode=again if mode != "overwrite" else mode, columns=columns)
            assert rows_of(to) == wanted, (mode, steps)
            names = {Path(name).name for name in files_of(to)}
            manifest = json.loads((to / "_manifest.json").read_text())
            held = {name for export in manifest["exports"] for name, _, _ in export["files"]}
            assert names == held | {"_SUCCESS", "_manifest.json"}
            steps += 1
        assert steps > 10


def _killed_in_a_fork(config: Config, to: Path, mode: str, steps: int) -> bool:
    """True when it came to its end before it was killed at the step."""
    pid = os.fork()
    if pid == 0:
        left = steps

        def counted(method: Any) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return method(*args, **kwargs)

            return call

        code = 1
        try:
            for name in ("rename", "unlink", "open_write", "remove_dir", "make_dir"):
                setattr(outputs.OutputDisk, name, counted(getattr(outputs.OutputDisk, name)))
            export_here(config, to, mode=mode, columns=("phyOffset", "topic"))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status in (0, signal.SIGKILL)
    return status == 0


def test_one_export_at_a_time(config: Config, tmp_path: Path) -> None:
    to = tmp_path / "out"
    (to / "_temporary").mkdir(parents=True)
    lock = DirectoryLock(to / "_temporary/lock")
    lock.acquire()
    with pytest.raises(BusyError):
        export_here(config, to)
    lock.release()
    assert export_here(config, to).rows == COUNT


def test_a_target_that_may_not_be_written_is_one_line(config: Config, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="cannot make directory /proc/out"):
        export_here(config, Path("/proc/out"))
