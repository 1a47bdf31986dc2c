"""The daemon in the test's own process: what a service manager hears while a stage hangs, and what is looked at around
it in a thread of its own, for which nobody waits. StageLiveness by a clock of its own; what a HUP changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.segments import NOBODY
from indexd.config import Config, load
from indexd.errors import MissingStoreError
from indexd.service.broker import Around
from indexd.service.daemon import Daemon
from indexd.service.instance import RELOADABLE, Instance, StageLiveness, changed_keys, merge_reloadable
from support.inside import config_of, make_instance, notifier_of, opened_inside, row_of, running, wait_until
from support.reading import Clock
from support.sim_daemon import SilentLog
from support.small_log import write_log

# --- stages ---


@pytest.mark.parametrize(("stage", "method"), [("read", "poll"), ("build", "apply"), ("flush", "persist")])
async def test_a_stage_that_hangs_stops_the_watchdogs_food(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, method: str
) -> None:
    store, release, hangs = tmp_path / "store", threading.Event(), threading.Event()
    end = write_log(store, 200)
    with opened_inside(store, tmp_path / "data", watchdog=3.0) as daemon:
        owner: Any = daemon.reader if stage == "read" else daemon.pipeline
        call, notifier = getattr(owner, method), notifier_of(daemon)

        def hang(*given: Any) -> Any:
            if not release.is_set():
                hangs.set()
                release.wait(60)
            return call(*given)

        async with running(daemon):
            await wait_until(lambda: row_of(daemon)["durableOffset"] == end)
            await wait_until(lambda: notifier.pings > 3)
            monkeypatch.setattr(owner, method, hang)
            write_log(store, 50, start_offset=end, seed=2)
            await wait_until(hangs.is_set)
            await wait_until(lambda: stage in row_of(daemon)["stalled"])
            pings = notifier.pings
            with pytest.raises(TimeoutError):
                await wait_until(lambda: notifier.pings > pings, 1.5)
            assert row_of(daemon)["stalled"].keys() == {stage}
            release.set()
            await wait_until(lambda: notifier.pings > pings)
            assert row_of(daemon)["stalled"] == {}
        told = [event.name for event in daemon._board.events.since(0) if event.kind == "stall"]
        assert told == ["stalled", "moves_again"]


async def test_a_log_that_is_gone_is_waited_for_and_is_no_stall(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 100)
    with opened_inside(tmp_path / "store", tmp_path / "data", watchdog=0.6, retry_max_seconds="5") as daemon:
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


def test_an_announced_wait_is_no_stall_until_it_is_over(liveness: StageLiveness, clock: Clock) -> None:
    liveness.sign("read", 60.0)
    clock.now += 65
    liveness.sign("build")
    assert liveness.stalled() == {}
    clock.now += 0.5
    assert liveness.stalled() == {"read": 65.5}


def test_a_step_is_alive_as_long_as_it_gets_further(liveness: StageLiveness, clock: Clock) -> None:
    liveness.sign("read", 1e9)
    liveness.sign("build", 1e9)
    clock.now += 1e6
    assert liveness.stalled() == {}, "no flush has begun"
    liveness.sign("flush", progress=0)
    for files in (1, 2, 2):
        clock.now += 9
        assert "flush" not in liveness.stalled()
        liveness.watch("flush", files)
    clock.now += 2
    assert liveness.stalled() == {"flush": 11}
    liveness.rest("flush")
    assert liveness.stalled() == {}


def test_without_a_watchdog_there_is_a_limit_all_the_same(clock: Clock) -> None:
    liveness = StageLiveness(None, clock)
    clock.now += 61
    assert set(liveness.stalled()) == {"read", "build"}


async def test_a_drain_begins_so_early_that_it_is_over_by_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_log(tmp_path / "store", 10)
    begun: list[float] = []

    def build(_: object) -> None:
        begun.append(time.monotonic())
        time.sleep(0.6)

    with opened_inside(tmp_path / "store", tmp_path / "data", drain_interval="2") as daemon:
        monkeypatch.setattr(daemon, "_build_now", build)
        async with running(daemon):
            await wait_until(lambda: len(begun) > 3)
    assert 1.2 < begun[3] - begun[2] < 1.9


def test_what_a_hup_changes_and_what_it_does_not(tmp_path: Path) -> None:
    old = config_of(tmp_path, tmp_path / "data")
    reloadable = {
        "disk_used_max": "0.5", "read_rate_max": "1MiB", "memory_max": "1GiB", "drop_cache": "false",
        "broker_check_interval": "1", "drain_interval": "9",
    }  # fmt: skip
    others = {"http": "127.0.0.1:1", "mqtt_host": "localhost", "cluster": "other", "queues_max": "5"}
    given: dict[str, Any] = {"store": str(tmp_path), "data": str(tmp_path / "data")} | reloadable | others
    new = load(given, None, {"HOME": "/nowhere"})
    changed = changed_keys(old, new)
    assert reloadable.keys() <= changed & RELOADABLE
    assert others.keys() <= changed - RELOADABLE
    merged = merge_reloadable(old, new)
    assert merged.limits == new.limits
    assert (merged.node.broker_check_interval, merged.queue.drain_interval) == (1, 9)
    assert (merged.http, merged.mqtt, merged.outputs) == (old.http, old.mqtt, old.outputs)
    assert merged.node.cluster is None
    assert changed_keys(merged, new) == changed - RELOADABLE
    assert merge_reloadable(old, old) == old


# --- around ---


class FakeLimit:
    """A broker that is what the test says, and what it named."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"alive": True, "indexing": False, "unsafe": []}
        self.hold: Callable[[], object] = lambda: None
        self.bounds = self.has_messages = self.is_closed = False
        self.offset: int | None = None
        self.address: str | None = None
        self.looks = 0

    def look(self) -> dict[str, Any]:
        self.looks += 1
        self.hold()
        return dict(self.found)

    def close(self) -> None:
        self.is_closed = True

    def ask(self, *_: object) -> int | None:
        return self.offset

    def ends_at(self, *_: object) -> bool:
        return False

    def holds_back(self, _: int, *, has_messages: bool) -> bool:
        self.has_messages = has_messages
        return has_messages


