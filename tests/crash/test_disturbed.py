"""What somebody else does to the log or to our files while the daemon runs: it notices, mends it and goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from indexd.index.format import IndexLayout
from indexd.query import open_data
from support.daemon import Daemon, assert_same_index, index_files, indexd, rebuild
from support.reopened import cut_at, write_on
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYOUT = IndexLayout(HASH_SLOT_NUM, INDEX_NUM)
UNSAFE, BUSY, INTERNAL = 3, 5, 70


def check_mended(daemon: Daemon, store: Path, end: int) -> None:
    """Once all is indexed again, its files are those of an undisturbed build, and it says the same of what they hold.

    Bytes of a longer log that stand behind ``end`` keep it from saying that it has caught up: no broker can be asked.
    """
    daemon.wait_state(lambda row: bool(row["phyOffset"] >= end and (row["caughtUp"] or row["corrupt"] is not None)))
    assert daemon.terminate() == 0
    whole = daemon.data.with_name("undisturbed")
    rebuild(store, whole, *SIZES)
    assert_same_index(daemon.data, whole)
    assert said(daemon.data) == said(whole)


def said(data: Path) -> tuple[Any, ...]:
    """What a data directory says that it covers, and whether that is all."""
    with open_data(data) as opened:
        coverage = opened.coverage()
    frontier = json.loads((data / "frontier").read_bytes())
    return coverage.begin, coverage.end, coverage.uncovered, coverage.complete, frontier["messages"]


def after(daemon: Daemon, event: str, count: int = 1) -> dict[str, Any]:
    """Wait until that event was logged so often, and then for the recovery that follows it."""
    daemon.wait_for(lambda: len(daemon.events(event)) >= count or None, event)
    daemon.wait_for(lambda: len(daemon.events("running")) > count or None, "running again")
    return daemon.events(event)[count - 1]


def overwrite(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"\x5a" * 64)


FULL, OPEN = 0, -1


@pytest.mark.parametrize(
    ("which", "damage", "says"),
    [
        (FULL, lambda path: path.unlink(), "removed"),
        (OPEN, lambda path: path.unlink(), "removed"),
        (OPEN, lambda path: os.truncate(path, 1000), "cut to 1000 bytes"),
        (FULL, lambda path: overwrite(path, 0), "written"),
        (OPEN, lambda path: overwrite(path, LAYOUT.slot_position(10)), "written"),
        (FULL, lambda path: overwrite(path, LAYOUT.entry_position(10)), "written"),
        (OPEN, lambda path: overwrite(path, LAYOUT.entry_position(10)), "written"),
    ],
    ids=["removed", "removed open", "cut", "header", "slots", "entries", "entries open"],
)
def test_an_index_file_is_touched(tmp_path: Path, which: int, damage: Callable[[Path], None], says: str) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 3000)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        path = index_files(data)[which]
        time.sleep(0.05)
        damage(path)
        problem = after(daemon, "disturbed")["problem"]
        assert f"index file {path} was {says}" in problem
        check_mended(daemon, store, end)
        assert len(daemon.events("disturbed")) == 1


def test_the_whole_index_folder_is_removed(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 3000)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        shutil.rmtree(data / "index")
        assert "removed" in after(daemon, "disturbed")["problem"]
        check_mended(daemon, store, end)


def words(path: Path) -> Any:
    """What a small file says, but for the time at which the open index file was written."""
    if path.name != "frontier":
        return path.read_bytes()
    row = json.loads(path.read_bytes())
    del row["crc32"]
    for mark in row["index"]:
        del mark["mtimeNs"]
    return row


@pytest.mark.parametrize("name", ["abort", "frontier", "checkpoint", "lock"])
def test_a_small_file_is_removed(tmp_path: Path, name: str) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        before = words(data / name)
        (data / name).unlink()
        assert daemon.wait_event("restored")["names"] == [name]
        daemon.wait_for(lambda: (data / name).exists() or None, name)
        assert words(data / name) == before
        second = indexd("--store", store, "--data", data, *SIZES)
        assert second.returncode == BUSY
        assert not daemon.events("disturbed")
        check_mended(daemon, store, end)


def test_a_second_instance_that_took_a_new_lock_wins(tmp_path: Path) -> None:
    """Whoever removes the lock file lets two in; the first notices and leaves."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES, env={"INDEXD_DRAIN_INTERVAL": "10"}) as first:
        first.wait_durable(end)
        (data / "lock").unlink()
        with Daemon(store, data, *SIZES) as second:
            second.wait_event("running")
            assert first.wait() == BUSY
            check_mended(second, store, end)


