"""The daemon at its limits: hostile surroundings, stubborn readers of its output, memory and page cache."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from dataclasses import replace
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
    index_files,
    indexd,
    indexd_here,
)
from support.fake_broker import FakeBroker, well
from support.faults import RETRY, OwnMounts, Place, check_calm, check_directory, check_whole, degraded, fill
from support.missing import need
from support.page_cache import PAGE, forget, in_use, resident
from support.small_log import SEGMENT_SIZE, SIZES, messages, write_log

#: What a daemon that catches up may hold, whatever the log: kernels and libraries, queue, buffers, a drain at work.
RSS_MAX = 320 << 20


# --- the disk ---


def ask(data: Path, key: str) -> Any:
    done = indexd_here("query-key", "--json", "-t", "TopicTest", "-k", key, "--data", data)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["phyOffsets"]


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
    most_cache = 0
    calls = disk_path / "calls"
    # -D: the daemon is our child, and strace its grandchild.
    tracer = (need("strace"), "-D", "-f", "-y", "-e", "trace=fadvise64", "-o", str(calls))
    with in_use(used), Daemon(disk_path / "store", disk_path / "data", *LARGE, tracer=tracer) as daemon:

        def caught_up() -> dict[str, Any] | None:
            nonlocal most_cache
            most_cache = max(most_cache, cached(paths[:-3]))
            row = daemon.state()
            return row if row and row["caughtUp"] and not row["dispatchBehindBytes"] else None

        row = daemon.wait_for(caught_up, "to be caught up")
        assert row["messages"] > 100_000
        most_rss = daemon.peak_memory()
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


# --- the broker's word ---


def test_nothing_is_indexed_that_the_broker_has_not_named(tmp_path: Path) -> None:
    store = tmp_path / "store"
    half, end = write_log(store, 200), write_log(store, 400)
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


INTERNAL = 70


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path, env={"INDEXD_RETRY_MAX_SECONDS": "1"})


@pytest.fixture
def stopped(place: Place) -> Place:
    """A log of several segments, and its index after a clean stop."""
    place.log(3000)
    place.recover()
    return place


def test_the_data_directory_is_moved_away_and_comes_back(place: Place) -> None:
    with place.running(3000) as daemon:
        place.data.rename(place.data.with_name("away"))
        daemon.wait_for(lambda: len(daemon.events("degraded")) > 3 or None, "several tries")
        place.data.with_name("away").rename(place.data)
        daemon.wait_event("healed")
        place.log(100)
        daemon.wait_caught_up(place.end)
        assert indexd(*place.words).returncode == 5
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
    done = indexd(*stopped.words, env={"INDEXD_UNCLEAN_STARTS_MAX": "5"}, timeout=30)
    assert done.returncode == INTERNAL
    assert f"cannot open {path}: it is no plain file" in done.stderr.splitlines()[-1]


def test_verify_of_a_log_that_ends_where_a_segment_does(place: Place) -> None:
    place.log(3000)
    for path in sorted((place.store / "commitlog").iterdir())[1:]:
        path.unlink()
    place.recover()
    done = indexd_here("verify", "--deep", "--data", place.data)
    assert done.returncode == 0, done.stdout


def test_term_while_it_has_no_descriptors_left(place: Place) -> None:
    with place.running(3000) as daemon:
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (6, 4096))
        daemon.wait_event("degraded")
        assert daemon.terminate() in (0, INTERNAL)
        assert "Traceback" not in daemon.log.read_text("utf-8")
    place.starts_well()


def run_to_full(*words: object, stream: str) -> subprocess.CompletedProcess[str]:
    """A command with one of its two streams on a disk that is full."""
    command, others = [sys.executable, "-m", "indexd", *map(str, words)], {"stdout": subprocess.PIPE}
    with Path("/dev/full").open("w") as full:
        streams: dict[str, Any] = others | {"stderr": subprocess.PIPE} | {stream: full}
        return subprocess.run(command, **streams, text=True, timeout=120, check=False)


def test_a_stop_is_heard_when_the_log_lines_go_nowhere(stopped: Place) -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen([sys.executable, "-m", "indexd", "run", *map(str, stopped.words)], stderr=writer)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as lines:
            while b"running" not in lines.readline():
                pass
        process.terminate()
        assert process.wait(20) == 0
    finally:
        process.kill()
    assert not DataFiles(stopped.data).abort.exists()


def test_a_full_log_disk_does_not_stop_the_index(stopped: Place) -> None:
    files = [path.name for path in index_files(stopped.data)]
    assert run_to_full("--recover", *stopped.words, stream="stderr").returncode == 0
    assert [path.name for path in index_files(stopped.data)] == files


def test_output_that_cannot_be_written_is_one_line(stopped: Place) -> None:
    done = run_to_full("query-key", "-t", "T", "-k", "k", "--data", stopped.data, stream="stdout")
    assert done.returncode == INTERNAL
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["frontier", "index"])
def test_what_is_gone_is_no_empty_answer(stopped: Place, name: str) -> None:
    """The frontier, or what a full index file held."""
    path = stopped.data / "frontier" if name == "frontier" else index_files(stopped.data)[0]
    if name == "frontier":
        path.unlink()
    else:
        path.write_bytes(bytes(path.stat().st_size))
    done = indexd_here("query-key", "-t", "T", "-k", "k", "--data", stopped.data)
    assert done.returncode == 4
    assert "indexd --recover" in done.stderr


@pytest.mark.parametrize("offset", [0, 1000, -5, None])
def test_a_frontier_that_lags_behind_its_own_files_costs_no_duplicate(stopped: Place, offset: int | None) -> None:
    """Nor does a file that is gone: messages are counted once."""
    path = DataFiles(stopped.data).frontier
    known = read_frontier(Disk(), path)
    assert known is not None
    if offset is None:
        index_files(stopped.data)[1].unlink()
    else:
        write_frontier(Disk(), path, replace(known, phy_offset=offset), "0")
    stopped.recover()
    check_directory(stopped.store, stopped.data)
    assert json.loads(path.read_text())["messages"] == 3000 or offset is not None


def test_a_store_without_messages_can_be_asked(place: Place) -> None:
    (place.store / "commitlog").mkdir(parents=True)
    with place.daemon() as daemon:
        daemon.wait_event("running")
        assert indexd_here("query-key", "-t", "T", "-k", "k", "--data", place.data).returncode == 0
        assert daemon.terminate() == 0
