"""Inlet: what a broker may send to somebody who has subscribed to nothing: short answers, and not too many.

The package would read and keep whatever comes. Here it is looked at before it is read, packet by packet.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import paho.mqtt.client as paho

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
