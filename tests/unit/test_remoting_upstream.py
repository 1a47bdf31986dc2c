"""Name servers and brokers that are gone, started anew, strange, or this daemon itself; and TLS to them."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support.remoting_outlet import NAME, Behind, Brokers, Outlet, broker_handlers, name_server_handlers
from support.remoting_peer import Peer
from support.tls import make_certificate, server_context

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


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
