"""Connections to name servers and brokers: Link, one of them, and Dialer, which opens them.

What cannot be had is an UpstreamError, whose text says why; whoever asked decides what the client is told.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
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

OnRequest = Callable[[RemotingCommand], None]

# What the other side has not acknowledged for so long is lost, and the connection with it.
_USER_TIMEOUT_MS = 20_000
_KEEPALIVE_SECONDS = 15
_OPAQUE_MAX = 2**31 - 1
# At a stop: what was written may take so long to be sent.
_CLOSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Patience:
    """How long others are waited for, in seconds, and how much they may leave waiting, in bytes."""

    #: By a request that has another answer: RocketMQ's clients wait 3 s for most.
    short: float = 1.0
    #: By one that has none, connection included.
    answer: float = 60.0
    #: Requests that have another answer get that at once for so long after one got none.
    refused: float = 5.0
    #: After a connection that failed, others are told so at once.
    retry: float = 1.0
    #: The cluster is asked for again when what is known is older; while the broker is missing; when it did not answer.
    fresh: float = 5.0
    missing: float = 1.0
    anew: float = 0.5
    #: Requests that the other side does not take: beyond this further ones are refused.
    untaken_bytes: int = 32 << 20


class UpstreamError(Exception):
    """No answer from a name server or a broker; ``str``: why. ``is_lost``: the connection ended while it was waited."""

    def __init__(self, why: str, *, is_lost: bool = False) -> None:
        super().__init__(why)
        self.is_lost = is_lost


class Link(asyncio.Protocol):
    """One connection to a name server or a broker; ``Dialer.open`` makes one.

    A request goes out under an ``opaque`` of the link's and comes back under its own.
    """

    def __init__(self, address: str, dialer: Dialer, on_request: OnRequest | None) -> None:
        self.address = address
        self._dialer, self._on_request = dialer, on_request
        self._opaque = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[RemotingCommand]] = {}
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._why = "it closed the connection"
        #: Set when it is over.
        self.ended = asyncio.Event()

    def __repr__(self) -> str:
        return f"Link({self.address}, {'open' if self.is_open else 'closed'}, {len(self._waiting)} waiting)"

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        """The answer, under the request's own ``opaque``; UpstreamError if the connection ends before it comes."""
        opaque = next(self._opaque) & _OPAQUE_MAX
        waiting: asyncio.Future[RemotingCommand] = asyncio.get_running_loop().create_future()
        self._waiting[opaque] = waiting
        try:
            self._write(replace(command, opaque=opaque))
            answer = await waiting
        finally:
            self._waiting.pop(opaque, None)
        answer.opaque = command.opaque
        return answer

    def tell(self, command: RemotingCommand) -> None:
        """Send what gets no answer, a one-way request or a response; UpstreamError if it cannot be."""
        self._write(command if command.is_response else replace(command, opaque=next(self._opaque) & _OPAQUE_MAX))

    def fail(self, why: str) -> None:
        """End it at once; who waits is told ``why``."""
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """End it when what was written has been sent; nobody should wait for an answer any more."""
        self._why = "this daemon has closed the connection"
        if self._transport is not None:
            self._transport.close()

    def _write(self, command: RemotingCommand) -> None:
        transport, most = self._transport, self._dialer.patience.untaken_bytes
        if transport is None or transport.is_closing():
            raise UpstreamError(self._why, is_lost=True)
        if transport.get_write_buffer_size() > most:
            raise UpstreamError(f"it has not taken {most >> 20} MiB yet")
        try:
            transport.write(encode_command(command))
        except FrameError as error:
            raise UpstreamError(str(error)) from error

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open. A machine that goes away without a word is noticed within half a minute, not in hours."""
        self._transport = cast("asyncio.Transport", transport)
        peer: socket.socket = transport.get_extra_info("socket")
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS // 3)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
        self._dialer.links.add(self)
        if self._dialer.is_closed:
            self.fail("this daemon stops")

    def data_received(self, data: bytes) -> None:
        """Frames, whole or in part."""
        buffer, at = self._buffer, 0
        buffer += data
        try:
            while len(buffer) - at >= LENGTH_SIZE:
                begin = at + LENGTH_SIZE
                end = begin + frame_size(buffer, at, self._dialer.frame_max)
                if end > len(buffer):
                    break
                command, at = decode_command(buffer[begin:end]), end
                self._take(command)
        except FrameError as error:
            at = len(buffer)
            self.fail(f"what it sent is no answer: {error}")
        del buffer[:at]

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits is told."""
        self._dialer.links.discard(self)
        if exc is not None:
            self._why = _reason(exc)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(UpstreamError(self._why, is_lost=True))
        self._transport = None
        self.ended.set()

    def _take(self, command: RemotingCommand) -> None:
        if command.is_response:
            waiting = self._waiting.get(command.opaque)
            if waiting is not None and not waiting.done():
                waiting.set_result(command)
        elif self._on_request is not None:
            self._on_request(command)


