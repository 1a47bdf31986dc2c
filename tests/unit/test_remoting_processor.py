"""Which request is answered by whom, and what a client is told that may not ask, or asks what nobody answers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support.daemon import rebuild
from support.remoting import Command, RemotingClient, signed
from support.remoting_outlet import Outlet, broker_handlers, name_server_handlers
from support.remoting_peer import Peer
from support.small_log import SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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


@pytest.mark.parametrize("phase", ["opening", "recovering"])
def test_before_the_index_is_open(root: Path, phase: str) -> None:
    outlet = Outlet(root)
    if phase == "opening":
        outlet.board.leaving("opening")
    else:
        outlet.board.recovering("replay", 1, 2)
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
