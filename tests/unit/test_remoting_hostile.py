"""Clients of the remoting port that err, are slow, or mean harm: each costs its connection and nothing more."""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.remoting import Command, encode
from support.remoting_serving import ECHO, LIMITS, SLEEP, RemotingServing, is_closed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MANY = 2000
_HEARTBEAT = encode(Command(34, 1))
_RESET = struct.pack("ii", 1, 0)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemotingServing]:
    """One server for whatever comes."""
    with RemotingServing(tmp_path_factory.mktemp("hostile")) as serving:
        yield serving


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RemotingServing]:
    with RemotingServing(tmp_path) as serving:
        yield serving


def _closed(server: RemotingServing, reason: str, count: int = 1) -> None:
    server.wait_for(lambda: server.row()["closed"][reason] == count)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"SSH-2.0-x\r\n",
        b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x00\x00\x00\x03abc",
        b"\x00\x10\x00\x01", b"\x00\x00\x00\x04\x00\x00\x00\x00", b"\x00\x00\x00\x04\x00\xff\xff\xff",
        b"\x00\x00\x00\x04\x07\x00\x00\x00", b"\x00\x00\x00\x06\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x06\x00\x00\x00\x02{}",
        b"\x00\x00\x00\x05\x01\x00\x00\x01\x00", b"\x00" * 64, b"\xff" * 64, _HEARTBEAT * 3 + b"\xff\xff\xff\xff",
    ],
)  # fmt: skip
def test_bytes_that_are_no_frame(server: RemotingServing, words: bytes) -> None:
    with server.client() as good:
        for count in range(1, 4):
            with server.connect() as peer:
                peer.sendall(words)
                assert is_closed(peer)
            _closed(server, "bytes", count)
        assert good.ask(ECHO).code == 0
    assert [line[1] for line in server.log.errors()] == ["remoting_bytes"], "one line a minute"
    assert server.log.lines[0][2]["peer"].startswith("127.0.0.1:")


@settings(max_examples=80)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=200).map(lambda data: struct.pack(">i", len(data)) + data),
        st.binary(max_size=200).map(lambda data: struct.pack(">ii", len(data) + 4, len(data)) + data),
        st.binary(max_size=200).map(lambda data: struct.pack(">ii", len(data) + 4, 1 << 24 | len(data)) + data),
        st.tuples(st.integers(0, len(_HEARTBEAT) - 1), st.integers(0, 255)).map(
            lambda change: _HEARTBEAT[: change[0]] + bytes([change[1]]) + _HEARTBEAT[change[0] + 1 :]
        ),
    )
)
def test_any_bytes(shared: RemotingServing, words: bytes) -> None:
    with shared.connect(10) as peer:
        with suppress(ConnectionError):  # it may be closed before all is sent
            peer.sendall(words)
            peer.shutdown(socket.SHUT_WR)
        assert is_closed(peer)
    with shared.client() as good:
        assert good.ask(ECHO).code == 0
    assert {line[1] for line in shared.log.errors()} <= {"remoting_bytes"}


def test_any_stream_in_any_pieces(shared: RemotingServing) -> None:
    frames = [encode(Command(ECHO, number, body=os.urandom(number * 37 % 5000))) for number in range(60)]
    data = b"".join(frames)
    for size in (1, 3, 4, 5, 1000, 4999, 70_000):
        with shared.client() as client:
            at = 0
            while at < len(data) and (size > 5 or at < 4000):
                client.socket.sendall(data[at : at + size])
                at += size
            whole = sum(1 for number in range(1, 61) if len(b"".join(frames[:number])) <= at)
            assert sorted(client.receive().opaque for _ in range(whole)) == list(range(whole))


@pytest.mark.parametrize("start", [b"\x00", _HEARTBEAT[:-1], struct.pack(">i", 1 << 20), _HEARTBEAT + b"\x00\x00\x00"])
def test_a_frame_that_does_not_end(tmp_path: Path, start: bytes) -> None:
    with RemotingServing(tmp_path, limits=replace(LIMITS, frame_seconds=0.3)) as server:
        with server.connect() as peer:
            began = time.monotonic()
            peer.sendall(start)
            assert is_closed(peer)
            assert 0.2 < time.monotonic() - began < 5
        _closed(server, "slow")


def test_a_frame_a_byte_now_and_then(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, limits=replace(LIMITS, frame_seconds=0.3)) as server:
        with server.connect() as peer, suppress(ConnectionError):
            for byte in _HEARTBEAT:
                peer.sendall(bytes([byte]))
                time.sleep(0.02)
        _closed(server, "slow")
        assert server.processor.begun[34] == 0


def test_a_large_frame_may_take_longer_when_it_comes(tmp_path: Path) -> None:
    limits = replace(LIMITS, frame_seconds=0.15, frame_bytes_per_second=500_000)
    frame = encode(Command(ECHO, body=bytes(500_000)))
    with RemotingServing(tmp_path, limits=limits) as server, server.client() as client:
        for at in range(0, len(frame), 100_000):
            client.socket.sendall(frame[at : at + 100_000])
            time.sleep(0.08)
        assert len(client.receive().body) == 500_000


def test_who_says_nothing(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, limits=replace(LIMITS, first_seconds=0.2), remoting_idle_timeout="2s") as server:
        with server.connect() as silent, server.client() as client:
            began = time.monotonic()
            assert client.ask(ECHO).code == 0
            assert is_closed(silent)
            first = time.monotonic() - began
            waiting = client.start(SLEEP, {"seconds": 2.3})  # no idleness: something is under way
            assert client.answer_to(waiting).code == 0
            answered = time.monotonic()
            assert client.is_closed()
            assert first < 1.8 < time.monotonic() - answered < 8
        _closed(server, "idle", 2)


def test_thousands_of_connections(server: RemotingServing) -> None:
    frame = encode(Command(ECHO, 5, body=b"all"))
    with ExitStack() as stack:
        peers = [stack.enter_context(server.connect()) for _ in range(_MANY)]
        for peer in peers:
            peer.sendall(frame)
        for peer in peers:
            data = peer.recv(4096)
            assert data.endswith(b"all")
        server.wait_for(lambda: server.row()["connections"] == _MANY)
        with server.client() as good:
            began = time.monotonic()
            assert good.ask(ECHO).code == 0
            assert time.monotonic() - began < 2
    server.wait_for(lambda: server.row()["connections"] == 0)


def test_thousands_that_come_and_go(server: RemotingServing) -> None:
    for number in range(_MANY):
        peer = server.connect()
        if number % 3 == 0:
            peer.sendall(_HEARTBEAT[: number % len(_HEARTBEAT)])
        if number % 2:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        peer.close()
    with server.client() as good:
        assert good.ask(ECHO).code == 0
    server.wait_for(lambda: server.row()["connectionsTotal"] > 1 and server.row()["connections"] == 0)
    assert server.log.errors() == []


def test_without_descriptors_they_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, 2

    def refuse(self: socket.socket) -> Any:
        nonlocal failures
        if failures > 0:
            failures -= 1
            raise OSError(24, os.strerror(24))
        return accept(self)

    with RemotingServing(tmp_path) as server:
        monkeypatch.setattr(socket.socket, "accept", refuse)
        began = time.monotonic()
        with server.client() as client:
            assert client.ask(ECHO).code == 0
        assert 0.3 < time.monotonic() - began < 5
        assert [line[1] for line in server.log.errors()] == ["remoting_full"]
