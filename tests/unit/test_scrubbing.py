"""When a scrub is due, how fast it reads, and what happens when the disk refuses or the daemon stops."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from indexd.errors import DiskError
from indexd.index.format import FileMark, IndexHeader
from indexd.recovery.recover import Damage, DamagedError
from indexd.service import around as module
from indexd.service.around import Scrubbing
from indexd.verify.scrub import Scrub
from support.inside import opened_inside
from support.sim_daemon import SilentLog
from support.small_log import write_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DAY = 86_400


class Ground:
    """A daemon that is opened and does not run, and what scrubs it."""

    def __init__(self, daemon: Any) -> None:
        self.daemon = daemon
        self.instance, self.pipeline = daemon._instance, daemon.pipeline
        self.log: Any = SilentLog()
        self.instance.log = self.log
        self.stop = threading.Event()
        self.scrubbing = Scrubbing(self.instance, self.pipeline, self.stop)

    @property
    def row(self) -> Any:
        return self.instance.board.scrub

    def left(self) -> float:
        return self.scrubbing.seconds_left


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    write_log(tmp_path / "store", 500)
    with opened_inside(tmp_path / "store", tmp_path / "data") as daemon:
        while not daemon.pipeline.built.messages:
            found = daemon.reader.poll()
            if hasattr(found, "rows"):
                daemon.pipeline.build(found)
        daemon.pipeline.persist(daemon.pipeline.mark())
        daemon.pipeline.scrubbed_at = None  # a new directory waits for a day
        yield Ground(daemon)
        daemon.pipeline.close()
        daemon.reader.close()


def test_it_is_due_at_once_and_then_every_interval(ground: Ground) -> None:
    assert ground.left() == 0
    ground.scrubbing.run()
    assert ground.log.events == ["scrubbed"]
    assert DAY - 60 < ground.left() <= DAY
    assert ground.row["bytes"] > 0
    assert (ground.row["damaged"], ground.row["brokenOff"]) == (0, 0)
    # Written down with the next frontier, and so for the process that comes after.
    ground.pipeline.persist(ground.pipeline.mark())
    assert ground.pipeline.frontier.scrubbed_at == ground.pipeline.scrubbed_at
    other = Scrubbing(ground.instance, ground.pipeline, ground.stop)
    assert DAY - 60 < other.seconds_left <= DAY
    # A clock that was ahead then does not put it off for ever.
    ground.pipeline.scrubbed_at = int((time.time() + 10 * DAY) * 1000)
    assert ground.left() == 0


def broken(error: Exception) -> Any:
    def run(_: Scrub) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "damaged"),
    [(DamagedError("a file", Damage()), 3), (DiskError("read", "a file", OSError(5, "Input/output error")), 0)],
    ids=["damage", "disk"],
)
def test_what_breaks_it_off_is_raised_and_puts_it_off_longer_each_time(
    ground: Ground, monkeypatch: pytest.MonkeyPatch, error: Exception, damaged: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Scrub, "run", broken(error))
        for seconds in (60, 120, 240):
            with pytest.raises(type(error)):
                ground.scrubbing.run()
            assert seconds - 30 < ground.left() <= seconds
        assert (ground.row["damaged"], ground.row["brokenOff"]) == (damaged, 3)
        ground.instance.board.scrub = {**ground.row, "brokenOff": 1000}
        assert DAY - 60 < ground.left() <= DAY
    assert ground.log.events == []
    ground.scrubbing.run()
    assert (ground.row["damaged"], ground.row["brokenOff"]) == (damaged, 0)


def test_a_stop_ends_it_and_nothing_is_said_of_what_was_found_then(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground.stop.set()
    ground.scrubbing.run()
    monkeypatch.setattr(Scrub, "run", broken(DamagedError("a file", Damage())))
    ground.scrubbing.run()
    assert ground.log.events == []
    assert ground.left() == 0


def test_the_rate_is_bounded(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(ground.stop, "wait", lambda seconds: waited.append(seconds) or False)
    monkeypatch.setattr(module.time, "monotonic", lambda: 1000.0)
    ground.scrubbing._ahead = 1000.0
    for _ in range(64):
        ground.scrubbing._on_bytes(1 << 20)
    assert waited[-1] == pytest.approx(64 / 32)
    # What was slow for a while does not hurry afterwards.
    monkeypatch.setattr(module.time, "monotonic", lambda: 2000.0)
    ground.scrubbing._on_bytes(1 << 20)
    assert waited[-1] == 0
    ground.scrubbing._on_bytes(32 << 20)
    assert waited[-1] == pytest.approx(1 / 32)


def test_only_a_full_file_that_is_still_there_takes_a_checksum_over(ground: Ground) -> None:
    index = ground.daemon._index
    full, other = FileMark("1", IndexHeader(), full=True), FileMark("2", IndexHeader(), full=True)
    index._full = [full]
    index.adopt(replace(full, entries_crc=7, slots_crc=8))
    index.adopt(replace(other, entries_crc=9, slots_crc=9))
    assert [(mark.name, mark.entries_crc, mark.slots_crc) for mark in index._full] == [("1", 7, 8)]
    index._full = []
