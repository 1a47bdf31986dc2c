"""Requests that the index answers: messages by key, id and queue offset, offsets, times, figures."""

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
from indexd.serve.remoting.command import Form
from support.data_directory import T0, Store, spec
from support.queue_store import QueueStore
from support.remoting_asking import (
    BUSY,
    BY_KEY,
    ERROR,
    NOT_FOUND,
    NOT_SERVED,
    PULL,
    SUCCESS,
    asking,
    frame_of,
    six_messages,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from indexd.query import Data
    from support.queue_store import QueueStore


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return six_messages(tmp_path)


async def test_messages_by_key(store: QueueStore) -> None:
    with asking(store) as to:
        answer = await to.key()
        assert (answer.code, answer.remark) == (SUCCESS, None)
        assert answer.body == frame_of(store, 4) + frame_of(store, 5)
        last = store.messages()[5]
        assert answer.ext_fields == {
            "indexLastUpdateTimestamp": str(last.store_timestamp),
            "indexLastUpdatePhyoffset": str(last.phy_offset),
        }
        assert (await to.key(maxNum="1")).body == frame_of(store, 5)
        assert (await to.key(key="u2", _UNIQUE_KEY_QUERY="true", maxNum="1")).body == frame_of(store, 2)
        assert (await to.key(key="Tag", indexType="T")).body == answer.body
        assert (await to.key(key="Tag", indexType="K")).code == NOT_FOUND
        for index_type in ("", "K", "U", "anything"):
            assert (await to.key(indexType=index_type)).body == answer.body
        assert (await to.key(_UNIQUE_KEY_QUERY="true", key="u3", maxNum="-1")).code == SUCCESS
        assert to.board.queries["found"] == 9
        assert to.board.query_seconds.count == 10


async def test_no_messages_by_key(store: QueueStore) -> None:
    with asking(store) as to:
        answer = await to.key(key="none")
        assert (answer.code, answer.body) == (NOT_FOUND, b"")
        assert answer.ext_fields == {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
        assert answer.remark == "the index names no such message"
        assert to.board.queries == {"found": 0, "empty_covered": 1, "empty_uncovered": 0, "error": 0}
        end = store.writer.max_offset
        store.append(spec(T0 + 9000, KEYS="none"))
        answer = await to.key(key="none")
        assert answer.remark is not None
        assert f"not yet indexed: the log from physical offset {end} on" in answer.remark
        assert to.board.queries["empty_uncovered"] == 1


async def test_exact_mode_is_a_setting(tmp_path: Path) -> None:
    store = QueueStore(tmp_path)
    store.append(spec(KEYS="Aa Aa"), spec(KEYS="BB"))
    store.build()
    frames = frame_of(store, 0), frame_of(store, 1)
    with asking(store) as to:
        assert (await to.key(key="Aa")).body == frames[0] + frames[0] + frames[1]
    with asking(store, remoting_mode="exact") as to:
        answer = await to.key(key="Aa")
        assert answer.body == frames[0]
        assert answer.ext_fields["indexLastUpdatePhyoffset"] == str(store.messages()[1].phy_offset)
        assert (await to.key(key="Cc")).remark == "absent"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("maxNum", "2147483648"), ("maxNum", ""), ("maxNum", " 1"), ("maxNum", "1_0"), ("maxNum", "0x1"),
        ("beginTimestamp", "9223372036854775808"), ("endTimestamp", "x" * 100_000), ("maxNum", "9" * 100_000),
    ],
)  # fmt: skip
async def test_a_field_of_no_use_is_named(store: QueueStore, name: str, value: str) -> None:
    with asking(store) as to:
        answer = await to.key(**{name: value})
        assert answer.code == ERROR
        assert answer.remark is not None
        assert answer.remark.startswith(f"ext field {name} is no whole number")
        assert len(answer.remark) < 200


async def test_odd_texts_are_only_absent(store: QueueStore) -> None:
    with asking(store) as to:
        for text in ("", "\ud800", "\x00", "../..", "k" * 100_000, "😀", "a b"):
            assert (await to.key(key=text)).code == NOT_FOUND
            assert (await to.key(topic=text)).code == NOT_FOUND
            assert (await to.ask(11, **PULL | {"topic": text})).code == 19
        assert (await to.key(maxNum="-1")).remark == "maxNum has to be at least 0, not -1"
        assert to.board.queries["error"] == 0


async def test_an_answer_is_no_longer_than_a_frame_may_be(tmp_path: Path) -> None:
    store = QueueStore(tmp_path, segment=1 << 18)
    store.append(*[spec(size=30_000) for _ in range(4)])
    store.build()
    with asking(store, remoting_frame_max=65_536) as to:
        answer = await to.key()
        assert answer.body == frame_of(store, 0) + frame_of(store, 1)
        assert answer.remark is not None
        assert "2 too long" in answer.remark
        assert (await to.ask(33, offset="0")).code == SUCCESS


