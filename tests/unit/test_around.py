"""What stands around the index is looked at in a thread of its own; whatever happens there, nobody waits for it."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from indexd.commitlog.format import NotYetWritten
from indexd.service import around as module
from indexd.service.around import Around
from indexd.service.broker import BrokerLimit
from indexd.service.instance import merge_reloadable
from support.inside import config_of, make_instance, opened_inside
from support.sim_daemon import SilentLog
from support.small_log import write_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from indexd.service.instance import Instance


class FakeWatch:
    """A broker that is what the test says; ``made`` are all that were made."""

    made: list[FakeWatch] = []  # noqa: RUF012 - emptied by the fixture
    found: dict[str, Any] = {"alive": True, "indexing": False, "unsafe": []}  # noqa: RUF012 - replaced by tests
    hangs: threading.Event | None = None

    def __init__(self, config: Any, _: object) -> None:
        self.address = config.node.broker_address
        self.log_limit: Any = BrokerLimit("127.0.0.1:1", 1.0)
        self.is_closed = False
        self.looks = 0
        FakeWatch.made.append(self)

    def look(self) -> dict[str, Any]:
        self.looks += 1
        if FakeWatch.hangs is not None:
            FakeWatch.hangs.wait(60)
        return dict(FakeWatch.found)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def instance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    monkeypatch.setattr(module, "BrokerWatch", FakeWatch)
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.01)
    monkeypatch.setattr(module, "_FIRST_SECONDS", 0.5)
    monkeypatch.setattr(FakeWatch, "made", [])
    monkeypatch.setattr(FakeWatch, "found", {"alive": True, "indexing": False, "unsafe": []})
    monkeypatch.setattr(FakeWatch, "hangs", None)
    config = config_of(tmp_path / "store", tmp_path / "data", broker_check_interval="0.1")
    found = make_instance(config)
    found.log = SilentLog()
    yield found
    found.lock.release()


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_change_is_told_once(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    log: Any = instance.log
    with Around(instance):
        wait_for(lambda: FakeWatch.made[0].looks > 3)
        assert log.events == ["broker"]
        monkeypatch.setattr(FakeWatch, "found", {"alive": False, "indexing": None, "unsafe": ["something"]})
        wait_for(lambda: instance.board.broker["alive"] is False)
        looks = FakeWatch.made[0].looks
        wait_for(lambda: FakeWatch.made[0].looks > looks + 3)
        assert log.events == ["broker", "broker", "broker_unsafe"]


def test_a_look_that_hangs_holds_nobody_up(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(FakeWatch, "hangs", release)
    began = time.monotonic()
    with Around(instance):
        pass
    assert time.monotonic() - began < 5
    assert instance.board.broker == {}
    release.set()
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "around"])


def test_a_look_that_fails_is_said_once_and_goes_on(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    look, failed = FakeWatch.look, threading.Semaphore(0)

    def fail(_: object) -> None:
        failed.release()
        raise ZeroDivisionError

    log: Any = instance.log
    monkeypatch.setattr(FakeWatch, "look", fail)
    with Around(instance):
        for _ in range(4):
            assert failed.acquire(timeout=30)
        assert log.events == ["look_failed"]
        monkeypatch.setattr(FakeWatch, "look", look)
        wait_for(lambda: instance.board.broker)


def test_the_broker_of_a_hup_is_asked_from_then_on(tmp_path: Path, instance: Instance) -> None:
    write_log(tmp_path / "other", 100)
    with opened_inside(tmp_path / "other", tmp_path / "built") as daemon, Around(instance) as around:
        around.follow(daemon.reader, daemon.state.meter)
        assert daemon.reader.log_limit is FakeWatch.made[0].log_limit
        new = config_of(tmp_path / "store", tmp_path / "data", broker_address="127.0.0.1:10911")
        instance.config = merge_reloadable(instance.config, new)
        wait_for(lambda: len(FakeWatch.made) == 2)
        wait_for(lambda: daemon.reader.log_limit is FakeWatch.made[1].log_limit)
        assert FakeWatch.made[0].is_closed
        assert FakeWatch.made[1].address == "127.0.0.1:10911"


def test_the_logs_end_is_seen_while_the_reader_is_behind(tmp_path: Path, instance: Instance) -> None:
    end = write_log(tmp_path / "other", 3000)
    with opened_inside(tmp_path / "other", tmp_path / "built") as daemon, Around(instance) as around:
        around.follow(daemon.reader, daemon.state.meter)
        FakeWatch.made[0].log_limit = daemon.reader.log_limit = None
        wait_for(lambda: daemon.state.lag().bytes == end)
        while not daemon.state.meter.is_at_end:
            found = daemon._poll()
            assert found is not None
        assert daemon.state.row()["commitLogMaxOffset"] == daemon.reader.position
        daemon.pipeline.close()
        daemon.reader.close()


@pytest.mark.parametrize("named", ["nothing", "a message's end", "inside of a message"])
def test_a_log_that_goes_on_behind_the_brokers_offset_is_not_at_its_end(
    tmp_path: Path, instance: Instance, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    middle, end = write_log(tmp_path / "part", 100), write_log(tmp_path / "other", 300)
    offset = {"nothing": 0, "a message's end": middle, "inside of a message": middle + 1}[named]
    stands = min(offset, middle)
    instance.config = config_of(tmp_path / "other", tmp_path / "data")
    with opened_inside(tmp_path / "other", tmp_path / "built") as daemon, Around(instance) as around:
        limit = FakeWatch.made[0].log_limit
        limit.offset, limit.silence = offset, None
        monkeypatch.setattr(limit, "_question", lambda: None)
        around.follow(daemon.reader, daemon.state.meter)
        assert daemon.state.row()["commitLogMaxOffset"] == end, "known before the first look"
        meter = daemon.state.meter

        def look() -> bool:
            daemon.reput.caught_up = isinstance(daemon._poll(), NotYetWritten)
            return meter.held_at is not None and not meter.is_at_end

        wait_for(look)
        assert daemon.reader.position == meter.held_at == stands
        row = daemon.state.row()
        assert not row["caughtUp"]
        assert (row["commitLogMaxOffset"], row["dispatchBehindBytes"]) == (end, end)
        assert "correct broker_address" in limit.unsafe(is_expected=False)[0]
        # The right one.
        limit.offset = end
        wait_for(lambda: look() is False and daemon.reader.position == end and meter.is_at_end)
        row = daemon.state.row()
        assert row["caughtUp"]
        assert row["commitLogMaxOffset"] == end
        wait_for(lambda: not limit.unsafe(is_expected=False))
        daemon.pipeline.close()
        daemon.reader.close()


def test_what_is_left_of_half_a_message_holds_nobody(
    tmp_path: Path, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = write_log(tmp_path / "other", 300)
    (segment, *_) = sorted((tmp_path / "other" / "commitlog").iterdir())
    with segment.open("r+b") as file:
        file.seek(end)
        file.write(b"\0\0\0\x99half")
    instance.config = config_of(tmp_path / "other", tmp_path / "data")
    with opened_inside(tmp_path / "other", tmp_path / "built") as daemon, Around(instance) as around:
        limit = FakeWatch.made[0].log_limit
        limit.offset, limit.silence = end, None
        monkeypatch.setattr(limit, "_question", lambda: None)
        around.follow(daemon.reader, daemon.state.meter)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            daemon._poll()
        assert daemon.reader.position == end
        assert daemon.state.meter.held_at is None
        assert daemon.state.row()["commitLogMaxOffset"] == end
        assert limit.unsafe(is_expected=True) == []
        daemon.pipeline.close()
        daemon.reader.close()
