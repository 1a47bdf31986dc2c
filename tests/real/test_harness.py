"""The harness itself: that it builds, writes stores, runs a broker, and ends what it started."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import psutil
import pytest

from support.rocketmq import REAL, Broker, RocketMQError, arguments, generate, run, start

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


def test_a_broker_takes_messages_and_stops(tmp_path: Path) -> None:
    sent = tmp_path / "sent.jsonl"
    with Broker(tmp_path / "broker") as broker:
        run("Client", "send", *arguments(namesrv=broker.namesrv, count=200, out=sent), home=tmp_path / "client")
        assert (broker.store / "abort").exists()
        assert broker.address in broker.mqadmin("clusterList")
        listening = [c.laddr for c in psutil.Process(broker.pid).net_connections("tcp") if c.status == "LISTEN"]
        assert {broker.port, broker.port - 2} <= {address.port for address in listening}
    rows = [json.loads(line) for line in sent.read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"normal", "transaction", "delay", "batch"}
    assert {row["committed"] for row in rows if row["kind"] == "transaction"} == {True, False}
    assert not (broker.store / "abort").exists()
    assert not psutil.pid_exists(broker.pid)


def test_a_killed_broker_leaves_its_abort_file_and_starts_again(tmp_path: Path) -> None:
    with Broker(tmp_path / "first") as broker:
        run("Client", "send", *arguments(namesrv=broker.namesrv, count=50, out=tmp_path / "sent"), home=tmp_path)
        broker.kill()
    assert (broker.store / "abort").exists()
    with Broker(tmp_path / "second", store=broker.store, messageIndexEnable=False) as again:
        assert again.store == broker.store
    assert not (broker.store / "abort").exists()
