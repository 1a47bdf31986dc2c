"""Who is let in by the remoting server: TLS, networks, as many as may be, and descriptors for the index."""

from __future__ import annotations

import resource
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from indexd.serve.remoting.server import address_of, connections_max
from support.remoting import Command, encode
from support.remoting_serving import ECHO, LIMITS, SIZE, WHO, RemotingServing, is_closed
from support.serving import Log
from support.tls import client_context, make_certificate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1", "127.0.0.1:9"), ("::1", "[::1]:9"), ("::ffff:10.0.0.1", "10.0.0.1:9"),
        ("fe80::1%eth0", "[fe80::1%eth0]:9"), ("::ffff:a00:1:2", "[::ffff:a00:1:2]:9"),
    ],
)  # fmt: skip
def test_addresses(host: str, name: str) -> None:
    assert address_of(host, 9) == name


def test_ipv6(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, remoting="[::1]:0") as server, server.client() as client:
        assert client.ask(WHO).remark == f"{client.local} {server.address}"
        assert server.row()["address"] == server.address == f"[::1]:{server.place[1]}"


def test_tls(tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    with RemotingServing(tmp_path, remoting_tls_cert=cert, remoting_tls_key=key) as server:
        with server.client(tls=client_context(cert)) as client:
            assert client.ask(ECHO, body=bytes(900_000)).body == bytes(900_000)
            assert client.ask(SIZE, {"size": 3_000_000}).body == bytes(3_000_000)
        with server.connect() as plain:
            plain.sendall(encode(Command(ECHO)))
            assert is_closed(plain)
        with server.connect() as left:
            left.sendall(b"\x16\x03\x01\x02")
        server.wait_for(lambda: server.row()["refused"]["tls"] == 2)
        with server.client(tls=client_context(cert)) as client:
            assert client.ask(ECHO).code == 0
            server.wait_for(lambda: server.row()["connections"] == 1)


def test_a_handshake_that_does_not_come(tmp_path: Path) -> None:
    limits = replace(LIMITS, handshake_seconds=0.2)
    cert, key = make_certificate(tmp_path)
    with RemotingServing(tmp_path, limits=limits, remoting_tls_cert=cert, remoting_tls_key=key) as server:
        with server.connect() as peer:
            server.wait_for(lambda: server.row()["connections"] == 1)
            assert is_closed(peer)
        server.wait_for(lambda: server.row()["refused"]["tls"] == 1)
        with server.connect():
            server.wait_for(lambda: server.row()["connections"] == 1)
            assert server.stop() < 2, "a stop waits for no handshake"


def test_only_networks_that_are_allowed(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, remoting_allow="10.0.0.0/8") as server:
        for _ in range(3):
            assert server.turns_away()
        server.wait_for(lambda: server.row()["refused"]["allow"] == 3)
        assert [(line[1], line[2]["peer"]) for line in server.log.lines] == [("remoting_not_allowed", "127.0.0.1")]
        assert server.row()["connectionsTotal"] == 0
    with RemotingServing(tmp_path, remoting_allow="10.0.0.0/8,127.0.0.1") as server, server.client() as client:
        assert client.ask(ECHO).code == 0


def test_as_many_connections_as_may_be(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, remoting_connections_max=5) as server, ExitStack() as stack:
        clients = [stack.enter_context(server.client()) for _ in range(5)]
        assert all(client.ask(ECHO).code == 0 for client in clients)
        assert server.turns_away()
        clients[0].close()
        server.wait_for(lambda: server.row()["connections"] == 4)
        assert stack.enter_context(server.client()).ask(ECHO).code == 0
        assert server.row()["refused"] == {"allow": 0, "full": 1, "tls": 0}


@pytest.mark.parametrize(
    ("soft", "hard", "each", "expected"),
    [(8000, 8000, 1, 4096), (1024, 1024, 1, 512), (1024, 1024, 2, 256), (300, 300, 1, 16), (-1, -1, 1, 4096)],
)
def test_descriptors_are_left_for_the_index(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, each: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.delattr(resource, "setrlimit")  # there is nothing to take
    log = Log()
    assert connections_max(4096, each, log) == expected
    assert [line[1] for line in log.lines] == ["remoting_descriptors"] * (expected < 4096)


def test_more_descriptors_are_taken_where_the_process_may(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = [(1024, 1_000_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert connections_max(4096, 2, Log()) == 4096
    assert limits[-1] == (2 * 4096 + 512, 1_000_000)
