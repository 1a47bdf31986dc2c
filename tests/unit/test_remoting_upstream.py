"""Name servers and brokers that are gone, hang, are started anew, strange, or this daemon itself; and TLS to them."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from support.remoting_outlet import NAME, PATIENCE, Behind, Brokers, Outlet, broker_handlers, name_server_handlers
from support.remoting_peer import Peer
from support.tls import make_certificate, server_context

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.remoting import Command, RemotingClient

_HEARTBEAT = json.dumps({"clientID": "client-1", "producerDataSet": [{"groupName": "g"}]}).encode()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def behind(tmp_path: Path, stack: ExitStack) -> Behind:
    return Behind(stack, tmp_path)


def test_no_broker_and_no_name_server(tmp_path: Path, stack: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    outlet = stack.enter_context(Outlet(tmp_path, upstream_namesrv=address, node_id=NAME))
    client = stack.enter_context(outlet.client())
    answer = client.ask(310)
    assert answer.code == 14
    assert f"the name server at {address} does not answer: Connection refused" in str(answer.remark)
    answer = client.ask(206)
    assert (answer.code, str(answer.remark).startswith(f"the name server at {address}")) == (14, True)
    assert client.ask(34, body=_HEARTBEAT).code == 0
    assert client.ask(35, {"clientID": "client-1"}).code == 0
    assert client.ask(300, {"topic": "T"}).json() == {"groupList": []}
    client.tell(37)
    outlet.wait_for(lambda: "upstream_dropped" in outlet.events())
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as slow:  # it accepts, and is silent
        slow.listen()
        began = time.monotonic()
        assert client.ask(105, {"topic": "T"}).code in (2, 17)
        assert time.monotonic() - began < 8


def test_a_broker_address_needs_no_name_server(tmp_path: Path, stack: ExitStack) -> None:
    broker = stack.enter_context(Peer(broker_handlers()))
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        names = f"127.0.0.1:{nobody.getsockname()[1]}"
    outlet = stack.enter_context(Outlet(tmp_path, upstream_namesrv=names, broker_address=broker.address))
    client = stack.enter_context(outlet.client())
    assert client.ask(310, body=b"x").body == b"x"


def test_name_servers_are_asked_in_turn(tmp_path: Path, stack: ExitStack) -> None:
    broker = stack.enter_context(Peer(broker_handlers()))
    first, second = (stack.enter_context(Peer(name_server_handlers({NAME: {0: broker.address}}))) for _ in range(2))
    both = f"{first.address};{second.address}"
    outlet = stack.enter_context(Outlet(tmp_path, upstream_namesrv=both, node_id=NAME))
    client = stack.enter_context(outlet.client())
    assert client.ask(206).code == 0
    assert not second.requests
    first.stop()
    assert client.ask(206).code == 0
    assert second.requests
    # One that was started anew at the same place is asked by a new connection, without a failure.
    second.hang_up()
    second.wait(lambda peer: not peer.open_connections())
    assert client.ask(206).code == 0


def test_the_broker_of_our_name_among_others(tmp_path: Path, stack: ExitStack) -> None:
    ours, other = (stack.enter_context(Peer(broker_handlers())) for _ in range(2))
    brokers = {"broker-b": {0: other.address}, NAME: {0: ours.address, 1: "127.0.0.1:1"}}
    names = stack.enter_context(Peer(name_server_handlers(brokers)))
    for settings in ({"node_id": NAME}, {"node_id": "another", "broker_address": ours.address}):
        with Outlet(tmp_path, upstream_namesrv=names.address, **settings) as outlet, outlet.client() as client:
            assert client.ask(310).code == 0
    with Outlet(tmp_path, upstream_namesrv=names.address) as outlet, outlet.client() as client:
        answer = client.ask(310)
        assert answer.code == 14
        assert "the name server knows these brokers: broker-a, broker-b; ours is" in str(answer.remark)
        assert "upstream_unknown" in outlet.events()
    assert ours.codes() == [310, 310]
    assert not other.requests


def test_one_alone_is_ours_and_stays_it(tmp_path: Path, stack: ExitStack) -> None:
    ours, other = (stack.enter_context(Peer(broker_handlers())) for _ in range(2))
    brokers: Brokers = {"some-name": {0: ours.address}}
    names = stack.enter_context(Peer(name_server_handlers(brokers)))
    outlet = stack.enter_context(Outlet(tmp_path, upstream_namesrv=names.address))
    client = stack.enter_context(outlet.client())
    assert client.ask(310).code == 0
    del brokers["some-name"]
    brokers["another"] = {0: other.address}
    ours.stop()
    assert client.ask(310).code == 14
    assert not other.requests


def test_upstream_that_leads_back_here(tmp_path: Path, stack: ExitStack) -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        address = f"localhost:{own.getsockname()[1]}"
    outlet = stack.enter_context(
        Outlet(tmp_path, remoting=address.replace("localhost", "127.0.0.1"), upstream_namesrv=address, node_id=NAME)
    )
    client = stack.enter_context(outlet.client())
    answer = client.ask(206)
    assert answer.code == 14
    assert str(answer.remark) == "upstream_namesrv of this indexd leads back to it"
    assert client.ask(310).code == 14
    hints = [fields["hint"] for _, event, fields in outlet.log.lines if event == "upstream_circle"]
    assert str(hints[0]).startswith("upstream_namesrv or the broker's address leads back here")


def test_a_broker_that_is_this_daemon_is_as_good_as_none(tmp_path: Path, stack: ExitStack) -> None:
    # The daemon was started at the address of a broker that is gone, and that the name server still knows.
    with socket.create_server(("127.0.0.1", 0)) as own:
        address = f"127.0.0.1:{own.getsockname()[1]}"
    names = stack.enter_context(Peer(name_server_handlers({NAME: {0: address}})))
    outlet = stack.enter_context(Outlet(tmp_path, remoting=address, upstream_namesrv=names.address, node_id=NAME))
    client = stack.enter_context(outlet.client())
    answer = client.ask(310)
    assert answer.code == 14
    assert client.ask(300, {"topic": "T"}).json() == {"groupList": []}
    assert client.ask(28).json()["table"]["brokerVersionDesc"].startswith("indexd")
    assert "upstream_circle" in outlet.events()


@pytest.mark.parametrize("address", ["", "nowhere", "10.0.0.1:99999", "10.0.0.1:0", "a\0b\n:1", "x" * 5000 + ":1"])
def test_an_address_that_is_none(tmp_path: Path, stack: ExitStack, address: str) -> None:
    names = stack.enter_context(Peer(name_server_handlers({NAME: {0: address}})))
    outlet = stack.enter_context(Outlet(tmp_path, upstream_namesrv=names.address, node_id=NAME))
    client = stack.enter_context(outlet.client())
    remark = str(client.ask(310).remark)
    assert "is no address" in remark
    assert len(remark) < 300
    assert remark.isprintable()
    # Clients are led here all the same.
    assert client.ask(105, {"topic": "T"}).json()["brokerDatas"][0]["brokerAddrs"] == {"0": outlet.address}


@pytest.mark.parametrize("form", ["json", "rocketmq"])
def test_two_daemons_that_stand_behind_each_other(tmp_path: Path, stack: ExitStack, form: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        address = f"127.0.0.1:{own.getsockname()[1]}"
    other = stack.enter_context(Outlet(tmp_path, upstream_namesrv=address, node_id=NAME))
    outlet = stack.enter_context(Outlet(tmp_path, remoting=address, upstream_namesrv=other.address, node_id=NAME))
    client = stack.enter_context(outlet.client(form=form))
    answer = client.ask(206)
    assert (answer.code, answer.remark, answer.form) == (
        14, "upstream_namesrv of this indexd leads back to it", form
    )  # fmt: skip
    assert "upstream_circle" in outlet.events()


def test_bytes_that_are_no_answer(behind: Behind, stack: ExitStack, tmp_path: Path) -> None:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

    def babble() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(1)
                peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=babble, daemon=True).start()
    behind.brokers[NAME] = {0: f"127.0.0.1:{listener.getsockname()[1]}"}
    client = behind.client()
    answer = client.ask(310)
    assert answer.code == 14
    assert "what it sent is no answer" in str(answer.remark)
    behind.brokers[NAME] = {0: "no address"}
    second = stack.enter_context(Outlet(tmp_path, upstream_namesrv=behind.names.address, node_id=NAME))
    assert stack.enter_context(second.client()).ask(310).code == 14


def test_a_broker_does_not_register_through_us(behind: Behind) -> None:
    client = behind.client()
    for code in (103, 904):
        assert client.ask(code, {"brokerName": "x"}).code == 3
    assert not {103, 904} & set(behind.names.codes())


def test_figures_of_the_broker_with_ours(behind: Behind) -> None:
    client = behind.client()
    table = client.ask(28).json()["table"]
    assert table["brokerVersionDesc"] == "V5_4_0"
    assert table["indexdPhase"] == "running"
    behind.broker.stop()
    table = client.ask(28).json()["table"]
    assert table["brokerVersionDesc"].startswith("indexd")
    assert table["indexdPhase"] == "running"


def test_tls_to_name_server_and_broker(tmp_path: Path, stack: ExitStack) -> None:
    certificate, key = make_certificate(tmp_path)
    context = server_context(certificate, key)
    broker = stack.enter_context(Peer(broker_handlers(), tls=context))
    names = stack.enter_context(Peer(name_server_handlers({NAME: {0: broker.address}}), tls=context))
    settings: dict[str, object] = {"upstream_namesrv": names.address, "node_id": NAME, "upstream_tls": "true"}
    with Outlet(tmp_path, upstream_ca_file=certificate, **settings) as outlet, outlet.client() as client:
        assert client.ask(310, body=b"x").body == b"x"
        assert client.ask(34, body=_HEARTBEAT).code == 0
    with Outlet(tmp_path, **settings) as outlet, outlet.client() as client:  # the system's do not vouch for it
        answer = client.ask(310)
        assert answer.code == 14
        assert "TLS: CERTIFICATE_VERIFY_FAILED" in str(answer.remark)


# As long as RocketMQ's own clients wait.
_CLIENTS_WAIT = 3.0


#: What the index answers where the broker does not, with what is enough for it.
_INSTEAD: dict[int, dict[str, object]] = {28: {}, 34: {}, 35: {"clientID": "x"}, 300: {"topic": "T"}}


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
def test_a_hung_name_server_takes_no_clients_patience(tmp_path: Path, stack: ExitStack, kind: str) -> None:
    address = _hung(stack, kind)
    outlet = stack.enter_context(Outlet(tmp_path, upstream_namesrv=address, node_id=NAME))
    client = stack.enter_context(outlet.client())
    seconds, answer = _timed(client, 106)
    assert answer.code == 0
    assert seconds < _CLIENTS_WAIT / 2
    began = time.monotonic()
    for _ in range(20):
        assert client.ask(106).code == 0
        assert client.ask(105, {"topic": "T"}).code in (2, 17)  # there is no index here
    assert time.monotonic() - began < 1
    # What has no other answer: a connection may take its time.
    seconds, answer = _timed(client, 310)
    assert answer.code == 14
    assert 1 < seconds < 8


@pytest.mark.parametrize("kind", ["silent", "full"])
def test_a_hung_broker_takes_no_clients_patience(tmp_path: Path, stack: ExitStack, kind: str) -> None:
    address = _hung(stack, kind)
    names = stack.enter_context(Peer(name_server_handlers({NAME: {0: address}})))
    outlet = stack.enter_context(Outlet(tmp_path, upstream_namesrv=names.address, node_id=NAME))
    client = stack.enter_context(outlet.client())
    seconds, answer = _timed(client, 34, {}, _HEARTBEAT)
    assert answer.code == 0
    assert seconds < _CLIENTS_WAIT / 2
    began = time.monotonic()
    for _ in range(5):
        for code, fields in _INSTEAD.items():
            assert client.ask(code, fields, _HEARTBEAT if code == 34 else b"").code == 0
        assert client.ask(30, {"topic": "T", "queueId": 0}).code == 2
    assert time.monotonic() - began < 1


def test_a_name_server_that_hangs_for_a_while(tmp_path: Path, stack: ExitStack) -> None:
    behind = Behind(stack, tmp_path, upstream_timeout=2)
    client = behind.client()
    wanted = client.ask(105, {"topic": "TopicTest"}).json()
    handlers = dict(behind.names.handlers)
    behind.names.handlers.update(dict.fromkeys(handlers, lambda _: None))
    for number in range(10):
        seconds, answer = _timed(client, 105, {"topic": "TopicTest"})
        assert answer.json() == wanted
        assert seconds < (1 if number else 4)
    behind.names.handlers.update(handlers)
    behind.brokers["broker-b"] = {0: "10.0.0.3:10911"}
    behind.outlet.wait_for(lambda: len(client.ask(105, {"topic": "TopicTest"}).json()["brokerDatas"]) == 2)


def test_a_broker_that_hangs_for_a_while(tmp_path: Path, stack: ExitStack) -> None:
    behind = Behind(stack, tmp_path, upstream_timeout=2)
    client = behind.client()
    assert client.ask(34, {}, _HEARTBEAT).ext_fields["msgId"] == "broker"
    handlers = dict(behind.broker.handlers)
    behind.broker.handlers.update(dict.fromkeys(handlers, lambda _: None))
    assert "msgId" not in client.ask(34, {}, _HEARTBEAT).ext_fields
    seconds, answer = _timed(client, 34, {}, _HEARTBEAT)
    assert (answer.code, seconds < 1) == (0, True)
    behind.broker.handlers.update(handlers)
    behind.outlet.wait_for(lambda: client.ask(300, {"topic": "T"}).ext_fields.get("msgId") == "broker")


def test_a_send_that_is_answered_closes_the_breaker(tmp_path: Path, stack: ExitStack) -> None:
    behind = Behind(stack, tmp_path, patience=replace(PATIENCE, refused=60.0), upstream_timeout=0.3)
    client = behind.client()
    handler = behind.broker.handlers.pop(300)
    behind.broker.handlers[300] = lambda _: None
    assert client.ask(300, {"topic": "T"}).json() == {"groupList": []}
    behind.broker.handlers[300] = handler
    assert client.ask(300, {"topic": "T"}).json() == {"groupList": []}
    assert client.ask(310).code == 0
    assert client.ask(300, {"topic": "T"}).ext_fields["msgId"] == "broker"


def test_another_name_server_answers_for_one_that_hangs(tmp_path: Path, stack: ExitStack) -> None:
    second = stack.enter_context(Peer(name_server_handlers({NAME: {0: "10.0.0.1:10911"}})))
    both = f"{_hung(stack, 'silent')};{second.address}"
    outlet = stack.enter_context(Outlet(tmp_path, upstream_namesrv=both, node_id=NAME))
    client = stack.enter_context(outlet.client())
    for limit in (1.3, 0.3):
        seconds, answer = _timed(client, 105, {"topic": "T"})
        assert answer.json()["queueDatas"][0]["perm"] == 6
        assert seconds < limit
    one = stack.enter_context(Outlet(tmp_path, upstream_namesrv=both, node_id=NAME, upstream_timeout=0.5))
    seconds, answer = _timed(stack.enter_context(one.client()), 206)  # that takes its time, but not all of it here
    assert (answer.code, seconds < _CLIENTS_WAIT) == (0, True)
