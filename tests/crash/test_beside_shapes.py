"""ConsumeQueues and sparse indexes of odd logs, of thousands of queues, and of logs whose begin has expired."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.beside_log import (
    assert_beside,
    assert_queues,
    assert_sparse,
    flags,
    frames,
    over_queues,
    put,
    queues_of,
    segments_of,
    spec,
    write,
)
from support.commitlog_writer import FrameSpec, encode_frame
from support.daemon import Daemon, assert_same_index, index_files, indexd_here, rebuild
from support.faults import still_degraded
from support.missing import need
from support.naive import NaiveMessage
from support.queues import tree
from support.reading import patch

SEGMENT_SIZE = 256 << 10
SMALL_SEGMENT = 64 << 10
QUEUE_FILE_SIZE = 1200
UNITS = QUEUE_FILE_SIZE // 20
BEGIN = 1_700_000_000_000
#: Each part of a log is drained before the next one is written.
SLOW = {
    "INDEXD_DRAIN_INTERVAL": "0.1",
    # Where the clock goes back, the newest message has to settle: one by one while it falls.
    "INDEXD_SETTLE_MS": "2",
}


def build(
    tmp_path: Path,
    parts: Sequence[Sequence[FrameSpec]],
    *,
    segment_size: int = SEGMENT_SIZE,
    interval: int = 4096,
    index_num: int = 4000,
) -> tuple[Path, Path]:
    """Let a daemon take the log part by part, drain by drain; store and data after a clean stop, both judged."""
    store, data, whole = (tmp_path / name for name in ("store", "data", "whole"))
    words = flags(segment_size, QUEUE_FILE_SIZE, "--sparse-interval", interval, "--index-num", index_num)
    (store / "commitlog").mkdir(parents=True)
    with Daemon(store, data, *words, env=SLOW) as daemon:
        for part in parts:
            daemon.wait_caught_up(write(store, part, segment_size))
        assert daemon.terminate() == 0
    assert not [row for row in daemon.events() if row["level"] != "info"]
    assert_beside(data, store, segment_size, QUEUE_FILE_SIZE, interval)
    rebuild(store, whole, *words)
    assert_same_index(data, whole)
    done = indexd_here("verify", "--deep", "--store", store, "--data", data, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return store, data


def in_parts(specs: list[FrameSpec], *ends: int) -> list[list[FrameSpec]]:
    return [specs[first:last] for first, last in pairwise((0, *ends, len(specs)))]


ROUNDS = [spec(number, f"T{number % 7}", number // 7 % 3) for number in range(21 * (2 * UNITS + 1))]
LARGE, ALONE = 20_000, SMALL_SEGMENT - 1000
SIZES_AROUND_INTERVAL = (LARGE, 10, 10, ALONE, ALONE, LARGE, LARGE, LARGE, 10, 5000, 10)
# All numbers have three digits, so that all frames have one size.
EVEN = SMALL_SEGMENT // UNITS - 5 - len(encode_frame(spec(100, body=0), 0))
SHAPES = {
    # One before the boundary, on it, behind it; and a batch over many files.
    **{
        f"a queue file ends inside a batch, {first}": (
            in_parts([spec(number) for number in range(5 * UNITS)], first, first + 2), {}, (1, 5, 1)
        )
        for first in (UNITS - 1, 1)
    },
    # Round and round, so that all queues come to their boundary within one batch.
    "queue files end in many queues at once": (in_parts(ROUNDS, 21 * UNITS - 10, 21 * UNITS + 10), {}, (2, 63, 2)),
    **{
        f"segments of 64 KiB, interval {interval}": (
            in_parts(over_queues(3000, 9), 7, 1500), {"segment_size": SMALL_SEGMENT, "interval": interval}, (13, 48, 3)
        )
        for interval in (0, 4096)
    },
    # The first never gets an entry, the second gets one at once; a segment of one message gets none at all.
    "the first message of a segment is larger than the interval": (
        in_parts([spec(number, body=body) for number, body in enumerate(SIZES_AROUND_INTERVAL)], 4),
        {"segment_size": SMALL_SEGMENT}, (5, 1, 1),
    ),
    # Store times that do not rise.
    **{
        f"store times that are {kind}": (
            in_parts([spec(number, queue_id=number % 3, time=BEGIN + time, body=400) for number, time in times], 150),
            {"segment_size": SMALL_SEGMENT}, (4, 9, 1),
        )
        for kind, times in {
            "equal": [(number, 0) for number in range(400)],
            "falling": [(number, -number) for number in range(400)],
            "zero": [(number, -BEGIN) for number in range(400)],
            "by chance": [(number, number * 7919 % 5000) for number in range(400)],
        }.items()
    },
    # Three entries a message: 400 messages fill a file of 1201 to its last entry, and a drain ends right there.
    "index files are full exactly at a drain": (
        in_parts([spec(number, queue_id=number % 2) for number in range(1201)], 400, 800, 1200),
        {"index_num": 1201}, (1, 21, 4),
    ),
    "an index file, a queue file and a segment end at one drain": (
        in_parts([spec(number, body=EVEN) for number in range(100, 100 + 3 * UNITS)], UNITS, 2 * UNITS),
        {"index_num": 3 * UNITS + 1, "segment_size": SMALL_SEGMENT}, (3, 3, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_log_of_any_shape(tmp_path: Path, shape: str) -> None:
    """``build`` judges what is built; the numbers of segments, queue files and index files are those that are meant."""
    parts, sizes, counts = SHAPES[shape]
    store, data = build(tmp_path, parts, **sizes)
    segments = segments_of(frames(store, SEGMENT_SIZE), sizes.get("segment_size", SEGMENT_SIZE))
    assert (len(segments), len(tree(data / "consumequeue")), len(index_files(data))) == counts


MANY_SEGMENT_SIZE = 256 << 10
MANY_QUEUE_FILE_SIZE = 40
QUEUES, TOPICS = 1500, 100
DESCRIPTORS_MAX = 128
#: A kernel's compiled code and numpy alone take most of it.
MEMORY_MAX = 400 << 20
#: All files of a round are synced at each flush: not ten times a second.
CALM = {"INDEXD_FLUSH_INTERVAL": "2", "INDEXD_DRAIN_INTERVAL": "0.2"}
MANY_WORDS = flags(MANY_SEGMENT_SIZE, MANY_QUEUE_FILE_SIZE)
WAIT = 120.0


def round_of(number: int) -> list[FrameSpec]:
    """A message for every queue; no file holds more than two."""
    first = number * QUEUES
    return [spec(first + queue, f"Topic{queue % TOPICS}", queue // TOPICS, body=5) for queue in range(QUEUES)]


def test_thousands_of_queues(tmp_path: Path) -> None:
    """Killed in the middle of building, of syncing or of writing it down; at last most of them expire: each keeps its
    last file, those that go on expire theirs, and removal needs no descriptors either.
    """
    store, data, whole = (tmp_path / name for name in ("store", "data", "whole"))
    limited = (need("prlimit"), f"--nofile={DESCRIPTORS_MAX}:{DESCRIPTORS_MAX}")
    end = write(store, round_of(0), MANY_SEGMENT_SIZE)
    with Daemon(store, data, *MANY_WORDS, env=CALM, tracer=limited) as daemon:
        daemon.wait_state(lambda row: bool(row["durableOffset"] >= end), WAIT)
        end = write(store, [*round_of(1), *round_of(2)], MANY_SEGMENT_SIZE)
        daemon.wait_state(lambda row: bool(row["messages"] > QUEUES))
        assert daemon.peak_memory() < MEMORY_MAX
        daemon.kill()
    assert not still_degraded(daemon)
    with Daemon(store, data, *MANY_WORDS, env=CALM, tracer=limited) as again:
        again.wait_event("recovered")
        again.wait_caught_up(end, WAIT)
        assert again.peak_memory() < MEMORY_MAX
        assert again.terminate() == 0
    assert not [row for row in again.events() if row["level"] != "info"]
    assert_beside(data, store, MANY_SEGMENT_SIZE, MANY_QUEUE_FILE_SIZE)
    rebuild(store, whole, *MANY_WORDS)
    assert_same_index(data, whole)
    assert len(tree(data / "consumequeue")) == 2 * QUEUES
    expire(store, len(list((store / "commitlog").iterdir())) - 1)
    end = write(store, round_of(3)[:100], MANY_SEGMENT_SIZE)
    with Daemon(store, data, *MANY_WORDS, env=CALM, tracer=limited) as last:
        last.wait_event("expired_files", WAIT)
        last.wait_state(lambda row: bool(row["durableOffset"] >= end), WAIT)
        assert last.terminate() == 0
    assert not [row for row in last.events() if row["level"] != "info"]
    folders = [path for path in (data / "consumequeue").glob("*/*") if path.is_dir()]
    assert len(folders) == QUEUES
    assert {path.name for folder in folders for path in folder.iterdir()} == {f"{MANY_QUEUE_FILE_SIZE:020d}"}


OLD_SEGMENT_SIZE = 64 << 10
OLD_QUEUE_FILE_SIZE = 400
OLD_WORDS = flags(OLD_SEGMENT_SIZE, OLD_QUEUE_FILE_SIZE)


def expire(store: Path, count: int) -> None:
    """The oldest segments go as a broker's cleaning takes them."""
    for path in sorted((store / "commitlog").iterdir())[:count]:
        path.unlink()


