"""serve_http: the application on a socket that listens already, with bounds on what clients may keep waiting.

HTTP itself is uvicorn's. A client has so many seconds for a whole request, and so many to take an answer; each
connection is looked at once a second. Connections beyond the bound are reset.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from indexd.config import Config
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.http.app import create_app
from indexd.serve.http.guard import HEADERS_MAX, TARGET_MAX, read_access
from indexd.serve.queries import Queries

#: For a whole request, headers and all; for an answer, once it is all written.
REQUEST_SECONDS, ANSWER_SECONDS = 10.0, 60.0
# Answers that clients do not take: beyond this the largest go.
_UNTAKEN_MAX = 64 << 20
_HEAD_MAX = TARGET_MAX + HEADERS_MAX + 1024
# Together with what closing the queries takes, less than the outlet is given (serve.server).
_LEAVE_SECONDS = 2
_IDLE_SECONDS = 30
_HANDSHAKE_SECONDS = 5.0
_OPEN = "give http_token_file, and http_tls_cert with http_tls_key, or listen on 127.0.0.1"


class Connection(HttpToolsProtocol):
    """uvicorn's protocol for one client, with bounds: what is no request in time or in size is cut off."""

    def __init__(self, most: int, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._most = most
        # Of a request that is not whole: since when it comes, and its bytes.
        self._asking_since: float | None = self.loop.time()
        self._head_bytes = 0
        self._leaving_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # of a socket
        """It is open, with TLS where that is spoken."""
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Count what a head takes before it is whole: the parser keeps all of it."""
        if self.cycle is None or self.cycle.response_complete:
            self._asking_since = self._asking_since or self.loop.time()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _HEAD_MAX:
            self.transport.close()

    def on_headers_complete(self) -> None:
        """A request is whole: there are no bodies."""
        self._asking_since, self._head_bytes = None, 0
        super().on_headers_complete()

    @property
    def untaken(self) -> int:
        """Bytes of answers that it has not taken."""
        return self.transport.get_write_buffer_size()

    def look(self, now: float) -> None:
        """Close it if its client takes too long."""
        self._leaving_since = None if self.untaken == 0 else self._leaving_since or now
        for since, most in ((self._asking_since, REQUEST_SECONDS), (self._leaving_since, ANSWER_SECONDS)):
            if since is not None and now - since > most:
                self.transport.abort()


async def serve_http(
    config: Config, board: DaemonStatus, log: Any, listening: socket.socket, stop: asyncio.Event
) -> None:
    """Serve until ``stop``; what is under way then is finished, or broken off after seconds.

    ``listening`` stays open for another try. UsageError if token or certificate cannot be used.
    """
    access = read_access(config)
    if access.is_open:
        log.warning(
            "http_open", http=config.http.http, token=access.token is not None, tls=access.tls is not None, hint=_OPEN
        )
    queries = Queries(config, board, config.http.http_queries_max)
    # Nothing of it is a line of our log; without a handler Python would print it as it is.
    quiet = logging.getLogger("uvicorn")
    quiet.propagate = False
    quiet.addHandler(logging.NullHandler())
    try:
        settings = uvicorn.Config(
            create_app(config, board, queries, access, log, stop),
            http=partial(Connection, config.http.http_connections_max),  # type: ignore[arg-type]  # makes a protocol
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
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
    """uvicorn's, but that it ends by an event, and looks at its connections."""

    def __init__(
        self,
        config: uvicorn.Config,
        tls: ssl.SSLContext | None,
        listening: socket.socket,
        stop: asyncio.Event,
        on_stop: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._tls, self._listening, self._stop, self._on_stop = tls, listening.dup(), stop, on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - it has its own
        """Listen."""
        protocol: Any = self.config.http_protocol_class
        make = partial(protocol, self.config, self.server_state, {})
        handshake: dict[str, Any] = {} if self._tls is None else {"ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        loop = asyncio.get_running_loop()
        self.servers = [await loop.create_server(make, sock=self._listening, ssl=self._tls, **handshake)]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is over."""
        await super().on_tick(counter)
        if counter % 10 == 0:
            self._look(asyncio.get_running_loop().time())
        return self._stop.is_set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody any more, and let those that are there finish."""
        self._on_stop()
        await super().shutdown(sockets)

    def _look(self, now: float) -> None:
        connections: list[Any] = sorted(self.server_state.connections, key=lambda connection: connection.untaken)
        for connection in connections:
            connection.look(now)
        untaken = sum(connection.untaken for connection in connections)
        while untaken > _UNTAKEN_MAX:
            largest = connections.pop()
            untaken -= largest.untaken
            largest.transport.abort()
