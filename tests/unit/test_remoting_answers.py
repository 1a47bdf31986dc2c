"""Requests that the index answers, which request is answered by whom, and what a client is told that may not ask."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from indexd import __version__
from indexd.errors import DiskError
from indexd.query import TIME_MAX
from indexd.serve import queries as serve_queries
from indexd.serve.queries import Queries
from indexd.serve.remoting import processor
from indexd.serve.remoting.command import Form
from support.daemon import rebuild
from support.data_directory import T0, Store, spec
from support.queue_store import QueueStore
from support.remoting import Command, RemotingClient, signed
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
from support.remoting_serving import Outlet, Peer, broker_handlers, name_server_handlers
from support.small_log import SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from indexd.query import Data


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


_KEYS = ("rocketmq", "12345678")
_QUERY = {"topic": "TopicTest", "key": "Aa", "maxNum": 32, "beginTimestamp": 0, "endTimestamp": 2**63 - 1}
#: Every code that is answered without an upstream, with fields that are enough for it.
_ANSWERED: dict[int, dict[str, object]] = {
    11: {
        "consumerGroup": "TOOLS_CONSUMER", "topic": "TopicTest", "queueId": 0, "queueOffset": 0, "maxMsgNums": 1,
    },
    12: _QUERY,
    28: {},
    29: {"topic": "TopicTest", "queueId": 0, "timestamp": 0},
    30: {"topic": "TopicTest", "queueId": 0},
    31: {"topic": "TopicTest", "queueId": 0},
    32: {"topic": "TopicTest", "queueId": 0},
    33: {"topic": "TopicTest", "offset": 0},
    34: {},
    35: {"clientID": "c"},
    105: {"topic": "TopicTest"},
    106: {},
    206: {},
    300: {"topic": "TopicTest"},
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a store and its data directory."""
    place = tmp_path_factory.mktemp("processor")
    write_log(place / "store", 300)
    rebuild(place / "store", place / "data", *SIZES)
    return place


@pytest.fixture
def outlet(root: Path) -> Iterator[Outlet]:
    with Outlet(root) as outlet:
        yield outlet


@pytest.mark.parametrize("form", ["json", "rocketmq"])
def test_what_is_answered_without_an_upstream(outlet: Outlet, form: str) -> None:
    with outlet.client(form=form) as client:
        for code, fields in _ANSWERED.items():
            answer = client.ask(code, fields)
            assert (answer.code, answer.flag, answer.form, answer.language) == (0, 1, form, "PYTHON"), (code, answer)


@pytest.mark.parametrize("code", [3, 10, 15, 26, 36, 37, 38, 39, 103, 205, 310, 361, 200050, -1, 0, 32767, 2**31 - 1])
def test_what_nobody_answers(outlet: Outlet, code: int) -> None:
    with outlet.client() as client:
        answer = client.ask(code, {"topic": "TopicTest"}, b"body")
        assert (answer.code, answer.remark) == (
            3,
            f"request code {code} is none of those that indexd answers: indexd answers queries, and has no "
            "upstream_namesrv to pass others to",
        )


def test_mqadmin_lists_the_topics_of_the_index_where_no_name_server_is_behind_it(root: Path, outlet: Outlet) -> None:
    with outlet.client() as client:
        topics = client.ask(206).json()["topicList"]
    folders = sorted(path.name for path in (root / "data/consumequeue").iterdir())
    assert "TopicTest" in topics
    assert topics == folders


def test_fields_that_are_missing_or_none(outlet: Outlet) -> None:
    with outlet.client() as client:
        for code, fields in _ANSWERED.items():
            for name in fields:
                if name in ("clientID", "consumerGroup") or code == 300:
                    continue
                if (code, name) == (33, "topic"):
                    continue
                answer = client.ask(code, {other: value for other, value in fields.items() if other != name})
                assert (answer.code, f"ext field {name} is missing" in str(answer.remark)) == (1, True), (code, answer)


