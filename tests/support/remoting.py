"""RocketMQ's remoting protocol in tests: a blocking client, the server or whole outlet in a thread, what stands behind.

>>> with Peer(broker_handlers()) as broker, Peer(name_server_handlers({'broker-a': {0: broker.address}})) as names:
...     with Outlet(root, upstream_namesrv=names.address, node_id='broker-a') as outlet, outlet.client() as client:
...         client.ask(310, {'topic': 'TopicTest'}, b'sent').ext_fields

Of a client: ``form``: how headers are written; ``tls``: an ssl.SSLContext; ``credentials``:
(access key, secret key), each request is signed with them as AclClientRPCHook does. A handler of a Peer returns members
of Command for the answer (code 0 unless told), or None: no answer. What has no handler is answered with code 3.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import itertools
import json
import socket
import ssl
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from indexd.serve.remoting import server as remoting_server
from indexd.serve.remoting.access import read_access
from indexd.serve.remoting.command import Form, RemotingCommand, decode_command, encode_command
from indexd.serve.remoting.routes import write_json
from indexd.serve.remoting.server import Limits
from indexd.serve.remoting.upstream import Client, Patience
from support.serving import InThread, client_context, make_certificate, read_all, wait_for

_SECONDS = 10.0


#: Ordinals in MQVersion: JSON bodies are standard from the second one on.
V5_4_0, V4_9_4, V4_9_3 = 493, 401, 399


@dataclass
class Command(RemotingCommand):
    """A request or an answer; where nothing else is said, of a Java client."""

    opaque: int = 0
    language: str = "JAVA"
    version: int = V5_4_0

    def json(self) -> Any:
        """The body as strict JSON."""
        return json.loads(self.body)


def read_command(stream: Any) -> Command:
    """The next one of a file-like; EOFError at the end."""
    start = stream.read(4)
    size = int.from_bytes(start, "big")
    frame = stream.read(size)
    if len(start) < 4 or len(frame) < size:
        raise EOFError
    found = decode_command(frame)
    return Command(**{one.name: getattr(found, one.name) for one in fields(found)})


def signed(ext_fields: Mapping[str, str], body: bytes, credentials: tuple[str, str]) -> dict[str, str]:
    """The fields with AccessKey and Signature: HmacSHA1 over the values in the order of their names, then the body."""
    access_key, secret_key = credentials
    texts = dict(ext_fields) | {"AccessKey": access_key}
    content = "".join(texts[name] for name in sorted(texts)).encode() + body
    mac = hmac.new(secret_key.encode(), content, hashlib.sha1)
    return texts | {"Signature": base64.b64encode(mac.digest()).decode()}


class RemotingClient:
    """One connection; not for several threads. Every wait ends after ``timeout`` seconds with TimeoutError."""

    def __init__(
        self,
        address: str,
        *,
        form: Form = Form.JSON,
        tls: ssl.SSLContext | None = None,
        credentials: tuple[str, str] | None = None,
        timeout: float = _SECONDS,
        version: int = V5_4_0,
        language: str = "JAVA",
    ) -> None:
        host, _, port = address.rpartition(":")
        self.form, self.version, self.language = form, version, language
        self._credentials = credentials
        self._opaque = itertools.count(1)
        self.socket: socket.socket = socket.create_connection((host.strip("[]"), int(port)), timeout)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname=host.strip("[]"))
        self._stream = self.socket.makefile("rb")
        #: Requests that came from the other side, in order; ``reply`` answers one.
        self.requests: deque[Command] = deque()
        self._answers: dict[int, Command] = {}

    @property
    def local(self) -> str:
        """Our own address: HOST:PORT."""
        return remoting_server.address_of(*self.socket.getsockname()[:2])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close it."""
        self._stream.close()
        self.socket.close()

    def ask(self, code: int, ext_fields: Mapping[str, object] | None = None, body: bytes = b"", **more: Any) -> Command:
        """Send a request and wait for its answer; ``more`` are members of Command."""
        return self.answer_to(self.start(code, ext_fields, body, **more))

    def start(
        self, code: int, ext_fields: Mapping[str, object] | None = None, body: bytes = b"", **more: Any
    ) -> Command:
        """Send a request and wait for nothing; for ``answer_to``."""
        texts = {name: str(value) for name, value in (ext_fields or {}).items()}
        if self._credentials is not None:
            texts = signed(texts, body, self._credentials)
        command = Command(
            code, next(self._opaque), 0, self.language, self.version, ext_fields=texts, body=body, form=self.form
        )
        command = replace(command, **more)
        self.socket.sendall(encode_command(command))
        return command

    def tell(self, code: int, ext_fields: Mapping[str, object] | None = None, body: bytes = b"") -> Command:
        """Send a one-way request."""
        return self.start(code, ext_fields, body, flag=2)

    def answer_to(self, request: Command) -> Command:
        """Wait for the answer with this request's opaque; others are kept, requests go to ``requests``."""
        while request.opaque not in self._answers:
            self._take(self.receive())
        return self._answers.pop(request.opaque)

    def next_request(self) -> Command:
        """Wait for a request from the other side."""
        while not self.requests:
            self._take(self.receive())
        return self.requests.popleft()

    def reply(self, request: Command, code: int = 0, ext_fields: Mapping[str, str] | None = None, **more: Any) -> None:
        """Answer a request from the other side."""
        answer = Command(code, request.opaque, 1, ext_fields=dict(ext_fields or {}), form=request.form, **more)
        self.socket.sendall(encode_command(answer))

    def receive(self) -> Command:
        """The next command, whatever it is; EOFError when the other side has closed."""
        try:
            return read_command(self._stream)
        except ConnectionError as error:
            raise EOFError from error

    def _take(self, command: Command) -> None:
        if command.is_response:
            self._answers[command.opaque] = command
        else:
            self.requests.append(command)


