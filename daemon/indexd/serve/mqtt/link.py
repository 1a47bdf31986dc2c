"""Link: one connection with the broker of MQTT. It is made anew for each try and ends by being left or cut.

Left: the broker forgets the will. Cut: the broker publishes it, so whoever cannot say ``offline`` is said to be.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiomqtt
import paho.mqtt.client as paho
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from indexd.config import MqttConfig
from indexd.errors import DiskError
from indexd.serve.mqtt.payload import OFFLINE, Topics
from indexd.storage.disk import Disk

#: The broker has to answer within.
ANSWER_SECONDS = 5.0
# Without a word for twice this long, the connection is gone.
_KEEPALIVE_SECONDS = 20
_CUT_SECONDS = 1.0
_PASSWORD_MAX = 65_535
# MQTT 5, 2.4: bad user name or password, not authorized.
_REFUSED = frozenset({0x86, 0x87})
# What the package calls an end that nobody has given a reason for, and one without a word for too long.
_CODES = {0x80: "the connection was lost", 0x8D: "the connection was lost: the broker has been silent for too long"}
_TIMED_OUT = "Operation timed out"
_ACCESS = "; check mqtt_username, mqtt_password_file and the broker's access list"
_VOUCHING = "; check mqtt_ca_file, and that mqtt_host is a name in the broker's certificate"

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
            logger=_SILENT,
        )
        self._refused: ReasonCode | None = None
        self.is_open = False

    async def open(self) -> None:
        """Connect, within some ten seconds."""
        try:
            await self.__aenter__()
            self.is_open = True
        except ValueError as error:  # a host that cannot be a name
            raise aiomqtt.MqttError(str(error)) from None
        finally:
            # A connection that is taken later, when nobody waits for it any more, would stand beside the next.
            if not self.is_open:
                self._shut_down()
        # Why it ended is asked for by whoever is interested; else asyncio would write it to standard error.
        self._disconnected.add_done_callback(lambda ended: ended.cancelled() or ended.exception())

    async def send(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """Publish, and wait until the broker has it; a broker that does not allow it is an error too."""
        kind = "application/json" if payload.startswith(b"{") else "text/plain"
        await self.publish(topic, payload, qos=1, retain=retain, properties=_properties(kind))
        if self._refused is not None:
            raise aiomqtt.MqttCodeError(self._refused)

    async def lost(self) -> None:
        """Ends with MqttError as soon as the connection is gone, and never otherwise: nothing is subscribed to."""
        async for _ in self.messages:
            pass

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

    def _on_publish(
        self, client: paho.Client, userdata: Any, mid: int, reason_code: ReasonCode, properties: Properties
    ) -> None:
        # The package takes every answer for a yes.
        if reason_code.is_failure:
            self._refused = reason_code
        super()._on_publish(client, userdata, mid, reason_code, properties)


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


def reason(error: BaseException) -> str:
    """One line for the log: what is the matter, and what to look at where that is known."""
    if isinstance(error, DiskError):
        return error.line()
    cause = error.__cause__ or error
    code = getattr(cause, "rc", None)
    if isinstance(code, ReasonCode):
        return _CODES.get(code.value) or f"the broker says: {code}{_ACCESS if code.value in _REFUSED else ''}"
    if isinstance(error, TimeoutError) or str(error) == _TIMED_OUT:
        return "the broker does not answer; check mqtt_port and mqtt_tls"
    text = " ".join(str(cause).split())
    return f"{text}{_VOUCHING}" if "certificate" in text.lower() else text


def _properties(content_type: str) -> Properties:
    properties = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]  # the package's one untyped call
    properties.ContentType = content_type
    properties.PayloadFormatIndicator = 1
    return properties
