"""What is no query goes to the real name server and the real broker, and each answer to the right client."""

from __future__ import annotations

import json
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from support.remoting_outlet import NAME, PATIENCE, Behind, broker_handlers
from support.remoting_peer import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.remoting import Command

_HEARTBEAT = json.dumps({"clientID": "client-1", "producerDataSet": [{"groupName": "g"}]}).encode()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def behind(tmp_path: Path, stack: ExitStack) -> Behind:
    return Behind(stack, tmp_path)


@pytest.mark.parametrize("form", ["json", "rocketmq"])
def test_a_request_goes_to_the_broker_as_it_is(behind: Behind, form: str) -> None:
    client = behind.client(form=form)
    fields = {"a": "TopicTest", "b": "钥匙", "AccessKey": "k", "Signature": "s="}
    answer = client.ask(310, fields, b"body \0\xff", language="GO", version=400, remark=None)
    assert (answer.code, answer.form, answer.body) == (0, form, b"body \0\xff")
    assert answer.ext_fields == fields | {"msgId": "broker"}
    (_, sent), *more = behind.broker.requests
    assert not more
    # JSON alone has room for what is no ext field, and would be signed: the mark that tells of a circle.
    assert (sent.code, sent.form, sent.language, sent.version, sent.flag) == (310, "json", "GO", 400, 0)
    assert (sent.ext_fields, sent.body) == (fields, b"body \0\xff")


def test_what_belongs_to_a_name_server_goes_there(behind: Behind) -> None:
    client = behind.client()
    assert client.ask(206).json() == {"topicList": ["TopicTest"]}
    answer = client.ask(319)
    assert (answer.code, answer.remark) == (3, "no handler")
    assert 206 in behind.names.codes()
    assert not behind.broker.requests


def test_many_clients_at_once_get_each_its_own_answers(behind: Behind) -> None:
    failures: list[object] = []

    def work(number: int) -> None:
        with behind.outlet.client(form=("json", "rocketmq")[number % 2]) as client:
            if number % 3 == 0:
                client.ask(34, body=json.dumps({"clientID": f"c{number}"}).encode())
            asked = [client.start(310, {"a": f"{number}-{turn}"}, b"x" * (turn * 997)) for turn in range(50)]
            for turn, request in enumerate(asked):
                answer = client.answer_to(request)
                if answer.ext_fields["a"] != f"{number}-{turn}" or len(answer.body) != turn * 997:
                    failures.append((number, turn, answer))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures
    assert behind.broker.connections == 12  # one for each client


def test_requests_of_one_client_stay_in_order(behind: Behind) -> None:
    # From the first one on, when the connection has yet to be made.
    client = behind.client()
    client.tell(34, body=_HEARTBEAT)
    for number in range(200):
        client.tell(310, {"n": number})
    behind.broker.wait(lambda broker: len(broker.requests) == 201)
    numbers = [int(command.ext_fields["n"]) for _, command in behind.broker.requests if command.code == 310]
    assert numbers == list(range(200))
    assert all(command.is_oneway for _, command in behind.broker.requests)
    assert len({number for number, _ in behind.broker.requests}) == 1


def test_a_oneway_request_is_the_last_word_of_its_client(behind: Behind) -> None:
    with behind.outlet.client() as client:
        client.ask(34, body=_HEARTBEAT)
        client.tell(37, {"commitOrRollback": "8"}, b"x" * 500_000)
    behind.broker.wait(lambda broker: 37 in broker.codes() and not broker.open_connections())


def test_the_broker_asks_the_client_that_it_knows(behind: Behind) -> None:
    first, second = behind.client(), behind.client(form="rocketmq")
    for number, client in enumerate((first, second)):
        assert client.ask(34, body=json.dumps({"clientID": f"c{number}"}).encode()).code == 0
    (one, _), (two, _) = behind.heartbeats()
    behind.broker.ask_client(two, 39, is_oneway=True, ext_fields={"transactionId": "t"}, body=b"half")
    asked = second.next_request()
    assert (asked.code, asked.flag, asked.ext_fields, asked.body) == (39, 2, {"transactionId": "t"}, b"half")

    question = behind.broker.ask_client(one, 307, form="json")
    request = first.next_request()
    assert (request.code, request.opaque) == (307, question.opaque)
    first.reply(request, 0, {"x": "y"}, body=b"running")
    behind.broker.wait(lambda broker: broker.responses)
    (response,) = behind.broker.responses
    assert (response.opaque, response.ext_fields, response.body) == (question.opaque, {"x": "y"}, b"running")
    assert not first.requests
    assert not second.requests


