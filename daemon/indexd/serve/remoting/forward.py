"""Forwards what the index does not answer to a name server or the broker, and brings the answer back.

The broker knows a client by its connection: it sends rebalancing, transaction checks and late answers there. So each
client has a connection of its own to the broker, which ends with its own; what the broker asks there goes to the
client, and what the client answers back. Name servers are asked over one connection for all.

Headers go on as JSON, whatever the client writes, and each answer comes back in the client's form: a JSON header has
room for the mark by which a circle of daemons is noticed, and no signature covers it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from indexd.config import Config
from indexd.config.serving import is_peer
from indexd.config.units import printable, shown
from indexd.serve.remoting.access import ACCESS_KEY, SIGNATURE, Credentials
from indexd.serve.remoting.command import (
    NAME_SERVER_CODES,
    VERSION,
    Form,
    RemotingCommand,
    RequestCode,
    ResponseCode,
)
from indexd.serve.remoting.link import Dialer, Link, Patience, UpstreamError
from indexd.serve.remoting.routes import BrokerPlace, Json, find_place, own_place, read_json

T = TypeVar("T")

#: A name server takes the connection of these for the broker's: it would be ours.
REGISTRATIONS = frozenset({103, 904})
IN_A_CIRCLE = "upstream_namesrv of this indexd leads back to it"
_VIA = "indexdVia"
_CIRCLE_HINT = (
    "upstream_namesrv or the broker's address leads back here, perhaps by way of another indexd: give the real ones"
)
# Beside the time that a request asks to be held for, and at most.
_HELD_MORE_SECONDS, _HELD_MAX_SECONDS = 10.0, 600.0
_HELD_FIELDS = ("suspendTimeoutMillis", "pollTime")
_SHOWN_MAX = 300


class Client(Protocol):
    """One connection, in the event loop's thread. Nothing here raises when it is closed already."""

    @property
    def peer(self) -> str:
        """Who it is: ``127.0.0.1:53122``, IPv6 in brackets, an IPv4-mapped address as IPv4."""

    @property
    def local(self) -> str:
        """Our address as this client has reached it: ``127.0.0.1:10976``."""

    def send(self, command: RemotingCommand) -> None:
        """A request to the client; dropped when it is closed."""

    def on_close(self, call: Callable[[], None]) -> None:
        """Call it once when the connection ends, however it ends; at once if it has ended."""


class NameServers:
    """Asked in turn, the one that answered last first, over one connection each."""

    def __init__(self, addresses: tuple[str, ...], dialer: Dialer) -> None:
        self._addresses, self._dialer, self.patience = addresses, dialer, dialer.patience
        self._links: dict[str, Link] = {}
        self._locks = {address: asyncio.Lock() for address in addresses}
        self._current = 0

    @property
    def address(self) -> str:
        """The one that is asked first."""
        return self._addresses[self._current]

    async def ask(self, command: RemotingCommand, seconds: float, *, is_short: bool = False) -> RemotingCommand:
        """The first answer that comes; UpstreamError names all of them.

        The last one has ``seconds`` for it, those before it no more than a connection may take; ``is_short``: all share
        them.
        """
        first, count, problems = self._current, len(self._addresses), []
        for number in range(count):
            at = (first + number) % count
            turn = seconds if number == count - 1 else min(seconds, self._dialer.timeout)
            try:
                answer = await _within(seconds / count if is_short else turn, self._ask(self._addresses[at], command))
            except UpstreamError as error:
                problems.append(f"the name server at {self._addresses[at]} does not answer: {error}")
            else:
                self._current = at
                return answer
        raise UpstreamError("; ".join(problems))

    async def _ask(self, address: str, command: RemotingCommand) -> RemotingCommand:
        try:
            return await (await self._link(address)).ask(command)
        except UpstreamError as error:
            if not error.is_lost:
                raise
        # It was started anew, perhaps: whatever a name server is asked may be asked twice.
        return await (await self._link(address)).ask(command)

    async def _link(self, address: str) -> Link:
        async with self._locks[address]:
            link = self._links.get(address)
            if link is None or not link.is_open:
                link = self._links[address] = await self._dialer.open(address)
            return link


