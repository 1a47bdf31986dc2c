"""What is told outward: to a service manager, the journal, and over MQTT, to brokers that err or mean harm."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiomqtt import MqttCodeError, MqttError
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode
from structlog.testing import CapturingLogger

from indexd.config import Config, LogConfig, load
from indexd.errors import DiskError, UsageError
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.events import Event
from indexd.serve.mqtt import MqttClient, event_payload, payload, publish, read_password, reason, topic_level
from indexd.service.instance import Notifier, configure_log, is_journal_stream, render_journal
from support.service_manager import ServiceManager

ABOUT = {"bootId": "b-1", "cluster": "c", "nodeId": "n/1"}


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("broker-a", "broker-a"),
        ("集群 1", "集群 1"),
        ("a/b", "a_b"),
        ("+", "_"),
        ("#", "_"),
        ("a\x00b\nc\ud800d\uffffe", "a_b_c_d_e"),
        ("", "_"),
        ("集" * 100, "集" * 66),
    ],
)
def test_a_name_becomes_one_level(name: str, level: str) -> None:
    assert topic_level(name) == level


def test_offsets_are_strings_and_everything_else_is_what_it_was() -> None:
    row: dict[str, Any] = {
        "phyOffset": 2**63 - 1,
        "durableOffset": 0,
        "messages": 2**40,
        "caughtUp": True,
        "http": None,
        "uncovered": [[1, 2**62, "expired"]],
        "corrupt": {"offset": 7, "reason": "magic"},
        "outputs": [{"output": "cq", "phyOffset": 5, "files": 3, "fillRatio": None}],
        "broker": {"maxOffset": None, "pid": 12, "unsafe": ["x"]},
        "data": "/da\udcffta",
    }
    assert json.loads(payload(row)) == {
        **row,
        "phyOffset": "9223372036854775807",
        "durableOffset": "0",
        "uncovered": [["1", str(2**62), "expired"]],
        "corrupt": {"offset": "7", "reason": "magic"},
        "outputs": [{"output": "cq", "phyOffset": "5", "files": 3, "fillRatio": None}],
    }
    assert payload(row).isascii()


def test_an_event_says_which_it_is_and_of_whom() -> None:
    event = Event(7, 1_700_000_000_000, "hole", "skipped", {"begin": 1, "end": 5, "bytes": 4, "reason": "expired"})
    assert json.loads(event_payload(event, ABOUT)) == {
        "seq": 7,
        **ABOUT,
        "at": 1_700_000_000_000,
        "kind": "hole",
        "event": "skipped",
        "fields": {"begin": "1", "end": "5", "bytes": 4, "reason": "expired"},
    }


HINTS = {
    "Not authorized": "mqtt_username",
    "Packet too large": "max_packet_size",
    "QoS not supported": "max_qos",
    "Retain not supported": "retain_available",
}


def config_for(tmp_path: Path, port: int, **more: object) -> Config:
    keys = {"mqtt_host": "127.0.0.1", "mqtt_port": port, **more}
    environ = {f"INDEXD_{name.upper()}": str(value) for name, value in keys.items()}
    return load({"store": str(tmp_path), "data": str(tmp_path / "data")}, None, environ | {"HOME": str(tmp_path)})


@asynccontextmanager
async def publishing(config: Config) -> AsyncIterator[tuple[DaemonStatus, list[dict[str, Any]]]]:
    """While the block runs; what was logged, with its event's name under ``event``."""
    board, log, stop = DaemonStatus(config), CapturingLogger(), asyncio.Event()
    said: list[dict[str, Any]] = []
    task = asyncio.create_task(publish(config, board, log, stop))
    try:
        yield board, said
    finally:
        stop.set()
        began = time.monotonic()
        await task
        assert time.monotonic() - began < 1
        said += [{"event": call.args[0], **call.kwargs} for call in log.calls]
        assert board.outlets["mqtt"]()["connected"] is False


async def wait_for_error(board: DaemonStatus) -> str:
    while (error := board.row().get("mqtt", {}).get("lastError")) is None:  # noqa: ASYNC110 - a row is what it is
        await asyncio.sleep(0.01)
    return str(error)


