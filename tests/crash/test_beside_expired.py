"""Segments that expire, read or unread, and bytes that cannot be read: what is left of queues and sparse indexes."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

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
    spec,
    write,
)
from support.daemon import Daemon, assert_same_index, indexd, indexd_here, rebuild

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.naive import NaiveMessage

SEGMENT_SIZE = 64 << 10
QUEUE_FILE_SIZE = 400
WORDS = flags(SEGMENT_SIZE, QUEUE_FILE_SIZE)


def expire(store: Path, count: int) -> int:
    """The oldest segments go as a broker's cleaning takes them; where the log begins now."""
    segments = sorted((store / "commitlog").iterdir())
    for path in segments[:count]:
        path.unlink()
    return int(segments[count].name)


def ask(data: Path, topic: str, queue_id: int, offset: int) -> dict[str, Any]:
    done = indexd_here("query-offset", "--json", "-t", topic, "-i", queue_id, "-o", offset, "--data", data)
    assert done.returncode == 0, done.stderr
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def verify(store: Path, data: Path, *more: str) -> None:
    done = indexd("verify", "--deep", "--store", store, "--data", data, *WORDS, *more)
    assert done.returncode == 0, done.stdout + done.stderr


def entered(messages: list[NaiveMessage]) -> Iterator[NaiveMessage]:
    return (one for one in messages if one.sys_flag & 0xC in (0x0, 0x8))


def check_expired(store: Path, data: Path, before: list[NaiveMessage], log_begin: int) -> None:
    """As of a broker that built everything, cleaned, and went on."""
    now = frames(store, SEGMENT_SIZE)
    queues = queues_of(before, QUEUE_FILE_SIZE)
    assert queues.delete_expired(log_begin) > 0
    put(queues, [one for one in now if one.phy_offset > before[-1].phy_offset])
    assert_queues(data, queues)
    assert_sparse(data, now, SEGMENT_SIZE)
    for topic, queue_id, _, minimum, end, _, _ in queues.marks():
        row = ask(data, topic, queue_id, 0)
        assert (row["minOffset"], row["maxOffset"]) == (minimum, end), (topic, queue_id)
        first = next((one for one in entered(now) if (one.topic, one.queue_id) == (topic, queue_id)), None)
        if first is not None:
            assert row["messages"][0]["phyOffset"] == first.phy_offset


@pytest.mark.parametrize("state", ["runs", "stopped", "killed"])
def test_segments_expire(tmp_path: Path, state: str) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    # A queue that ends early, and one that is all but empty, each in a file of its own to the end.
    specs = [*(spec(number, "Rare", 1) for number in range(3)), *over_queues(3000, 6)]
    specs.insert(2500, spec(9000, "Once", 2))
    end = write(store, specs, SEGMENT_SIZE)
    before = frames(store, SEGMENT_SIZE)
    with Daemon(store, data, *WORDS) as daemon:
        daemon.wait_durable(end)
        if state == "stopped":
            assert daemon.terminate() == 0
        elif state == "killed":
            daemon.kill()
        log_begin = expire(store, 5)
        end = write(store, over_queues(900, 6, seed=3, first=10_000), SEGMENT_SIZE)
        if state == "runs":
            finish(daemon, end)
    if state != "runs":
        with Daemon(store, data, *WORDS) as daemon:
            finish(daemon, end)
    check_expired(store, data, before, log_begin)
    assert ask(data, "Rare", 1, 0)["status"] == "OFFSET_TOO_SMALL"
    assert ask(data, "Rare", 1, 3)["status"] == "OFFSET_OVERFLOW_ONE"
    assert ask(data, "Once", 2, 0)["status"] == "FOUND"
    verify(store, data)


def finish(daemon: Daemon, end: int) -> None:
    daemon.wait_caught_up(end)
    daemon.wait_event("expired_files")
    daemon.wait_durable(end)
    assert daemon.terminate() == 0
    assert {row["level"] for row in daemon.events()} == {"info"}


def test_a_queue_with_one_message_a_day_of_which_all_but_the_last_have_expired(tmp_path: Path) -> None:
    """Of the other queue so many come that a day is a segment and more; two segments are kept."""
    store, data = tmp_path / "store", tmp_path / "data"
    days, busy, log_begin, last = 40, 350, 0, -1
    queues = queues_of([], QUEUE_FILE_SIZE)
    (store / "commitlog").mkdir(parents=True)
    with Daemon(store, data, *WORDS) as daemon:
        for day in range(days):
            specs = [spec(100_000 + day, "Daily"), *(spec(busy * day + number, "Busy") for number in range(busy))]
            offsets = {("Daily", 0): day, ("Busy", 0): busy * day}
            daemon.wait_durable(write(store, specs, SEGMENT_SIZE, offsets=offsets))
            now = frames(store, SEGMENT_SIZE)
            put(queues, [one for one in now if one.phy_offset > last])
            last = now[-1].phy_offset
            if day > 1:
                log_begin = expire(store, len(list((store / "commitlog").iterdir())) - 2)
                queues.delete_expired(log_begin)
        # The segments are listed anew now and then.
        daemon.wait_state(lambda row: bool(row["commitLogMinOffset"] == log_begin))
        assert daemon.terminate() == 0
    assert_queues(data, queues)
    assert_sparse(data, frames(store, SEGMENT_SIZE), SEGMENT_SIZE)
    assert sorted(path.name for path in (data / "consumequeue" / "Daily" / "0").iterdir()) == [f"{400:020d}"]
    row = ask(data, "Daily", 0, 0)
    assert (row["status"], row["maxOffset"]) == ("OFFSET_TOO_SMALL", days)
    assert days - 3 <= row["minOffset"] < days
    assert len(row["messages"]) == days - row["minOffset"]
    verify(store, data)


