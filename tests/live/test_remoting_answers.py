"""Requests that the outlet answers by itself: in one call what came together, routes of its own, and who may ask."""

from __future__ import annotations

import json
import random
import shutil
import ssl
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from indexd.config import load
from indexd.errors import UsageError
from indexd.serve.remoting.access import Credentials, RemotingAccess, read_access
from indexd.serve.remoting.command import Form, RemotingCommand, encode_command
from indexd.serve.remoting.key_queries import Answered, KeyQueries
from support.data_directory import LAYOUT, SEGMENT, T0, make_data
from support.queue_store import QueueStore
from support.remoting import (
    CLUSTER,
    NAME,
    V4_9_3,
    V4_9_4,
    Front,
    Outlet,
    RemotingClient,
    broker_data,
    is_closed,
    read_command,
    signed,
)
from support.remoting_asking import ALL_TIME, six_messages
from support.serving import make_certificate

_KEYS = ("rocketmq", "12345678")
#: Settings for TLS, and for signatures.
Guards = tuple[dict[str, Any], dict[str, Any]]


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
def outlet(root: Path) -> Iterator[Outlet]:
    with Outlet(root, node_id=NAME, cluster=CLUSTER) as outlet:
        yield outlet


@pytest.fixture(params=list(Form))
def client(outlet: Outlet, request: pytest.FixtureRequest) -> Iterator[RemotingClient]:
    with outlet.client(form=request.param) as client:
        yield client


def test_what_is_answered_without_an_upstream(root: Path, client: RemotingClient) -> None:
    for code, fields in _ANSWERED.items():
        answer = client.ask(code, fields)
        assert (answer.code, answer.flag, answer.form, answer.language) == (0, 1, client.form, "PYTHON"), (code, answer)
        # Neither a one-way request nor a response gets an answer.
        for flag in (1, 2, 3):
            client.start(code, fields, flag=flag)
    client.tell(310)
    topics = client.ask(206).json()["topicList"]  # mqadmin topicList
    assert topics == sorted(path.name for path in (root / "data/consumequeue").iterdir())
    last = client.start(34)
    assert client.receive().opaque == last.opaque


def test_what_nobody_answers(client: RemotingClient) -> None:
    for code in (3, 10, 36, 39, 103, 205, 310, -1, 0, 32767):
        answer = client.ask(code, {"topic": "TopicTest"}, b"body")
        assert (answer.code, answer.remark) == (
            3,
            f"request code {code} is none of those that indexd answers: indexd answers queries, and has no "
            "upstream_namesrv to pass others to",
        )


def test_fields_that_are_missing_or_none(client: RemotingClient) -> None:
    for code, fields in _ANSWERED.items():
        for name in fields:
            if name in ("clientID", "consumerGroup") or (code, name) in ((33, "topic"), (300, "topic")):
                continue
            answer = client.ask(code, {other: value for other, value in fields.items() if other != name})
            assert (answer.code, f"ext field {name} is missing" in str(answer.remark)) == (1, True), (code, answer)


def test_every_request_has_to_be_signed(root: Path, guards: Guards, stack: ExitStack) -> None:
    outlet = stack.enter_context(Outlet(root, **guards[1]))
    client, known, wrong = (
        stack.enter_context(outlet.client(credentials=keys)) for keys in (None, _KEYS, (_KEYS[0], "wrong"))
    )
    for code, fields in (_ANSWERED | {310: {}}).items():
        for one in (client, wrong):
            answer = one.ask(code, fields)
            assert (answer.code, answer.body) == (16, b"")
            assert _KEYS[1] not in str(answer.remark)
        assert known.ask(code, fields).code == (3 if code == 310 else 0)
    texts = {name: str(value) for name, value in _QUERY.items()}
    assert client.ask(12, signed(texts, b"", _KEYS) | {"key": "BB"}).code == 16
    client.start(12, texts, flag=2)
    assert client.ask(12, signed(texts, b"", _KEYS)).code == 0


