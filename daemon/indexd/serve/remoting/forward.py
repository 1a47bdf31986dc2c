"""Forwarder: what is no query of ours goes to a name server or to the broker, and the answer back.

The broker knows a client by its connection: it sends rebalancing, transaction checks and late answers there. So whoever
has sent HEART_BEAT has a connection of its own to the broker from then on, which ends with its own; what the broker
asks there goes to the client, and what the client answers back. All others share one.

Headers go on as JSON, whatever the client writes, and each answer comes back in the client's form: a JSON header has
room for the mark by which a circle of daemons is noticed, and no signature covers it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from indexd.config import Config
from indexd.serve.remoting.access import Credentials
from indexd.serve.remoting.client import Client
from indexd.serve.remoting.codes import NAME_SERVER_CODES, RequestCode, ResponseCode
from indexd.serve.remoting.command import Form, RemotingCommand
from indexd.serve.remoting.doubt import PATIENCE_SECONDS, Doubt
from indexd.serve.remoting.lanes import Budget, Lane, OwnLane, no_answer
from indexd.serve.remoting.link import UpstreamError
from indexd.serve.remoting.places import NameServers, Whereabouts
from indexd.serve.remoting.sparing import SparingLog
from indexd.serve.remoting.upstream import LinkPool, read_link_settings

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

    def __init__(self, config: Config, log: SparingLog, credentials: Credentials | None, mark: str) -> None:
        self._log, self._mark = log, mark
        self._timeout = config.remoting.upstream_timeout
        self._pool = LinkPool(read_link_settings(config))
        self.names = NameServers(config.remoting.upstream_namesrv, self._pool)
        self.whereabouts = Whereabouts(config, self.names, credentials, log.warning, {_VIA: mark})
        self._shared = Lane(self._pool, self.whereabouts)
        self._heartbeats = Budget(_HEARTBEATS_MAX)
        self._lanes: dict[Client, OwnLane] = {}
        self._patience = min(PATIENCE_SECONDS, self._timeout)
        self._names_doubt, self._broker_doubt = Doubt(self._probe_names), Doubt(self._probe_broker)
        self._counts = {"forwarded": 0, "failed": 0, "dropped": 0}

    def __repr__(self) -> str:
        return f"Forwarder({self.names}, {len(self._lanes)} clients of the broker, {self._pool})"

    def row(self) -> dict[str, Any]:
        """For the board: where to, how many connections, and what became of requests (counters)."""
        place = self.whereabouts.known
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
            asking = self._names_doubt.ask(lambda: self.names.ask(asked, self._timeout, self._patience))
        else:
            asking = self.names.ask(asked, seconds)
        answer = await self._counted(asking)
        self._names_doubt.answered()
        answer.form = command.form
        return answer

    async def ask_broker(
        self, client: Client, command: RemotingCommand, *, is_short: bool = False
    ) -> RemotingCommand | None:
        """What the broker answers, None for a one-way request; UpstreamError, whose text names the broker.

        ``is_short``: no longer than a client waits, for there is another answer.
        """
        lane = self._lane(client, command)
        asked = replace(command, form=Form.JSON)
        if command.is_oneway:
            await self._counted(self._tell_broker(lane, asked))
            return None
        if is_short:
            if self._broker_doubt.is_there:
                lane.leave_word(asked)
            answer = await self._counted(self._broker_doubt.ask(lambda: self._ask_in_time(lane, asked)))
        else:
            answer = await self._counted(self._ask_broker(lane, asked, _patience(command)))
        self._broker_doubt.answered()
        answer.form = command.form
        return answer

    def respond(self, client: Client, command: RemotingCommand) -> None:
        """A client's response to what the broker has asked it; any other is dropped."""
        lane = self._lanes.get(client)
        if lane is not None:
            with suppress(UpstreamError):  # the broker has gone meanwhile
                lane.respond(command)

    async def close(self) -> None:
        """Close every connection, within half a second."""
        for doubt in (self._names_doubt, self._broker_doubt):
            doubt.close()
        for lane in (self._shared, *self._lanes.values()):
            lane.close()
        await self._pool.close()

    def _lane(self, client: Client, command: RemotingCommand) -> Lane:
        if command.code == RequestCode.HEART_BEAT and client not in self._lanes:
            if client.is_closed:
                raise UpstreamError("the client has gone")
            self._lanes[client] = OwnLane(self._pool, self.whereabouts, client, self._heartbeats)
            client.on_close(partial(self._left, client))
        return self._lanes.get(client, self._shared)

    async def _ask_broker(self, lane: Lane, command: RemotingCommand, seconds: float) -> RemotingCommand:
        link = await lane.link(command)
        try:
            return await link.ask(command, seconds)
        except UpstreamError as error:
            raise no_answer(link.address, error) from error

    async def _ask_in_time(self, lane: Lane, command: RemotingCommand) -> RemotingCommand:
        try:
            async with asyncio.timeout(self._patience):
                return await self._ask_broker(lane, command, self._timeout)
        except TimeoutError:
            address = self.whereabouts.known_address()
            error = UpstreamError(f"no answer within {self._patience:g} s")
            raise no_answer(address or "an address that is not known yet", error) from None

    async def _tell_broker(self, lane: Lane, command: RemotingCommand) -> None:
        link = await lane.link(command)
        try:
            link.tell(command)
        except UpstreamError as error:
            raise no_answer(link.address, error) from error

    async def _probe_names(self) -> None:
        await self.names.ask(self.whereabouts.request(), self._timeout)

    async def _probe_broker(self) -> None:
        command = self.whereabouts.request(RequestCode.GET_BROKER_RUNTIME_INFO)
        await self._ask_broker(self._shared, command, self._timeout)

    def _left(self, client: Client) -> None:
        self._lanes.pop(client).leave()

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
