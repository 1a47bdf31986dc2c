"""The remoting server: accepts connections, reads frames, writes the answers, and bounds what each client may hold.

A frame has so many seconds from its first byte to its last, an answer so many to be taken, and who says nothing for
long is closed: each connection is looked at once a second. Requests run side by side; where too many are under way, or
answers are not taken, no more is read, and the client's own side of TCP fills. Who ends his side of the connection ends
it: so does RocketMQ's broker, and a client that has gone looks no different.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

from indexd.config import Config
from indexd.dispatch.reput import pause
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.queries import Queries
from indexd.serve.remoting.access import RemotingAccess, ip_of, read_access
from indexd.serve.remoting.command import (
    REQUEST_NAMES,
    FrameError,
    RemotingCommand,
    RequestCode,
    ResponseCode,
    encode_command,
    take_command,
)
from indexd.serve.remoting.key_queries import load_key_queries
from indexd.serve.remoting.processor import RemotingProcessor
from indexd.serve.remoting.upstream import Patience

#: Without an upstream no request needs more: the largest are signed queries, and the heartbeats of clients.
FRAME_MAX_ALONE = 1 << 20
# What a request holds while it runs beside its bytes: a task, and its header's fields as objects.
_TASK_SIZE, _FIELD_SIZE = 4096, 16
# The begin of what came that compiled code is given.
_COMPILED_SIZE = 1 << 16
# The transport is given so much at once: TLS does not count what it passes on at once to the buffer below.
_PIECE_SIZE = 1 << 16
# Both, and what closing the queries and connections upstream takes, are less than the outlet is given (serve.server).
_LEAVE_SECONDS, _ABORT_SECONDS = 1.5, 0.3
_SHUTDOWN_SECONDS = 1.0
# Descriptors that indexing, queries and HTTP need beside the connections.
_DESCRIPTORS_KEPT = 512
_CONNECTIONS_LEAST = 16
_OPEN = (
    "give remoting_access_key with remoting_secret_key_file and TLS, or remoting_allow with the networks of your "
    "clients, or listen on 127.0.0.1"
)


_LOG_SECONDS = 60.0
_RESULTS: dict[int, str] = {
    ResponseCode.QUERY_NOT_FOUND: "empty",
    ResponseCode.TOPIC_NOT_EXIST: "empty",
    ResponseCode.PULL_NOT_FOUND: "empty",
    ResponseCode.PULL_RETRY_IMMEDIATELY: "empty",
    ResponseCode.PULL_OFFSET_MOVED: "empty",
    ResponseCode.NO_PERMISSION: "refused",
    ResponseCode.SYSTEM_BUSY: "refused",
    ResponseCode.REQUEST_CODE_NOT_SUPPORTED: "refused",
    ResponseCode.SERVICE_NOT_AVAILABLE: "refused",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take, in seconds and bytes."""

    #: Between two looks at each connection, and after a failure to accept one.
    look_seconds: float = 1.0
    #: Until TLS has begun.
    handshake_seconds: float = 5.0
    #: For a whole frame, and one second more for each so many bytes of it that have come.
    frame_seconds: float = 10.0
    frame_bytes_per_second: int = 1 << 18
    #: Without a byte of an answer being taken.
    untaken_seconds: float = 60.0
    #: Requests that run at once for one connection. A consumer has a long poll under way for each of its queues.
    under_way: int = 256
    under_way_upstream: int = 4096
    #: What they hold; what all connections hold.
    under_way_bytes: int = 32 << 20
    held_bytes: int = 512 << 20


class RateLimitedLog:
    """Logs each event once a minute; their names are few and fixed, so nothing here grows."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._said: dict[str, tuple[float, int]] = {}  # event -> (when, left out since)

    def warning(self, event: str, **fields: object) -> None:
        """As structlog's, with ``left_out``: how many such lines there were since the one before."""
        now = time.monotonic()
        at, left_out = self._said.get(event, (-_LOG_SECONDS, 0))
        if now - at < _LOG_SECONDS:
            self._said[event] = (at, left_out + 1)
        else:
            self._said[event] = (now, 0)
            self._log.warning(event, **fields, left_out=left_out)


