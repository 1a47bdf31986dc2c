"""Passes requests on to a name server or the broker and brings the answers back; finds out where the broker is.

The broker knows a client by its connection: it sends rebalancing, transaction checks and late answers there. So each
client has a connection of its own to the broker, which ends with its own; what the broker asks there goes to the
client, and what the client answers back. Name servers are asked over one connection for all.

What goes on differs from what came by its ``opaque`` and by its remark, which holds the mark by which a circle of
daemons is noticed: RocketMQ's requests have none, and no signature covers it.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

from indexd.config import Config, split_address
from indexd.config.serving import is_peer
from indexd.config.units import printable, shown
from indexd.errors import UsageError
from indexd.serve.remoting.access import ACCESS_KEY, SIGNATURE, Credentials
from indexd.serve.remoting.command import (
    NAME_SERVER_CODES,
    VERSION,
    FrameError,
    RemotingCommand,
    RequestCode,
    ResponseCode,
    encode_command,
    take_command,
)
from indexd.serve.remoting.routes import BrokerPlace, Json, find_place, own_place, read_json

OnRequest = Callable[[RemotingCommand], None]
Locate = Callable[[bool], Awaitable[str]]

_SHOWN_MAX = 300
IN_A_CIRCLE = "upstream_namesrv of this indexd leads back to it"
_CIRCLE_HINT = "upstream_namesrv or the broker's address leads back here, perhaps by another indexd: give the real ones"
# What the other side has not acknowledged for so long is lost, and the connection with it.
_SOCKET_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
)
_OPAQUE_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Patience:
    """How long others are waited for, in seconds, and how much they may leave waiting, in bytes."""

    #: By a request that has another answer: RocketMQ's clients wait 3 s for most.
    short: float = 1.0
    #: By one that has none, such as a pull that the broker holds.
    answer: float = 600.0
    #: The cluster is asked for again when what is known is older.
    fresh: float = 1.0
    #: Requests that the other side does not take: beyond so many bytes further ones are refused.
    untaken_bytes: int = 32 << 20


class UpstreamError(Exception):
    """No answer from a name server or a broker; ``str``: why."""


class Client(Protocol):
    """One connection, in the event loop's thread.

    ``peer``: who it is, ``127.0.0.1:53122``; ``local``: our address as this client has reached it. ``gone`` is done
    when the connection has ended, however it ended, and none of its requests is under way.
    """

    peer: str
    local: str
    gone: asyncio.Future[None]

    def send(self, command: RemotingCommand) -> None:
        """A request to the client; dropped when it is closed."""


class Link(asyncio.Protocol):
    """One connection to a name server or a broker; ``Dialer.open`` makes one.

    A request goes out under an ``opaque`` of the link's and comes back under its own.
    """

    _transport: asyncio.Transport

    def __init__(self, address: str, dialer: Dialer, on_request: OnRequest | None) -> None:
        self.address, self._dialer, self._on_request = address, dialer, on_request
        self._opaque = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[RemotingCommand]] = {}
        self._buffer = bytearray()
        self._why = "it closed the connection"

    @property
    def is_open(self) -> bool:
        """Whether a request may be sent."""
        return not self._transport.is_closing()

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        """The answer, under the request's own ``opaque``; UpstreamError if the connection ends before it comes."""
        opaque = next(self._opaque) & _OPAQUE_MAX
        self._waiting[opaque] = asyncio.get_running_loop().create_future()
        try:
            self.tell(replace(command, opaque=opaque))
            return replace(await self._waiting[opaque], opaque=command.opaque)
        finally:
            del self._waiting[opaque]

    def tell(self, command: RemotingCommand) -> None:
        """Send it, under its own ``opaque``; UpstreamError if it cannot be."""
        if not self.is_open:
            raise UpstreamError(self._why)
        most = self._dialer.patience.untaken_bytes
        if self._transport.get_write_buffer_size() > most:
            raise UpstreamError(f"it has not taken {most >> 20} MiB yet")
        self._transport.write(encode_command(command))

    def close(self) -> None:
        """End it when what was written has been sent."""
        self._why = "this daemon has closed the connection"
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open. A machine that goes away without a word is noticed within half a minute, not in hours."""
        self._transport = cast("asyncio.Transport", transport)
        peer: socket.socket = transport.get_extra_info("socket")
        for option in _SOCKET_OPTIONS:
            peer.setsockopt(*option)
        self._dialer.links.add(self)

    def data_received(self, data: bytes) -> None:
        """Frames, whole or in part."""
        self._buffer += data
        try:
            while (command := take_command(self._buffer, self._dialer.frame_max)) is not None:
                if not command.is_response:
                    if self._on_request is not None:
                        self._on_request(command)
                elif (waiting := self._waiting.get(command.opaque)) is not None and not waiting.done():
                    waiting.set_result(command)
        except FrameError as error:
            self._why = f"what it sent is no answer: {error}"
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Whoever waits is told."""
        self._dialer.links.discard(self)
        if exc is not None:
            self._why = _reason(exc)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(UpstreamError(self._why))


