"""Link: one connection with a broker of MQTT, made anew for each try, and what is sent and received over it.

A link ends by being left or cut. Left, the broker forgets the will. Cut, the broker publishes it, so whoever cannot say
``offline`` is said to be. ``reason`` says in one line why there is no connection, with what to look at where that is
known. What is published, topics and JSON, is made of the board's row and of events; Outbox holds the events that wait
until somebody takes them, at most so many: the oldest go, and are counted.

Inlet looks at what a broker sends before the package reads it, packet by packet: who has subscribed to nothing gets
short answers, and few of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiomqtt
import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from indexd.config import MqttConfig
from indexd.errors import DiskError
from indexd.serve.board import Event, Events
from indexd.storage.disk import Disk

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


# MQTT 5, 2.4: what the package calls an end that nobody has given a reason for, a packet that is none, and silence.
_CODES = {
    0x80: "the connection was lost",
    0x82: "protocol error: a packet that is no MQTT 5, as the broker says or as it sent one; check mqtt_port",
    0x8D: "the connection was lost: the broker has been silent for too long",
}
_TIMED_OUT = "Operation timed out"
_ACCESS = "; check mqtt_username, mqtt_password_file and the broker's access list"
_VOUCHING = "; check mqtt_ca_file, and that mqtt_host is a name in the broker's certificate"
_SIZE = "; check the broker's limit for a packet (mosquitto: max_packet_size)"
# Bad user name or password, not authorized, topic name invalid, packet too large, quota exceeded, retain, QoS.
_HINTS = {
    0x86: _ACCESS,
    0x87: _ACCESS,
    0x90: "; check mqtt_topic_prefix, and which topics the broker allows",
    0x95: _SIZE,
    0x97: "; check the broker's quotas",
    0x9A: "; the broker has to allow retained messages (mosquitto: retain_available true)",
    0x9B: "; the broker has to allow QoS 1 (mosquitto: max_qos 1)",
}


class RefusedError(aiomqtt.MqttError):
    """The broker does not take what is published; the message is the whole reason, with the topic."""

    @classmethod
    def by_code(cls, topics: str, code: ReasonCode) -> RefusedError:
        """As the broker said; ``topics`` is what it was about, as far as that is known."""
        return cls(f"the broker says about {topics}: {code}{_HINTS.get(code.value, '')}")

    @classmethod
    def by_size(cls, topic: str, size_max: int) -> RefusedError:
        """Nothing was sent: the broker has said before that it takes ``size_max`` bytes."""
        # Without the size, which is another at each try: the same reason is said once.
        return cls(f"the broker says about {topic}: Packet too large, more than {size_max} bytes{_SIZE}")


def is_about_topics(code: object) -> bool:
    """Whether a broker that ends the connection so means what was being published."""
    return isinstance(code, ReasonCode) and code.value in _HINTS


def reason(error: BaseException) -> str:
    """One line for the log."""
    if isinstance(error, DiskError):
        return error.line()
    cause = error.__cause__ or error
    code = getattr(cause, "rc", None)
    if isinstance(code, ReasonCode):
        return _CODES.get(code.value) or f"the broker says: {code}{_HINTS.get(code.value, '')}"
    if isinstance(error, TimeoutError) or str(error) == _TIMED_OUT:
        return "the broker does not answer; check mqtt_port and mqtt_tls"
    text = " ".join(str(cause).split())
    return f"{text}{_VOUCHING}" if "certificate" in text.lower() else text


#: The broker has to answer within.
ANSWER_SECONDS = 5.0
# Without a word for twice this long, the connection is gone.
_KEEPALIVE_SECONDS = 20
_CUT_SECONDS = 1.0
_PASSWORD_MAX = 65_535
# A PUBLISH without its topic, payload and content type has at least so many bytes: MQTT 5, 3.3.
_PUBLISH_BYTES = 2 + 2 + 2 + 1 + 2 + 3

# What the packages would write to standard error themselves: their reasons reach our log as errors.
_SILENT = logging.getLogger("indexd.mqtt")
_SILENT.addHandler(logging.NullHandler())
_SILENT.propagate = False

Problem = (aiomqtt.MqttError, DiskError, TimeoutError)


class Link(aiomqtt.Client):
    """Raises MqttError, whatever is the matter with the connection."""

    def __init__(self, config: MqttConfig, topics: Topics, password: str | None) -> None:
        ca_file = config.mqtt_ca_file
        tls = aiomqtt.TLSParameters(ca_certs=None if ca_file is None else str(ca_file)) if config.mqtt_tls else None
        super().__init__(
            config.mqtt_host or "",
            config.mqtt_port,
            username=config.mqtt_username,
            password=password,
            identifier=topics.client_id,
            protocol=aiomqtt.ProtocolVersion.V5,
            will=aiomqtt.Will(topics.status, OFFLINE, qos=1, retain=True, properties=_properties("text/plain")),
            tls_params=tls,
            timeout=ANSWER_SECONDS,
            keepalive=_KEEPALIVE_SECONDS,
            max_queued_incoming_messages=1,
            properties=_limits(),
            logger=_SILENT,
        )
        self._inlet = Inlet(self._client, self._end)
        self._refused: dict[int, ReasonCode] = {}
        self._under_way: list[str] = []
        self._packet_max: int | None = None
        self._ended: aiomqtt.MqttError | None = None
        self._connected.add_done_callback(_look_at)
        self._disconnected.add_done_callback(_look_at)
        self.is_open = False

    async def open(self) -> None:
        """Connect, within some ten seconds."""
        try:
            await self.__aenter__()
            # What ended in the moment after the answer is forgotten by the package.
            if self._ended is not None:
                raise self._ended
            self.is_open = True
        except ValueError as error:  # a host that cannot be a name
            raise aiomqtt.MqttError(str(error)) from None
        finally:
            # A connection that is taken later, when nobody waits for it any more, would stand beside the next.
            if not self.is_open:
                self._shut_down()
        self._disconnected.add_done_callback(_look_at)  # the package has made a new one if it was there before

    async def send(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Publish, and wait until the broker has it; a broker that does not allow it is an error too."""
        kind = "application/json" if payload.startswith(b"{") else "text/plain"
        size = len(topic.encode()) + len(kind) + len(payload) + _PUBLISH_BYTES
        if self._packet_max is not None and size > self._packet_max:
            raise RefusedError.by_size(topic, self._packet_max)
        self._under_way.append(topic)
        self._inlet.asked()
        try:
            await self.publish(topic, payload, qos=1, retain=retain, properties=_properties(kind))
        except _RefusalError as refused:
            raise RefusedError.by_code(topic, refused.code) from None
        finally:
            self._under_way.remove(topic)

    async def lost(self) -> None:
        """Ends with MqttError as soon as the connection is gone, and never otherwise: nothing is subscribed to."""
        try:
            async for _ in self.messages:
                pass
        except aiomqtt.MqttError as error:
            code = getattr(error.__cause__, "rc", None)
            if isinstance(code, ReasonCode) and is_about_topics(code) and self._under_way:
                raise RefusedError.by_code(", ".join(dict.fromkeys(self._under_way)), code) from None
            raise

    async def leave(self, seconds: float) -> None:
        """Disconnect: no will is published."""
        self.timeout = seconds
        await self.__aexit__(None, None, None)

    async def cut(self) -> None:
        """End it without a word, so that the will is published."""
        self._shut_down()
        with suppress(aiomqtt.MqttError, TimeoutError):
            async with asyncio.timeout(_CUT_SECONDS):
                await self.lost()

    def _shut_down(self) -> None:
        # Only leaving is offered by the package. The end of file makes it close and forget the socket as usual.
        opened = self._client.socket()
        if isinstance(opened, socket.socket):
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def _end(self, problem: str) -> None:
        # Of our own accord, from within a callback of the loop.
        if self._ended is None:
            self._ended = aiomqtt.MqttError(problem)
        awaited = self._disconnected if self._connected.done() else self._connected
        if not awaited.done():
            awaited.set_exception(self._ended)
        self._shut_down()

    def _on_connect(self, *args: Any) -> None:
        self._packet_max = getattr(args[-1], "MaximumPacketSize", None)
        super()._on_connect(*args)

    def _on_disconnect(self, *args: Any) -> None:
        if self._ended is None:
            self._ended = aiomqtt.MqttCodeError(args[3])
        super()._on_disconnect(*args)

    def _on_publish(
        self, client: paho.Client, userdata: Any, mid: int, reason_code: ReasonCode, properties: Properties
    ) -> None:
        # The package takes every answer for a yes.
        if reason_code.is_failure and mid in self._pending_publishes:
            self._refused[mid] = reason_code
        super()._on_publish(client, userdata, mid, reason_code, properties)

    @contextmanager
    def _pending_call(self, mid: int, value: Any, pending_dict: dict[int, Any]) -> Iterator[None]:
        with super()._pending_call(mid, value, pending_dict):
            yield
        if (code := self._refused.pop(mid, None)) is not None:
            raise _RefusalError(code)

    # The package adds a socket to the loop later, and by number: it may be closed by then, and its number another's.

    def _on_socket_open(self, *args: Any) -> None:
        self._loop.call_soon_threadsafe(self._start_reading, args[-1])

    def _on_socket_register_write(self, *args: Any) -> None:
        self._loop.call_soon_threadsafe(self._start_writing, args[-1])

    def _start_reading(self, sock: socket.socket) -> None:
        if self._client.socket() is sock:
            self._loop.add_reader(sock.fileno(), self._act, self._client.loop_read)
            self._misc_task = self._loop.create_task(self._misc_loop())

    def _start_writing(self, sock: socket.socket) -> None:
        if self._client.socket() is sock:
            self._loop.add_writer(sock.fileno(), self._act, self._client.loop_write)

    def _act(self, step: Callable[[], object]) -> None:
        try:
            step()
            # What TLS has decrypted already makes no socket readable.
            while (opened := self._client.socket()) is not None and getattr(opened, "pending", int)() > 0:
                self._client.loop_read()
        except Exception as error:  # noqa: BLE001 - the package raises all kinds for packets that are none
            self._end(f"the broker sends what is no MQTT 5 ({error!r})")


