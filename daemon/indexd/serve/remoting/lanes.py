"""Lane: the way of a client's requests to the broker, one that is shared or one of its own."""

from __future__ import annotations

import asyncio
import json
import random
from collections import OrderedDict
from contextlib import suppress
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
# What a client whose connection to the broker was lost waits for before it is made again, unless it asks something.
_MEND_SECONDS = (1.0, 30.0)
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


class Lane:
    """A way to the broker that clients share; requests keep their order even where a connection has yet to be made."""

    def __init__(self, pool: LinkPool, whereabouts: Whereabouts) -> None:
        self._pool, self._whereabouts = pool, whereabouts
        self._link: Link | None = None
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._making: asyncio.Task[Link] | None = None

    async def link(self, command: RemotingCommand | None) -> Link:  # noqa: ARG002 - for those that look at it
        """The connection for that request, to be sent at once: before anything else happens in the loop.

        UpstreamError, whose text names the broker. Who stops waiting for it does not keep it from being made.
        """
        link = self._usable()
        if link is not None and self._waiting == 0:
            return link
        self._waiting += 1
        try:
            async with self._lock:
                return self._usable() or await self._renew()
        finally:
            self._waiting -= 1

    def leave_word(self, command: RemotingCommand) -> None:
        """That request is answered by another, for the broker does not answer in time."""

    def close(self) -> None:
        """No connection is made any more."""
        if self._making is not None:
            self._making.cancel()

    def _usable(self) -> Link | None:
        link = self._link
        if link is None or not link.is_open:
            return None
        known = self._whereabouts.known_address()
        return link if known is None or known == link.address else None

    async def _renew(self) -> Link:
        if self._making is None:
            self._making = asyncio.create_task(self._make())
            self._making.add_done_callback(self._made)
        return await asyncio.shield(self._making)

    def _made(self, task: asyncio.Task[Link]) -> None:
        self._making = None
        if not task.cancelled():
            task.exception()  # whoever waited may have gone

    async def _make(self) -> Link:
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

    A connection that ended is made again, and tells the broker at once what the client's last heartbeat said: it would
    wait half a minute for the next one, and refuse to be asked for messages meanwhile. A client may only wait to be
    called: for one that asks nothing it is made all the same, later each time.
    """

    def __init__(self, pool: LinkPool, whereabouts: Whereabouts, client: Client, heartbeats: Budget) -> None:
        super().__init__(pool, whereabouts)
        self._client, self._budget = client, heartbeats
        self._heartbeats: dict[str, RemotingCommand] = {}
        self._asked: OrderedDict[int, None] = OrderedDict()
        self._has_left = False
        # The link by which the broker has heard all heartbeats.
        self._told: Link | None = None
        self._mending: asyncio.Task[None] | None = None

    async def link(self, command: RemotingCommand | None) -> Link:
        """The same."""
        if command is not None:
            self._remember(command)
        try:
            link = await super().link(command)
            if self._told is not link:
                self._told = link
                for heartbeat in self._heartbeats.values():
                    if heartbeat is not command:
                        link.tell(replace(heartbeat, flag=ONEWAY_FLAG))
        finally:
            self._mend_if_lost()
        return link

    def leave_word(self, command: RemotingCommand) -> None:
        """The same: the broker hears who is there and who is not as soon as it listens again."""
        if command.code in _OF_WHO_IS_THERE:
            self._remember(command)
            if self._link is not None and self._is_told():
                with suppress(UpstreamError):  # it is told anew by the next connection
                    self._link.tell(replace(command, flag=ONEWAY_FLAG))
        self._mend_if_lost()

    async def _make(self) -> Link:
        if self._link is not None:
            self._link.close()
        link = await super()._make()
        self._asked.clear()
        link.on_end = self._mend_if_lost
        if self._has_left:
            link.close()
        return link

    def _is_told(self) -> bool:
        return self._told is not None and self._told is self._link and self._told.is_open

    def _mend_if_lost(self) -> None:
        if self._mending is None and self._heartbeats and not self._has_left and not self._is_told():
            self._mending = asyncio.create_task(self._mend())

    async def _mend(self) -> None:
        seconds, most = _MEND_SECONDS
        try:
            while self._heartbeats and not self._is_told():
                # Not all of a broker's clients in the same moment.
                await asyncio.sleep(random.uniform(seconds / 2, seconds))
                async with self._pool.mending:
                    with suppress(UpstreamError):
                        await self.link(None)
                seconds = min(2 * seconds, most)
        finally:
            self._mending = None

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
        if self._mending is not None:
            self._mending.cancel()
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