class Dialer:
    """Opens connections as the configuration has it, and knows those that are open."""

    def __init__(self, config: Config, patience: Patience) -> None:
        self.patience, self.timeout = patience, config.remoting.upstream_timeout
        self.frame_max = config.remoting.remoting_frame_max
        self.links: set[Link] = set()
        self._tls = read_upstream_tls(config)

    async def open(self, address: str, on_request: OnRequest | None) -> Link:
        """A connection of the caller's, who closes it; ``on_request`` takes what the other side asks. UpstreamError."""
        host, port = split_address(address)
        try:
            async with asyncio.timeout(self.timeout):
                _, link = await asyncio.get_running_loop().create_connection(
                    lambda: Link(address, self, on_request),
                    host,
                    port,
                    ssl=self._tls,
                    server_hostname=None if self._tls is None else host,
                )
        except TimeoutError:
            raise UpstreamError(f"no connection within {self.timeout:g} s") from None
        except OSError as error:
            raise UpstreamError(_reason(error)) from error
        return link

    def close(self) -> None:
        """Close every connection when what was written has been sent."""
        for link in self.links:
            link.close()


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


class Channel:
    """A connection that is made when it is first asked for something, and again when it is after that has ended.

    ``locate`` gives its address; with ``anew`` another one perhaps, since nobody answers at the first. ``name``: whose.
    """

    def __init__(
        self, name: str, dialer: Dialer, locate: Locate, on_request: OnRequest | None = None, address: str | None = None
    ) -> None:
        self._name, self._dialer, self._locate, self._on_request = name, dialer, locate, on_request
        self._lock = asyncio.Lock()  # requests keep their order while the connection is made
        self.link: Link | None = None
        self.address = address

    async def ask(self, command: RemotingCommand, seconds: float) -> RemotingCommand | None:
        """The other side's answer, None to a one-way request; UpstreamError, whose text names it."""
        try:
            async with asyncio.timeout(seconds):
                async with self._lock:
                    link = await self._open()
                # Sent before anything else happens in the loop.
                if not command.is_oneway:
                    return await link.ask(command)
            link.tell(command)
        except (TimeoutError, UpstreamError) as error:
            problem = str(error) or f"no answer within {seconds:.2g} s"
            place = "" if self.address is None else f" at {self.address}"
            raise UpstreamError(f"the {self._name}{place} does not answer: {problem}") from None
        return None

    def leave(self) -> None:
        """Nobody asks any more: the connection ends when the last one-way requests are sent."""
        if self.link is not None:
            self.link.close()

    async def _open(self) -> Link:
        address = await self._locate(False)
        if self.link is not None and self.link.is_open and self.link.address == address:
            return self.link
        self.leave()  # another broker is the master now
        self.address = address
        try:
            self.link = await self._dialer.open(address, self._on_request)
        except UpstreamError:
            self.address = await self._locate(True)
            if self.address == address:
                raise
            self.link = await self._dialer.open(self.address, self._on_request)
        return self.link


