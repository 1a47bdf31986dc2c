"""Routes and the cluster lead to the daemon: its own from the data directory, and a name server's with our address."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.config import load
from indexd.serve.remoting.processor import Directory
from indexd.serve.remoting.routes import BrokerPlace, find_place, lead_cluster, lead_route, read_json, write_json
from support.daemon import rebuild
from support.data_directory import LAYOUT, SEGMENT, config_of, make_data
from support.remoting import V4_9_3, V4_9_4
from support.remoting_serving import (
    CLUSTER,
    Brokers,
    Outlet,
    Peer,
    broker_data,
    broker_handlers,
    name_server_handlers,
    route_data,
)
from support.serving import Log
from support.small_log import SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.remoting import Command, RemotingClient


_NAME = "broker-a"
#: As the name server of 5.4.0 writes it: for clients before 4.9.4, and for others.
_ROUTE_OLD = (
    '{"brokerDatas":[{"brokerAddrs":{0:"1.2.3.4:10911",1:"x:1"},"brokerName":"bé","cluster":"c",'
    '"enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"bé","perm":6,'
    '"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)
_ROUTE_STANDARD = _ROUTE_OLD.replace("{0:", '{"0":').replace(",1:", ',"1":')
_TEXTS = st.text(st.sampled_from('ab{},:"\\0123 é\n-'), max_size=12)
_ADDRESSES = st.dictionaries(st.integers(-5, 99).map(str), _TEXTS, max_size=4)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a store and its data directory: topics of four queues."""
    place = tmp_path_factory.mktemp("routes")
    write_log(place / "store", 300)
    rebuild(place / "store", place / "data", *SIZES)
    return place


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


# --- JSON -------------------------------------------------------------------------------------------------------


def test_both_styles_are_read_and_written_as_rocketmq_does() -> None:
    value = json.loads(_ROUTE_STANDARD)
    assert read_json(_ROUTE_OLD.encode()) == read_json(_ROUTE_STANDARD.encode()) == value
    assert write_json(value, is_standard=False) == _ROUTE_OLD.encode()
    assert json.loads(write_json(value, is_standard=True)) == value
    assert b'"brokerAddrs":{"0":"1.2.3.4:10911"' in write_json(value, is_standard=True)


@given(st.dictionaries(_TEXTS, _VALUES, max_size=4), _ADDRESSES)
def test_what_is_written_in_either_style_is_read(members: dict[str, Any], addresses: dict[str, str]) -> None:
    value = members | {"brokerAddrs": addresses, "brokerAddrTable": {"1": {"brokerAddrs": addresses}}}
    assert json.loads(write_json(value, is_standard=True)) == value
    old = write_json(value, is_standard=False)
    assert read_json(old) == value
    assert b'"brokerAddrTable":{"1":' in old  # a broker that is named 1


@given(st.binary(max_size=60) | _TEXTS.map(str.encode))
def test_other_bytes_are_refused_or_an_object(body: bytes) -> None:
    try:
        value = read_json(body)
    except ValueError:
        return
    assert type(value) is dict


@pytest.mark.parametrize("body", [b'{"a":' * 50_000, b"[" * 100_000, b"", b"[]", b"null", b"{0:1", b"\xff{}", b"{0:}"])
def test_bodies_that_are_none(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_json(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"' + b'\\"' * 45_000,
        b'{"a":' + b'"' * 1_000_000,
        b'{"' * 500_000,
        b"{" + b" " * 1_000_000,
        b"{" + b"1" * 1_000_000,
        b"{" + b"1:" * 500_000,
        b'"' * (16 << 20),
        b'{"a":"' + b"\\" * (16 << 20),
    ],
    ids=lambda body: f"{bytes(body[:8])!r}-{len(body)}",
)
def test_hostile_texts_are_refused_in_a_moment(body: bytes) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r"."):
        read_json(body)
    assert time.process_time() - began < 2


def test_text_that_looks_like_a_key_stays() -> None:
    assert read_json(b'{"a":"{1:2,\\"3:4", 5 :{-6:"[7:8"}}') == {"a": '{1:2,"3:4', "5": {"-6": "[7:8"}}


# --- our own ----------------------------------------------------------------------------------------------------


