"""Logs whose shape meets a boundary of some output: built by daemon and rebuild, held against the slow truth."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING

import pytest

from indexd.index.format import IndexHeader
from support.beside_log import assert_beside, flags, frames, over_queues, segments_of, spec, write
from support.commitlog_writer import encode_frame
from support.daemon import Daemon, assert_same_index, index_files, indexd, rebuild

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from support.commitlog_writer import FrameSpec

SEGMENT_SIZE = 256 << 10
SMALL_SEGMENT = 64 << 10
QUEUE_FILE_SIZE = 1200
UNITS = QUEUE_FILE_SIZE // 20
DAY = 24 * 3_600_000
#: Each part of a log is drained before the next one is written.
SLOW = {
    "INDEXD_DRAIN_INTERVAL": "0.1",
    # Where the clock goes back, the newest message has to settle: one by one while it falls.
    "INDEXD_SETTLE_MS": "2",
}


def build(
    tmp_path: Path,
    parts: Sequence[Sequence[FrameSpec]],
    *more: object,
    segment_size: int = SEGMENT_SIZE,
    interval: int = 4096,
) -> tuple[Path, Path]:
    """Let a daemon take the log part by part, drain by drain; store and data after a clean stop, both judged."""
    store, data, whole = (tmp_path / name for name in ("store", "data", "whole"))
    words = flags(segment_size, QUEUE_FILE_SIZE, "--sparse-interval", interval, *more)
    (store / "commitlog").mkdir(parents=True)
    with Daemon(store, data, *words, env=SLOW) as daemon:
        for part in parts:
            daemon.wait_caught_up(write(store, part, segment_size))
        assert daemon.terminate() == 0
    assert not [row for row in daemon.events() if row["level"] != "info"]
    assert_beside(data, store, segment_size, QUEUE_FILE_SIZE, interval)
    rebuild(store, whole, *words)
    assert_same_index(data, whole)
    done = indexd("verify", "--deep", "--store", store, "--data", data, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return store, data


def files_of(data: Path, queue: str) -> list[str]:
    return sorted(path.name for path in (data / "consumequeue" / queue).iterdir())


@pytest.mark.parametrize("first", [UNITS - 1, UNITS, UNITS + 1, 1])
def test_a_queue_file_ends_inside_a_batch(tmp_path: Path, first: int) -> None:
    """One before the boundary, on it, behind it; and a batch over many files."""
    numbers = [range(first), range(first, first + 2), range(first + 2, 5 * UNITS)]
    _, data = build(tmp_path, [[spec(number) for number in part] for part in numbers])
    assert files_of(data, "TopicTest/0") == [f"{QUEUE_FILE_SIZE * number:020d}" for number in range(5)]


def test_queue_files_end_in_many_queues_at_once(tmp_path: Path) -> None:
    """Round and round, so that all queues come to their boundary within one batch."""
    specs = [spec(number, f"T{number % 7}", number // 7 % 3) for number in range(21 * (2 * UNITS + 1))]
    _, data = build(
        tmp_path, [specs[: 21 * UNITS - 10], specs[21 * UNITS - 10 : 21 * UNITS + 10], specs[21 * UNITS + 10 :]]
    )
    assert all(len(files_of(data, f"T{topic}/{queue}")) == 3 for topic in range(7) for queue in range(3))


def test_a_queue_with_one_message_a_day(tmp_path: Path) -> None:
    """A year of it in a topic of its own, beside one that is busy; asked by time, day by day."""
    specs, rare = [], []
    for day in range(80):
        time = 1_700_000_000_000 + day * DAY
        rare.append(time)
        specs.append(spec(day, "Daily", 3, time=time))
        specs += [spec(1000 + 20 * day + n, "Busy", n % 2, time=time + 1 + n) for n in range(20)]
    store, data = build(tmp_path, [specs[:500], specs[500:]], segment_size=SMALL_SEGMENT)
    assert files_of(data, "Daily/3") == [f"{0:020d}", f"{QUEUE_FILE_SIZE:020d}"]
    for day, (asked, boundary, wanted) in enumerate(
        [(rare[7], "lower", 7), (rare[7] + 1, "lower", 8), (rare[7] + DAY - 1, "upper", 7), (rare[79], "upper", 79)]
    ):
        words = ("query-time", "--json", "-t", "Daily", "-i", 3, "-s", asked, "--boundary", boundary, "--data", data)
        done = indexd(*words)
        assert done.returncode == 0, done.stderr
        row = json.loads(done.stdout)
        assert (row["queueOffset"], row["storeTimestamp"]) == (wanted, rare[wanted]), day
    done = indexd("query-time", "--json", "--log", "-s", rare[40], "--data", data)
    daily = [one.phy_offset for one in frames(store, SMALL_SEGMENT) if one.topic == "Daily"]
    assert json.loads(done.stdout)["phyOffset"] == daily[40]


@pytest.mark.parametrize("interval", [0, 4096, 1 << 20])
def test_segments_of_64_kib(tmp_path: Path, interval: int) -> None:
    specs = over_queues(3000, 9)
    store, data = build(
        tmp_path, [specs[:7], specs[7:1500], specs[1500:]], segment_size=SMALL_SEGMENT, interval=interval
    )
    assert len(segments_of(frames(store, SMALL_SEGMENT), SMALL_SEGMENT)) > 5
    sizes = {path.stat().st_size for path in (data / "sparse").glob("*.index")}
    assert (interval == 1 << 20) == (0 in sizes)


def test_a_segment_whose_first_message_is_larger_than_the_interval(tmp_path: Path) -> None:
    """The first message never gets an entry, the second gets one at once; a segment of one message gets none at all."""
    large = 20_000
    alone = SMALL_SEGMENT - 1000
    bodies = [large, 10, 10, alone, alone, large, large, large, 10, 5000, 10]
    specs = [spec(number, body=body) for number, body in enumerate(bodies)]
    store, data = build(tmp_path, [specs[:4], specs[4:]], segment_size=SMALL_SEGMENT)
    parts = segments_of(frames(store, SMALL_SEGMENT), SMALL_SEGMENT)
    assert [len(part) for part in parts] == [3, 1, 1, 4, 2]
    entries = (data / "sparse" / f"{0:020d}.index").read_bytes()
    assert entries == (1).to_bytes(4, "big") + parts[0][1].phy_offset.to_bytes(4, "big")
    assert (data / "sparse" / f"{SMALL_SEGMENT:020d}.index").read_bytes() == b""
    # The roll still writes down when it was.
    assert (data / "sparse" / f"{SMALL_SEGMENT:020d}.timeindex").stat().st_size == 12


@pytest.mark.parametrize("kind", ["equal", "falling", "rising and falling", "zero", "by chance"])
def test_store_times_that_do_not_rise(tmp_path: Path, kind: str) -> None:
    rand, count = random.Random(7), 400
    begin = 1_700_000_000_000
    times = {
        "equal": [begin] * count,
        "falling": [begin - number for number in range(count)],
        "rising and falling": [begin + (number % 50) * (1 if number // 50 % 2 else -1) for number in range(count)],
        "zero": [0] * count,
        "by chance": [begin + rand.randrange(5000) for _ in range(count)],
    }[kind]
    specs = [spec(number, queue_id=number % 3, time=time, body=400) for number, time in enumerate(times)]
    store, data = build(tmp_path, [specs[:150], specs[150:]], segment_size=SMALL_SEGMENT)
    # The first message of that time or later, whatever comes behind it.
    for asked in (min(times), begin, max(times), max(times) + 1):
        done = indexd("query-time", "--json", "--log", "-s", asked, "--data", data)
        assert done.returncode == 0, done.stderr
        found = [one.phy_offset for one in frames(store, SMALL_SEGMENT) if one.store_timestamp >= asked]
        assert json.loads(done.stdout)["phyOffset"] == (found[0] if found else None), asked


def test_index_files_that_are_full_exactly_at_a_drain(tmp_path: Path) -> None:
    """Three entries a message: 400 messages fill a file of 1201 to its last entry, and a drain ends right there."""
    specs = [spec(number, queue_id=number % 2) for number in range(1201)]
    parts = [specs[:400], specs[400:800], specs[800:1200], specs[1200:]]
    _, data = build(tmp_path, parts, "--index-num", 1201)
    counts = [IndexHeader.unpack(path.read_bytes()).index_count for path in index_files(data)]
    assert counts == [1201, 1201, 1201, 4]


def test_all_boundaries_at_one_drain(tmp_path: Path) -> None:
    """A drain ends where an index file, a queue file and, with the next message, a segment end."""
    first = 100  # all numbers have three digits, so that all frames have one size
    body = SMALL_SEGMENT // UNITS - 5 - len(encode_frame(spec(first, body=0), 0))
    specs = [spec(number, body=body) for number in range(first, first + 3 * UNITS)]
    store, data = build(
        tmp_path,
        [specs[:UNITS], specs[UNITS : 2 * UNITS], specs[2 * UNITS :]],
        "--index-num", 3 * UNITS + 1,
        segment_size=SMALL_SEGMENT,
    )  # fmt: skip
    parts = segments_of(frames(store, SMALL_SEGMENT), SMALL_SEGMENT)
    assert [len(part) for part in parts] == [UNITS] * 3
    assert len(files_of(data, "TopicTest/0")) == len(index_files(data)) == 3
