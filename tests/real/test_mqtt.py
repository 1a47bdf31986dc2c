"""The daemon and a real mosquitto: what is published and when, in a network that fails, to brokers that refuse."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.daemon import Daemon
from support.missing import need
from support.mosquitto import (
    EXAMPLES,
    PLAIN,
    Heard,
    Listener,
    Mosquitto,
    Proxy,
    mqtt_env,
)
from support.serving import make_certificate
from support.small_log import SIZES, Growing, write_log

ROOT = "indexd/prod/broker-a"
NODE = {"INDEXD_CLUSTER": "prod", "INDEXD_NODE_ID": "broker-a"}


def is_status(text: str) -> Callable[[Heard], bool]:
    return lambda message: message.topic == f"{ROOT}/status" and message.payload == text


def statuses(listener: Listener) -> list[str]:
    return [message.payload for message in listener.heard("/status")]


def numbers(*listeners: Listener) -> list[int]:
    return sorted({event["seq"] for listener in listeners for event in listener.events()})


@pytest.fixture
def secured(tmp_path: Path) -> Mosquitto:
    """The broker of config/mosquitto, but for its folder and its port; not started."""
    home = tmp_path / "mqtt"
    (home / "certs").mkdir(parents=True)
    cert, key = make_certificate(home / "certs", "DNS:localhost")
    key.rename(home / "certs/server.key")
    for name in ("ca.crt", "server.crt"):  # it vouches for itself
        shutil.copy(cert, home / "certs" / name)
    (home / "indexd.passwd").touch(0o600)
    for user, password in (("broker-a", "secret-a"), ("watcher", "secret-w")):
        words = [need("mosquitto_passwd"), "-b", home / "indexd.passwd", user, password]
        subprocess.run(words, check=True, capture_output=True)
    shutil.copy(EXAMPLES / "indexd.acl", home)
    conf = (EXAMPLES / "mosquitto.conf").read_text("utf-8").replace("/etc/mosquitto", str(home))
    # After the comments at its top the example begins with the listener, which is ours here.
    before, listener, after = conf.partition("listener 8883\n")
    assert listener
    return Mosquitto(home, after, before + "listener {port} 127.0.0.1\n")


def secured_env(broker: Mosquitto, password_file: Path) -> dict[str, str]:
    ca_file = broker.home / "certs" / "ca.crt"
    more = {"tls": "true", "ca_file": ca_file, "username": "broker-a", "password_file": password_file}
    return NODE | mqtt_env(broker.port, interval=1, **more)


def watch(broker: Mosquitto) -> Listener:
    return Listener(broker, "--cafile", str(broker.home / "certs" / "ca.crt"), "-u", "watcher", "-P", "secret-w")


def test_a_life_over_tls_with_names_and_passwords(tmp_path: Path, secured: Mosquitto) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 3000)
    password = tmp_path / "password"
    password.write_text("secret-a\n", "ascii")
    env = secured_env(secured, password)
    with secured as broker, watch(broker) as listener:
        with Daemon(store, data, *SIZES, env=env) as daemon:
            # The first states are of before the first drain, or of before the broker has answered for them.
            caught_up = listener.wait(lambda message: is_caught_up(message.payload, end), end="/state")
            listener.wait(lambda message: message.topic.endswith("/event/roll"))
            end = write_log(store, 1000, seed=2, start_offset=end)
            listener.wait(lambda message: message.payload["fields"].get("phy_offset") == str(end), end="/event/flush")
            assert daemon.wait_event("mqtt_connected")["topic"] == f"{ROOT}/status"
            daemon.kill()
        # Nobody said it: the broker did.
        listener.wait(is_status("offline"))
        assert statuses(listener) == ["online", "offline"]
        assert {(message.topic.rpartition("/")[0], message.qos) for message in listener.heard()} == {
            (ROOT, 1), (f"{ROOT}/event", 1)
        }  # fmt: skip
        state = caught_up.payload
        assert (state["cluster"], state["nodeId"], state["phase"]) == ("prod", "broker-a", "running")
        assert [name for name in state if name.endswith("Offset") and not isinstance(state[name], str)] == []
        check_events(listener.events(), caught_up.payload["bootId"])
        with Daemon(store, data, *SIZES, env=env) as daemon:
            recovered = listener.wait(
                lambda message: (
                    "kept_entries" in str(message.payload) and message.payload["bootId"] != caught_up.payload["bootId"]
                )
            )
            assert (recovered.topic, recovered.payload["event"]) == (f"{ROOT}/event/recover", "recovered")
            daemon.wait_caught_up(end)
            assert daemon.terminate() == 0
            # No last word and no goodbye was waited for in vain: each that is says so.
            said = {row["event"] for row in daemon.events()}
            assert said.isdisjoint({"mqtt_lost", "outlets_cut_off", "outlets_left_behind"})
            assert "stopped" in said
        listener.wait(lambda _: statuses(listener) == ["online", "offline", "online", "offline"])
        assert listener.events()[-1]["event"] == "stopping"
        with watch(broker) as late:
            late.wait(is_status("offline"))
            late.wait(lambda message: message.topic == f"{ROOT}/state")
            assert [message.retain for message in late.heard()] == [True, True]
            assert not late.events()
        # It said so itself, and left: with a will the broker would have said it once more.
        assert len(statuses(listener)) == 4
        assert "secret" not in daemon.log.read_text("utf-8")


def is_caught_up(state: dict[str, Any], end: int) -> bool:
    return state.get("caughtUp") is True and state["phyOffset"] == str(end) and state["mqtt"]["connected"]


def check_events(events: list[dict[str, Any]], boot_id: str) -> None:
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert {event["bootId"] for event in events} == {boot_id}
    assert [event["event"] for event in events if event["kind"] in ("recover", "roll")][:2] == ["created", "rolled"]
    assert not [word for word in ("order-", "TopicTest") if word in json.dumps(events)]


def test_a_broker_that_is_killed_and_started_again(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 2000)
    with Mosquitto(tmp_path / "mqtt") as broker, Proxy(broker.port) as network:
        env = NODE | mqtt_env(network.port, interval=60)
        with Daemon(store, data, *SIZES, env=env) as daemon, Listener(broker) as listener:
            daemon.wait_durable(end)
            listener.wait(lambda message: message.payload["fields"].get("phy_offset") == str(end), end="/event/flush")
            before = numbers(listener)
            network.cut()
            broker.kill()
            assert "lost" in daemon.wait_event("mqtt_lost")["problem"]
            for seed in range(2, 5):
                end = write_log(store, 500, seed=seed, start_offset=end)
                daemon.wait_durable(end)
            assert daemon.state()["mqtt"]["connected"] is False
            broker.start()
            with Listener(broker) as after:
                network.heal()
                after.wait(is_status("online"))
                after.wait(lambda message: message.payload["fields"].get("phy_offset") == str(end), end="/event/flush")
                assert sorted({*before, *numbers(after)}) == list(range(1, numbers(after)[-1] + 1))
                assert numbers(after)[-1] >= before[-1] + 3
            # It says so once the broker has answered for all of it, a moment after the listener has it.
            daemon.wait_for(lambda: daemon.events("mqtt_connected")[1:] or None, "the connection")
            assert 1 <= len(daemon.events("mqtt_lost")) <= 3
            write_log(store, 1, start_offset=end)
            state = daemon.wait_state(lambda row: row["mqtt"]["connected"] and row["mqtt"]["waiting"] == 0)
            assert state["mqtt"]["dropped"] == 0
            assert daemon.terminate() == 0


def give(path: Path, text: str) -> None:
    """At once: a try in between must not find half of it."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, "ascii")
    fresh.replace(path)


