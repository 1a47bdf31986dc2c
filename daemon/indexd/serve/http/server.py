"""serve_http: the application on a socket that listens already, with bounds on what clients may keep waiting.

A client has so many seconds for a whole request, and so many to take an answer; each connection is looked at once a
second. Of connections beyond the bound some are told so, and all others are closed at once. HTTP itself is uvicorn's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from indexd.config import Config
from indexd.serve.board import Board
from indexd.serve.http.app import create_app
from indexd.serve.http.guard import CONNECTION, HEADERS, HEADERS_MAX, TARGET_MAX, read_access
from indexd.serve.http.problem import ProblemError
from indexd.serve.queries import Queries

#: For a whole request, headers and all; for an answer, once it is all written.
REQUEST_SECONDS, ANSWER_SECONDS = 10.0, 60.0
#: Connections beyond the bound that are still answered: 503.
SURPLUS_MAX = 32
_HEAD_MAX = TARGET_MAX + HEADERS_MAX + 1024
_RETRY = 5


class Connection(asyncio.Protocol):
    """One client: what it sends goes to uvicorn's protocol, within bounds; the guard says when a request is whole.

    It counts from its first moment on, not from the end of a TLS handshake that may never come. One beyond the bound is
    refused as soon as it asks.
    """

    def __init__(self, server: uvicorn.Server, connections: set[Connection], most: int) -> None:
        config, state = server.config, server.server_state
        protocol: Any = AutoHTTPProtocol
        self._http = protocol(config=config, server_state=state, app_state={CONNECTION: self})
        self._loop, self._connections, self._most = asyncio.get_running_loop(), connections, most
        self.transport: asyncio.Transport | None = None
        self._is_surplus = len(connections) >= most
        connections.add(self)
        self._requests = 0
        # Of a request that is not whole: since when it comes, its bytes, and whether its first line has ended.
        self._asking_since: float | None = None
        self._head_bytes, self._has_line = 0, False
        self._leaving_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a socket
        """It is open, with TLS where that is spoken."""
        self.transport, self._asking_since = transport, self._loop.time()
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._connections.discard(self)
        self._http.connection_lost(exc)

    def eof_received(self) -> None:
        """It sends no more."""
        self._http.eof_received()

    def pause_writing(self) -> None:
        """It takes too little."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """It takes again."""
        self._http.resume_writing()

    def data_received(self, data: bytes) -> None:
        """Count what a head takes before it is whole: the parser keeps all of it."""
        if self._is_surplus:
            detail = f"there are {self._most} connections already"
            self._refuse(ProblemError(503, "too-many-connections", detail, retry=_RETRY))
            return
        if self._asking_since is None and not self._requests:
            self._asking_since = self._loop.time()
        self._has_line = self._has_line or b"\n" in data[: max(_HEAD_MAX - self._head_bytes, 0)]
        self._head_bytes += len(data)
        if self._head_bytes > _HEAD_MAX and not self._has_line:
            self._refuse(ProblemError(414, "uri-too-long", f"path and query are longer than {TARGET_MAX} bytes"))
            return
        self._http.data_received(data)
        if self._head_bytes > _HEAD_MAX:
            self._loop.call_soon(self._check_head)

    @property
    def untaken(self) -> int:
        """Bytes of answers that it has not taken."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def request_began(self) -> None:
        """A request is whole and being answered."""
        self._requests += 1
        self._asking_since = None
        self._head_bytes, self._has_line = 0, False

    def request_ended(self) -> None:
        """It is answered."""
        self._requests -= 1

    def look(self, now: float) -> None:
        """Close it if its client takes too long."""
        if self.transport is None:
            return
        if self.untaken == 0:
            self._leaving_since = None
        elif self._leaving_since is None:
            self._leaving_since = now
        elif now - self._leaving_since > ANSWER_SECONDS:
            self.transport.abort()
        if self._asking_since is not None and now - self._asking_since > REQUEST_SECONDS:
            self._refuse(ProblemError(408, "request-timeout", f"no request within {REQUEST_SECONDS:.0f} s"))

    def _check_head(self) -> None:
        # Whatever was whole has begun by now.
        if self._head_bytes > _HEAD_MAX and not self._requests:
            self._refuse(ProblemError(431, "headers-too-long", f"the headers are longer than {HEADERS_MAX} bytes"))

    def _refuse(self, problem: ProblemError) -> None:
        # An answer to what never came to be a request.
        if self.transport is None or self.transport.is_closing():
            return
        problem.closes, self._asking_since = True, None
        response, phrase = problem.response(""), HTTPStatus(problem.status).phrase.encode()
        lines = b"".join(name + b": " + value + b"\r\n" for name, value in (*response.raw_headers, *HEADERS))
        self.transport.write(b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (problem.status, phrase, lines, bytes(response.body)))
        self.transport.close()


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


async def serve_http(config: Config, board: Board, log: Any, listening: socket.socket, stop: asyncio.Event) -> None:
    """Serve until ``stop``; what is under way then is finished, or broken off after seconds.

    ``listening`` stays open for another try. UsageError if token or certificate cannot be used.
    """
    access = read_access(config)
    if access.is_open:
        log.warning(
            "http_open", http=config.http.http, token=access.token is not None, tls=access.tls is not None, hint=_OPEN
        )
    queries = Queries(config, board, config.http.http_queries_max)
    app = create_app(config, board, queries, access, log, stop)
    # Nothing of it is a line of our log; without a handler Python would print it as it is.
    quiet = logging.getLogger("uvicorn")
    quiet.propagate = False
    quiet.addHandler(logging.NullHandler())
    try:
        settings = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=_LEAVE_SECONDS,
        )
        await _Server(settings, access.tls, listening, stop, queries.stop, config.http.http_connections_max).serve()
    finally:
        queries.stop()
        # In another thread: a query may be under way, and it is waited for.
        left = await asyncio.to_thread(queries.close)
        if left:
            log.warning("queries_left_behind", queries=left)


class _Server(uvicorn.Server):
    """Uvicorn's, but that it ends by an event, leaves signals to the daemon, and bounds its connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        tls: ssl.SSLContext | None,
        listening: socket.socket,
        stop: asyncio.Event,
        on_stop: Callable[[], None],
        connections_max: int,
    ) -> None:
        super().__init__(config)
        self.servers: list[asyncio.base_events.Server] = []
        self._tls, self._stop, self._on_stop = tls, stop, on_stop
        self._handshake: dict[str, Any] = {} if tls is None else {"ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        self._listening = listening.dup()
        self._listening.setblocking(False)
        self._opening: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._connections_max = connections_max

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
            if len(self._connections) >= self._connections_max + SURPLUS_MAX:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                peer.close()
                continue
            connection = Connection(self, self._connections, self._connections_max)
            task = loop.create_task(self._open(peer, connection))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    async def _open(self, peer: socket.socket, connection: Connection) -> None:
        peer.setblocking(False)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, peer, ssl=self._tls, **self._handshake
            )
        except (OSError, ssl.SSLError, TimeoutError, asyncio.CancelledError):
            self._connections.discard(connection)
            with contextlib.suppress(OSError):
                peer.close()

    def _look(self, now: float) -> None:
        connections = sorted(self._connections, key=lambda connection: connection.untaken)
        for connection in connections:
            connection.look(now)
        untaken = sum(connection.untaken for connection in connections)
        while untaken > _UNTAKEN_MAX and (largest := connections.pop()).transport is not None:
            untaken -= largest.untaken
            largest.transport.abort()