@pytest.mark.parametrize("is_there", [True, False])
def test_before_the_index_is_open(root: Path, tmp_path: Path, is_there: bool) -> None:
    outlet = Outlet(root if is_there else tmp_path)
    if is_there:
        outlet.board.leaving("opening")
    why = "the index is opening" if is_there else "holds no index yet"
    with outlet, outlet.client() as client:
        for code, fields in _ANSWERED.items():
            answer = client.ask(code, fields)
            is_open = code in (28, 34, 35, 106, 300)
            assert (answer.code, why in str(answer.remark)) == ((0, False) if is_open else (2, True)), answer
        assert client.ask(28).json()["table"]["indexdPhase"] == outlet.board.phase


# --- our own ----------------------------------------------------------------------------------------------------


def test_our_own_route_leads_here_for_reading(outlet: Outlet, client: RemotingClient) -> None:
    for topic in ("TopicTest", "订单主题", "L" + "x" * 199):
        answer = client.ask(105, {"topic": topic})
        assert answer.code == 0
        assert answer.json() == {
            "brokerDatas": [broker_data(NAME, {0: outlet.address})],
            "filterServerTable": {},
            "queueDatas": [{"brokerName": NAME, "perm": 4, "readQueueNums": 4, "writeQueueNums": 4, "topicSysFlag": 0}],
        }
    cluster = client.ask(106).json()
    assert cluster["brokerAddrTable"] == {NAME: broker_data(NAME, {0: outlet.address})}
    assert cluster["clusterAddrTable"] == {CLUSTER: [NAME]}
    for topic in ("nobody", "%RETRY%g", "%DLQ%g", "", ".", "..", "a/b", "../data", "x" * 5000, "a\0b"):
        answer = client.ask(105, {"topic": topic})
        assert (answer.code, 0 < len(str(answer.remark)) < 300) == (17, True)


def test_a_topic_that_is_newer_than_the_frontier(root: Path, client: RemotingClient) -> None:
    for name in ("7", "no queue", "09"):
        (root / "data/consumequeue/Newest" / name).mkdir(parents=True)
    assert client.ask(105, {"topic": "Newest"}).json()["queueDatas"][0]["readQueueNums"] == 8
    shutil.rmtree(root / "data/consumequeue/Newest")


def test_without_consume_queues_every_topic_has_a_route(tmp_path: Path) -> None:
    (tmp_path / "store/commitlog").mkdir(parents=True)
    make_data(tmp_path / "data", tmp_path / "store", [], LAYOUT, "5.4", SEGMENT)
    with Outlet(tmp_path) as outlet, outlet.client() as client:
        assert client.ask(105, {"topic": "any"}).json()["queueDatas"][0]["readQueueNums"] == 1


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize(
    ("version", "fields", "is_standard"),
    [
        (V4_9_3, {}, False),
        (V4_9_4, {}, True),
        (V4_9_3, {"acceptStandardJsonOnly": "true"}, True),
        (V4_9_3, {"acceptStandardJsonOnly": "false"}, False),
        (0, {}, False),
    ],
)
def test_the_style_that_the_client_reads(
    root: Path,
    form: Form,
    version: int,
    fields: dict[str, str],
    is_standard: bool,
) -> None:
    with Outlet(root, remoting_advertise="indexd.example:9876") as outlet, outlet.client(form=form) as client:
        for code in (105, 106):
            body = client.ask(code, {"topic": "TopicTest"} | fields, version=version).body
            key = b'"0"' if is_standard else b"0"
            assert b'"brokerAddrs":{' + key + b':"indexd.example:9876"}' in body


