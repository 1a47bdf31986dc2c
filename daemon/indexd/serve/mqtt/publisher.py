"""Outbox: the events that wait until somebody takes them, at most so many: the oldest go, and are counted.

What is published: topics and JSON, made of the board's row and of events. Pure.

publish: connect, say ``online``, publish states and events, say ``offline``; when the connection breaks, again.

Whatever the network does, only the outbox fills. The index is built in other threads and is never waited for here, nor
does it wait.

Inlet: what a broker may send to somebody who has subscribed to nothing: short answers, and not too many.

The package would read and keep whatever comes. Here it is looked at before it is read, packet by packet.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import paho.mqtt.client as paho

from indexd.config import Config
from indexd.serve.board import Board, Event, Events
from indexd.serve.mqtt.link import Backoff, Link, Problem, Said, StatePace, read_password, reason

# As often as the index is flushed, and nobody's concern at once.
_ROUTINE = "flush"


class Outbox:
    """Used by one thread. Those that were taken are under way until they are published or given back."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._waiting: deque[Event] = deque()
        self._under_way = 0
        self.last = 0
        #: The number of the newest event that is worth a state.
        self.notable = 0
        self.published = 0
        self.dropped = 0

    def __repr__(self) -> str:
        return f"Outbox({self.waiting} waiting, {self.published} published, {self.dropped} dropped)"

    @property
    def waiting(self) -> int:
        """Those that are not published yet, those under way included."""
        return len(self._waiting) + self._under_way

    def collect(self, events: Events) -> None:
        """Take over what is new; what ``events`` itself could not keep counts as dropped."""
        for event in events.since(self.last):
            self.dropped += event.number - self.last - 1
            self.last = event.number
            if event.kind != _ROUTINE:
                self.notable = event.number
            self._waiting.append(event)
        self._trim()

    def take(self, count_max: int) -> list[Event]:
        """The oldest, in order; each list ends in ``confirm`` or ``give_back``."""
        taken = [self._waiting.popleft() for _ in range(min(count_max, len(self._waiting)))]
        self._under_way += len(taken)
        return taken

    def confirm(self, taken: list[Event]) -> None:
        """The broker has them."""
        self._under_way -= len(taken)
        self.published += len(taken)

    def give_back(self, taken: list[Event]) -> None:
        """They may not have arrived: they wait again, before all others."""
        self._under_way -= len(taken)
        self._waiting.extendleft(reversed(taken))
        self._trim()

    def _trim(self) -> None:
        while len(self._waiting) > self._waiting_max:
            self._waiting.popleft()
            self.dropped += 1


ONLINE, OFFLINE = b"online", b"offline"
_LEVEL_BYTES_MAX = 200
_PLACES = frozenset({"begin", "end"})


def topic_level(name: str) -> str:
    """``name`` as one level of a topic: what MQTT or its wildcards forbid there becomes ``_``; at most 200 bytes."""
    clean = "".join("_" if char in "/+#" or not char.isprintable() else char for char in name)
    return clean.encode()[:_LEVEL_BYTES_MAX].decode(errors="ignore") or "_"


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one node, ``PREFIX/CLUSTER/NODE/...``, and the name it connects with."""

    prefix: str
    cluster: str
    node_id: str

    @property
    def _root(self) -> str:
        return f"{self.prefix}/{topic_level(self.cluster)}/{topic_level(self.node_id)}"

    @property
    def status(self) -> str:
        """Retained: ``online``, or ``offline``."""
        return f"{self._root}/status"

    @property
    def state(self) -> str:
        """Retained: the newest state."""
        return f"{self._root}/state"

    def event(self, kind: str) -> str:
        """Not retained: the events of one kind."""
        return f"{self._root}/event/{topic_level(kind)}"

    @property
    def client_id(self) -> str:
        """The same for every connection of a node.

        So the broker ends a connection that was left half open, and publishes its will, before it takes the next one;
        otherwise that ``offline`` would come minutes later, on top of ``online``.
        """
        return f"indexd-{topic_level(self.cluster)}-{topic_level(self.node_id)}"


def state_payload(row: Mapping[str, Any]) -> bytes:
    """The board's row; 64-bit offsets are strings, as they are over HTTP: a double holds 53 bits."""
    return _json(_texts(row))