@pytest.mark.parametrize("state", ["stopped", "killed", "paused"])
@pytest.mark.parametrize("left", [1, 3])
def test_the_log_expires_unread(tmp_path: Path, state: str, left: int) -> None:
    """What nobody has read is gone: no queue goes on in the places of the lost, each begins with its next message."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(1000, 6), SEGMENT_SIZE)
    with Daemon(store, data, *WORDS) as daemon:
        daemon.wait_durable(end)
        if state == "stopped":
            assert daemon.terminate() == 0
        elif state == "killed":
            daemon.kill()
        else:
            os.kill(daemon.pid, signal.SIGSTOP)
        end = write(store, over_queues(4000, 9, seed=3, first=10_000), SEGMENT_SIZE)
        expire(store, len(list((store / "commitlog").iterdir())) - left)
        if state == "paused":
            os.kill(daemon.pid, signal.SIGCONT)
            daemon.wait_caught_up(end)
            daemon.wait_durable(end)
            assert daemon.terminate() == 0
    if state != "paused":
        with Daemon(store, data, *WORDS) as daemon:
            daemon.wait_caught_up(end)
            daemon.wait_durable(end)
            assert daemon.terminate() == 0
    assert_beside(data, store, SEGMENT_SIZE, QUEUE_FILE_SIZE)
    first = next(entered(frames(store, SEGMENT_SIZE)))
    row = ask(data, first.topic, first.queue_id, 0)
    assert row["minOffset"] == first.cq_offset
    assert row["messages"][0]["phyOffset"] == first.phy_offset
    verify(store, data)


def test_a_stretch_that_is_skipped(tmp_path: Path) -> None:
    """The messages there are in no output; those behind it take their places in a queue, as the broker's do."""
    store, data, whole = (tmp_path / name for name in ("store", "data", "whole"))
    write(store, over_queues(3000, 6), SEGMENT_SIZE)
    known = frames(store, SEGMENT_SIZE)
    rotten = {500, 501, 502, 1200}
    for number in rotten:
        path = store / "commitlog" / f"{known[number].phy_offset // SEGMENT_SIZE * SEGMENT_SIZE:020d}"
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), b"\x5a" * 60, known[number].phy_offset % SEGMENT_SIZE)
    readable = [one for number, one in enumerate(known) if number not in rotten]
    end = known[-1].phy_offset + known[-1].size
    skip = ("--on-corrupt", "skip")
    with Daemon(store, data, *WORDS, *skip, env={"INDEXD_CORRUPT_AFTER_MS": "200"}) as daemon:
        daemon.wait_caught_up(end)
        assert daemon.state()["consumeQueueGaps"] > 0
        assert daemon.terminate() == 0
    assert [row["bytes"] for row in daemon.events("skipped")]
    assert_queues(data, queues_of(readable, QUEUE_FILE_SIZE))
    assert_sparse(data, readable, SEGMENT_SIZE)
    rebuild(store, whole, *WORDS, *skip)
    assert_same_index(data, whole)
    verify(store, data, *skip)


def test_a_stretch_at_which_it_stops(tmp_path: Path) -> None:
    """Everything before it is in all outputs, and a restart stands there again."""
    store, data = tmp_path / "store", tmp_path / "data"
    write(store, over_queues(3000, 6), SEGMENT_SIZE)
    known = frames(store, SEGMENT_SIZE)
    at = known[700].phy_offset
    with (store / "commitlog" / f"{at // SEGMENT_SIZE * SEGMENT_SIZE:020d}").open("r+b") as file:
        os.pwrite(file.fileno(), b"\x5a" * 60, at % SEGMENT_SIZE)
    for _ in range(2):
        with Daemon(store, data, *WORDS, env={"INDEXD_CORRUPT_AFTER_MS": "200"}) as daemon:
            daemon.wait_event("corrupt")
            daemon.wait_durable(at)
            assert daemon.terminate() == 0
        assert_queues(data, queues_of(known[:700], QUEUE_FILE_SIZE))
        assert_sparse(data, known[:700], SEGMENT_SIZE)
