"""Chromium without a screen: the page as it is once its scripts have run, and what it asked the network for.

A test that uses it is marked by ``requires_chromium``.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
from pathlib import Path

from support.missing import need, requires

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# What the browser asks for on its own account, whatever page it shows.
_ITS_OWN = ("google.com", "googleapis.com", "gvt1.com", "gstatic.com")
_TIMEOUT = 120


def chromium() -> str:
    """The program, which the test cannot do without."""
    found = next((found for name in _NAMES if (found := shutil.which(name))), None)
    return found or need(_NAMES[0])


#: Marks a test that opens a page, or a module's tests: ``pytestmark = CHROMIUM``.
CHROMIUM = requires_chromium = requires(chromium)


class Page:
    """One page, opened from its file: ``dom`` behind its scripts, and the hosts that it ``asked`` for."""

    def __init__(self, path: Path, profile: Path, *, width: int = 1280, dark: bool = False) -> None:
        program = chromium()
        with _Proxy() as proxy:
            command = [
                program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--dump-dom",
                "--disable-background-networking", "--disable-component-update", "--disable-sync",
                "--disable-default-apps", "--disable-domain-reliability", "--disable-dev-shm-usage",
                f"--proxy-server=127.0.0.1:{proxy.port}", "--proxy-bypass-list=<-loopback>",
                f"--user-data-dir={profile}", f"--window-size={width},1600", "--virtual-time-budget=10000",
                *(["--blink-settings=preferredColorScheme=0"] if dark else []), path.as_uri(),
            ]  # fmt: skip
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT,
                check=True,
                env=_environment(profile),
            )
        self.dom = done.stdout.decode("utf-8", "replace")
        self.asked = {host for host in proxy.hosts if not host.endswith(_ITS_OWN)}


def _environment(profile: Path) -> dict[str, str]:
    return os.environ | {"HOME": str(profile), "DBUS_SESSION_BUS_ADDRESS": "disabled:"}


class _Proxy:
    """Refuses every request and keeps the host that it was for."""

    def __enter__(self) -> _Proxy:
        self.hosts: set[str] = set()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            with connection:
                connection.settimeout(5)
                line = connection.recv(4096).split(b"\r\n")[0].decode("latin-1")
                target = [*line.split(" "), ""][1]
                self.hosts.add(target.removeprefix("http://").split("/")[0].split(":")[0])
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
