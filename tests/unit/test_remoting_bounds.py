"""What clients of the remoting port may keep waiting: answers not taken, requests under way, unfinished frames."""

from __future__ import annotations

import socket
import struct
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.remoting import Command, RemotingClient, encode
from support.remoting_serving import ECHO, HANG, LIMITS, SIZE, RemotingServing
from support.tls import client_context, make_certificate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from indexd.serve.remoting.server import Limits


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RemotingServing]:
    with RemotingServing(tmp_path) as serving:
        yield serving


def _closed(server: RemotingServing, reason: str, count: int = 1) -> None:
    server.wait_for(lambda: server.row()["closed"][reason] == count)


@pytest.mark.parametrize("is_tls", [False, True])
def test_answers_that_are_not_taken(tmp_path: Path, is_tls: bool) -> None:
    limits = replace(LIMITS, untaken_seconds=0.3)
    with _tls_or_not(tmp_path, is_tls, limits) as server:
        with _client(server, is_tls) as greedy, _client(server, is_tls) as gone, _client(server, is_tls) as good:
            for client in (greedy, gone):
                client.start(SIZE, {"size": 20_000_000})
            server.wait_for(lambda: server.processor.ended[SIZE] == 2)
            gone.socket.shutdown(socket.SHUT_WR)
            server.wait_for(lambda: server.row()["connections"] == 1)
            assert good.ask(ECHO).code == 0
        _closed(server, "untaken", 2)


def _tls_or_not(place: Path, is_tls: bool, limits: Limits = LIMITS) -> RemotingServing:
    if not is_tls:
        return RemotingServing(place, limits=limits)
    cert, key = make_certificate(place)
    return RemotingServing(place, limits=limits, remoting_tls_cert=cert, remoting_tls_key=key)


def _client(server: RemotingServing, is_tls: bool) -> RemotingClient:
    cert = server.config.remoting.remoting_tls_cert
    return server.client(tls=client_context(cert) if is_tls and cert is not None else None)


def test_an_answer_that_is_taken_slowly(tmp_path: Path) -> None:
    limits = replace(LIMITS, untaken_seconds=0.4)
    with RemotingServing(tmp_path, limits=limits) as server, server.client() as client:
        client.start(SIZE, {"size": 10_000_000})
        count = 0
        while count < 10_000_000:
            count += len(client.socket.recv(1_000_000))
            time.sleep(0.05)


@pytest.mark.parametrize("is_tls", [False, True])
def test_who_asks_without_listening_is_not_read_any_more(tmp_path: Path, is_tls: bool) -> None:
    frame = encode(Command(SIZE, 1, ext_fields={"size": "100000"}))
    with _tls_or_not(tmp_path, is_tls) as server, _client(server, is_tls) as deaf:
        peer = deaf.socket
        peer.settimeout(1)
        with pytest.raises(TimeoutError):
            peer.sendall(frame * 60_000)
        began = server.processor.begun[SIZE]
        assert began < 2 * LIMITS.under_way
        with _client(server, is_tls) as good:
            assert good.ask(ECHO).code == 0
        assert server.processor.begun[SIZE] == began
        # What it did ask is answered once it listens.
        peer.settimeout(30)
        server.wait_for(lambda: peer.recv(1 << 20) and server.processor.begun[SIZE] > began)


def test_as_many_requests_under_way_as_may_be(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, limits=replace(LIMITS, under_way=20), remoting_idle_timeout="1s") as server:
        with server.client() as client, server.client() as other:
            client.socket.sendall(b"".join(encode(Command(HANG, number)) for number in range(50)))
            server.wait_for(lambda: server.processor.begun[HANG] == 20)
            assert other.ask(ECHO).code == 0
            assert server.processor.begun[HANG] == 20
        # That it has gone is not seen, for nothing of it is read: it ends all the same.
        server.wait_for(lambda: server.processor.cancelled[HANG] == 20)
        _closed(server, "idle")


def test_requests_under_way_hold_no_more_than_they_may(server: RemotingServing) -> None:
    body = bytes(1_000_000)
    with server.client() as client:

        def send() -> None:
            with suppress(OSError):
                for _ in range(100):
                    client.start(HANG, body=body)

        sending = threading.Thread(target=send)
        sending.start()
        bound = LIMITS.under_way_bytes // len(body)
        server.wait_for(lambda: server.processor.begun[HANG] >= bound)
        time.sleep(0.1)
        assert server.processor.begun[HANG] <= bound + 1
        client.socket.shutdown(socket.SHUT_RDWR)
        sending.join()


def test_frames_that_do_not_end_hold_no_more_than_they_may(tmp_path: Path) -> None:
    start = struct.pack(">i", 1_000_000) + bytes(700_000)
    with RemotingServing(tmp_path, limits=replace(LIMITS, held_bytes=3_000_000)) as server, ExitStack() as stack:
        good = stack.enter_context(server.client())
        assert good.ask(ECHO).code == 0
        for count in range(12):
            peer = stack.enter_context(server.connect())
            with suppress(ConnectionError):
                peer.sendall(start)
            assert good.ask(ECHO, body=bytes(1000)).code == 0, count
        server.wait_for(lambda: server.row()["closed"]["memory"] >= 8)
        assert server.row()["closed"]["slow"] == 0


def test_untaken_answers_hold_no_more_than_they_may(tmp_path: Path) -> None:
    with RemotingServing(tmp_path, limits=replace(LIMITS, held_bytes=50_000_000)) as server, ExitStack() as stack:
        good = stack.enter_context(server.client())
        for _ in range(8):
            stack.enter_context(server.client()).start(SIZE, {"size": 20_000_000})
        assert len(good.ask(SIZE, {"size": 1_000_000}).body) == 1_000_000
        server.wait_for(lambda: server.row()["closed"]["memory"] >= 5)
