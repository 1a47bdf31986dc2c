"""A sample of messages asked for as the broker asks: what it finds, what it misses, and what it adds."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.audit import AuditOptions, AuditReport, audit_here
from indexd.audit.samples import WIDTHS, Answers, range_around, select
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.index.reader import IndexFileReader
from indexd.query import TIME_MAX
from indexd.storage.disk import Disk
from support.auditing import config_for, config_of_golden, index_log
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.data_directory import SEGMENT, T0
from support.goldens import GOLDENS, unpack
from support.indexing_broker import Broker
from support.naive import NaiveIndexService, key_hash

LAYOUT = IndexLayout(7, 41)


def report_of(config: Config, samples: int = 50) -> AuditReport:
    return audit_here(config, Disk(), AuditOptions(samples=samples), lambda *_: None)


def answers_of(config: Config, samples: int = 50) -> Answers:
    answers = report_of(config, samples).answers
    assert answers is not None
    return answers


@pytest.fixture
def broker(tmp_path: Path) -> Broker:
    made = Broker(tmp_path)
    made.dispatch(made.messages)
    made.stopped()
    return made


@pytest.mark.parametrize("name", GOLDENS)
def test_rocketmq_finds_all_messages_of_its_own_stores(tmp_path: Path, name: str) -> None:
    found = answers_of(config_of_golden(unpack(name, tmp_path)))
    assert found.drawn == found.asked >= 40
    for share in found.shares:
        assert share.queries == found.asked
        assert share.missed == 0


def test_the_sample_is_spread_over_the_log(broker: Broker) -> None:
    assert 9 <= answers_of(broker.config, 10).drawn <= 10
    assert answers_of(broker.config, 1000).drawn == 90
    assert report_of(broker.config, 0).answers is None
    assert answers_of(broker.config, 10) == answers_of(broker.config, 10)


def test_what_is_in_a_hole_is_missed(broker: Broker) -> None:
    broker.files[1].unlink()
    found = answers_of(broker.config, 90)
    shares = {share.width: share for share in found.shares}
    assert list(shares) == list(WIDTHS)
    missed = shares["all time"].missed
    assert 10 <= missed <= 20
    assert shares["minute"].missed >= missed
    line = next(line for line in found.lines() if "without bounds" in line)
    text = f"the broker's own query misses {missed} of {found.asked} messages"
    assert line.startswith(f"queries without bounds of time: {text}")
    assert found.rows()[-1] == {"kind": "samples", "drawn": found.drawn, "asked": found.asked}


def test_of_a_hot_key_only_the_newest_are_given(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with CommitLogWriter(store / "commitlog", SEGMENT) as writer:
        for number in range(100):
            writer.append(FrameSpec("T", b"", {"KEYS": "hot"}, store_timestamp=T0 + 1000 * number))
    config = config_for(store, IndexLayout(7, 500), SEGMENT)
    index_log(config)
    every = answers_of(config, 100).shares[-1]
    assert (every.queries > 90, every.missed) == (True, 0)
    assert 30 < every.cut_off <= 36


def test_without_messages_nothing_is_asked(tmp_path: Path) -> None:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    found = answers_of(config_for(tmp_path / "store", LAYOUT, SEGMENT))
    assert (found.asked, found.lines()) == (0, ["queries: no key of the log could be asked for"])


def test_ranges_lie_around_the_message() -> None:
    assert range_around(T0, 60_000) == (T0 - 30_000, T0 + 29_999)
    assert range_around(5, 60_000) == (0, 59_999)
    assert range_around(5, None) == (0, TIME_MAX)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(0, 89), st.integers(0, 89))
def test_files_are_asked_as_the_broker_asks_them(seed: int, first: int, last: int) -> None:
    service = NaiveIndexService(LAYOUT.hash_slot_num, LAYOUT.index_num)
    times = [T0 + 1700 * number + seed % 997 for number in range(90)]
    for number, at in enumerate(times):
        service._last_or_new().put_key(f"T#k{number % 5}", 100 * number, at)
    begin, end = sorted((times[first], times[last]))
    files = [Opened(file.to_bytes()) for file in service.files][::-1]
    readers = [IndexFileReader(file, LAYOUT) for file in files]  # type: ignore[arg-type]  # bytes in place of a file
    wanted = service.query_offset("T", "k3", 64, begin, end)[0]
    assert select(readers, key_hash("T#k3"), begin, end) == wanted


class Opened:
    """A file that is bytes."""

    path = Path("file")

    def __init__(self, data: bytes) -> None:
        self.data = data

    def size(self) -> int:
        return len(self.data)

    def pread(self, size: int, position: int) -> bytes:
        return self.data[position : position + size]
