"""Link: one connection to a name server or a broker, shared by many requests.

A request goes out under an ``opaque`` of its link's and comes back under its own. What cannot be had is an
UpstreamError, whose text says why; whoever asked decides what the client is told.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, cast

from indexd.serve.remoting.command import (
    LENGTH_SIZE,
    FrameError,
    RemotingCommand,
    decode_command,
    encode_command,
    frame_size,
)

# A request that ran out of time in this long a silence takes its connection along: nobody is there any more.
_SILENT_SECONDS = 30.0
# What the other side has not acknowledged for so long is lost, and the connection with it.
_USER_TIMEOUT_MS = 20_000
_KEEPALIVE_SECONDS = 15
# Requests that the other side does not take: beyond this further ones are refused.
_UNTAKEN_MAX = 32 << 20
_OPAQUE_MAX = 2**31 - 1

OnRequest = Callable[[RemotingCommand], None]


class UpstreamError(Exception):
    """No answer from a name server or a broker; ``str``: why. ``is_lost``: the connection ended while it was waited."""

    def __init__(self, why: str, *, is_lost: bool = False) -> None:
        super().__init__(why)
        self.is_lost = is_lost


class Link(asyncio.Protocol):
    """One connection, in the event loop's thread; ``LinkPool.open`` makes one."""

    def __init__(self, address: str, ends: dict[str, Link], frame_max: int, on_request: OnRequest | None) -> None:
        self.address = address
        #: Monotonic, seconds: when it was last asked.
        self.used = time.monotonic()
        #: Set when it is over.
        self.ended = asyncio.Event()
        #: Called when it is over, however it ends.
        self.on_end: Callable[[], None] | None = None
        self._received = self.used
        self._ends, self._end = ends, ""
        self._frame_max, self._on_request = frame_max, on_request
        self._opaque = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[RemotingCommand]] = {}
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._why = "it closed the connection"

    def __repr__(self) -> str:
        return f"Link({self.address}, {'open' if self.is_open else 'closed'}, {len(self._waiting)} waiting)"

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_idle(self) -> bool:
        """Nobody waits for an answer."""
        return not self._waiting

    async def ask(self, command: RemotingCommand, seconds: float) -> RemotingCommand:
        """The answer, under the request's own ``opaque``; UpstreamError if there is none within ``seconds``."""
        opaque = next(self._opaque) & _OPAQUE_MAX
        waiting: asyncio.Future[RemotingCommand] = asyncio.get_running_loop().create_future()
        self._waiting[opaque] = waiting
        began = time.monotonic()
        try:
            self._write(command, opaque)
            async with asyncio.timeout(seconds):
                answer = await waiting
        except TimeoutError:
            if time.monotonic() - max(began, self._received) >= _SILENT_SECONDS:
                self.fail(f"it has said nothing for {_SILENT_SECONDS:.0f} s")
            raise UpstreamError(f"no answer within {seconds:g} s") from None
        finally:
            self._waiting.pop(opaque, None)
        answer.opaque = command.opaque
        return answer

    def tell(self, command: RemotingCommand) -> None:
        """Send what gets no answer, a one-way request or a response; UpstreamError if it cannot be."""
        self._write(command, command.opaque if command.is_response else next(self._opaque) & _OPAQUE_MAX)

    def fail(self, why: str) -> None:
        """End it at once; who waits is told ``why``."""
        self._why = why
        self.abort()

    def abort(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End it when what was written has been sent; nobody should wait for an answer any more."""
        self._why = "this daemon has closed the connection"
        if self._transport is not None:
            self._transport.close()

    def _write(self, command: RemotingCommand, opaque: int) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            raise UpstreamError(self._why, is_lost=True)
        if transport.get_write_buffer_size() > _UNTAKEN_MAX:
            raise UpstreamError(f"it has not taken {_UNTAKEN_MAX >> 20} MiB yet")
        own, command.opaque = command.opaque, opaque
        try:
            frame = encode_command(command)
        except FrameError as error:
            raise UpstreamError(str(error)) from error
        finally:
            command.opaque = own
        self.used = time.monotonic()
        transport.write(frame)

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        self._transport = cast("asyncio.Transport", transport)
        _watch(transport.get_extra_info("socket"))
        self._end = end_of(transport.get_extra_info("sockname"))
        self._ends[self._end] = self

    def data_received(self, data: bytes) -> None:
        """Frames, whole or in part."""
        self._received = time.monotonic()
        buffer, at = self._buffer, 0
        buffer += data
        try:
            while len(buffer) - at >= LENGTH_SIZE:
                begin = at + LENGTH_SIZE
                end = begin + frame_size(buffer, at, self._frame_max)
                if end > len(buffer):
                    break
                with memoryview(buffer)[begin:end] as frame:
                    command = decode_command(frame)
                at = end
                self._take(command)
        except FrameError as error:
            buffer.clear()
            self.fail(f"what it sent is no answer: {error}")
            return
        del buffer[:at]

    def connection_lost(self, error: Exception | None) -> None:
        """Whoever waits is told."""
        if self._ends.get(self._end) is self:
            del self._ends[self._end]
        if error is not None:
            self._why = reason_of(error)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(UpstreamError(self._why, is_lost=True))
        self._waiting.clear()
        self._transport = None
        self.ended.set()
        if self.on_end is not None:
            self.on_end()

    def _take(self, command: RemotingCommand) -> None:
        if command.is_response:
            waiting = self._waiting.get(command.opaque)
            if waiting is not None and not waiting.done():
                waiting.set_result(command)
        elif self._on_request is not None:
            self._on_request(command)


def end_of(name: Any) -> str:
    """A socket's name as text, as ``Client.peer`` writes it."""
    host, port = name[0], name[1]
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _watch(peer: socket.socket) -> None:
    # A machine that went away without a word is noticed within half a minute, not in hours.
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS // 3)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)


def reason_of(error: Exception) -> str:
    """Why, in as few words as the system has for it."""
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
