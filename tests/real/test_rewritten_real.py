"""RocketMQ's own store or broker cuts its log, writes over it, recovers or cleans it: the index is as the log then."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from indexd.flush.frontier import DOUBTED
from indexd.query import open_data
from support.daemon import Daemon, assert_same_index, compile_kernels, index_files, indexd, indexd_here
from support.naive import naive_frames
from support.queues import tree
from support.remoting import RemotingClient
from support.reopened import config_for, reopen, undisturbed
from support.rocketmq import REAL, Broker, arguments, run
from support.rocketmq_rewrite import (
    STORED,
    Before,
    Beside,
    Rewriter,
    Way,
    come_to_life,
    copied,
    cut,
    cut_and_wait,
    cut_at_segment,
    end_of,
    frames_of,
    halt_inside,
    lose_power,
    prepared,
    stale_behind,
    written_over,
)
from support.rocketmq_tools import ask, assert_same_answers, assert_units_of_store, questions
from support.same_index import assert_same_tree
from support.small_log import QUEUE_FILE_SIZE, SIZES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.naive import NaiveMessage


pytestmark = REAL

ASKED = 100
ROLLBACK = 0xC
ALL_TIME = f"10000\t0\t{2**63 - 1}"


@pytest.fixture(scope="module")
def rewriter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rewriter]:
    rewriter = Rewriter(tmp_path_factory.mktemp("jvm"))
    yield rewriter
    rewriter.close()


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory, rewriter: Rewriter) -> Before:
    """Messages of every kind and size in ten segments; the store was stopped."""
    return prepared(tmp_path_factory.mktemp("varied"), rewriter, "varied", "clean")


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory, rewriter: Rewriter) -> Before:
    """Messages of one size: where a new one ends, a stale one begins. The store is open, and a copy to be recovered."""
    before = prepared(tmp_path_factory.mktemp("even"), rewriter, "even", "open")
    assert len({frame.size for frame in before.frames}) == 1
    return before


@dataclass(frozen=True)
class Log:
    """A store after it was rewritten, what a build of it makes of it, and what is gone from it and new in it."""

    store: Path
    whole: Path
    removed: list[NaiveMessage]
    new: list[NaiveMessage]


def log_of(beside: Beside, cut_at: int, end: int) -> Log:
    store, frames = beside.store, frames_of(beside.store)
    assert end_of(frames) == end
    whole, reindexed = store.with_name("whole"), store.with_name("reindexed")
    undisturbed(config_for(store, store.with_name("unused")), whole)
    assert json.loads((whole / "frontier").read_bytes())["messages"] == len(frames)
    # RocketMQ's own index service, given the log as it now is, makes the same.
    assert beside.rewriter.reindex(store, reindexed)["messages"] == len(frames)
    (reindexed / "consumequeue").rmdir()  # made, and nothing put into it
    assert_same_index(whole, reindexed)
    here = {frame.uniq_key for frame in frames}
    removed = [frame for frame in beside.before.frames if frame.phy_offset >= cut_at and frame.uniq_key not in here]
    return Log(store, whole, removed, [frame for frame in frames if frame.phy_offset >= cut_at])


def check(log: Log, data: Path) -> None:
    """What stands in a stopped data directory is what the log says now, and nothing of what it said before."""
    assert_same_index(data, log.whole)
    done = indexd_here("verify", "--deep", "--store", log.store, "--data", data, *SIZES)
    assert done.returncode == 0, done.stdout + done.stderr
    indexed = [frame for frame in log.new if frame.uniq_key and frame.sys_flag & ROLLBACK != ROLLBACK][:ASKED]
    gone = [frame for frame in log.removed if frame.uniq_key][-ASKED:]
    assert gone
    assert indexed
    batch = data.with_name("questions")
    batch.write_text("".join(f"{frame.topic}\t{frame.uniq_key}\t{ALL_TIME}\tU\n" for frame in gone + indexed))
    done = indexd_here("query-key", "--batch", batch, "--data", data)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line)["phyOffsets"] for line in done.stdout.splitlines()]
    assert found == [[] for _ in gone] + [[frame.phy_offset] for frame in indexed]


@contextmanager
def others_started(store: Path, datas: dict[str, Path], end: int) -> Iterator[None]:
    """Those that were stopped and killed before start, and until the block ends find all that has changed.

    The one that was stopped starts in this process: a third of the time of all this is that of interpreters starting.
    """
    with Daemon(store, datas["killed"], *SIZES) as daemon:
        yield
        assert reopen(config_for(store, datas["stopped"])).phy_offset == end
        daemon.wait_state(lambda row: bool(row["phyOffset"] == end))
        assert daemon.terminate() == 0
    assert not daemon.events("disturbed")


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        ("varied", cut(0.95, count=100, profile="varied", exit="clean")),
        ("varied", cut(0.6, count=3000, profile="varied", exit="open")),
        ("varied", cut(0.55, count=3, profile="plain", exit="open")),
        ("varied", cut_and_wait),
        ("varied", cut_at_segment),
        ("varied", halt_inside),
        ("varied", lose_power),
        ("even", stale_behind),
        ("even", written_over),
        ("even", come_to_life),
    ],
    ids=[
        *("last segment", "segments back", "few", "few after a while", "segment begin", "halted", "power loss"),
        *("stale behind", "stale written over", "stale come to life"),
    ],
)
def test_rewritten(tmp_path: Path, rewriter: Rewriter, request: pytest.FixtureRequest, kind: str, way: Way) -> None:
    before: Before = request.getfixturevalue(kind)
    store, datas = copied(before, tmp_path)
    with Daemon(store, datas["beside"], *SIZES) as daemon:
        daemon.wait_caught_up(before.end)
        beside = Beside(rewriter, before, store, daemon)
        cut_at, end = way(beside)
        with others_started(store, datas, end):
            log = log_of(beside, cut_at, end)
            # It has not taken stale messages that follow without a gap for its own yet; and when it is halted after a
            # cut, it takes the stale units that stand in the queue files for its own.
            if kind == "varied" and way is not halt_inside:
                assert_units_of_store(log.whole, store)
            beside.wait_built(end)
            assert daemon.terminate() == 0
    problems = [row["problem"] for row in daemon.events("disturbed")]
    assert problems
    assert all("the log was cut" in problem for problem in problems)
    for data in datas.values():
        check(log, data)


def test_the_oldest_segments_are_cleaned(tmp_path: Path, rewriter: Rewriter, varied: Before) -> None:
    """Nothing is rolled back: all goes on as RocketMQ's own does, which was built whole here, and answers the same."""
    store, datas = copied(varied, tmp_path)
    with Daemon(store, datas["beside"], *SIZES) as daemon:
        daemon.wait_caught_up(varied.end)
        figures = rewriter.write(store, drop=3, count=500, profile="varied", seed=2, exit="open")
        assert figures["dropped"] == 3
        assert figures["minOffset"] == min(int(path.name) for path in (store / "commitlog").iterdir()) > 0
        with others_started(store, datas, figures["maxOffset"]):
            daemon.wait_state(lambda row: bool(row["phyOffset"] == figures["maxOffset"]))
            assert daemon.terminate() == 0
    assert not daemon.events("disturbed")
    assert min(index_files(store)).name > min(index_files(varied.store)).name
    assert tree(varied.store / "consumequeue").keys() - tree(store / "consumequeue").keys()
    asked = questions([*varied.frames, *frames_of(store)], 300, 1)
    shutil.copytree(store, tmp_path / "asked")
    words = arguments(store=tmp_path / "asked", **STORED)
    rows = ask(asked, tmp_path, lambda lines, out: run("Store", "ask", *words, *arguments(in_=lines, out=out)))
    for data in datas.values():
        assert_same_index(data, store)
        assert_same_answers(data, asked, rows, QUEUE_FILE_SIZE)
        done = indexd_here("verify", "--deep", "--store", store, "--data", data, *SIZES)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_queue_whose_messages_have_all_expired(tmp_path: Path, rewriter: Rewriter) -> None:
    """It keeps its last file, says where it was, and goes on there; one that is expired stays expired at a start."""
    store, data = tmp_path / "store", tmp_path / "data"
    rewriter.write(store, count=100, profile="plain", topics="Rare", exit="open")
    end = rewriter.write(store, count=3000, profile="plain", first=1000, exit="open")["maxOffset"]
    all_frames = frames_of(store)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        figures = rewriter.write(store, drop=2, count=1000, profile="plain", seed=2, first=5000, exit="open")
        daemon.wait_event("expired_files")
        daemon.wait_durable(figures["maxOffset"])
        check_answers(rewriter, store, data, all_frames)
        assert_same_index(data, store)
        figures = rewriter.write(store, count=200, profile="plain", seed=3, first=8000, topics="Rare", exit="open")
        daemon.wait_durable(figures["maxOffset"])
        check_answers(rewriter, store, data, all_frames)
        assert_same_index(data, store)
        assert daemon.terminate() == 0
    assert reopen(config_for(store, data), unclean=True).phy_offset == figures["maxOffset"]
    check_answers(rewriter, store, data, all_frames)
    assert_same_tree(data / "consumequeue", store / "consumequeue")