def test_passwords_that_are_missing_wrong_and_right(tmp_path: Path, secured: Mosquitto) -> None:
    store, data, password = tmp_path / "store", tmp_path / "data", tmp_path / "password"
    end = write_log(store, 3000)
    with secured as broker, watch(broker) as listener:
        with Daemon(store, data, *SIZES, env=secured_env(broker, password)) as daemon:
            missing = daemon.wait_event("mqtt_lost")
            assert f"cannot open {password}: No such file or directory" in missing["problem"]
            give(password, "guessed\n")
            daemon.wait_caught_up(end)
            refused = daemon.wait_for(lambda: next(iter(daemon.events("mqtt_lost")[1:]), None), "the refusal")
            assert "Not authorized; check mqtt_username, mqtt_password_file" in refused["problem"]
            give(password, "secret-a\n")
            write_log(store, 100, seed=2, start_offset=end)
            listener.wait(is_status("online"))
            assert len(daemon.events("mqtt_lost")) == 2
            assert "guessed" not in daemon.log.read_text("utf-8")
            assert daemon.terminate() == 0
        listener.wait(is_status("offline"))
        assert statuses(listener) == ["online", "offline"]


def test_a_broker_that_nobody_vouches_for_and_one_that_does_not_allow_it(tmp_path: Path, secured: Mosquitto) -> None:
    store, password = tmp_path / "store", tmp_path / "password"
    end = write_log(store, 2000)
    password.write_text("secret-a", "ascii")
    env = secured_env(secured, password)
    other, _ = make_certificate(tmp_path, "DNS:localhost")
    with (
        secured,
        watch(secured) as listener,
        Daemon(store, tmp_path / "a", *SIZES, env=env | {"INDEXD_MQTT_CA_FILE": str(other)}) as one,
        # The list of access lets a name speak for the node of that name alone.
        Daemon(store, tmp_path / "b", *SIZES, env=env | {"INDEXD_NODE_ID": "broker-b"}) as two,
    ):
        assert "certificate verify failed" in one.wait_event("mqtt_lost")["problem"]
        assert "check mqtt_ca_file" in one.wait_event("mqtt_lost")["problem"]
        assert "Not authorized; check" in two.wait_event("mqtt_lost")["problem"]
        assert not two.events("mqtt_connected")
        for daemon in (one, two):
            daemon.wait_caught_up(end)
            assert daemon.terminate() == 0
            assert not [line for line in daemon.log.read_text("utf-8").splitlines() if not line.startswith("{")]
        assert not listener.heard()


