"""The remoting server: accepts connections on a listening socket until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import struct
from collections.abc import Callable
from typing import Any

from indexd.config import Config
from indexd.serve.board import Board
from indexd.serve.queries import Queries
from indexd.serve.remoting.access import Access, read_access
from indexd.serve.remoting.connection import (
    Connection,
    Limits,
    MemoryBudget,
    RateLimitedLog,
    RemotingCounts,
    ServerContext,
)
from indexd.serve.remoting.key_queries import load_key_queries
from indexd.serve.remoting.link import Patience
from indexd.serve.remoting.processor import RemotingProcessor

#: Without an upstream no request needs more: the largest are signed queries, and the heartbeats of clients.
FRAME_MAX_ALONE = 1 << 20

# All three, and what closing the queries takes, are less than the outlet is given (serve.server).
_LEAVE_SECONDS, _ABORT_SECONDS, _CLOSE_SECONDS = 1.5, 0.3, 0.5
_SHUTDOWN_SECONDS = 1.0
_ACCEPTED_AT_ONCE = 64
# Descriptors that indexing, queries and HTTP need beside the connections.
_DESCRIPTORS_KEPT = 512
_CONNECTIONS_LEAST = 16
# struct linger: closed at once, by a reset.
_RESET = struct.pack("ii", 1, 0)
_OPEN = (
    "give remoting_access_key with remoting_secret_key_file and TLS, or remoting_allow with the networks of your "
    "clients, or listen on 127.0.0.1"
)


async def serve_remoting(
    config: Config,
    board: Board,
    log: Any,
    listening: socket.socket,
    stop: asyncio.Event,
    limits: Limits | None = None,
    patience: Patience | None = None,
) -> None:
    """Serve until ``stop``; what is under way then is finished, or broken off after seconds.

    ``listening`` stays open for another try. UsageError if keys or certificate cannot be used.
    """
    access = read_access(config)
    if access.is_open:
        signed = access.credentials is not None
        log.warning(
            "remoting_open", remoting=config.remoting.remoting, signed=signed, tls=access.tls is not None, hint=_OPEN
        )
    queries = Queries(config, board, config.remoting.remoting_queries_max, load_key_queries)
    processor = RemotingProcessor(config, board, RateLimitedLog(log), access, queries, patience)
    try:
        server = RemotingServer(config, board, log, listening, processor, access, limits)
        await server.run(stop, queries.stop)
    finally:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(processor.close(), _CLOSE_SECONDS)
        queries.stop()
        # In another thread: a query may be under way, and it is waited for.
        left = await asyncio.to_thread(queries.close)
        if left:
            log.warning("queries_left_behind", queries=left)


class RemotingServer:
    """Accepts connections, looks at each once a second, and writes on the board what they did.

    A connection counts from its first moment on, not from the end of a TLS handshake that may never come.
    """

    def __init__(
        self,
        config: Config,
        board: Board,
        log: Any,
        listening: socket.socket,
        processor: RemotingProcessor,
        access: Access,
        limits: Limits | None = None,
    ) -> None:
        remoting = config.remoting
        is_alone = not remoting.upstream_namesrv
        self._limits = limits = limits or Limits()
        self._counts, self._memory, self._log = RemotingCounts(), MemoryBudget(limits.held_bytes), RateLimitedLog(log)
        self._context = ServerContext(
            processor,
            limits,
            self._memory,
            self._counts,
            self._log,
            min(remoting.remoting_frame_max, FRAME_MAX_ALONE) if is_alone else remoting.remoting_frame_max,
            remoting.remoting_idle_timeout,
            limits.under_way if is_alone else limits.under_way_upstream,
        )
        self._board, self._access = board, access
        self._most = connections_max(remoting.remoting_connections_max, 1 if is_alone else 2, log)
        self._address = address_of(*listening.getsockname()[:2])
        self._listening = listening.dup()
        self._listening.setblocking(False)
        self._opening: set[asyncio.Task[None]] = set()
        self._is_over, self._is_empty = False, asyncio.Event()

    def __repr__(self) -> str:
        return f"RemotingServer({self._address}, {self._counts.connections} connections)"

    async def run(self, stop: asyncio.Event, on_stop: Callable[[], None]) -> None:
        """Until ``stop``; then ``on_stop`` is called, and connections end as what is under way of them ends."""
        loop = asyncio.get_running_loop()
        try:
            self._listen()
            while not stop.is_set():
                for connection in tuple(self._memory.connections):
                    connection.look(loop.time())
                self._show()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self._limits.look_seconds)
        finally:
            self._is_over = True
            loop.remove_reader(self._listening)
            self._listening.close()
            on_stop()
            await self._leave()
            self._show()

    def _show(self) -> None:
        upstream = self._context.processor.row()
        self._board.outlets["remoting"] = {**self._counts.row(self._address), "upstream": upstream}

    async def _leave(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in tuple(self._memory.connections):
            connection.leave()
        await self._wait_until_gone(_LEAVE_SECONDS)
        late = [connection for connection in self._memory.connections if not connection.is_closed]
        if late:
            self._log.warning("remoting_cut_off", connections=len(late))
        for connection in tuple(self._memory.connections):
            connection.abort()
        await self._wait_until_gone(_ABORT_SECONDS)

    async def _wait_until_gone(self, seconds: float) -> None:
        if self._counts.connections:
            self._is_empty.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_empty.wait(), seconds)

    def _listen(self) -> None:
        if not self._is_over:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                peer, place = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors: they wait in the kernel meanwhile
                self._log.warning("remoting_full", connections=self._counts.connections, problem=str(error))
                loop.remove_reader(self._listening)
                loop.call_later(self._limits.accept_pause, self._listen)
                return
            reason = self._refusal(place[0])
            if reason is not None:
                self._counts.refused[reason] += 1
                with contextlib.suppress(OSError):
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                peer.close()
                continue
            self._counts.connections += 1
            self._counts.connections_total += 1
            task = loop.create_task(self._open(peer, address_of(*place[:2])))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _refusal(self, host: str) -> str | None:
        if not self._access.admits(host):
            self._log.warning("remoting_not_allowed", peer=host, key="remoting_allow")
            return "allow"
        if self._counts.connections >= self._most:
            self._log.warning("remoting_full", connections=self._counts.connections)
            return "full"
        return None

    async def _open(self, peer: socket.socket, name: str) -> None:
        tls, times, connection = self._access.tls, {}, None
        if tls is not None:
            times = {
                "ssl_handshake_timeout": self._limits.handshake_seconds,
                "ssl_shutdown_timeout": _SHUTDOWN_SECONDS,
            }
        try:
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self._context, name, address_of(*peer.getsockname()[:2]), is_tls=tls is not None)
            connection.on_close(self._release)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, peer, ssl=tls, **times)
        except (OSError, ssl.SSLError, asyncio.CancelledError):  # gone already, or no TLS
            peer.close()
            if connection is None or not connection.was_made:  # or it tells by itself that it has ended
                self._counts.refused["tls"] += tls is not None
                self._release()

    def _release(self) -> None:
        self._counts.connections -= 1
        if self._counts.connections == 0:
            self._is_empty.set()


def address_of(host: str, port: int) -> str:
    """``127.0.0.1:9577``; IPv6 in brackets, and an IPv4-mapped address as the IPv4 address that it is."""
    if ":" not in host:
        return f"{host}:{port}"
    mapped = host.removeprefix("::ffff:")
    return f"{mapped}:{port}" if "." in mapped and ":" not in mapped else f"[{host}]:{port}"


def connections_max(wanted: int, descriptors_each: int, log: Any) -> int:
    """So many of the ``wanted`` as descriptors are left for, once the process has taken all that it may.

    The index needs its own.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (2**62 if limit == resource.RLIM_INFINITY else limit for limit in limits)
    need = wanted * descriptors_each + _DESCRIPTORS_KEPT
    if soft < min(need, hard):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(need, hard), limits[1]))
            soft = min(need, hard)
    if soft >= need:
        return wanted
    most = min(wanted, max((soft - _DESCRIPTORS_KEPT) // descriptors_each, _CONNECTIONS_LEAST))
    log.warning("remoting_descriptors", connections_max=most, wanted=wanted, descriptors=soft, hint="raise LimitNOFILE")
    return most