def test_oneway_requests_and_responses_get_no_answer(outlet: Outlet) -> None:
    with outlet.client() as client:
        for code, fields in _ANSWERED.items():
            client.tell(code, fields)
            client.start(code, fields, flag=1)
            client.start(code, fields, flag=3)
        client.tell(310)
        last = client.start(34)
        assert client.receive().opaque == last.opaque


def test_every_request_has_to_be_signed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(_KEYS[1])
    settings = {"remoting_access_key": _KEYS[0], "remoting_secret_key_file": tmp_path / "secret"}
    with ExitStack() as stack:
        outlet = stack.enter_context(Outlet(root, **settings))
        client, known, wrong = (
            stack.enter_context(outlet.client(credentials=keys)) for keys in (None, _KEYS, (_KEYS[0], "wrong"))
        )
        for code, fields in (_ANSWERED | {310: {}}).items():
            for one in (client, wrong):
                answer = one.ask(code, fields)
                assert answer.code == 16
                assert not answer.body
                assert _KEYS[1] not in str(answer.remark)
            assert known.ask(code, fields).code == (3 if code == 310 else 0)
        texts = {name: str(value) for name, value in _QUERY.items()}
        changed = signed(texts, b"", _KEYS) | {"key": "BB"}
        assert client.ask(12, changed).code == 16
        client.start(12, texts, flag=2)
        assert client.ask(12, signed(texts, b"", _KEYS)).code == 0


def test_what_is_not_signed_goes_no_further(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(_KEYS[1])
    settings: dict[str, object] = {
        "remoting_access_key": _KEYS[0], "remoting_secret_key_file": tmp_path / "secret", "node_id": "a",
    }  # fmt: skip
    with (
        Peer(broker_handlers()) as broker,
        Peer(name_server_handlers({"a": {0: broker.address}})) as names,
        Outlet(root, upstream_namesrv=names.address, **settings) as outlet,
        outlet.client() as stranger,
        outlet.client(credentials=_KEYS) as client,
    ):
        for code in (34, 310, 206, 105, 106, 28, 12):
            assert stranger.ask(code, {"topic": "TopicTest"}).code == 16
        stranger.tell(310)
        assert not broker.requests
        assert not names.requests
        assert client.ask(310, {"a": "b"}, b"body").code == 0
        (_, sent), *_ = broker.requests
        assert dict(sent.ext_fields) == signed({"a": "b"}, b"body", _KEYS)  # as it was signed: the broker looks too
        (_, asked), *_ = names.requests
        assert dict(asked.ext_fields) == signed({}, b"", _KEYS)


def test_before_the_index_is_open(root: Path) -> None:
    outlet, phase = Outlet(root), "opening"
    outlet.board.leaving(phase)
    with outlet, outlet.client() as client:
        for code, fields in _ANSWERED.items():
            answer = client.ask(code, fields)
            assert answer.code == (0 if code in (28, 34, 35, 106, 300) else 2), answer
            assert answer.code == 0 or answer.remark == f"the index is {phase}"
        assert client.ask(28).json()["table"]["indexdPhase"] == phase


def test_queries_while_the_broker_is_asked(root: Path) -> None:
    # Nothing that waits for others holds up what the index answers.
    with ExitStack() as stack:
        broker = stack.enter_context(Peer(dict.fromkeys(range(400), lambda _: None)))
        names = stack.enter_context(Peer(name_server_handlers({"a": {0: broker.address}})))
        outlet = stack.enter_context(Outlet(root, upstream_namesrv=names.address, node_id="a"))
        client: RemotingClient = stack.enter_context(outlet.client())
        client.tell(34, body=b'{"clientID":"c"}')
        waiting: list[Command] = [client.start(310) for _ in range(100)]
        assert client.ask(12, _QUERY).code == 0
        broker.wait(lambda peer: peer.codes().count(310) == len(waiting))
