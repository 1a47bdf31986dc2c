"""Offsets and runtime figures as remoting commands; and what is said when there is no answer."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from indexd import __version__
from indexd.errors import DiskError
from indexd.query import TIME_MAX
from indexd.serve import queries as serve_queries
from indexd.serve.queries import Queries
from indexd.serve.remoting import processor
from support.data_directory import T0, Store, spec
from support.remoting_asking import BUSY, BY_KEY, ERROR, PULL, SUCCESS, asking, six_messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from indexd.query import Data
    from support.queue_store import QueueStore


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return six_messages(tmp_path)


async def test_offsets(store: QueueStore) -> None:
    queue = {"topic": "T", "queueId": "0"}
    with asking(store) as to:

        async def search(time: int, **fields: str) -> str:
            asked = queue | {"timestamp": str(time)} | fields
            answer = await to.ask(processor.search_offset_by_timestamp, **asked)
            assert answer.code == SUCCESS
            return answer.ext_fields["offset"]

        assert await search(T0 + 1500) == await search(T0 + 1500, boundaryType="LOWER") == "2"
        assert await search(T0 + 1500, boundaryType="upper") == await search(T0 + 1500, boundaryType="UPPER") == "1"
        assert await search(T0 + 1500, boundaryType="sideways") == "2"
        assert await search(TIME_MAX) == "6"
        assert await search(0, queueId="7") == "0"
        for handler, name, value, without in (
            (processor.get_max_offset, "offset", "6", "0"),
            (processor.get_min_offset, "offset", "0", "0"),
            (processor.get_earliest_msg_storetime, "timestamp", str(T0), "-1"),
        ):
            assert (await to.ask(handler, **queue)).ext_fields == {name: value}
            assert (await to.ask(handler, **queue | {"queueId": "7"})).ext_fields == {name: without}
            assert (await to.ask(handler, topic="T")).remark == "ext field queueId is missing"
        assert sum(to.board.queries.values()) == 0  # as many as consumers ask: no queries for messages


async def test_without_queues_it_is_said(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(spec())
    store.build()
    with asking(store) as to:
        for handler in (processor.get_max_offset, processor.pull_message):
            answer = await to.ask(handler, **PULL)
            assert answer.code == ERROR
            assert answer.remark is not None
            assert "holds no ConsumeQueues; run the daemon with consume_queue = true" in answer.remark


async def test_the_index_shows_itself_as_a_broker_does(store: QueueStore) -> None:
    row = {
        "commitLogMinOffset": 0, "commitLogMaxOffset": 4096, "dispatchBehindBytes": 17, "caughtUp": True,
        "corrupt": None, "problems": {"reput": "disk; full"}, "outputs": [{"output": "key"}], "half": "\ud800",
    }  # fmt: skip
    with asking(store, row) as to:
        answer = await to.ask(processor.get_broker_runtime_info)
        table = json.loads(answer.body)["table"]
        assert answer.code == SUCCESS
        assert all(isinstance(value, str) for value in table.values())
        assert table["brokerVersionDesc"] == f"indexd {__version__}"
        assert table["commitLogMaxOffset"] == table["indexdCommitLogMaxOffset"] == "4096"
        assert table["dispatchBehindBytes"] == "17"
        assert table["bootTimestamp"] == table["indexdStartedAt"] == str(int(to.board.started * 1000))
        assert table["putTps"].split(" ")[0] == "0.0"
        assert table["indexdMode"] == "shadow"
        assert table["indexdCaughtUp"] == "true"
        assert table["indexdQueriesFound"] == table["indexdQueriesEmptyCovered"] == "0"
        assert not any("_" in name for name in table)
        assert table["earliestMessageTimeStamp"] == str(store.messages()[0].store_timestamp)
        for name in ("sendThreadPoolQueue", "pullThreadPoolQueue", "ackThreadPoolQueue"):
            assert table[f"{name}Size"] == table[f"{name}HeadWaitTimeMills"] == "0"
        assert table["pageCacheLockTimeMills"] == "0"
        assert table["indexdProblemsReput"] == "disk; full"
        assert "indexdCorrupt" not in table
        assert "indexdOutputs" not in table
        beside = processor.indexd_figures(to.board)
        assert {name for name in table if name.startswith("indexd")} == set(beside)
        to.board.recovering("replay", 1, 3)
        table = json.loads((await to.ask(processor.get_broker_runtime_info)).body)["table"]
        assert (table["indexdPhase"], table["indexdRecoveringStep"]) == ("recovering", "replay")
        assert "commitLogMaxOffset" not in table
        assert "earliestMessageTimeStamp" not in table


# --- when there is no answer ---


async def test_while_it_recovers_and_stops_it_is_busy(store: QueueStore) -> None:
    with asking(store) as to:
        to.board.recovering("log", 1, 3)
        for handler in (processor.query_message, processor.view_message_by_id, processor.pull_message):
            answer = await to.ask(handler, **BY_KEY | PULL | {"offset": "0"})
            assert (answer.code, answer.remark) == (BUSY, "the index is recovering")
        assert to.board.queries["error"] == 3
        to.board.running(dict)
        assert (await to.key()).code == SUCCESS
        to.queries.stop()
        answer = await to.key()
        assert (answer.code, answer.remark) == (BUSY, "the daemon stops: ask again when it is back")
        assert to.board.queries["error"] == 3


async def test_before_there_is_an_index_it_is_busy(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with asking(store) as to:
        answer = await to.key()
        assert answer.code == BUSY
        assert answer.remark is not None
        assert "holds no index yet" in answer.remark


async def test_as_many_at_once_as_may(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_WAITING_PER_THREAD", 2)
    gate = threading.Event()
    _before_each(monkeypatch, lambda: gate.wait(20))
    with asking(store) as to:
        asked = [asyncio.create_task(to.key()) for _ in range(12)]
        done, _ = await asyncio.wait(asked, timeout=1)
        codes = [task.result().code for task in done]
        assert codes
        assert set(codes) == {BUSY}
        gate.set()
        codes = [(await task).code for task in asked]
        assert SUCCESS in codes
        assert set(codes) == {SUCCESS, BUSY}
        assert to.board.queries["error"] == 0


async def test_one_that_takes_too_long_is_ended(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "QUERY_SECONDS", -1.0)
    with asking(store) as to:
        answer = await to.key()
        assert answer.code == ERROR
        assert answer.remark is not None
        assert "took longer than" in answer.remark
        assert to.board.queries["error"] == 1


async def test_an_error_is_its_line(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise DiskError("read", store.data, OSError(5, "Input/output error"))

    _before_each(monkeypatch, fail)
    with asking(store) as to:
        answer = await to.key()
        assert answer.code == ERROR
        assert answer.remark is not None
        assert answer.remark.startswith(f"cannot read {store.data}: Input/output error; ")
        assert to.board.queries["error"] == 1


def _before_each(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> None:
    original = Queries._call

    def slow(self: Queries, question: Callable[[Data], Any]) -> Any:
        call()
        return original(self, question)

    monkeypatch.setattr(Queries, "_call", slow)