def test_the_broker_is_told_when_a_client_goes(behind: Behind) -> None:
    client = behind.client()
    client.ask(34, body=_HEARTBEAT)
    client.ask(310)
    assert len(behind.broker.open_connections()) == 1
    client.close()
    behind.broker.wait(lambda broker: not broker.open_connections())


def test_a_long_poll_is_held_and_others_overtake_it(behind: Behind) -> None:
    release = threading.Event()

    def pull(request: Command) -> dict[str, Any]:
        release.wait(20)  # the stand-in answers in turn what comes by one connection: this client has one of its own
        return {"body": request.body}

    behind.broker.handlers[361] = pull
    client, other = behind.client(), behind.client()
    client.ask(34, body=_HEARTBEAT)
    held = client.start(361, {"suspendTimeoutMillis": 20_000}, b"late")
    assert other.ask(310, body=b"now").body == b"now"
    assert client.ask(206).code == 0  # the same client, by the name server
    release.set()
    assert client.answer_to(held).body == b"late"


def test_an_answer_that_never_comes(tmp_path: Path, stack: ExitStack) -> None:
    behind = Behind(stack, tmp_path, patience=replace(PATIENCE, answer=0.2))
    behind.broker.handlers[310] = lambda _: None
    client = behind.client()
    answer = client.ask(310)
    assert (answer.code, answer.remark) == (
        14, f"the broker at {behind.broker.address} does not answer: no answer within 0.2 s"
    )  # fmt: skip
    assert client.ask(10, body=b"on").body == b"on"  # by the same connection
    assert behind.broker.connections == 1


def test_the_broker_goes_and_comes_back_at_another_port(behind: Behind) -> None:
    client, idle = behind.client(), behind.client()
    client.ask(34, body=_HEARTBEAT)
    assert idle.ask(310).code == 0
    behind.broker.handlers[310] = lambda _: None
    lost = client.start(310)
    behind.broker.wait(lambda broker: broker.codes().count(310) == 2)
    behind.broker.stop()
    answer = client.answer_to(lost)
    assert answer.code == 14
    assert answer.remark is not None
    assert answer.remark.startswith(f"the broker at {behind.broker.address} does not answer: ")
    for one in (client, idle):
        answer = one.ask(310)
        assert answer.code == 14
        assert "refused, since 20" in str(answer.remark)
    with Peer(broker_handlers()) as again:
        behind.brokers[NAME] = {0: again.address}
        deadline = time.monotonic() + 10
        while (answer := client.ask(310, body=b"x")).code != 0:
            assert time.monotonic() < deadline, answer
            time.sleep(0.05)
        # The client's next heartbeat makes it known there.
        assert client.ask(34, body=_HEARTBEAT).ext_fields["msgId"] == "broker"
        assert [(number, command.code) for number, command in again.requests] == [(1, 310), (1, 34)]
        again.ask_client(1, 40, is_oneway=True)
        assert client.next_request().code == 40


def test_another_broker_becomes_the_master(behind: Behind) -> None:
    # The one before lives on, as a slave: who was there has to leave it.
    client, other = behind.client(), behind.client()
    client.ask(34, body=_HEARTBEAT)
    assert other.ask(310).code == 0
    with Peer(broker_handlers()) as master:
        behind.brokers[NAME] = {0: master.address, 1: behind.broker.address}
        deadline = time.monotonic() + 10
        while master.codes().count(310) < 2:
            assert time.monotonic() < deadline
            client.ask(310)
            time.sleep(0.02)
        count = len(behind.broker.requests)
        assert other.ask(310).code == 0
        assert (master.connections, len(behind.broker.requests)) == (2, count)


def test_a_broker_that_takes_nothing(tmp_path: Path, stack: ExitStack) -> None:
    behind = Behind(stack, tmp_path, patience=replace(PATIENCE, untaken_bytes=1 << 20))
    release = threading.Event()
    behind.broker.handlers[361] = lambda _: release.wait(20) and None
    client = behind.client()
    client.tell(361)
    body = bytes(1 << 20)
    asked = [client.start(310, body=body) for _ in range(20)]
    refused = client.receive()
    assert (refused.code, str(refused.remark).endswith("it has not taken 1 MiB yet")) == (14, True)
    assert client.ask(206).code == 0
    release.set()
    codes = [client.answer_to(one).code for one in asked if one.opaque != refused.opaque]
    assert 0 in codes
    assert set(codes) <= {0, 14}
    assert client.ask(310, body=body).code == 0