def event_payload(event: Event, board: Mapping[str, Any]) -> bytes:
    """One event. Within one ``bootId`` the ``seq`` of the events of all kinds grows by one: a gap is what was lost.

    The same event may come twice, after a connection that broke before the broker had answered.
    """
    about = {
        "seq": event.number,
        "bootId": board["bootId"],
        "cluster": board["cluster"],
        "nodeId": board["nodeId"],
        "at": event.at,
        "kind": event.kind,
        "event": event.name,
        "fields": event.fields,
    }
    return _json(_texts(about))


def condition(row: Mapping[str, Any]) -> str:
    """What is worth a state at once when it changes: phase, problems, corruption, and what is known of the broker."""
    broker = row.get("broker") or {}
    seen = [row.get(key) for key in ("phase", "problems", "corrupt")]
    return json.dumps([*seen, *(broker.get(key) for key in ("alive", "indexing", "unsafe"))], default=str)


def _json(value: object) -> bytes:
    # ASCII: a path that is no UTF-8 would have none otherwise.
    return json.dumps(value, separators=(",", ":"), default=str).encode()


def _texts(value: object, key: str = "") -> object:
    if isinstance(value, Mapping):
        return {name: _texts(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        # A list of offsets, or of stretches [begin, end, reason], is called for what it holds.
        inner_key = "offset" if key == "uncovered" else key
        return [_texts(inner, inner_key) for inner in value]
    if isinstance(value, int) and not isinstance(value, bool) and _is_offset(key):
        return str(value)
    return value


def _is_offset(key: str) -> bool:
    return key in _PLACES or key.lower().endswith("offset")


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


#: Of one packet, in bytes; MQTT 5, 3.1.2.11.4 lets the broker know.
PACKET_BYTES_MAX = 65_536
# MQTT 5, 2.1.2, the upper half of a packet's first byte: CONNACK, PUBACK, PINGRESP, DISCONNECT.
_ANSWERS = frozenset({0x20, 0x40, 0xD0, 0xE0})
_PUBLISH = 0x30
# Of the answers in a second, besides one for each message that was sent in it.
_UNASKED_MAX = 1000


class Inlet:
    """Stands between a paho client and its socket; ``breach`` is called, with the reason, before each refusal."""

    def __init__(self, client: paho.Client, breach: Callable[[str], object]) -> None:
        self._client, self._breach = client, breach
        self._second, self._left = 0, 0
        # All that comes in goes through there.
        self._receive: Callable[[int], bytes] = client._sock_recv
        client._sock_recv = self._look_and_receive  # type: ignore[method-assign,assignment]  # another argument's name

    def asked(self) -> None:
        """One more answer is due."""
        self._left += 1

    def _look_and_receive(self, size: int) -> bytes:
        if (problem := self._problem(size)) is not None:
            self._breach(problem)
            # The package closes the socket then, and keeps nothing.
            raise ConnectionError(problem)
        return self._receive(size)

    def _problem(self, size: int) -> str | None:
        command = self._client._in_packet["command"]  # 0 before the first byte of a packet
        if command == 0:
            return self._count_packet()
        if command & 0xF0 == _PUBLISH:
            return "the broker sends messages that nobody asked for"
        if command & 0xF0 not in _ANSWERS:
            return f"the broker sends what is no answer of MQTT 5 (a packet that begins with 0x{command:02X})"
        if size > PACKET_BYTES_MAX:
            return f"the broker sends a packet of more than {PACKET_BYTES_MAX} bytes"
        return None

    def _count_packet(self) -> str | None:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._left = second, max(self._left, _UNASKED_MAX)
        self._left -= 1
        return "the broker sends answers that nobody asked for" if self._left < 0 else None