class RemotingConnection(asyncio.Protocol):
    """One client: frames in, answers out. An ``upstream.Client`` for the processor."""

    _transport: asyncio.Transport

    def __init__(self, server: RemotingServer, peer: str, local: str) -> None:
        self._server, self.peer, self.local = server, peer, local
        self._loop = asyncio.get_running_loop()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        #: The server's: what it holds.
        self.held = 0
        # It is there, its TLS handshake done; it has ended, or is about to without another word; it has ended.
        self.was_made = self.is_closed = self._is_lost = False
        # What came of frames that have not begun to run.
        self._inflow = bytearray()
        # Under way: what each holds, and whether somebody waits for its answer.
        self._tasks: dict[asyncio.Task[None], tuple[int, bool]] = {}
        self._under_way = 0
        # The transport takes no more; we do not read; it is to end.
        self._is_paused = self._is_silent = self._is_leaving = False
        self._active_at = self._frame_at = self._taken_at = self._loop.time()
        # Bytes that were not taken at the last look.
        self._untaken = 0

    # --- asyncio's calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there, its TLS handshake done."""
        self._transport, self.was_made = cast("asyncio.Transport", transport), True

    def data_received(self, data: bytes) -> None:
        """Some bytes of frames."""
        self._server.counts["receivedBytes"] += len(data)
        self._active_at = self._loop.time()
        if not self._inflow:
            self._frame_at = self._active_at
        self._inflow += data
        self._take()

    def pause_writing(self) -> None:
        """It does not take its answers: nothing more is begun for it."""
        self._is_paused = True
        self._read_or_wait()

    def resume_writing(self) -> None:
        """It has taken most of them."""
        self._is_paused = False
        self._take()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - it is gone, whatever the reason
        """It is gone. What nobody waits for goes on: a client may well leave behind a last one-way request."""
        self.is_closed = self._is_lost = True
        self._inflow.clear()
        for task, (_, is_awaited) in self._tasks.items():
            if is_awaited:
                task.cancel()
        self._take()

    # --- the processor's and the server's ---------------------------------------------------------------------------

    def send(self, command: RemotingCommand) -> None:
        """See ``upstream.Client``."""
        self._write(encode_command(command))
        self._weigh()

    def end(self, reason: str | None = None) -> None:
        """Close it at once, without a word, with all that it has left behind; ``reason``: one of those counted."""
        if not self.is_closed and reason is not None:
            self._server.counts["closed"][reason] += 1
        for task in self._tasks:
            task.cancel()
        self.is_closed = True
        self._inflow.clear()
        self._transport.abort()
        self._server.hold(self, 0)

    def leave(self) -> None:
        """Begin nothing more, and close when all that is under way is answered and taken."""
        self._is_leaving = True
        self._take()

    def look(self, now: float) -> None:
        """Close it if its client takes too long over anything."""
        if self.is_closed or not self.was_made:
            return
        limits, untaken = self._server.limits, self._weigh()
        if untaken == 0 or untaken != self._untaken:
            self._taken_at = now
        self._untaken = untaken
        frame_seconds = limits.frame_seconds + len(self._inflow) / limits.frame_bytes_per_second
        # Whether a client is still there cannot be seen where its bytes are not read.
        is_quiet = self._is_silent or (not self._tasks and untaken == 0)
        if now - self._taken_at > limits.untaken_seconds:
            self.end("untaken")
        elif self._inflow and not self._is_silent and now - self._frame_at > frame_seconds:
            self.end("slow")
        elif is_quiet and now - self._active_at > self._server.idle_seconds:
            self.end("idle")

    # --- frames in --------------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        return (
            self.is_closed
            or self._is_paused
            or self._is_leaving
            or len(self._tasks) >= self._server.under_way_max
            or self._under_way >= self._server.limits.under_way_bytes
        )

    def _take(self) -> None:
        # Begins what is whole and may begin; the rest stays.
        inflow, server, key_queries = self._inflow, self._server, self._server.processor.key_queries
        if inflow and key_queries is not None and not self._is_full():
            found = key_queries.answer(bytes(memoryview(inflow)[:_COMPILED_SIZE]), server.frame_max)
            if found is not None:
                server.ended(RequestCode.QUERY_MESSAGE, ResponseCode.SUCCESS, found.requests)
                del inflow[: found.size]
                self._frame_at = self._active_at
                self._write(found.answers)
        try:
            while not self._is_full():
                left = len(inflow)
                command = take_command(inflow, server.frame_max)
                if command is None:
                    break
                self._frame_at = self._active_at
                self._begin(command, left - len(inflow))
        except FrameError as error:
            server.log.warning("remoting_bytes", peer=self.peer, problem=str(error))
            self.end("bytes")
            return
        self._weigh()
        self._read_or_wait()
        self._close_if_done()

    def _begin(self, command: RemotingCommand, frame_size: int) -> None:
        size = _TASK_SIZE + frame_size + _FIELD_SIZE * (frame_size - len(command.body))
        task = self._loop.create_task(self._answer(command))
        self._tasks[task] = (size, not command.is_oneway and not command.is_response)
        task.add_done_callback(self._done)
        self._under_way += size

    async def _answer(self, command: RemotingCommand) -> None:
        try:
            answer = await self._server.processor.process(self, command)
            data = b"" if answer is None else encode_command(answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told, and the log
            self._server.log.warning("remoting_failed", peer=self.peer, code=command.code, problem=repr(error))
            answer = command.answer(ResponseCode.SYSTEM_ERROR, f"a defect of indexd: {type(error).__name__}")
            data = encode_command(answer)
        if command.is_response:
            return
        self._server.ended(command.code, None if answer is None else answer.code)
        if not command.is_oneway:
            self._write(data)

    def _done(self, task: asyncio.Task[None]) -> None:
        size, _ = self._tasks.pop(task)
        self._under_way -= size
        self._take()

    def _read_or_wait(self) -> None:
        is_full = self._is_full()
        if is_full != self._is_silent and not self._transport.is_closing():
            self._is_silent = is_full
            if is_full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
                self._frame_at = self._loop.time()

    # --- answers out ------------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self.is_closed or self._transport.is_closing():
            return
        self._active_at = self._loop.time()
        self._server.counts["sentBytes"] += len(data)
        for at in range(0, len(data), _PIECE_SIZE):
            self._transport.write(data[at : at + _PIECE_SIZE])

    def _close_if_done(self) -> None:
        if self._tasks or self.gone.done():
            return
        if self._is_lost:
            self.gone.set_result(None)
        elif self._is_leaving and not self._is_paused:
            self._transport.close()

    def _weigh(self) -> int:
        # Tells what it holds, and returns how much of it is not taken; over TLS twice _PIECE_SIZE more, not seen.
        untaken = self._transport.get_write_buffer_size()
        size = len(self._inflow) + self._under_way + untaken
        if size != self.held or not size:
            self._server.hold(self, size)
        return untaken


class RemotingServer:
    """Accepts connections, looks at each once a second, and writes on the board what they did.

    A connection counts from its first moment on, not from the end of a TLS handshake that may never come.
    """

    def __init__(
        self,
        config: Config,
        board: DaemonStatus,
        log: Any,
        listening: socket.socket,
        processor: RemotingProcessor,
        access: RemotingAccess,
        limits: Limits | None = None,
    ) -> None:
        remoting = config.remoting
        is_alone = not remoting.upstream_namesrv
        self.processor, self.limits = processor, limits or Limits()
        self.log = log
        #: Since the outlet began; bytes are those of the protocol, without TLS. Why a client was not let in; why a
        #: connection was closed by us; by the name of a request's code and by result, how many there were.
        self.counts: dict[str, Any] = {
            "connectionsTotal": 0,
            "refused": {"allow": 0, "full": 0, "tls": 0},
            "closed": {"bytes": 0, "slow": 0, "idle": 0, "untaken": 0, "memory": 0},
            "requests": {},
            "receivedBytes": 0,
            "sentBytes": 0,
        }
        #: Those that are open, their handshake included, or have requests under way, with the task that opens each; and
        #: what they hold together: requests, unfinished or under way, and answers that were not taken.
        self.connections: dict[RemotingConnection, asyncio.Task[None]] = {}
        self.held = 0
        self.frame_max, self.idle_seconds = remoting.remoting_frame_max, remoting.remoting_idle_timeout
        self.under_way_max = self.limits.under_way_upstream
        if is_alone:
            self.frame_max, self.under_way_max = min(self.frame_max, FRAME_MAX_ALONE), self.limits.under_way
        self._board, self._access = board, access
        self._most = connections_max(remoting.remoting_connections_max, 1 if is_alone else 2, log)
        self._address = address_of(*listening.getsockname()[:2])
        self._listening = listening.dup()
        self._listening.setblocking(False)

    async def run(self, stop: asyncio.Event, on_stop: Callable[[], None]) -> None:
        """Until ``stop``; then ``on_stop`` is called, and connections end as what is under way of them ends."""
        loop = asyncio.get_running_loop()
        accepting = loop.create_task(self._accept())
        try:
            while not stop.is_set():
                for connection in tuple(self.connections):
                    connection.look(loop.time())
                self._show()
                await pause(stop, self.limits.look_seconds)
        finally:
            accepting.cancel()
            self._listening.close()
            on_stop()
            await self._leave()
            self._show()

    def _show(self) -> None:
        forwarder = self.processor.forwarder
        row = {"address": self._address, "connections": len(self.connections), **deepcopy(self.counts)}
        row["upstream"] = None if forwarder is None else forwarder.row()
        self._board.outlets["remoting"] = lambda: row

    def ended(self, request: int, response: int | None, times: int = 1) -> None:
        """So many requests are over; ``response``: the code of their answers, None for one that gets none.

        Counted as ok, empty (nothing is there), refused (no right, busy, not supported, nobody behind us) or error.
        A code without a name here is ``other``.
        """
        result = _RESULTS.get(response, "error") if response else "ok"
        if (request, response) == (RequestCode.VIEW_MESSAGE_BY_ID, ResponseCode.SYSTEM_ERROR):
            result = "empty"  # the broker too has no other code for an offset where no message is
        results = self.counts["requests"].setdefault(REQUEST_NAMES.get(request, "other"), {})
        results[result] = results.get(result, 0) + times

    def hold(self, connection: RemotingConnection, size: int) -> None:
        """It holds so many bytes now. Over budget, the one that holds most is closed."""
        has_grown = size > connection.held and not connection.is_closed
        self.held += size - connection.held
        connection.held = size
        if has_grown and self.held > self.limits.held_bytes:
            max(self.connections, key=lambda one: one.held).end("memory")

    async def _leave(self) -> None:
        for connection, opening in tuple(self.connections.items()):
            if connection.was_made:
                connection.leave()
            else:
                opening.cancel()
        await self._wait_for_all(_LEAVE_SECONDS)
        if self.connections:
            self.log.warning("remoting_cut_off", connections=len(self.connections))
        for connection in [one for one in self.connections if one.was_made]:
            connection.end()
        await self._wait_for_all(_ABORT_SECONDS)

    async def _wait_for_all(self, seconds: float) -> None:
        if self.connections:
            await asyncio.wait([connection.gone for connection in self.connections], timeout=seconds)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                peer, place = await loop.sock_accept(self._listening)
            except OSError as error:  # no descriptors: they wait in the kernel meanwhile
                self.log.warning("remoting_full", connections=len(self.connections), problem=str(error))
                await asyncio.sleep(self.limits.look_seconds)
                continue
            reason = self._refusal(place[0])
            if reason is not None:
                self.counts["refused"][reason] += 1
                peer.close()
                continue
            self.counts["connectionsTotal"] += 1
            connection = RemotingConnection(self, address_of(*place[:2]), address_of(*peer.getsockname()[:2]))
            self.connections[connection] = loop.create_task(self._open(connection, peer))

    def _refusal(self, host: str) -> str | None:
        if not self._access.admits(host):
            self.log.warning("remoting_not_allowed", peer=host, key="remoting_allow")
            return "allow"
        if len(self.connections) >= self._most:
            self.log.warning("remoting_full", connections=len(self.connections))
            return "full"
        return None

    async def _open(self, connection: RemotingConnection, peer: socket.socket) -> None:
        connection.gone.add_done_callback(lambda _: self._forget(connection))
        tls, seconds = self._access.tls, (self.limits.handshake_seconds, _SHUTDOWN_SECONDS)
        times = {} if tls is None else {"ssl_handshake_timeout": seconds[0], "ssl_shutdown_timeout": seconds[1]}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, peer, ssl=tls, **times)
        except (OSError, asyncio.CancelledError):  # gone already, or no TLS
            peer.close()
            if not connection.was_made:  # or it tells by itself that it has ended
                self.counts["refused"]["tls"] += tls is not None
                connection.gone.set_result(None)

    def _forget(self, connection: RemotingConnection) -> None:
        self.hold(connection, 0)
        del self.connections[connection]


