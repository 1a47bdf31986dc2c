"""The remoting server: accepts clients, reads their frames, writes the answers, and bounds what each may hold.

A frame has so many seconds from its first byte to its last, an answer so many to be taken, and who says nothing for
long is closed: each connection is looked at once a second. Requests run side by side; where too many are under way, or
answers are not taken, no more is read, and the client's own side of TCP fills. Who ends his side of the connection ends
it: so does RocketMQ's broker, and a client that has gone looks no different.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import struct
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from indexd.config import Config
from indexd.serve.board import Board
from indexd.serve.queries import Queries
from indexd.serve.remoting.access import Access, read_access
from indexd.serve.remoting.command import (
    HEADER_MASK,
    LENGTH_SIZE,
    FrameError,
    RemotingCommand,
    RequestCode,
    ResponseCode,
    decode_command,
    encode_command,
    frame_size,
)
from indexd.serve.remoting.forward import Patience
from indexd.serve.remoting.key_queries import load_key_queries
from indexd.serve.remoting.processor import RemotingProcessor

#: Why a client was not let in; why a connection was closed by us.
REFUSALS = ("allow", "full", "tls")
CLOSURES = ("bytes", "slow", "idle", "untaken", "memory")
#: The label of requests whose code has no name here: a client could make any number of them.
OTHER = "other"
#: Without an upstream no request needs more: the largest are signed queries, and the heartbeats of clients.
FRAME_MAX_ALONE = 1 << 20

# What a request holds while it runs beside its bytes: a task, and its header's fields as objects.
_TASK_SIZE, _FIELD_SIZE = 4096, 16
# The begin of what came that compiled code is given.
_COMPILED_SIZE = 1 << 16
# What TLS is given at once: it neither counts nor waits for what it passes on to the buffer below.
_TLS_SIZE = 1 << 16
# Smaller answers are weighed once a second only: the transport says stop at 64 KiB.
_WEIGHED_SIZE = 1 << 15
# All three, and what closing the queries takes, are less than the outlet is given (serve.server).
_LEAVE_SECONDS, _ABORT_SECONDS, _CLOSE_SECONDS = 1.5, 0.3, 0.5
_SHUTDOWN_SECONDS = 1.0
_ACCEPTED_AT_ONCE = 64
_LOG_SECONDS = 60.0
# Descriptors that indexing, queries and HTTP need beside the connections.
_DESCRIPTORS_KEPT = 512
_CONNECTIONS_LEAST = 16
# struct linger: closed at once, by a reset.
_RESET = struct.pack("ii", 1, 0)
_OPEN = (
    "give remoting_access_key with remoting_secret_key_file and TLS, or remoting_allow with the networks of your "
    "clients, or listen on 127.0.0.1"
)
_NAMES = {int(code): code.name for code in RequestCode}
_EMPTY = frozenset(
    {
        ResponseCode.QUERY_NOT_FOUND,
        ResponseCode.TOPIC_NOT_EXIST,
        ResponseCode.PULL_NOT_FOUND,
        ResponseCode.PULL_RETRY_IMMEDIATELY,
        ResponseCode.PULL_OFFSET_MOVED,
    }
)
_REFUSED = frozenset(
    {
        ResponseCode.NO_PERMISSION,
        ResponseCode.SYSTEM_BUSY,
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        ResponseCode.SERVICE_NOT_AVAILABLE,
    }
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take, in seconds and bytes."""

    #: Between two looks at each connection, and after a failure to accept one.
    look_seconds: float = 1.0
    accept_pause: float = 1.0
    #: Until TLS has begun, and until a client has sent its first frame; later the idle time-out counts.
    handshake_seconds: float = 5.0
    first_seconds: float = 30.0
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
        """As structlog's, with ``left_out``: such lines since the one before, where there were any."""
        now = time.monotonic()
        at, left_out = self._said.get(event, (-_LOG_SECONDS, 0))
        if now - at < _LOG_SECONDS:
            self._said[event] = (at, left_out + 1)
            return
        self._said[event] = (now, 0)
        if left_out:
            fields["left_out"] = left_out
        self._log.warning(event, **fields)


