"""Connections of the remoting server: reads frames, writes the answers, and bounds what each client may hold.

A frame has so many seconds from its first byte to its last, an answer so many to be taken, and who says nothing for
long is closed: each connection is looked at once a second. Requests run side by side; where too many are under way, or
answers are not taken, no more is read, and the client's own side of TCP fills. Who ends his side of the connection ends
it: so does RocketMQ's broker, and a client that has gone looks no different.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

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
from indexd.serve.remoting.processor import RemotingProcessor

#: Why a client was not let in; why a connection was closed by us.
REFUSALS = ("allow", "full", "tls")
CLOSURES = ("bytes", "slow", "idle", "untaken", "memory")
#: The label of requests whose code has no name here: a client could make any number of them.
OTHER = "other"
# What a request holds while it runs beside its bytes: a task, and its header's fields as objects.
_TASK_SIZE, _FIELD_SIZE = 4096, 16
# The begin of what came that compiled code is given.
_COMPILED_SIZE = 1 << 16
# What TLS is given at once: it neither counts nor waits for what it passes on to the buffer below.
_TLS_SIZE = 1 << 16
# Smaller answers are weighed once a second only: the transport says stop at 64 KiB.
_WEIGHED_SIZE = 1 << 15
_LOG_SECONDS = 60.0
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


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What all connections of a server share; ``idle_seconds``: without any sign of life."""

    processor: RemotingProcessor
    limits: Limits
    memory: MemoryBudget
    counts: RemotingCounts
    log: RateLimitedLog
    frame_max: int
    idle_seconds: float
    under_way_max: int


class Connection(asyncio.Protocol):
    """One client: frames in, answers out. A ``forward.Client`` for the processor."""

    def __init__(self, server: ServerContext, peer: str, local: str, *, is_tls: bool) -> None:
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
