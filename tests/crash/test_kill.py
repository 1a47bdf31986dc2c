"""The daemon killed, stopped and started again, at any moment: its index is what an undisturbed build makes."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from pathlib import Path

import pytest

from indexd.flush.frontier import CHECKPOINT_SIZE, StoreCheckpoint
from indexd.index.format import IndexHeader
from support.daemon import Daemon, assert_same_index, index_files, indexd_here, rebuild
from support.faults import Place, end_line
from support.missing import need, requires
from support.small_log import SIZES, Growing

KILLS = 12
#: Of the places where it is killed and of the messages; scripts/soak draws its own.
SEED = 20260720
#: Reads of 64 KiB and a queue of one message: as many drains as can be, so that a catch-up takes a while.
SLOWLY = (*SIZES, "--read-bytes", "65536", "--queue-rows", "1")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def kill_at_any_moment(daemon: Daemon, rand: random.Random) -> str:
    """Kill a daemon that has just been started: while it loads, recovers, or, most often, indexes; which it was."""
    phase = rand.choice(["loads", "recovers", "indexes", "indexes", "indexes", "indexes"])
    if phase == "loads":
        time.sleep(rand.uniform(0, 0.5))
    else:
        daemon.wait_event("starting" if phase == "recovers" else "running")
        time.sleep(rand.uniform(0, 0.05 if phase == "recovers" else 0.6))
    daemon.kill()
    return phase


def check_what_a_kill_leaves(data: Path) -> None:
    """Frontier and checkpoint are replaced whole: always the old or the new one."""
    if (data / "frontier").exists():
        frontier = json.loads((data / "frontier").read_bytes())
        if not (data / "checkpoint").exists():
            assert not frontier["index"], "only the frontier with which a directory begins has none"
            return
        checkpoint = StoreCheckpoint.unpack((data / "checkpoint").read_bytes(), data / "checkpoint")
        # The checkpoint is written first.
        assert checkpoint.confirm_phy_offset >= frontier["phyOffset"]
        assert {row["name"] for row in frontier["index"]} <= {path.name for path in index_files(data)}


def finish(store: Path, data: Path, end: int) -> Daemon:
    """Start once more, catch up with ``end``, stop; the index must then be that of an undisturbed build."""
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_caught_up(end)
        assert daemon.terminate() == 0
    assert not (data / "abort").exists()
    if not (whole := data.with_name("whole")).exists():
        rebuild(store, whole, *SIZES)
    assert_same_index(data, whole)
    assert (data / "checkpoint").read_bytes() == (whole / "checkpoint").read_bytes()
    return daemon


def test_kills_at_any_moment_leave_no_trace(tmp_path: Path) -> None:
    rand = random.Random(SEED)
    store, data = tmp_path / "store", tmp_path / "data"
    phases, rolled = [], 0
    with Growing(store, SEED) as growing:
        while len(phases) < KILLS or (rolled <= 5 and len(phases) < 10 * KILLS):
            with Daemon(store, data, *SIZES) as daemon:
                phases.append(kill_at_any_moment(daemon, rand))
                rolled += sum(row["files"] for row in daemon.events("rolled"))
            check_what_a_kill_leaves(data)
        end = growing.stop()
    print(f"{end} bytes of log, {len(index_files(data))} index files, {rolled} rolls, killed while it {phases}")
    assert phases.count("indexes") >= KILLS // 4
    assert rolled > 5
    finish(store, data, end)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_in_the_middle_of_a_catch_up_is_clean(place: Place, number: signal.Signals) -> None:
    place.log(40_000)
    with place.daemon(*SLOWLY) as daemon:
        daemon.wait_event("rolled")
        assert daemon.terminate(number) == 0
        assert daemon.wait_event("stopping")["signal"] == number.name
        stopped = daemon.wait_event("stopped")
    frontier = json.loads((place.data / "frontier").read_bytes())
    assert 0 < frontier["phyOffset"] == stopped["phy_offset"] < place.end
    assert not (place.data / "abort").exists()
    assert not (place.data / "state").exists()

    again = finish(place.store, place.data, place.end)
    opened = again.wait_event("opened")
    assert opened["phy_offset"] == frontier["phyOffset"]
    assert opened["reasons"] == ["the last stop was clean"]
    assert (opened["dropped_entries"], opened["deleted_files"], opened["rewritten_files"]) == (0, 0, 0)
    assert not again.events("recovered")


def test_the_checkpoint_names_the_newest_full_file(place: Place) -> None:
    def checkpoint() -> StoreCheckpoint:
        content = (place.data / "checkpoint").read_bytes()
        assert len(content) == CHECKPOINT_SIZE
        assert not any(content[40:])
        return StoreCheckpoint.unpack(content, place.data / "checkpoint")

    with place.running(4000) as daemon:
        state = daemon.wait_durable(place.end)
        running = checkpoint()
        assert daemon.terminate() == 0
    headers = [IndexHeader.unpack(path.read_bytes()[:40]) for path in index_files(place.data)]
    full = [header for header in headers if header.index_count == 4000]
    assert len(full) == len(headers) - 1 > 1
    expected = StoreCheckpoint(
        physic_msg_timestamp=state["storeTimestamp"],
        logics_msg_timestamp=state["storeTimestamp"],
        index_msg_timestamp=full[-1].end_timestamp,
        confirm_phy_offset=place.end,
    )
    assert running == checkpoint() == expected


def test_a_second_instance_is_refused_and_told_who_runs(place: Place, tmp_path: Path) -> None:
    """By the abort flag, too, from the start to a clean stop."""
    with place.running(100) as daemon:
        with place.daemon() as second:
            assert second.wait() == 5
        assert f"in use by another indexd, pid {daemon.pid}" in end_line(second)
        for words in (("--recover",), ("rebuild", "--data", tmp_path / "unused", "--out", place.data)):
            done = indexd_here(*words[:1], *place.words, *words[1:])
            assert done.returncode == 5
            assert f"pid {daemon.pid}" in done.stderr
        daemon.kill()
        assert (place.data / "abort").read_text() == str(daemon.pid)
    with place.daemon() as daemon:
        assert daemon.wait_event("recovered")["reasons"] == ["abort is there"]
        assert (place.data / "abort").read_text() == str(daemon.pid)
        daemon.wait_event("running")
        assert daemon.terminate() == 0
    assert not (place.data / "abort").exists()


@requires(lambda: need("strace"))
def test_a_clean_stop_leaves_no_byte_of_an_index_file_unsynced(place: Place, tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    # -D: the daemon is our child, and strace its grandchild.
    place.tracer = ("strace", "-D", "-f", "-y", "-s", "0", "-e", "trace=pwrite64,fsync", "-o", str(calls))
    place.env = {"INDEXD_FLUSH_INTERVAL": "0.01"}
    with place.running(8000, *SLOWLY) as daemon:
        assert daemon.terminate() == 0
    last: dict[str, dict[str, int]] = {"pwrite64": {}, "fsync": {}}
    for number, line in enumerate(calls.read_text(errors="replace").splitlines()):
        call = re.search(r"(pwrite64|fsync)\(\d+<[^>]*/index/(\d{17})>", line)
        if call is not None:
            last[call[1]][call[2]] = number
    assert sorted(last["pwrite64"]) == [path.name for path in index_files(place.data)]
    assert not [name for name, number in last["pwrite64"].items() if last["fsync"].get(name, -1) < number]