class _RefusalError(Exception):
    def __init__(self, code: ReasonCode) -> None:
        super().__init__(str(code))
        self.code = code


def _look_at(ended: asyncio.Future[None]) -> None:
    # Why it ended is asked for by whoever is interested; else asyncio would write it to standard error.
    if not ended.cancelled():
        ended.exception()


def read_password(path: Path | None) -> str | None:
    """The first line of the file; raises DiskError, or MqttError when there is none that could be sent."""
    if path is None:
        return None
    with Disk().open_read(path) as file:
        line = file.pread(_PASSWORD_MAX, 0).partition(b"\n")[0].rstrip(b"\r")
    try:
        password = line.decode()
    except UnicodeDecodeError:
        raise aiomqtt.MqttError(f"the password in {path} is no UTF-8") from None
    if not password:
        raise aiomqtt.MqttError(f"no password in the first line of {path}")
    return password


def _properties(content_type: str) -> Properties:
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]  # the package's one untyped call
    properties.ContentType = content_type
    properties.PayloadFormatIndicator = 1
    return properties


def _limits() -> Properties:
    # For what we never ask for.
    properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]  # as below
    properties.MaximumPacketSize = PACKET_BYTES_MAX
    properties.ReceiveMaximum = 1
    return properties


#: Between two tries.
PAUSE_SECONDS = (1.0, 60.0)
# A connection that stood this long makes the next pause a short one again.
_STEADY_SECONDS = 60.0
# Between two states, however much happens.
_STATE_SECONDS_MIN = 1.0
# The same reason is said again.
_SAY_SECONDS = 600.0