def around_of(instance: Instance, *limits: FakeLimit) -> Around:
    """It is given these, one after the other."""
    left = iter(limits)

    def make(config: Config, _: object) -> Any:
        limit = next(left)
        limit.address = config.node.broker_address
        return limit

    return Around(instance, make_limit=make, every_seconds=0.01, first_seconds=0.5)


@pytest.fixture
def limit() -> FakeLimit:
    return FakeLimit()


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    found = make_instance(config_of(tmp_path / "store", tmp_path / "data", broker_check_interval="0.1"))
    found.log = SilentLog()
    yield found
    found.lock.release()


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_change_is_told_once(instance: Instance, limit: FakeLimit) -> None:
    log: Any = instance.log
    with around_of(instance, limit):
        wait_for(lambda: limit.looks > 3)
        assert log.events == ["broker"]
        limit.found = {"alive": False, "indexing": None, "unsafe": ["something"]}
        wait_for(lambda: instance.board.broker["alive"] is False)
        looks = limit.looks
        wait_for(lambda: limit.looks > looks + 3)
        assert log.events == ["broker", "broker", "broker_unsafe"]


def test_a_look_that_hangs_holds_nobody_up(instance: Instance, limit: FakeLimit) -> None:
    release = threading.Event()
    limit.hold = lambda: release.wait(60)
    began = time.monotonic()
    with around_of(instance, limit):
        pass
    assert time.monotonic() - began < 5
    assert instance.board.broker == {}
    release.set()
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "around"])


def test_a_look_that_fails_is_said_once_and_goes_on(instance: Instance, limit: FakeLimit) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    log: Any = instance.log
    limit.hold = fail
    with around_of(instance, limit):
        wait_for(lambda: limit.looks > 4)
        assert log.events == ["look_failed"]
        limit.hold = lambda: None
        wait_for(lambda: instance.board.broker)