def ask(data: Path, topic: str, queue_id: int, offset: int) -> Any:
    done = indexd_here("query-offset", "--json", "-t", topic, "-i", queue_id, "-o", offset, "--data", data)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def verify(store: Path, data: Path, *more: str) -> None:
    done = indexd_here("verify", "--deep", "--store", store, "--data", data, *OLD_WORDS, *more)
    assert done.returncode == 0, done.stdout + done.stderr


def entered(messages: list[NaiveMessage]) -> Iterator[NaiveMessage]:
    return (one for one in messages if one.sys_flag & 0xC in (0x0, 0x8))


def check_expired(store: Path, data: Path, before: list[NaiveMessage], log_begin: int) -> None:
    """As of a broker that built everything, cleaned, and went on."""
    now = frames(store, OLD_SEGMENT_SIZE)
    queues = queues_of(before, OLD_QUEUE_FILE_SIZE)
    assert queues.delete_expired(log_begin) > 0
    put(queues, [one for one in now if one.phy_offset > before[-1].phy_offset])
    assert_queues(data, queues)
    assert_sparse(data, now, OLD_SEGMENT_SIZE)
    for topic, queue_id, _, minimum, end, *_ in queues.marks():
        row = ask(data, topic, queue_id, 0)
        assert (row["minOffset"], row["maxOffset"]) == (minimum, end), (topic, queue_id)
        first = next((one for one in entered(now) if (one.topic, one.queue_id) == (topic, queue_id)), None)
        if first is not None:
            assert row["messages"][0]["phyOffset"] == first.phy_offset


