"""A process that is stopped, a clock that jumps, EIO; what is done to a directory between a stop and a start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon, index_files, indexd, indexd_here
from support.faults import DISK_FAILED, UNSAFE, all_files, check_calm, check_whole, end_line, failing_calls, run_again
from support.missing import installing, missing
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, SIZES, write_log

DAY = 24 * 3600
STOPPED_SECONDS = 2
# A look at the broker, the disk and the log's end is blamed on a file system when it takes 15 s.
BLAMED_SECONDS = 18


class Clock:
    """The time of day as one daemon sees it; times of files and the monotonic clock stay true, as in a real jump."""

    def __init__(self, path: Path) -> None:
        library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
        if library is None:
            missing(f"there is no libfaketime; {installing('faketime')}")
        self._path = path
        self.shift(0)
        self.env = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(path),
            "FAKETIME_CACHE_DURATION": "1",
            "DONT_FAKE_MONOTONIC": "1",
            # Its cure for a defect of old C libraries makes timed waits return at once.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
            "NO_FAKE_STAT": "1",
        }

    def shift(self, days: int) -> None:
        """So many days away from the true time, from now on."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(f"{days * DAY:+d}\n")
        fresh.replace(self._path)


def tells(state: dict[str, Any], days: int) -> bool:
    """Whether the daemon has seen the jump."""
    return bool(abs(state["writtenAt"] / 1000 - time.time() - days * DAY) < 60)


def names(daemon: Daemon) -> list[str]:
    return [path.name for path in index_files(daemon.data)]