class Dialer:
    """Opens connections, and remembers for a moment where none could be made."""

    def __init__(self, config: Config, patience: Patience) -> None:
        self.patience, self.timeout = patience, config.remoting.upstream_timeout
        self.frame_max = config.remoting.remoting_frame_max
        self.links: set[Link] = set()
        #: From then on no connection is made: who loses one asks for another.
        self.is_closed = False
        self._tls = read_upstream_tls(config)
        self._failures: dict[str, tuple[str, float, float]] = {}  # address: why, since (epoch), and until when

    async def open(self, address: str, on_request: OnRequest | None = None) -> Link:
        """A connection of the caller's, who closes it; ``on_request`` takes what the other side asks. UpstreamError."""
        if self.is_closed:
            raise UpstreamError("this daemon stops")
        why, since, until = self._failures.get(address, ("", time.time(), 0.0))
        if time.monotonic() >= until:
            try:
                link = await self._connect(address, on_request)
            except UpstreamError as error:
                why = str(error)
                self._failures[address] = why, since, time.monotonic() + self.patience.retry
            else:
                self._failures.pop(address, None)
                return link
        raise UpstreamError(f"{why}, since {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(since))}")

    async def close(self) -> None:
        """Close every connection, and see them closed."""
        self.is_closed = True
        for end in (Link.close, lambda link: link.fail("")):  # TLS has a word to say at the end, and may get no answer
            links = tuple(self.links)
            for link in links:
                end(link)
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    for link in links:
                        await link.ended.wait()

    async def _connect(self, address: str, on_request: OnRequest | None) -> Link:
        try:
            host, port = split_address(address)
            names: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls, "server_hostname": host}
            async with asyncio.timeout(self.timeout):
                _, link = await asyncio.get_running_loop().create_connection(
                    lambda: Link(address, self, on_request), host, port, **names
                )
        except TimeoutError:
            raise UpstreamError(f"no connection within {self.timeout:g} s") from None
        except (OSError, ValueError, OverflowError) as error:  # the last two: no host or port can be named so
            raise UpstreamError(_reason(error)) from error
        return link


def read_upstream_tls(config: Config) -> ssl.SSLContext | None:
    """What connections upstream are made with, if upstream_tls. UsageError if upstream_ca_file cannot be used.

    An authority that is given vouches for whatever bears its certificate, as RocketMQ's own clients have it, which call
    brokers by address. The system's authorities vouch for anybody, so that the name has to be right as well.
    """
    if not config.remoting.upstream_tls:
        return None
    path = config.remoting.upstream_ca_file
    try:
        tls = ssl.create_default_context(cafile=None if path is None else str(path))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot use {path} (upstream_ca_file): {_reason(error)}", "give certificates in PEM"
        ) from error
    tls.check_hostname = path is None
    return tls


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