async def _stay(address: str, _: bool) -> str:
    return address


class NameServers:
    """Asked in turn, the one that answered last first, over one connection each; by their word, where the broker is.

    What was found last holds until something newer is said: a name server may have forgotten everything. ``mark`` is
    in the headers of our own requests.
    """

    def __init__(self, config: Config, dialer: Dialer, credentials: Credentials | None, log: Any, mark: str) -> None:
        self._config, self._fresh, self._credentials = config, dialer.patience.fresh, credentials
        self._log, self._mark, addresses = log, mark, config.remoting.upstream_namesrv
        self._channels = [Channel("name server", dialer, partial(_stay, one), address=one) for one in addresses]
        #: The broker as found last, and why nothing was.
        self.broker: BrokerPlace | None = None
        self.problem = "nobody was asked yet"
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    @property
    def address(self) -> str | None:
        """Of the one that answered last."""
        return self._channels[0].address

    async def ask(self, command: RemotingCommand, seconds: float) -> RemotingCommand:
        """The first answer that comes; UpstreamError names all of them. Each has an equal part of ``seconds``."""
        problems = []
        for channel in tuple(self._channels):
            try:
                answer = await channel.ask(command, seconds / len(self._channels))
            except UpstreamError as error:
                problems.append(str(error))
                continue
            assert answer is not None  # only one-way requests get none
            self._channels.sort(key=lambda one: one is not channel)
            return answer
        raise UpstreamError("; ".join(problems))

    async def look(self, *, anew: bool = False, within: float | None = None) -> BrokerPlace | None:
        """Where the broker is, as known now; None: none of theirs is known to be ours (``problem``).

        A name server is waited for, ``within`` seconds, before the first answer, and ``anew``: nobody answers there.
        """
        if self._asking is None and (anew or time.monotonic() - self._asked_at >= self._fresh):
            self._asking = asyncio.create_task(self._look())
        if self._asking is not None and (anew or self.broker is None):
            await asyncio.wait([self._asking], timeout=within)
        return self.broker

    async def locate(self, anew: bool) -> str:
        """Where requests for the broker go: broker_address, else what was found; UpstreamError if nobody knows."""
        if self._config.node.broker_address is not None:
            return self._config.node.broker_address
        place = await self.look(anew=anew)
        if place is None or place.address is None:
            raise UpstreamError(f"where it is is not known: {self.problem}")
        if not is_peer(place.address):
            given = shown(place.address)
            raise UpstreamError(f"the name server's {given} is no address: correct brokerIP1, or give broker_address")
        return place.address

    async def _look(self) -> None:
        self._asked_at = time.monotonic()
        # One of our own, signed if we want signatures: whoever is asked may want them, too.
        request = RemotingCommand(
            RequestCode.GET_BROKER_CLUSTER_INFO, 0, language="JAVA", version=VERSION, remark=self._mark
        )
        if self._credentials is not None:
            request.ext_fields[ACCESS_KEY] = self._credentials.access_key
            request.ext_fields[SIGNATURE] = self._credentials.signature(request)
        try:
            answer = await self.ask(request, self._config.remoting.upstream_timeout)
            if answer.code != ResponseCode.SUCCESS:
                raise ValueError(f"code {answer.code}, {shown(answer.remark, _SHOWN_MAX)}")
            self._find(read_json(answer.body))
        except UpstreamError as error:
            self.problem = str(error)
        except ValueError as error:
            self.problem = f"the name server at {self.address} gave no cluster: {error}"
        finally:
            self._asking = None

    def _find(self, cluster: Json) -> None:
        found, own = find_place(cluster, self._config, self.broker), own_place(self._config)
        if found is None:
            names = ", ".join(sorted(cluster["brokerAddrTable"])) or "none"
            known = f"the name server knows these brokers: {printable(names[:_SHOWN_MAX])}"
            self.problem = f"{known}; ours is {own.name} (node_id, brokerName)"
            if self.broker is not None:
                found = replace(self.broker, is_registered=False)
            elif self._config.node.node_id is not None:
                found = own
            else:
                self._log.warning(
                    "upstream_unknown", problem=self.problem, hint="give node_id, the broker's brokerName"
                )
        self.broker = found