class Backoff:
    """Pauses of 1 to 60 s that grow while nothing holds; random, so that many nodes do not come back at once."""

    def __init__(self) -> None:
        self._last = PAUSE_SECONDS[0]

    def pause(self, connected_seconds: float) -> float:
        """How long to wait now, after a connection that stood so long (0: there was none)."""
        shortest, longest = PAUSE_SECONDS
        if connected_seconds >= _STEADY_SECONDS:
            self._last = shortest
        self._last = min(random.uniform(shortest, 3 * self._last), longest)
        return self._last


class StatePace:
    """When the next state is due: at the interval, and soon after something changed."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._at = float("-inf")
        self._shown: object = None

    def is_due(self, shown: object, now: float) -> bool:
        """Whether to publish now; ``shown`` is what a change of is worth it."""
        age = now - self._at
        return age >= self._interval or (shown != self._shown and age >= _STATE_SECONDS_MIN)

    def published(self, shown: object, now: float) -> None:
        """It is."""
        self._shown, self._at = shown, now


class Said:
    """Whether a reason is worth a line: when it is another than the last, and else every ten minutes."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._at = 0.0

    def is_worth(self, reason: str, now: float) -> bool:
        """True: write the line; it counts as written."""
        if reason == self._reason and now - self._at < _SAY_SECONDS:
            return False
        self._reason, self._at = reason, now
        return True

    def forget(self) -> None:
        """It has been mended: the same reason is news again."""
        self._reason = None


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