def through(store: Path, data: Path, end: int, state: str, change: Callable[[], int], *events: str) -> None:
    """Let a daemon build up to ``end``, and change the log while it is in that state; one goes on to the new end."""

    def finish(daemon: Daemon, end: int) -> None:
        daemon.wait_caught_up(end)
        for event in events:
            daemon.wait_event(event)
            assert {row["level"] for row in daemon.events()} == {"info"}
        daemon.wait_durable(end)
        assert daemon.terminate() == 0

    with Daemon(store, data, *OLD_WORDS) as daemon:
        daemon.wait_durable(end)
        if state == "stopped":
            assert daemon.terminate() == 0
        elif state == "killed":
            daemon.kill()
        elif state == "paused":
            os.kill(daemon.pid, signal.SIGSTOP)
        end = change()
        if state in ("runs", "paused"):
            os.kill(daemon.pid, signal.SIGCONT)
            finish(daemon, end)
    if state in ("stopped", "killed"):
        with Daemon(store, data, *OLD_WORDS) as daemon:
            finish(daemon, end)


@pytest.mark.parametrize("state", ["runs", "stopped", "killed"])
def test_segments_expire(tmp_path: Path, state: str) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    # A queue that ends early, and one that is all but empty, each in a file of its own to the end.
    specs = [*(spec(number, "Rare", 1) for number in range(3)), *over_queues(3000, 6)]
    specs.insert(2500, spec(9000, "Once", 2))
    end = write(store, specs, OLD_SEGMENT_SIZE)
    before = frames(store, OLD_SEGMENT_SIZE)

    def change() -> int:
        expire(store, 5)
        return write(store, over_queues(900, 6, seed=3, first=10_000), OLD_SEGMENT_SIZE)

    through(store, data, end, state, change, "expired_files")
    check_expired(store, data, before, min(int(path.name) for path in (store / "commitlog").iterdir()))
    assert ask(data, "Rare", 1, 0)["status"] == "OFFSET_TOO_SMALL"
    assert ask(data, "Rare", 1, 3)["status"] == "OFFSET_OVERFLOW_ONE"
    assert ask(data, "Once", 2, 0)["status"] == "FOUND"
    verify(store, data)


