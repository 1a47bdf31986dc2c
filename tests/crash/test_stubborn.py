"""What a hostile user tried and once got away with, each a plain test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from indexd.flush.frontier import read_frontier, write_frontier
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from support.daemon import Daemon, assert_same_index, index_files, indexd
from support.goldens import Golden, unpack


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    return unpack("rocketmq-5.4-clean", tmp_path / "golden")


def flags(golden: Golden) -> tuple[str, ...]:
    sizes = (golden.segment_size, golden.hash_slot_num, golden.index_num)
    names = ("--segment-size", "--hash-slot-num", "--index-num")
    return ("--store", str(golden.root), *(word for pair in zip(names, map(str, sizes), strict=True) for word in pair))


def built(golden: Golden, out: Path) -> Path:
    assert indexd("rebuild", *flags(golden), "--out", str(out)).returncode == 0
    return out


def test_nothing_is_made_inside_the_store(golden: Golden) -> None:
    before = sorted(str(path) for path in golden.root.rglob("*"))
    for words in (
        ("rebuild", *flags(golden), "--out", str(golden.root / "x")),
        ("run", *flags(golden), "--data", str(golden.root / "commitlog" / "x")),
        ("demo", *flags(golden), "--work", str(golden.root / "x")),
    ):
        done = indexd(*words)
        assert done.returncode == 3
        assert "inside the store" in done.stderr
        assert done.stderr.count("\n") == 1
    assert sorted(str(path) for path in golden.root.rglob("*")) == before


def test_a_stop_is_heard_when_the_log_lines_go_nowhere(golden: Golden, tmp_path: Path) -> None:
    data = built(golden, tmp_path / "data")
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "indexd", "run", *flags(golden), "--data", str(data)]
    process = subprocess.Popen(command, stderr=writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as lines:
            while b"running" not in lines.readline():
                pass
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
    assert not DataFiles(data).abort.exists()


def test_a_full_log_disk_does_not_stop_the_index(golden: Golden, tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [sys.executable, "-m", "indexd", "--recover", *flags(golden), "--data", str(data)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stderr=full, stdout=subprocess.DEVNULL, timeout=120, check=False)
    assert done.returncode == 0
    assert len(index_files(data)) == len(golden.index_files())


def test_a_full_index_file_that_was_wiped_is_no_empty_answer(golden: Golden, tmp_path: Path) -> None:
    data = built(golden, tmp_path / "data")
    file = index_files(data)[2]
    file.write_bytes(bytes(file.stat().st_size))
    done = indexd("query-key", "-t", "T", "-k", "k", "--data", str(data))
    assert done.returncode == 4
    assert str(file) in done.stderr
    assert "--recover" in done.stderr


@pytest.mark.parametrize("offset", [0, 434, 1000, -5])
def test_a_frontier_that_lags_behind_its_own_files_costs_no_duplicate(
    golden: Golden, tmp_path: Path, offset: int
) -> None:
    data, whole = built(golden, tmp_path / "data"), built(golden, tmp_path / "whole")
    path = DataFiles(data).frontier
    known = read_frontier(Disk(), path)
    assert known is not None
    write_frontier(Disk(), path, replace(known, phy_offset=offset), "0")
    assert indexd("--recover", *flags(golden), "--data", str(data)).returncode == 0
    assert_same_index(data, whole)


def test_messages_are_counted_once(golden: Golden, tmp_path: Path) -> None:
    data = built(golden, tmp_path / "data")
    index_files(data)[1].unlink()
    assert indexd("--recover", *flags(golden), "--data", str(data)).returncode == 0
    assert json.loads(DataFiles(data).frontier.read_text())["messages"] == 4000


def test_a_store_without_messages_can_be_asked(tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    with Daemon(tmp_path / "store", tmp_path / "data") as daemon:
        daemon.wait_event("running", 60)
        done = indexd("query-key", "-t", "T", "-k", "k", "--data", str(tmp_path / "data"))
        assert done.returncode == 0
        assert daemon.terminate() == 0


def test_output_that_cannot_be_written_is_one_line(golden: Golden, tmp_path: Path) -> None:
    data = built(golden, tmp_path / "data")
    command = [sys.executable, "-m", "indexd", "query-key", "-t", "T", "-k", "k", "--data", str(data)]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 70
    assert done.stderr.count("\n") == 1


def test_hup_takes_over_what_can_be_and_refuses_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    config = tmp_path / "indexd.toml"
    config.write_text("[reader]\nretry_max_seconds = 30\n")
    with Daemon(tmp_path / "store", tmp_path / "data", "-c", str(config)) as daemon:
        daemon.wait_event("running", 60)
        config.write_text("[reader]\nretry_max_seconds = 20\n[index]\nindex_num = 99\n")
        os.kill(daemon.pid, signal.SIGHUP)
        event = daemon.wait_event("reloaded", 10)
        assert (event["changed"], event["needs_restart"]) == (["retry_max_seconds"], ["index_num"])
        config.write_text("[reader]\nretry_max_seconds = -1\n")
        os.kill(daemon.pid, signal.SIGHUP)
        assert "retry_max_seconds" in daemon.wait_event("reload_refused", 10)["problem"]
        assert daemon.terminate() == 0


def test_a_pipe_is_not_inspected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    assert indexd("inspect", str(tmp_path / "f")).returncode == 2
