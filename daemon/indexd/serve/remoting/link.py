"""Connections to name servers and brokers: Link, one of them, and LinkPool, those that are open or have failed.

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
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from indexd.config import Config, split_address
from indexd.errors import UsageError
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
        #: Set when it is over.
        self.ended = asyncio.Event()
        #: Called when it is over, however it ends.
        self.on_end: Callable[[], None] | None = None
        self._received = time.monotonic()
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


# After a connection that failed, others are told so at once for this long.
_RETRY_SECONDS = 1.0
# Connections to those that wait for a broker, after it was lost: so many are made at once.
_MENDED_AT_ONCE = 16
# At a stop: what was written may take so long to be sent.
_CLOSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """``timeout``: seconds for a connection to be there, TLS included; ``frame_max``: the largest frame, in bytes."""

    timeout: float
    frame_max: int
    tls: ssl.SSLContext | None


def read_link_settings(config: Config) -> LinkSettings:
    """UsageError if the authorities (upstream_ca_file) cannot be used.

    An authority that is given vouches for whatever bears its certificate, as RocketMQ's own clients have it, which call
    brokers by address. The system's authorities vouch for anybody, so that the name has to be right as well.
    """
    remoting, tls = config.remoting, None
    if remoting.upstream_tls:
        path = remoting.upstream_ca_file
        try:
            tls = ssl.create_default_context(cafile=None if path is None else str(path))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot use {path} (upstream_ca_file): {reason}", "give certificates in PEM") from error
        tls.check_hostname = path is None
    return LinkSettings(remoting.upstream_timeout, remoting.remoting_frame_max, tls)


@dataclass(frozen=True, slots=True)
class _Outage:
    why: str
    since: float  # seconds since the epoch
    again: float  # monotonic: when a connection is tried again


class LinkPool:
    """Opens connections, and remembers where none could be made; those that ``get`` opens are shared and stay open."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._links: dict[str, Link] = {}
        self._opening: dict[str, asyncio.Task[Link]] = {}
        self._outages: dict[str, _Outage] = {}
        self._trials: dict[str, asyncio.Lock] = {}
        #: Held by who makes a connection that no request waits for.
        self.mending = asyncio.Semaphore(_MENDED_AT_ONCE)
        #: Every link that is open, by its own end: a client that comes from there is ourselves.
        self.ends: dict[str, Link] = {}

    def __repr__(self) -> str:
        return f"LinkPool({len(self.ends)} links)"

    @property
    def timeout(self) -> float:
        """What a connection may take, in seconds."""
        return self._settings.timeout

    async def get(self, address: str) -> Link:
        """The shared connection; UpstreamError if there can be none now."""
        link = self._links.get(address)
        if link is not None and link.is_open:
            return link
        task = self._opening.get(address)
        if task is None:
            task = self._opening[address] = asyncio.create_task(self._share(address))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever waits may have gone
        return await asyncio.shield(task)

    async def open(self, address: str, on_request: OnRequest | None = None) -> Link:
        """A connection of the caller's own, who closes it; ``on_request`` takes what the other side asks.

        Where nobody answered before, one at a time tries, and the others wait for what becomes of it. UpstreamError.
        """
        if address in self._outages:
            async with self._trials.setdefault(address, asyncio.Lock()):
                outage = self._outages.get(address)
                if outage is not None and time.monotonic() < outage.again:
                    raise UpstreamError(f"{outage.why}, since {_clock(outage.since)}")
                if outage is not None:
                    return await self._connect_noted(address, on_request)
        return await self._connect_noted(address, on_request)

    def note(self, address: str, why: str, seconds: float = _RETRY_SECONDS) -> float:
        """Nobody answers there, for that reason: it is not tried again within ``seconds``. Since when (epoch, s)."""
        before = self._outages.get(address)
        since = time.time() if before is None else before.since
        self._outages[address] = _Outage(why, since, time.monotonic() + seconds)
        return since

    async def close(self) -> None:
        """Close every connection, those that were handed out too, and see them closed."""
        for task in self._opening.values():
            task.cancel()
        for end in (Link.close, Link.abort):  # TLS has a word to say at the end, and may not get an answer
            links = list(self.ends.values())
            for link in links:
                end(link)
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    for link in links:
                        await link.ended.wait()
        self._links.clear()

    async def _share(self, address: str) -> Link:
        try:
            link = self._links[address] = await self.open(address)
        finally:
            del self._opening[address]
        return link

    async def _connect_noted(self, address: str, on_request: OnRequest | None) -> Link:
        try:
            link = await self._connect(address, on_request)
        except UpstreamError as error:
            raise UpstreamError(f"{error}, since {_clock(self.note(address, str(error)))}") from error
        self._outages.pop(address, None)
        return link

    async def _connect(self, address: str, on_request: OnRequest | None) -> Link:
        settings = self._settings
        try:
            host, port = split_address(address)
            names: dict[str, Any] = {} if settings.tls is None else {"ssl": settings.tls, "server_hostname": host}
            async with asyncio.timeout(settings.timeout):
                _, link = await asyncio.get_running_loop().create_connection(
                    lambda: Link(address, self.ends, settings.frame_max, on_request), host, port, **names
                )
        except TimeoutError:
            raise UpstreamError(f"no connection within {settings.timeout:g} s") from None
        except (OSError, ValueError, OverflowError) as error:  # the last two: no host or port can be named so
            raise UpstreamError(reason_of(error)) from error
        return link


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
