"""How far the broker's log goes, asked over the network: of a broker, and of whatever else may listen there."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import pytest

from indexd.service.broker import BrokerAdmin, BrokerLimit
from support.fake_broker import FakeBroker, frame, raw, well
from support.reading import Clock

TIMEOUT = 0.4


def test_what_is_asked_and_answered() -> None:
    with FakeBroker(well("12345")) as broker:
        admin = BrokerAdmin(broker.address)
        assert [admin.offsets() for _ in range(3)] == [(0, 12345)] * 3
        admin.close()
        assert admin.offsets() == (0, 12345)  # a question opens a connection
        admin.close()
    assert broker.connections == 2
    assert {row["code"] for row in broker.requests} == {28}
    assert [row["opaque"] for row in broker.requests] == [1, 2, 3, 4]


def drip(connection: socket.socket, request: dict[str, Any]) -> None:
    header = {"code": 0, "flag": 1, "opaque": request["opaque"]}
    for byte in frame(header, b'{"table":{"commitLogMaxOffset":"1"}}'):
        connection.sendall(bytes([byte]))
        time.sleep(0.05)


NO_JSON = "what listens there does not speak RocketMQ's protocol"
NO_OFFSET = "the answer has no commitLogMaxOffset"
NOT_OURS = "the answer is not to this question"
NO_ROCKETMQ = "what listens there does not speak RocketMQ's protocol"
LATE = "no answer within 0.4 s"
GOOD = {"code": 0, "flag": 1, "opaque": 1}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (lambda *_: None, LATE),
        (drip, LATE),
        (lambda connection, _: connection.shutdown(socket.SHUT_RDWR), "the connection was closed before an answer"),
        (raw(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"), NO_ROCKETMQ),
        (raw(struct.pack(">II", 2**31 - 1, 10)), NO_ROCKETMQ),
        (raw(struct.pack(">II", 0xFFFFFFFF, 10)), NO_ROCKETMQ),
        (raw(struct.pack(">II", 3, 0)), NO_ROCKETMQ),
        (raw(struct.pack(">II", 8, 9) + bytes(4)), NO_ROCKETMQ),
        (raw(struct.pack(">II", 100, 96)), LATE),
        (raw(frame(GOOD, b"{}", kind=1)), NO_ROCKETMQ),
        (raw(frame(b"")), NO_JSON),
        (raw(frame(b"[1]")), NO_JSON),
        (raw(frame(b"[" * 100_000)), NO_JSON),
        (raw(frame(b'{"a":' * 50_000)), NO_JSON),
        (raw(frame(b"\xff\xfe")), NO_JSON),
        (raw(frame(b'{"opaque":' + b"9" * 5000 + b"}")), NO_JSON),
        (raw(frame({**GOOD, "opaque": 7})), NOT_OURS),
        (raw(frame({**GOOD, "flag": 0})), NOT_OURS),
        (raw(frame({**GOOD, "flag": "1"})), NO_ROCKETMQ),
        (raw(frame({**GOOD, "code": 16, "remark": "no \x1b[31mright"})), "refused with code 16: no "),
        (raw(frame(GOOD)), NO_OFFSET),
        (raw(frame(GOOD, b'{"table":[]}')), NO_OFFSET),
        (raw(frame(GOOD, b'{"table":{}}')), NO_OFFSET),
        *((well(offset), NO_OFFSET) for offset in (7, "", "-1", "1e5", "١", "9" * 19, " 1", None, ["1"])),
    ],
)
def test_answers_that_are_none(answer: Any, why: str) -> None:
    with FakeBroker(answer) as broker:
        admin = BrokerAdmin(broker.address, TIMEOUT)
        began = time.monotonic()
        found = admin.offsets()
        assert time.monotonic() - began < TIMEOUT + 0.5
        assert isinstance(found, str)
        assert found.startswith(why)
        assert found.isprintable()
        # It is not carried into the next answer.
        broker.answer = well("99")
        assert admin.offsets() == (0, 99)
        admin.close()


def test_a_connection_that_was_closed_meanwhile_is_opened_again() -> None:
    with FakeBroker(well("1")) as broker:
        admin = BrokerAdmin(broker.address, TIMEOUT)
        assert admin.offsets() == (0, 1)
        broker.hang_up()
        assert admin.offsets() == (0, 1)
        # One that is closed at every question is asked once on the old connection and once on a new one.
        broker.answer = lambda connection, _: connection.shutdown(socket.SHUT_RDWR)
        before = len(broker.requests)
        assert isinstance(admin.offsets(), str)
        assert len(broker.requests) - before == 2
        admin.close()


# --- patience ---


def test_the_last_answer_holds_while_there_is_none() -> None:
    clock = Clock()
    with FakeBroker(well("100")) as broker:
        limit = BrokerLimit(broker.address, 4.0, clock)
        assert (limit.offset, limit.silence) == (None, "it was not asked yet")
        assert limit.ask(0) == 100
        broker.answer = well("40", code=1)
        clock.now += 1
        assert limit.ask(100) == 100
        assert str(limit.silence).startswith("refused with code 1")
        assert "nothing behind 100 is indexed" in limit.unsafe(is_expected=True)[0]
        assert limit.unsafe(is_expected=False) == []
        # Its log may have become shorter.
        broker.answer = well("40")
        clock.now += 10
        assert limit.ask(100) == 40
        assert limit.silence is None
        assert "ends at 40 and it was read up to 100" in limit.unsafe(is_expected=True)[0]
        limit.close()


def test_questions_are_seldom() -> None:
    clock = Clock()
    with FakeBroker(well("5")) as broker:

        def ask_for(seconds: float) -> int:
            before = len(broker.requests)
            for number in range(int(seconds * 1000)):  # as a tail loop that looks every millisecond, and goes on
                clock.now += 0.001
                limit.ask(5 + number // 10)
            return len(broker.requests) - before

        limit = BrokerLimit(broker.address, 4.0, clock)
        assert 45 <= ask_for(1) <= 51, "at most fifty a second while messages flow"
        broker.answer = well("5", code=1)
        assert ask_for(60) <= 20  # after 0.5, 1, 2, and then 4 seconds each
        broker.answer = well("6")
        clock.now += 4
        assert limit.ask(5) == 6
        limit.close()


def test_a_reader_that_is_told_the_same_leaves_the_questions_to_the_watcher() -> None:
    clock = Clock()
    with FakeBroker(well("5")) as broker:
        limit = BrokerLimit(broker.address, 4.0, clock)
        for step in range(60_000):  # a minute
            clock.now += 0.001
            limit.ask(5, b"what a longer log left")
            if step % 4000 == 0:
                limit.refresh()
        watched = 60 // 4
        assert watched <= len(broker.requests) <= watched + 10
        # What is written over it is asked for at once.
        broker.answer = well("9")
        assert limit.ask(5, b"a message") == 9
        # And without a watcher it goes on by itself.
        before = len(broker.requests)
        for _ in range(60_000):
            clock.now += 0.001
            limit.ask(9, b"more")
        assert 7 <= len(broker.requests) - before <= 25
        limit.close()


def test_an_offset_that_the_log_on_disk_contradicts() -> None:
    def stand(position: int, *, has_messages: bool, looks: int = 5, is_waiting: bool = True) -> bool:
        found = [limit.compare(position, is_waiting=is_waiting, has_messages=has_messages) for _ in range(looks)]
        return found[-1]

    with FakeBroker(well("100")) as broker:
        limit = BrokerLimit(broker.address, 4.0, Clock())
        limit.refresh()
        for position, has_messages, said in (
            (100, True, "but on disk there are whole messages at 100"),
            (90, True, "but on disk there are whole messages at 90"),
            (80, False, "but on disk there is no message at 80"),
        ):
            assert stand(position, has_messages=has_messages) is has_messages
            (text,) = limit.unsafe(is_expected=False)
            assert said in text
            assert "correct broker_address and send HUP" in text
        # At the end, on the way, or only for a moment: nothing is odd.
        assert not stand(100, has_messages=False)
        assert limit.unsafe(is_expected=True) == []
        assert not stand(90, has_messages=True, is_waiting=False)
        assert not stand(100, has_messages=True, looks=3)
        assert limit.unsafe(is_expected=True) == []
        # Read beyond it: cut, or another broker's.
        assert not stand(150, has_messages=False)
        assert "read up to 150, so it was cut" in limit.unsafe(is_expected=False)[0]
        limit.close()