async def test_one_message(store: QueueStore) -> None:
    where = store.messages()[3].phy_offset
    with asking(store) as to:
        answer = await to.ask(33, Form.ROCKETMQ, offset=str(where), topic="T")
        assert (answer.code, answer.body, answer.remark) == (SUCCESS, frame_of(store, 3), None)
        for offset in (where + 1, -1, 1 << 40, -(1 << 63), (1 << 63) - 1):
            answer = await to.ask(33, offset=str(offset))
            assert (answer.code, answer.body) == (ERROR, b"")
            assert answer.remark is not None
            assert f"no message at physical offset {offset}:" in answer.remark
        assert (await to.ask(33)).remark == "ext field offset is missing"
        assert to.board.queries == {"found": 1, "empty_covered": 5, "empty_uncovered": 0, "error": 0}


async def test_a_pull_of_a_tool(store: QueueStore) -> None:
    with asking(store) as to:
        answer = await to.ask(11, **PULL | {"queueOffset": "4", "maxMsgNums": "1"})
        assert (answer.code, answer.body, answer.remark) == (SUCCESS, frame_of(store, 4), "FOUND")
        assert answer.ext_fields == {
            "suggestWhichBrokerId": "0", "nextBeginOffset": "5", "minOffset": "0", "maxOffset": "6"
        }  # fmt: skip
        for queue_id, offset, code, next_offset in (
            ("0", "6", 19, "6"), ("0", "7", 21, "6"), ("0", "-1", 21, "0"), ("3", "0", 19, "0"), ("3", "5", 21, "0"),
        ):  # fmt: skip
            answer = await to.ask(11, **PULL | {"queueId": queue_id, "queueOffset": offset})
            assert (answer.code, answer.body, answer.ext_fields["nextBeginOffset"]) == (code, b"", next_offset)
        for name in ("topic", "queueId", "queueOffset", "maxMsgNums"):
            left = {key: value for key, value in PULL.items() if key != name}
            assert (await to.ask(11, **left)).remark == f"ext field {name} is missing"


async def test_nobody_consumes_here(store: QueueStore) -> None:
    with asking(store) as to:
        for fields in (PULL | {"consumerGroup": "orders"}, {}):
            answer = await to.ask(11, **fields)
            assert (answer.code, answer.remark) == (
                NOT_SERVED,
                "indexd answers queries: consume from the broker itself",
            )


async def test_offsets(store: QueueStore) -> None:
    queue = {"topic": "T", "queueId": "0"}
    with asking(store) as to:

        async def search(time: int, **fields: str) -> str:
            asked = queue | {"timestamp": str(time)} | fields
            answer = await to.ask(29, **asked)
            assert answer.code == SUCCESS
            return answer.ext_fields["offset"]

        assert await search(T0 + 1500) == await search(T0 + 1500, boundaryType="LOWER") == "2"
        assert await search(T0 + 1500, boundaryType="upper") == await search(T0 + 1500, boundaryType="UPPER") == "1"
        assert await search(T0 + 1500, boundaryType="sideways") == "2"
        assert await search(TIME_MAX) == "6"
        assert await search(0, queueId="7") == "0"
        for code, name, value, without in (
            (30, "offset", "6", "0"),
            (31, "offset", "0", "0"),
            (32, "timestamp", str(T0), "-1"),
        ):
            assert (await to.ask(code, **queue)).ext_fields == {name: value}
            assert (await to.ask(code, **queue | {"queueId": "7"})).ext_fields == {name: without}
            assert (await to.ask(code, topic="T")).remark == "ext field queueId is missing"
        assert sum(to.board.queries.values()) == 0  # as many as consumers ask: no queries for messages


async def test_the_index_shows_itself_as_a_broker_does(store: QueueStore) -> None:
    row = {
        "commitLogMinOffset": 0, "commitLogMaxOffset": 4096, "dispatchBehindBytes": 17, "caughtUp": True,
        "corrupt": None, "problems": {"reput": "disk; full"}, "outputs": [{"output": "key"}], "half": "\ud800",
    }  # fmt: skip
    with asking(store, row) as to:
        answer = await to.ask(28)
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
        table = json.loads((await to.ask(28)).body)["table"]
        assert (table["indexdPhase"], table["indexdRecoveringStep"]) == ("recovering", "replay")
        assert "commitLogMaxOffset" not in table
        assert "earliestMessageTimeStamp" not in table


async def test_while_it_recovers_and_stops_it_is_busy(store: QueueStore) -> None:
    with asking(store) as to:
        to.board.recovering("log", 1, 3)
        for code in (12, 33, 11):
            answer = await to.ask(code, **BY_KEY | PULL | {"offset": "0"})
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
