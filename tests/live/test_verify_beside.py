"""``indexd verify`` beside a daemon, after it was killed, and when the disk refused in the middle of a drain."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.reader import LogReader
from indexd.errors import DiskError
from indexd.flush.frontier import write_abort
from indexd.flush.pipeline import Pipeline
from indexd.recovery.open import open_data, reader_options
from indexd.recovery.recover import WholeLog, once
from indexd.storage.disk import Disk, DiskFile
from support.daemon import Daemon, assert_same_index, compile_kernels, indexd, indexd_here
from support.reopened import config_for, reopen, undisturbed
from support.small_log import SIZES, Growing, write_log
from support.verifying import check, kinds


def test_beside_a_daemon_and_after_a_kill(tmp_path: Path) -> None:
    compile_kernels()
    store, data = tmp_path / "store", tmp_path / "data"
    with Growing(store, 5) as growing, Daemon(store, data, *SIZES) as daemon:
        daemon.wait_state(lambda row: row["indexFiles"] >= 3 and row["durableOffset"] > 0)
        for deep_too in (False, True, False, True):
            done = indexd_here("verify", "--json", "--data", data, *(["--deep"] if deep_too else []))
            assert done.returncode == 0, done.stdout
            summary = json.loads(done.stdout)
            assert f"pid {daemon.pid}, is at work" in summary["notes"][0]
            assert summary["entries"] > 0
        daemon.kill()
        done = indexd_here("verify", "--json", "--deep", "--data", data)
        assert done.returncode == 0, done.stdout
        assert "the last stop was unclean" in json.loads(done.stdout)["notes"][0]
        end = growing.stop()
    done = indexd("--recover", "--store", store, "--data", data, *SIZES)
    assert done.returncode == 0, done.stderr
    done = indexd_here("verify", "--json", "--deep", "--data", data)
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["findings"], summary["notes"]) == (0, 0, [])
    assert summary["comparedEntries"] == summary["entries"]
    assert json.loads((data / "frontier").read_bytes())["phyOffset"] == end


def take_all(pipeline: Pipeline, reader: LogReader) -> None:
    for item in WholeLog(reader):
        pipeline.apply([item], 0)


@pytest.mark.parametrize(
    ("call", "folder", "after"),
    [
        ("allocate", "index", 1),
        ("pwrite", "consumequeue", 3),
        ("pwrite", "consumequeue", 20),
        ("truncate", "consumequeue", 9),
        ("pwrite", "sparse", 2),
        ("truncate", "sparse", 2),
        ("truncate", "sparse", 5),
    ],
)
def test_a_daemon_that_waits_for_the_disk_in_the_middle_of_a_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, folder: str, after: int
) -> None:
    calls = 0

    def refuse(do: Any) -> Any:
        def called(self: DiskFile, *args: Any) -> None:
            nonlocal calls
            calls += folder in self.path.parts
            if folder in self.path.parts and calls > after:
                raise DiskError(call, self.path, OSError(errno.ENOSPC, "No space left on device"))
            do(self, *args)

        return called

    write_log(tmp_path / "store", 3000)
    disk, config = Disk(), config_for(tmp_path / "store", tmp_path / "data", sparse_interval=50)
    disk.make_dir(config.store.data)
    with monkeypatch.context() as patch:
        opened = open_data(config, disk, lambda *_: None, unclean=False)
        write_abort(disk, config.store.data / "abort")
        pipeline = opened.pipeline
        opened.reader.options = once(reader_options(config))
        patch.setattr(DiskFile, call, refuse(getattr(DiskFile, call)))
        with pytest.raises(DiskError):
            take_all(pipeline, opened.reader)
    # A stop, say, as soon as the disk does what it is asked for again.
    pipeline.persist(pipeline.mark())
    opened.reader.close()
    pipeline.close()
    for deep_too in (False, True):
        report = check(config.store.data, deep=deep_too)
        assert kinds(report) == {}
    assert report.compared is not None
    assert report.compared.messages < 3000
    # And the next start takes up from there.
    reopen(config, unclean=True)
    assert_same_index(config.store.data, undisturbed(config, tmp_path / "whole"))
