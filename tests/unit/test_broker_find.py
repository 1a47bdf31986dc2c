"""The broker of a store is found without an address: by broker.conf, else by the ports of who holds its lock."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest

from indexd.config.load import load
from indexd.service.broker import BrokerFinder, BrokerLimit, Offsets, list_log
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock, listening
from support.fake_broker import FakeBroker, well
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
    assert finder.offsets() == Offsets(0, host.end)
    assert finder.address == host.broker.address
    finder.close()
    host.check_that_only_the_broker_was_asked()


def test_by_broker_conf(host: Host, tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    name, _, port = host.broker.address.rpartition(":")
    conf.write_text(f"listenPort={port}\nbrokerIP1={name}\n")
    host.lock = BrokerLock(None, None, "unknown")  # nobody has to be seen
    finder = host.finder(broker_conf=str(conf))
    assert finder.offsets() == Offsets(0, host.end)
    finder.close()
    conf.write_text("listenPort=1\nbrokerIP1=no host\n")
    assert "no host:1, of broker_conf, is no address" in str(host.finder(broker_conf=str(conf)).offsets())


@pytest.mark.parametrize(
    ("begin", "end"), [("4096", "{end}"), ("-1", "9999999999"), ("0", "9999999999")], ids=["begin", "none", "end"]
)
def test_a_broker_of_another_store_is_not_believed(host: Host, begin: str, end: str) -> None:
    host.broker.answer = well(end.format(end=host.end), begin)
    finder = host.finder()
    assert "is another store's" in str(finder.offsets())
    assert finder.address is None


def test_who_cannot_be_found_is_not_asked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    finder = host.finder()
    host.lock = BrokerLock(False, None, "none")
    assert finder.offsets() == "no broker runs here"
    host.lock = BrokerLock(True, None, "lock", "its process cannot be seen")
    assert finder.offsets() == "its process cannot be seen: set broker_address"
    host.lock = RUNS
    port = int(host.broker.address.rpartition(":")[2])
    for ports, why in (
        ({port: "127.0.0.1"}, "is not there yet"),
        ({port - 2: "127.0.0.1", port: "127.0.0.1", port + 2: "127.0.0.1"}, "is not to be told from its other ports"),
    ):
        monkeypatch.setattr("indexd.service.broker.listening", lambda _, ports=ports: ports)
        assert why in str(finder.offsets())

    def refuse(_: int) -> dict[int, str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("indexd.service.broker.listening", refuse)
    assert "cannot be seen (Permission denied): set broker_address" in str(finder.offsets())
    assert not host.broker.requests


def test_one_that_comes_back_elsewhere_is_found_again(host: Host) -> None:
    finder = host.finder()
    assert isinstance(finder.offsets(), Offsets)
    host.broker.answer = well("1", code=1)
    assert "refused with code 1" in str(finder.offsets())
    assert finder.address is None
    host.broker.answer = well(str(host.end))
    assert isinstance(finder.offsets(), Offsets)
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
