"""Outlet: the whole remoting outlet in a thread of a test; and name servers and brokers that stand behind it.

>>> with Peer(broker_handlers()) as broker, Peer(name_server_handlers({"broker-a": {0: broker.address}})) as names:
...     with Outlet(root, upstream_namesrv=names.address, node_id="broker-a") as outlet, outlet.client() as client:
...         client.ask(310, {"topic": "TopicTest"}, b"sent")
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import uvloop

from indexd.serve.remoting import server as remoting_server
from indexd.serve.remoting.upstream import Patience
from support.remoting_peer import Peer
from support.remoting_serving import RemotingServing

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack
    from pathlib import Path

    from support.remoting import Command, RemotingClient
    from support.remoting_peer import Handler

#: brokerName -> broker id -> address.
Brokers = dict[str, dict[int, str]]
CLUSTER = "C"
NAME = "broker-a"
#: Nobody is left alone for long.
PATIENCE = Patience(retry=0.02, fresh=0.05, missing=0.02)


class Outlet(RemotingServing):
    """Over ``root/data`` and ``root/store``; ``row`` is what a running daemon adds to its board."""

    def __init__(
        self, root: Path, *, row: Mapping[str, Any] | None = None, patience: Patience = PATIENCE, **settings: Any
    ) -> None:
        super().__init__(root, **settings)
        self.patience = patience
        self.board.running(lambda: dict(row or {}))

    def _run(self) -> None:
        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._is_up.set()
            given = self.config, self.board, self.log, self._listening, self._stop, self.limits, self.patience
            await remoting_server.serve_remoting(*given)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as error:  # noqa: BLE001 - the test is told at the end
            self.failures.append(error)

    def events(self) -> list[str]:
        """The names of what was logged."""
        return [event for _, event, _ in self.log.lines]


def broker_data(name: str, addresses: Mapping[int, str]) -> dict[str, Any]:
    """A BrokerData."""
    table = {str(number): address for number, address in addresses.items()}
    return {"brokerName": name, "cluster": CLUSTER, "brokerAddrs": table, "enableActingMaster": False}


def route_data(brokers: Brokers) -> dict[str, Any]:
    """A TopicRouteData of four queues on each broker."""
    queues = [
        {"brokerName": name, "perm": 6, "readQueueNums": 4, "writeQueueNums": 4, "topicSysFlag": 0} for name in brokers
    ]
    return {
        "brokerDatas": [broker_data(name, addresses) for name, addresses in brokers.items()],
        "queueDatas": queues,
        "filterServerTable": {},
    }


def fastjson(value: object) -> bytes:
    """As a name server writes it for clients before 4.9.4: keys 0 to 9 without quotes."""
    text = json.dumps(value, ensure_ascii=False)
    for number in range(10):
        text = text.replace(f'"{number}":', f"{number}:")
    return text.encode()


def name_server_handlers(brokers: Brokers, topics: Mapping[str, Brokers] | None = None) -> dict[int, Handler]:
    """A name server that knows ``brokers``; both may be changed later. Without ``topics`` every topic is on all."""

    def route(request: Command) -> dict[str, Any]:
        found = brokers if topics is None else topics.get(request.ext_fields["topic"], {})
        return {"body": fastjson(route_data(found))} if found else {"code": 17, "remark": "no route in name server"}

    def cluster(_: Command) -> dict[str, Any]:
        table = {name: broker_data(name, addresses) for name, addresses in brokers.items()}
        return {"body": fastjson({"brokerAddrTable": table, "clusterAddrTable": {CLUSTER: sorted(brokers)}})}

    return {105: route, 106: cluster, 206: lambda _: {"body": b'{"topicList":["TopicTest"]}'}}


def broker_handlers() -> dict[int, Handler]:
    """A broker that says yes to all that clients do."""

    def echo(request: Command) -> dict[str, Any]:
        return {"ext_fields": dict(request.ext_fields) | {"msgId": "broker"}, "body": request.body}

    codes = (10, 11, 15, 29, 30, 31, 32, 34, 35, 37, 38, 41, 300, 310, 361, 200050)
    table = {"table": {"brokerVersionDesc": "V5_4_0", "putTps": "1.0 1.0 1.0"}}
    return dict.fromkeys(codes, echo) | {28: lambda _: {"body": json.dumps(table).encode()}}


class Behind:
    """A broker called ``NAME``, a name server that knows it (``brokers``), and the outlet in front; all in a stack."""

    def __init__(self, stack: ExitStack, root: Path, **settings: object) -> None:
        self.broker = stack.enter_context(Peer(broker_handlers()))
        self.brokers: Brokers = {NAME: {0: self.broker.address}}
        self.names = stack.enter_context(Peer(name_server_handlers(self.brokers)))
        given: dict[str, Any] = {"upstream_namesrv": self.names.address, "node_id": NAME} | settings
        self.outlet = stack.enter_context(Outlet(root, **given))
        self._stack = stack

    def client(self, **options: Any) -> RemotingClient:
        """One that the stack closes."""
        return self._stack.enter_context(self.outlet.client(**options))

    def heartbeats(self) -> list[tuple[int, Command]]:
        """Those that the broker got, each with the number of its connection."""
        return [(number, command) for number, command in self.broker.requests if command.code == 34]