class RemotingCounts:
    """One for a server: it begins anew when the outlet does. Bytes are those of the protocol, without TLS."""

    def __init__(self) -> None:
        self.connections = 0
        self.connections_total = 0
        self.refused = dict.fromkeys(REFUSALS, 0)
        self.closed = dict.fromkeys(CLOSURES, 0)
        self.requests: Counter[tuple[str, str]] = Counter()
        self.received_bytes = 0
        self.sent_bytes = 0

    def ended(self, request: int, response: int | None, times: int = 1) -> None:
        """So many requests are over; ``response``: the code of their answers, None for one that gets none."""
        self.requests[_NAMES.get(request, OTHER), result_of(request, response)] += times

    def row(self, address: str) -> dict[str, Any]:
        """What the board shows: {"address": .., "requests": {"QUERY_MESSAGE": {"ok": 7}}, ...}; never changed later."""
        requests: dict[str, dict[str, int]] = {}
        for (code, result), count in sorted(self.requests.items()):
            requests.setdefault(code, {})[result] = count
        return {
            "address": address,
            "connections": self.connections,
            "connectionsTotal": self.connections_total,
            "refused": dict(self.refused),
            "closed": dict(self.closed),
            "requests": requests,
            "receivedBytes": self.received_bytes,
            "sentBytes": self.sent_bytes,
        }


def result_of(request: int, response: int | None) -> str:
    """ok, empty (nothing is there), refused (no right, busy, not supported, nobody behind us) or error."""
    if response is None or response == ResponseCode.SUCCESS:
        return "ok"
    # The broker too has no other code for an offset where no message is.
    if response in _EMPTY or (request, response) == (RequestCode.VIEW_MESSAGE_BY_ID, ResponseCode.SYSTEM_ERROR):
        return "empty"
    return "refused" if response in _REFUSED else "error"


