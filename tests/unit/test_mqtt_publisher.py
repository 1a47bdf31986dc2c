"""publish where there is no broker, or none that answers: it waits, says so once, and stops when it is told."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from aiomqtt import MqttCodeError, MqttError
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode
from structlog.testing import CapturingLogger

from indexd.config import load
from indexd.errors import DiskError, UsageError
from indexd.serve.board import Board
from indexd.serve.mqtt import publish
from indexd.serve.mqtt.link import RefusedError, read_password, reason

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from indexd.config import Config

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
async def publishing(config: Config) -> AsyncIterator[tuple[Board, list[dict[str, Any]]]]:
    """While the block runs; what was logged, with its event's name under ``event``."""
    board, log, stop = Board(config), CapturingLogger(), asyncio.Event()
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
        assert board.outlets["mqtt"]["connected"] is False


async def wait_for_error(board: Board) -> str:
    while (error := board.row().get("mqtt", {}).get("lastError")) is None:  # noqa: ASYNC110 - a row is what it is
        await asyncio.sleep(0.01)
    return str(error)


async def test_nobody_listens(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # bound, and not listening: refused
        config = config_for(tmp_path, probe.getsockname()[1], mqtt_queue_max=3)
        async with publishing(config) as (board, said):
            assert "refused" in await wait_for_error(board)
            for _ in range(10):
                board.events.tell("rolled", {})
            await asyncio.sleep(0.5)
            outlet = board.row()["mqtt"]
            assert (outlet["waiting"], outlet["dropped"], outlet["published"]) == (3, 7, 0)
            await asyncio.sleep(3.5)  # at least one more try
        assert [line["event"] for line in said] == ["mqtt_lost"]
        assert 1 <= said[0]["retry_seconds"] <= 3
        assert said[0]["broker"].startswith("127.0.0.1:")


async def test_a_port_that_never_answers_is_left_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with publishing(config_for(tmp_path, silent.getsockname()[1])) as (board, said):
            await asyncio.sleep(0.5)
            assert board.row()["mqtt"]["lastError"] is None
        assert said == []


async def test_a_port_that_speaks_something_else(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()
            await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with publishing(config_for(tmp_path, port)) as (board, said):
            assert "does not answer; check mqtt_port" in await asyncio.wait_for(wait_for_error(board), 8)
        assert [line["event"] for line in said] == ["mqtt_lost"]


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example", "nowhere.invalid"])
async def test_a_host_that_is_none(tmp_path: Path, host: str) -> None:
    config = config_for(tmp_path, 1883)
    config = config.model_copy(update={"mqtt": config.mqtt.model_copy(update={"mqtt_host": host})})
    async with publishing(config) as (board, said):
        assert await asyncio.wait_for(wait_for_error(board), 20)
    assert [line["event"] for line in said] == ["mqtt_lost"]


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
    for text, password in ((b"geheim", "geheim"), (b" a b \r\nrest\n", " a b "), ("密\n".encode(), "密")):
        path.write_bytes(text)
        assert read_password(path) == password
    for text in (b"", b"\nx", b"\xff\n"):
        path.write_bytes(text)
        with pytest.raises(MqttError, match=str(path)):
            read_password(path)
    path.unlink()
    with pytest.raises(DiskError):
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
        assert reason(RefusedError.by_code("a/state", refused)).startswith(f"the broker says about a/state: {code}; ")
    assert "\n" not in reason(MqttError("a\nb"))
