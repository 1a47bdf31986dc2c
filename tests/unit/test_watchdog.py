"""What a service manager hears of a running daemon: nothing that is good while a stage hangs; what a HUP changes.

StageLiveness, by a clock of its own: an announced wait is no stall, nor is a long step that gets further.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from indexd.config import load
from indexd.errors import MissingStoreError
from indexd.service.instance import RELOADABLE, StageLiveness, changed_keys, merge_reloadable
from support.inside import config_of, notifier_of, opened_inside, row_of, running, wait_until
from support.reading import Clock
from support.small_log import write_log

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("stage", ["read", "build", "flush"])
async def test_a_stage_that_hangs_stops_the_watchdogs_food(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    store, release, hangs = tmp_path / "store", threading.Event(), threading.Event()
    end = write_log(store, 200)
    with opened_inside(store, tmp_path / "data", watchdog=3.0) as daemon:
        owner: Any = {"read": daemon.reader, "build": daemon.pipeline, "flush": daemon.pipeline}[stage]
        name = {"read": "poll", "build": "apply", "flush": "persist"}[stage]
        method = getattr(owner, name)

        def hang(*given: Any) -> Any:
            if not release.is_set():
                hangs.set()
                release.wait(60)
            return method(*given)

        async with running(daemon):
            await wait_until(lambda: row_of(daemon)["durableOffset"] == end)
            await wait_until(lambda: notifier_of(daemon).pings > 3)
            monkeypatch.setattr(owner, name, hang)
            write_log(store, 50, start_offset=end, seed=2)
            await wait_until(hangs.is_set)
            await wait_until(lambda: stage in row_of(daemon)["stalled"])
            pings = notifier_of(daemon).pings
            with pytest.raises(TimeoutError):
                await wait_until(lambda: notifier_of(daemon).pings > pings, 1.5)
            assert row_of(daemon)["stalled"].keys() == {stage}
            release.set()
            await wait_until(lambda: notifier_of(daemon).pings > pings)
            assert row_of(daemon)["stalled"] == {}
        told = [event.name for event in daemon._board.events.since(0) if event.kind == "stall"]
        assert told == ["stalled", "moves_again"]


async def test_a_log_that_is_gone_is_waited_for_and_is_no_stall(tmp_path: Path) -> None:
    store = tmp_path / "store"
    write_log(store, 100)
    with opened_inside(store, tmp_path / "data", watchdog=0.6, retry_max_seconds="5") as daemon:
        poll = daemon.reader.poll

        def refuse() -> Any:
            raise MissingStoreError("unmounted")

        async with running(daemon):
            await wait_until(lambda: row_of(daemon)["caughtUp"])
            daemon.reader.poll = refuse  # type: ignore[method-assign]  # a log that cannot be read
            await wait_until(lambda: "read" in row_of(daemon)["problems"])
            pings = notifier_of(daemon).pings
            await wait_until(lambda: notifier_of(daemon).pings > pings + 8)
            row = row_of(daemon)
            assert row["stalled"] == {}
            assert not row["caughtUp"]
            assert row["dispatchBehindMilliseconds"] > 500, "the log may have gone on unseen"
            daemon.reader.poll = poll  # type: ignore[method-assign]
            await wait_until(lambda: row_of(daemon)["caughtUp"])
            await wait_until(lambda: row_of(daemon)["dispatchBehindMilliseconds"] == 0)


async def test_a_look_around_that_hangs_is_said_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "store", 100)
    monkeypatch.setattr("indexd.service.daemon._AROUND_SECONDS", 0.5)
    with opened_inside(tmp_path / "store", tmp_path / "data", watchdog=0.4) as daemon:
        async with running(daemon):
            await wait_until(lambda: row_of(daemon)["caughtUp"])
            assert row_of(daemon)["problems"] == {}
            daemon._instance.looked_around = time.monotonic()
            await wait_until(lambda: "around" in row_of(daemon)["problems"])
            pings = notifier_of(daemon).pings
            await wait_until(lambda: notifier_of(daemon).pings > pings)
            assert row_of(daemon)["stalled"] == {}
            assert "a file system that hangs" in row_of(daemon)["problems"]["around"]
            daemon._instance.looked_around = time.monotonic() + 60
            await wait_until(lambda: row_of(daemon)["problems"] == {})


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def liveness(clock: Clock) -> StageLiveness:
    return StageLiveness(10.0, clock)


def test_each_stage_has_its_own_limit(liveness: StageLiveness, clock: Clock) -> None:
    liveness.sign("read")
    liveness.sign("build")
    clock.now += 5.1
    assert liveness.stalled() == {"read": 5.1}
    clock.now += 5
    assert liveness.stalled() == {"read": 10.1, "build": 10.1}
    liveness.sign("read")
    assert liveness.stalled() == {"build": 10.1}
    liveness.sign("build")
    assert liveness.stalled() == {}


def test_an_announced_wait_is_no_stall_until_it_is_over(liveness: StageLiveness, clock: Clock) -> None:
    liveness.sign("build")
    liveness.sign("read", 60.0)
    for _ in range(65):
        clock.now += 1
        liveness.sign("build")
        assert liveness.stalled() == {}
    clock.now += 0.5
    assert liveness.stalled() == {"read": 65.5}


def test_a_step_is_alive_as_long_as_it_gets_further(liveness: StageLiveness, clock: Clock) -> None:
    liveness.sign("flush", progress=0)
    for files in range(1, 50):
        clock.now += 9
        liveness.sign("read")
        liveness.sign("build")
        liveness.watch("flush", files)
        assert liveness.stalled() == {}
    clock.now += 9
    liveness.watch("flush", 49)
    clock.now += 2
    liveness.watch("flush", 49)
    assert liveness.stalled()["flush"] == 11


def test_nothing_is_asked_of_a_stage_at_rest(liveness: StageLiveness, clock: Clock) -> None:
    liveness.sign("read", 1e9)
    liveness.sign("build", 1e9)
    clock.now += 1e6
    assert liveness.stalled() == {}, "no flush has begun"
    liveness.sign("flush", progress=3)
    liveness.rest("flush")
    liveness.watch("flush", 9)
    clock.now += 1e6
    assert liveness.stalled() == {}


def test_without_a_watchdog_there_is_a_limit_all_the_same(clock: Clock) -> None:
    liveness = StageLiveness(None, clock)
    clock.now += 61
    assert set(liveness.stalled()) == {"read", "build"}


def test_what_a_hup_changes_and_what_it_does_not(tmp_path: Path) -> None:
    old = config_of(tmp_path, tmp_path / "data")
    new = load(
        {
            "store": str(tmp_path), "data": str(tmp_path / "data"), "disk_used_max": "0.5", "read_rate_max": "1MiB",
            "memory_max": "1GiB", "drop_cache": "false", "broker_check_interval": "1", "http": "127.0.0.1:1",
            "mqtt_host": "localhost", "cluster": "other", "queues_max": "5", "drain_interval": "9",
        },
        None,
        {"HOME": "/nowhere"},
    )  # fmt: skip
    changed = changed_keys(old, new)
    assert {
        "disk_used_max",
        "read_rate_max",
        "memory_max",
        "drop_cache",
        "broker_check_interval",
    } <= changed & RELOADABLE
    assert {"http", "mqtt_host", "cluster", "queues_max"} <= changed - RELOADABLE
    merged = merge_reloadable(old, new)
    assert merged.limits == new.limits
    assert merged.node.broker_check_interval == 1
    assert merged.queue.drain_interval == 9
    assert (merged.http, merged.mqtt, merged.outputs) == (old.http, old.mqtt, old.outputs)
    assert merged.node.cluster is None
    assert changed_keys(merged, new) == changed - RELOADABLE
    assert all(merge_reloadable(old, old).model_dump()[key] == value for key, value in old.model_dump().items())