def test_our_own_route_leads_here_for_reading(root: Path) -> None:
    with Outlet(root, node_id=_NAME, cluster=CLUSTER) as outlet, outlet.client() as client:
        for topic in ("TopicTest", "订单主题", "L" + "x" * 199):
            answer = client.ask(105, {"topic": topic})
            assert answer.code == 0
            assert answer.json() == {
                "brokerDatas": [broker_data(_NAME, {0: outlet.address})],
                "filterServerTable": {},
                "queueDatas": [
                    {"brokerName": _NAME, "perm": 4, "readQueueNums": 4, "writeQueueNums": 4, "topicSysFlag": 0}
                ],
            }
        cluster = client.ask(106).json()
        assert cluster["brokerAddrTable"] == {_NAME: broker_data(_NAME, {0: outlet.address})}
        assert cluster["clusterAddrTable"] == {CLUSTER: [_NAME]}


@pytest.mark.parametrize("topic", ["nobody", "%RETRY%g", "%DLQ%g", "", ".", "..", "a/b", "../data", "x" * 5000, "a\0b"])
def test_topics_that_are_not_there(root: Path, topic: str) -> None:
    with Outlet(root) as outlet, outlet.client() as client:
        answer = client.ask(105, {"topic": topic})
        assert answer.code == 17
        assert answer.remark is not None
        assert len(answer.remark) < 300


def test_a_topic_that_is_newer_than_the_frontier(root: Path) -> None:
    for name in ("7", "no queue", "09"):
        (root / "data/consumequeue/Newest" / name).mkdir(parents=True)
    with Outlet(root) as outlet, outlet.client() as client:
        assert client.ask(105, {"topic": "Newest"}).json()["queueDatas"][0]["readQueueNums"] == 8
    shutil.rmtree(root / "data/consumequeue/Newest")


def test_without_consume_queues_every_topic_has_a_route(tmp_path: Path) -> None:
    (tmp_path / "store/commitlog").mkdir(parents=True)
    make_data(tmp_path / "data", tmp_path / "store", [], LAYOUT, "5.4", SEGMENT)
    with Outlet(tmp_path) as outlet, outlet.client() as client:
        assert client.ask(105, {"topic": "any"}).json()["queueDatas"][0]["readQueueNums"] == 1


def test_while_there_is_no_index(tmp_path: Path) -> None:
    with Outlet(tmp_path) as outlet, outlet.client() as client:
        assert client.ask(105, {"topic": "TopicTest"}).code == 2
        assert client.ask(105).code in (1, 2)
        assert client.ask(106).code == 0


@pytest.mark.parametrize("form", ["json", "rocketmq"])
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
    form: str,
    version: int,
    fields: dict[str, str],
    is_standard: bool,
) -> None:
    with Outlet(root, remoting_advertise="indexd.example:9876") as outlet, outlet.client(form=form) as client:
        for code in (105, 106):
            body = client.ask(code, {"topic": "TopicTest"} | fields, version=version).body
            key = b'"0"' if is_standard else b"0"
            assert b'"brokerAddrs":{' + key + b':"indexd.example:9876"}' in body


# --- where our broker is ----------------------------------------------------------------------------------------


def _cluster(brokers: Brokers) -> dict[str, Any]:
    table = {name: broker_data(name, addresses) for name, addresses in brokers.items()}
    return {"brokerAddrTable": table, "clusterAddrTable": {CLUSTER: sorted(brokers)}}


