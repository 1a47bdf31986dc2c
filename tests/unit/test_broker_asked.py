"""The broker of a store: found without an address, asked how far its log goes, believed as far as it may be."""

from __future__ import annotations

import os
import socket
import struct
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

from indexd.config.load import load
from indexd.service.broker import BrokerAdmin, BrokerFinder, BrokerLimit, Offsets, list_log
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock, listening
from support.fake_broker import FakeBroker, frame, raw, said, well
from support.reading import Clock
from support.small_log import write_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RUNS = BrokerLock(True, os.getpid(), "lock")
LIKE_A_BROKER = (-2, 0, 1)  # the fast port, listenPort, the port for replicas


class Host:
    """A store, and a broker in this process that listens on ports with the distances of ``LIKE_A_BROKER``."""

    def __init__(self, stack: ExitStack, root: Path) -> None:
        self.root, self.end = root, write_log(root / "store", 100)
        self.lock = RUNS
        for port in range(20_002, 32_000, 7):  # below what the kernel gives to others
            with ExitStack() as tried:
                try:
                    self.others = [
                        tried.enter_context(closing(socket.create_server(("127.0.0.1", port + distance))))
                        for distance in LIKE_A_BROKER
                        if distance
                    ]
                    self.broker = FakeBroker(well(str(self.end)), port)
                except OSError:
                    continue
                stack.push(tried.pop_all())
                break
        stack.enter_context(self.broker)

    def finder(self, **flags: str) -> BrokerFinder:
        given: dict[str, str | list[str] | None] = {
            "store": str(self.root / "store"), "data": str(self.root / "data"), "segment_size": "256KiB", **flags,
        }  # fmt: skip
        config = load(given, None, {})
        return BrokerFinder(config, lambda: self.lock, lambda: list_log(config, Disk()))

    def check_that_only_the_broker_was_asked(self) -> None:
        """A question at the port for replicas would be an acknowledgement there."""
        for other in self.others:
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.accept()


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with ExitStack() as stack:
        found = Host(stack, tmp_path)
        # Of this process, which has other listeners, those of the test.
        ours = [int(found.broker.address.rpartition(":")[2]) + distance for distance in LIKE_A_BROKER]
        monkeypatch.setattr(
            "indexd.service.broker.listening",
            lambda pid: {port: host for port, host in listening(pid).items() if port in ours},
        )
        yield found


def test_by_the_ports_of_the_process_that_holds_the_lock(host: Host) -> None:
    finder = host.finder()
    assert said(finder) == Offsets(0, host.end)
    assert finder.address == host.broker.address
    finder.close()
    host.check_that_only_the_broker_was_asked()


def test_by_broker_conf(host: Host, tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    name, _, port = host.broker.address.rpartition(":")
    conf.write_text(f"listenPort={port}\nbrokerIP1={name}\n")
    host.lock = BrokerLock(None, None, "unknown")  # nobody has to be seen
    finder = host.finder(broker_conf=str(conf))
    assert said(finder) == Offsets(0, host.end)
    finder.close()
    conf.write_text("listenPort=1\nbrokerIP1=no host\n")
    assert "no host:1, of broker_conf, is no address" in said(host.finder(broker_conf=str(conf)))


@pytest.mark.parametrize(
    ("begin", "end"), [("4096", "{end}"), ("-1", "9999999999"), ("0", "9999999999")], ids=["begin", "none", "end"]
)
def test_a_broker_of_another_store_is_not_believed(host: Host, begin: str, end: str) -> None:
    host.broker.answer = well(end.format(end=host.end), begin)
    finder = host.finder()
    assert "is another store's" in said(finder)
    assert finder.address is None


def test_who_cannot_be_found_is_not_asked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    finder = host.finder()
    host.lock = BrokerLock(False, None, "none")
    assert said(finder) == "no broker runs here"
    host.lock = BrokerLock(True, None, "lock", "its process cannot be seen")
    assert said(finder) == "its process cannot be seen; set broker_address"
    host.lock = RUNS
    port = int(host.broker.address.rpartition(":")[2])
    for ports, why in (
        ({port: "127.0.0.1"}, "is not there yet"),
        ({port - 2: "127.0.0.1", port: "127.0.0.1", port + 2: "127.0.0.1"}, "is not to be told from its other ports"),
    ):
        monkeypatch.setattr("indexd.service.broker.listening", lambda _, ports=ports: ports)
        assert why in said(finder)

    def refuse(_: int) -> dict[int, str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("indexd.service.broker.listening", refuse)
    assert "cannot be seen (Permission denied); set broker_address" in said(finder)
    assert not host.broker.requests


def test_one_that_comes_back_elsewhere_is_found_again(host: Host) -> None:
    finder = host.finder()
    assert isinstance(said(finder), Offsets)
    host.broker.answer = well("1", code=1)
    assert "refused with code 1" in said(finder)
    assert finder.address is None
    host.broker.answer = well(str(host.end))
    assert isinstance(said(finder), Offsets)
    finder.close()


def test_it_is_asked_when_somebody_asks_and_bounds_nothing_by_itself(host: Host) -> None:
    clock = Clock()
    limit = BrokerLimit(host.finder(), 4.0, clock)
    assert not limit.bounds
    assert (limit.offset, limit.address, host.broker.requests) == (None, None, [])
    assert limit.ask(host.end - 1, b"older") == host.end
    # Its word is not kept for later, as a frame may be written behind it that nobody doubts.
    host.broker.answer = well("1", code=1)
    clock.now += 1
    assert limit.ask(host.end, b"older still") is None
    assert limit.unsafe(is_expected=True) == []
    before = len(host.broker.requests)
    for _ in range(60_000):  # a minute of a reader that looks every millisecond
        clock.now += 0.001
        limit.ask(host.end, b"older still")
    assert len(host.broker.requests) - before <= 20
    limit.close()


def test_what_listens_here(tmp_path: Path) -> None:
    with ExitStack() as stack:
        expected = {}
        for family, host, said in (
            (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
            (socket.AF_INET, "127.0.0.9", "127.0.0.9"),
            (socket.AF_INET, "0.0.0.0", "127.0.0.1"),
            (socket.AF_INET6, "::1", "[::1]"),
            (socket.AF_INET6, "::", "127.0.0.1"),
        ):
            try:
                server = stack.enter_context(closing(socket.create_server((host, 0), family=family)))
            except OSError:  # no IPv6 here
                assert family == socket.AF_INET6
                continue
            expected[server.getsockname()[1]] = said
        assert expected.items() <= listening(os.getpid()).items()
    assert not expected.keys() & listening(os.getpid()).keys()
    with pytest.raises(OSError, match="No such file"):
        listening(os.getpid(), tmp_path)


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
        (raw(frame(b"")), NO_ROCKETMQ),
        (raw(frame(b"[1]")), NO_ROCKETMQ),
        (raw(frame(b"[" * 100_000)), NO_ROCKETMQ),
        (raw(frame(b'{"a":' * 50_000)), NO_ROCKETMQ),
        (raw(frame(b"\xff\xfe")), NO_ROCKETMQ),
        (raw(frame(b'{"opaque":' + b"9" * 5000 + b"}")), NO_ROCKETMQ),
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
        found = said(admin)
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
        assert isinstance(said(admin), str)
        assert len(broker.requests) - before == 2
        admin.close()


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
