"""Doubt: whether it is worth waiting for somebody who did not answer, where there is another answer.

RocketMQ's clients wait 3 s for most answers. Who hangs must not take all of that: the first request waits for a third
of it, and those behind it get the other answer at once, until a request of our own has been answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from indexd.serve.remoting.link import UpstreamError

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
