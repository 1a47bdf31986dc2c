"""The socket on which a service manager hears of a daemon."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Self


class ServiceManager:
    """A datagram socket in a ``with`` block, an abstract one; ``messages`` keeps (monotonic seconds, fields)."""

    def __init__(self, name: str, watchdog_seconds: float | None = None) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(f"\0indexd-test-{os.getpid()}-{name}")
        self.environment = {"NOTIFY_SOCKET": f"@indexd-test-{os.getpid()}-{name}"}
        if watchdog_seconds is not None:
            self.environment["WATCHDOG_USEC"] = str(int(watchdog_seconds * 1_000_000))
        self.messages: list[tuple[float, dict[str, str]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def listen(self) -> None:
        """Take in what has come; the time is that of taking."""
        while True:
            try:
                text = self._socket.recv(65536).decode()
            except BlockingIOError:
                return
            self.messages.append((time.monotonic(), dict(line.split("=", 1) for line in text.split("\n"))))

    def heard(self, key: str) -> list[str]:
        """The values of a key so far, oldest first."""
        self.listen()
        return [fields[key] for _, fields in self.messages if key in fields]

    def seen(self, key: str, test: Callable[[str], bool] = lambda _: True) -> Callable[[], bool | None]:
        """For ``Daemon.wait_for``: true once a value of the key passes."""
        return lambda: any(test(value) for value in self.heard(key)) or None
