"""Connections of the remoting server: frames, TLS, the stop, bounds, and what clients may cost that mean harm."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexd.serve.remoting.command import RemotingCommand, encode_command
from indexd.serve.remoting.server import address_of, connections_max
from support.remoting import (
    ECHO,
    FAIL,
    HANG,
    LIMITS,
    SIZE,
    SLEEP,
    WHO,
    Command,
    RemotingServing,
    is_closed,
)
from support.serving import Log


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RemotingServing]:
    with RemotingServing(tmp_path) as serving:
        yield serving


@pytest.mark.parametrize("size", [1, 3, 5, 1777, 1 << 30])
def test_any_stream_in_any_pieces(server: RemotingServing, size: int) -> None:
    count = 40 if size < 6 else 3 * LIMITS.under_way + 5
    sent = b"".join(encode_command(Command(ECHO, number, body=b"x" * number)) for number in range(count))
    with server.client() as client:
        for at in range(0, len(sent), size):
            client.socket.sendall(sent[at : at + size])
        answers = [client.receive() for _ in range(count)]
    assert sorted((answer.opaque, len(answer.body)) for answer in answers) == [(n, n) for n in range(count)]
    server.wait_for(lambda: server.row()["receivedBytes"] == len(sent))


def test_a_defect_is_an_answer_and_the_connection_goes_on(server: RemotingServing) -> None:
    with server.client() as client:
        for _ in range(5):
            answer = client.ask(FAIL)
            assert (answer.code, answer.remark) == (1, "a defect of indexd: ZeroDivisionError")
            assert client.ask(ECHO).code == 0
    assert [line[1] for line in server.log.lines] == ["remoting_failed"], "one line a minute"


def test_one_way_gets_no_answer_and_is_done_though_its_client_has_left(server: RemotingServing) -> None:
    with server.client() as client:
        client.tell(FAIL)
        client.tell(SLEEP, {"seconds": "0.2"})
        client.tell(ECHO)
        assert client.ask(WHO).remark
        client.socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            client.receive()
    server.wait_for(lambda: server.processor.ended[SLEEP] == 1)
    assert not server.processor.cancelled


def test_who_ends_his_side_ends_what_he_waits_for_and_keeps_what_was_answered(server: RemotingServing) -> None:
    with server.client() as client:
        client.start(HANG)
        large, name = client.start(SIZE, {"size": 5_000_000}), client.local
        server.wait_for(lambda: server.processor.ended[SIZE] and server.processor.begun[HANG])
        client.socket.shutdown(socket.SHUT_WR)
        assert len(client.answer_to(large).body) == 5_000_000
        assert is_closed(client.socket)
    server.wait_for(lambda: server.processor.gone == [name])
    assert server.processor.cancelled[HANG] == 1
    server.processor.clients[0].send(RemotingCommand(ECHO, 1))  # what the broker asks it is dropped


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_stop_lets_finish_what_is_under_way(tmp_path: Path, is_tls: bool) -> None:
    with RemotingServing(tmp_path, is_tls=is_tls) as server, server.client() as client, server.client() as idle:
        assert idle.ask(ECHO).code == 0
        request = client.start(SLEEP, {"seconds": 0.3})
        large = client.start(SIZE, {"size": 9_000_000})
        server.wait_for(lambda: server.processor.begun[SLEEP] and server.processor.ended[SIZE])
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert is_closed(idle.socket)
        assert client.answer_to(request).code == 0
        assert len(client.answer_to(large).body) == 9_000_000
        assert is_closed(client.socket)
        stopping.join()
    assert server.log.errors() == []


def test_a_stop_breaks_off_what_does_not_end(server: RemotingServing) -> None:
    with server.client() as client, server.client() as stuck:
        client.start(HANG)
        stuck.start(SIZE, {"size": 30_000_000})  # and reads nothing
        server.wait_for(lambda: server.processor.begun[HANG] and server.processor.ended[SIZE])
        assert 1 < server.stop() < 4
        assert is_closed(client.socket)
    server.wait_for(lambda: server.processor.cancelled[HANG] == 1)
    assert [(line[1], line[2]["connections"]) for line in server.log.errors()] == [("remoting_cut_off", 2)]


def test_a_restart_listens_on_the_same_socket(tmp_path: Path) -> None:
    server = RemotingServing(tmp_path)
    with server, server.client() as client:
        assert client.ask(ECHO).code == 0
        server.stop()
        waiting = server.connect()  # in the kernel's queue: nobody accepts
        server._is_up.clear()
        server._thread = threading.Thread(target=server._run)
        server._thread.start()
        assert server._is_up.wait(10)
        waiting.sendall(encode_command(Command(ECHO)))
        assert waiting.recv(4)
        waiting.close()


def test_its_figures(server: RemotingServing) -> None:
    with server.client() as client:
        for code in (ECHO, 12, 12, 33, FAIL):
            client.ask(code)
    server.wait_for(lambda: (server.row()["connectionsTotal"], server.row()["connections"]) == (1, 0))
    row = server.row()
    assert row["requests"] == {
        "QUERY_MESSAGE": {"ok": 2}, "VIEW_MESSAGE_BY_ID": {"ok": 1}, "other": {"error": 1, "ok": 1},
    }  # fmt: skip
    assert min(row["receivedBytes"], row["sentBytes"]) > 300


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("127.0.0.1", "127.0.0.1:9"), ("::1", "[::1]:9"), ("::ffff:10.0.0.1", "10.0.0.1:9"),
        ("fe80::1%eth0", "[fe80::1%eth0]:9"), ("::ffff:a00:1:2", "[::ffff:a00:1:2]:9"),
    ],
)  # fmt: skip
def test_addresses(host: str, name: str) -> None:
    assert address_of(host, 9) == name


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_who_is_who(tmp_path: Path, host: str) -> None:
    with (
        RemotingServing(tmp_path, remoting=f"{host}:0", remoting_allow="127.0.0.1,::1") as server,
        server.client() as client,
    ):
        assert client.ask(WHO).remark == f"{client.local} {server.address}"
        assert server.row()["address"] == server.address == f"{host}:{server.place[1]}"


def test_tls(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, is_tls=True) as server, ExitStack() as stack:
        plain, left = (stack.enter_context(server.connect()) for _ in range(2))
        plain.sendall(encode_command(Command(ECHO)))
        assert is_closed(plain)
        left.sendall(b"\x16\x03\x01\x02")
        left.close()
        server.wait_for(lambda: server.row()["refused"]["tls"] == 2)
        client = stack.enter_context(server.client())
        assert client.ask(ECHO, body=bytes(900_000)).body == bytes(900_000)
        assert client.ask(SIZE, {"size": 3_000_000}).body == bytes(3_000_000)


def test_a_handshake_that_does_not_come(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, limits=replace(LIMITS, handshake_seconds=0.2), is_tls=True) as server:
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
    [
        (8000, 8000, 1, 4096), (1024, 1024, 1, 512), (1024, 1024, 2, 256), (300, 300, 1, 16), (-1, -1, 1, 4096),
        (1024, 1_000_000, 2, 4096),
    ],
)  # fmt: skip
def test_descriptors_are_taken_and_left_for_the_index(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, each: int, expected: int
) -> None:
    log, limits = Log(), [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert connections_max(4096, each, log) == expected
    assert [line[1] for line in log.lines] == ["remoting_descriptors"] * (expected < 4096)
    assert limits[-1] == (hard, hard)


_MANY = 600


_HEARTBEAT = encode_command(Command(34, 1))


_RESET = struct.pack("ii", 1, 0)


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


@pytest.mark.parametrize(
    ("start", "pause"),
    [
        (b"\x00", 0), (_HEARTBEAT[:-1], 0), (struct.pack(">i", 1 << 20), 0), (_HEARTBEAT + b"\x00\x00\x00", 0),
        (_HEARTBEAT[:-1], 0.02),
    ],
)  # fmt: skip
def test_a_frame_that_does_not_end(tmp_path: Path, start: bytes, pause: float) -> None:
    with RemotingServing(tmp_path, limits=replace(LIMITS, frame_seconds=0.3)) as server:
        with server.connect() as peer, suppress(ConnectionError):
            for at in range(len(start) if pause else 1):  # all of it, or a byte now and then
                peer.sendall(start[at : at + 1] if pause else start)
                time.sleep(pause)
            assert is_closed(peer)
        _closed(server, "slow")
        assert server.processor.begun[34] == start.startswith(_HEARTBEAT)


def test_a_large_frame_may_take_longer_when_it_comes(tmp_path: Path) -> None:
    limits = replace(LIMITS, frame_seconds=0.15, frame_bytes_per_second=500_000)
    frame = encode_command(Command(ECHO, body=bytes(500_000)))
    with RemotingServing(tmp_path, limits=limits) as server, server.client() as client:
        for at in range(0, len(frame), 100_000):
            client.socket.sendall(frame[at : at + 100_000])
            time.sleep(0.08)
        assert len(client.receive().body) == 500_000


def test_who_says_nothing(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, remoting_idle_timeout="1s") as server, server.client() as client:
        waiting = client.start(SLEEP, {"seconds": 1.3})  # no idleness: something is under way
        with server.connect() as silent:
            assert is_closed(silent)
        _closed(server, "idle")
        assert client.answer_to(waiting).code == 0
        answered = time.monotonic()
        assert is_closed(client.socket)
        assert time.monotonic() - answered > 0.8


def test_many_that_come_and_go(server: RemotingServing) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(server.connect()) for _ in range(_MANY)]
        for number, peer in enumerate(peers):
            peer.sendall(_HEARTBEAT if number % 3 else _HEARTBEAT[: number % len(_HEARTBEAT)])
            if number % 2:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        server.wait_for(lambda: server.row()["connections"] == _MANY)
        assert all(peer.recv(4096) for number, peer in enumerate(peers) if number % 3)
    server.wait_for(lambda: server.row()["connections"] == 0)
    assert server.log.errors() == []


def test_without_descriptors_they_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [OSError(24, os.strerror(24)), OSError(24, os.strerror(24))]

    def refuse(self: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(self)

    with RemotingServing(tmp_path) as server:
        monkeypatch.setattr(socket.socket, "accept", refuse)
        with server.client() as client:
            assert client.ask(ECHO).code == 0
        assert [line[1] for line in server.log.errors()] == ["remoting_full"]
    assert not failures


@pytest.mark.parametrize("is_tls", [False, True])
def test_answers_that_are_not_taken(tmp_path: Path, is_tls: bool) -> None:
    with RemotingServing(tmp_path, limits=replace(LIMITS, untaken_seconds=0.3), is_tls=is_tls) as server:
        with server.client() as greedy, server.client() as gone, server.client() as good:
            for client in (greedy, gone):
                client.start(SIZE, {"size": 20_000_000})
            server.wait_for(lambda: server.processor.ended[SIZE] == 2)
            gone.socket.shutdown(socket.SHUT_WR)
            server.wait_for(lambda: server.row()["connections"] == 1)
            assert good.ask(ECHO).code == 0
        _closed(server, "untaken", 2)


def test_an_answer_that_is_taken_slowly(tmp_path: Path) -> None:
    limits, left = replace(LIMITS, untaken_seconds=0.3), 8_000_000
    with RemotingServing(tmp_path, limits=limits) as server, server.client() as client:
        client.start(SIZE, {"size": left})
        while left > 0:
            left -= len(client.socket.recv(1_000_000))
            time.sleep(0.05)


@pytest.mark.parametrize("is_tls", [False, True])
def test_who_asks_without_listening_is_not_read_any_more(tmp_path: Path, is_tls: bool) -> None:
    frame = encode_command(Command(SIZE, 1, ext_fields={"size": "100000"}))
    with RemotingServing(tmp_path, is_tls=is_tls) as server, server.client() as deaf:
        peer = deaf.socket
        peer.settimeout(1)
        with pytest.raises(TimeoutError):
            peer.sendall(frame * 120_000)  # more than buffers on the way hold
        began = server.processor.begun[SIZE]
        assert began < 2 * LIMITS.under_way
        with server.client() as good:
            assert good.ask(ECHO).code == 0
        assert server.processor.begun[SIZE] == began
        # What it did ask is answered once it listens.
        peer.settimeout(30)
        server.wait_for(lambda: peer.recv(1 << 20) and server.processor.begun[SIZE] > began)


def test_as_many_requests_under_way_as_may_be(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, limits=replace(LIMITS, under_way=20), remoting_idle_timeout="1s") as server:
        with server.client() as client, server.client() as other:
            client.socket.sendall(b"".join(encode_command(Command(HANG, number)) for number in range(50)))
            server.wait_for(lambda: server.processor.begun[HANG] == 20)
            assert other.ask(ECHO).code == 0
            assert server.processor.begun[HANG] == 20
        # That it has gone is not seen, for nothing of it is read: it ends all the same.
        server.wait_for(lambda: server.processor.cancelled[HANG] == 20)
        _closed(server, "idle")


def test_requests_under_way_hold_no_more_than_they_may(tmp_path: Path) -> None:
    frame = encode_command(Command(HANG, body=bytes(100_000)))
    limits = replace(LIMITS, under_way_bytes=1_000_000)
    with RemotingServing(tmp_path, limits=limits) as server, server.client() as client:
        client.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):  # it is not read any more
            client.socket.sendall(frame * 200)
        assert 9 <= server.processor.begun[HANG] <= 10


def test_frames_that_do_not_end_hold_no_more_than_they_may(tmp_path: Path) -> None:
    start = struct.pack(">i", 1_000_000) + bytes(700_000)
    with RemotingServing(tmp_path, limits=replace(LIMITS, held_bytes=3_000_000)) as server, ExitStack() as stack:
        good = stack.enter_context(server.client())
        for count in range(12):
            stack.enter_context(server.connect()).sendall(start)
            assert good.ask(ECHO, body=bytes(1000)).code == 0, count
        server.wait_for(lambda: server.row()["closed"]["memory"] >= 8)
        assert server.row()["closed"]["slow"] == 0


def test_untaken_answers_hold_no_more_than_they_may(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, limits=replace(LIMITS, held_bytes=30_000_000)) as server, ExitStack() as stack:
        good = stack.enter_context(server.client())
        for _ in range(8):
            stack.enter_context(server.client()).start(SIZE, {"size": 20_000_000})
        assert len(good.ask(SIZE, {"size": 1_000_000}).body) == 1_000_000
        server.wait_for(lambda: server.row()["closed"]["memory"] >= 5)
