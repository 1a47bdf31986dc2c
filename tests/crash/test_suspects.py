"""Messages older than one before them: what a data directory says of them, and what is left once that is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from indexd.flush.frontier import UNPROVEN, Frontier, Uncovered, read_frontier
from indexd.query import open_data as open_query
from indexd.recovery.open import Opened, open_data, reader_options
from indexd.recovery.rebuild import rebuild
from indexd.recovery.whole_log import WholeLog, once
from indexd.storage.disk import Disk
from support.daemon import Daemon, assert_same_index
from support.reopened import config_for, reopen
from support.small_log import BASE_TIME, SEGMENT_SIZE, SIZES

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.config import Config


class Named:
    """A broker that is asked about suspects and names this offset."""

    bounds = False

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def ask(self, position: int, head: bytes = b"") -> int | None:
        return self.offset


def write(store: Path, times: list[int], *, start: int = 0, key: str = "k") -> list[int]:
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE, start_offset=start) as writer:
        return [
            writer.append(FrameSpec("T", b"x" * 50, {"KEYS": f"{key}{n:05d}"}, store_timestamp=BASE_TIME + at))
            for n, at in enumerate(times)
        ] + [writer.max_offset]


def cut(store: Path) -> list[int]:
    """200 messages, cut at the 106th, and a newer one of the same length written there."""
    offsets = write(store, list(range(200)))
    write(store, [5000], start=offsets[106], key="n")
    return offsets


def frontier_of(config: Config) -> Frontier:
    found = read_frontier(Disk(), config.store.data / "frontier")
    assert found is not None
    return found


def finish(opened: Opened, config: Config) -> None:
    opened.reader.set_options(once(reader_options(config)))
    for item in WholeLog(opened.reader):
        opened.pipeline.apply([item], 0)
    opened.reader.close()
    opened.pipeline.finish()


def start(config: Config, offset: int) -> Opened:
    """With a broker that can be asked, to the end of the log."""
    named = Named(offset)
    opened = open_data(config, Disk(), lambda *_: None, unclean=False, log_limit=named)
    opened.reader.log_limit = named
    finish(opened, config)
    return opened


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_for(tmp_path / "store", tmp_path / "data")


def test_what_nobody_can_prove_is_named_and_stays_so(config: Config, tmp_path: Path) -> None:
    offsets = cut(tmp_path / "store")
    gap = Uncovered(offsets[107], offsets[200], UNPROVEN)
    for _ in range(2):
        reopen(config)
        assert frontier_of(config).uncovered == (gap,)
    with open_query(config.store.data) as data:
        assert data.coverage().uncovered == (gap,)
    rebuild(config, Disk(), tmp_path / "out", lambda *_: None)
    built = read_frontier(Disk(), tmp_path / "out" / "frontier")
    assert built is not None
    assert (built.uncovered, built.newest_timestamp) == ((gap,), frontier_of(config).newest_timestamp)


def test_the_broker_does_not_know_them_at_the_next_start(config: Config, tmp_path: Path) -> None:
    offsets = cut(tmp_path / "store")
    reopen(config)
    opened = start(config, offsets[107])
    assert opened.pipeline.built.phy_offset == offsets[107]
    assert opened.recovered.dropped_entries == 93
    found = frontier_of(config)
    assert (found.phy_offset, found.messages, found.uncovered) == (offsets[107], 107, ())
    assert found.store_timestamp == BASE_TIME + 5000
    with open_query(config.store.data) as data:
        assert not any(data.by_key("T", f"k{number:05d}").hits for number in range(107, 200))
        assert len(data.by_key("T", "n00000").hits) == 1


def test_a_rebuild_that_can_ask_the_broker_leaves_them_out(config: Config, tmp_path: Path) -> None:
    offsets = cut(tmp_path / "store")
    done = rebuild(config, Disk(), tmp_path / "out", lambda *_: None, Named(offsets[107]))
    assert (done.phy_offset, done.messages, done.unproven_bytes) == (offsets[107], 107, 0)


def test_the_broker_knows_them_at_the_next_start(config: Config, tmp_path: Path) -> None:
    offsets = write(tmp_path / "store", [*range(5000, 5100), *range(100)])
    reopen(config)
    assert frontier_of(config).unproven_from == offsets[100]
    opened = start(config, offsets[200])
    assert opened.recovered.dropped_entries == 0
    assert frontier_of(config).uncovered == ()


def test_a_daemon_reads_times_that_fall_and_says_how_far_it_is(tmp_path: Path) -> None:
    offsets = write(tmp_path / "store", [-1000 * number for number in range(600)])
    with Daemon(tmp_path / "store", tmp_path / "data", *SIZES) as daemon:
        state = daemon.wait_state(lambda row: row["caughtUp"] and not row["dispatchBehindBytes"])
        assert (state["phyOffset"], state["messages"]) == (offsets[600], 600)
        assert state["uncovered"] == [[offsets[1], offsets[600], UNPROVEN]]
        write(tmp_path / "store", [1], start=offsets[600])
        daemon.wait_state(lambda row: row["messages"] == 601 and not row["uncovered"])
        assert daemon.terminate() == 0
    reopened = config_for(tmp_path / "store", tmp_path / "again")
    reopen(reopened)
    assert_same_index(tmp_path / "data", tmp_path / "again")