_BY_KEY = {"topic": "T", "key": "k", "maxNum": "32"} | ALL_TIME


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return six_messages(tmp_path)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many were answered by each call that answered any."""
    done: list[int] = []
    answer = KeyQueries.answer

    def watched(self: KeyQueries, data: bytes, frame_max: int) -> Answered | None:
        found = answer(self, data, frame_max)
        done.extend([] if found is None else [found.requests])
        return found

    monkeypatch.setattr(KeyQueries, "answer", watched)
    return done


def query_frame(opaque: int, code: int = 12, fields: Mapping[str, str] = _BY_KEY) -> bytes:
    return encode_command(RemotingCommand(code, opaque, language="JAVA", version=493, ext_fields=dict(fields)))


def wait_until_compiled(outlet: Outlet, together: list[int]) -> int:
    """Until requests are answered so: how many it took."""
    sent = 0
    with outlet.connect() as client, client.makefile("rb") as stream:

        def ask() -> bool:
            nonlocal sent
            sent += 2
            client.sendall(query_frame(1) + query_frame(2))
            return {read_command(stream).opaque for _ in range(2)} == {1, 2} and bool(together)

        outlet.wait_for(ask)
    return sent


def test_each_gets_its_own_answer(store: QueueStore, tmp_path: Path, together: list[int]) -> None:
    at = str(store.messages()[2].phy_offset)
    changes = ({}, {"key": "u1"}, {"key": "absent"}, {"maxNum": "x"}, {"key": "k\n"}, {"endTimestamp": str(T0)})
    asked = [*[(12, _BY_KEY | change) for change in changes], (33, {"offset": at}), (310, {}), (34, {})]
    rand = random.Random(3)
    with Outlet(tmp_path) as outlet, outlet.connect() as client, client.makefile("rb") as stream:
        before = wait_until_compiled(outlet, together)
        wanted = []
        for code, fields in asked:
            client.sendall(query_frame(7, code, fields))
            wanted.append(read_command(stream))
        assert [answer.code for answer in wanted] == [0, 0, 22, 1, 22, 22, 0, 3, 0]
        together.clear()
        sent = [rand.randrange(len(asked) if number % 100 > 40 else 2) for number in range(500)]
        for first in range(0, len(sent), 20):
            kinds = dict(enumerate(sent[first : first + 20]))
            data = b"".join(query_frame(number, *asked[kind]) for number, kind in kinds.items())
            for begin in range(0, len(data), 1777):
                client.sendall(data[begin : begin + 1777])
            for _ in kinds:
                answer = read_command(stream)
                assert replace(answer, opaque=7) == wanted[kinds[answer.opaque]]
        assert sum(together) > 100
        assert max(together) > 1
        ok = before + 2 + sum(kind < 2 for kind in sent)
        outlet.wait_for(lambda: outlet.row()["requests"]["QUERY_MESSAGE"]["ok"] == ok)
        # A frame that is none, behind those that are answered.
        client.sendall(query_frame(70) + query_frame(71) + b"\xff\xff\xff\xff" + query_frame(72))
        assert [read_command(stream).opaque for _ in range(2)] == [70, 71]
        assert is_closed(client)


@pytest.mark.parametrize("is_signed", [True, False])
def test_not_where_more_is_asked_for(
    store: QueueStore, tmp_path: Path, together: list[int], guards: Guards, is_signed: bool
) -> None:
    fields = signed(_BY_KEY, b"", _KEYS) if is_signed else _BY_KEY
    with (
        Outlet(tmp_path, **guards[1] if is_signed else {"remoting_mode": "exact"}) as outlet,
        outlet.client() as client,
    ):
        for _ in range(30):
            assert client.ask(12, fields).code == 0
            assert client.ask(12, _BY_KEY).code == (16 if is_signed else 0)
    assert not together


# --- who may ask -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guards(tmp_path_factory: pytest.TempPathFactory) -> Guards:
    """Settings for TLS and for signatures."""
    root = tmp_path_factory.mktemp("access")
    cert, key = make_certificate(root)
    (root / "secret").write_text(f"{_KEYS[1]}\n")
    signatures: dict[str, object] = {"remoting_access_key": _KEYS[0], "remoting_secret_key_file": root / "secret"}
    return {"remoting_tls_cert": cert, "remoting_tls_key": key}, signatures


def _read(store: Path, **keys: Any) -> RemotingAccess:
    return read_access(load({"store": str(store), **keys}, None, {}))


def test_who_is_let_in_by_everybodys_leave(tmp_path: Path, guards: Guards) -> None:
    tls, acl = guards
    access = _read(tmp_path, remoting="0.0.0.0:0", remoting_allow="10.0.0.0/8", **tls, **acl)
    assert isinstance(access.tls, ssl.SSLContext)
    assert access.tls.minimum_version == ssl.TLSVersion.TLSv1_2
    assert access.credentials == Credentials(_KEYS[0], _KEYS[1].encode())
    assert access.networks == (ip_network("10.0.0.0/8"),)
    closed = [{"remoting": remoting} for remoting in ("127.0.0.1:0", "localhost:0", "[::1]:0", "off")]
    for guard in (*closed, {**tls, **acl}, {"remoting_allow": "10.0.0.0/8"}):
        assert not _read(tmp_path, **{"remoting": "0.0.0.0:0"} | guard).is_open, guard
    for guard in ({}, tls, acl, {"remoting_allow": "0.0.0.0/0"}, {"remoting_allow": "10.0.0.0/8,::/0"}):
        assert _read(tmp_path, remoting="0.0.0.0:0", **guard).is_open, guard


@pytest.mark.parametrize("content", [None, b"", b"\n", b"two words", b"\xff\xfe", b"x" * 4097])
def test_keys_that_are_none(tmp_path: Path, guards: Guards, content: bytes | None) -> None:
    path, (tls, acl) = tmp_path / "key", guards
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match="remoting_secret_key_file") as error:
        _read(tmp_path, **acl | {"remoting_secret_key_file": path})
    assert "words" not in error.value.line()
    with pytest.raises(UsageError, match="TLS") as error:
        _read(tmp_path, **tls | {"remoting_tls_key": path})


def test_a_key_of_another_certificate_and_a_folder(tmp_path: Path, guards: Guards) -> None:
    tls, acl = guards
    with pytest.raises(UsageError, match="TLS") as error:
        _read(tmp_path, **tls | {"remoting_tls_key": make_certificate(tmp_path)[1]})
    assert error.value.hint == "give a PEM chain, and the key that belongs to it, without a password"
    with pytest.raises(UsageError, match="remoting_secret_key_file") as error:
        _read(tmp_path, **acl | {"remoting_secret_key_file": tmp_path})
    assert error.value.hint == "give a file with the secret key"


def test_what_is_not_signed_goes_no_further(root: Path, guards: Guards, stack: ExitStack) -> None:
    behind = Front(stack, root, **guards[1])
    stranger, client = behind.client(), behind.client(credentials=_KEYS)
    for code in (34, 310, 206, 105, 106, 28, 12):
        assert stranger.ask(code, {"topic": "TopicTest"}).code == 16
    stranger.tell(310)
    assert not behind.broker.requests + behind.names.requests
    assert client.ask(310, {"a": "b"}, b"body").code == 0
    # As it was signed: the broker looks, too; and so is what we ask ourselves.
    assert [sent.ext_fields for _, sent in behind.broker.requests] == [signed({"a": "b"}, b"body", _KEYS)]
    assert [asked.ext_fields for _, asked in behind.names.requests] == [signed({}, b"", _KEYS)]


def test_queries_go_to_the_index_with_a_broker_behind(root: Path, stack: ExitStack) -> None:
    behind, queue = Front(stack, root), {"topic": "TopicTest", "queueId": 0}
    assert behind.ask(12, _QUERY).code == 0
    assert behind.ask(33, {"topic": "TopicTest", "offset": 0}).code == 0
    assert behind.ask(30, queue).ext_fields["msgId"] == "broker"
    assert behind.broker.codes() == [30]
    behind.broker.stop()
    assert int(behind.ask(30, queue).ext_fields["offset"]) > 0
    assert behind.ask(11, _ANSWERED[11]).code == 0
    answer = behind.ask(11, _ANSWERED[11] | {"consumerGroup": "g"})
    assert (answer.code, str(answer.remark).startswith(f"the broker at {behind.broker.address}")) == (14, True)


_HEARTBEAT = json.dumps({"clientID": "client-1", "producerDataSet": [{"groupName": "g"}]}).encode()