@pytest.mark.parametrize(
    ("brokers", "settings", "known", "wanted"),
    [
        ({"a": {0: "x:1"}, "b": {0: "y:1"}}, {"node_id": "b"}, None, ("b", "y:1", "0")),
        ({"a": {0: "x:1"}, "b": {0: "y:1", 1: "s:1"}}, {"broker_address": "s:1"}, None, ("b", "s:1", "1")),
        ({"a": {0: "x:1"}}, {"node_id": "a", "broker_address": "127.0.0.1:1"}, None, ("a", "127.0.0.1:1", "0")),
        ({"a": {0: "x:1"}}, {}, None, ("a", "x:1", "0")),
        ({"a": {0: "x:1"}}, {"node_id": "b"}, None, None),
        ({"a": {0: "x:1"}, "b": {0: "y:1"}}, {}, None, None),
        ({"a": {0: "x:1"}}, {}, "b", None),
        ({"a": {0: "x:1"}, "b": {0: "y:1"}}, {}, "b", ("b", "y:1", "0")),
        ({"a": {1: "x:1"}}, {"node_id": "a"}, None, ("a", None, "0")),
        ({}, {"node_id": "a"}, None, None),
    ],
)
def test_which_broker_is_ours(
    brokers: Brokers, settings: dict[str, str], known: str | None, wanted: tuple[str, str | None, str] | None
) -> None:
    config = load({"store": "/nowhere", "data": "/nowhere/data"} | settings, None, {})
    place = find_place(_cluster(brokers), config, None if known is None else BrokerPlace(known, CLUSTER))
    assert (None if place is None else (place.name, place.address, place.broker_id)) == wanted
    if place is not None:
        assert place.is_registered
        cluster = _cluster(brokers)
        lead_cluster(cluster, place, "ours:9")
        addresses = cluster["brokerAddrTable"][place.name]["brokerAddrs"]
        assert addresses == {
            str(number): "ours:9" if str(number) == place.broker_id else address
            for number, address in brokers[place.name].items()
        }


@pytest.mark.parametrize(("settings", "name"), [({}, "DefaultCluster"), ({"cluster": "ours"}, "ours")])
def test_a_broker_without_a_cluster_is_in_ours(settings: dict[str, str], name: str) -> None:
    config = load({"store": "/nowhere", "data": "/nowhere/data", "node_id": "a"} | settings, None, {})
    for cluster in ({}, {"cluster": None}, {"cluster": ""}, {"cluster": 7}):
        broker = {"brokerName": "a", "brokerAddrs": {"0": "x:1"}, **cluster}
        place = find_place({"brokerAddrTable": {"a": broker}}, config, None)
        assert place is not None
        assert place.cluster == name


@given(_VALUES)
def test_a_route_of_any_shape_is_refused_or_led(value: Any) -> None:
    route = {"brokerDatas": value}
    try:
        lead_route(route, BrokerPlace(_NAME, CLUSTER), "ours:9")
    except ValueError:
        return
    assert type(route["brokerDatas"]) is list


# --- a name server's ---------------------------------------------------------------------------------------------


class _Upstream:
    # A name server, the brokers it knows, and the outlet in front of it.
    def __init__(self, stack: ExitStack, root: Path, brokers: Brokers, **settings: object) -> None:
        self.brokers: Brokers = brokers
        self.topics: dict[str, Brokers] = {"TopicTest": dict(brokers)}
        self.names = stack.enter_context(Peer(name_server_handlers(self.brokers, self.topics)))
        given = {"upstream_namesrv": self.names.address, "node_id": _NAME} | settings
        self.outlet = stack.enter_context(Outlet(root, **given))
        self.client: RemotingClient = stack.enter_context(self.outlet.client())

    def route(self, topic: str = "TopicTest") -> Command:
        return self.client.ask(105, {"topic": topic})

    def addresses(self, topic: str = "TopicTest") -> dict[str, dict[str, str]]:
        answer = self.route(topic)
        assert answer.code == 0, answer
        return {broker["brokerName"]: broker["brokerAddrs"] for broker in answer.json()["brokerDatas"]}

    def wait_until(self, holds: Any) -> None:
        self.outlet.wait_for(holds)


def test_the_masters_address_alone_becomes_ours(root: Path, stack: ExitStack) -> None:
    brokers: Brokers = {_NAME: {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}, "broker-b": {0: "10.0.0.3:10911"}}
    behind = _Upstream(stack, root, brokers)
    ours = behind.outlet.address
    wanted = {_NAME: {"0": ours, "1": "10.0.0.2:10911"}, "broker-b": {"0": "10.0.0.3:10911"}}
    assert behind.addresses() == wanted
    route = behind.route().json()
    assert route["queueDatas"] == route_data(brokers)["queueDatas"]  # as they are: producers send here
    cluster = behind.client.ask(106).json()
    assert {name: broker["brokerAddrs"] for name, broker in cluster["brokerAddrTable"].items()} == wanted
    assert cluster["clusterAddrTable"] == {CLUSTER: [_NAME, "broker-b"]}
    old = behind.client.ask(105, {"topic": "TopicTest"}, version=V4_9_3).body
    assert f'{{0:"{ours}",1:"10.0.0.2:10911"}}'.encode() in old