def address_of(host: str, port: int) -> str:
    """``127.0.0.1:9577``; IPv6 in brackets, and an IPv4-mapped address as the IPv4 address that it is."""
    address = ip_of(host)
    return f"{address}:{port}" if address.version == 4 else f"[{address}]:{port}"


def connections_max(wanted: int, descriptors_each: int, log: Any) -> int:
    """So many of the ``wanted`` as there are descriptors for, once the process has taken all that it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    room = wanted if hard == resource.RLIM_INFINITY else (hard - _DESCRIPTORS_KEPT) // descriptors_each
    most = min(wanted, max(room, _CONNECTIONS_LEAST))
    if most < wanted:
        log.warning(
            "remoting_descriptors", connections_max=most, wanted=wanted, descriptors=hard, hint="raise LimitNOFILE"
        )
    return most


async def serve_remoting(
    config: Config,
    board: DaemonStatus,
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
        guards = {"signed": access.credentials is not None, "tls": access.tls is not None}
        log.warning("remoting_open", remoting=config.remoting.remoting, **guards, hint=_OPEN)
    limited = RateLimitedLog(log)
    queries = Queries(config, board, config.remoting.remoting_queries_max, load_key_queries)
    processor = RemotingProcessor(config, board, limited, access.credentials, queries, patience or Patience())
    try:
        await RemotingServer(config, board, limited, listening, processor, access, limits).run(stop, queries.stop)
    finally:
        if processor.forwarder is not None:
            processor.forwarder.dialer.close()
        queries.stop()
        # In another thread: a query may be under way, and it is waited for.
        left = await asyncio.to_thread(queries.close)
        if left:
            log.warning("queries_left_behind", queries=left)
