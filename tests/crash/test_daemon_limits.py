"""Real daemons at their limits: a disk that others fill, a log larger than what they may hold, a slow broker."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from indexd.storage.names import segment_base
from support.commitlog_writer import CommitLogWriter
from support.daemon import Daemon, indexd_here
from support.fake_broker import FakeBroker, well
from support.faults import RETRY, check_calm, check_directory, check_whole, degraded
from support.missing import need
from support.own_mounts import OwnMounts, fill
from support.page_cache import PAGE, forget, in_use, resident
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
    store = tmp_path / "store"
    with OwnMounts() as mounts:
        size = 16 << 20
        data = mounts.tmpfs(tmp_path / "data", size)
        first = write_log(store, 500)
        env = RETRY | {"INDEXD_DISK_USED_MAX": "0.70"}
        with Daemon(store, data, *SIZES, env=env, tracer=mounts.words) as daemon:
            daemon.wait_durable(first)
            found = ask(data, "Aa")
            assert found
            filler = fill(data, leave_pages=size // PAGE // 4)
            end = write_log(store, 1000, seed=2, start_offset=first)
            problem = degraded(daemon, "disk_used_max is 70.0%", stage="build")
            assert problem.startswith(f"cannot index into {data}: its file system is 7")
            assert "free space on that file system" in problem
            check_calm(daemon)
            row = daemon.state()
            assert row["phyOffset"] == first
            assert "disk_used_max" in row["problems"]["build"]
            assert ask(data, "Aa") == found
            filler.unlink()
            daemon.wait_for(lambda: daemon.events("healed") or None, "healed")
            check_whole(daemon, end)


def test_a_disk_that_is_too_full_from_the_start(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with OwnMounts() as mounts:
        data = mounts.tmpfs(tmp_path / "data", 16 << 20)
        end = write_log(store, 500)
        filler = fill(data, leave_pages=1000)
        env = RETRY | {"INDEXD_DISK_USED_MAX": "70%"}
        with Daemon(store, data, *SIZES, env=env, tracer=mounts.words) as daemon:
            degraded(daemon, "disk_used_max", stage="build")
            assert daemon.terminate() == 0  # a stop does not wait for room
        with Daemon(store, data, *SIZES, env=env, tracer=mounts.words) as daemon:
            filler.unlink()
            check_whole(daemon, end)


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


def test_catching_up_at_a_bounded_rate_can_be_stopped_and_goes_on(tmp_path: Path) -> None:
    paths = write_large(tmp_path / "store", 40 << 20)
    flags = (*LARGE, "--read-rate-max", "8MiB")
    with Daemon(tmp_path / "store", tmp_path / "data", *flags) as daemon:
        daemon.wait_event("running")
        began = time.monotonic()
        daemon.wait_state(lambda row: row["phyOffset"] > 12 << 20)
        assert time.monotonic() - began > 1.0
        began = time.monotonic()
        assert daemon.terminate() == 0
        assert time.monotonic() - began < 5.0
    with Daemon(tmp_path / "store", tmp_path / "data", *flags) as daemon:
        daemon.wait_event("running")
        began = time.monotonic()
        daemon.wait_caught_up()
        assert 1.5 < time.monotonic() - began < 12
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
            broker.answer = lambda *_: None  # it hangs: the last word holds
            time.sleep(1.0)
            assert daemon.wait_caught_up(half)["phyOffset"] == half
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
