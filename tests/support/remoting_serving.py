"""RemotingServing: the remoting server in a thread of a test, with a processor that does what its requests say.

>>> with RemotingServing(tmp_path) as server, server.client() as client:
...     client.ask(ECHO, {"a": "b"}, b"body")
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Self

import uvloop

from indexd.config import load
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.remoting import server as remoting_server
from indexd.serve.remoting.access import read_access
from indexd.serve.remoting.command import RemotingCommand
from indexd.serve.remoting.limits import Limits
from indexd.serve.server import listen
from support.remoting import RemotingClient
from support.serving import Log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from indexd.serve.remoting.upstream import Client

_SECONDS = 30.0
#: Looks are many.
LIMITS = Limits(look_seconds=0.02, accept_pause=0.2)
#: Requests of the stand-in: ext fields and body back; never an answer; an exception; an answer of ``size`` bytes; an
#: answer after ``seconds``; a request to the client before the answer; both addresses.
ECHO, HANG, FAIL, SIZE, SLEEP, CALL_BACK, WHO = 9000, 9001, 9002, 9003, 9004, 9005, 9006


class Obedient:
    """The processor. ``begun`` and ``ended`` count requests by code; ``cancelled`` those broken off."""

    def __init__(self) -> None:
        self.begun: Counter[int] = Counter()
        self.ended: Counter[int] = Counter()
        self.cancelled: Counter[int] = Counter()
        self.responses: list[RemotingCommand] = []
        self.clients: list[Client] = []
        self.gone: list[str] = []

    async def process(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        """As the code says."""
        if command.is_response:
            self.responses.append(command)
            return None
        if client not in self.clients:
            self.clients.append(client)
            client.on_close(lambda: self.gone.append(client.peer))
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
        if command.code == CALL_BACK:
            client.send(RemotingCommand(40, 77, 0, ext_fields={"consumerGroup": "g"}, form=command.form))
        if command.code == WHO:
            return command.answer(0, f"{client.peer} {client.local}")
        return command.answer(0, ext_fields=command.ext_fields, body=command.body)

    def answer_compiled(self, data: bytes, frame_max: int) -> None:
        return None

    def row(self) -> None:
        return None

    async def close(self) -> None:
        """Nothing to let go of."""


class RemotingServing:
    """A server for a ``with`` block; ``settings`` are keys of the configuration."""

    def __init__(self, place: Path, processor: Any = None, limits: Limits = LIMITS, **settings: object) -> None:
        given = {"data": str(place / "data"), "store": str(place / "store"), "remoting": "127.0.0.1:0"}
        self.config = load(given | {key: str(value) for key, value in settings.items()}, None, {})
        self.board, self.log = DaemonStatus(self.config), Log()
        self.processor: Any = processor or Obedient()
        self.limits = limits
        self.failures: list[BaseException] = []
        self._listening = listen(self.config.remoting.remoting, "remoting")
        self._access = read_access(self.config)
        host, port = self._listening.getsockname()[:2]
        self.place: tuple[str, int] = (host, port)
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="remoting")

    @property
    def address(self) -> str:
        """HOST:PORT."""
        host, port = self.place
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(_SECONDS)
        self.wait_for(lambda: "remoting" in self.board.outlets)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.stop()
        self._listening.close()
        if kind is None:
            assert not self.failures
            assert self.row()["connections"] == 0

    def stop(self) -> float:
        """As a daemon that ends; seconds that it took."""
        assert self._loop is not None
        assert self._stop is not None
        began = time.monotonic()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive()
        return time.monotonic() - began

    def row(self) -> Any:
        """What the board shows of it, up to a second old."""
        return self.board.row()["remoting"]

    def client(self, **options: Any) -> RemotingClient:
        """A client, to be closed by the caller."""
        return RemotingClient(self.address, **options)

    def connect(self, timeout: float = _SECONDS) -> socket.socket:
        """A bare connection, to be closed by the caller."""
        return socket.create_connection(self.place, timeout)

    def turns_away(self) -> bool:
        """Whether a new connection is closed at once; TimeoutError when nothing happens."""
        try:
            with self.connect() as peer:
                return is_closed(peer)
        except ConnectionError:
            return True

    def wait_for(self, holds: Callable[[], object]) -> None:
        """Until it holds."""
        deadline = time.monotonic() + _SECONDS
        while not holds():
            assert time.monotonic() < deadline, self.board.outlets
            time.sleep(0.01)

    def _run(self) -> None:
        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            server = remoting_server.RemotingServer(
                self.config, self.board, self.log, self._listening, self.processor, self._access, self.limits
            )
            self._is_up.set()
            await server.run(self._stop, lambda: None)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as error:  # noqa: BLE001 - the test is told at the end
            self.failures.append(error)


def is_closed(peer: socket.socket) -> bool:
    """Read what there is until the other side closes, orderly or not; TimeoutError when it does not."""
    try:
        while peer.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True
