"""LinkPool: connections to the real name servers and the real broker, and what is known of those that fail.

Doubt: whether it is worth waiting for somebody who did not answer, where there is another answer.

RocketMQ's clients wait 3 s for most answers. Who hangs must not take all of that: the first request waits for a third
of it, and those behind it get the other answer at once, until a request of our own has been answered.

SparingLog: lines that others can bring about, each at most once a minute, with how many were left out.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from indexd.config import Config, split_address
from indexd.errors import UsageError
from indexd.serve.remoting.link import Link, OnRequest, UpstreamError, reason_of

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
