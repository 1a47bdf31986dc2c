"""What a hostile user found: each once, as plainly as it can be said."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from support.daemon import COMMAND, QUICK, Daemon, assert_same_index, environment, index_files, indexd, rebuild
from support.naive import naive_frames
from support.reopened import cut_at, write_on
from support.small_log import SEGMENT_SIZE, SIZES, write_log

if TYPE_CHECKING:
    from pathlib import Path

INTERNAL = 70
SOON = {"INDEXD_RETRY_MAX_SECONDS": "1"}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_log(tmp_path / "store", 3000)
    return tmp_path / "store"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def end_of(store: Path) -> int:
    *_, last = naive_frames(store / "commitlog", SEGMENT_SIZE)
    return last.phy_offset + last.size


def test_the_data_directory_is_moved_away_and_comes_back(store: Path, data: Path) -> None:
    with Daemon(store, data, *SIZES, env=SOON) as daemon:
        daemon.wait_durable(end_of(store))
        data.rename(data.with_name("away"))
        daemon.wait_event("degraded")
        time.sleep(3)  # several tries
        data.with_name("away").rename(data)
        daemon.wait_event("healed")
        end = write_log(store, 100, seed=5, start_offset=end_of(store))
        daemon.wait_caught_up(end)
        assert indexd("--store", store, "--data", data, *SIZES).returncode == 5
        assert daemon.terminate() == 0
    rebuild(store, data.with_name("whole"), *SIZES)
    assert_same_index(data, data.with_name("whole"))


@pytest.mark.parametrize("limit", [8, 10, 12, 13])
def test_too_few_descriptors_to_start_at_all(store: Path, data: Path, limit: int) -> None:
    done = subprocess.run(
        [COMMAND, "--store", store, "--data", data, *SIZES],
        env=environment(QUICK),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit)),
    )
    assert done.returncode == INTERNAL, done.stderr
    assert "Too many open files" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_segment_in_the_middle_is_gone(store: Path, data: Path) -> None:
    """The log cannot be read there, and never will be: that is said once, and no recovery follows another."""
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end_of(store))
        assert daemon.terminate() == 0
    end = end_of(store)
    before = [path.read_bytes() for path in index_files(data)]
    (store / "commitlog" / f"{SEGMENT_SIZE:020d}").unlink()
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_caught_up(end)
        time.sleep(2)  # forty drains
        assert not daemon.events("disturbed")
        assert daemon.terminate() == 0
    assert [path.read_bytes() for path in index_files(data)] == before


def test_rot_in_the_middle_and_another_end_at_once(store: Path, data: Path) -> None:
    """What lies between the two is still true, and stays."""
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end_of(store))
        assert daemon.terminate() == 0
    offsets = [message.phy_offset for message in naive_frames(store / "commitlog", SEGMENT_SIZE)]
    rotten, cut = offsets[1500], offsets[-200]
    with cut_at(store, cut) as writer:
        end = write_on(writer, 300, seed=9)
    path = store / "commitlog" / f"{rotten - rotten % SEGMENT_SIZE:020d}"
    with path.open("r+b") as file:
        file.seek(rotten % SEGMENT_SIZE)
        file.write(b"\xff" * 8)
    with Daemon(store, data, *SIZES) as daemon:
        recovered = daemon.wait_event("opened")
        assert recovered["phy_offset"] == cut
        daemon.wait_caught_up(end)
        assert daemon.terminate() == 0


def test_a_stop_does_not_depend_on_the_log(store: Path, data: Path) -> None:
    with Daemon(store, data, *SIZES, env=SOON) as daemon:
        daemon.wait_durable(end_of(store))
        (store / "commitlog").rename(store / "unmounted")
        daemon.wait_event("degraded")
        assert daemon.terminate() == 0
    assert not (data / "abort").exists()
    (store / "unmounted").rename(store / "commitlog")
    with Daemon(store, data, *SIZES) as daemon:
        assert daemon.wait_event("opened")["reasons"] == ["the last stop was clean"]


@pytest.mark.parametrize("name", ["frontier", "starts"])
def test_a_pipe_is_no_file(store: Path, data: Path, name: str) -> None:
    assert indexd("--recover", "--store", store, "--data", data, *SIZES).returncode == 0
    (data / name).unlink(missing_ok=True)
    os.mkfifo(data / name)
    done = indexd("--store", store, "--data", data, *SIZES, env={"INDEXD_UNCLEAN_STARTS_MAX": "5"}, timeout=30)
    assert done.returncode == INTERNAL
    assert f"cannot open {data / name}: it is no plain file" in done.stderr.splitlines()[-1]


def test_verify_of_a_log_that_ends_where_a_segment_does(store: Path, data: Path) -> None:
    (store / "commitlog" / f"{0:020d}").rename(store / "first")
    for path in (store / "commitlog").iterdir():
        path.unlink()
    (store / "first").rename(store / "commitlog" / f"{0:020d}")
    assert indexd("--recover", "--store", store, "--data", data, *SIZES).returncode == 0
    done = indexd("verify", "--deep", "--data", data)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("byte", [4, 12, 20, 30, 2000])
def test_verify_looks_at_every_byte_of_the_checkpoint(store: Path, data: Path, byte: int, killed: bool) -> None:
    assert indexd("--recover", "--store", store, "--data", data, *SIZES).returncode == 0
    if killed:
        (data / "abort").write_text("1")
    content = bytearray((data / "checkpoint").read_bytes())
    content[byte] ^= 1
    (data / "checkpoint").write_bytes(content)
    assert indexd("verify", "--data", data).returncode == 1


def test_no_frontier_but_index_files_is_damage(store: Path, data: Path) -> None:
    assert indexd("--recover", "--store", store, "--data", data, *SIZES).returncode == 0
    (data / "frontier").unlink()
    done = indexd("query-key", "-t", "TopicTest", "-k", "Aa", "--data", data)
    assert done.returncode == 4
    assert "indexd --recover" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM])
def test_term_while_it_has_no_descriptors_left(store: Path, data: Path, number: signal.Signals) -> None:
    with Daemon(store, data, *SIZES, env=SOON) as daemon:
        daemon.wait_durable(end_of(store))
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (6, 4096))
        daemon.wait_event("degraded")
        assert daemon.terminate(number) in (0, INTERNAL)
        assert "Traceback" not in daemon.log.read_text("utf-8")
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_caught_up(end_of(store))
        assert daemon.terminate() == 0
