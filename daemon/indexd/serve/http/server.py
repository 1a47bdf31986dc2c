"""Connection: uvicorn's HTTP/1.1, with bounds on what a client may keep waiting, and problems in place of plain words.

A client has so many seconds for a whole request, and so many to take an answer; each connection is looked at once a
second. Of connections beyond the bound some are told so, and all others are closed at once.

serve_http: the application on a socket that listens already, until it is told to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from indexd.config import Config as Settings
from indexd.serve.board import Board
from indexd.serve.http.app import create_app
from indexd.serve.http.guard import HEADERS_MAX, TARGET_MAX, read_access
from indexd.serve.http.messages import Queries
from indexd.serve.http.problem import MEDIA_TYPE, ProblemError

if TYPE_CHECKING:
    from uvicorn import Config
    from uvicorn.server import ServerState

#: For a whole request, headers and all; for an answer, once it is all written.
REQUEST_SECONDS, ANSWER_SECONDS = 10.0, 60.0
#: Connections beyond the bound that are still answered: 503.
SURPLUS_MAX = 32
_HEAD_MAX = TARGET_MAX + HEADERS_MAX + 1024
_HEADERS_COUNT_MAX = 100
_RETRY = 5

# What clients do wrong is answered, not logged; what goes wrong here is logged by the guard.
_QUIET = logging.Logger("quiet", logging.CRITICAL + 1)
_QUIET.addHandler(logging.NullHandler())


class Connection(HttpToolsProtocol):
    """One client. ``Config.limit_concurrency`` is the bound on connections."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connections_max = self.limit_concurrency or 1
        self.limit_concurrency = None  # uvicorn's own way to refuse is no problem+json
        self.logger = _QUIET
        self._problem: ProblemError | None = None
        self._head_bytes = 0
        self._headers_count = 0
        self._is_in_head = True
        # Since when a request is on its way, and since when an answer lies here; None if none.
        self._asking_since: float | None = None
        self._leaving_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Too many: the next request is refused, or this one is closed at once."""
        super().connection_made(transport)
        surplus = len(self.connections) - self._connections_max
        if surplus > SURPLUS_MAX:
            transport.abort()
            return
        if surplus > 0:
            self._problem = ProblemError(
                503, "too-many-connections", f"there are {self._connections_max} connections already", retry=_RETRY
            )
        self._asking_since = self.loop.time()

    def data_received(self, data: bytes) -> None:
        """Count what a head takes before it is whole: the parser keeps all of it."""
        if self._asking_since is None:
            self._asking_since = self.loop.time()
        if self._problem is not None:
            self.send_400_response("")
            return
        super().data_received(data)
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_MAX:
                self._problem = _too_long(self.url)
                self.send_400_response("")

    def on_message_begin(self) -> None:
        """A request's first bytes."""
        super().on_message_begin()
        self._asking_since = self.loop.time()
        self._is_in_head, self._head_bytes, self._headers_count = True, 0, 0

    def on_url(self, url: bytes) -> None:
        """A piece of the address; the parser cannot take one of more than 64 KiB apart."""
        super().on_url(url)
        if len(self.url) > 2 * TARGET_MAX:
            self._problem = _too_long(self.url)
            raise ValueError(self._problem.detail)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, whole."""
        self._headers_count += 1
        if self._headers_count > _HEADERS_COUNT_MAX:
            self._problem = ProblemError(431, "headers-too-long", f"there are more than {_HEADERS_COUNT_MAX} headers")
            raise ValueError(self._problem.detail)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._is_in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._asking_since = None
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words are replaced
        """Refuse what has come, and close."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()  # in the middle of an answer to another request
            return
        problem = self._problem or ProblemError(400, "bad-request", "this is no HTTP request")
        self.transport.write(_plain_answer(problem, dict(self.server_state.default_headers)))
        self.transport.close()

    def look(self, now: float) -> None:
        """Close it if its client takes too long."""
        if self.transport.get_write_buffer_size() == 0:
            self._leaving_since = None
        elif self._leaving_since is None:
            self._leaving_since = now
        elif now - self._leaving_since > ANSWER_SECONDS:
            self.transport.abort()
        if self._asking_since is not None and now - self._asking_since > REQUEST_SECONDS:
            self._problem = ProblemError(408, "request-timeout", f"no request within {REQUEST_SECONDS:.0f} s")
            self.send_400_response("")
            self._asking_since = None


def _too_long(url: bytes) -> ProblemError:
    if len(url) > TARGET_MAX:
        return ProblemError(414, "uri-too-long", f"path and query are longer than {TARGET_MAX} bytes")
    return ProblemError(431, "headers-too-long", f"the headers are longer than {HEADERS_MAX} bytes")


