"""The harness itself: that it builds RocketMQ's classes and writes stores with them; for the broker see test_broker."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from support.rocketmq import REAL, RocketMQError, arguments, generate, run, start

if TYPE_CHECKING:
    from pathlib import Path

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