def check_answers(rewriter: Rewriter, store: Path, data: Path, before: list[NaiveMessage]) -> None:
    """A store that is open cannot be asked by another program: a copy of it is."""
    copy = data.with_name("asked")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(store, copy)
    asked = questions([*before, *frames_of(store)], 100, 2)
    words = arguments(store=copy, **STORED)
    home = rewriter.home
    rows = ask(
        asked, data.parent, lambda lines, out: run("Store", "ask", *words, f"in={lines}", f"out={out}", home=home)
    )
    assert_same_answers(data, asked, rows, QUEUE_FILE_SIZE)


# --- messages that a real broker has removed, whole behind its end: the daemon finds the broker by the lock ---

SEGMENT_SIZE = 1 << 20
FLAGS = ("--segment-size", str(SEGMENT_SIZE))
SENT, CUT_AT = 200, 106
SEND_MESSAGE, SUCCESS = 10, 0


def send(broker: Broker, name: str, count: int) -> None:
    """Messages of one length, with the keys NAME00000, NAME00001, ..., each a millisecond or more after the other."""
    with RemotingClient(broker.address) as client:
        for number in range(count):
            fields = {
                "producerGroup": "even", "topic": "Even", "defaultTopic": "TBW102", "defaultTopicQueueNums": 4,
                "queueId": 0, "sysFlag": 0, "bornTimestamp": int(time.time() * 1000), "flag": 0,
                "properties": f"KEYS\x01{name}{number:05d}\x02WAIT\x01true", "reconsumeTimes": 0, "unitMode": "false",
            }  # fmt: skip
            answer = client.ask(SEND_MESSAGE, fields, b"x" * 50)
            assert answer.code == SUCCESS, answer
            time.sleep(0.002)