def _plain_answer(problem: ProblemError, defaults: dict[bytes, bytes]) -> bytes:
    # The bytes of an answer to what never came to be a request.
    body = problem.body("")
    headers = {name.encode(): value.encode() for name, value in problem.headers().items()}
    headers |= defaults | {
        b"content-type": MEDIA_TYPE.encode(),
        b"content-length": b"%d" % len(body),
        b"connection": b"close",
        b"x-content-type-options": b"nosniff",
        b"cache-control": b"no-store",
    }
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers.items())
    return b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (problem.status, problem.title.encode(), lines, body)


# Together with what closing the queries takes, less than the outlet is given (serve.server).
_LEAVE_SECONDS = 2
_IDLE_SECONDS = 30
_HANDSHAKE_SECONDS = 5.0
_ACCEPTED_AT_ONCE = 64
_PAUSE_SECONDS = 1.0
# At a stop: handshakes that take longer are broken off.
_OPENING_SECONDS = 0.5
# struct linger: closed at once, by a reset.
_RESET = struct.pack("ii", 1, 0)
_OPEN = "give http_token_file, and http_tls_cert with http_tls_key, or listen on 127.0.0.1"
# Answers that clients do not take: beyond this the largest go.
_UNTAKEN_MAX = 64 << 20


async def serve_http(config: Settings, board: Board, log: Any, listening: socket.socket, stop: asyncio.Event) -> None:
    """Serve until ``stop``; what is under way then is finished, or broken off after seconds.

    ``listening`` stays open for another try. UsageError if token or certificate cannot be used.
    """
    access = read_access(config)
    if access.is_open:
        log.warning(
            "http_open", http=config.http.http, token=access.token is not None, tls=access.tls is not None, hint=_OPEN
        )
    app = create_app(config, board, log, stop, access)
    queries: Queries = app.state.queries
    # Nothing of it is a line of our log; without a handler Python would print it as it is.
    quiet = logging.getLogger("uvicorn")
    quiet.propagate = False
    quiet.addHandler(logging.NullHandler())
    try:
        settings = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=config.http.http_connections_max,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_LEAVE_SECONDS,
        )
        await _Server(settings, access.tls, listening, stop, queries.stop).serve()
    finally:
        queries.stop()
        # In another thread: a query may be under way, and it is waited for.
        left = await asyncio.to_thread(queries.close)
        if left:
            log.warning("queries_left_behind", queries=left)


class _Server(uvicorn.Server):
    """Uvicorn's, but that it ends by an event, leaves signals to the daemon, and counts and looks at its connections.

    A connection counts from its first moment on, not from the end of a TLS handshake that may never come.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        tls: ssl.SSLContext | None,
        listening: socket.socket,
        stop: asyncio.Event,
        on_stop: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.servers: list[asyncio.base_events.Server] = []
        self._tls, self._stop, self._on_stop = tls, stop, on_stop
        self._handshake: dict[str, Any] = {} if tls is None else {"ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        self._listening = listening.dup()
        self._listening.setblocking(False)
        self._opening: set[asyncio.Task[None]] = set()
        self._most = (config.limit_concurrency or 1) + SURPLUS_MAX

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take none."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - it has its own
        """Listen."""
        self._listen()
        self.started = True

    async def main_loop(self) -> None:
        """A look a second."""
        loop = asyncio.get_running_loop()
        while not self._stop.is_set():
            await self.on_tick(0)  # the date header
            self._look(loop.time())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), 1)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody any more, and let those that are there finish."""
        asyncio.get_running_loop().remove_reader(self._listening)
        self._listening.close()
        self._on_stop()
        if self._opening:
            _, late = await asyncio.wait(self._opening, timeout=_OPENING_SECONDS)
            for task in late:
                task.cancel()
        await super().shutdown(sockets)

    def _listen(self) -> None:
        if not self._stop.is_set():
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                peer, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptors: they wait in the kernel meanwhile
                loop.remove_reader(self._listening)
                loop.call_later(_PAUSE_SECONDS, self._listen)
                return
            if len(self._opening) + len(self.server_state.connections) >= self._most:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                peer.close()
                continue
            task = loop.create_task(self._open(peer))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: Connection(self.config, self.server_state, {}), peer, ssl=self._tls, **self._handshake
            )
        except (OSError, ssl.SSLError, TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(OSError):
                peer.close()

    def _look(self, now: float) -> None:
        connections = [one for one in self.server_state.connections if isinstance(one, Connection)]
        for connection in connections:
            connection.look(now)
        sizes = sorted((one.transport.get_write_buffer_size(), number) for number, one in enumerate(connections))
        untaken = sum(size for size, _ in sizes)
        while untaken > _UNTAKEN_MAX:
            size, number = sizes.pop()
            connections[number].transport.abort()
            untaken -= size