def test_the_log_is_cut_by_a_little_and_written_on_beside_the_running_daemon(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    write_log(store, 3000)
    with Daemon(store, data, *SIZES, env={"INDEXD_CORRUPT_AFTER_MS": "200"}) as daemon:
        daemon.wait_caught_up()
        with cut_at(store, offsets(store)[-20]) as writer:
            end = write_on(writer, 3, seed=33)
        assert "the log was cut" in after(daemon, "disturbed")["problem"]
        check_mended(daemon, store, end)


@pytest.mark.parametrize("written", [5, 2000])
def test_the_log_is_cut_and_written_on_beside_the_running_daemon(tmp_path: Path, written: int) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    write_log(store, 3000)
    with Daemon(store, data, *SIZES, env={"INDEXD_CORRUPT_AFTER_MS": "200"}) as daemon:
        daemon.wait_caught_up()
        cut = int(daemon.state()["phyOffset"]) // 2
        cut = next(offset for offset in offsets(store) if offset >= cut)
        with cut_at(store, cut) as writer:
            end = write_on(writer, written, seed=33)
        assert "the log was cut" in after(daemon, "disturbed")["problem"]
        check_mended(daemon, store, end)


def offsets(store: Path) -> list[int]:
    from support.naive import naive_frames

    return [message.phy_offset for message in naive_frames(store / "commitlog", SEGMENT_SIZE)]


def test_another_store_takes_the_place_of_the_log_beside_the_running_daemon(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        write_log(tmp_path / "other", 1000, seed=2)
        (store / "commitlog").rename(tmp_path / "gone")
        (tmp_path / "other" / "commitlog").rename(store / "commitlog")
        assert daemon.wait() == UNSAFE
        line = daemon.log.read_text("utf-8").splitlines()[-1]
        assert f"{store} is not the store that {data} was built from" in line


def test_a_log_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    """A file system that is unmounted for a while."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES, env={"INDEXD_RETRY_MAX_SECONDS": "1"}) as daemon:
        daemon.wait_durable(end)
        (store / "commitlog").rename(tmp_path / "unmounted")
        degraded = daemon.wait_event("degraded")
        assert "there is no commitlog" in degraded["problem"]
        assert daemon.wait_state(lambda row: bool(row["problems"]))["problems"]
        (tmp_path / "unmounted").rename(store / "commitlog")
        daemon.wait_event("healed")
        end = write_log(store, 200, seed=4, start_offset=end)
        check_mended(daemon, store, end)


class TestCrashLoop:
    """Unclean starts that come to nothing."""

    def killed(self, store: Path, data: Path, *flags: str) -> None:
        with Daemon(store, data, *SIZES, *flags, env={"INDEXD_UNCLEAN_STARTS_MAX": "5"}) as daemon:
            daemon.wait_event("starting")

    def test_after_five_it_refuses_and_recover_goes_on(self, tmp_path: Path) -> None:
        store, data = tmp_path / "store", tmp_path / "data"
        end = write_log(store, 3000)
        for _ in range(5):
            self.killed(store, data)
        for _ in range(2):  # being refused does not count, nor make it forget
            done = indexd("--store", store, "--data", data, *SIZES, env={"INDEXD_UNCLEAN_STARTS_MAX": "5"})
            assert done.returncode == INTERNAL
            assert "5 unclean starts within 600 s" in done.stderr.splitlines()[-1]
            assert "indexd --recover" in done.stderr.splitlines()[-1]
        assert indexd("--recover", "--store", store, "--data", data, *SIZES).returncode == 0
        with Daemon(store, data, *SIZES, env={"INDEXD_UNCLEAN_STARTS_MAX": "5"}) as daemon:
            check_mended(daemon, store, end)

    def test_catching_up_makes_it_forget(self, tmp_path: Path) -> None:
        store, data = tmp_path / "store", tmp_path / "data"
        end = write_log(store, 500)
        for _ in range(3):
            for _ in range(3):
                self.killed(store, data)
            assert (data / "starts").exists()
            with Daemon(store, data, *SIZES, env={"INDEXD_UNCLEAN_STARTS_MAX": "5"}) as daemon:
                daemon.wait_caught_up(end)
                daemon.wait_for(lambda: not (data / "starts").exists() or None, "starts to go")

    def test_old_ones_do_not_count_nor_those_of_the_future(self, tmp_path: Path) -> None:
        store, data = tmp_path / "store", tmp_path / "data"
        end = write_log(store, 500)
        self.killed(store, data)
        now = int(time.time() * 1000)
        lines = [now - 601_000] * 10 + [now + 3_600_000] * 10
        (data / "starts").write_text("".join(f"{at}\n" for at in lines) + "no number\n")
        with Daemon(store, data, *SIZES, env={"INDEXD_UNCLEAN_STARTS_MAX": "5"}) as daemon:
            check_mended(daemon, store, end)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_it_opens_ends_well_and_does_not_count(tmp_path: Path, number: signal.Signals) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 3000)
    with Daemon(store, data, *SIZES, env={"INDEXD_UNCLEAN_STARTS_MAX": "2"}) as daemon:
        daemon.wait_event("starting")
    for _ in range(4):
        with Daemon(store, data, *SIZES, env={"INDEXD_UNCLEAN_STARTS_MAX": "2"}) as daemon:
            daemon.wait_event("starting")
            assert daemon.terminate(number) == 0
    with Daemon(store, data, *SIZES, env={"INDEXD_UNCLEAN_STARTS_MAX": "2"}) as daemon:
        check_mended(daemon, store, end)
    assert json.loads((data / "frontier").read_bytes())["phyOffset"] == end
