"""What a service manager hears of a running daemon: nothing that is good while a stage hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from indexd.errors import MissingStoreError
from support.inside import notifier_of, opened_inside, row_of, running, wait_until
from support.small_log import write_log

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("stage", ["read", "build", "flush"])
async def test_a_stage_that_hangs_stops_the_watchdogs_food(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    store, release, hangs = tmp_path / "store", threading.Event(), threading.Event()
    end = write_log(store, 200)
    with opened_inside(store, tmp_path / "data", watchdog=1.0) as daemon:
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


async def test_a_configuration_that_hangs_holds_up_neither_the_index_nor_a_stop(tmp_path: Path) -> None:
    store, release, hangs = tmp_path / "store", threading.Event(), threading.Event()
    end = write_log(store, 100)
    with opened_inside(store, tmp_path / "data") as daemon:
        config = daemon._instance.config

        def read() -> Any:
            hangs.set()
            release.wait(60)
            return config

        daemon._instance.reload_config = read
        async with running(daemon):
            await wait_until(lambda: row_of(daemon)["caughtUp"])
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGHUP)
            await wait_until(hangs.is_set)
            end = write_log(store, 50, start_offset=end, seed=2)
            await wait_until(lambda: row_of(daemon)["durableOffset"] == end)
            release.set()
            events = daemon._board.events
            await wait_until(lambda: [event.name for event in events.since(0)].count("reloaded") == 2)
            assert not daemon._instance.is_reload_due
            release.clear()
            hangs.clear()
            os.kill(os.getpid(), signal.SIGHUP)
            await wait_until(hangs.is_set)
            began = time.monotonic()
        assert time.monotonic() - began < 10
        assert daemon._instance.is_reload_due, "whoever goes on here has to follow it"
        release.set()