class Forwarder:
    """One for an outlet with upstream_namesrv. UsageError if its certificates cannot be used.

    ``mark``: what this process is known by among those that pass requests on, a word of its own.
    """

    def __init__(
        self, config: Config, log: Any, credentials: Credentials | None, mark: str, patience: Patience
    ) -> None:
        self.patience, self._log, self._mark = patience, log, mark
        #: Of its connections.
        self.dialer = Dialer(config, self.patience)
        self.names = NameServers(config, self.dialer, credentials, log, mark)
        self._channels: dict[Client, Channel] = {}
        self._counts = {"forwarded": 0, "failed": 0, "dropped": 0}

    def row(self) -> dict[str, Any]:
        """For the board: where to, how many connections, and what became of requests (counters)."""
        broker = None if self.names.broker is None else self.names.broker.address
        links = len(self.dialer.links)
        return {"nameServer": self.names.address, "broker": broker, "links": links, **self._counts}

    def has_been_here(self, command: RemotingCommand) -> bool:
        """Whether a request comes back that we have forwarded; if not, it is marked."""
        marks = (command.remark or "").split()
        if self._mark in marks:
            self._log.warning("upstream_circle", code=command.code, hint=_CIRCLE_HINT)
            return True
        command.remark = " ".join([*marks, self._mark])
        return False

    def not_answered(self, client: Client, command: RemotingCommand, problem: str) -> RemotingCommand:
        """What the client is told of a request that ``ask`` got no answer to; of a one-way one the log tells."""
        if command.is_oneway:
            self._counts["dropped"] += 1
            self._log.warning("upstream_dropped", peer=client.peer, code=command.code, problem=problem)
        return command.answer(ResponseCode.SERVICE_NOT_AVAILABLE, problem)

    async def ask(self, client: Client, command: RemotingCommand, *, is_short: bool = False) -> RemotingCommand | None:
        """What a name server or the broker answers, None for a one-way request to the broker.

        UpstreamError, whose text names who does not answer. ``is_short``: the client waits for another answer then.
        """
        try:
            if command.code not in NAME_SERVER_CODES:
                seconds = self.patience.short if is_short and not command.is_oneway else self.patience.answer
                answer = await self._channel(client).ask(command, seconds)
            else:
                seconds = self.patience.short if is_short else self.dialer.timeout
                # What is one-way is answered as well there: that is the proof that it came.
                answer = await self.names.ask(replace(command, flag=0), seconds)
            if answer is not None and answer.remark == IN_A_CIRCLE:
                raise UpstreamError(IN_A_CIRCLE)
        except UpstreamError:
            self._counts["failed"] += 1
            raise
        self._counts["forwarded"] += 1
        return answer

    def _channel(self, client: Client) -> Channel:
        channel = self._channels.get(client)
        if channel is None:
            channel = self._channels[client] = Channel("broker", self.dialer, self.names.locate, client.send)
            client.gone.add_done_callback(lambda _: self._channels.pop(client).leave())
        return channel

    def respond(self, client: Client, command: RemotingCommand) -> None:
        """A client's response to what the broker has asked it; dropped if the broker has gone meanwhile."""
        channel = self._channels.get(client)
        if channel is not None and channel.link is not None:
            with suppress(UpstreamError):
                channel.link.tell(command)
