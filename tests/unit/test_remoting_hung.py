"""Name servers and brokers that hang, and clients that wait for a broker to come back."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from indexd.serve.remoting.forward import CircuitBreaker, UpstreamError
from support.remoting_outlet import NAME, PATIENCE, Behind, Outlet, name_server_handlers
from support.remoting_peer import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.remoting import Command, RemotingClient

# As long as RocketMQ's own clients wait.
_CLIENTS_WAIT = 3.0
_HEARTBEAT = json.dumps({"clientID": "client-1", "producerDataSet": [{"groupName": "g"}]}).encode()
#: What the index answers where the broker does not, with what is enough for it.
_INSTEAD: dict[int, dict[str, object]] = {28: {}, 34: {}, 35: {"clientID": "x"}, 300: {"topic": "T"}}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


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


async def test_a_circuit_breaker() -> None:
    asked = 0

    async def fail() -> str:
        nonlocal asked
        asked += 1
        raise UpstreamError("nobody")

    async def succeed() -> str:
        return "answer"

    breaker = CircuitBreaker(replace(PATIENCE, refused=0.1))
    for _ in range(3):
        with pytest.raises(UpstreamError, match="nobody"):
            await breaker.ask(fail)
    assert asked == 1
    await asyncio.sleep(0.1)
    assert await breaker.ask(succeed) == "answer"
    assert asked == 1
