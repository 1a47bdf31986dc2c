"""Connections of the remoting server: frames in pieces and in heaps, answers in any order, limits, TLS and the stop."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING

import pytest

from indexd.serve.metrics import render
from indexd.serve.remoting.command import RemotingCommand
from support.remoting import Command, encode
from support.remoting_serving import CALL_BACK, ECHO, FAIL, HANG, LIMITS, SIZE, SLEEP, WHO, RemotingServing
from support.tls import client_context, make_certificate

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RemotingServing]:
    with RemotingServing(tmp_path) as serving:
        yield serving


@pytest.mark.parametrize("form", ["json", "rocketmq"])
def test_an_answer_is_in_the_form_of_its_request(server: RemotingServing, form: str) -> None:
    with server.client(form=form) as client:
        for body in (b"", b"body", bytes(700_000)):
            answer = client.ask(ECHO, {"topic": "T", "key": "钥匙"}, body)
            assert (answer.code, answer.flag, answer.form) == (0, 1, form)
            assert (answer.ext_fields, answer.body) == ({"topic": "T", "key": "钥匙"}, body)


def test_a_frame_a_byte_at_a_time_and_a_heap_of_them_at_once(server: RemotingServing) -> None:
    count = 3 * LIMITS.under_way + 5
    with server.client() as client:
        for byte in encode(Command(ECHO, 1, body=b"slow")):
            client.socket.sendall(bytes([byte]))
        assert client.receive().body == b"slow"
        client.socket.sendall(b"".join(encode(Command(ECHO, number, body=b"x" * number)) for number in range(count)))
        answers = [client.receive() for _ in range(count)]
    assert sorted((answer.opaque, len(answer.body)) for answer in answers) == [(n, n) for n in range(count)]


@pytest.mark.parametrize("sizes", [(1, 7, 300_000, 2), (65_535, 65_536, 65_537), (900_000, 0, 900_000)])
def test_large_and_small_frames_in_turn(server: RemotingServing, sizes: tuple[int, ...]) -> None:
    frames = b"".join(encode(Command(ECHO, number, body=b"x" * size)) for number, size in enumerate(sizes))
    with server.client() as client:
        sending = threading.Thread(target=client.socket.sendall, args=(frames,))
        sending.start()
        answers = {answer.opaque: len(answer.body) for answer in (client.receive() for _ in sizes)}
        sending.join()
    assert answers == dict(enumerate(sizes))
    server.wait_for(lambda: server.row()["sentBytes"] > sum(sizes))
    assert server.row()["receivedBytes"] == len(frames)


def test_a_quick_answer_overtakes_a_slow_one(server: RemotingServing) -> None:
    with server.client() as client:
        slow = client.start(SLEEP, {"seconds": 0.3})
        quick = client.start(ECHO)
        assert client.receive().opaque == quick.opaque
        assert client.receive().opaque == slow.opaque


def test_a_defect_is_an_answer_and_the_connection_goes_on(server: RemotingServing) -> None:
    with server.client() as client:
        answer = client.ask(FAIL)
        assert (answer.code, answer.remark) == (1, "a defect of indexd: ZeroDivisionError")
        assert client.ask(ECHO).code == 0
        for _ in range(5):
            client.ask(FAIL)
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


def test_what_a_client_waited_for_ends_with_it(server: RemotingServing) -> None:
    client = server.client()
    client.start(HANG)
    name = client.local
    server.wait_for(lambda: server.processor.begun[HANG])
    client.close()
    server.wait_for(lambda: server.processor.cancelled[HANG] == 1)
    assert server.processor.gone == [name]
    told: list[int] = []
    (gone,) = server.processor.clients
    assert gone.is_closed
    gone.on_close(lambda: told.append(1))
    assert told == [1], "it is over already"
    gone.send(RemotingCommand(ECHO, 1))


def test_a_request_to_the_client_and_its_response(server: RemotingServing) -> None:
    for form in ("json", "rocketmq"):
        with server.client(form=form) as client:
            assert client.ask(CALL_BACK).code == 0
            asked = client.next_request()
            assert (asked.code, asked.opaque, asked.ext_fields) == (40, 77, {"consumerGroup": "g"})
            client.reply(asked, 3, remark="so")
            assert client.ask(ECHO).code == 0
        assert (server.processor.responses[-1].code, server.processor.responses[-1].remark) == (3, "so")
    server.wait_for(lambda: (server.row()["connectionsTotal"], server.row()["connections"]) == (2, 0))
    assert server.row()["requests"] == {"other": {"ok": 4}}, "a response is no request"


def test_who_is_who(server: RemotingServing) -> None:
    with server.client() as client:
        assert client.ask(WHO).remark == f"{client.local} {server.address}"


def test_who_ends_his_side_ends_the_connection_and_keeps_what_was_answered(server: RemotingServing) -> None:
    with server.client() as client:
        client.start(HANG)
        large = client.start(SIZE, {"size": 5_000_000})
        server.wait_for(lambda: server.processor.ended[SIZE])
        client.socket.shutdown(socket.SHUT_WR)
        assert len(client.answer_to(large).body) == 5_000_000
        assert client.is_closed()
    assert server.processor.cancelled[HANG] == 1


@pytest.mark.parametrize("is_tls", [False, True])
def test_a_stop_lets_finish_what_is_under_way(tmp_path: Path, is_tls: bool) -> None:
    cert, key = make_certificate(tmp_path)
    given = {"remoting_tls_cert": cert, "remoting_tls_key": key} if is_tls else {}
    tls = client_context(cert) if is_tls else None
    with RemotingServing(tmp_path, **given) as server, server.client(tls=tls) as client, server.client(tls=tls) as idle:
        assert idle.ask(ECHO).code == 0
        request = client.start(SLEEP, {"seconds": 0.3})
        large = client.start(SIZE, {"size": 9_000_000})
        server.wait_for(lambda: server.processor.begun[SLEEP] and server.processor.ended[SIZE])
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert idle.is_closed()
        assert client.answer_to(request).code == 0
        assert len(client.answer_to(large).body) == 9_000_000
        assert client.is_closed()
        stopping.join()
    assert server.log.errors() == []


def test_a_stop_breaks_off_what_does_not_end(server: RemotingServing) -> None:
    with server.client() as client, server.client() as stuck:
        client.start(HANG)
        stuck.start(SIZE, {"size": 30_000_000})  # and reads nothing
        server.wait_for(lambda: server.processor.begun[HANG] and server.processor.ended[SIZE])
        assert 1 < server.stop() < 4
        assert client.is_closed()
    assert server.processor.cancelled[HANG] == 1
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
        waiting.sendall(encode(Command(ECHO)))
        assert waiting.recv(4)
        waiting.close()


def test_its_metrics(server: RemotingServing) -> None:
    with server.client() as client:
        client.ask(ECHO)
        client.ask(12)
        client.ask(12)
        client.ask(33)
        client.ask(FAIL)
    server.wait_for(lambda: (server.row()["connectionsTotal"], server.row()["connections"]) == (1, 0))
    text, _ = render(server.board, None)
    lines = {
        line.partition("{")[0] + "".join(part for part in line.split('"')[1::2] if part in words): line.split()[-1]
        for words in [{"QUERY_MESSAGE", "VIEW_MESSAGE_BY_ID", "other", "ok", "error", "bytes", "full"}]
        for line in text.decode().splitlines()
        if line.startswith("indexd_remoting_")
    }
    prefix = "indexd_remoting_"
    assert lines[f"{prefix}open_connections"] == "0.0"
    assert lines[f"{prefix}accepted_connections_total"] == "1.0"
    assert lines[f"{prefix}refused_connections_totalfull"] == "0.0"
    assert lines[f"{prefix}closed_connections_totalbytes"] == "0.0"
    assert lines[f"{prefix}requests_totalQUERY_MESSAGEok"] == "2.0"
    assert lines[f"{prefix}requests_totalVIEW_MESSAGE_BY_IDok"] == "1.0"
    assert lines[f"{prefix}requests_totalotherok"] == "1.0"
    assert lines[f"{prefix}requests_totalothererror"] == "1.0"
    assert float(lines[f"{prefix}received_bytes_total"]) > 300
    assert float(lines[f"{prefix}sent_bytes_total"]) > 300
