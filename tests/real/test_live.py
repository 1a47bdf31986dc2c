"""The daemon beside RocketMQ's own store while that writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from indexd.index.format import IndexHeader
from support.daemon import Daemon, assert_same_index, index_files, rebuild
from support.rocketmq import REAL, arguments, start

pytestmark = REAL


SLOTS = 20_000
#: What the writer has if it is not told.
QUEUE_FILE_SIZE = 6000
#: All that may be said: neither corruption nor anything skipped.
EVENTS = {"starting", "created", "running", "rolled", "stopping", "stopped"}


def flags(segment: int, entries: int) -> tuple[str, ...]:
    return (
        *("--segment-size", str(segment)),
        *("--hash-slot-num", str(SLOTS)),
        *("--index-num", str(entries)),
        *("--consume-queue-file-size", str(QUEUE_FILE_SIZE)),
    )


@pytest.mark.parametrize(
    ("count", "segment", "entries", "options"),
    [
        (120_000, 4 << 20, 60_000, {"profile": "plain"}),
        (30_000, 256 << 10, 5_000, {"profile": "varied", "seed": 3}),
        # 4000 entries are 1000 messages of four: every file ends between two of them, and the last one is just full.
        (5_000, 1 << 20, 4_001, {"profile": "plain", "pauseEvery": 1000, "pauseMs": 200}),
        # A buffer of the pool reaches the file in pieces, at a time of RocketMQ's choosing.
        (30_000, 1 << 20, 20_000, {"profile": "varied", "seed": 4, "transientpool": True}),
    ],
    ids=["plain", "varied", "in bursts", "transient pool"],
)
def test_the_index_that_was_built_beside_the_writer_is_the_writers_own(
    tmp_path: Path, count: int, segment: int, entries: int, options: dict[str, Any]
) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    (store / "commitlog").mkdir(parents=True)
    words = arguments(store=store, count=count, segment=segment, slots=SLOTS, entries=entries, hold=True, **options)
    with Daemon(store, data, *flags(segment, entries)) as daemon:
        daemon.wait_event("running")
        with start("Store", "write", *words, home=tmp_path / "jvm") as writer:
            assert writer.line(60) == "ready"
            figures = writer.figures(120)
            behind = figures["maxOffset"] - daemon.state()["phyOffset"]
            state = daemon.wait_state(lambda row: bool(row["messages"] >= count))
            assert state["messages"] == count
            if "transientpool" not in options:  # with it the figures come before the last messages reach the file
                assert state["phyOffset"] == figures["maxOffset"]
                # Both hold their files open: nothing but what was put is in them, not even an index count of 1.
                assert_same_index(data, store)
            print(f"{figures['messagesPerSecond']}/s written, {behind} bytes behind at the end")
        assert daemon.terminate() == 0
        # The writer holds the lock of a broker, which may be seen.
        assert {row["event"] for row in daemon.events()} - {"broker"} == EVENTS
    assert writer.returncode == 0
    # Both have stopped: the last file's index count is at least 1 in both.
    assert_same_index(data, store)
    last = index_files(store)[-1].read_bytes()
    assert IndexHeader.unpack(last).pack() == last[:40]
    rebuild(store, tmp_path / "again", *flags(segment, entries))
    assert_same_index(tmp_path / "again", store)


def test_a_daemon_that_is_killed_beside_the_writer(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    (store / "commitlog").mkdir(parents=True)
    words = arguments(
        store=store, count=30_000, segment=1 << 20, slots=SLOTS, entries=10_000, hold=True,
        profile="varied", seed=5, pauseEvery=1000, pauseMs=150,
    )  # fmt: skip
    with start("Store", "write", *words, home=tmp_path / "jvm") as writer:
        assert writer.line(60) == "ready"
        for _ in range(3):
            with Daemon(store, data, *flags(1 << 20, 10_000)) as daemon:
                daemon.wait_event("running")
                daemon.wait_event("rolled")
        figures = writer.figures(120)
        with Daemon(store, data, *flags(1 << 20, 10_000)) as daemon:
            daemon.wait_caught_up(figures["maxOffset"])
            assert daemon.terminate() == 0
    assert writer.returncode == 0
    assert_same_index(data, store)