@pytest.mark.parametrize(("state", "left"), [("stopped", 1), ("killed", 3), ("paused", 1), ("paused", 3)])
def test_the_log_expires_unread(tmp_path: Path, state: str, left: int) -> None:
    """What nobody has read is gone: no queue goes on in the places of the lost, each begins with its next message."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(1000, 6), OLD_SEGMENT_SIZE)

    def change() -> int:
        end = write(store, over_queues(4000, 9, seed=3, first=10_000), OLD_SEGMENT_SIZE)
        expire(store, len(list((store / "commitlog").iterdir())) - left)
        return end

    through(store, data, end, state, change)
    assert_beside(data, store, OLD_SEGMENT_SIZE, OLD_QUEUE_FILE_SIZE)
    first = next(entered(frames(store, OLD_SEGMENT_SIZE)))
    row = ask(data, first.topic, first.queue_id, 0)
    assert row["minOffset"] == first.cq_offset
    assert row["messages"][0]["phyOffset"] == first.phy_offset
    verify(store, data)


def spoil(store: Path, phy_offset: int) -> None:
    begin = phy_offset % OLD_SEGMENT_SIZE
    patch(store / "commitlog" / f"{phy_offset - begin:020d}", begin, b"\x5a" * 60)


def test_stretches_at_which_it_stops_and_which_it_skips(tmp_path: Path) -> None:
    """Everything before damage is in all outputs, and a restart stands there again. The messages that are skipped are
    in no output; those behind them take their places in a queue, as the broker's do.
    """
    store, data, whole = (tmp_path / name for name in ("store", "data", "whole"))
    write(store, over_queues(3000, 6), OLD_SEGMENT_SIZE)
    known = frames(store, OLD_SEGMENT_SIZE)
    rotten = {500, 501, 502, 1200}
    for number in rotten:
        spoil(store, known[number].phy_offset)
    readable = [one for number, one in enumerate(known) if number not in rotten]
    end = known[-1].phy_offset + known[-1].size
    skip = ("--on-corrupt", "skip")
    for _ in range(2):
        with Daemon(store, data, *OLD_WORDS, env={"INDEXD_CORRUPT_AFTER_MS": "200"}) as daemon:
            daemon.wait_event("corrupt")
            daemon.wait_durable(known[500].phy_offset)
            assert daemon.terminate() == 0
        assert_queues(data, queues_of(known[:500], OLD_QUEUE_FILE_SIZE))
        assert_sparse(data, known[:500], OLD_SEGMENT_SIZE)
    with Daemon(store, data, *OLD_WORDS, *skip, env={"INDEXD_CORRUPT_AFTER_MS": "200"}) as daemon:
        daemon.wait_caught_up(end)
        assert daemon.state()["consumeQueueGaps"] > 0
        assert daemon.terminate() == 0
    assert [row["bytes"] for row in daemon.events("skipped")]
    assert_queues(data, queues_of(readable, OLD_QUEUE_FILE_SIZE))
    assert_sparse(data, readable, OLD_SEGMENT_SIZE)
    rebuild(store, whole, *OLD_WORDS, *skip)
    assert_same_index(data, whole)
    verify(store, data, *skip)
