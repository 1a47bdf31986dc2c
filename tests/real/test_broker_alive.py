"""A real broker as it is seen from beside it: loading, alive, indexing, how far its log goes, killed."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from indexd.config.load import load
from indexd.service.broker import BrokerAdmin, BrokerLimit, Offsets, limit_of
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock, look_at_lock
from support.daemon import Daemon, compile_kernels
from support.fake_broker import said
from support.naive import naive_frames
from support.rocketmq import REAL, Broker, arguments, run

pytestmark = REAL

SEGMENT_SIZE = 1 << 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tests go on from each other's end, as they stand in the file: a broker takes its time to start and to stop."""
    return tmp_path_factory.mktemp("alive")


def send(broker: Broker, home: Path, seed: int, count: int = 100) -> None:
    words = arguments(namesrv=broker.namesrv, count=count, seed=seed, out=home / f"sent-{seed}.jsonl")
    run("Client", "send", *words, home=home / "client")


def watch_of(store: Path, broker: Broker, **flags: str) -> BrokerLimit:
    given: dict[str, Any] = {
        "data": str(store.parent / "data"),
        "broker_conf": str(broker.home / "broker.conf"),
        "broker_address": broker.address,
        **flags,
    }
    return limit_of(load(given, None, {}), Disk())


def end_of_log(store: Path) -> int:
    return max(frame.phy_offset + frame.size for frame in naive_frames(store / "commitlog", SEGMENT_SIZE))


def looks_while_it_boots(broker: Broker) -> list[BrokerLock]:
    """What the lock says from before the start until it is up; one of each, in order."""
    looks: list[BrokerLock] = []
    is_up = threading.Event()

    def look() -> None:
        while not is_up.wait(0.002):
            looks.append(look_at_lock(broker.store / "lock"))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        broker.__enter__()
    finally:
        is_up.set()
        looking.join()
    return [next(same) for _, same in itertools.groupby(looks, key=lambda look: (look.how, look.pid))]


def test_a_broker_is_seen_loading_running_and_stopped(home: Path) -> None:
    """And a daemon beside it goes as far as it says."""
    compile_kernels()
    broker = Broker(home / "first")
    watch = None
    try:
        looks = looks_while_it_boots(broker)
        assert [(look.alive, look.how) for look in looks] == [(False, "none"), (True, "proc"), (True, "lock")]
        assert {look.pid for look in looks[1:]} == {broker.pid}
        watch = watch_of(broker.store, broker)
        row = look_once_it_answers(watch)
        assert {key: row[key] for key in ("alive", "pid", "how", "why", "indexing", "answers", "unsafe")} == {
            "alive": True, "pid": broker.pid, "how": "lock", "why": None, "indexing": True, "answers": True,
            "unsafe": [],
        }  # fmt: skip
        with beside(broker, home) as daemon:
            daemon.wait_caught_up()
            send(broker, home, 1)
            check_that_it_says_where_its_log_ends(broker)
            daemon.wait_caught_up(end_of_log(broker.store))
            state = daemon.wait_state(lambda row: bool(row["broker"]["answers"]))
            assert state["broker"]["alive"]
            assert state["phyOffset"] >= state["broker"]["maxOffset"] > 0
            row = watch.look()
            assert row["maxOffset"] > 0
            assert row["indexingWhy"] == f"by {broker.home / 'broker.conf'}"
            assert not troubles(daemon)
            broker.stop()
            row = watch.look()
            assert (row["alive"], row["how"], row["answers"], row["unsafe"]) == (False, "none", False, [])
            daemon.wait_state(lambda row: row["broker"]["alive"] is False)
            assert daemon.terminate() == 0
        assert troubles(daemon) <= {"broker_unsafe"}  # one that stops answers nobody for a while, and is there
    finally:
        if watch is not None:
            watch.close()
        broker.stop()


def troubles(daemon: Daemon) -> set[str]:
    return {row["event"] for row in daemon.events() if row["level"] in ("warning", "error")}


def beside(broker: Broker, home: Path) -> Daemon:
    flags = ("--broker-conf", broker.home / "broker.conf", "--broker-address", broker.address)
    return Daemon(broker.store, home / "data", *flags, "--broker-check-interval", "0.5")


def look_once_it_answers(watch: BrokerLimit) -> Mapping[str, Any]:
    """A look at a broker that is up: in its first second it refuses to say how it is, with an error of its own."""
    deadline = time.monotonic() + 30
    while not (row := watch.look())["answers"]:
        assert time.monotonic() < deadline, row
        time.sleep(0.1)
    return row


def check_that_it_says_where_its_log_ends(broker: Broker) -> None:
    """The same as the log itself, once nobody writes: a broker's own messages come now and then."""
    admin = BrokerAdmin(broker.address)
    deadline = time.monotonic() + 30
    while (named := said(admin)) != (seen := (0, end_of_log(broker.store))):
        assert isinstance(named, Offsets), named
        assert time.monotonic() < deadline, (named, seen)
    assert "commitLogMaxOffset" in broker.mqadmin("brokerStatus", "-b", broker.address)
    admin.close()


def test_a_broker_is_found_without_configuration_and_says_what_it_removed(home: Path, tmp_path: Path) -> None:
    """What its recovery cut off stands whole behind its end, and only it knows that."""
    store = home / "first" / "store"
    frames = sorted(naive_frames(store / "commitlog", SEGMENT_SIZE), key=lambda frame: frame.phy_offset)
    cut, removed = frames[len(frames) // 2], frames[len(frames) // 2 + 1 :]
    with (store / "commitlog" / f"{0:020}").open("r+b") as file:
        file.seek(cut.phy_offset + 4)
        file.write(bytes(4))  # its magic
    given: dict[str, Any] = {"store": str(store), "data": str(tmp_path / "data"), "segment_size": str(SEGMENT_SIZE)}
    watch = limit_of(load(given, None, {}), Disk())

    with Broker(tmp_path / "after", store=store) as broker:
        assert watch.look()["answers"] is None, "nobody asked"
        deadline = time.monotonic() + 30
        while (end := watch.ask(removed[0].phy_offset, b"stale")) is None:  # it refuses in its first second
            assert time.monotonic() < deadline, watch.silence
            time.sleep(0.1)
        assert watch.address == broker.address
        assert cut.phy_offset <= end < removed[-1].phy_offset
        row = watch.look()
        assert (row["address"], row["answers"], row["maxOffset"]) == (broker.address, True, end)
        assert not row["unsafe"]
        broker.kill()
        row = watch.look()
        assert (row["alive"], row["pid"], row["how"]) == (False, None, "none"), "dead at once"
    deadline = time.monotonic() + 30
    while watch.silence != "no broker runs here":  # first of all its connection has ended
        assert time.monotonic() < deadline, watch.silence
        time.sleep(0.1)
        assert watch.ask(removed[0].phy_offset, b"stale") in (None, end)
    assert watch.offset is None
    assert watch.look()["answers"] is False
    watch.close()
