"""How far behind: bytes, milliseconds, messages, by a clock of one's own; and where a log ends, without reading it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns, trimmed
from indexd.commitlog.reader import ReaderCounters
from indexd.commitlog.segments import list_segments, log_end
from indexd.dispatch.queue import DispatchQueue
from indexd.dispatch.reput import ReputState
from indexd.errors import MissingStoreError
from indexd.service.state import Lag, LagMeter
from indexd.storage.disk import Disk
from indexd.storage.names import segment_name

NEVER = -(1 << 63)
SEGMENT = 64 << 10


class Scene:
    """A daemon in numbers: 1000 messages of 100 bytes are built, the clock stands at 5,000 s."""

    def __init__(self) -> None:
        self.now = 5000.0
        self.meter = LagMeter(1000, lambda: self.now)
        self.built: Any = SimpleNamespace(phy_offset=100_000, messages=1000)
        self.queue = DispatchQueue(1 << 20, 1 << 30)
        self.reader: Any = SimpleNamespace(position=100_000, newest_timestamp=NEVER, counters=ReaderCounters())
        self.reput = ReputState()

    def read(self, rows: int, *, age: float = 1.0) -> DispatchBatch:
        """The reader takes so many messages, the first of which was stored ``age`` seconds ago."""
        columns = make_columns(rows, 1)
        columns.key_start[:] = 0
        columns.store_timestamp[:] = int((self.now - age) * 1000)
        begin = self.reader.position
        self.reader.position += 100 * rows
        self.reader.newest_timestamp = int((self.now - age) * 1000)
        self.reader.counters.messages += rows
        self.reader.counters.bytes += 100 * rows
        return DispatchBatch(trimmed(columns, rows, 0), rows, begin, self.reader.position, TopicTable(4, 64))

    def look(self, *, is_at_end: bool) -> None:
        self.reput.caught_up = is_at_end
        self.meter.looked(self.reader.position, is_at_end=is_at_end)

    def lag(self) -> Lag:
        return self.meter.measure(self.built, self.queue, self.reader, self.reput)


async def test_a_message_on_its_way_is_as_late_as_it_is_old() -> None:
    scene = Scene()
    scene.look(is_at_end=True)
    assert scene.lag() == Lag(100_000, 0, 0, 0)
    batch = scene.read(10, age=0.5)
    await scene.queue.put(batch)
    scene.look(is_at_end=True)
    assert scene.lag() == Lag(101_000, 1000, 500, 10)
    items = await scene.queue.drain()
    scene.meter.take(items)
    scene.now += 2
    scene.look(is_at_end=True)
    assert scene.lag() == Lag(101_000, 1000, 2500, 10), "being built is not found yet"
    scene.built.phy_offset, scene.built.messages = 101_000, 1010
    scene.meter.take([])
    assert scene.lag() == Lag(101_000, 0, 0, 0)


async def test_after_a_quiet_hour_one_message_is_no_hour_late() -> None:
    scene = Scene()
    scene.look(is_at_end=True)
    scene.reader.newest_timestamp = int((scene.now - 1) * 1000)
    scene.now += 3600
    scene.look(is_at_end=True)
    await scene.queue.put(scene.read(1, age=0.004))
    scene.look(is_at_end=False)
    assert scene.lag().milliseconds == 4


async def test_behind_the_log_what_was_not_read_is_estimated() -> None:
    scene = Scene()
    scene.look(is_at_end=True)
    scene.now += 60
    await scene.queue.put(scene.read(50, age=20))
    scene.look(is_at_end=False)
    scene.meter.seen_end = 205_000
    assert scene.lag() == Lag(205_000, 105_000, 20_000, 50 + 1000)
    scene.built.phy_offset, scene.built.messages = 105_000, 1050
    await scene.queue.drain()
    assert scene.lag() == Lag(205_000, 100_000, 20_000, 1000), "the next one is younger than the last that was read"


def test_a_reader_that_stands_is_late_since_it_last_saw_the_end() -> None:
    scene = Scene()
    scene.look(is_at_end=True)
    scene.now += 2
    assert scene.lag().milliseconds == 0
    scene.now += 40
    assert scene.lag().milliseconds == 42_000, "the log may have gone on unseen"
    scene.look(is_at_end=True)
    assert scene.lag().milliseconds == 0
    scene.reput.problem = MissingStoreError("unmounted")
    scene.now += 1
    assert scene.lag().milliseconds == 1000


def test_with_nothing_ever_read_it_is_late_since_the_start() -> None:
    scene = Scene()
    scene.meter.seen_end = 200_000
    scene.now += 7
    assert scene.lag() == Lag(200_000, 100_000, 7000, 0)


def test_nothing_is_ever_negative() -> None:
    """A clock that was set back, and a look at the log that is older than the reader."""
    scene = Scene()
    scene.look(is_at_end=True)
    scene.now -= 100
    scene.meter.seen_end = 50
    scene.reput.problem = MissingStoreError("unmounted")
    assert scene.lag() == Lag(100_000, 0, 0, 0)


def make_log(root: Path, end: int, *, ahead: int = 1, fill: bytes = b"\x01") -> None:
    """A log of segments of 64 KiB, written up to ``end``, with ``ahead`` more that are made and empty."""
    root.mkdir(exist_ok=True)
    for base in range(0, end + ahead * SEGMENT + 1, SEGMENT):
        with (root / segment_name(base)).open("wb") as file:
            file.write((fill * SEGMENT)[: max(min(end - base, SEGMENT), 0)])
            file.truncate(SEGMENT)


@given(end=st.integers(0, 4 * SEGMENT), known=st.integers(0, 4 * SEGMENT), ahead=st.integers(0, 2))
def test_the_end_is_found_to_the_byte(
    tmp_path_factory: pytest.TempPathFactory, end: int, known: int, ahead: int
) -> None:
    root = tmp_path_factory.mktemp("log")
    make_log(root, end, ahead=ahead)
    known = min(known, end)
    log = list_segments(Disk(), (root,), SEGMENT)
    assert log_end(Disk(), log, known) == end
    assert log_end(Disk(), log, 0) == end


def test_zeros_within_a_block_hide_nothing_and_missing_segments_neither(tmp_path: Path) -> None:
    make_log(tmp_path, 3 * SEGMENT + 100, fill=b"\x01" + bytes(3999))
    log = list_segments(Disk(), (tmp_path,), SEGMENT)
    found = log_end(Disk(), log, 0)
    assert 3 * SEGMENT < found <= 3 * SEGMENT + 100
    for path in tmp_path.iterdir():
        path.unlink()
    assert log_end(Disk(), log, 777) == 777
    assert log_end(Disk(), replace(log, segments=()), 777) == 777
