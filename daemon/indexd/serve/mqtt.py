"""Publishes status, state and events over MQTT 5 with QoS 1, and listens to nothing: what is sent here moves nothing.

By aiomqtt, which is asyncio-mqtt under its present name. Whatever the network does, events only wait in the status: the
index is built in other threads and is never waited for here, nor does it wait. A connection that fails is cut, so that
the broker publishes its will, ``offline``; one that is left says so itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import time
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiomqtt
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from indexd.config import Config, MqttConfig
from indexd.dispatch.reput import pause
from indexd.errors import DiskError
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.events import Event
from indexd.storage.disk import Disk

ONLINE, OFFLINE = b"online", b"offline"
# Of one packet from the broker, in bytes; MQTT 5, 3.1.2.11.4 lets it know.
_PACKET_BYTES_MAX = 65_536
# Between two tries.
_PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX = 1.0, 60.0
# A connection that stood this long makes the next pause a short one again.
_STEADY_SECONDS = 60.0
#: The broker has to answer within.
ANSWER_SECONDS = 5.0
# Without a word for twice this long, the connection is gone.
_KEEPALIVE_SECONDS = 20
# Between two looks at the status; between two states, however much happens.
_TICK_SECONDS, _STATE_SECONDS_MIN = 0.2, 1.0
# For the last words: less than what ServeThread grants.
_LEAVE_SECONDS = 4.0
# MQTT 5, 2.4: what the package calls an end that nobody has given a reason for, a packet that is none, and silence.
_CODES = {
    0x80: "the connection was lost",
    0x82: "protocol error: a packet that is no MQTT 5, as the broker says or as it sent one; check mqtt_port",
    0x8D: "the connection was lost: the broker has been silent for too long",
}
_ACCESS = "; check mqtt_username, mqtt_password_file and the broker's access list"
# Bad user name or password, not authorized, topic name invalid, packet too large, quota exceeded, retain, QoS.
_HINTS = {
    0x86: _ACCESS,
    0x87: _ACCESS,
    0x90: "; check mqtt_topic_prefix, and which topics the broker allows",
    0x95: "; check the broker's limit for a packet (mosquitto: max_packet_size)",
    0x97: "; check the broker's quotas",
    0x9A: "; the broker has to allow retained messages (mosquitto: retain_available true)",
    0x9B: "; the broker has to allow QoS 1 (mosquitto: max_qos 1)",
}
# What the packages would write to standard error themselves: their reasons reach our log as errors.
_SILENT = logging.Logger("indexd.mqtt", logging.CRITICAL + 1)


async def publish(config: Config, status: DaemonStatus, log: Any, stop: asyncio.Event) -> None:
    """Publish until ``stop``; ``status.outlets["mqtt"]`` says how it goes. No network and no broker ends it."""
    publisher = _Publisher(config.mqtt, status, log)
    status.outlets["mqtt"] = publisher.row
    seconds = _PAUSE_SECONDS_MIN
    while not stop.is_set():
        try:
            await publisher.connect(stop)
        except (aiomqtt.MqttError, DiskError, TimeoutError, ValueError) as error:  # a host that cannot be a name
            problem, since = reason(error), publisher.connected_at
            # Longer each time, and at random, so that many nodes do not come back at once.
            is_steady = since is not None and time.monotonic() - since >= _STEADY_SECONDS
            longest = 3 * (_PAUSE_SECONDS_MIN if is_steady else seconds)
            seconds = min(random.uniform(_PAUSE_SECONDS_MIN, longest), _PAUSE_SECONDS_MAX)
            if since is not None or problem != publisher.last_error:
                publisher.say(log.warning, "mqtt_lost", problem=problem, retry_seconds=round(seconds, 1))
            publisher.connected_at, publisher.last_error = None, problem
            await pause(stop, seconds)
        finally:
            publisher.connected_at = None


class _Publisher:
    def __init__(self, config: MqttConfig, status: DaemonStatus, log: Any) -> None:
        self._config, self._status, self._log = config, status, log
        self._about = status.row()
        levels = [topic_level(self._about[name]) for name in ("cluster", "nodeId")]
        self._root = "/".join((config.mqtt_topic_prefix, *levels))
        # The same for every connection of a node, so that the broker ends one that was left half open, and publishes
        # its will, before it takes the next one; else that ``offline`` would come minutes later, on top of ``online``.
        self._client_id = "-".join(("indexd", *levels))
        #: The number of the last event that was published or lost, and of the newest that is worth a state.
        self._last = self._notable = self._published = self._dropped = 0
        self.connected_at: float | None = None
        self.last_error: str | None = None

    def row(self) -> dict[str, Any]:
        """How it goes: ``published`` and ``dropped`` count events, ``waiting`` those not yet published. Any thread."""
        waiting, most = max(self._status.events.last - self._last, 0), self._config.mqtt_queue_max
        return {
            "connected": self.connected_at is not None,
            "published": self._published,
            "dropped": self._dropped + max(waiting - most, 0),
            "waiting": min(waiting, most),
            "lastError": self.last_error,
        }

    def say(self, write: Any, name: str, **fields: object) -> None:
        """A line of the log, with how many events wait and were dropped."""
        row, place = self.row(), f"{self._config.mqtt_host}:{self._config.mqtt_port}"
        write(name, broker=place, **fields, waiting=row["waiting"], dropped=row["dropped"])

    async def connect(self, stop: asyncio.Event) -> None:
        """One connection from its begin to its end."""
        password = await asyncio.to_thread(read_password, self._config.mqtt_password_file)
        client = MqttClient(self._config, self._client_id, f"{self._root}/status", password)
        try:
            await _first_of(client.__aenter__(), stop.wait())
            if stop.is_set():
                return
            await _first_of(client.lost(), self._publish(client), stop.wait())
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._send_events(client)
                await client.send(f"{self._root}/state", payload(self._status.row()), retain=True)
                await client.send(f"{self._root}/status", OFFLINE, retain=True)
                await client.__aexit__(None, None, None)
        finally:
            client.cut()

    async def _publish(self, client: MqttClient) -> None:
        await client.send(f"{self._root}/status", ONLINE, retain=True)
        shown, sent_at = None, float("-inf")
        while True:
            # What is the matter is an event as well: stages that wait, damage, the broker.
            worth_showing = self._status.phase, self._notable, self.connected_at
            now = time.monotonic()
            seconds = self._config.mqtt_interval if worth_showing == shown else _STATE_SECONDS_MIN
            if now - sent_at >= min(seconds, self._config.mqtt_interval):
                await client.send(f"{self._root}/state", payload(self._status.row()), retain=True)
                shown, sent_at = worth_showing, now
            await self._send_events(client)
            if self.connected_at is None:
                # Only now: a broker that takes a part and refuses the rest is no news at every try.
                self.connected_at = now
                self.say(self._log.info, "mqtt_connected", topic=f"{self._root}/status")
            await asyncio.sleep(_TICK_SECONDS)

    async def _send_events(self, client: MqttClient) -> None:
        while waiting := self._waiting():
            event = waiting[0]
            await client.send(f"{self._root}/event/{topic_level(event.kind)}", event_payload(event, self._about))
            self._published += 1
            self._last = event.number

    def _waiting(self) -> list[Event]:
        # The status keeps them, and what it could not keep counts as dropped, as does what is too much for the bus.
        events = self._status.events
        found = events.since(self._last)[-self._config.mqtt_queue_max :]
        lost = (found[0].number if found else events.last + 1) - self._last - 1
        self._dropped, self._last = self._dropped + lost, self._last + lost
        # A flush comes every few seconds, and is nobody's concern at once.
        self._notable = max((event.number for event in found if event.kind != "flush"), default=self._notable)
        return found


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


class MqttClient(aiomqtt.Client):
    """One connection. The package takes a refusal for a yes: here that is an MqttError, as is what nobody asked for."""

    def __init__(self, config: MqttConfig, client_id: str, status_topic: str, password: bytes | None) -> None:
        ca_file, limits = config.mqtt_ca_file, Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        limits.MaximumPacketSize, limits.ReceiveMaximum = _PACKET_BYTES_MAX, 1
        tls = aiomqtt.TLSParameters(ca_certs=None if ca_file is None else str(ca_file)) if config.mqtt_tls else None
        super().__init__(
            config.mqtt_host or "",
            config.mqtt_port,
            username=config.mqtt_username,
            password=password,  # type: ignore[arg-type]  # MQTT's are bytes, and so the package sends them
            identifier=client_id,
            protocol=aiomqtt.ProtocolVersion.V5,
            will=aiomqtt.Will(status_topic, OFFLINE, qos=1, retain=True),
            tls_params=tls,
            timeout=ANSWER_SECONDS,
            keepalive=_KEEPALIVE_SECONDS,
            max_queued_incoming_messages=1,
            properties=limits,
            logger=_SILENT,
        )
        #: What is being published, and the broker's No to it.
        self._topic: str | None = None
        self._refusal: ReasonCode | None = None
        # Why it ended is asked for by whoever is interested; else asyncio would write it to standard error.
        for ended in (self._connected, self._disconnected):
            ended.add_done_callback(lambda future: future.cancelled() or future.exception())

    async def send(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Publish, and wait until the broker has it; one at a time. A broker that does not allow it is an error too."""
        self._topic, self._refusal = topic, None
        await self.publish(topic, payload, qos=1, retain=retain)
        if self._refusal is not None:
            raise aiomqtt.MqttError(self._about_topic(self._refusal))
        self._topic = None

    async def lost(self) -> None:
        """Ends with MqttError as soon as the connection is gone, and never otherwise: nothing is subscribed to."""
        if not self._client.is_connected():  # it ended in the moment after the answer, which the package forgets
            raise aiomqtt.MqttError(_CODES[0x80])
        try:
            async for _ in self.messages:
                raise aiomqtt.MqttError("the broker sends messages that nobody asked for")
        except aiomqtt.MqttError as error:
            code = getattr(error.__cause__, "rc", None)
            if isinstance(code, ReasonCode) and code.value in _HINTS and self._topic is not None:
                raise aiomqtt.MqttError(self._about_topic(code)) from None
            raise

    def cut(self) -> None:
        """End it without a word, if it is still open, so that the will is published."""
        opened = self._client.socket()
        if isinstance(opened, socket.socket):
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def _about_topic(self, code: ReasonCode) -> str:
        return f"the broker says about {self._topic}: {code}{_HINTS.get(code.value, '')}"

    def _on_publish(self, client: Any, userdata: Any, mid: int, reason_code: ReasonCode, properties: Any) -> None:
        if reason_code.is_failure:
            self._refusal = reason_code
        super()._on_publish(client, userdata, mid, reason_code, properties)


