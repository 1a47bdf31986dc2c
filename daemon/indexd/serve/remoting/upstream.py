"""Who is asked upstream: NameServers in turn, BrokerLocator for the broker's address, CircuitBreaker for who hangs.

A broker may come back at another port, and a name server may have forgotten everything: what was known last holds
until something newer is said.

RocketMQ's clients wait 3 s for most answers. Where there is another answer, who hangs must not take all of that: the
first request waits for a third of it, and those behind it get the other answer at once, until a request of our own has
been answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from indexd.config import Config
from indexd.config.serving import is_peer
from indexd.config.units import printable, shown
from indexd.serve.remoting.access import ACCESS_KEY, SIGNATURE, Credentials
from indexd.serve.remoting.command import VERSION, RemotingCommand, RequestCode, ResponseCode
from indexd.serve.remoting.link import LinkPool, UpstreamError
from indexd.serve.remoting.routes import BrokerPlace, Json, find_place, own_place, read_json

# The cluster is asked for again when what is known is older than this; while the broker is not there, than that.
_FRESH_SECONDS = 5.0
_MISSING_SECONDS = 1.0
_ANEW_SECONDS = 0.5

_SHOWN_MAX = 300

Warn = Callable[..., None]


class NameServers:
    """Asked in turn: the one that answered last first."""

    def __init__(self, addresses: tuple[str, ...], pool: LinkPool) -> None:
        self._addresses, self._pool = addresses, pool
        self._current = 0

    def __repr__(self) -> str:
        return f"NameServers({self.address} of {len(self._addresses)})"

    @property
    def address(self) -> str:
        """The one that is asked first."""
        return self._addresses[self._current]

    async def ask(self, command: RemotingCommand, seconds: float, within: float | None = None) -> RemotingCommand:
        """The first answer that comes; UpstreamError names all of them.

        The last one has ``seconds`` for it, those before it no more than a connection may take. ``within``: all of
        them together have no longer, connections included.
        """
        first, count, problems = self._current, len(self._addresses), []
        end = None if within is None else time.monotonic() + within
        for number in range(count):
            at, is_last = (first + number) % count, number == count - 1
            turn = None if end is None else max(end - time.monotonic(), 0.0) / (count - number)
            try:
                try:
                    async with asyncio.timeout(turn):
                        answer = await self._ask(
                            self._addresses[at], command, seconds if is_last else min(seconds, self._pool.timeout)
                        )
                except TimeoutError:
                    raise UpstreamError(f"no answer within {turn:.2g} s") from None
            except UpstreamError as error:
                problems.append(f"the name server at {self._addresses[at]} does not answer: {error}")
            else:
                self._current = at
                return answer
        raise UpstreamError("; ".join(problems))

    def is_one(self, address: str) -> bool:
        """Whether a name server is known at that address."""
        return address in self._addresses

    async def _ask(self, address: str, command: RemotingCommand, seconds: float) -> RemotingCommand:
        try:
            return await (await self._pool.get(address)).ask(command, seconds)
        except UpstreamError as error:
            if not error.is_lost:
                raise
        # It was started anew, perhaps: whatever a name server is asked may be asked twice.
        return await (await self._pool.get(address)).ask(command, seconds)


class BrokerLocator:
    """Where the broker is: broker_address, else what the name servers say of the broker of our name.

    ``members``: what the headers of our own requests have beside the usual.
    """

    def __init__(
        self,
        config: Config,
        names: NameServers,
        credentials: Credentials | None,
        warn: Warn,
        members: Mapping[str, object],
    ) -> None:
        self._config, self._names, self._credentials, self._warn = config, names, credentials, warn
        self._members = members
        self._found: BrokerPlace | None = None
        self._asked = -_FRESH_SECONDS
        #: Monotonic, seconds: what is known now was asked for then, or later.
        self.sure_at = self._asked
        self._problem = "nobody was asked yet"
        self._asking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"BrokerLocator({self._found})"

    @property
    def known(self) -> BrokerPlace | None:
        """What was found last."""
        return self._found

    @property
    def problem(self) -> str:
        """Why nothing was found."""
        return self._problem

    async def look(self, *, anew: bool = False, within: float | None = None) -> BrokerPlace | None:
        """Where it is, as known now; None: none of the name server's brokers is known to be ours (``problem``).

        ``anew``: it does not answer where it was. Only then, and before the first answer, is a name server waited for,
        ``within`` seconds if they are given.
        """
        self._refresh(anew=anew)
        if self._asking is not None and (anew or self._found is None):
            await asyncio.wait([self._asking], timeout=within)
        return self._found

    async def address(self, *, anew: bool = False) -> str:
        """Where requests for it go; UpstreamError if nobody knows."""
        given = self._config.node.broker_address
        if given is not None:
            return given
        place = await self.look(anew=anew)
        if place is None or place.address is None:
            raise UpstreamError(f"where the broker is is not known: {self._problem}")
        return place.address

    def known_address(self) -> str | None:
        """The same as far as it is known, without waiting for anybody."""
        given = self._config.node.broker_address
        if given is not None:
            return given
        self._refresh(anew=False)
        return None if self._found is None else self._found.address

    def note(self, cluster: Json) -> BrokerPlace | None:
        """A ClusterInfo that came from a name server; where the broker is then. ValueError if it is none."""
        found = find_place(cluster, self._config, self._found)
        self._asked = time.monotonic()
        if found is not None:
            if found.address is not None and not is_peer(found.address):
                self._problem = f"what the name server gives for it is no address: {shown(found.address)}"
                self._warn("upstream_unread", problem=self._problem, hint="correct brokerIP1, or give broker_address")
                found = replace(found, address=None)
            if found.address is None and self._found is not None:
                found = replace(found, address=self._found.address)
            self._found = found
            return found
        names = ", ".join(sorted(cluster["brokerAddrTable"])) or "none"
        own = own_place(self._config)
        self._problem = f"the name server knows these brokers: {cut(names)}; ours is {own.name} (node_id, brokerName)"
        if self._found is not None:
            self._found = replace(self._found, is_registered=False)
        elif self._config.node.node_id is not None:
            self._found = own
        if self._found is None:
            self._warn("upstream_unknown", problem=self._problem, hint="give node_id, the broker's brokerName")
        return self._found

    def _refresh(self, *, anew: bool) -> None:
        is_there = self._found is not None and self._found.is_registered
        fresh = _ANEW_SECONDS if anew else _FRESH_SECONDS if is_there else _MISSING_SECONDS
        if self._asking is None and time.monotonic() - self._asked >= fresh:
            self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        try:
            began = self._asked = time.monotonic()
            answer = await self._names.ask(self.request(), self._config.remoting.upstream_timeout)
            if answer.code != ResponseCode.SUCCESS:
                raise ValueError(f"code {answer.code}, {cut(answer.remark or 'no remark')}")
            self.note(read_json(answer.body))
            self.sure_at = began
        except UpstreamError as error:
            self._problem = str(error)
        except ValueError as error:
            self._problem = f"the name server at {self._names.address} gave no cluster: {error}"
        finally:
            self._asking = None

    def request(self, code: int = RequestCode.GET_BROKER_CLUSTER_INFO) -> RemotingCommand:
        """One of our own, without fields, signed if we want signatures: whoever is asked may want them, too."""
        command = RemotingCommand(code, 0, language="JAVA", version=VERSION)
        command.others.update(self._members)
        if self._credentials is not None:
            command.ext_fields[ACCESS_KEY] = self._credentials.access_key
            command.ext_fields[SIGNATURE] = self._credentials.signature(command)
        return command


def cut(text: str) -> str:
    """What another process has said, to be shown in a line."""
    return f"{printable(text[:_SHOWN_MAX])}{'...' if len(text) > _SHOWN_MAX else ''}"


T = TypeVar("T")
#: What a request that has another answer waits for, seconds: to connect, and to be answered.
PATIENCE_SECONDS = 1.0
_PROBE_SECONDS = 1.0
# When nobody has asked for so long there are no more probes, and the next one waits again.
_WANTED_SECONDS = 30.0


class CircuitBreaker:
    """Refuses requests to one that did not answer, until ``probe`` gets an answer (it raises UpstreamError if not)."""

    def __init__(self, probe: Callable[[], Awaitable[object]]) -> None:
        self._probe = probe
        self._problem: str | None = None
        self._wanted = 0.0
        self._probing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"CircuitBreaker({self._problem})"

    @property
    def is_open(self) -> bool:
        """It did not answer last time: ``ask`` refuses at once."""
        return self._problem is not None

    async def ask(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What ``attempt`` returns, which should not take long; UpstreamError, at once while it is open."""
        self._wanted = time.monotonic()
        if self._problem is not None:
            raise UpstreamError(self._problem)
        try:
            return await attempt()
        except UpstreamError as error:
            self._problem = str(error)
            if self._probing is None:
                self._probing = asyncio.create_task(self._find_out())
            raise

    def answered(self) -> None:
        """An answer came, to whatever request: close the breaker."""
        self._problem = None

    def close(self) -> None:
        """No more probes."""
        if self._probing is not None:
            self._probing.cancel()

    async def _find_out(self) -> None:
        try:
            while self._problem is not None and time.monotonic() - self._wanted < _WANTED_SECONDS:
                await asyncio.sleep(_PROBE_SECONDS)
                try:
                    await self._probe()
                except UpstreamError as error:
                    self._problem = str(error)
                else:
                    break
        finally:
            self._probing, self._problem = None, None