class MemoryBudget:
    """What all connections hold together: requests, unfinished or under way, and answers that were not taken.

    Over budget, the connections that hold most are closed until a quarter of it is free.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.held = 0
        self.connections: set[Connection] = set()

    def hold(self, connection: Connection, size: int) -> None:
        """It holds so many bytes now."""
        has_grown = size > connection.held and not connection.is_closed
        self.held += size - connection.held
        connection.held = size
        if size or not connection.is_closed:
            self.connections.add(connection)
        else:
            self.connections.discard(connection)
        if has_grown and self.held > self._most:
            for one in sorted(self.connections, key=lambda one: one.held, reverse=True):
                if 4 * self.held <= 3 * self._most:
                    break
                one.end("memory")


class Connection(asyncio.Protocol):
    """One client: frames in, answers out. A ``forward.Client`` for the processor."""

    def __init__(self, server: RemotingServer, peer: str, local: str, *, is_tls: bool) -> None:
        self._server, self.peer, self.local, self._is_tls = server, peer, local, is_tls
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        #: The budget's.
        self.held = 0
        self.is_closed = self.was_made = False
        # What came of frames that have not begun to run; over TLS, what is not yet given to the transport.
        self._inflow = bytearray()
        self._outflow: deque[memoryview] = deque()
        # Under way: what each holds, and whether somebody waits for its answer.
        self._tasks: dict[asyncio.Task[None], tuple[int, bool]] = {}
        self._under_way = 0
        self._calls: list[Callable[[], None]] = []
        # The transport takes no more; we do not read; it is to end.
        self._is_paused = self._is_silent = self._is_leaving = self._has_asked = False
        self._written = self._taken = 0
        self._active_at = self._frame_at = self._taken_at = self._loop.time()

    def __repr__(self) -> str:
        return f"Connection({self.peer}, {len(self._tasks)} under way, {len(self._inflow)} bytes of a frame)"

    # --- asyncio's calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there, its TLS handshake done."""
        self._transport, self.was_made = cast("asyncio.Transport", transport), True
        self._weigh()

    def data_received(self, data: bytes) -> None:
        """Some bytes of frames."""
        self._server.counts.received_bytes += len(data)
        self._active_at = self._loop.time()
        if not self._inflow:
            self._frame_at = self._active_at
        if not self.is_closed:
            self._inflow += data
            self._take()

    def pause_writing(self) -> None:
        """It does not take its answers: nothing more is begun for it."""
        self._is_paused = True
        self._read_or_wait()

    def resume_writing(self) -> None:
        """It has taken some of them."""
        self._is_paused = False
        self._pour()
        if not self._is_stalled:
            self._take()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - it is gone, whatever the reason
        """It is gone. What nobody waits for goes on: a client may well leave behind a last one-way request."""
        self.is_closed = True
        self._transport = None
        self._inflow.clear()
        self._outflow.clear()
        for task, (_, is_awaited) in self._tasks.items():
            if is_awaited:
                task.cancel()
        self._weigh()
        self._call_back()

    # --- the processor's and the server's ---------------------------------------------------------------------------

    def send(self, command: RemotingCommand) -> None:
        """See ``forward.Client``."""
        try:
            self._write(encode_command(command))
        except FrameError as error:
            self._server.log.warning("remoting_failed", peer=self.peer, code=command.code, problem=str(error))

    def on_close(self, call: Callable[[], None]) -> None:
        """See ``forward.Client``."""
        self._calls.append(call)
        if self.is_closed and self._transport is None:
            self._call_back()

    def end(self, reason: str) -> None:
        """Close it at once, without a word, with all that it has left behind; ``reason``: one of CLOSURES."""
        if not self.is_closed:
            self._server.counts.closed[reason] += 1
        self.abort()
        self.is_closed = True
        self._inflow.clear()
        self._outflow.clear()
        self._server.memory.hold(self, 0)

    def abort(self) -> None:
        """Close it at once, and cancel its requests."""
        for task in self._tasks:
            task.cancel()
        if self._transport is not None:
            self._transport.abort()

    def leave(self) -> None:
        """Begin nothing more, and close when all that is under way is answered and taken."""
        self._is_leaving = True
        self._read_or_wait()
        self._close_if_done()

    def look(self, now: float) -> None:
        """Close it if its client takes too long over anything."""
        if self.is_closed or self._transport is None:
            return
        limits, untaken = self._server.limits, self._untaken()
        self._weigh()
        if untaken == 0 or self._written - untaken > self._taken:
            self._taken, self._taken_at = self._written - untaken, now
        if self._is_silent:  # no wonder that its frame does not grow
            self._frame_at = now
        frame_seconds = limits.frame_seconds + len(self._inflow) / limits.frame_bytes_per_second
        idle_seconds = self._server.idle_seconds
        patience = idle_seconds if self._has_asked else min(idle_seconds, limits.first_seconds)
        # Whether a client is still there cannot be seen where its bytes are not read.
        is_quiet = self._is_silent or (not self._tasks and untaken == 0)
        if now - self._taken_at > limits.untaken_seconds:
            self.end("untaken")
        elif self._inflow and now - self._frame_at > frame_seconds:
            self.end("slow")
        elif is_quiet and now - self._active_at > patience:
            self.end("idle")

    # --- frames in --------------------------------------------------------------------------------------------------

    @property
    def _is_stalled(self) -> bool:
        return self._is_paused or bool(self._outflow)

    def _is_full(self) -> bool:
        return (
            self.is_closed
            or self._is_stalled
            or self._is_leaving
            or len(self._tasks) >= self._server.under_way_max
            or self._under_way >= self._server.limits.under_way_bytes
        )

    def _take(self) -> None:
        # Begins what is whole and may begin; the rest stays.
        inflow, frame_max = self._inflow, self._server.frame_max
        at = self._answer_compiled()
        try:
            while len(inflow) - at >= LENGTH_SIZE and not self._is_full():
                begin = at + LENGTH_SIZE
                end = begin + frame_size(inflow, at, frame_max)
                if end > len(inflow):
                    break
                self._begin(inflow[begin:end])
                at = end
        except FrameError as error:
            self._server.log.warning("remoting_bytes", peer=self.peer, problem=str(error))
            self.end("bytes")
            return
        if at:
            del inflow[:at]
            self._has_asked, self._frame_at = True, self._active_at
        self._weigh()
        self._read_or_wait()

    def _answer_compiled(self) -> int:
        # How many bytes of the requests are answered so.
        if len(self._inflow) < LENGTH_SIZE or self._is_full():
            return 0
        data = bytes(memoryview(self._inflow)[:_COMPILED_SIZE])
        found = self._server.processor.answer_compiled(data, self._server.frame_max)
        if found is None:
            return 0
        self._server.counts.ended(found.request_code, found.response_code, found.requests)
        self._write(found.answers)
        return int(found.size)

    def _begin(self, frame: bytearray) -> None:
        command = decode_command(frame)
        size = _TASK_SIZE + len(frame) + _FIELD_SIZE * (int.from_bytes(frame[:LENGTH_SIZE], "big") & HEADER_MASK)
        task = self._loop.create_task(self._answer(command))
        self._tasks[task] = (size, not command.is_oneway and not command.is_response)
        task.add_done_callback(self._done)
        self._under_way += size

    async def _answer(self, command: RemotingCommand) -> None:
        data = b""
        try:
            answer = await self._server.processor.process(self, command)
            if answer is not None:
                data = encode_command(answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told, and the log
            self._server.log.warning("remoting_failed", peer=self.peer, code=command.code, problem=repr(error))
            answer = command.answer(ResponseCode.SYSTEM_ERROR, f"a defect of indexd: {type(error).__name__}")
            data = encode_command(answer)
        if command.is_response:
            return
        self._server.counts.ended(command.code, None if answer is None else answer.code)
        if data and not command.is_oneway:
            self._write(data)

    def _done(self, task: asyncio.Task[None]) -> None:
        size, _ = self._tasks.pop(task)
        self._under_way -= size
        if self._is_silent and not self.is_closed:
            self._take()
        else:
            self._weigh()
        self._close_if_done()

    def _read_or_wait(self) -> None:
        is_full = self._is_full()
        if is_full != self._is_silent and self._transport is not None and not self._transport.is_closing():
            self._is_silent = is_full
            if is_full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
                self._frame_at = self._loop.time()

    # --- answers out ------------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self.is_closed or self._transport is None or self._transport.is_closing():
            return
        self._active_at = self._loop.time()
        self._server.counts.sent_bytes += len(data)
        self._written += len(data)
        if self._is_tls:
            self._outflow.append(memoryview(data))
            self._pour()
        else:
            self._transport.write(data)
        if self._is_stalled or len(data) >= _WEIGHED_SIZE:
            self._read_or_wait()
            self._weigh()

    def _pour(self) -> None:
        while self._outflow and not self._is_paused and self._transport is not None:
            data = self._outflow.popleft()
            if len(data) > _TLS_SIZE:
                self._outflow.appendleft(data[_TLS_SIZE:])
                data = data[:_TLS_SIZE]
            self._transport.write(data)  # which may pause it
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_leaving and not self._tasks and not self._outflow and self._transport is not None:
            self._transport.close()

    def _untaken(self) -> int:
        # Over TLS it may be twice as much as TLS is given at once that is not seen.
        waiting = sum(map(len, self._outflow)) if self._outflow else 0
        return waiting if self._transport is None else waiting + self._transport.get_write_buffer_size()

    def _weigh(self) -> None:
        size = len(self._inflow) + self._under_way + self._untaken()
        if size != self.held or not size:
            self._server.memory.hold(self, size)

    def _call_back(self) -> None:
        while self._calls:
            try:
                self._calls.pop()()
            except Exception as error:  # noqa: BLE001 - the others are told as well
                self._server.log.warning("remoting_failed", peer=self.peer, problem=repr(error))


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
        self.processor, self.log, self.limits = processor, RateLimitedLog(log), limits or Limits()
        self.counts, self.memory = RemotingCounts(), MemoryBudget(self.limits.held_bytes)
        self.idle_seconds = remoting.remoting_idle_timeout
        self.frame_max = min(remoting.remoting_frame_max, FRAME_MAX_ALONE) if is_alone else remoting.remoting_frame_max
        self.under_way_max = self.limits.under_way if is_alone else self.limits.under_way_upstream
        self._board, self._access = board, access
        self._most = connections_max(remoting.remoting_connections_max, 1 if is_alone else 2, log)
        self._address = address_of(*listening.getsockname()[:2])
        self._listening = listening.dup()
        self._listening.setblocking(False)
        self._opening: set[asyncio.Task[None]] = set()
        self._is_over, self._is_empty = False, asyncio.Event()

    def __repr__(self) -> str:
        return f"RemotingServer({self._address}, {self.counts.connections} connections)"

    async def run(self, stop: asyncio.Event, on_stop: Callable[[], None]) -> None:
        """Until ``stop``; then ``on_stop`` is called, and connections end as what is under way of them ends."""
        loop = asyncio.get_running_loop()
        try:
            self._listen()
            while not stop.is_set():
                for connection in tuple(self.memory.connections):
                    connection.look(loop.time())
                self._show()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self.limits.look_seconds)
        finally:
            self._is_over = True
            loop.remove_reader(self._listening)
            self._listening.close()
            on_stop()
            await self._leave()
            self._show()

    def _show(self) -> None:
        upstream = self.processor.row()
        self._board.outlets["remoting"] = {**self.counts.row(self._address), "upstream": upstream}

    async def _leave(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in tuple(self.memory.connections):
            connection.leave()
        await self._wait_until_gone(_LEAVE_SECONDS)
        late = [connection for connection in self.memory.connections if not connection.is_closed]
        if late:
            self.log.warning("remoting_cut_off", connections=len(late))
        for connection in tuple(self.memory.connections):
            connection.abort()
        await self._wait_until_gone(_ABORT_SECONDS)

    async def _wait_until_gone(self, seconds: float) -> None:
        if self.counts.connections:
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
                self.log.warning("remoting_full", connections=self.counts.connections, problem=str(error))
                loop.remove_reader(self._listening)
                loop.call_later(self.limits.accept_pause, self._listen)
                return
            reason = self._refusal(place[0])
            if reason is not None:
                self.counts.refused[reason] += 1
                with contextlib.suppress(OSError):
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                peer.close()
                continue
            self.counts.connections += 1
            self.counts.connections_total += 1
            task = loop.create_task(self._open(peer, address_of(*place[:2])))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def _refusal(self, host: str) -> str | None:
        if not self._access.admits(host):
            self.log.warning("remoting_not_allowed", peer=host, key="remoting_allow")
            return "allow"
        if self.counts.connections >= self._most:
            self.log.warning("remoting_full", connections=self.counts.connections)
            return "full"
        return None

    async def _open(self, peer: socket.socket, name: str) -> None:
        tls, times, connection = self._access.tls, {}, None
        if tls is not None:
            times = {
                "ssl_handshake_timeout": self.limits.handshake_seconds,
                "ssl_shutdown_timeout": _SHUTDOWN_SECONDS,
            }
        try:
            peer.setblocking(False)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(self, name, address_of(*peer.getsockname()[:2]), is_tls=tls is not None)
            connection.on_close(self._release)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, peer, ssl=tls, **times)
        except (OSError, ssl.SSLError, asyncio.CancelledError):  # gone already, or no TLS
            peer.close()
            if connection is None or not connection.was_made:  # or it tells by itself that it has ended
                self.counts.refused["tls"] += tls is not None
                self._release()

    def _release(self) -> None:
        self.counts.connections -= 1
        if self.counts.connections == 0:
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