class BrokerLocator:
    """Where the broker is: broker_address, else what the name servers say of the broker of our name.

    What was found last holds until something newer is said: a name server may have forgotten everything. ``mark`` is
    in the headers of our own requests.
    """

    def __init__(
        self, config: Config, names: NameServers, credentials: Credentials | None, log: Any, mark: str
    ) -> None:
        self._config, self._names, self._credentials, self._log, self._mark = config, names, credentials, log, mark
        self._patience = names.patience
        #: What was found last, and why nothing was.
        self.known: BrokerPlace | None = None
        self.problem = "nobody was asked yet"
        #: Monotonic, seconds: what is known now was asked for then, or later.
        self.sure_at = self._asked_at = float("-inf")
        self._asking: asyncio.Task[None] | None = None

    async def look(self, *, anew: bool = False, within: float | None = None) -> BrokerPlace | None:
        """Where it is, as known now; None: none of the name server's brokers is known to be ours (``problem``).

        ``anew``: it does not answer where it was. Only then, and before the first answer, is a name server waited for,
        ``within`` seconds if they are given.
        """
        self._refresh(anew=anew)
        if self._asking is not None and (anew or self.known is None):
            await asyncio.wait([self._asking], timeout=within)
        return self.known

    async def address(self, *, anew: bool = False) -> str:
        """Where requests for it go; UpstreamError if nobody knows."""
        if self._config.node.broker_address is not None:
            return self._config.node.broker_address
        place = await self.look(anew=anew)
        if place is None or place.address is None:
            raise UpstreamError(f"where it is is not known: {self.problem}")
        return place.address

    def note(self, cluster: Json) -> BrokerPlace | None:
        """A ClusterInfo that came from a name server; where the broker is then. ValueError if it is none."""
        found = find_place(cluster, self._config, self.known)
        self._asked_at = time.monotonic()
        if found is not None:
            if found.address is not None and not is_peer(found.address):
                self.problem = f"what the name server gives for it is no address: {shown(found.address)}"
                hint = "correct brokerIP1, or give broker_address"
                self._log.warning("upstream_unread", problem=self.problem, hint=hint)
                found = replace(found, address=None)
            if found.address is None and self.known is not None:
                found = replace(found, address=self.known.address)
            self.known = found
            return found
        own, names = own_place(self._config), _cut(", ".join(sorted(cluster["brokerAddrTable"])) or "none")
        self.problem = f"the name server knows these brokers: {names}; ours is {own.name} (node_id, brokerName)"
        if self.known is not None:
            self.known = replace(self.known, is_registered=False)
        elif self._config.node.node_id is not None:
            self.known = own
        else:
            hint = "give node_id, the broker's brokerName"
            self._log.warning("upstream_unknown", problem=self.problem, hint=hint)
        return self.known

    def _refresh(self, *, anew: bool) -> None:
        is_there, patience = self.known is not None and self.known.is_registered, self._patience
        fresh = patience.anew if anew else patience.fresh if is_there else patience.missing
        if self._asking is None and time.monotonic() - self._asked_at >= fresh:
            self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        began = self._asked_at = time.monotonic()
        # One of our own, signed if we want signatures: whoever is asked may want them, too.
        request = RemotingCommand(RequestCode.GET_BROKER_CLUSTER_INFO, 0, language="JAVA", version=VERSION)
        request.others[_VIA] = self._mark
        if self._credentials is not None:
            request.ext_fields[ACCESS_KEY] = self._credentials.access_key
            request.ext_fields[SIGNATURE] = self._credentials.signature(request)
        try:
            answer = await self._names.ask(request, self._config.remoting.upstream_timeout)
            if answer.code != ResponseCode.SUCCESS:
                raise ValueError(f"code {answer.code}, {_cut(answer.remark or 'no remark')}")
            self.note(read_json(answer.body))
            self.sure_at = began
        except UpstreamError as error:
            self.problem = str(error)
        except ValueError as error:
            self.problem = f"the name server at {self._names.address} gave no cluster: {error}"
        finally:
            self._asking = None


