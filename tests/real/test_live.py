"""The daemon beside RocketMQ's own store while that writes; and the harness, which builds and runs its classes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from indexd.index.format import IndexHeader
from support.daemon import Daemon, assert_same_index, index_files, rebuild
from support.rocketmq import REAL, RocketMQError, arguments, generate, run, start

pytestmark = REAL


def content(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_writes_a_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    figures = generate(store, count=2000, profile="varied")
    assert figures["count"] == 2000
    assert {"commitlog", "index", "consumequeue", "checkpoint"} <= {path.name for path in store.iterdir()}
    assert not (store / "abort").exists()
    assert (store / "commitlog" / "00000000000000000000").stat().st_size == 1 << 20
    assert len(list((store / "index").iterdir())) > 1


def test_halting_leaves_the_abort_file(tmp_path: Path) -> None:
    store = tmp_path / "store"
    generate(store, count=100, exit="halt", segment=65536, transientpool=True)
    assert (store / "abort").exists()


def test_a_store_stays_open_as_long_as_asked(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with start("Store", "write", *arguments(store=store, count=500, hold=True), home=tmp_path / "jvm") as writer:
        assert writer.line(60) == "ready"
        assert writer.figures(60)["count"] == 500
        assert (store / "abort").exists()
    assert writer.returncode == 0
    assert not (store / "abort").exists()


def test_reindexing_leaves_the_store_alone_and_gives_the_same_files(tmp_path: Path) -> None:
    store = tmp_path / "store"
    generate(store, count=2000, profile="varied", exit="halt")
    before = content(store / "commitlog"), content(store / "index")
    words = arguments(store=store, index=tmp_path / "again", rounds=2)
    rounds = [json.loads(line) for line in run("Store", "reindex", *words, home=tmp_path / "jvm").splitlines()]
    assert [row["messages"] for row in rounds] == [2000, 2000]
    assert (content(store / "commitlog"), content(store / "index")) == before
    again = content(tmp_path / "again" / "index")
    assert [again[name] for name in sorted(again)] == [before[1][name] for name in sorted(before[1])]


def test_queries_recovers_and_truncates(tmp_path: Path) -> None:
    store, home = tmp_path / "store", tmp_path / "jvm"
    figures = generate(store, count=1000, exit="halt", topics=["T"])
    recovered = json.loads(run("Store", "recover", *arguments(store=store, index_safe=True), home=home))
    assert recovered["maxOffset"] == figures["maxOffset"]
    assert 0 < recovered["loadSeconds"] <= recovered["readySeconds"]

    questions, answers = tmp_path / "questions", tmp_path / "answers"
    questions.write_text(f"T\torder-7\t64\t0\t{1 << 60}\nT\tTagA\t64\t0\t{1 << 60}\tT\nT\tnone\t64\t0\t{1 << 60}\n")
    run("Store", "query", *arguments(store=store, in_=questions, out=answers), home=home)
    found = [len(json.loads(line)["phyOffsets"]) for line in answers.read_text().splitlines()]
    assert found == [1, 64, 0]

    words = arguments(store=store, to=figures["maxOffset"] // 2, count=10, seed=2)
    cut = json.loads(run("Store", "truncate", *words, home=home))
    assert 0 < cut["truncatedTo"] <= figures["maxOffset"] // 2
    assert cut["truncatedTo"] < cut["maxOffset"] < figures["maxOffset"]


def test_a_wrong_argument_is_an_error_that_quotes_the_program(tmp_path: Path) -> None:
    with pytest.raises(RocketMQError, match="unknown argument bogus=1"):
        run("Store", "write", "bogus=1", home=tmp_path)


SLOTS = 20_000
#: What the writer has if it is not told.
QUEUE_FILE_SIZE = 6000
#: All that may be said: neither corruption nor anything skipped.
EVENTS = {"starting", "created", "running", "rolled", "stopping", "stopped"}


def flags(segment: int, entries: int) -> tuple[str, ...]:
    return (
        *("--segment-size", str(segment)),
        *("--hash-slot-num", str(SLOTS)),
        *("--index-num", str(entries)),
        *("--consume-queue-file-size", str(QUEUE_FILE_SIZE)),
    )


@pytest.mark.parametrize(
    ("count", "segment", "entries", "options"),
    [
        (120_000, 4 << 20, 60_000, {"profile": "plain"}),
        (30_000, 256 << 10, 5_000, {"profile": "varied", "seed": 3}),
        # 4000 entries are 1000 messages of four: every file ends between two of them, and the last one is just full.
        (5_000, 1 << 20, 4_001, {"profile": "plain", "pauseEvery": 1000, "pauseMs": 200}),
        # A buffer of the pool reaches the file in pieces, at a time of RocketMQ's choosing.
        (30_000, 1 << 20, 20_000, {"profile": "varied", "seed": 4, "transientpool": True}),
    ],
    ids=["plain", "varied", "in bursts", "transient pool"],
)
def test_the_index_that_was_built_beside_the_writer_is_the_writers_own(
    tmp_path: Path, count: int, segment: int, entries: int, options: dict[str, Any]
) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    (store / "commitlog").mkdir(parents=True)
    words = arguments(store=store, count=count, segment=segment, slots=SLOTS, entries=entries, hold=True, **options)
    with Daemon(store, data, *flags(segment, entries)) as daemon:
        daemon.wait_event("running")
        with start("Store", "write", *words, home=tmp_path / "jvm") as writer:
            assert writer.line(60) == "ready"
            figures = writer.figures(120)
            behind = figures["maxOffset"] - daemon.state()["phyOffset"]
            state = daemon.wait_state(lambda row: bool(row["messages"] >= count))
            assert state["messages"] == count
            if "transientpool" not in options:  # with it the figures come before the last messages reach the file
                assert state["phyOffset"] == figures["maxOffset"]
                # Both hold their files open: nothing but what was put is in them, not even an index count of 1.
                assert_same_index(data, store)
            print(f"{figures['messagesPerSecond']}/s written, {behind} bytes behind at the end, {daemon.rss()} B held")
        assert daemon.terminate() == 0
        # The writer holds the lock of a broker, which may be seen.
        assert {row["event"] for row in daemon.events()} - {"broker"} == EVENTS
    assert writer.returncode == 0
    # Both have stopped: the last file's index count is at least 1 in both.
    assert_same_index(data, store)
    last = index_files(store)[-1].read_bytes()
    assert IndexHeader.unpack(last).pack() == last[:40]
    rebuild(store, tmp_path / "again", *flags(segment, entries))
    assert_same_index(tmp_path / "again", store)


def test_a_daemon_that_is_killed_beside_the_writer(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    (store / "commitlog").mkdir(parents=True)
    words = arguments(
        store=store, count=30_000, segment=1 << 20, slots=SLOTS, entries=10_000, hold=True,
        profile="varied", seed=5, pauseEvery=1000, pauseMs=150,
    )  # fmt: skip
    with start("Store", "write", *words, home=tmp_path / "jvm") as writer:
        assert writer.line(60) == "ready"
        for _ in range(3):
            with Daemon(store, data, *flags(1 << 20, 10_000)) as daemon:
                daemon.wait_event("running")
                daemon.wait_event("rolled")
        figures = writer.figures(120)
        with Daemon(store, data, *flags(1 << 20, 10_000)) as daemon:
            daemon.wait_caught_up(figures["maxOffset"])
            assert daemon.terminate() == 0
    assert writer.returncode == 0
    assert_same_index(data, store)
