"""serve_http: the application on a socket that listens already, until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from indexd.config import Config
from indexd.serve.board import Board
from indexd.serve.http.access import read_access
from indexd.serve.http.app import create_app
from indexd.serve.http.connection import SURPLUS_MAX, Connection
from indexd.serve.http.queries import Queries

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