def broker_frames(store: Path) -> list[NaiveMessage]:
    return sorted(naive_frames(store / "commitlog", SEGMENT_SIZE), key=lambda frame: frame.phy_offset)


def found(data: Path, name: str, numbers: range) -> list[int]:
    """Of these keys, the numbers of those that have a message."""
    with open_data(data) as opened:
        return [number for number in numbers if opened.by_key("Even", f"{name}{number:05d}").hits]


def check_nothing_removed(data: Path, end: int) -> None:
    """None of the 93 is found, all others are, and nothing is said to be missing."""
    assert found(data, "old", range(SENT)) == list(range(CUT_AT))
    assert found(data, "new", range(1)) == [0]
    with open_data(data) as opened:
        coverage = opened.coverage()
        print(data.name, coverage.to_json())
        assert (coverage.complete, coverage.uncovered, coverage.end) == (True, (), end)


def is_complete(data: Path) -> bool:
    with open_data(data) as opened:
        return opened.coverage().complete


@pytest.fixture(scope="module")
def removed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where stores/before is a log of 200, and the data directories of daemons that were stopped and killed then."""
    home = tmp_path_factory.mktemp("removed")
    compile_kernels()
    with Broker(home / "before", store=home / "store") as broker:
        send(broker, "old", SENT)
        end = broker_frames(home / "store")[-1]
        with Daemon(home / "store", home / "killed", *FLAGS) as killed:
            with Daemon(home / "store", home / "stopped", *FLAGS) as stopped:
                stopped.wait_durable(end.phy_offset + end.size)
                assert stopped.terminate() == 0
            killed.wait_durable(end.phy_offset + end.size)
            killed.kill()
        broker.kill()
    return home


def lose_the_end(store: Path) -> int:
    """What a recovering broker takes for the end of its log, as after a loss of power."""
    frames = broker_frames(store)
    assert len(frames) == SENT
    assert len({frame.size for frame in frames}) == 1
    with (store / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(frames[CUT_AT].phy_offset + 4)
        file.write(bytes(4))
    return frames[CUT_AT + 1].phy_offset


def test_no_removed_message_is_found_running_killed_and_stopped(removed: Path) -> None:
    store, through, beside = removed / "store", removed / "through", removed / "beside"
    shutil.copytree(removed / "killed", removed / "recovered")
    shutil.copytree(removed / "killed", through)
    whole = broker_frames(store)
    with Daemon(store, through, *FLAGS) as during:
        during.wait_state(lambda row: bool(row["caughtUp"] and row["messages"] == SENT))
        end = lose_the_end(store)
        # It may be damage as well: nobody can be asked.
        during.wait_state(lambda row: [gap[2] for gap in row["uncovered"]] == [DOUBTED])
        with Daemon(store, beside, *FLAGS) as running:
            running.wait_state(lambda row: bool(row["messages"] == CUT_AT))
            with Broker(removed / "after", store=store) as broker:
                # The broker is back, and has written nothing yet.
                during.wait_state(lambda row: bool(row["staleHead"] and row["messages"] == CUT_AT))
                assert found(through, "old", range(SENT)) == list(range(CUT_AT))
                assert is_complete(through)
                send(broker, "new", 1)
                assert [frame.phy_offset for frame in broker_frames(store)] == [frame.phy_offset for frame in whole]
                for data, daemon in ((through, during), (beside, running)):
                    daemon.wait_state(
                        lambda row: bool(row["caughtUp"] and row["phyOffset"] == end and row["staleHead"])
                    )
                    check_nothing_removed(data, end)
                    daemon.kill()
                check_others(removed, end)
                broker.kill()
    # What the broker has said holds without it, until something is written there.
    for data in (through, removed / "stopped"):
        with Daemon(store, data, *FLAGS) as daemon:
            daemon.wait_state(lambda row: bool(row["caughtUp"]))
            check_nothing_removed(data, end)
            assert daemon.terminate() == 0
        check_nothing_removed(data, end)


def check_others(removed: Path, end: int) -> None:
    """Started, recovered and rebuilt beside the broker."""
    store = removed / "store"
    for data in (removed / "through", removed / "beside", removed / "killed", removed / "stopped"):
        with Daemon(store, data, *FLAGS) as daemon:
            daemon.wait_state(lambda row: bool(row["caughtUp"] and row["phyOffset"] == end and row["staleHead"]))
            check_nothing_removed(data, end)
            assert daemon.terminate() == 0
        check_nothing_removed(data, end)
    for words in (("rebuild", "--out", removed / "rebuilt"), ("--recover", "--data", removed / "recovered")):
        done = indexd(*words, "--store", store, *FLAGS)
        assert done.returncode == 0, done.stderr
        check_nothing_removed(Path(words[-1]), end)
