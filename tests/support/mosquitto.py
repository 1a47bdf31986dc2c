"""A real mosquitto on loopback, somebody who listens to it, and a network between that can be held.

::

    with Mosquitto(tmp_path / "mqtt") as broker, Listener(broker) as listener, Proxy(broker.port) as network:
        with Daemon(store, data, env=mqtt_env(network.port)):
            listener.wait(lambda message: message.topic.endswith("/status"))
            network.hold()
"""

from __future__ import annotations

import json
import os
import pwd
import socket
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from support.missing import need
from support.serving import wait_for

EXAMPLES = Path(__file__).parents[2] / "config" / "mosquitto"
PLAIN = "allow_anonymous true\npersistence false\n"
WAIT_SECONDS = 30.0


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def mqtt_env(port: int, **more: object) -> dict[str, str]:
    """A daemon's environment for it; ``queue_max=5`` is ``INDEXD_MQTT_QUEUE_MAX``."""
    keys = {"host": "localhost", "port": port, **more}
    return {f"INDEXD_MQTT_{name.upper()}": str(value) for name, value in keys.items()}


class Mosquitto:
    """One broker in a ``with`` block, always on the same port; ``conf`` is its configuration but for the listener."""

    def __init__(self, home: Path, conf: str = PLAIN, listener: str = "listener {port} 127.0.0.1\n") -> None:
        self.home, self.port = home, free_port()
        home.mkdir(exist_ok=True)
        user = pwd.getpwuid(os.getuid()).pw_name  # as root it would become another, who may not look in here
        self._conf = home / "mosquitto.conf"
        self._conf.write_text(listener.format(port=self.port) + conf + f"user {user}\n", "utf-8")
        self.log = home / "mosquitto.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        with self.log.open("ab") as log:
            words = [need("mosquitto"), "-v", "-c", str(self._conf)]
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_for(self._listens)

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text("utf-8")
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def kill(self) -> None:
        """SIGKILL; it forgets all."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(WAIT_SECONDS)


@dataclass(frozen=True)
class Heard:
    """One message; ``payload`` is parsed where it is JSON."""

    topic: str
    payload: Any
    retain: bool
    qos: int


class Listener:
    """mosquitto_sub for everything, in a ``with`` block that begins once it has subscribed."""

    def __init__(self, broker: Mosquitto, *words: str, topic: str = "indexd/#") -> None:
        # Into a pipe it would write in blocks.
        by_line = [need("stdbuf"), "-oL"]
        self._words = [*by_line, need("mosquitto_sub"), "-h", "localhost", "-p", str(broker.port)]
        self._words += ["-V", "5", "-q", "1", "-F", "%j", "-t", topic, *words]
        self._heard: list[Heard] = []

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [*self._words, "-d"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._subscribed = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        if not self._subscribed.wait(WAIT_SECONDS):
            self.__exit__()
            raise AssertionError(f"{self._words} has not subscribed")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(WAIT_SECONDS)
        self._thread.join(WAIT_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("Subscribed"):
                self._subscribed.set()
            elif line.startswith("{"):
                row = json.loads(line)
                payload = row["payload"]
                with suppress(ValueError):
                    payload = json.loads(payload)
                self._heard.append(Heard(row["topic"], payload, bool(row["retain"]), row["qos"]))

    def heard(self, end: str = "") -> list[Heard]:
        """What came so far, of topics that end so."""
        return [message for message in list(self._heard) if message.topic.endswith(end)]

    def events(self) -> list[dict[str, Any]]:
        """The payloads of all events so far."""
        return [message.payload for message in list(self._heard) if "/event/" in message.topic]

    def wait(self, look: Callable[[Heard], bool], end: str = "") -> Heard:
        """The first message of topics that end so of which that holds, as soon as it is there."""
        wait_for(lambda: any(map(look, self.heard(end))))
        return next(filter(look, self.heard(end)))


class Proxy:
    """A network between a client and a port: it carries bytes, holds them, or is not there."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._flows = threading.Event()
        self._flows.set()
        self._is_there = True
        self._open: list[socket.socket] = []
        #: The first bytes of each client.
        self.begins: list[bytes] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._flows.set()
        self.cut()

    def hold(self) -> None:
        """Carry nothing, break nothing."""
        self._flows.clear()

    def heal(self) -> None:
        """Carry what was held, and what comes."""
        self._is_there = True
        self._flows.set()

    def cut(self) -> None:
        """Break what is open, and whatever comes, until ``heal``."""
        self._is_there = False
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            self._flows.wait()
            if not self._is_there:
                return
            with socket.create_connection(("127.0.0.1", self._to)) as far:
                self._open += [near, far]
                back = threading.Thread(target=self._carry, args=(far, near), daemon=True)
                back.start()
                self.begins.append(near.recv(16, socket.MSG_PEEK))
                self._carry(near, far)
                back.join()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                self._flows.wait()
                target.sendall(data)
        self._flows.wait()
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