@contextmanager
def beside(instance: Instance, store: Path, *limits: FakeLimit) -> Iterator[Daemon]:
    """A daemon of that store that is opened, and does not run; it is followed."""
    data = instance.config.store.data
    instance.config = config_of(store, data, broker_check_interval="0.1")
    with opened_inside(store, data.with_name("built")) as daemon, around_of(instance, *limits) as around:
        around.follow(daemon.reader, daemon.state.meter)
        yield daemon
        daemon.pipeline.close()
        daemon.reader.close()


def test_the_broker_of_a_hup_is_asked_from_then_on(tmp_path: Path, instance: Instance, limit: FakeLimit) -> None:
    write_log(tmp_path / "other", 100)
    second: Any = FakeLimit()
    with beside(instance, tmp_path / "other", limit, second) as daemon:
        new = config_of(tmp_path / "store", tmp_path / "data", broker_address="127.0.0.1:10911")
        instance.config = merge_reloadable(instance.config, new)
        wait_for(lambda: daemon.reader.log_limit is second)
        assert limit.is_closed
        assert second.address == "127.0.0.1:10911"


def test_the_logs_end_is_seen_while_the_reader_is_behind(tmp_path: Path, instance: Instance, limit: FakeLimit) -> None:
    end = write_log(tmp_path / "other", 3000)
    with beside(instance, tmp_path / "other", limit) as daemon:
        daemon.reader.log_limit = NOBODY
        wait_for(lambda: daemon.state.row()["dispatchBehindBytes"] == end)
        while not daemon.state.meter.is_at_end:
            daemon._poll()
        assert daemon.state.row()["commitLogMaxOffset"] == daemon.reader.position


@pytest.mark.parametrize("named", ["nothing", "a message's end", "inside of a message"])
def test_a_log_that_goes_on_behind_the_brokers_offset_is_not_at_its_end(
    tmp_path: Path, instance: Instance, limit: FakeLimit, named: str
) -> None:
    middle, end = write_log(tmp_path / "part", 100), write_log(tmp_path / "other", 300)
    offset = {"nothing": 0, "a message's end": middle, "inside of a message": middle + 1}[named]
    limit.bounds, limit.offset = True, offset
    with beside(instance, tmp_path / "other", limit) as daemon:
        assert daemon.state.row()["commitLogMaxOffset"] == end, "known before the first look"
        meter = daemon.state.meter

        def look() -> bool:
            daemon._poll()
            return meter.held_at is not None and not meter.is_at_end

        wait_for(look)
        assert daemon.reader.position == meter.held_at == min(offset, middle)
        row = daemon.state.row()
        assert not row["caughtUp"]
        assert (row["commitLogMaxOffset"], row["dispatchBehindBytes"]) == (end, end)
        # The right one.
        limit.offset = end
        wait_for(lambda: look() is False and daemon.reader.position == end and meter.is_at_end)
        row = daemon.state.row()
        assert row["caughtUp"]
        assert row["commitLogMaxOffset"] == end
        wait_for(lambda: not limit.has_messages)


def test_what_is_left_of_half_a_message_holds_nobody(tmp_path: Path, instance: Instance, limit: FakeLimit) -> None:
    end = write_log(tmp_path / "other", 300)
    with min((tmp_path / "other" / "commitlog").iterdir()).open("r+b") as file:
        file.seek(end)
        file.write(b"\0\0\0\x99half")
    limit.bounds, limit.offset = True, end
    with beside(instance, tmp_path / "other", limit) as daemon:
        looks = limit.looks

        def look() -> bool:
            daemon._poll()
            return limit.looks > looks + 5 and daemon.reader.position == end

        wait_for(look)
        assert daemon.state.meter.held_at is None
        assert not limit.has_messages
        assert daemon.state.row()["commitLogMaxOffset"] == end