def test_members_that_nobody_knows_here_stay(root: Path, stack: ExitStack) -> None:
    behind = _Upstream(stack, root, {_NAME: {0: "10.0.0.1:10911"}})
    route = route_data(behind.brokers) | {
        "orderTopicConf": f"{_NAME}:4;x:{{1:2}}",
        "topicQueueMappingByBroker": {_NAME: {"currIdMap": {"0": 0}, "topic": "TopicTest"}},
    }
    behind.names.handlers[105] = lambda _: {"body": write_json(route, is_standard=False), "remark": "r"}
    answer = behind.route()
    route["brokerDatas"][0]["brokerAddrs"]["0"] = behind.outlet.address
    assert (answer.json(), answer.remark) == (route, "r")


def test_where_a_topic_is_not_on_our_broker(root: Path, stack: ExitStack) -> None:
    behind = _Upstream(stack, root, {_NAME: {0: "10.0.0.1:10911"}, "broker-b": {0: "10.0.0.3:10911"}})
    behind.topics["Elsewhere"] = {"broker-b": {0: "10.0.0.3:10911"}}
    assert behind.addresses("Elsewhere") == {"broker-b": {"0": "10.0.0.3:10911"}}
    answer = behind.route("Nowhere")
    assert (answer.code, answer.remark) == (17, "no route in name server")
    # It was deleted: the name server knows the broker, and says that it has no such topic.
    del behind.topics["TopicTest"]
    for _ in range(10):
        assert behind.route().code == 17
        time.sleep(0.01)
    behind.names.stop()
    assert behind.route().json()["queueDatas"][0]["perm"] == 4


def test_a_broker_that_is_gone_is_still_found_here(root: Path, stack: ExitStack) -> None:
    behind = _Upstream(stack, root, {_NAME: {0: "10.0.0.1:10911"}, "broker-b": {0: "10.0.0.3:10911"}})
    ours = {"0": behind.outlet.address}
    assert behind.addresses()[_NAME] == ours
    del behind.brokers[_NAME], behind.topics["TopicTest"][_NAME]
    behind.wait_until(lambda: len(behind.addresses()) == 2)
    route = behind.route().json()
    assert {broker["brokerName"]: broker["brokerAddrs"] for broker in route["brokerDatas"]}[_NAME] == ours
    assert [queues["brokerName"] for queues in route["queueDatas"]] == ["broker-b"]  # nobody sends or consumes here
    cluster = behind.client.ask(106).json()
    assert cluster["brokerAddrTable"][_NAME]["brokerAddrs"] == ours
    assert sorted(cluster["clusterAddrTable"][CLUSTER]) == [_NAME, "broker-b"]


def test_a_slave_that_is_left_alone_is_not_hidden(root: Path, stack: ExitStack) -> None:
    behind = _Upstream(stack, root, {_NAME: {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}})
    assert behind.addresses() == {_NAME: {"0": behind.outlet.address, "1": "10.0.0.2:10911"}}
    behind.brokers[_NAME] = {1: "10.0.0.2:10911"}
    behind.topics["TopicTest"] = {_NAME: {1: "10.0.0.2:10911"}}
    assert behind.addresses() == {_NAME: {"1": "10.0.0.2:10911"}}
    behind.client.ask(106)
    behind.topics["TopicTest"] = {_NAME: {0: "10.0.0.2:10911"}}  # it acts as the master, in routes alone
    assert behind.addresses() == {_NAME: {"0": "10.0.0.2:10911"}}


