"""Lane: the way of a client's requests to the broker, one that is shared or one of its own."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from dataclasses import replace

from indexd.serve.remoting.client import Client
from indexd.serve.remoting.codes import ONEWAY_FLAG, RequestCode
from indexd.serve.remoting.command import RemotingCommand
from indexd.serve.remoting.link import Link, UpstreamError
from indexd.serve.remoting.places import Whereabouts
from indexd.serve.remoting.upstream import LinkPool

# Questions of the broker that a client has not answered, and clients (by clientID) that share a connection.
_ASKED_MAX = 1024
_CLIENTS_MAX = 16
# What a heartbeat takes beside its texts.
_HEARTBEAT_SIZE = 1024


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


class Lane:
    """A way to the broker that clients share; requests keep their order even where a connection has yet to be made."""

    def __init__(self, pool: LinkPool, whereabouts: Whereabouts) -> None:
        self._pool, self._whereabouts = pool, whereabouts
        self._link: Link | None = None
        self._lock = asyncio.Lock()
        self._waiting = 0

    async def link(self, command: RemotingCommand) -> Link:
        """The connection for that request, to be sent at once: before anything else happens in the loop.

        UpstreamError, whose text names the broker.
        """
        link = self._usable()
        if link is not None and self._waiting == 0:
            return link
        self._waiting += 1
        try:
            async with self._lock:
                return self._usable() or await self._renew(command)
        finally:
            self._waiting -= 1

    def _usable(self) -> Link | None:
        link = self._link
        if link is None or not link.is_open:
            return None
        known = self._whereabouts.known_address()
        return link if known is None or known == link.address else None

    async def _renew(self, command: RemotingCommand) -> Link:  # noqa: ARG002 - for those that look at it
        address = await self._whereabouts.address()
        try:
            link = await self._open(address)
        except UpstreamError as error:
            moved = await self._whereabouts.address(anew=True)
            if moved == address:
                raise no_answer(address, error) from error
            try:
                link = await self._open(moved)
            except UpstreamError as second:
                raise no_answer(moved, second) from second
        self._link = link
        return link

    async def _open(self, address: str) -> Link:
        return await self._pool.get(address)


class OwnLane(Lane):
    """That of a client which the broker knows; ``heartbeats`` bounds what is kept for all such clients.

    A connection that ended is made again for the client's next request, and tells the broker at once what the client's
    last heartbeat said: it would wait half a minute for the next one, and refuse to be asked for messages meanwhile.
    """

    def __init__(self, pool: LinkPool, whereabouts: Whereabouts, client: Client, heartbeats: Budget) -> None:
        super().__init__(pool, whereabouts)
        self._client, self._budget = client, heartbeats
        self._heartbeats: dict[str, RemotingCommand] = {}
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._has_left = False

    async def link(self, command: RemotingCommand) -> Link:
        """The same."""
        self._remember(command)
        return await super().link(command)

    async def _renew(self, command: RemotingCommand) -> Link:
        if self._link is not None:
            self._link.close()
        link = await super()._renew(command)
        self._asked.clear()
        if self._has_left:
            link.close()
        for heartbeat in self._heartbeats.values():
            if heartbeat is not command:
                link.tell(replace(heartbeat, flag=ONEWAY_FLAG))
        return link

    async def _open(self, address: str) -> Link:
        return await self._pool.open(address, self._ask_client)

    def respond(self, command: RemotingCommand) -> None:
        """What the client answers to a question of the broker's; dropped if there is none that it answers."""
        if command.opaque in self._asked and self._link is not None and self._link.is_open:
            del self._asked[command.opaque]
            self._link.tell(command)

    def leave(self) -> None:
        """The client has gone: the broker is to know."""
        while self._heartbeats:
            self._forget(next(iter(self._heartbeats)))
        self._has_left = True
        if self._link is not None:
            self._link.close()

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
