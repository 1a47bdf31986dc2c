"""Notifier: tells systemd how it goes, one datagram a message to $NOTIFY_SOCKET (sd_notify(3)).

Nothing here waits or raises: a service manager that is busy, gone or was never there must not hold the index up. What
starts a unit, ``READY=1``, is sent again with whatever comes next until it has left.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

_USEC = 1_000_000
# systemd reads 4096 bytes of a datagram, and a character has four bytes at most.
_STATUS_MAX = 512
# A watchdog hears of us so often within its time; sd_watchdog_enabled(3) recommends two.
_PINGS = 4
_EXTEND_EVERY_SECONDS = 1.0


class Notifier:
    """Messages to one service manager; from any thread. ``watchdog_seconds`` is None when nobody watches."""

    def __init__(self, address: str | None, watchdog_seconds: float | None) -> None:
        self.watchdog_seconds = None if address is None else watchdog_seconds
        self._address = None if address is None else _socket_address(address)
        self._socket = None
        self._owed = ""
        self._status = ""
        self._pinged = self._extended = float("-inf")
        if self._address is not None:
            try:
                # Open from the start: later there may be no descriptor left, and that is when it is wanted.
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
                self._socket.setblocking(False)
            except OSError:
                self._socket = None

    def __repr__(self) -> str:
        return f"Notifier({self._address!r}, watchdog_seconds={self.watchdog_seconds})"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Notifier:
        """By NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID; without the first it does nothing."""
        address = environ.get("NOTIFY_SOCKET", "")
        is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        usec = environ.get("WATCHDOG_USEC", "")
        seconds = int(usec) / _USEC if is_ours and usec.isascii() and usec.isdigit() and int(usec) > 0 else None
        # A path or an abstract name; a virtual machine's vsock has no tail loop to tell of.
        return cls(address if address[:1] in ("/", "@") and len(address) > 1 else None, seconds)

    def close(self) -> None:
        """Give the descriptor back; nothing is sent any more."""
        if self._socket is not None:
            self._socket.close()

    def ready(self, status: str) -> None:
        """The log is tailed (which is not: caught up), or a reload is over."""
        self._owed = "READY=1"
        self._pinged = time.monotonic()
        if self._send(self._watchdog_lines(), _status_line(status)):
            self._status = status

    def status(self, text: str) -> None:
        """One line for ``systemctl status``; the same text again is not sent."""
        if text != self._status and self._send(_status_line(text)):
            self._status = text

    def extend(self, seconds: float) -> None:
        """Work before READY goes on, and will be heard of again within ``seconds``; sent once a second at most.

        A daemon that opens its data again after READY feeds the watchdog by it too.
        """
        now = time.monotonic()
        if now - self._extended >= _EXTEND_EVERY_SECONDS:
            self._extended = self._pinged = now
            self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * _USEC)}", self._watchdog_lines())

    def watchdog(self) -> None:
        """Real progress, or a look that found nothing to do; call it as often as that happens."""
        if self.watchdog_seconds is None and not self._owed:
            return
        now = time.monotonic()
        if self._owed or now - self._pinged >= (self.watchdog_seconds or 0.0) / _PINGS:
            self._pinged = now
            self._send(self._watchdog_lines())

    def stopping(self) -> None:
        """A signal said stop: the last drain and flush follow."""
        self._owed = ""
        self._send("STOPPING=1", _status_line("stopping: the last drain and flush"))

    def reloading(self) -> None:
        """A HUP is being looked at; ``ready`` must follow."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def _watchdog_lines(self) -> str:
        return "WATCHDOG=1" if self.watchdog_seconds is not None else ""

    def _send(self, *lines: str) -> bool:
        # Whether it left.
        if self._socket is None or self._address is None:
            return False
        owed = self._owed
        message = "\n".join(line for line in (owed, *lines) if line)
        if not message:
            return True
        try:
            self._socket.sendto(message.encode("utf-8", "replace"), self._address)
        except OSError:
            return False
        if self._owed == owed:
            self._owed = ""
        return True


def _socket_address(address: str) -> str | bytes:
    # Linux's abstract names begin with a zero byte, which an environment cannot hold.
    return b"\0" + os.fsencode(address[1:]) if address.startswith("@") else address


def _status_line(text: str) -> str:
    return f"STATUS={' '.join(text.split())[:_STATUS_MAX]}"
