"""Serving: the HTTP server in a thread of a test, over a data directory that nothing else works on.

>>> with Serving(data, store, http_connections_max=8) as server:
...     server.get("/api/v1/coverage").json()["coverage"]["complete"]
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

import httpx
import uvloop

from indexd.config import load
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.http.server import serve_http
from indexd.serve.server import listen

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_SECONDS = 30.0


class Log:
    """What was logged, as (level, event, fields)."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, Mapping[str, Any]]] = []

    def __getattr__(self, level: str) -> Any:
        return lambda event, **fields: self.lines.append((level, event, fields))

    def errors(self) -> list[tuple[str, str, Mapping[str, Any]]]:
        """The lines that say that something is wrong."""
        return [line for line in self.lines if line[0] in ("warning", "error", "exception", "critical")]


class Serving:
    """A server for a ``with`` block; ``settings`` are keys of the configuration. ``row``: what the board shows.

    At the end the log must hold no error, and the thread must have ended.
    """

    def __init__(self, data: Path, store: Path, *, row: Mapping[str, Any] | None = None, **settings: object) -> None:
        given = {"data": str(data), "store": str(store), "http": "127.0.0.1:0"}
        self.config = load(given | {key: str(value) for key, value in settings.items()}, None, {})
        self.board = DaemonStatus(self.config)
        self.row = dict(row or {})
        self.board.running(lambda: self.row)
        self.log = Log()
        self.failures: list[BaseException] = []
        self._listening = listen(self.config.http.http)
        self.port: int = self._listening.getsockname()[1]
        self._is_tls = self.config.http.http_tls_cert is not None
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="serving")
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{'https' if self._is_tls else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(_SECONDS)
        self.client = self._stack.enter_context(httpx.Client(base_url=self.url, timeout=_SECONDS, trust_env=False))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        self.stop()
        self._thread.join(_SECONDS)
        self._listening.close()
        assert not self._thread.is_alive()
        if kind is None:
            assert not self.failures
            assert not self.log.errors()

    def stop(self) -> None:
        """As a daemon that ends."""
        assert self._loop is not None
        assert self._stop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def has_ended(self) -> bool:
        """Whether its thread is over."""
        return not self._thread.is_alive()

    def get(self, path: str, **options: Any) -> httpx.Response:
        """One request, on a connection that is kept."""
        return self.client.get(path, **options)

    def connect(self, timeout: float = _SECONDS) -> socket.socket:
        """A bare connection, to be closed by the caller."""
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def _run(self) -> None:
        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._is_up.set()
            await serve_http(self.config, self.board, self.log, self._listening, self._stop)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as error:  # noqa: BLE001 - the test is told at the end
            self.failures.append(error)


def answer_of(peer: socket.socket, words: bytes) -> tuple[int, bytes]:
    """Send bytes, and read to the end of the connection: the status of the first answer (0 without), and everything."""
    peer.sendall(words)
    return read_all(peer)


def read_all(peer: socket.socket) -> tuple[int, bytes]:
    """Read to the end of the connection, be it an orderly one or not."""
    data = b""
    try:
        while chunk := peer.recv(65_536):
            data += chunk
    except ConnectionError:
        pass
    return int(data[9:12]) if data.startswith(b"HTTP/1.1 ") else 0, data


def numbers_of(value: Any) -> list[int]:
    """Every whole number of a JSON value."""
    if isinstance(value, bool) or value is None:
        return []
    if isinstance(value, int):
        return [value]
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers_of(item)]
    return [number for item in value for number in numbers_of(item)] if isinstance(value, list) else []
