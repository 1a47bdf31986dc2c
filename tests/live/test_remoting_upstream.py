"""What is no query of the index: routes that lead here, and requests that go to name server and broker behind."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexd.serve.remoting.command import Form
from indexd.serve.remoting.routes import write_json
from support.remoting import (
    CLUSTER,
    NAME,
    PATIENCE,
    V4_9_3,
    Brokers,
    Command,
    Front,
    Outlet,
    Peer,
    RemotingClient,
    broker_handlers,
    name_server_handlers,
    route_data,
)
from support.serving import make_certificate, server_context


def test_the_masters_address_alone_becomes_ours(root: Path, stack: ExitStack) -> None:
    brokers: Brokers = {NAME: {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}, "broker-b": {0: "10.0.0.3:10911"}}
    behind = Front(stack, root, brokers)
    ours = behind.outlet.address
    # Queues as they are, for producers send here; and so are members that nobody knows here.
    route = route_data(brokers) | {
        "orderTopicConf": f"{NAME}:4;x:{{1:2}}",
        "topicQueueMappingByBroker": {NAME: {"currIdMap": {"0": 0}, "topic": "TopicTest"}},
    }
    behind.names.handlers[105] = lambda _: {"body": write_json(route, is_standard=False), "remark": "r"}
    answer = behind.route()
    old = behind.ask(105, {"topic": "TopicTest"}, version=V4_9_3).body
    route["brokerDatas"][0]["brokerAddrs"]["0"] = ours
    assert (answer.json(), answer.remark) == (route, "r")
    assert f'{{0:"{ours}",1:"10.0.0.2:10911"}}'.encode() in old
    cluster = behind.ask(106).json()
    wanted = {NAME: {"0": ours, "1": "10.0.0.2:10911"}, "broker-b": {"0": "10.0.0.3:10911"}}
    assert {name: broker["brokerAddrs"] for name, broker in cluster["brokerAddrTable"].items()} == wanted
    assert cluster["clusterAddrTable"] == {CLUSTER: [NAME, "broker-b"]}


def test_where_a_topic_is_not_on_our_broker(root: Path, stack: ExitStack) -> None:
    behind = Front(stack, root, {NAME: {0: "10.0.0.1:10911"}, "broker-b": {0: "10.0.0.3:10911"}})
    behind.topics["Elsewhere"] = {"broker-b": {0: "10.0.0.3:10911"}}
    assert behind.addresses("Elsewhere") == {"broker-b": {"0": "10.0.0.3:10911"}}
    assert behind.route().json()["queueDatas"][0]["perm"] == 6
    # It was deleted: the name server knows the broker, and says that it has no such topic.
    del behind.topics["TopicTest"]
    for topic in ("Nowhere", "TopicTest"):
        answer = behind.route(topic)
        assert (answer.code, answer.remark) == (17, "no route in name server")
    behind.names.stop()
    assert behind.route().json()["queueDatas"][0]["perm"] == 4


def test_a_broker_that_is_gone_is_still_found_here(root: Path, stack: ExitStack) -> None:
    behind = Front(stack, root, {NAME: {0: "10.0.0.1:10911"}, "broker-b": {0: "10.0.0.3:10911"}})
    ours = {"0": behind.outlet.address}
    assert behind.addresses()[NAME] == ours
    del behind.brokers[NAME], behind.topics["TopicTest"][NAME]
    behind.outlet.wait_for(lambda: len(behind.addresses()) == 2)
    route = behind.route().json()
    assert {broker["brokerName"]: broker["brokerAddrs"] for broker in route["brokerDatas"]}[NAME] == ours
    assert [queues["brokerName"] for queues in route["queueDatas"]] == ["broker-b"]  # nobody sends or consumes here
    cluster = behind.ask(106).json()
    assert cluster["brokerAddrTable"][NAME]["brokerAddrs"] == ours
    assert sorted(cluster["clusterAddrTable"][CLUSTER]) == [NAME, "broker-b"]


def test_a_slave_that_is_left_alone_is_not_hidden(root: Path, stack: ExitStack) -> None:
    behind = Front(stack, root, {NAME: {0: "10.0.0.1:10911", 1: "10.0.0.2:10911"}})
    assert behind.addresses() == {NAME: {"0": behind.outlet.address, "1": "10.0.0.2:10911"}}
    behind.brokers[NAME] = {1: "10.0.0.2:10911"}
    behind.topics["TopicTest"] = {NAME: {1: "10.0.0.2:10911"}}
    assert behind.addresses() == {NAME: {"1": "10.0.0.2:10911"}}
    behind.ask(106)
    behind.topics["TopicTest"] = {NAME: {0: "10.0.0.2:10911"}}  # it acts as the master, in routes alone
    assert behind.addresses() == {NAME: {"0": "10.0.0.2:10911"}}


def test_a_name_server_that_is_gone_or_has_forgotten(root: Path, stack: ExitStack) -> None:
    behind = Front(stack, root, {NAME: {0: "10.0.0.1:10911"}, "broker-b": {0: "10.0.0.3:10911"}})
    wanted, cluster = behind.route().json(), behind.ask(106).json()
    assert wanted["queueDatas"][0]["perm"] == 6
    assert sorted(cluster["brokerAddrTable"]) == [NAME, "broker-b"]
    # Started anew, it has heard of no broker yet: what it said before still holds.
    behind.brokers.clear()
    behind.topics.clear()
    for is_gone in (False, True):
        if is_gone:
            behind.names.stop()
            assert behind.ask(106).json() == cluster
        assert behind.route().json() == wanted
        assert behind.route("OrderPaid").json()["queueDatas"][0]["perm"] == 4  # that it never spoke of
        answer = behind.route("nobody")
        assert (answer.code, answer.remark == "no route in name server") == (17, not is_gone)
    assert "upstream_failed" in behind.outlet.events()


def test_answers_that_cannot_be_read_go_on_as_they_are(root: Path, stack: ExitStack) -> None:
    behind = Front(stack, root, {NAME: {0: "10.0.0.1:10911"}})
    wanted, large = behind.route().json(), b'{"' + b" " * (9 << 20)
    for code in (105, 106):
        for body in (b"", b"{", b"[]", b"{}", b'{"brokerDatas":[1]}', b'{"brokerAddrTable":{"x":{}}}', large):
            behind.names.handlers[code] = lambda _, body=body: {"body": body}
            answer = behind.ask(code, {"topic": "TopicTest"})
            assert (answer.code, answer.body) == (0, body)
        behind.names.handlers[code] = lambda _: {"code": 1, "remark": "name server not ready"}
        answer = behind.ask(code, {"topic": "TopicTest"})
        assert (answer.code, answer.remark) == (1, "name server not ready")
    assert "upstream_unread" in behind.outlet.events()
    behind.names.stop()
    assert behind.route().json() == wanted  # what cannot be read takes the place of nothing


_HEARTBEAT = json.dumps({"clientID": "client-1", "producerDataSet": [{"groupName": "g"}]}).encode()


def _nobody() -> str:
    # Where nobody listens.
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        return f"127.0.0.1:{nobody.getsockname()[1]}"


def _outlet(stack: ExitStack, root: Path, names: str, **settings: object) -> tuple[Outlet, RemotingClient]:
    outlet = stack.enter_context(Outlet(root, **{"upstream_namesrv": names, "node_id": NAME} | settings))
    return outlet, stack.enter_context(outlet.client())


def _names(stack: ExitStack, *addresses: str, **more: Any) -> Peer:
    # A name server that knows our broker, at these addresses.
    return stack.enter_context(Peer(name_server_handlers({NAME: dict(enumerate(addresses))}), **more))


@pytest.fixture
def behind(tmp_path: Path, stack: ExitStack) -> Front:
    return Front(stack, tmp_path)


@pytest.mark.parametrize("form", list(Form))
def test_a_request_goes_where_it_belongs_as_it_is(behind: Front, form: Form) -> None:
    client = behind.client(form=form)
    fields = {"a": "TopicTest", "b": "钥匙", "AccessKey": "k", "Signature": "s="}
    answer = client.ask(310, fields, b"body \0\xff", language="GO", version=400, remark=None)
    assert (answer.code, answer.form, answer.body) == (0, form, b"body \0\xff")
    assert answer.ext_fields == fields | {"msgId": "broker"}
    assert client.ask(206).json() == {"topicList": ["TopicTest"]}
    assert (client.ask(319).code, behind.names.codes()[-2:]) == (3, [206, 319])
    (_, sent), *more = behind.broker.requests
    assert not more
    assert (sent.code, sent.form, sent.language, sent.version, sent.flag) == (310, form, "GO", 400, 0)
    assert sent.remark == behind.outlet.board.boot_id  # the mark that tells of a circle: no signature covers it
    assert (sent.ext_fields, sent.body) == (fields, b"body \0\xff")


def test_many_clients_at_once_get_each_its_own_answers(behind: Front) -> None:
    def work(number: int) -> list[tuple[str, int]]:
        with behind.outlet.client(form=Form(number % 2)) as client:
            asked = [client.start(310, {"a": f"{number}-{turn}"}, b"x" * (turn * 997)) for turn in range(50)]
            return [(answer.ext_fields["a"], len(answer.body)) for answer in map(client.answer_to, asked)]

    with ThreadPoolExecutor(12) as pool:
        for number, answers in enumerate(pool.map(work, range(12))):
            assert answers == [(f"{number}-{turn}", turn * 997) for turn in range(50)]
    assert behind.broker.connections == 12  # one for each client


def test_requests_of_one_client_stay_in_order_to_its_last_word(behind: Front) -> None:
    # From the first one on, when the connection has yet to be made, to the last, behind which the client leaves.
    with behind.outlet.client() as client:
        for number in range(200):
            client.tell(310, {"n": number}, b"x" * 5000)
    behind.broker.wait(lambda broker: len(broker.requests) == 200 and not broker.open_connections())
    asked = [(number, int(command.ext_fields["n"]), command.flag) for number, command in behind.broker.requests]
    assert asked == [(1, number, 2) for number in range(200)]


def test_the_broker_asks_the_client_that_it_knows(behind: Front) -> None:
    first, second = behind.client(), behind.client(form=Form.ROCKETMQ)
    for client in (first, second):
        assert client.ask(34, body=_HEARTBEAT).code == 0
    behind.broker.ask_client(2, 39, is_oneway=True, ext_fields={"transactionId": "t"}, body=b"half")
    asked = second.next_request()
    assert (asked.code, asked.flag, asked.ext_fields, asked.body) == (39, 2, {"transactionId": "t"}, b"half")
    question = behind.broker.ask_client(1, 307, form=Form.JSON)
    request = first.next_request()
    assert (request.code, request.opaque) == (307, question.opaque)
    first.reply(request, 0, {"x": "y"}, body=b"running")
    behind.broker.wait(lambda broker: broker.responses)
    (response,) = behind.broker.responses
    assert (response.opaque, response.ext_fields, response.body) == (question.opaque, {"x": "y"}, b"running")
    assert not first.requests + second.requests


def test_a_long_poll_is_held_and_others_overtake_it(behind: Front) -> None:
    release = threading.Event()
    # The stand-in answers in turn what comes by one connection: this client has one of its own.
    behind.broker.handlers[361] = lambda request: {"body": request.body} if release.wait(20) else None
    client, other = behind.client(), behind.client()
    held = client.start(361, {"suspendTimeoutMillis": 20_000}, b"late")
    assert other.ask(310, body=b"now").body == b"now"
    assert client.ask(206).code == 0  # the same client, by the name server
    assert client.ask(33, {"offset": 0}).code == 2  # and by the index, which is not there
    release.set()
    assert client.answer_to(held).body == b"late"


def test_an_answer_that_never_comes(tmp_path: Path, stack: ExitStack) -> None:
    behind = Front(stack, tmp_path, patience=replace(PATIENCE, answer=0.2))
    behind.broker.handlers[310] = lambda _: None
    client = behind.client()
    answer = client.ask(310)
    assert (answer.code, answer.remark) == (
        14, f"the broker at {behind.broker.address} does not answer: no answer within 0.2 s"
    )  # fmt: skip
    assert client.ask(10, body=b"on").body == b"on"  # by the same connection
    assert behind.broker.connections == 1


def test_the_broker_goes_and_comes_back_at_another_port(behind: Front) -> None:
    client, idle = behind.client(), behind.client()
    assert idle.ask(310).code == 0
    behind.broker.handlers[310] = lambda _: None
    lost = client.start(310)
    behind.broker.wait(lambda broker: broker.codes().count(310) == 2)
    behind.broker.stop()
    answer = client.answer_to(lost)
    assert (answer.code, f"the broker at {behind.broker.address} does not answer: " in str(answer.remark)) == (14, True)
    for one in (client, idle):
        answer = one.ask(310)
        assert (answer.code, "refused" in str(answer.remark)) == (14, True)
    with Peer(broker_handlers()) as again:
        behind.brokers[NAME] = {0: again.address}
        assert client.ask(310, body=b"x").code == 0  # the name server is asked again at once
        # The client's next heartbeat makes it known there.
        assert client.ask(34, body=_HEARTBEAT).ext_fields["msgId"] == "broker"
        assert [(number, command.code) for number, command in again.requests] == [(1, 310), (1, 34)]
        again.ask_client(1, 40, is_oneway=True)
        assert client.next_request().code == 40


def test_another_broker_becomes_the_master(behind: Front) -> None:
    # The one before lives on, as a slave: who was there has to leave it.
    client, other = behind.client(), behind.client()
    assert client.ask(310).code == other.ask(310).code == 0
    with Peer(broker_handlers()) as master:
        behind.brokers[NAME] = {0: master.address, 1: behind.broker.address}
        behind.outlet.wait_for(lambda: client.ask(310).code == 0 and master.requests)
        count = len(behind.broker.requests)
        assert other.ask(310).code == 0
        assert (master.connections, len(behind.broker.requests)) == (2, count)


def test_a_broker_that_takes_nothing(tmp_path: Path, stack: ExitStack) -> None:
    behind = Front(stack, tmp_path, patience=replace(PATIENCE, untaken_bytes=1 << 20))
    release = threading.Event()
    behind.broker.handlers[361] = lambda _: release.wait(20) and None
    client, body = behind.client(), bytes(1 << 20)
    client.tell(361)
    asked = [client.start(310, body=body) for _ in range(20)]
    refused = client.receive()
    assert (refused.code, str(refused.remark).endswith("it has not taken 1 MiB yet")) == (14, True)
    assert client.ask(206).code == 0
    release.set()
    assert {client.answer_to(one).code for one in asked if one.opaque != refused.opaque} == {0, 14}
    assert client.ask(310, body=body).code == 0


def test_no_broker_and_no_name_server(tmp_path: Path, stack: ExitStack) -> None:
    address = _nobody()
    outlet, client = _outlet(stack, tmp_path, address)
    for code in (310, 206):
        answer = client.ask(code)
        assert answer.code == 14
        assert f"the name server at {address} does not answer: Connection refused" in str(answer.remark)
    for code in (34, 35):
        assert client.ask(code, {"clientID": "client-1"}).code == 0
    assert client.ask(300, {"topic": "T"}).json() == {"groupList": []}
    client.tell(37)
    outlet.wait_for(lambda: "upstream_dropped" in outlet.events())
    broker = stack.enter_context(Peer(broker_handlers()))
    _, client = _outlet(stack, tmp_path, address, broker_address=broker.address)  # that needs no name server
    assert client.ask(310, body=b"x").body == b"x"


def test_name_servers_are_asked_in_turn(tmp_path: Path, stack: ExitStack) -> None:
    broker = stack.enter_context(Peer(broker_handlers()))
    first, second = (_names(stack, broker.address) for _ in range(2))
    _, client = _outlet(stack, tmp_path, f"{first.address};{second.address}")
    assert client.ask(206).code == 0
    assert not second.requests
    first.stop()
    assert client.ask(206).code == 0
    assert second.requests
    # One that was started anew at the same place is asked by a new connection, without a failure.
    second.hang_up()
    second.wait(lambda peer: not peer.open_connections())
    assert client.ask(206).code == 0


def test_brokers_none_of_which_is_known_to_be_ours(tmp_path: Path, stack: ExitStack) -> None:
    behind = Front(stack, tmp_path, {"broker-b": {0: "10.0.0.3:10911"}, NAME: {0: _nobody()}})
    with Outlet(tmp_path, upstream_namesrv=behind.names.address) as outlet, outlet.client() as client:
        answer = client.ask(310)
        assert answer.code == 14
        assert "the name server knows these brokers: broker-a, broker-b; ours is" in str(answer.remark)
        assert "upstream_unknown" in outlet.events()


@pytest.mark.parametrize("form", list(Form))
@pytest.mark.parametrize("is_alone", [True, False])
def test_upstream_that_leads_back_here(tmp_path: Path, stack: ExitStack, is_alone: bool, form: Form) -> None:
    # By another daemon, which stands behind this one, or at once.
    address = _nobody()
    names = address.replace("127.0.0.1", "localhost")
    if not is_alone:
        names = stack.enter_context(Outlet(tmp_path, upstream_namesrv=address, node_id=NAME)).address
    outlet, _ = _outlet(stack, tmp_path, names, remoting=address)
    client = stack.enter_context(outlet.client(form=form))
    answer = client.ask(206)
    assert (answer.code, answer.form) == (14, form)
    assert str(answer.remark) == "upstream_namesrv of this indexd leads back to it"
    assert client.ask(310).code == 14
    assert "upstream_circle" in outlet.events()


def test_a_broker_that_is_this_daemon_is_as_good_as_none(tmp_path: Path, stack: ExitStack) -> None:
    # The daemon was started at the address of a broker that is gone, and that the name server still knows.
    address = _nobody()
    outlet, client = _outlet(stack, tmp_path, _names(stack, address).address, remoting=address)
    assert client.ask(310).code == 14
    assert client.ask(300, {"topic": "T"}).json() == {"groupList": []}
    assert "upstream_circle" in outlet.events()


@pytest.mark.parametrize("address", ["", "nowhere", "10.0.0.1:99999", "10.0.0.1:0", "a\0b\n:1", "x" * 5000 + ":1"])
def test_an_address_that_is_none(tmp_path: Path, stack: ExitStack, address: str) -> None:
    outlet, client = _outlet(stack, tmp_path, _names(stack, address).address)
    remark = str(client.ask(310).remark)
    assert "is no address" in remark
    assert len(remark) < 300
    assert remark.isprintable()
    # Clients are led here all the same.
    assert client.ask(105, {"topic": "T"}).json()["brokerDatas"][0]["brokerAddrs"] == {"0": outlet.address}


def test_bytes_that_are_no_answer(behind: Front, stack: ExitStack) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    behind.brokers[NAME] = {0: f"127.0.0.1:{listener.getsockname()[1]}"}
    client = behind.client()
    asked = client.start(310)
    with listener.accept()[0] as peer:
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        answer = client.answer_to(asked)
    assert answer.code == 14
    assert "what it sent is no answer" in str(answer.remark)


def test_figures_of_the_broker_with_ours_and_no_registration(behind: Front) -> None:
    for code in (103, 904):
        assert behind.ask(code, {"brokerName": "x"}).code == 3
    assert not {103, 904} & set(behind.names.codes())
    for version in ("V5_4_0", "indexd"):
        table = behind.ask(28).json()["table"]
        assert (table["brokerVersionDesc"][:6], table["indexdPhase"]) == (version, "running")
        behind.broker.stop()


def test_tls_to_name_server_and_broker(tmp_path: Path, stack: ExitStack) -> None:
    certificate, key = make_certificate(tmp_path)
    context = server_context(certificate, key)
    broker = stack.enter_context(Peer(broker_handlers(), tls=context))
    names = _names(stack, broker.address, tls=context).address
    _, client = _outlet(stack, tmp_path, names, upstream_tls="true", upstream_ca_file=certificate)
    assert client.ask(310, body=b"x").body == b"x"
    _, client = _outlet(stack, tmp_path, names, upstream_tls="true")  # the system's do not vouch for it
    answer = client.ask(310)
    assert (answer.code, "TLS: CERTIFICATE_VERIFY_FAILED" in str(answer.remark)) == (14, True)


# As long as RocketMQ's own clients wait.
_CLIENTS_WAIT = 3.0


def _hung(stack: ExitStack, kind: str) -> str:
    # Nobody takes connections: the kernel makes them all the same, until its queue is full.
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0 if kind == "full" else 100))
    place = listener.getsockname()
    for _ in range(4 if kind == "full" else 0):
        one = stack.enter_context(socket.socket())
        one.setblocking(False)
        one.connect_ex(place)
    return f"127.0.0.1:{place[1]}"


def _timed(client: RemotingClient, code: int, *more: Any) -> tuple[float, Command]:
    began = time.monotonic()
    answer = client.ask(code, *more)
    return time.monotonic() - began, answer


@pytest.mark.parametrize("kind", ["silent", "full"])
@pytest.mark.parametrize("is_broker", [False, True])
def test_a_hung_peer_takes_not_all_of_its_clients_patience(
    tmp_path: Path, stack: ExitStack, is_broker: bool, kind: str
) -> None:
    address = _hung(stack, kind)
    names = _names(stack, address).address if is_broker else address
    _, client = _outlet(stack, tmp_path, names, patience=replace(PATIENCE, short=0.1), upstream_timeout=0.5)
    asked: list[tuple[int, dict[str, object]]] = [(106, {}), (105, {"topic": "T"})]
    if is_broker:
        asked = [(28, {}), (34, {}), (35, {"clientID": "x"}), (300, {"topic": "T"}), (30, {"topic": "T", "queueId": 0})]
    for code, fields in asked:
        seconds, answer = _timed(client, code, fields)
        assert answer.code == (2 if code in (30, 105) else 0)  # there is no index here
        assert seconds < _CLIENTS_WAIT
    if not is_broker:  # what has no other answer: a connection may take its time
        seconds, answer = _timed(client, 310)
        assert (answer.code, 0.4 < seconds < _CLIENTS_WAIT) == (14, True)


def test_a_name_server_that_hangs_for_a_while(tmp_path: Path, stack: ExitStack) -> None:
    behind = Front(stack, tmp_path, upstream_timeout=0.5, patience=replace(PATIENCE, short=0.1))
    wanted, handlers = behind.route().json(), dict(behind.names.handlers)
    behind.names.handlers.update(dict.fromkeys(handlers, lambda _: None))
    assert behind.route().json() == wanted
    behind.names.handlers.update(handlers)
    behind.brokers["broker-b"] = {0: "10.0.0.3:10911"}
    behind.outlet.wait_for(lambda: len(behind.route().json()["brokerDatas"]) == 2)


def test_another_name_server_answers_for_one_that_hangs(tmp_path: Path, stack: ExitStack) -> None:
    both = f"{_hung(stack, 'silent')};{_names(stack, '10.0.0.1:10911').address}"
    _, client = _outlet(stack, tmp_path, both, upstream_timeout=0.5)
    for code, fields in ((105, {"topic": "T"}), (206, {})):  # the first takes its time, but not all of it
        seconds, answer = _timed(client, code, fields)
        assert (answer.code, seconds < _CLIENTS_WAIT) == (0, True)
    assert _timed(client, 105, {"topic": "T"})[1].json()["queueDatas"][0]["perm"] == 6
