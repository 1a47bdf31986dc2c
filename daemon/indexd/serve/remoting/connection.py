"""Connection: reads frames of one client, writes the answers, and bounds what the client may keep waiting.

Inflow holds bytes that are no whole frame yet; Outflow writes, and knows whether the client takes its answers.

A frame has so many seconds from its first byte to its last, an answer so many to be taken, and who says nothing for
long is closed: each connection is looked at once a second. Requests run side by side; where too many are under way, or
answers are not taken, no more is read, and the client's own side of TCP fills. Who ends his side of the connection ends
it: so does RocketMQ's broker, and a client that has gone looks no different.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

from indexd.serve.remoting.command import (
    LENGTH_SIZE,
    FrameError,
    RemotingCommand,
    ResponseCode,
    decode_command,
    encode_command,
    frame_size,
)
from indexd.serve.remoting.context import ServerContext, weight_of

# What is copied rather than kept where it can grow.
_SMALL_SIZE = 1 << 14


class Inflow:
    """Most of the time what comes is whole frames, and nothing is left of it."""

    def __init__(self) -> None:
        self._data: bytes | bytearray = b""
        self._at = 0

    def __len__(self) -> int:
        """Bytes that are not taken."""
        return len(self._data) - self._at

    def add(self, data: bytes) -> None:
        """More of them."""
        if not self._data:
            self._data = data
        elif len(self._data) <= _SMALL_SIZE:
            self._data = bytes(self._data) + data
        else:
            self._data = self._data if isinstance(self._data, bytearray) else bytearray(self._data)
            self._data += data

    @property
    def fresh(self) -> bytes:
        """All that has come, from the begin of a frame on; nothing where a large frame grows."""
        return self._data if self._at == 0 and isinstance(self._data, bytes) else b""

    def skip(self, size: int) -> None:
        """So many bytes of it are taken."""
        self._at += size

    def take(self, size_max: int) -> bytes | bytearray | None:
        """The next frame without its length field; None until it is whole. FrameError if there can be none."""
        data, at = self._data, self._at
        if len(data) - at < LENGTH_SIZE:
            return None
        begin = at + LENGTH_SIZE
        behind = begin + frame_size(data, at, size_max)
        if behind > len(data):
            return None
        self._at = behind
        return data[begin:behind]

    def drop_taken(self) -> bool:
        """Give back the memory of what was taken, all at once; whether anything was."""
        at, self._at = self._at, 0
        if at == len(self._data):
            self._data = b""
        elif len(self._data) - at <= _SMALL_SIZE:
            self._data = bytes(self._data[at:])
        elif isinstance(self._data, bytearray):
            del self._data[:at]
        elif at:
            self._data = bytearray(self._data[at:])
        return at > 0

    def clear(self) -> None:
        """None of it is wanted."""
        self._data, self._at = b"", 0


#: Without a byte of an answer being taken.
UNTAKEN_SECONDS = 60.0
# What TLS is given at once. It passes all of that on to a buffer below, which it neither counts nor waits for; only
# what comes while that one is full is counted, and said to be too much.
_TLS_SIZE = 1 << 16


class Outflow:
    """Over one transport. Bytes for TLS wait here until it takes more; ``on_resume``: answers are taken again."""

    def __init__(self, transport: asyncio.Transport, *, is_tls: bool, on_resume: Callable[[], None]) -> None:
        self._transport, self._is_tls, self._on_resume = transport, is_tls, on_resume
        self._waiting: deque[memoryview] = deque()
        self._waiting_size = 0
        self._is_paused = self._is_ending = False
        self._written = self._taken = 0
        self._taken_at = asyncio.get_running_loop().time()

    @property
    def is_stalled(self) -> bool:
        """Whether what was written has to be taken before more is."""
        return self._is_paused or bool(self._waiting)

    def write(self, data: bytes) -> None:
        """It leaves as the client takes it."""
        self._written += len(data)
        if not self._is_tls or (len(data) <= _TLS_SIZE and not self.is_stalled):
            self._transport.write(data)
            return
        self._waiting.append(memoryview(data))
        self._waiting_size += len(data)
        self._pour()

    def weigh(self) -> int:
        """Bytes that were not taken; over TLS it may be twice as much as TLS is given at once that is not seen."""
        return self._waiting_size + self._transport.get_write_buffer_size()

    def set_paused(self, is_paused: bool) -> None:
        """As the transport says."""
        self._is_paused = is_paused
        self._pour()
        if not is_paused and not self.is_stalled:
            self._on_resume()

    def is_stuck(self, now: float, untaken: int) -> bool:
        """Whether nothing of ``untaken`` bytes was taken for long, by looks that come every second or so."""
        taken = self._written - untaken
        if untaken == 0 or taken > self._taken:
            self._taken, self._taken_at = taken, now
        return now - self._taken_at > UNTAKEN_SECONDS

    def close(self) -> None:
        """Close when all is taken."""
        self._is_ending = True
        self._pour()

    def _pour(self) -> None:
        while self._waiting and not self._is_paused:
            data = self._waiting.popleft()
            if len(data) > _TLS_SIZE:
                self._waiting.appendleft(data[_TLS_SIZE:])
                data = data[:_TLS_SIZE]
            self._waiting_size -= len(data)
            self._transport.write(data)  # which may pause it
        if self._is_ending and not self._waiting:
            self._transport.close()


#: What the requests that run at once for one connection may hold together.
UNDER_WAY_BYTES_MAX = 32 << 20
#: For a whole frame, and one second more for each so many bytes of it that have come.
FRAME_SECONDS, FRAME_BYTES_PER_SECOND = 10.0, 1 << 18
#: Until a client has sent its first whole frame; later the idle time-out counts.
FIRST_SECONDS = 30.0
# Smaller answers are weighed once a second only: the transport says stop at 64 KiB.
_WEIGHED_SIZE = 1 << 15


class Connection(asyncio.Protocol):
    """One client; ``context.Client`` is what the processor sees of it, ``context.Measured`` what the budget does."""

    def __init__(self, context: ServerContext, peer: str, local: str, *, is_tls: bool) -> None:
        self._context, self.peer, self.local, self._is_tls = context, peer, local, is_tls
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._outflow: Outflow | None = None
        #: The budget's: bytes of requests, and of answers that were not taken.
        self.held = self.untaken = 0
        self.is_closed = self.was_made = False
        # What came of frames that have not begun to run.
        self._inflow = Inflow()
        # Under way: what each holds, and whether somebody waits for its answer.
        self._tasks: dict[asyncio.Task[None], tuple[int, bool]] = {}
        self._under_way = 0
        self._calls: list[Callable[[], None]] = []
        self._is_silent = self._is_leaving = False  # we do not read; it is to end
        # Whether anything moved since the last look, and when it did; when the unfinished frame began.
        self._is_fresh, self._has_asked = True, False
        self._active_at = self._frame_at = self._loop.time()

    def __repr__(self) -> str:
        return f"Connection({self.peer}, {len(self._tasks)} under way, {len(self._inflow)} bytes of a frame)"

    # --- asyncio's calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there, its TLS handshake done."""
        self._transport, self.was_made = cast("asyncio.Transport", transport), True
        self._outflow = Outflow(self._transport, is_tls=self._is_tls, on_resume=self._resume)
        self._context.memory.enter(self)

    def data_received(self, data: bytes) -> None:
        """Some bytes of frames."""
        self._is_fresh = True
        self._context.counts.received_bytes += len(data)
        if not self.is_closed:
            before = len(self._inflow)
            self._inflow.add(data)
            self._take(before)

    def pause_writing(self) -> None:
        """It does not take its answers: nothing more is begun for it."""
        if self._outflow is not None:
            self._outflow.set_paused(True)
            self._read_or_wait()

    def resume_writing(self) -> None:
        """It has taken some of them."""
        if self._outflow is not None:
            self._outflow.set_paused(False)

    def _resume(self) -> None:
        self._weigh()
        self._take(len(self._inflow))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - it is gone, whatever the reason
        """It is gone. What nobody waits for goes on: a client may well leave behind a last one-way request."""
        self.is_closed = True
        memory = self._context.memory
        memory.leave(self)
        memory.hold(self, -len(self._inflow))
        self._inflow.clear()
        for task, (_, is_awaited) in self._tasks.items():
            if is_awaited or memory.is_tight:
                task.cancel()
        self._transport = self._outflow = None
        self._call_back()

    def send(self, command: RemotingCommand) -> None:
        """See ``context.Client``."""
        if self.is_closed:
            return
        try:
            self._write(encode_command(command))
        except FrameError as error:
            self._context.log.warning("remoting_failed", peer=self.peer, code=command.code, problem=str(error))

    def on_close(self, call: Callable[[], None]) -> None:
        """See ``context.Client``."""
        self._calls.append(call)
        if self.is_closed and self._transport is None:
            self._call_back()

    def _call_back(self) -> None:
        while self._calls:
            try:
                self._calls.pop()()
            except Exception as error:  # noqa: BLE001 - the others are told as well
                self._context.log.warning("remoting_failed", peer=self.peer, problem=repr(error))

    def weigh(self) -> int:
        """Bytes of answers that it has not taken."""
        return 0 if self._outflow is None else self._outflow.weigh()

    def end(self, reason: str) -> None:
        """Close it at once, without a word; ``reason`` is one of ``context.CLOSURES``."""
        if not self.is_closed and self._transport is not None:
            self.is_closed = True
            self._context.counts.closed[reason] += 1
            self._transport.abort()

    def leave(self) -> None:
        """Begin nothing more, and close when all that is under way is answered and taken."""
        self._is_leaving = True
        self._read_or_wait()
        self._close_if_done()

    def abort(self) -> None:
        """Close it at a stop that has waited long enough, with all that it has left behind."""
        for task in self._tasks:
            task.cancel()
        if self._transport is not None:
            self._transport.abort()

    def look(self, now: float) -> None:
        """Close it if its client takes too long over anything."""
        if self.is_closed or self._outflow is None:
            return
        if self._is_fresh:
            self._is_fresh, self._active_at = False, now
        untaken = self._weigh()
        if self._outflow.is_stuck(now, untaken):
            self.end("untaken")
        if self._is_silent:  # no wonder that its frame does not grow
            self._frame_at = now
        elif self._inflow and now - self._frame_at > FRAME_SECONDS + len(self._inflow) / FRAME_BYTES_PER_SECOND:
            self.end("slow")
        patience = self._context.idle_seconds if self._has_asked else min(self._context.idle_seconds, FIRST_SECONDS)
        # Whether a client is still there cannot be seen where its bytes are not read.
        is_quiet = self._is_silent or (not self._tasks and untaken == 0)
        if is_quiet and now - self._active_at > patience:
            self.end("idle")

    def _weigh(self) -> int:
        untaken = self.weigh()
        if untaken != self.untaken:
            self._context.memory.keep(self, untaken)
        return untaken

    # --- frames in --------------------------------------------------------------------------------------------------

    def _is_full(self) -> bool:
        return (
            self._outflow is None
            or self._outflow.is_stalled
            or self._is_leaving
            or len(self._tasks) >= self._context.under_way_max
            or self._under_way >= UNDER_WAY_BYTES_MAX
        )

    def _take(self, held: int) -> None:
        # Begin what is whole and may begin; keep the rest, of which the budget knows ``held`` bytes.
        inflow, frame_max = self._inflow, self._context.frame_max
        self._answer_together()
        try:
            while inflow and not self.is_closed and not self._is_full():
                frame = inflow.take(frame_max)
                if frame is None:
                    break
                self._begin(frame)
        except FrameError as error:
            self._context.log.warning("remoting_bytes", peer=self.peer, problem=str(error))
            self.end("bytes")
        has_taken = inflow.drop_taken()
        self._has_asked |= has_taken
        left = len(inflow)
        if left and (has_taken or not held):  # another frame has begun
            self._frame_at = self._loop.time()
        if left != held:
            self._context.memory.hold(self, left - held)
        self._read_or_wait()

    def _answer_together(self) -> None:
        fresh = b"" if self.is_closed or self._is_full() else self._inflow.fresh
        done = self._context.processor.process_together(fresh, self._context.frame_max)
        if done is not None:
            self._inflow.skip(done.size)
            self._context.counts.ended(done.request_code, done.response_code, done.requests)
            self._write(done.answers)

    def _begin(self, frame: bytes | bytearray) -> None:
        command = decode_command(frame)
        size = weight_of(frame)
        task = self._loop.create_task(self._answer(command))
        self._tasks[task] = (size, not command.is_oneway and not command.is_response)
        task.add_done_callback(self._done)
        self._under_way += size
        self._context.memory.hold(self, size)

    def _read_or_wait(self) -> None:
        is_full = self._is_full()
        if is_full != self._is_silent and self._transport is not None and not self._transport.is_closing():
            self._is_silent = is_full
            if is_full:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()
                self._frame_at = self._loop.time()

    async def _answer(self, command: RemotingCommand) -> None:
        data = b""
        try:
            answer = await self._context.processor.process(self, command)
            if answer is not None:
                data = encode_command(answer)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told, and the log
            self._context.log.warning("remoting_failed", peer=self.peer, code=command.code, problem=repr(error))
            answer = command.answer(ResponseCode.SYSTEM_ERROR, "a defect: the daemon's log says more")
            data = encode_command(answer)
        if command.is_response:
            return
        self._context.counts.ended(command.code, None if answer is None else answer.code)
        if data and not command.is_oneway:
            self._write(data)

    def _done(self, task: asyncio.Task[None]) -> None:
        size, _ = self._tasks.pop(task)
        self._under_way -= size
        self._context.memory.hold(self, -size)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._context.log.warning("remoting_failed", peer=self.peer, problem=repr(error))
        if self._is_silent and not self.is_closed:
            self._take(len(self._inflow))
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_leaving and not self._tasks and self._outflow is not None:
            self._outflow.close()

    def _write(self, data: bytes) -> None:
        if self.is_closed or self._transport is None or self._outflow is None or self._transport.is_closing():
            return
        self._is_fresh = True
        self._context.counts.sent_bytes += len(data)
        self._outflow.write(data)
        if self._outflow.is_stalled:
            self._read_or_wait()
            self._weigh()
        elif len(data) >= _WEIGHED_SIZE:
            self._weigh()
