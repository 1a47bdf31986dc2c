"""LinkPool: connections to the real name servers and the real broker, and what is known of those that fail.

NameServers, Whereabouts: who is asked for routes, and where the broker is whose log this is.

A broker may come back at another port and a name server may have forgotten everything: what was known last is believed
until something newer is said.

Doubt: whether it is worth waiting for somebody who did not answer, where there is another answer.

RocketMQ's clients wait 3 s for most answers. Who hangs must not take all of that: the first request waits for a third
of it, and those behind it get the other answer at once, until a request of our own has been answered.

SparingLog: lines that others can bring about, each at most once a minute, with how many were left out.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from indexd.config import Config, split_address
from indexd.config.serving import is_peer
from indexd.config.units import printable, shown
from indexd.errors import UsageError
from indexd.serve.remoting.command import VERSION, RemotingCommand, RequestCode, ResponseCode
from indexd.serve.remoting.link import Link, OnRequest, UpstreamError, reason_of
from indexd.serve.remoting.routes import Json, Place, find_place, own_place, read_json
from indexd.serve.remoting.server import ACCESS_KEY, SIGNATURE, Credentials

_IDLE_SECONDS = 60.0
_LOOK_SECONDS = 15.0
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
    """One shared connection to each address, opened when it is asked for and closed after a minute without use."""

    def __init__(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._links: dict[str, Link] = {}
        self._opening: dict[str, asyncio.Task[Link]] = {}
        self._outages: dict[str, _Outage] = {}
        self._trials: dict[str, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
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

        Where nobody answered before one at a time tries, and the others wait for what becomes of it. UpstreamError.
        """
        while (outage := self._outages.get(address)) is not None:
            if time.monotonic() < outage.again:
                raise UpstreamError(f"{outage.why}, since {_clock(outage.since)}")
            if address not in self._trials:
                return await self._try(address, on_request)
            await asyncio.wait([self._trials[address]])
        return await self._connect_noted(address, on_request)

    def note(self, address: str, why: str, seconds: float = _RETRY_SECONDS) -> float:
        """Nobody answers there, for that reason: it is not tried again within ``seconds``. Since when (epoch, s)."""
        before = self._outages.get(address)
        since = time.time() if before is None else before.since
        self._outages[address] = _Outage(why, since, time.monotonic() + seconds)
        return since

    async def close(self) -> None:
        """Close every connection, those that were handed out too, and see them closed."""
        if self._timer is not None:
            self._timer.cancel()
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
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        return link

    async def _try(self, address: str, on_request: OnRequest | None) -> Link:
        trial = self._trials[address] = asyncio.get_running_loop().create_future()
        try:
            return await self._connect_noted(address, on_request)
        finally:
            del self._trials[address]
            trial.set_result(None)

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

    def _look(self) -> None:
        self._timer = None
        limit = time.monotonic() - _IDLE_SECONDS
        for address, link in list(self._links.items()):
            if link.is_idle and link.used < limit:
                link.close()
            if not link.is_open:
                del self._links[address]
        if self._links:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


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


class Whereabouts:
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
        self._found: Place | None = None
        self._asked = -_FRESH_SECONDS
        #: Monotonic, seconds: what is known now was asked for then, or later.
        self.sure_at = self._asked
        self._problem = "nobody was asked yet"
        self._asking: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Whereabouts({self._found})"

    @property
    def known(self) -> Place | None:
        """What was found last."""
        return self._found

    @property
    def problem(self) -> str:
        """Why nothing was found."""
        return self._problem

    async def look(self, *, anew: bool = False, within: float | None = None) -> Place | None:
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

    def note(self, cluster: Json) -> Place | None:
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


class Doubt:
    """About one that is asked. ``probe`` asks it something; UpstreamError if it does not answer."""

    def __init__(self, probe: Callable[[], Awaitable[object]]) -> None:
        self._probe = probe
        self._problem: str | None = None
        self._wanted = 0.0
        self._probing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Doubt({self._problem})"

    @property
    def is_there(self) -> bool:
        """It did not answer last time: ``ask`` would not ask it."""
        return self._problem is not None

    async def ask(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """What ``attempt`` comes to, which should not take long; UpstreamError, in doubt at once."""
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
        """It has, whatever it was asked."""
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


_SECONDS = 60.0


class SparingLog:
    """For the events of one outlet: their names are few and fixed, so nothing here grows."""

    def __init__(self, log: Any) -> None:
        self._log = log
        self._said: dict[str, tuple[float, int]] = {}  # event -> (when, left out since)

    def warning(self, event: str, **fields: object) -> None:
        """As structlog's, with ``left_out``: such lines since the one before, where there were any."""
        now = time.monotonic()
        at, left_out = self._said.get(event, (-_SECONDS, 0))
        if now - at < _SECONDS:
            self._said[event] = (at, left_out + 1)
            return
        self._said[event] = (now, 0)
        if left_out:
            fields["left_out"] = left_out
        self._log.warning(event, **fields)