def _cut(text: str) -> str:
    return f"{printable(text[:_SHOWN_MAX])}{'...' if len(text) > _SHOWN_MAX else ''}"


class CircuitBreaker:
    """Spares requests that have another answer the wait for one that hangs.

    After one that got no answer the others are refused at once for ``Patience.refused``; then one of them tries again.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._problem: str | None = None
        self._until = 0.0

    async def ask(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What ``attempt`` returns; UpstreamError, at once while it is open."""
        if self._problem is not None:
            if time.monotonic() < self._until:
                raise UpstreamError(self._problem)
            self._until = time.monotonic() + self._patience.refused  # while this one tries
        try:
            return await attempt()
        except UpstreamError as error:
            self._problem, self._until = str(error), time.monotonic() + self._patience.refused
            raise

    def close(self) -> None:
        """An answer came, to whatever request."""
        self._problem = None


class Channel:
    """A client's connection to the broker: made when it first asks, and again when it asks after that has ended."""

    def __init__(self, dialer: Dialer, locator: BrokerLocator, client: Client) -> None:
        self._dialer, self._locator, self._client = dialer, locator, client
        self._lock = asyncio.Lock()  # requests keep their order while the connection is made
        self._link: Link | None = None
        self._pending, self._has_left = 0, False
        self.address: str | None = None

    async def ask(self, command: RemotingCommand) -> RemotingCommand | None:
        """The broker's answer, None to a one-way request; UpstreamError."""
        self._pending += 1
        try:
            async with self._lock:
                link = await self._open()
            # Sent before anything else happens in the loop.
            if not command.is_oneway:
                return await link.ask(command)
            link.tell(command)
            return None
        finally:
            self._pending -= 1
            self._close_if_left()

    def respond(self, command: RemotingCommand) -> None:
        """What the client answers to a question of the broker's; dropped if the broker has gone meanwhile."""
        if self._link is not None:
            with suppress(UpstreamError):
                self._link.tell(command)

    def leave(self) -> None:
        """The client has gone: the connection ends when its last one-way requests are sent."""
        self._has_left = True
        self._close_if_left()

    def _close_if_left(self) -> None:
        if self._has_left and not self._pending and self._link is not None:
            self._link.close()

    async def _open(self) -> Link:
        link, address = self._link, await self._locator.address()
        if link is not None and link.is_open:
            if link.address == address:
                return link
            link.close()  # another broker is the master now
        self.address = address
        try:
            self._link = await self._dialer.open(address, self._client.send)
        except UpstreamError:
            self.address = await self._locator.address(anew=True)
            if self.address == address:
                raise
            self._link = await self._dialer.open(self.address, self._client.send)
        return self._link


