"""What a name server says of routes and the cluster, made to lead here; and what is said when it says nothing."""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from indexd.serve.remoting.processor import Directory
from indexd.serve.remoting.routes import write_json
from support.daemon import rebuild
from support.data_directory import config_of
from support.remoting import V4_9_3
from support.remoting_outlet import (
    CLUSTER,
    Brokers,
    Outlet,
    broker_handlers,
    name_server_handlers,
    route_data,
)
from support.remoting_peer import Peer
from support.serving import Log
from support.small_log import SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.remoting import Command, RemotingClient

_NAME = "broker-a"


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
    assert directory._kept_size == sum(len(topic) + len(body) for topic, body in directory._kept.items())


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
