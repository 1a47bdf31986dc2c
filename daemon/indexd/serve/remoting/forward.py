"""Forwarder: what the index does not answer goes to a name server or to the broker, and the answer back.

The broker knows a client by its connection: it sends rebalancing, transaction checks and late answers there. So each
client has a connection of its own to the broker, its Channel, which ends with its own; what the broker asks there goes
to the client, and what the client answers back.

Headers go on as JSON, whatever the client writes, and each answer comes back in the client's form: a JSON header has
room for the mark by which a circle of daemons is noticed, and no signature covers it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import OrderedDict
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from indexd.config import Config
from indexd.serve.remoting.access import Credentials
from indexd.serve.remoting.command import (
    NAME_SERVER_CODES,
    ONEWAY_FLAG,
    Form,
    RemotingCommand,
    RequestCode,
    ResponseCode,
)
from indexd.serve.remoting.context import Client, RateLimitedLog
from indexd.serve.remoting.link import Link, LinkPool, UpstreamError, read_link_settings
from indexd.serve.remoting.upstream import (
    PATIENCE_SECONDS,
    BrokerLocator,
    CircuitBreaker,
    NameServers,
)

# Questions of the broker that a client has not answered, and clients (by clientID) that share a connection.
_ASKED_MAX = 1024
_CLIENTS_MAX = 16
# What a heartbeat takes beside its texts.
_HEARTBEAT_SIZE = 1024
# What a client whose connection to the broker was lost waits for before it is made again, unless it asks something.
_REOPEN_SECONDS = (1.0, 30.0)
_OF_WHO_IS_THERE = frozenset({RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT})


class Budget:
    """Bytes that may be kept, by many together."""

    def __init__(self, most: int) -> None:
        self._left = most

    def __repr__(self) -> str:
        return f"Budget({self._left} left)"

    def take(self, size: int) -> bool:
        """Whether there were so many left; they are taken then."""
        if size > self._left:
            return False
        self._left -= size
        return True

    def give(self, size: int) -> None:
        """Give back what was taken."""
        self._left += size


class Channel:
    """A client's way to the broker, over a connection of its own; ``heartbeats`` bounds what is kept for all clients.

    Requests keep their order even where the connection has yet to be made. A connection that ended is made again and
    tells the broker at once what the client's last heartbeats said: it would wait half a minute for the next one, and
    refuse to be asked for messages meanwhile. A client that has sent heartbeats may only wait to be called: for it the
    connection is made again even if it asks nothing, later each time.
    """

    def __init__(self, pool: LinkPool, locator: BrokerLocator, client: Client, heartbeats: Budget) -> None:
        self._pool, self._locator, self._client, self._budget = pool, locator, client, heartbeats
        self._link: Link | None = None
        self._lock = asyncio.Lock()
        self._opening: asyncio.Task[Link] | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._heartbeats: dict[str, RemotingCommand] = {}
        # Opaques of the broker's requests that the client has not answered.
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._pending, self._has_left = 0, False

    async def ask(self, command: RemotingCommand, seconds: float) -> RemotingCommand | None:
        """The broker's answer, None to a one-way request; UpstreamError, whose text names the broker.

        Who stops waiting does not keep the connection from being made.
        """
        self._pending += 1
        try:
            link = await self._open_link(command)
            try:
                if not command.is_oneway:
                    return await link.ask(command, seconds)
                link.tell(command)
            except UpstreamError as error:
                raise no_answer(link.address, error) from error
            return None
        finally:
            self._pending -= 1
            self._close_if_left()

    def note(self, command: RemotingCommand) -> None:
        """That request is answered by another: the broker hears who is there as soon as it listens again."""
        if command.code in _OF_WHO_IS_THERE:
            self._remember(command)
            if self._link is not None and self._link.is_open:
                with suppress(UpstreamError):  # it is told by the next connection
                    self._link.tell(replace(command, flag=ONEWAY_FLAG))
        self._reopen_if_lost()

    def respond(self, command: RemotingCommand) -> None:
        """What the client answers to a question of the broker's; dropped if there is none that it answers."""
        if command.opaque in self._asked and self._link is not None and self._link.is_open:
            del self._asked[command.opaque]
            self._link.tell(command)

    def leave(self) -> None:
        """The client has gone: the connection ends when its last one-way requests are sent."""
        while self._heartbeats:
            self._forget(next(iter(self._heartbeats)))
        self._has_left = True
        if self._reopening is not None:
            self._reopening.cancel()
        self._close_if_left()

    def close(self) -> None:
        """No connection is made any more."""
        if self._opening is not None:
            self._opening.cancel()

    async def _open_link(self, command: RemotingCommand | None) -> Link:
        # The caller sends before anything else happens in the loop.
        try:
            async with self._lock:
                return self._usable() or await self._open_anew()
        finally:
            if command is not None:
                self._remember(command)
            self._reopen_if_lost()

    def _usable(self) -> Link | None:
        link = self._link
        if link is None or not link.is_open:
            return None
        known = self._locator.known_address()
        return link if known is None or known == link.address else None

    async def _open_anew(self) -> Link:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    def _opened(self, task: asyncio.Task[Link]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()  # whoever waited may have gone
        self._close_if_left()

    async def _open(self) -> Link:
        if self._link is not None:
            self._link.close()
        address = await self._locator.address()
        try:
            link = await self._pool.open(address, self._ask_client)
        except UpstreamError as error:
            moved = await self._locator.address(anew=True)
            if moved == address:
                raise no_answer(address, error) from error
            try:
                link = await self._pool.open(moved, self._ask_client)
            except UpstreamError as second:
                raise no_answer(moved, second) from second
        self._link = link
        self._asked.clear()
        for heartbeat in self._heartbeats.values():
            link.tell(replace(heartbeat, flag=ONEWAY_FLAG))
        link.on_end = self._reopen_if_lost
        return link

    def _close_if_left(self) -> None:
        if self._has_left and not self._pending and self._link is not None:
            self._link.close()

    def _reopen_if_lost(self) -> None:
        is_open = self._link is not None and self._link.is_open
        if self._reopening is None and self._heartbeats and not self._has_left and not is_open:
            self._reopening = asyncio.create_task(self._reopen())

    async def _reopen(self) -> None:
        seconds, most = _REOPEN_SECONDS
        try:
            while self._heartbeats and not (self._link is not None and self._link.is_open):
                # Not all of a broker's clients in the same moment.
                await asyncio.sleep(random.uniform(seconds / 2, seconds))
                async with self._pool.mending:
                    with suppress(UpstreamError):
                        await self._open_link(None)
                seconds = min(2 * seconds, most)
        finally:
            self._reopening = None

    def _ask_client(self, command: RemotingCommand) -> None:
        if not command.is_oneway:
            self._asked[command.opaque] = None
            if len(self._asked) > _ASKED_MAX:
                self._asked.popitem(last=False)
        self._client.send(command)

    def _remember(self, command: RemotingCommand) -> None:
        if command.code == RequestCode.UNREGISTER_CLIENT:
            self._forget(command.ext_fields.get("clientID", ""))
        elif command.code == RequestCode.HEART_BEAT:
            client_id = _client_id(command.body)
            if client_id is not None:
                self._forget(client_id)
                if len(self._heartbeats) < _CLIENTS_MAX and not self._has_left and self._budget.take(_size_of(command)):
                    self._heartbeats[client_id] = command

    def _forget(self, client_id: str) -> None:
        heartbeat = self._heartbeats.pop(client_id, None)
        if heartbeat is not None:
            self._budget.give(_size_of(heartbeat))


def _client_id(body: bytes) -> str | None:
    # None for a heartbeat that only says that nothing has changed (withoutSub): a new connection needs all of it.
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if type(data) is not dict or data.get("withoutSub") is True:
        return None
    client_id = data.get("clientID")
    return client_id if type(client_id) is str else None


def _size_of(command: RemotingCommand) -> int:
    fields = sum(len(name) + len(value) for name, value in command.ext_fields.items())
    return _HEARTBEAT_SIZE + len(command.body) + fields


def no_answer(address: str, error: UpstreamError) -> UpstreamError:
    """The same with the broker's address."""
    return UpstreamError(f"the broker at {address} does not answer: {error}")


T = TypeVar("T")
# What a request may take beyond the time it asks to be held for.
_ANSWER_SECONDS = 60.0
_HELD_MORE_SECONDS = 10.0
_HELD_MAX_SECONDS = 600.0
_HELD_FIELDS = ("suspendTimeoutMillis", "pollTime")
# Bytes of heartbeats that are kept, of all clients together.
_HEARTBEATS_MAX = 64 << 20
#: A name server takes the connection of these for the broker's: it would be ours.
REGISTRATIONS = frozenset({103, 904})
_VIA = "indexdVia"
_ITSELF = "it is this daemon itself"
_NAMES_ARE_US = "upstream_namesrv leads back here: give the real name servers"
_BROKER_IS_US = (
    "the broker's address leads here; if the broker has not just stopped, correct broker_address or brokerIP1"
)
_CIRCLE = "upstream_namesrv leads to another indexd whose upstream_namesrv leads here: give one of them the real ones"
# So long an address that leads back here is not tried again.
_ITSELF_SECONDS = 30.0


class Forwarder:
    """One for an outlet with upstream_namesrv. UsageError if its certificates cannot be used.

    ``mark``: what this process is known by among those that pass requests on, a word of its own.
    """

    def __init__(self, config: Config, log: RateLimitedLog, credentials: Credentials | None, mark: str) -> None:
        self._log, self._mark = log, mark
        self._timeout = config.remoting.upstream_timeout
        self._pool = LinkPool(read_link_settings(config))
        self.names = NameServers(config.remoting.upstream_namesrv, self._pool)
        self.locator = BrokerLocator(config, self.names, credentials, log.warning, {_VIA: mark})
        self._heartbeats = Budget(_HEARTBEATS_MAX)
        self._channels: dict[Client, Channel] = {}
        self._patience = min(PATIENCE_SECONDS, self._timeout)
        self._names_breaker, self._broker_breaker = (
            CircuitBreaker(self._probe_names),
            CircuitBreaker(self._probe_broker),
        )
        self._counts = {"forwarded": 0, "failed": 0, "dropped": 0}

    def __repr__(self) -> str:
        return f"Forwarder({self.names}, {len(self._channels)} clients of the broker, {self._pool})"

    def row(self) -> dict[str, Any]:
        """For the board: where to, how many connections, and what became of requests (counters)."""
        place = self.locator.known
        address = None if place is None else place.address
        return {"nameServer": self.names.address, "broker": address, "links": len(self._pool.ends), **self._counts}

    def has_been_here(self, command: RemotingCommand) -> bool:
        """Whether a request comes back by way of another daemon, whose upstream we are; if not, it is marked.

        By a member of the header that RocketMQ ignores.
        """
        via = command.others.get(_VIA, "")
        if type(via) is not str or self._mark in via.split():
            self._log.warning("upstream_circle", code=command.code, hint=_CIRCLE)
            return True
        command.others[_VIA] = f"{via} {self._mark}".lstrip()
        return False

    def is_ourselves(self, client: Client) -> bool:
        """Whether a client is one of our own connections: upstream leads back here. It is not followed again then."""
        link = self._pool.ends.get(client.peer)
        if link is None:
            return False
        self._pool.note(link.address, _ITSELF, _ITSELF_SECONDS)
        hint = _NAMES_ARE_US if self.names.is_one(link.address) else _BROKER_IS_US
        self._log.warning("upstream_is_ourselves", address=link.address, hint=hint)
        link.fail(_ITSELF)
        return True

    async def forward(self, client: Client, command: RemotingCommand) -> RemotingCommand | None:
        """The answer to a request from where it belongs, or SERVICE_NOT_AVAILABLE with a remark; None if one-way."""
        try:
            if command.code in NAME_SERVER_CODES:
                return await self.ask_names(command, _ANSWER_SECONDS)
            return await self.ask_broker(client, command)
        except UpstreamError as error:
            if not command.is_oneway:
                return command.answer(ResponseCode.SERVICE_NOT_AVAILABLE, str(error))
            self._counts["dropped"] += 1
            self._log.warning("upstream_dropped", peer=client.peer, code=command.code, problem=str(error))
            return None

    async def ask_names(self, command: RemotingCommand, seconds: float | None = None) -> RemotingCommand:
        """What a name server answers; UpstreamError.

        ``seconds``: what it may take. None: no longer than a client waits, for there is another answer.
        """
        # What is one-way is answered as well there: that is the proof that it came.
        asked = replace(command, flag=0, form=Form.JSON)
        if seconds is None:
            asking = self._names_breaker.ask(lambda: self.names.ask(asked, self._timeout, self._patience))
        else:
            asking = self.names.ask(asked, seconds)
        answer = await self._counted(asking)
        self._names_breaker.answered()
        answer.form = command.form
        return answer

    async def ask_broker(
        self, client: Client, command: RemotingCommand, *, is_short: bool = False
    ) -> RemotingCommand | None:
        """What the broker answers, None for a one-way request; UpstreamError, whose text names the broker.

        ``is_short``: no longer than a client waits, for there is another answer.
        """
        channel = self._channel(client)
        asked = replace(command, form=Form.JSON)
        if is_short and not command.is_oneway:
            if self._broker_breaker.is_open:
                channel.note(asked)
            asking = self._broker_breaker.ask(lambda: self._ask_in_time(channel, asked))
        else:
            asking = channel.ask(asked, _patience(command))
        answer = await self._counted(asking)
        if answer is not None:
            self._broker_breaker.answered()
            answer.form = command.form
        return answer

    def respond(self, client: Client, command: RemotingCommand) -> None:
        """A client's response to what the broker has asked it; any other is dropped."""
        channel = self._channels.get(client)
        if channel is not None:
            with suppress(UpstreamError):  # the broker has gone meanwhile
                channel.respond(command)

    async def close(self) -> None:
        """Close every connection, within half a second."""
        for breaker in (self._names_breaker, self._broker_breaker):
            breaker.close()
        for channel in self._channels.values():
            channel.close()
        await self._pool.close()

    def _channel(self, client: Client) -> Channel:
        channel = self._channels.get(client)
        if channel is None:
            channel = self._channels[client] = Channel(self._pool, self.locator, client, self._heartbeats)
            client.on_close(lambda: self._channels.pop(client).leave())
        return channel

    async def _ask_in_time(self, channel: Channel, command: RemotingCommand) -> RemotingCommand | None:
        try:
            async with asyncio.timeout(self._patience):
                return await channel.ask(command, self._timeout)
        except TimeoutError:
            address = self.locator.known_address()
            error = UpstreamError(f"no answer within {self._patience:g} s")
            raise no_answer(address or "an address that is not known yet", error) from None

    async def _probe_names(self) -> None:
        await self.names.ask(self.locator.request(), self._timeout)

    async def _probe_broker(self) -> None:
        link = await self._pool.get(await self.locator.address(anew=True))
        await link.ask(self.locator.request(RequestCode.GET_BROKER_RUNTIME_INFO), self._timeout)

    async def _counted(self, answer: Awaitable[T]) -> T:
        try:
            found = await answer
        except UpstreamError:
            self._counts["failed"] += 1
            raise
        self._counts["forwarded"] += 1
        return found


def _patience(command: RemotingCommand) -> float:
    for name in _HELD_FIELDS:
        millis = command.ext_fields.get(name, "")
        if millis.isascii() and millis.isdecimal():
            return max(_ANSWER_SECONDS, min(int(millis[:9]) / 1000, _HELD_MAX_SECONDS) + _HELD_MORE_SECONDS)
    return _ANSWER_SECONDS