async def test_nobody_listens(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound, and not listening: refused
        async with publishing(config_for(tmp_path, probe.getsockname()[1], mqtt_queue_max=3)) as (board, said):
            assert "refused" in await wait_for_error(board)
            for _ in range(10):
                board.events.tell("rolled", {})
            outlet = board.row()["mqtt"]
            assert (outlet["waiting"], outlet["dropped"], outlet["published"]) == (3, 7, 0)
    assert said[0]["broker"].startswith("127.0.0.1:")


async def test_a_port_that_speaks_something_else_is_tried_again_and_said_once(tmp_path: Path) -> None:
    async with broker(b"HTTP/1.1 400 Bad Request\r\n\r\n") as (port, got):
        async with publishing(config_for(tmp_path, port)) as (board, said):
            assert "does not answer; check mqtt_port" in await asyncio.wait_for(wait_for_error(board), 8)
            async with asyncio.timeout(20):
                while len(got) < 2:  # noqa: ASYNC110 - who tries again sets no event
                    await asyncio.sleep(0.01)
        assert [line["event"] for line in said] == ["mqtt_lost"]
        assert 1 <= said[0]["retry_seconds"] <= 3


@pytest.mark.parametrize(
    ("lonely", "words"),
    [
        ({"mqtt_ca_file": "/ca.crt"}, "set mqtt_tls"),
        ({"mqtt_password_file": "/password"}, "a password needs a name"),
    ],
)
def test_what_would_send_a_password_in_the_clear_or_not_at_all_is_refused(
    tmp_path: Path, lonely: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        config_for(tmp_path, 1883, **lonely)


def test_the_password_is_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "password"
    assert read_password(None) is None
    with pytest.raises(DiskError):
        read_password(path)
    for text, password in ((b"geheim", b"geheim"), (b" a b \r\nrest\n", b" a b "), (b"\xff\n", b"\xff")):
        path.write_bytes(text)
        assert read_password(path) == password
    path.write_bytes(b"\nx")
    with pytest.raises(MqttError, match=str(path)):
        read_password(path)


def test_reasons() -> None:
    assert "mqtt_password_file" in reason(MqttCodeError(ReasonCode(PacketTypes.CONNACK, "Not authorized")))
    taken = ReasonCode(PacketTypes.DISCONNECT, "Session taken over")
    lost = MqttError("Disconnected during message iteration")
    lost.__cause__ = MqttCodeError(taken)
    assert reason(lost) == "the broker says: Session taken over"
    assert "does not answer" in reason(TimeoutError())
    for code, hint in HINTS.items():
        refused = ReasonCode(PacketTypes.DISCONNECT, code)
        lost.__cause__ = MqttCodeError(refused)
        assert reason(lost).startswith(f"the broker says: {code}; ")
        assert hint in reason(lost)
    assert "\n" not in reason(MqttError("a\nb"))


CONNACK = b"\x20\x03\x00\x00\x00"


PUBLISH = b"\x30\x80\x80\x40" + b"\x00\x01x\x00" + bytes((1 << 20) - 4)


@asynccontextmanager
async def broker(*packets: bytes, again: bytes = b"") -> AsyncIterator[tuple[int, list[bytes]]]:
    """Its port, and the CONNECTs that it got; it answers each with those packets, and then ``again`` for ever."""
    got: list[bytes] = []
    ended = asyncio.Semaphore(0)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            got.append(await reader.read(1000))
            for packet in packets:
                writer.write(packet)
                await writer.drain()
                await asyncio.sleep(0.05)
            while again:
                writer.write(again)
                await writer.drain()
            await reader.read()
        writer.close()
        ended.release()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], got
        async with asyncio.timeout(5):
            for _ in got:
                await ended.acquire()


async def ending(tmp_path: Path, port: int) -> str:
    """Why a connection ended that would have stood for ever."""
    client = MqttClient(config_for(tmp_path, port).mqtt, "id", "a/status", None)
    try:
        async with asyncio.timeout(4):
            await client.__aenter__()
            await client.lost()
    except MqttError as error:
        return reason(error)
    finally:
        client.cut()
    raise AssertionError("it ended without an error")


@pytest.mark.parametrize("packet", [PUBLISH, b"\x30\x04\x00\x01x\x00"])
async def test_what_nobody_asked_for_ends_it(tmp_path: Path, packet: bytes) -> None:
    async with broker(CONNACK, again=packet * (10_000 // len(packet) or 1)) as (port, _):
        assert "messages that nobody asked for" in await ending(tmp_path, port)


@pytest.mark.parametrize("packet", [b"\x40\x01\x00", b"\x40\x05\x00\x01\x00\x05\xff", b"\xd0\x01x", b"\xe0\x01\x55"])
async def test_what_is_no_mqtt(tmp_path: Path, packet: bytes) -> None:
    async with broker(CONNACK, packet) as (port, _):
        assert "a packet that is no MQTT 5" in await ending(tmp_path, port)


async def test_the_broker_is_told_how_little_is_taken(tmp_path: Path) -> None:
    async with broker(CONNACK, b"\xe0\x00") as (port, got):
        await ending(tmp_path, port)
    assert b"\x27\x00\x01\x00\x00" in got[0]  # Maximum Packet Size, 65536
    assert b"\x21\x00\x01" in got[0]  # Receive Maximum, 1


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path.name, 4) as manager:
        yield manager


@contextmanager
def notifier(**environ: str) -> Iterator[Notifier]:
    with closing(Notifier.from_environment(environ)) as told:
        yield told


def test_the_life_of_a_unit(manager: ServiceManager) -> None:
    with notifier(**manager.environment, WATCHDOG_PID=str(os.getpid())) as told:
        assert told.watchdog_seconds == 4.0
        told.status("recovering: slots, 1 of 3")
        told.extend(30)
        told.ready("12 bytes behind")
        told.reloading()
        told.ready("12 bytes behind")
        told.stopping()
    manager.listen()
    said = [fields for _, fields in manager.messages]
    usec = said[3].pop("MONOTONIC_USEC")
    assert 0 <= time.monotonic() - int(usec) / 1e6 < 5
    assert said == [
        {"STATUS": "recovering: slots, 1 of 3"},
        {"EXTEND_TIMEOUT_USEC": "30000000", "WATCHDOG": "1"},
        {"READY": "1", "WATCHDOG": "1", "STATUS": "12 bytes behind"},
        {"RELOADING": "1"},
        {"READY": "1", "WATCHDOG": "1", "STATUS": "12 bytes behind"},
        {"STOPPING": "1", "STATUS": "stopping: the last drain and flush"},
    ]


def test_a_status_stays_one_line(manager: ServiceManager) -> None:
    with notifier(**manager.environment) as told:
        told.status("a\nREADY=1\n  b")
        told.status("é" * 5000)
    first, second = manager.heard("STATUS")
    assert first == "a READY=1 b"
    assert len(second.encode()) < 4096 - len("STATUS=")


@pytest.mark.parametrize(
    "name",
    [
        None,
        "",
        "@",
        "relative",
        "vsock:2:1234",
        "/nobody/listens/here",
        "/" + "long" * 100,
        "@" + "long" * 100,
        "/dev/null",
    ],
)
def test_without_a_manager_nothing_happens(name: str | None) -> None:
    with notifier(**({} if name is None else {"NOTIFY_SOCKET": name}), WATCHDOG_USEC="1") as told:
        told.ready("b")
        told.watchdog()
        told.stopping()


@pytest.mark.parametrize(
    ("environ", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-5"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "٣"}, None),
    ],
)
def test_who_is_watched(manager: ServiceManager, environ: dict[str, str], seconds: float | None) -> None:
    with notifier(NOTIFY_SOCKET=manager.environment["NOTIFY_SOCKET"], **environ) as told:
        assert told.watchdog_seconds == seconds
        told.watchdog()
    assert manager.heard("WATCHDOG") == ([] if seconds is None else ["1"])


def test_a_manager_that_does_not_read_holds_nobody_up_and_hears_of_ready_later(manager: ServiceManager) -> None:
    with notifier(**manager.environment) as told:
        for number in range(5000):
            told.status(f"line {number}")
        told.ready("tailing")
        assert not manager.heard("READY")
        manager.messages.clear()
        told.watchdog()
    manager.listen()
    assert [fields for _, fields in manager.messages] == [{"READY": "1", "WATCHDOG": "1"}]


def test_a_line_with_all_its_fields() -> None:
    row: dict[str, Any] = {"event": "degraded", "level": "error", "timestamp": "now", "stage": "build"}
    row |= {"problem": "no space left; free some", "names": ["a", "b"], "seconds": 2.5, "exception": "a\nb"}
    first, *trace = render_journal(None, "error", row).split("\n")
    assert first == r'<3>degraded stage=build problem="no space left; free some" names="[\"a\", \"b\"]" seconds=2.5'
    assert trace == ["<3>a", "<3>b"]


@pytest.mark.parametrize(
    ("level", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3), ("critical", 2)]
)
def test_priorities_are_those_of_syslog(level: str, priority: int) -> None:
    assert render_journal(None, level, {"event": "running", "level": level}) == f"<{priority}>running"


def test_who_standard_error_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        found = os.fstat(stream.fileno())
        named = [f"{found.st_dev}:{found.st_ino}", f"{found.st_dev}:{found.st_ino + 1}", ""]
        assert [is_journal_stream({"JOURNAL_STREAM": name}) for name in named] == [True, False, False]
        patch.setattr(sys, "stderr", None)
        assert not is_journal_stream({"JOURNAL_STREAM": named[0]})


def test_auto_means_the_journal_where_it_is_one_and_one_that_reads_nothing_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    stream = os.fdopen(os.dup(ours.fileno()), "w")
    with ours, theirs:
        monkeypatch.setattr(sys, "stderr", stream)
        found = os.fstat(stream.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
        log = configure_log(LogConfig())

        for number in range(5000):
            log.warning("rolled", text=str(number) * 100)
        assert theirs.recv(100).startswith(b"<4>rolled text=")
        monkeypatch.undo()
        configure_log(LogConfig(log_level="error"))
    with suppress(BrokenPipeError):
        stream.close()