#: Looks are many.
LIMITS = Limits(look_seconds=0.02)


#: Requests of the stand-in: ext fields and body back; never an answer; an exception; an answer of ``size`` bytes; an
#: answer after ``seconds``; both addresses.
ECHO, HANG, FAIL, SIZE, SLEEP, WHO = 9000, 9001, 9002, 9003, 9004, 9006


class Obedient:
    """The processor. ``begun`` and ``ended`` count requests by code; ``cancelled`` those broken off."""

    forwarder = key_queries = None

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()
        self.cancelled: Counter[int] = Counter()
        self.clients: list[Client] = []
        self.gone: list[str] = []

    async def process(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        """As the code says."""
        if client not in self.clients:
            self.clients.append(client)
            client.gone.add_done_callback(lambda _: self.gone.append(client.peer))
        self.begun[command.code] += 1
        try:
            answer = await self._answer(client, command)
        except asyncio.CancelledError:
            self.cancelled[command.code] += 1
            raise
        self.ended[command.code] += 1
        return answer

    async def _answer(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        if command.code == HANG:
            await asyncio.Event().wait()
        if command.code == FAIL:
            raise ZeroDivisionError("a defect")
        if command.code == SIZE:
            return command.answer(0, body=bytes(int(command.ext_fields["size"])))
        if command.code == SLEEP:
            await asyncio.sleep(float(command.ext_fields["seconds"]))
        if command.code == WHO:
            return command.answer(0, f"{client.peer} {client.local}")
        return command.answer(0, ext_fields=command.ext_fields, body=command.body)


class RemotingServing(InThread):
    """A server for a ``with`` block; ``settings`` are keys of the configuration."""

    def __init__(self, place: Path, limits: Limits = LIMITS, *, is_tls: bool = False, **settings: object) -> None:
        self._tls: ssl.SSLContext | None = None
        if is_tls:
            cert, key = make_certificate(place)
            settings |= {"remoting_tls_cert": cert, "remoting_tls_key": key}
            self._tls = client_context(cert)
        super().__init__("remoting", data=place / "data", store=place / "store", **settings)
        self.processor: Any = Obedient()
        self.limits = limits

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return remoting_server.address_of(*self.place)

    def __enter__(self) -> Self:
        self.start()
        self.wait_for(lambda: "remoting" in self.board.outlets)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        self._listening.close()
        if kind is None:
            assert not self.failures
            assert self.row()["connections"] == 0

    def row(self) -> Any:
        """What the board shows of it, up to a second old."""
        return self.board.row()["remoting"]

    def client(self, **options: Any) -> RemotingClient:
        """A client that speaks as the server does, to be closed by the caller."""
        return RemotingClient(self.address, **{"tls": self._tls} | options)

    def turns_away(self) -> bool:
        """Whether a new connection is closed at once; TimeoutError when nothing happens."""
        try:
            with self.connect() as peer:
                return is_closed(peer)
        except ConnectionError:
            return True

    wait_for = staticmethod(wait_for)

    async def serve(self, stop: asyncio.Event) -> None:
        access = read_access(self.config)
        log = remoting_server.RateLimitedLog(self.log)
        given = self.config, self.board, log, self._listening, self.processor, access, self.limits
        await remoting_server.RemotingServer(*given).run(stop, lambda: None)


def is_closed(peer: socket.socket) -> bool:
    """Read what there is until the other side closes, orderly or not; TimeoutError when it does not."""
    read_all(peer)
    return True


Handler = Callable[[Command], Mapping[str, Any] | None]


_PEER_SECONDS = 10.0


def _refuse(_: Command) -> Mapping[str, Any]:
    return {"code": 3, "remark": "no handler"}


class Peer:
    """For a ``with`` block. ``requests``: what came, in order, with the number of the connection it came on."""

    def __init__(
        self, handlers: Mapping[int, Handler] | None = None, *, port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        self.handlers = dict(handlers or {})
        self.requests: list[tuple[int, Command]] = []
        #: What clients answered to ``ask_client``.
        self.responses: list[Command] = []
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        if tls is not None:
            self._listener = tls.wrap_socket(self._listener, server_side=True)
        self._open: dict[int, socket.socket] = {}
        self._opaque = itertools.count(1_000_000)
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """As a process that ends."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.hang_up()

    def hang_up(self) -> None:
        """Close every connection."""
        for connection in list(self._open.values()):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def open_connections(self) -> list[int]:
        """The numbers of those that are open."""
        return sorted(self._open)

    def codes(self) -> list[int]:
        """The codes of the requests that came."""
        return [command.code for _, command in self.requests]

    def wait(self, condition: Callable[[Peer], object]) -> None:
        """Until ``condition`` holds: it is asked after each event; an assertion ends the wait after ten seconds."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), _PEER_SECONDS), self.codes()[-100:]

    def ask_client(self, connection: int, code: int, *, is_oneway: bool = False, **more: Any) -> Command:
        """Send a request to who holds that connection."""
        command = Command(code, next(self._opaque), 2 if is_oneway else 0, **more)
        self._open[connection].sendall(encode_command(command))
        return command

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection, self.connections), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with suppress(OSError, EOFError), connection:
            self._note(partial(self._open.__setitem__, number, connection))
            try:
                with connection.makefile("rb") as stream:
                    while True:
                        self._take(connection, number, read_command(stream))
            finally:
                self._note(lambda: self._open.pop(number))

    def _take(self, connection: socket.socket, number: int, command: Command) -> None:
        if command.is_response:
            self._note(lambda: self.responses.append(command))
            return
        self._note(lambda: self.requests.append((number, command)))
        handler = self.handlers.get(command.code, _refuse)
        members = handler(command)
        if members is not None and not command.is_oneway:
            answer = Command(**{"code": 0, "opaque": command.opaque, "flag": 1, "form": command.form, **members})
            connection.sendall(encode_command(answer))

    def _note(self, change: Callable[[], object]) -> None:
        with self._changed:
            change()
            self._changed.notify_all()


#: brokerName -> broker id -> address.
Brokers = dict[str, dict[int, str]]


CLUSTER = "C"


NAME = "broker-a"


#: Nobody is left alone for long.
PATIENCE = Patience(fresh=0.05)


class Outlet(RemotingServing):
    """Over ``root/data`` and ``root/store``; ``row`` is what a running daemon adds to its board."""

    def __init__(
        self, root: Path, *, row: Mapping[str, Any] | None = None, patience: Patience = PATIENCE, **settings: Any
    ) -> None:
        super().__init__(root, **settings)
        self.patience = patience
        self.board.running(lambda: dict(row or {}))

    async def serve(self, stop: asyncio.Event) -> None:
        given = self.config, self.board, self.log, self._listening, stop, self.limits, self.patience
        await remoting_server.serve_remoting(*given)

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


def name_server_handlers(brokers: Brokers, topics: Mapping[str, Brokers] | None = None) -> dict[int, Handler]:
    """A name server that knows ``brokers``; both may be changed later. Without ``topics`` every topic is on all."""

    def route(request: Command) -> dict[str, Any]:
        found = brokers if topics is None else topics.get(request.ext_fields["topic"], {})
        return (
            {"body": write_json(route_data(found), is_standard=False)}
            if found
            else {"code": 17, "remark": "no route in name server"}
        )

    def cluster(_: Command) -> dict[str, Any]:
        table = {name: broker_data(name, addresses) for name, addresses in brokers.items()}
        found = {"brokerAddrTable": table, "clusterAddrTable": {CLUSTER: sorted(brokers)}}
        return {"body": write_json(found, is_standard=False)}

    return {105: route, 106: cluster, 206: lambda _: {"body": b'{"topicList":["TopicTest"]}'}}


def broker_handlers() -> dict[int, Handler]:
    """A broker that says yes to all that clients do."""

    def echo(request: Command) -> dict[str, Any]:
        return {"ext_fields": dict(request.ext_fields) | {"msgId": "broker"}, "body": request.body}

    codes = (10, 11, 15, 29, 30, 31, 32, 34, 35, 37, 38, 41, 300, 310, 361, 200050)
    table = {"table": {"brokerVersionDesc": "V5_4_0", "putTps": "1.0 1.0 1.0"}}
    return dict.fromkeys(codes, echo) | {28: lambda _: {"body": json.dumps(table).encode()}}


class Front:
    """The outlet, one client of it (``ask``), and behind both a broker and a name server.

    The name server knows ``brokers`` and a topic on them; where none are given, the broker as NAME, and every topic.
    """

    def __init__(self, stack: ExitStack, root: Path, brokers: Brokers | None = None, **settings: object) -> None:
        self._stack = stack
        self.broker = stack.enter_context(Peer(broker_handlers()))
        self.brokers = {NAME: {0: self.broker.address}} if brokers is None else brokers
        self.topics: Any = None if brokers is None else {"TopicTest": dict(brokers)}
        self.names = stack.enter_context(Peer(name_server_handlers(self.brokers, self.topics)))
        given: dict[str, Any] = {"upstream_namesrv": self.names.address, "node_id": NAME} | settings
        self.outlet = stack.enter_context(Outlet(root, **given))
        self.ask = self.client().ask

    def client(self, **options: Any) -> RemotingClient:
        """One that the stack closes."""
        return self._stack.enter_context(self.outlet.client(**options))

    def route(self, topic: str = "TopicTest") -> Command:
        return self.ask(105, {"topic": topic})

    def addresses(self, topic: str = "TopicTest") -> dict[str, dict[str, str]]:
        answer = self.route(topic)
        assert answer.code == 0, answer
        return {broker["brokerName"]: broker["brokerAddrs"] for broker in answer.json()["brokerDatas"]}