class Forwarder:
    """One for an outlet with upstream_namesrv. UsageError if its certificates cannot be used.

    ``mark``: what this process is known by among those that pass requests on, a word of its own.
    """

    def __init__(
        self, config: Config, log: Any, credentials: Credentials | None, mark: str, patience: Patience | None = None
    ) -> None:
        self.patience = patience or Patience()
        self._log, self._mark = log, mark
        self._dialer = Dialer(config, self.patience)
        self._names = NameServers(config.remoting.upstream_namesrv, self._dialer)
        self.locator = BrokerLocator(config, self._names, credentials, log, mark)
        self._channels: dict[Client, Channel] = {}
        self._names_breaker, self._broker_breaker = CircuitBreaker(self.patience), CircuitBreaker(self.patience)
        self._counts = {"forwarded": 0, "failed": 0, "dropped": 0}

    def __repr__(self) -> str:
        return f"Forwarder({self._names.address}, {len(self._channels)} clients of the broker)"

    def row(self) -> dict[str, Any]:
        """For the board: where to, how many connections, and what became of requests (counters)."""
        place = self.locator.known
        address = None if place is None else place.address
        return {
            "nameServer": self._names.address,
            "broker": address,
            "links": len(self._dialer.links),
            **self._counts,
        }

    def has_been_here(self, command: RemotingCommand) -> bool:
        """Whether a request comes back that we have forwarded; if not, it is marked.

        By a member of the header that RocketMQ ignores.
        """
        via = command.others.get(_VIA, "")
        if type(via) is not str or self._mark in via.split():
            self._log.warning("upstream_circle", code=command.code, hint=_CIRCLE_HINT)
            return True
        command.others[_VIA] = f"{via} {self._mark}".lstrip()
        return False

    async def forward(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        """The answer to a request from where it belongs, or SERVICE_NOT_AVAILABLE with a remark; None if one-way."""
        try:
            if command.code in NAME_SERVER_CODES:
                return await self.ask_names(command)
            return await self.ask_broker(client, command)
        except UpstreamError as error:
            if not command.is_oneway:
                return command.answer(ResponseCode.SERVICE_NOT_AVAILABLE, str(error))
            self._counts["dropped"] += 1
            self._log.warning("upstream_dropped", peer=client.peer, code=command.code, problem=str(error))
            return None

    async def ask_names(self, command: RemotingCommand, *, is_short: bool = False) -> RemotingCommand:
        """What a name server answers; UpstreamError. ``is_short``: there is another answer, which clients wait for."""
        # What is one-way is answered as well there: that is the proof that it came.
        asked, patience = replace(command, flag=0, form=Form.JSON), self.patience
        if is_short:
            asking = self._names_breaker.ask(lambda: self._names.ask(asked, patience.short, is_short=True))
        else:
            asking = self._names.ask(asked, patience.answer)
        answer = await self._counted(asking, command.form)
        self._names_breaker.close()
        assert answer is not None  # only one-way requests get none
        return answer

    async def ask_broker(
        self, client: Client, command: RemotingCommand, *, is_short: bool = False
    ) -> RemotingCommand | None:
        """What the broker answers, None for a one-way request; UpstreamError, whose text names the broker.

        ``is_short``: as for ``ask_names``.
        """
        channel, asked = self._channel(client), replace(command, form=Form.JSON)
        if is_short and not command.is_oneway:
            asking = self._broker_breaker.ask(lambda: self._ask_channel(channel, asked, self.patience.short))
        else:
            asking = self._ask_channel(channel, asked, held_seconds(command, self.patience.answer))
        answer = await self._counted(asking, command.form)
        if answer is not None:
            self._broker_breaker.close()
        return answer

    def respond(self, client: Client, command: RemotingCommand) -> None:
        """A client's response to what the broker has asked it."""
        channel = self._channels.get(client)
        if channel is not None:
            channel.respond(command)

    async def close(self) -> None:
        """Close every connection, within half a second."""
        await self._dialer.close()

    def _channel(self, client: Client) -> Channel:
        channel = self._channels.get(client)
        if channel is None:
            channel = self._channels[client] = Channel(self._dialer, self.locator, client)
            client.on_close(lambda: self._channels.pop(client).leave())
        return channel

    async def _ask_channel(self, channel: Channel, command: RemotingCommand, seconds: float) -> RemotingCommand | None:
        try:
            return await _within(seconds, channel.ask(command))
        except UpstreamError as error:
            place = "" if channel.address is None else f" at {channel.address}"
            raise UpstreamError(f"the broker{place} does not answer: {error}") from error

    async def _counted(self, asking: Awaitable[RemotingCommand | None], form: Form) -> RemotingCommand | None:
        try:
            answer = await asking
            if answer is not None:
                if answer.code == ResponseCode.SERVICE_NOT_AVAILABLE and answer.remark == IN_A_CIRCLE:
                    raise UpstreamError(IN_A_CIRCLE)
                answer.form = form
        except UpstreamError:
            self._counts["failed"] += 1
            raise
        self._counts["forwarded"] += 1
        return answer


def held_seconds(command: RemotingCommand, least: float) -> float:
    """What the broker is given for an answer: more where the request asks to be held."""
    for name in _HELD_FIELDS:
        millis = command.ext_fields.get(name, "")
        if millis.isascii() and millis.isdecimal():
            return max(least, min(int(millis[:9]) / 1000, _HELD_MAX_SECONDS) + _HELD_MORE_SECONDS)
    return least


async def _within(seconds: float, asking: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await asking
    except TimeoutError:
        raise UpstreamError(f"no answer within {seconds:.2g} s") from None
