"""A sample of messages asked for as the broker asks: what it finds, what it misses, and what it adds."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexd.audit import AuditOptions, AuditReport, audit_here
from indexd.audit.samples import WIDTHS, Answers
from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from indexd.config import Config
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk
from support.auditing import config_for, config_of_golden, index_log
from support.data_directory import SEGMENT, T0
from support.goldens import GOLDENS, unpack
from support.indexing_broker import Broker


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
        assert (share["queries"], share["missed"]) == (found.asked, 0)


def test_the_sample_is_spread_over_the_log(broker: Broker) -> None:
    assert 9 <= answers_of(broker.config, 10).drawn <= 10
    assert answers_of(broker.config, 1000).drawn == 90
    assert report_of(broker.config, 0).answers is None
    assert answers_of(broker.config, 10) == answers_of(broker.config, 10)


def test_what_is_in_a_hole_is_missed(broker: Broker) -> None:
    broker.files[1].unlink()
    found = answers_of(broker.config, 90)
    shares = {share["width"]: share for share in found.shares}
    assert list(shares) == list(WIDTHS)
    missed = shares["all time"]["missed"]
    assert 10 <= missed <= 20
    assert shares["minute"]["missed"] >= missed
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
    assert (every["queries"] > 90, every["missed"]) == (True, 0)
    assert 30 < every["cutOff"] <= 36
