"""RocketMQ's own store cuts its log, writes over it, recovers or cleans it: the index is what the log says then."""

from __future__ import annotations

import json
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from support.daemon import Daemon, assert_same_index, index_files, indexd_here
from support.queues import tree
from support.reopened import config_for, reopen
from support.rocketmq import REAL, arguments, run
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

    from support.naive_log import NaiveMessage

pytestmark = REAL

UNSAFE, CORRUPT = 3, 4
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
    words = ("--store", store, "--data", store.with_name("unused"), "--out", whole, *SIZES)
    done = indexd_here("rebuild", "--json", *words)
    if done.returncode == CORRUPT:  # older frames stand behind the end, and no broker is there that could be asked
        found = reopen(config_for(store, whole)).messages
    else:
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)["messages"]
    assert found == len(frames)
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


def test_rocketmqs_own_index_keeps_what_was_removed(tmp_path: Path, rewriter: Rewriter, varied: Before) -> None:
    """The documented difference: it is not rolled back, and takes nothing before the offset that it ended with.

    So after a cut its files are those of the longer log until the new one is as long, and the messages written up to
    there are missing for ever: comparing with them would prove nothing. ``log_of`` compares with RocketMQ's own index
    service at work on the log as it is.
    """
    store, _ = copied(varied, tmp_path)
    offset = varied.at(0.4)
    figures = rewriter.write(store, to=offset, seed=2, count=1000, profile="varied", exit="open")
    assert offset < figures["maxOffset"] < varied.end
    shutil.rmtree(store / "consumequeue")  # this is rolled back
    assert_same_index(varied.stopped, store)


@pytest.mark.parametrize("is_forced", [False, True], ids=["run", "recover"])
def test_another_real_store(tmp_path: Path, varied: Before, even: Before, is_forced: bool) -> None:
    store, datas = copied(varied, tmp_path)
    shutil.rmtree(store)
    shutil.copytree(even.store, store)
    for name in ("stopped", "killed"):
        kept = [path.read_bytes() for path in index_files(datas[name])]
        done = indexd_here(*["--recover"][:is_forced], "--store", store, "--data", datas[name], *SIZES)
        assert done.returncode == UNSAFE
        assert f"{store} is not the store that {datas[name]} was built from" in done.stderr
        assert [path.read_bytes() for path in index_files(datas[name])] == kept


def test_another_real_store_beside_the_running_daemon(tmp_path: Path, varied: Before, even: Before) -> None:
    store, datas = copied(varied, tmp_path)
    with Daemon(store, datas["beside"], *SIZES) as daemon:
        daemon.wait_caught_up(varied.end)
        store.rename(tmp_path / "gone")
        shutil.copytree(even.store, tmp_path / "other")
        (tmp_path / "other").rename(store)
        assert daemon.wait() == UNSAFE
    line = daemon.log.read_text("utf-8").splitlines()[-1]
    assert f"{store} is not the store that {datas['beside']} was built from" in line


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
