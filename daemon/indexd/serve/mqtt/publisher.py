"""publish: connect, say ``online``, publish states and events, say ``offline``; when the connection breaks, again.

Whatever the network does, only the outbox fills. The index is built in other threads and is never waited for here, nor
does it wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from indexd.config import Config
from indexd.serve.board import Board, Event
from indexd.serve.mqtt.link import (
    OFFLINE,
    ONLINE,
    Backoff,
    Link,
    Outbox,
    Problem,
    Said,
    StatePace,
    Topics,
    condition,
    event_payload,
    read_password,
    reason,
    state_payload,
)

Logger = Any

# Between two looks at the board.
_TICK_SECONDS = 0.2
# Events on their way to the broker before the first of them is answered.
_UNDER_WAY_MAX = 8
# Both together are shorter than what ServeThread grants.
_LAST_WORDS_SECONDS = 3.0
_LEAVE_SECONDS = 1.0


async def publish(config: Config, board: Board, log: Logger, stop: asyncio.Event) -> None:
    """Publish until ``stop``; ``board.outlets["mqtt"]`` says how it goes. No network and no broker ends it."""
    publisher = _Publisher(config, board, log)
    collecting = asyncio.create_task(publisher.collect())
    try:
        while not stop.is_set():
            await publisher.connect_once(stop)
    finally:
        collecting.cancel()
        publisher.tell()


class _Publisher:
    def __init__(self, config: Config, board: Board, log: Logger) -> None:
        self._config, self._board, self._log = config.mqtt, board, log
        self._about = board.row()
        self._topics = Topics(self._config.mqtt_topic_prefix, self._about["cluster"], self._about["nodeId"])
        self._outbox = Outbox(self._config.mqtt_queue_max)
        self._pace = StatePace(self._config.mqtt_interval)
        self._backoff, self._said = Backoff(), Said()
        self._connected_at: float | None = None
        self._last_error: str | None = None
        self.tell()

    def tell(self) -> None:
        """Write down how it goes: ``published`` and ``dropped`` count events, ``waiting`` those not yet published."""
        self._board.outlets["mqtt"] = {
            "connected": self._connected_at is not None,
            "published": self._outbox.published,
            "dropped": self._outbox.dropped,
            "waiting": self._outbox.waiting,
            "lastError": self._last_error,
        }

    async def collect(self) -> None:
        """Take over events whether connected or not: the board keeps few."""
        while True:
            self._outbox.collect(self._board.events)
            self.tell()
            await asyncio.sleep(_TICK_SECONDS)

    async def connect_once(self, stop: asyncio.Event) -> None:
        """One connection from its begin to its end, and the pause after one that failed."""
        try:
            await self._connect(stop)
        except Problem as error:
            now = time.monotonic()
            seconds = self._backoff.pause(0.0 if self._connected_at is None else now - self._connected_at)
            self._connected_at, self._last_error = None, reason(error)
            self.tell()
            if self._said.is_worth(self._last_error, now):
                retry = {} if stop.is_set() else {"retry_seconds": round(seconds, 1)}
                self._say(self._log.warning, "mqtt_lost", problem=self._last_error, **retry)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds)
        finally:
            self._connected_at = None

    async def _connect(self, stop: asyncio.Event) -> None:
        password = await asyncio.to_thread(read_password, self._config.mqtt_password_file)
        link = Link(self._config, self._topics, password)
        await _first_of(link.open(), stop.wait())
        if not link.is_open:
            return
        try:
            await _first_of(link.lost(), self._publish(link), stop.wait())
            await self._last_words(link)
        except BaseException:
            await link.cut()
            raise
        await link.leave(_LEAVE_SECONDS)

    async def _publish(self, link: Link) -> None:
        await link.send(self._topics.status, ONLINE, retain=True)
        await self._send_state(link)
        await self._send_events(link)
        # Only now: a broker that takes a part and refuses the rest is no news at every try.
        self._connected_at = time.monotonic()
        self.tell()
        self._say(self._log.info, "mqtt_connected", topic=self._topics.status)
        self._said.forget()
        while True:
            if self._pace.is_due(self._shown(), time.monotonic()):
                await self._send_state(link)
            if not await self._send_events(link):
                await asyncio.sleep(_TICK_SECONDS)

    async def _last_words(self, link: Link) -> None:
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            self._outbox.collect(self._board.events)
            while await self._send_events(link):
                pass
            await self._send_state(link)
            await link.send(self._topics.status, OFFLINE, retain=True)

    async def _send_state(self, link: Link) -> None:
        shown = self._shown()
        await link.send(self._topics.state, state_payload(self._board.row()), retain=True)
        self._pace.published(shown, time.monotonic())

    async def _send_events(self, link: Link) -> bool:
        events = self._outbox.take(_UNDER_WAY_MAX)
        try:
            await asyncio.gather(*(self._send_event(link, event) for event in events))
        except BaseException:
            self._outbox.give_back(events)
            raise
        self._outbox.confirm(events)
        return bool(events)

    async def _send_event(self, link: Link, event: Event) -> None:
        await link.send(self._topics.event(event.kind), event_payload(event, self._about))

    def _shown(self) -> object:
        return condition(self._board.row()), self._outbox.notable, self._connected_at is not None

    def _say(self, write: Any, name: str, **fields: object) -> None:
        place = f"{self._config.mqtt_host}:{self._config.mqtt_port}"
        write(name, broker=place, **fields, waiting=self._outbox.waiting, dropped=self._outbox.dropped)


async def _first_of(*steps: Coroutine[Any, Any, object]) -> None:
    # Until the first ends; the rest is cancelled. Of several that failed the first named is raised.
    tasks = [asyncio.create_task(step) for step in steps]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome
