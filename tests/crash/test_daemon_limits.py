"""The daemon at its limits: hostile surroundings, stubborn readers of its output, memory and page cache."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from indexd.flush.frontier import read_frontier, write_frontier
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles, segment_base
from support.commitlog_writer import CommitLogWriter
from support.daemon import (
    Daemon,
    assert_same_index,
    index_files,
    indexd,
    indexd_here,
)
from support.fake_broker import FakeBroker, well
from support.faults import RETRY, OwnMounts, Place, check_calm, check_directory, check_whole, degraded, fill
from support.goldens import Golden, unpack
from support.missing import need
from support.naive import naive_frames
from support.page_cache import PAGE, forget, in_use, resident
from support.reopened import cut_at, write_on
from support.small_log import SEGMENT_SIZE, SIZES, messages, write_log

#: What a daemon that catches up may hold, whatever the log: kernels and libraries, queue, buffers, a drain at work.
RSS_MAX = 320 << 20


# --- the disk ---


def ask(data: Path, key: str) -> list[int]:
    done = indexd_here("query-key", "--json", "-t", "TopicTest", "-k", key, "--data", data)
    assert done.returncode == 0, done.stderr
    offsets: list[int] = json.loads(done.stdout)["phyOffsets"]
    return offsets


def test_a_disk_that_others_fill_stops_indexing_and_nothing_else(tmp_path: Path) -> None:
    with OwnMounts() as mounts:
        size = 16 << 20
        place = Place(tmp_path, mounts.tmpfs(tmp_path / "data", size), mounts.words)
        place.env = RETRY | {"INDEXD_DISK_USED_MAX": "0.70"}
        with place.running(500) as daemon:
            first, found = place.end, ask(place.data, "Aa")
            assert found
            filler = fill(place.data, leave_pages=size // PAGE // 4)
            place.log(1000)
            problem = degraded(daemon, "disk_used_max is 70.0%", stage="build")
            assert problem.startswith(f"cannot index into {place.data}: its file system is 7")
            assert "free space on that file system" in problem
            check_calm(daemon)
            row = daemon.state()
            assert row["phyOffset"] == first
            assert "disk_used_max" in row["problems"]["build"]
            assert ask(place.data, "Aa") == found
            filler.unlink()
            daemon.wait_event("healed")
            check_whole(daemon, place.end)


def test_a_disk_that_is_too_full_from_the_start(tmp_path: Path) -> None:
    with OwnMounts() as mounts:
        place = Place(tmp_path, mounts.tmpfs(tmp_path / "data", 16 << 20), mounts.words)
        place.env = RETRY | {"INDEXD_DISK_USED_MAX": "70%"}
        place.log(500)
        filler = fill(place.data, leave_pages=1000)
        with place.daemon() as daemon:
            degraded(daemon, "disk_used_max", stage="build")
            assert daemon.terminate() == 0  # a stop does not wait for room
        filler.unlink()
        place.starts_well()


# --- memory and the page cache ---

LARGE_SEGMENT = 16 << 20
LARGE = (
    *("--segment-size", str(LARGE_SEGMENT)),
    *("--hash-slot-num", "20000"),
    *("--index-num", "100000"),
)


def write_large(store: Path, size: int, segment_size: int = LARGE_SEGMENT, body: int = 2000) -> list[Path]:
    """A log of ``size`` bytes, none of it in the page cache; its segments."""
    with CommitLogWriter(store / "commitlog", segment_size) as writer:
        endless = messages(9)
        filling = os.urandom(body)
        while writer.max_offset < size:
            for spec in islice(endless, 100):
                writer.append(replace(spec, body=filling))
    paths = sorted(path for path in (store / "commitlog").iterdir() if segment_base(path.name) is not None)
    for path in paths:
        forget(path)
    assert not any(1 in resident(path) for path in paths)
    return paths


def cached(paths: list[Path]) -> int:
    """Bytes of these files that are in the page cache."""
    return PAGE * sum(sum(resident(path)) for path in paths)


def asked_to_drop(calls: Path) -> Counter[str]:
    """Bytes of each segment that a traced daemon has asked the kernel to drop; none of one that is not named."""
    asked: Counter[str] = Counter()
    for name, size in re.findall(r"/commitlog/(\d+)>, \d+, (\d+), POSIX_FADV_DONTNEED", calls.read_text("utf-8")):
        asked[name] += int(size)
    return asked


def test_catching_up_on_a_large_log_takes_neither_memory_nor_page_cache(disk_path: Path) -> None:
    paths = write_large(disk_path / "store", 400 << 20)
    assert len(paths) > 24
    used = paths[3]  # by a consumer that is that far behind
    most_cache = most_rss = 0
    calls = disk_path / "calls"
    # -D: the daemon is our child, and strace its grandchild.
    tracer = (need("strace"), "-D", "-f", "-y", "-e", "trace=fadvise64", "-o", str(calls))
    with in_use(used), Daemon(disk_path / "store", disk_path / "data", *LARGE, tracer=tracer) as daemon:

        def caught_up() -> dict[str, Any] | None:
            nonlocal most_cache, most_rss
            most_rss = max(most_rss, daemon.rss())
            most_cache = max(most_cache, cached(paths[:-3]))
            row = daemon.state()
            return row if row and row["caughtUp"] and not row["dispatchBehindBytes"] else None

        row = daemon.wait_for(caught_up, "to be caught up")
        assert row["messages"] > 100_000
        assert daemon.terminate() == 0
    print(f"RSS at most {most_rss >> 20} MiB, page cache of old segments at most {most_cache >> 20} MiB")
    assert most_rss < RSS_MAX
    assert most_cache < 4 * LARGE_SEGMENT
    # What is looked at again now and then, to see that the log is the same, may be there.
    assert cached([path for path in paths[:-3] if path != used]) < LARGE_SEGMENT
    asked = asked_to_drop(calls)
    assert all(asked[path.name] > LARGE_SEGMENT // 2 for path in paths[:-3] if path != used)
    # Nothing of what others had there, and nothing of what consumers read next.
    assert used.name not in asked
    assert not asked.keys() & {path.name for path in paths[-2:]}


def test_a_memory_bound_that_cannot_be_kept_slows_and_does_not_stop(tmp_path: Path) -> None:
    write_large(tmp_path / "store", 30 << 20)
    env = {"INDEXD_MEMORY_MAX": "1MiB", "INDEXD_READ_BYTES": "1MiB", "INDEXD_DRAIN_INTERVAL": "3"}
    with Daemon(tmp_path / "store", tmp_path / "data", *LARGE, env=env) as daemon:
        daemon.wait_caught_up()
        assert daemon.terminate() == 0


# --- the rate ---


def time_of(event: dict[str, Any]) -> float:
    """When a daemon says that it was."""
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def test_catching_up_at_a_bounded_rate_can_be_stopped_and_goes_on(tmp_path: Path) -> None:
    paths = write_large(tmp_path / "store", 40 << 20)
    flags = (*LARGE, "--read-rate-max", "8MiB")
    with Daemon(tmp_path / "store", tmp_path / "data", *flags) as daemon:
        began = time_of(daemon.wait_event("running"))
        row = daemon.wait_state(lambda row: row["phyOffset"] > 12 << 20)
        assert row["writtenAt"] / 1000 - began > 1.0
        began = time.monotonic()
        assert daemon.terminate() == 0
        assert time.monotonic() - began < 5.0
    with Daemon(tmp_path / "store", tmp_path / "data", *flags) as daemon:
        began = time_of(daemon.wait_event("running"))
        row = daemon.wait_caught_up()
        assert 1.5 < row["writtenAt"] / 1000 - began < 12
        assert daemon.terminate() == 0
    assert len(paths) > 2
    check_directory(tmp_path / "store", tmp_path / "data", *LARGE)


# --- the broker's word ---


@pytest.fixture
def limited(tmp_path: Path) -> tuple[Path, int, int]:
    """A log of one segment, where its first half ends, and where it ends."""
    store = tmp_path / "store"
    half = write_log(store, 200)
    end = write_log(store, 400)
    assert half < end < SEGMENT_SIZE
    return store, half, end


def test_nothing_is_indexed_that_the_broker_has_not_named(limited: tuple[Path, int, int], tmp_path: Path) -> None:
    store, half, end = limited
    with FakeBroker(well(str(half))) as broker:
        flags = (*SIZES, "--broker-address", broker.address, "--broker-check-interval", "0.2")
        with Daemon(store, tmp_path / "data", *flags) as daemon:
            assert daemon.wait_caught_up(half)["phyOffset"] == half
            broker.answer, asked = lambda *_: None, len(broker.requests)  # it hangs: the last word holds
            daemon.wait_for(lambda: len(broker.requests) > asked or None, "another question")
            begun = daemon.state()["writtenAt"]
            assert daemon.wait_state(lambda row: bool(row["writtenAt"] > begun + 1000))["phyOffset"] == half
            broker.answer = well(str(end))
            broker.hang_up()
            assert daemon.wait_caught_up(end)["phyOffset"] == end
            assert daemon.terminate() == 0
    check_directory(store, tmp_path / "data")


def test_a_broker_that_is_not_there_does_not_keep_an_index_from_being_built(
    limited: tuple[Path, int, int], tmp_path: Path
) -> None:
    store, _, end = limited
    with Daemon(store, tmp_path / "data", *SIZES, "--broker-address", "127.0.0.1:1") as daemon:
        assert daemon.wait_caught_up(end)["phyOffset"] == end
        assert daemon.terminate() == 0


INTERNAL = 70


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, env={"INDEXD_RETRY_MAX_SECONDS": "1"})


@pytest.fixture
def stopped(place: Place) -> Place:
    """A log of several segments, and its index after a clean stop."""
    place.log(3000)
    done = indexd_here("--recover", "--store", place.store, "--data", place.data, *SIZES)
    assert done.returncode == 0, done.stderr
    return place


def test_the_data_directory_is_moved_away_and_comes_back(place: Place) -> None:
    with place.running(3000) as daemon:
        place.data.rename(place.data.with_name("away"))
        daemon.wait_for(lambda: len(daemon.events("degraded")) > 3 or None, "several tries")
        place.data.with_name("away").rename(place.data)
        daemon.wait_event("healed")
        place.log(100)
        daemon.wait_caught_up(place.end)
        assert indexd("--store", place.store, "--data", place.data, *SIZES).returncode == 5
        check_whole(daemon, place.end)


def test_a_segment_in_the_middle_is_gone(stopped: Place) -> None:
    """The log cannot be read there, and never will be: that is said once, and no recovery follows another."""
    before = [path.read_bytes() for path in index_files(stopped.data)]
    (stopped.store / "commitlog" / f"{SEGMENT_SIZE:020d}").unlink()
    with stopped.daemon() as daemon:
        begun = daemon.wait_caught_up(stopped.end)["writtenAt"]
        daemon.wait_state(lambda row: bool(row["writtenAt"] > begun + 2000))  # forty drains
        assert not daemon.events("disturbed")
        assert daemon.terminate() == 0
    assert [path.read_bytes() for path in index_files(stopped.data)] == before


def test_rot_in_the_middle_and_another_end_at_once(stopped: Place) -> None:
    """What lies between the two is still true, and stays."""
    offsets = [message.phy_offset for message in naive_frames(stopped.store / "commitlog", SEGMENT_SIZE)]
    rotten, cut = offsets[1500], offsets[-200]
    with cut_at(stopped.store, cut) as writer:
        end = write_on(writer, 300, seed=9)
    path = stopped.store / "commitlog" / f"{rotten - rotten % SEGMENT_SIZE:020d}"
    with path.open("r+b") as file:
        file.seek(rotten % SEGMENT_SIZE)
        file.write(b"\xff" * 8)
    with stopped.daemon() as daemon:
        assert daemon.wait_event("opened")["phy_offset"] == cut
        daemon.wait_caught_up(end)
        assert daemon.terminate() == 0


def test_a_stop_does_not_depend_on_the_log(place: Place) -> None:
    with place.running(3000) as daemon:
        (place.store / "commitlog").rename(place.store / "unmounted")
        daemon.wait_event("degraded")
        assert daemon.terminate() == 0
    assert not (place.data / "abort").exists()
    (place.store / "unmounted").rename(place.store / "commitlog")
    with place.daemon() as daemon:
        assert daemon.wait_event("opened")["reasons"] == ["the last stop was clean"]


@pytest.mark.parametrize("name", ["frontier", "starts"])
def test_a_pipe_is_no_file(stopped: Place, name: str) -> None:
    path = stopped.data / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    words = ("--store", stopped.store, "--data", stopped.data, *SIZES)
    done = indexd(*words, env={"INDEXD_UNCLEAN_STARTS_MAX": "5"}, timeout=30)
    assert done.returncode == INTERNAL
    assert f"cannot open {path}: it is no plain file" in done.stderr.splitlines()[-1]


def test_verify_of_a_log_that_ends_where_a_segment_does(place: Place) -> None:
    place.log(3000)
    for path in sorted((place.store / "commitlog").iterdir())[1:]:
        path.unlink()
    assert indexd_here("--recover", "--store", place.store, "--data", place.data, *SIZES).returncode == 0
    done = indexd_here("verify", "--deep", "--data", place.data)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("byte", "killed"), [(4, False), (12, True), (20, False), (30, True), (2000, False)])
def test_verify_looks_at_every_byte_of_the_checkpoint(stopped: Place, byte: int, killed: bool) -> None:
    if killed:
        (stopped.data / "abort").write_text("1")
    content = bytearray((stopped.data / "checkpoint").read_bytes())
    content[byte] ^= 1
    (stopped.data / "checkpoint").write_bytes(content)
    assert indexd_here("verify", "--data", stopped.data).returncode == 1


def test_no_frontier_but_index_files_is_damage(stopped: Place) -> None:
    (stopped.data / "frontier").unlink()
    done = indexd("query-key", "-t", "TopicTest", "-k", "Aa", "--data", stopped.data)
    assert done.returncode == 4
    assert "indexd --recover" in done.stderr


def test_term_while_it_has_no_descriptors_left(place: Place) -> None:
    with place.running(3000) as daemon:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (6, 4096))
        daemon.wait_event("degraded")
        assert daemon.terminate() in (0, INTERNAL)
        assert "Traceback" not in daemon.log.read_text("utf-8")
    place.starts_well()


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


@pytest.fixture
def data(golden: Golden, tmp_path: Path) -> Path:
    return built(golden, tmp_path / "data")


def run_to_full(*words: object, stream: str) -> subprocess.CompletedProcess[str]:
    """A command with one of its two streams on a disk that is full."""
    command, others = [sys.executable, "-m", "indexd", *map(str, words)], {"stdout": subprocess.PIPE}
    with Path("/dev/full").open("w") as full:
        streams: dict[str, Any] = others | {"stderr": subprocess.PIPE} | {stream: full}
        return subprocess.run(command, **streams, text=True, timeout=120, check=False)


def test_nothing_is_made_inside_the_store(golden: Golden) -> None:
    before = sorted(str(path) for path in golden.root.rglob("*"))
    for command, option, inside in (("rebuild", "--out", "x"), ("run", "--data", "commitlog/x")):
        done = indexd(command, *flags(golden), option, str(golden.root / inside))
        assert done.returncode == 3
        assert "inside the store" in done.stderr
        assert done.stderr.count("\n") == 1
    assert sorted(str(path) for path in golden.root.rglob("*")) == before


def test_a_stop_is_heard_when_the_log_lines_go_nowhere(golden: Golden, data: Path) -> None:
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
    assert run_to_full("--recover", *flags(golden), "--data", data, stream="stderr").returncode == 0
    assert len(index_files(data)) == len(golden.index_files())


def test_output_that_cannot_be_written_is_one_line(data: Path) -> None:
    done = run_to_full("query-key", "-t", "T", "-k", "k", "--data", data, stream="stdout")
    assert done.returncode == INTERNAL
    assert done.stderr.count("\n") == 1


def test_a_full_index_file_that_was_wiped_is_no_empty_answer(data: Path) -> None:
    file = index_files(data)[2]
    file.write_bytes(bytes(file.stat().st_size))
    done = indexd("query-key", "-t", "T", "-k", "k", "--data", str(data))
    assert done.returncode == 4
    assert str(file) in done.stderr
    assert "--recover" in done.stderr


@pytest.mark.parametrize("offset", [0, 434, 1000, -5, None])
def test_a_frontier_that_lags_behind_its_own_files_costs_no_duplicate(
    golden: Golden, data: Path, tmp_path: Path, offset: int | None
) -> None:
    """Nor does a file that is gone: messages are counted once."""
    path = DataFiles(data).frontier
    known = read_frontier(Disk(), path)
    assert known is not None
    if offset is None:
        index_files(data)[1].unlink()
    else:
        write_frontier(Disk(), path, replace(known, phy_offset=offset), "0")
    assert indexd("--recover", *flags(golden), "--data", str(data)).returncode == 0
    assert_same_index(data, built(golden, tmp_path / "whole"))
    assert json.loads(path.read_text())["messages"] == 4000 or offset is not None


def test_a_store_without_messages_can_be_asked(tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    with Daemon(tmp_path / "store", tmp_path / "data") as daemon:
        daemon.wait_event("running")
        assert indexd("query-key", "-t", "T", "-k", "k", "--data", str(tmp_path / "data")).returncode == 0
        assert daemon.terminate() == 0


def test_a_pipe_is_not_inspected(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "f")
    assert indexd("inspect", str(tmp_path / "f")).returncode == 2
