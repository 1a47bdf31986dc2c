"""What indexd leaves to the broker: room on the disk, the disk's bandwidth, memory."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import NotYetWritten
from indexd.commitlog.reader import Poll
from indexd.config.load import load
from indexd.dispatch import reput as throttle
from indexd.dispatch.reput import Throttle
from indexd.errors import DiskError
from indexd.recovery.open import reader_options
from indexd.service.around import DiskWatermark, used_ratio

# --- the disk ---


@dataclass
class FileSystem:
    """Percent of it that are used; five of the free hundredths are kept for root."""

    used: float = 50.0

    def status(self, _: object) -> os.statvfs_result:
        blocks = 100_000
        free = blocks - round(blocks * self.used / 100)
        return os.statvfs_result((4096, 4096, blocks, free, max(free - 5000, 0), 0, 0, 0, 0, 255))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FileSystem:
    system = FileSystem()
    monkeypatch.setattr(os, "statvfs", system.status)
    return system


def test_the_ratio_is_the_one_that_the_broker_and_df_count(disk: FileSystem) -> None:
    assert used_ratio(Path("/data")) == 50 / 95
    disk.used = 95
    assert used_ratio(Path("/data")) == 1.0
    disk.used = 0
    assert used_ratio(Path("/data")) == 0.0


def test_the_watermark_stops_and_heals_a_little_below(disk: FileSystem) -> None:
    watermark = DiskWatermark(Path("/data"), 0.70)
    watermark.check()
    disk.used = 67  # 70.5 % of what is not root's
    with pytest.raises(DiskError, match=r"cannot index into /data: its file system is 70\.5% full.*is 70\.0%") as met:
        watermark.check()
    assert met.value.is_transient
    assert "free space" in met.value.hint
    assert watermark.is_over
    disk.used = 66.3  # 69.8 %: what is deleted by the way is not enough
    with pytest.raises(DiskError):
        watermark.check()
    disk.used = 65  # 68.4 %
    watermark.check()
    assert not watermark.is_over
    disk.used = 66.3
    watermark.check()


def test_a_watermark_of_one_means_never(disk: FileSystem) -> None:
    disk.used = 100
    DiskWatermark(Path("/data"), 1).check()


# --- reading ---


@dataclass
class Reader:
    """A log of stretches of one size; at its end there is nothing."""

    size: int
    end: int
    position: int = 0
    polls: int = 0

    def poll(self) -> Poll:
        self.polls += 1
        if self.position >= self.end:
            return NotYetWritten(self.position)
        batch = object.__new__(DispatchBatch)
        self.position += self.size
        object.__setattr__(batch, "end_offset", self.position)
        return batch


class Stop(threading.Event):
    """Waiting moves the clock, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.waits: list[float] = []

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self.waits.append(timeout or 0.0)
            self.now += timeout or 0.0
        return self.is_set()


@dataclass
class Bounded:
    """A throttle, what it reads from and waits with."""

    reader: Reader
    stop: Stop = field(default_factory=Stop)
    queue: list[int] = field(default_factory=list)
    log_end: int = 0
    hurried: int = 0

    def throttle(self, **bounds: int) -> Throttle:
        def hurry() -> None:
            self.hurried += 1

        parts: list[Any] = [self.reader, self.queue, self.stop]
        clock = lambda: self.stop.now  # noqa: E731 - it is one expression
        return Throttle(*parts, **bounds, hurry=hurry, log_end=lambda: self.log_end, clock=clock)


def test_catching_up_keeps_to_the_rate() -> None:
    bounded = Bounded(Reader(size=1000, end=100_000))
    throttle = bounded.throttle(rate_max=10_000)
    while not isinstance(throttle.poll(), NotYetWritten):
        pass
    assert bounded.stop.now - 100 == pytest.approx(10, abs=0.2)
    assert max(bounded.stop.waits) <= 0.5


def test_what_comes_while_it_is_caught_up_is_read_at_once() -> None:
    bounded = Bounded(Reader(size=500, end=0))
    throttle = bounded.throttle(rate_max=10_000)
    for _ in range(100):  # 5000 bytes a second, in bursts
        bounded.reader.end += 500
        assert isinstance(throttle.poll(), DispatchBatch)
        bounded.stop.now += 0.1
        throttle.poll()
    assert bounded.stop.waits == []


def test_a_broker_that_writes_faster_than_the_rate_is_followed() -> None:
    # 40,000 bytes a second are written, 10,000 allowed.
    bounded = Bounded(Reader(size=1000, end=0))
    throttle = bounded.throttle(rate_max=10_000)
    began, most = bounded.stop.now, 0
    while bounded.stop.now - began < 600:
        bounded.reader.end = bounded.log_end = int((bounded.stop.now - began) * 40_000) // 1000 * 1000
        throttle.poll()
        bounded.stop.now += 0.001
        most = max(most, bounded.reader.end - bounded.reader.position)
    assert most < 60 * 40_000
    assert bounded.reader.end - bounded.reader.position < 10_000  # it has caught up again and stays so
    assert throttle.rate() == pytest.approx(50_000, rel=0.1)


def test_a_stop_ends_a_wait_for_the_rate() -> None:
    bounded = Bounded(Reader(size=1_000_000, end=10_000_000))
    throttle = bounded.throttle(rate_max=1000)
    throttle.poll()
    bounded.stop.set()
    began = bounded.stop.now
    throttle.poll()
    assert bounded.stop.now == began


def test_reading_waits_for_memory_while_anything_waits_to_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [300, 300, 300, 90]
    monkeypatch.setattr(throttle, "resident_bytes", lambda: held.pop(0) if held else 300)
    bounded = Bounded(Reader(size=10, end=1000), queue=[1])
    bounds = bounded.throttle(memory_max=100)
    bounds.poll()
    assert (bounded.hurried, len(bounded.stop.waits), bounded.reader.polls) == (3, 3, 1)
    # With nothing left to build it would wait for ever.
    bounded.queue.clear()
    bounds.poll()
    assert bounded.reader.polls == 2
    # A stop ends this wait as well.
    bounded.queue.append(1)
    bounded.stop.set()
    bounds.poll()
    assert bounded.reader.polls == 3


def test_resident_bytes_are_those_of_this_process() -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert throttle.resident_bytes() == pytest.approx(int(status["VmRSS"].split()[0]) << 10, rel=0.1)


def test_what_the_reader_is_told(tmp_path: Path) -> None:
    def options(**flags: str) -> Any:
        given: dict[str, Any] = {"store": str(tmp_path), "data": str(tmp_path / "data"), "segment_size": "1MiB"}
        return reader_options(load({**given, **flags}, None, {}))

    assert options().drop_behind == 2 << 20
    assert options(drop_cache="false").drop_behind is None
    # A stretch is half a second's worth at most, so that no wait is long.
    assert options(read_rate_max="1MiB").read_size == 512 << 10
    assert options(read_rate_max="1KiB").read_size == 64 << 10
    assert options(read_rate_max="1GiB").read_size == options().read_size == 4 << 20
