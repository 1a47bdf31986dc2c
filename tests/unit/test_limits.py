"""What indexd leaves to the broker: room on the disk, the disk's bandwidth, memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import NotYetWritten
from indexd.commitlog.reader import Poll
from indexd.config.load import load
from indexd.dispatch import reput as throttle
from indexd.dispatch.reput import DiskWatermark, Throttle
from indexd.errors import DiskError
from indexd.recovery.open import reader_options
from indexd.storage.disk import used_ratio

# --- the disk ---


@pytest.fixture
def fill(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has so many percent of every file system be used; five of the free hundredths are kept for root."""

    def fill(percent: float) -> None:
        free = 100_000 - round(1000 * percent)
        status = os.statvfs_result((4096, 4096, 100_000, free, max(free - 5000, 0), 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: status)

    return fill


def test_the_ratio_is_the_one_that_the_broker_and_df_count(fill: Callable[[float], None]) -> None:
    for percent, ratio in ((50, 50 / 95), (95, 1.0), (0, 0.0)):
        fill(percent)
        assert used_ratio(Path("/data")) == ratio


def test_the_watermark_stops_and_heals_a_little_below(fill: Callable[[float], None]) -> None:
    watermark = DiskWatermark(Path("/data"), 0.70)
    # 70.5 % of what is not root's; at 69.8 % what is deleted by the way is not enough, at 68.4 % it is.
    for percent, is_over in ((50, False), (67, True), (66.3, True), (65, False), (66.3, False)):
        fill(percent)
        with pytest.raises(DiskError) if is_over else nullcontext() as met:
            watermark.check()
        assert watermark.is_over == is_over
        if percent == 67:
            assert "cannot index into /data: its file system is 70.5% full" in met.value.line()
            assert ("is 70.0%" in str(met.value), "free space" in met.value.hint, met.value.is_transient) == (True,) * 3
    fill(100)
    DiskWatermark(Path("/data"), 1).check()  # never


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


class Bounded:
    """A throttle, what it reads from and waits with."""

    def __init__(self, size: int, end: int, **bounds: int) -> None:
        self.reader, self.stop, self.queue = Reader(size, end), Stop(), list[int]()
        self.log_end = self.hurried = 0
        parts: list[Any] = [self.reader, self.queue, self.stop]
        self.throttle = Throttle(
            *parts, **bounds, hurry=self._hurry, log_end=lambda: self.log_end, clock=lambda: self.stop.now
        )

    def _hurry(self) -> None:
        self.hurried += 1


def test_catching_up_keeps_to_the_rate() -> None:
    bounded = Bounded(1000, 100_000, rate_max=10_000)
    while not isinstance(bounded.throttle.poll(), NotYetWritten):
        pass
    assert bounded.stop.now - 100 == pytest.approx(10, abs=0.2)
    assert max(bounded.stop.waits) <= 0.5


def test_what_comes_while_it_is_caught_up_is_read_at_once() -> None:
    bounded = Bounded(500, 0, rate_max=10_000)
    for _ in range(100):  # 5000 bytes a second, in bursts
        bounded.reader.end += 500
        assert isinstance(bounded.throttle.poll(), DispatchBatch)
        bounded.stop.now += 0.1
        bounded.throttle.poll()
    assert bounded.stop.waits == []


def test_a_broker_that_writes_faster_than_the_rate_is_followed() -> None:
    # 40,000 bytes a second are written, 10,000 allowed.
    bounded = Bounded(1000, 0, rate_max=10_000)
    reader, most = bounded.reader, 0
    while bounded.stop.now < 400:
        reader.end = bounded.log_end = int((bounded.stop.now - 100) * 40_000) // 1000 * 1000
        bounded.throttle.poll()
        bounded.stop.now += 0.002
        most = max(most, reader.end - reader.position)
    assert most < 60 * 40_000
    assert reader.end - reader.position < 10_000  # it has caught up again and stays so
    assert bounded.throttle.rate() == pytest.approx(50_000, rel=0.1)


def test_a_stop_ends_a_wait_for_the_rate() -> None:
    bounded = Bounded(1_000_000, 10_000_000, rate_max=1000)
    bounded.throttle.poll()
    bounded.stop.set()
    bounded.throttle.poll()
    assert bounded.stop.waits == []


def test_reading_waits_for_memory_while_anything_waits_to_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [300, 300, 300, 90]
    monkeypatch.setattr(throttle, "resident_bytes", lambda: held.pop(0) if held else 300)
    bounded = Bounded(10, 1000, memory_max=100)
    bounded.queue.append(1)
    bounded.throttle.poll()
    assert (bounded.hurried, len(bounded.stop.waits), bounded.reader.polls) == (3, 3, 1)
    # With nothing left to build it would wait for ever.
    bounded.queue.clear()
    bounded.throttle.poll()
    assert bounded.reader.polls == 2
    # A stop ends this wait as well.
    bounded.queue.append(1)
    bounded.stop.set()
    bounded.throttle.poll()
    assert bounded.reader.polls == 3


def test_resident_bytes_are_those_of_this_process() -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert throttle.resident_bytes() == pytest.approx(int(status["VmRSS"].split()[0]) << 10, rel=0.1)


def test_what_the_reader_is_told(tmp_path: Path) -> None:
    def options(**flags: str) -> Any:
        given: dict[str, Any] = {"store": str(tmp_path), "data": str(tmp_path / "data"), "segment_size": "1MiB"}
        return reader_options(load({**given, **flags}, None, {}))

    assert (options().drop_behind, options(drop_cache="false").drop_behind) == (2 << 20, None)
    # A stretch is half a second's worth at most, so that no wait is long.
    for rate, size in (("1MiB", 512 << 10), ("1KiB", 64 << 10), ("1GiB", 4 << 20), ("0", 4 << 20)):
        assert options(read_rate_max=rate).read_size == size