def reason(error: BaseException) -> str:
    """One line for the log, with what to look at where that is known."""
    if isinstance(error, DiskError):
        return error.line()
    cause = error.__cause__ or error
    code = getattr(cause, "rc", None)
    if isinstance(code, ReasonCode):
        return _CODES.get(code.value) or f"the broker says: {code}{_HINTS.get(code.value, '')}"
    if isinstance(error, TimeoutError) or str(error) == "Operation timed out":
        return "the broker does not answer; check mqtt_port and mqtt_tls"
    text = " ".join(str(cause).split())
    if "certificate" in text.lower():
        return f"{text}; check mqtt_ca_file, and that mqtt_host is a name in the broker's certificate"
    return text


def read_password(path: Path | None) -> bytes | None:
    """The first line of the file; raises DiskError, or MqttError when that is empty."""
    password = None if path is None else Disk().read(path).partition(b"\n")[0].rstrip(b"\r")
    if password == b"":
        raise aiomqtt.MqttError(f"no password in the first line of {path}")
    return password


def topic_level(name: str) -> str:
    """``name`` as one level of a topic: what MQTT or its wildcards forbid there becomes ``_``; at most 200 bytes."""
    clean = "".join("_" if char in "/+#" or not char.isprintable() else char for char in name)
    return clean.encode()[:200].decode(errors="ignore") or "_"


def event_payload(event: Event, about: Mapping[str, Any]) -> bytes:
    """One event. Within one ``bootId`` the ``seq`` of the events of all kinds grows by one: a gap is what was lost.

    The same event may come twice, after a connection that broke before the broker had answered.
    """
    row = {"seq": event.number, **{name: about[name] for name in ("bootId", "cluster", "nodeId")}}
    return payload(row | {"at": event.at, "kind": event.kind, "event": event.name, "fields": event.fields})


def payload(value: object) -> bytes:
    """JSON; 64-bit offsets are strings, as they are over HTTP: a double holds 53 bits.

    ASCII: a path that is no UTF-8 would have none otherwise.
    """
    return json.dumps(_texts(value), separators=(",", ":"), default=str).encode()


def _texts(value: object, key: str = "") -> object:
    if isinstance(value, Mapping):
        return {name: _texts(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        # A list of offsets, or of ranges [begin, end, reason], is called for what it holds.
        return [_texts(inner, "offset" if key == "uncovered" else key) for inner in value]
    is_offset = key in ("begin", "end") or key.lower().endswith("offset")
    return str(value) if is_offset and isinstance(value, int) and not isinstance(value, bool) else value
