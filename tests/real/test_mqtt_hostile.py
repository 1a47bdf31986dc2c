"""The daemon and a broker that floods it, or that takes a part and refuses the rest: bounded, and said once."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from support.daemon import Daemon
from support.mosquitto import PLAIN, Mosquitto, mqtt_env
from support.small_log import SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROOT = "indexd/prod/broker-a"
NODE = {"INDEXD_CLUSTER": "prod", "INDEXD_NODE_ID": "broker-a"}
CONNACK = b"\x20\x03\x00\x00\x00"
# With QoS 1, so that each would be answered too.
PUBLISH = b"\x32\x80\x80\x40" + b"\x00\x01x\x00\x01\x00" + bytes((1 << 20) - 6)
GROWTH_MAX = 64 << 20


@contextmanager
def flooding() -> Iterator[tuple[int, list[int]]]:
    """A broker's port, and for each connection how many bytes of messages it could be sent."""
    sent: list[int] = []

    def flood(near: socket.socket) -> None:
        count = 0
        with near, suppress(OSError):
            near.recv(1000)
            near.sendall(CONNACK)
            while True:
                count += near.send(PUBLISH[count % len(PUBLISH) :])
        sent.append(count)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listening.accept()
                threading.Thread(target=flood, args=(near,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield listening.getsockname()[1], sent
        listening.shutdown(socket.SHUT_RDWR)
        accepting.join()


def check_log(daemon: Daemon) -> None:
    """Nothing but lines of the log: no traceback of any package."""
    assert not [line for line in daemon.log.read_text("utf-8").splitlines() if not line.startswith("{")]


def test_messages_that_nobody_asked_for(tmp_path: Path) -> None:
    store = tmp_path / "store"
    end = write_log(store, 2000)
    with Daemon(store, tmp_path / "plain", *SIZES, env=NODE) as daemon:
        daemon.wait_caught_up(end)
        plain = daemon.rss()
    with flooding() as (port, sent), Daemon(store, tmp_path / "data", *SIZES, env=NODE | mqtt_env(port)) as daemon:
        daemon.wait_caught_up(end)
        lost = daemon.wait_event("mqtt_lost")
        assert "the broker sends messages that nobody asked for" in lost["problem"]
        deadline, peak = time.monotonic() + 8, 0
        while time.monotonic() < deadline:
            peak = max(peak, daemon.rss())
            time.sleep(0.01)
        assert peak - plain < GROWTH_MAX
        assert len(sent) >= 2
        assert max(sent) < 16 << 20  # what the sockets of both sides hold
        assert len(daemon.events("mqtt_lost")) == 1
        assert not daemon.events("mqtt_connected")
        assert daemon.terminate() == 0
        check_log(daemon)


@pytest.mark.parametrize(
    ("conf", "writable", "words"),
    [
        (PLAIN, ("status",), f"about {ROOT}/state: Not authorized; check mqtt_username"),
        (PLAIN, ("status", "state"), f"about {ROOT}/event/"),
        (PLAIN + "max_packet_size 400\n", ("#",), f"about {ROOT}/state: Packet too large"),
        (PLAIN + "max_qos 0\n", ("#",), "QoS not supported; the broker has to allow QoS 1"),
        (PLAIN + "retain_available false\n", ("#",), "Retain not supported; the broker has to allow retained messages"),
    ],
)
def test_a_broker_that_refuses_a_part(tmp_path: Path, conf: str, writable: tuple[str, ...], words: str) -> None:
    store, home = tmp_path / "store", tmp_path / "mqtt"
    end = write_log(store, 2000)
    home.mkdir()
    (home / "acl").write_text("".join(f"topic write {ROOT}/{name}\n" for name in writable), "ascii")
    env = NODE | {"INDEXD_MQTT_INTERVAL": "1"}
    with (
        Mosquitto(home, f"{conf}acl_file {home}/acl\n") as broker,
        Daemon(store, tmp_path / "data", *SIZES, env=env | mqtt_env(broker.port, interval=1)) as daemon,
    ):
        assert words in daemon.wait_event("mqtt_lost")["problem"]
        daemon.wait_caught_up(end)
        daemon.wait_for(lambda: broker.log.read_text("utf-8").count("New connection from") >= 4 or None, "tries")
        # Before the first event there is nothing to refuse where only events are: connected, once. Never after it.
        told = [row for row in daemon.events() if row["event"] in ("mqtt_connected", "mqtt_lost")]
        assert [row["event"] for row in told] in (["mqtt_lost"], ["mqtt_connected", "mqtt_lost"])
        assert told[0]["event"] == "mqtt_lost" or "/event/" in words
        assert daemon.state()["mqtt"]["connected"] is False
        assert daemon.terminate() == 0
        check_log(daemon)
