"""Messages older than one before them: what a data directory says of them, and what is left once that is known."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from indexd.flush.frontier import DOUBTED, UNPROVEN, Frontier, Uncovered, read_frontier
from indexd.query import open_data as open_query
from indexd.recovery.open import Opened, open_data, reader_options
from indexd.recovery.rebuild import rebuild
from indexd.recovery.recover import WholeLog, once
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.daemon import Daemon, assert_same_index, indexd_here
from support.fake_broker import FakeBroker, Named, well
from support.reading import patch
from support.reopened import config_for, reopen
from support.small_log import BASE_TIME, SEGMENT_SIZE, SIZES

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.config import Config


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


# --- what the broker said holds over a restart ---


def covered(config: Config) -> tuple[bool, list[int]]:
    """Whether the coverage is complete, and which of the messages with the keys k00000, ... are found."""
    with open_query(config.store.data) as data:
        found = [number for number in range(200) if data.by_key("T", f"k{number:05d}").hits]
        return data.coverage().complete, found


def test_what_the_broker_did_not_know_is_kept_over_restarts_without_it(config: Config, tmp_path: Path) -> None:
    offsets = cut(tmp_path / "store")
    start(config, offsets[107])
    for unclean in (False, True, False):
        assert covered(config) == (True, list(range(106)))
        opened = reopen(config, unclean=unclean)
        assert (opened.resumed_at, opened.phy_offset) == (offsets[107], offsets[107])
    assert covered(config) == (True, list(range(106)))
    # Until something is written there: what is behind it, nobody has asked about.
    write(tmp_path / "store", [6000], start=offsets[107], key="m")
    assert covered(config)[0] is False
    reopen(config)
    assert frontier_of(config).uncovered == (Uncovered(offsets[108], offsets[200], UNPROVEN),)
    assert frontier_of(config).stale_head is None


@pytest.mark.parametrize("at", [4, 60], ids=["no magic", "half a frame"])
def test_what_a_crash_left_behind_the_brokers_end_is_nothing(config: Config, tmp_path: Path, at: int) -> None:
    offsets = write(tmp_path / "store", list(range(200)))
    patch(tmp_path / "store" / "commitlog" / f"{0:020d}", offsets[106] + at, bytes(4 if at == 4 else 8000))
    start(config, offsets[106])
    assert covered(config) == (True, list(range(106)))
    status = json.loads(indexd_here("status", "--data", config.store.data, "--json").stdout)
    assert status["caughtUp"]
    assert status.get("corrupt") is None
    reopen(config)
    assert covered(config) == (True, list(range(106)))


def test_a_daemon_beside_a_broker_that_was_killed_is_complete(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    offsets = write(store, list(range(200)))
    patch(store / "commitlog" / f"{0:020d}", offsets[106] + 60, b"\x7f" * 500)
    with FakeBroker(well(str(offsets[106]))) as broker:
        conf = tmp_path / "broker.conf"
        port = broker.address.rpartition(":")[2]
        conf.write_text(f"storePathRootDir={store}\nlistenPort={port}\nbrokerIP1=127.0.0.1\nmessageIndexEnable=false\n")
        flags = (*SIZES, "--broker-conf", str(conf))
        with Daemon(store, data, *flags, env={"INDEXD_CORRUPT_AFTER_MS": "100"}) as daemon:
            daemon.wait_state(lambda row: bool(row["staleHead"] and row["caughtUp"] and row["corrupt"] is None))
            daemon.wait_for(lambda: json.loads((data / "frontier").read_bytes())["staleHead"], "the frontier")
            for _ in range(2):
                with open_query(data) as opened:
                    assert opened.coverage().to_json() | {"daemonPid": None} == {
                        "begin": 0, "end": offsets[106], "logBegin": 0, "complete": True, "uncovered": [],
                        "daemonPid": None,
                    }  # fmt: skip
                daemon.kill()


# --- damage in the newest segment, which may become the log's end ---


def damage(store: Path) -> list[int]:
    """The magic of the 106th of 200 messages that are indexed is zeroed."""
    offsets = write(store, list(range(200)))
    reopen(config_for(store, store.with_name("data")))
    patch(store / "commitlog" / f"{0:020d}", offsets[106] + 4, bytes(4))
    return offsets


@pytest.mark.parametrize("knows", [True, False])
def test_messages_behind_damage_are_doubted_until_they_are_proven(config: Config, tmp_path: Path, knows: bool) -> None:
    offsets = damage(tmp_path / "store")
    others = [number for number in range(200) if number != 106]
    for _ in range(2):
        assert reopen(config, unclean=True).phy_offset == offsets[200]
        assert frontier_of(config).uncovered == (Uncovered(offsets[106], offsets[200], DOUBTED),)
        assert covered(config) == (False, others)
    if knows:
        assert start(config, offsets[200]).recovered.dropped_entries == 0
        assert covered(config) == (True, others)
    else:  # a later message proves them, too
        write(tmp_path / "store", [6000], start=offsets[200], key="n")
        reopen(config, unclean=True)
        assert frontier_of(config).uncovered == ()


def test_messages_behind_damage_that_the_broker_does_not_know_are_gone(config: Config, tmp_path: Path) -> None:
    offsets = damage(tmp_path / "store")
    reopen(config, unclean=True)
    assert start(config, offsets[106]).recovered.dropped_entries == 94
    assert covered(config) == (True, list(range(106)))


def test_a_frame_in_the_place_of_a_damaged_one_is_noticed_beside_the_daemon(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    offsets = write(store, list(range(200)))
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(offsets[200])
        patch(store / "commitlog" / f"{0:020d}", offsets[106] + 4, bytes(4))
        daemon.wait_state(lambda row: bool(row["uncovered"] == [[offsets[106], offsets[200], DOUBTED]]))
        write(store, [5000], start=offsets[106], key="n")
        daemon.wait_state(lambda row: bool(row["uncovered"] == [[offsets[107], offsets[200], UNPROVEN]]))
        with open_query(data) as opened:
            assert len(opened.by_key("T", "n00000").hits) == 1
            assert not opened.by_key("T", "k00106").hits