def test_a_clock_that_jumps_a_year_ahead_and_two_back(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    clock = Clock(tmp_path / "clock")
    end = write_log(store, 1500)
    with Daemon(store, data, *SIZES, env=clock.env) as daemon:
        daemon.wait_durable(end)
        seen = names(daemon)
        for number, days in enumerate((365, -365)):
            clock.shift(days)
            daemon.wait_state(partial(tells, days=days))
            end = write_log(store, 3000, seed=5 + number, start_offset=end)
            daemon.wait_durable(end)
            # What was there keeps its place, what is new comes behind it, whatever the clock says.
            assert names(daemon)[: len(seen)] == seen
            assert len(names(daemon)) > len(seen)
            seen = names(daemon)
        assert int(seen[-1][:4]) == int(time.strftime("%Y", time.localtime(time.time() + 365 * DAY)))
        check_calm(daemon)
        check_whole(daemon, end)
        assert not daemon.events("restored")


def test_a_clock_that_was_set_back_between_two_unclean_starts(tmp_path: Path) -> None:
    """Unclean starts of what is now the future do not keep it from starting, and recovery does not mind."""
    store, data = tmp_path / "store", tmp_path / "data"
    clock = Clock(tmp_path / "clock")
    env = clock.env | {"INDEXD_UNCLEAN_STARTS_MAX": "1"}
    end = write_log(store, 1500)
    for days in (0, 365):
        clock.shift(days)
        with Daemon(store, data, *SIZES, env=env) as daemon:
            daemon.wait_event("starting")
    clock.shift(-365)
    with Daemon(store, data, *SIZES, env=env) as daemon:
        check_whole(daemon, end)


def test_stopped_for_longer_than_a_watchdog_waits_and_continued(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        os.kill(daemon.pid, signal.SIGSTOP)
        end = write_log(store, 8000, seed=4, start_offset=end)
        time.sleep(STOPPED_SECONDS)
        assert daemon.state()["phyOffset"] < end
        os.kill(daemon.pid, signal.SIGCONT)
        daemon.wait_caught_up(end, timeout=10)
        assert time.time() - daemon.state()["writtenAt"] / 1000 < 1
        check_calm(daemon)
        check_whole(daemon, end)
        assert not [row for row in daemon.events() if row["level"] != "info"]


def test_nothing_is_blamed_after_a_stop_that_is_longer_than_any_look_may_take(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        os.kill(daemon.pid, signal.SIGSTOP)
        time.sleep(BLAMED_SECONDS)
        os.kill(daemon.pid, signal.SIGCONT)
        end = write_log(store, 3000, seed=4, start_offset=end)
        daemon.wait_caught_up(end)
        beats = int(daemon.state()["writtenAt"])
        daemon.wait_state(lambda row: bool(row["writtenAt"] > beats + 3000))  # one look around and one beat, at least
        check_calm(daemon)
        assert not daemon.state()["stalled"]
        assert not [row for row in daemon.events() if row["level"] != "info"]
        check_whole(daemon, end)


def test_stopped_and_then_ended_as_a_watchdog_does(tmp_path: Path) -> None:
    """systemd sends ABRT to a service that does not answer; that is no way to write anything down."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_caught_up(end)
        os.kill(daemon.pid, signal.SIGSTOP)
        end = write_log(store, 3000, seed=4, start_offset=end)
        os.kill(daemon.pid, signal.SIGABRT)
        os.kill(daemon.pid, signal.SIGCONT)
        assert daemon.wait() == -signal.SIGABRT
    run_again(store, data, end)


@pytest.mark.parametrize("calls", ["fsync", "pwrite64"])
def test_a_disk_that_answers_with_an_error(tmp_path: Path, calls: str) -> None:
    """After EIO nothing is known of what was written: the process ends, and the next one recovers."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        with failing_calls(daemon.pid, calls):
            end = write_log(store, 3000, seed=4, start_offset=end)
            assert daemon.wait() == DISK_FAILED
        assert "Input/output error" in end_line(daemon)
    run_again(store, data, end)


def test_a_log_that_cannot_be_read_for_a_while(tmp_path: Path) -> None:
    """EIO on the broker's disk harms nothing of ours: it waits."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES, env={"INDEXD_RETRY_MAX_SECONDS": "1"}) as daemon:
        daemon.wait_durable(end)
        with failing_calls(daemon.pid, "preadv,pread64"):
            end = write_log(store, 3000, seed=4, start_offset=end)
            assert "Input/output error" in daemon.wait_event("degraded")["problem"]
            check_calm(daemon)
        check_whole(daemon, end)


def built(store: Path, data: Path, count: int = 2000, seed: int = 1) -> int:
    """A log and its index, after a clean stop; the end of the log."""
    end = write_log(store, count, seed=seed)
    done = indexd_here("--recover", "--store", store, "--data", data, *SIZES)
    assert done.returncode == 0, done.stderr
    return end


def contents(data: Path) -> dict[str, bytes]:
    """What a refusal may not change; the other small files only say who asked last."""
    mine = {"lock", "abort", "starts"}
    return {name: (data / name).read_bytes() for name in all_files(data) if name not in mine}


def rewrite(frontier: Path, **changes: object) -> None:
    row = json.loads(frontier.read_bytes()) | changes
    del row["crc32"]
    frontier.write_text(json.dumps(row | {"crc32": zlib.crc32(json.dumps(row).encode())}) + "\n")


def asked(segment_size: int = SEGMENT_SIZE, slots: int = HASH_SLOT_NUM, entries: int = INDEX_NUM) -> tuple[str, ...]:
    return ("--segment-size", str(segment_size), "--hash-slot-num", str(slots), "--index-num", str(entries))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (asked(slots=501), ["hash_slot_num 500", "501", "another --data"]),
        (asked(entries=4001), ["index_num 4000", "4001", "another --data"]),
        # The log itself does not fit, which is seen first.
        (asked(segment_size=2 * SEGMENT_SIZE), ["has 262144 bytes", "524288", "give --segment-size 262144"]),
        ((*SIZES, "--flavour", "4.7"), ["flavour 5.4", "4.7", "another --data"]),
    ],
    ids=["slots", "entries", "segments", "flavour"],
)
def test_a_directory_that_was_built_otherwise(tmp_path: Path, flags: tuple[str, ...], says: list[str]) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = built(store, data)
    before = contents(data)
    done = indexd("--store", store, "--data", data, *flags)
    assert done.returncode == UNSAFE
    line = done.stderr.splitlines()[-1]
    assert all(word in line for word in says), line
    assert contents(data) == before
    with Daemon(store, data, *SIZES) as daemon:
        check_whole(daemon, end)


def test_a_directory_of_a_newer_version(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    built(store, data)
    rewrite(data / "frontier", format=2, version="9.8.7", unheardOf={"a": [1]})
    before = contents(data)
    done = indexd("--store", store, "--data", data, *SIZES)
    assert done.returncode == UNSAFE
    line = done.stderr.splitlines()[-1]
    assert "of format 2, written by indexd 9.8.7, not 1" in line
    assert "run that version or a newer one, or use a fresh --data" in line
    assert contents(data) == before


def test_being_refused_again_and_again_is_no_crash_loop(tmp_path: Path) -> None:
    """A service manager tries a wrong configuration many times; the right one must start at once."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = built(store, data)
    env = {"INDEXD_UNCLEAN_STARTS_MAX": "1"}
    for _ in range(3):
        done = indexd("--store", store, "--data", data, *asked(slots=501), env=env)
        assert done.returncode == UNSAFE
        assert "hash_slot_num 500" in done.stderr.splitlines()[-1]
    with Daemon(store, data, *SIZES, env=env) as daemon:
        check_whole(daemon, end)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: bytes([*text[:300], text[300] ^ 1, *text[301:]]),
    ],
    ids=["empty", "half", "bit"],
)
def test_a_frontier_that_does_not_hold(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = built(store, data)
    (data / "frontier").write_bytes(damage((data / "frontier").read_bytes()))
    with Daemon(store, data, *SIZES) as daemon:
        assert str(data / "frontier") in daemon.wait_event("frontier_unreadable")["problem"]
        check_whole(daemon, end)


@pytest.mark.parametrize("unclean", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("same_names", [False, True], ids=["their-names", "our-names"])
def test_index_files_of_another_store(tmp_path: Path, same_names: bool, unclean: bool) -> None:
    store, data, other = tmp_path / "store", tmp_path / "data", tmp_path / "other"
    end = built(store, data)
    built(other, tmp_path / "foreign", seed=2)
    if unclean:
        (data / "abort").write_text("1")
    ours = index_files(data)
    for number, path in enumerate(index_files(tmp_path / "foreign")):
        target = ours[number].name if same_names and number < len(ours) else path.name
        shutil.copy2(path, data / "index" / target)
    if not same_names:
        for path in ours:
            path.unlink()
    with Daemon(store, data, *SIZES) as daemon:
        check_whole(daemon, end)
