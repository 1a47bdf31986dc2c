"""Serving: the HTTP server in a thread of a test, over a data directory that nothing else works on.

>>> with Serving(data, store, http_connections_max=8) as server:
...     server.get("/api/v1/coverage").json()["coverage"]["complete"]
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import uvloop

from indexd.config import load
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.http.server import Limits, serve_http
from indexd.serve.server import listen
from support.missing import need

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


class InThread:
    """What serves ``key`` ("http", "remoting") in a thread of its own; ``given`` are settings."""

    def __init__(self, key: str, **given: object) -> None:
        texts = {name: str(value) for name, value in ({key: "127.0.0.1:0"} | given).items()}
        self.config = load(texts, None, {})
        self.board, self.log = DaemonStatus(self.config), Log()
        self.failures: list[BaseException] = []
        self._listening = listen(texts[key], key)
        self.place: tuple[str, int] = self._listening.getsockname()[:2]
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, name=key)

    async def serve(self, stop: asyncio.Event) -> None:
        """Until ``stop``."""
        raise NotImplementedError

    def start(self) -> None:
        """Until it serves."""
        self._thread.start()
        assert self._is_up.wait(_SECONDS)

    def stop_soon(self) -> None:
        """As a daemon that ends."""
        assert self._loop is not None
        assert self._stop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> float:
        """The same; seconds that it took."""
        began = time.monotonic()
        self.stop_soon()
        self._thread.join(_SECONDS)
        assert not self._thread.is_alive()
        return time.monotonic() - began

    def has_ended(self) -> bool:
        """Whether its thread is over."""
        return not self._thread.is_alive()

    def connect(self, timeout: float = _SECONDS) -> socket.socket:
        """A bare connection, to be closed by the caller."""
        return socket.create_connection(self.place, timeout)

    def _run(self) -> None:
        async def serve() -> None:
            self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
            self._is_up.set()
            await self.serve(self._stop)

        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as error:  # noqa: BLE001 - the test is told at the end
            self.failures.append(error)


class Serving(InThread):
    """The HTTP server for a ``with`` block; ``settings`` are keys of the configuration. ``row``: what the board shows.

    At the end the log must hold no error, and the thread must have ended.
    """

    def __init__(
        self,
        data: Path,
        store: Path,
        *,
        row: Mapping[str, Any] | None = None,
        limits: Limits = Limits(),  # noqa: B008 - it cannot be changed
        **settings: object,
    ) -> None:
        super().__init__("http", data=data, store=store, **settings)
        self.row, self._limits = dict(row or {}), limits
        self.board.running(lambda: self.row)
        self.port = self.place[1]
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{'https' if self.config.http.http_tls_cert is not None else 'http'}://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        self.client = self._stack.enter_context(httpx.Client(base_url=self.url, timeout=_SECONDS, trust_env=False))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stack.close()
        self.stop()
        self._listening.close()
        if kind is None:
            assert not self.failures
            assert not self.log.errors()

    async def serve(self, stop: asyncio.Event) -> None:
        await serve_http(self.config, self.board, self.log, self._listening, stop, self._limits)

    def get(self, path: str, **options: Any) -> httpx.Response:
        """One request, on a connection that is kept."""
        return self.client.get(path, **options)


def answer_of(peer: socket.socket, words: bytes) -> tuple[int, bytes]:
    """Send bytes, and read to the end of the connection: the status of the first answer (0 without), and everything."""
    peer.sendall(words)
    return read_all(peer)


def read_all(peer: socket.socket) -> tuple[int, bytes]:
    """Read to the end of the connection, be it an orderly one or not."""
    data = b""
    with suppress(ConnectionError):
        while chunk := peer.recv(65_536):
            data += chunk
    return int(data[9:12]) if data.startswith(b"HTTP/1.1 ") else 0, data


def wait_for(holds: Callable[[], object], seconds: float = _SECONDS) -> None:
    """Look every few milliseconds; AssertionError when it never holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def problem(answer: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    """The object of an answer that is none."""
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/problem+json"), answer.text
    row: dict[str, Any] = answer.json()
    assert (row["type"], row["status"]) == (f"urn:rocketmq-indexd:problem:{slug}", status)
    assert row["title"]
    assert row["detail"]
    assert row["instance"].startswith("/")
    return row


_CERTIFICATE = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x"


def make_certificate(home: Path, names: str = "IP:127.0.0.1,IP:::1,DNS:localhost") -> tuple[Path, Path]:
    """Certificate and key, PEM, in ``home``, signed by itself."""
    cert, key = home / "cert.pem", home / "key.pem"
    own = ["-addext", f"subjectAltName={names}", "-out", str(cert), "-keyout", str(key)]
    subprocess.run([need("openssl"), *_CERTIFICATE.split(), *own], check=True, capture_output=True, timeout=60)
    return cert, key


def client_context(cert: Path) -> ssl.SSLContext:
    """Trusts this certificate alone."""
    return ssl.create_default_context(cafile=cert)


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """A server's, with both."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context