def test_a_name_server_that_is_gone_or_has_forgotten(root: Path, stack: ExitStack) -> None:
    behind = _Upstream(stack, root, {_NAME: {0: "10.0.0.1:10911"}})
    wanted = behind.route().json()
    assert wanted["queueDatas"][0]["perm"] == 6
    behind.brokers["broker-b"] = {0: "10.0.0.3:10911"}
    cluster = behind.client.ask(106).json()
    assert sorted(cluster["brokerAddrTable"]) == [_NAME, "broker-b"]
    behind.topics["OrderPaid"] = {}
    behind.brokers.clear()
    behind.topics.clear()
    # Started anew, it has heard of no broker yet: what it said before still holds.
    behind.wait_until(lambda: behind.route().code == 0)
    assert behind.route().json() == wanted
    assert behind.route("OrderPaid").json()["queueDatas"][0]["perm"] == 4  # that it never spoke of
    assert behind.route("nobody").remark == "no route in name server"
    behind.names.stop()
    assert behind.route().json() == wanted
    assert behind.route("OrderPaid").json()["queueDatas"][0]["perm"] == 4
    assert behind.route("nobody").code == 17
    assert behind.client.ask(106).json() == cluster
    assert "upstream_failed" in behind.outlet.events()


async def test_routes_that_are_kept_are_bounded(tmp_path: Path) -> None:
    config = config_of(tmp_path / "data")
    queries: Any = SimpleNamespace()
    directory = Directory(config, queries, None, Log(), routes_max=2000)
    for number in range(20):
        directory._keep(f"Topic{number}", bytes(300))
    assert list(directory._kept) == [f"Topic{number}" for number in range(14, 20)]
    directory._keep("Topic19", bytes(100))
    directory._keep("Topic20", bytes(300))
    assert list(directory._kept) == [f"Topic{number}" for number in range(14, 21)]


def test_answers_that_cannot_be_read_go_on_as_they_are(root: Path, stack: ExitStack) -> None:
    behind = _Upstream(stack, root, {_NAME: {0: "10.0.0.1:10911"}})
    for code in (105, 106):
        for body in (b"", b"{", b"[]", b"{}", b'{"brokerDatas":[1]}', b'{"brokerAddrTable":{"x":{}}}'):
            behind.names.handlers[code] = lambda _, body=body: {"body": body}
            answer = behind.client.ask(code, {"topic": "TopicTest"})
            assert (answer.code, answer.body) == (0, body)
        behind.names.handlers[code] = lambda _: {"code": 1, "remark": "name server not ready"}
        answer = behind.client.ask(code, {"topic": "TopicTest"})
        assert (answer.code, answer.remark) == (1, "name server not ready")
    assert "upstream_unread" in behind.outlet.events()


def test_more_than_is_read_goes_on_as_it_is(root: Path, stack: ExitStack) -> None:
    behind = _Upstream(stack, root, {_NAME: {0: "10.0.0.1:10911"}})
    wanted = behind.route().json()
    for code in (105, 106):
        behind.names.handlers[code] = lambda _: {"body": b'{"' + b" " * (9 << 20)}
        assert (behind.client.ask(code, {"topic": "TopicTest"}).code) == 0
    problems = [str(fields["problem"]) for _, event, fields in behind.outlet.log.lines if event == "upstream_unread"]
    assert any("it has 9437186 bytes" in problem for problem in problems)
    behind.names.stop()
    assert behind.route().json() == wanted  # what cannot be read takes the place of nothing


def test_queries_go_to_the_index_with_a_broker_behind(root: Path, stack: ExitStack) -> None:
    broker = stack.enter_context(Peer(broker_handlers()))
    behind = _Upstream(stack, root, {_NAME: {0: broker.address}})
    fields = {"topic": "TopicTest", "key": "Aa", "maxNum": 3, "beginTimestamp": 0, "endTimestamp": 2**63 - 1}
    assert behind.client.ask(12, fields).code == 0
    assert behind.client.ask(33, {"topic": "TopicTest", "offset": 0}).code == 0
    assert behind.client.ask(30, {"topic": "TopicTest", "queueId": 0}).ext_fields["msgId"] == "broker"
    broker.stop()
    offset = behind.client.ask(30, {"topic": "TopicTest", "queueId": 0}).ext_fields["offset"]
    assert int(offset) > 0
    pull = {
        "consumerGroup": "TOOLS_CONSUMER", "topic": "TopicTest", "queueId": 0, "queueOffset": 0, "maxMsgNums": 1,
    }  # fmt: skip
    assert behind.client.ask(11, pull).code == 0
    answer = behind.client.ask(11, pull | {"consumerGroup": "g"})
    assert (answer.code, str(answer.remark).startswith(f"the broker at {broker.address}")) == (14, True)
    assert broker.codes() == [30]