def test_a_network_that_stalls_and_heals_holds_nothing_back(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    with (
        Growing(store, seed=3) as log,
        Mosquitto(tmp_path / "mqtt") as broker,
        Listener(broker) as listener,
        Proxy(broker.port) as network,
        Daemon(store, data, *SIZES, env=NODE | mqtt_env(network.port, interval=1, queue_max=5)) as daemon,
    ):
        listener.wait(lambda message: "/event/flush" in message.topic)
        network.hold()
        before = daemon.state()["messages"]
        stalled = daemon.wait_state(lambda row: row["mqtt"]["dropped"] > 20)
        assert stalled["mqtt"]["waiting"] <= 5 + 8
        assert stalled["messages"] > before + 1000
        assert stalled["dispatchBehindBytes"] < 1 << 20  # less than it grows by in two seconds
        # Longer than it waits for an answer: the connection is given up, and the next is not answered either.
        assert "does not answer" in daemon.wait_event("mqtt_lost")["problem"]
        network.heal()
        daemon.wait_for(lambda: daemon.events("mqtt_connected")[1:] or None, "the connection")
        listener.wait(lambda message: "/event/" in message.topic and message.payload["seq"] > stalled["lastEvent"])
        heard = numbers(listener)
        missing = set(range(1, heard[-1] + 1)) - set(heard)
        now = daemon.wait_state(lambda row: row["mqtt"]["connected"] and row["lastEvent"] > heard[-1])
        # What was under way when it stalled may have come all the same.
        assert 20 < len(missing) <= now["mqtt"]["dropped"]
        network.hold()
        end = log.stop()
        daemon.wait_durable(end)
        began = time.monotonic()
        assert daemon.terminate() == 0
        assert time.monotonic() - began < 8
        # It could not say it, so it left its will.
        network.heal()
        listener.wait(lambda _: statuses(listener)[-1] == "offline")


@pytest.mark.parametrize(
    ("conf", "writable", "words"),
    [
        (PLAIN, ("status", "state"), f"about {ROOT}/event/"),
        (PLAIN + "max_packet_size 400\n", ("#",), f"about {ROOT}/state: Packet too large"),
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
        # Nothing but lines of the log: no traceback of any package.
        assert not [line for line in daemon.log.read_text("utf-8").splitlines() if not line.startswith("{")]
