"""A broker that sends what it must not: the connection is cut at once, with the reason, and nothing is kept."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from aiomqtt import MqttError

from indexd.serve.mqtt.link import Link, Topics, reason
from unit.test_mqtt_publisher import config_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CONNACK = b"\x20\x03\x00\x00\x00"
PUBLISH = b"\x30\x80\x80\x40" + b"\x00\x01x\x00" + bytes((1 << 20) - 4)
ANNOUNCED = b"\xff\xff\xff\x7f"  # 256 MiB less a byte
TOPICS = Topics("indexd", "prod", "a")


@asynccontextmanager
async def broker(*packets: bytes, again: bytes = b"") -> AsyncIterator[tuple[int, list[bytes]]]:
    """Its port, and the CONNECTs that it got; it answers each with those packets, and then ``again`` for ever."""
    got: list[bytes] = []
    answering: list[asyncio.Task[None] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.append(asyncio.current_task())
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
        with suppress(OSError):
            await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], got
        await asyncio.wait_for(asyncio.gather(*filter(None, answering)), 5)


async def ending(tmp_path: Path, port: int) -> str:
    """Why a connection ended that would have stood for ever."""
    link = Link(config_for(tmp_path, port).mqtt, TOPICS, None)
    try:
        async with asyncio.timeout(4):
            await link.open()
            await link.lost()
    except MqttError as error:
        return reason(error)
    finally:
        await link.cut()
    raise AssertionError("it ended without an error")


@pytest.mark.parametrize("before", [(CONNACK,), (), (CONNACK + PUBLISH,)])
@pytest.mark.parametrize(
    ("packet", "words"),
    [
        (PUBLISH, "messages that nobody asked for"),
        (b"\x32" + ANNOUNCED, "messages that nobody asked for"),
        (b"\xc0\x00", "no answer of MQTT 5"),  # PINGREQ: each would be answered
        (b"\x62\x02\x00\x01", "no answer of MQTT 5"),
        (b"\x40" + ANNOUNCED + bytes(70_000), "more than 65536 bytes"),
        (b"\xd0\x00", "answers that nobody asked for"),
        (b"\x40\x02\x00\x01", "answers that nobody asked for"),
    ],
)
async def test_what_it_must_not_send(tmp_path: Path, before: tuple[bytes, ...], packet: bytes, words: str) -> None:
    async with broker(*before, again=packet * (10_000 // len(packet) or 1)) as (port, _):
        expected = "messages that nobody asked for" if PUBLISH in b"".join(before) else words
        assert expected in await ending(tmp_path, port)


@pytest.mark.parametrize("packet", [b"\x40\x01\x00", b"\x40\x05\x00\x01\x00\x05\xff", b"\xd0\x01x", b"\xe0\x01\x55"])
async def test_what_is_no_mqtt(tmp_path: Path, packet: bytes) -> None:
    async with broker(CONNACK, packet) as (port, _):
        assert "a packet that is no MQTT 5" in await ending(tmp_path, port)


async def test_the_broker_is_told_how_little_is_taken(tmp_path: Path) -> None:
    async with broker(CONNACK, b"\xe0\x00") as (port, got):
        await ending(tmp_path, port)
    assert b"\x27\x00\x01\x00\x00" in got[0]  # Maximum Packet Size, 65536
    assert b"\x21\x00\x01" in got[0]  # Receive Maximum, 1


async def test_a_socket_that_is_closed_before_it_is_watched(tmp_path: Path) -> None:
    problems: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    async with broker(CONNACK) as (port, _):
        link = Link(config_for(tmp_path, port).mqtt, TOPICS, None)
        await link.open()
        sending = asyncio.create_task(link.send("a", b"{}"))
        await asyncio.sleep(0)  # it is registered to be written, which the loop does in its next turn
        link._client._sock_close()
        sending.cancel()
        await asyncio.sleep(0.1)
        await link.cut()
    assert problems == []
