"""The broker of a store as it is seen from beside it: found, asked how far its log goes, and its lock."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from indexd.config import Config
from indexd.config.load import load
from indexd.errors import BusyError, DiskError
from indexd.service.broker import BrokerAdmin, BrokerLimit
from indexd.storage import lock as broker_lock
from indexd.storage.disk import Disk
from indexd.storage.lock import BrokerLock, StoreLock, listening, look_at_lock
from support.fake_broker import STAND_IN, FakeBroker, frame, raw, said, stand_in, well
from support.missing import need
from support.reading import Clock
from support.remoting import Command
from support.small_log import SEGMENT_SIZE, write_log

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNS = BrokerLock(True, os.getpid(), "lock")
LIKE_A_BROKER = (-2, 0, 1)  # the fast port, listenPort, the port for replicas


def config_of(root: Path, conf: str | None = None, **flags: str) -> Config:
    given: dict[str, Any] = {"store": str(root / "store"), "data": str(root / "data"), **flags}
    if conf is not None:
        given["broker_conf"] = str(root / "broker.conf")
        (root / "broker.conf").write_text(conf)
    return load({"segment_size": str(SEGMENT_SIZE)} | given, None, {})


class Host:
    """A store, and a broker in this process that listens on ports with the distances of ``LIKE_A_BROKER``."""

    def __init__(self, stack: ExitStack, root: Path) -> None:
        self.root, self.end = root, write_log(root / "store", 100)
        self.lock = RUNS
        self.limits: list[BrokerLimit] = []
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
        self.port = port
        stack.enter_context(self.broker)

    def limit(self, clock: Clock | None = None, conf: str | None = None, **flags: str) -> BrokerLimit:
        """Finds the broker by itself."""
        config = config_of(self.root, conf, **flags)
        self.limits.append(BrokerLimit(config, Disk(), bounds=bool(flags), clock=clock or Clock()))
        return self.limits[-1]

    def bounding(self, clock: Clock) -> BrokerLimit:
        """Is told where it is."""
        return self.limit(clock, broker_address=self.broker.address, broker_check_interval="4")

    def asked_in_a_minute(self, limit: BrokerLimit, clock: Clock, position: int, watched_every: int = 0) -> int:
        """How often, by a reader that waits there and looks every millisecond, and by who watches the broker."""
        before = len(self.broker.requests)
        for step in range(60_000):
            clock.now += 0.001
            limit.ask(position, b"what a longer log left")
            if watched_every and step % watched_every == 0:
                limit.refresh()
        return len(self.broker.requests) - before


def word(limit: BrokerLimit) -> int | str | None:
    """What it says now, or why it says nothing."""
    limit.refresh()
    return limit.silence or limit.offset


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    with ExitStack() as stack:
        found = Host(stack, tmp_path)
        ours = [found.port + distance for distance in LIKE_A_BROKER]
        monkeypatch.setattr("indexd.service.broker.lock_of", lambda _: found.lock)
        # Of this process, which has other listeners, those of the test.
        monkeypatch.setattr(
            "indexd.service.broker.listening",
            lambda pid: {port: host for port, host in listening(pid).items() if port in ours},
        )
        yield found
        for limit in found.limits:
            limit.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


# --- found ---


def test_by_the_ports_of_the_process_that_holds_the_lock(host: Host) -> None:
    limit = host.limit()
    assert word(limit) == host.end
    assert limit.address == host.broker.address
    for other in host.others:  # a question at the port for replicas would be an acknowledgement there
        other.setblocking(False)
        with pytest.raises(BlockingIOError):
            other.accept()


def test_by_broker_conf(host: Host) -> None:
    host.lock = BrokerLock(None, None, "unknown")  # nobody has to be seen
    assert word(host.limit(conf=f"listenPort={host.port}\nbrokerIP1=127.0.0.1\n")) == host.end
    wrong = word(host.limit(conf="listenPort=1\nbrokerIP1=no host\n"))
    assert "no host:1, of broker_conf, is no address" in str(wrong)


@pytest.mark.parametrize(
    ("begin", "end"), [("4096", None), ("-1", "9999999999"), ("0", "9999999999")], ids=["begin", "none", "end"]
)
def test_a_broker_of_another_store_is_not_believed(host: Host, begin: str, end: str | None) -> None:
    host.broker.answer = well(end or str(host.end), begin)
    limit = host.limit()
    assert "is another store's" in str(word(limit))
    assert (limit.address, limit.offset) == (None, None)


REFUSED = PermissionError(13, "Permission denied")


@pytest.mark.parametrize(
    ("lock", "ports", "why"),
    [
        (BrokerLock(False, None, "none"), (), "no broker runs here"),
        (BrokerLock(True, None, "lock", "it cannot be seen"), (), "it cannot be seen; set broker_address"),
        (RUNS, (0,), "is not there yet"),
        (RUNS, (-2, 0, 2), "is not to be told from its other ports"),
        (RUNS, REFUSED, "cannot be seen (Permission denied); set broker_address"),
    ],
)
def test_who_cannot_be_found_is_not_asked(
    host: Host, monkeypatch: pytest.MonkeyPatch, lock: BrokerLock, ports: Any, why: str
) -> None:
    def listen(_: int) -> dict[int, str]:
        if isinstance(ports, OSError):
            raise ports
        return {host.port + distance: "127.0.0.1" for distance in ports}

    monkeypatch.setattr("indexd.service.broker.listening", listen)
    host.lock = lock
    assert why in str(word(host.limit()))
    assert not host.broker.requests


def test_one_that_comes_back_elsewhere_is_found_again(host: Host) -> None:
    limit = host.limit()
    assert word(limit) == host.end
    host.broker.answer = well("1", code=1)
    assert "refused with code 1" in str(word(limit))
    assert limit.address is None
    host.broker.answer = well(str(host.end))
    assert word(limit) == host.end


def test_what_listens_here() -> None:
    with ExitStack() as stack:
        expected = {}
        for family, address, name in (
            (socket.AF_INET, "127.0.0.1", "127.0.0.1"),
            (socket.AF_INET, "127.0.0.9", "127.0.0.9"),
            (socket.AF_INET, "0.0.0.0", "127.0.0.1"),
            (socket.AF_INET6, "::1", "[::1]"),
            (socket.AF_INET6, "::", "127.0.0.1"),
        ):
            try:
                server = stack.enter_context(closing(socket.create_server((address, 0), family=family)))
            except OSError:  # no IPv6 here
                assert family == socket.AF_INET6
                continue
            expected[server.getsockname()[1]] = name
        assert expected.items() <= listening(os.getpid()).items()
    assert not expected.keys() & listening(os.getpid()).keys()
    with pytest.raises(OSError, match="No such file"):
        listening(2**22 + 1)  # more than any pid


# --- asked ---

TIMEOUT = 0.4


def test_what_is_asked_and_answered() -> None:
    with FakeBroker(well("12345")) as broker:
        admin = BrokerAdmin(broker.address)
        assert [admin.offsets() for _ in range(3)] == [(0, 12345)] * 3
        admin.close()
        assert admin.offsets() == (0, 12345)  # a question opens a connection
        admin.close()
    assert broker.connections == 2
    assert [(asked.code, asked.opaque) for _, asked in broker.requests] == [(28, 1), (28, 2), (28, 3), (28, 4)]


def drip(connection: socket.socket, request: Command) -> None:
    header = {"code": 0, "flag": 1, "opaque": request.opaque}
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
        # It is not carried into the next answer, and the next question opens another connection.
        broker.answer = well("99")
        assert admin.offsets() == (0, 99)
        admin.close()


# --- believed ---


def test_it_is_asked_when_somebody_asks_and_bounds_nothing_by_itself(host: Host, clock: Clock) -> None:
    limit = host.limit(clock)
    assert not limit.bounds
    assert (limit.offset, limit.address, host.broker.requests) == (None, None, [])
    assert limit.ask(host.end - 1, b"older") == host.end
    # Its word is not kept for later, as a frame may be written behind it that nobody doubts.
    host.broker.answer = well("1", code=1)
    clock.now += 1
    assert limit.ask(host.end, b"older still") is None
    assert limit.unsafe(is_expected=True) == []
    assert host.asked_in_a_minute(limit, clock, host.end) <= 20


def test_the_last_answer_holds_while_there_is_none(host: Host, clock: Clock) -> None:
    host.broker.answer = well("100")
    limit = host.bounding(clock)
    assert (limit.offset, limit.silence) == (None, "it was not asked yet")
    assert limit.ask(0) == 100
    host.broker.answer = well("40", code=1)
    clock.now += 1
    assert limit.ask(100) == 100
    assert "refused with code 1" in str(limit.silence)
    assert "nothing behind 100 is indexed" in limit.unsafe(is_expected=True)[0]
    assert limit.unsafe(is_expected=False) == []
    # Its log may have become shorter.
    host.broker.answer = well("40")
    clock.now += 10
    assert limit.ask(100) == 40
    assert limit.silence is None
    assert "ends at 40 and it was read up to 100" in limit.unsafe(is_expected=True)[0]


def test_questions_are_seldom(host: Host, clock: Clock) -> None:
    limit = host.bounding(clock)
    host.broker.answer = well("5")
    for number in range(1000):  # as a tail loop that looks every millisecond, and goes on
        clock.now += 0.001
        limit.ask(5 + number // 10)
    assert 45 <= len(host.broker.requests) <= 51, "at most fifty a second while messages flow"
    host.broker.answer = well("5", code=1)
    assert host.asked_in_a_minute(limit, clock, 5) <= 20  # after 0.5, 1, 2, and then 4 seconds each
    host.broker.answer = well("6")
    clock.now += 4
    assert limit.ask(5) == 6


def test_a_reader_that_is_told_the_same_leaves_the_questions_to_the_watcher(host: Host, clock: Clock) -> None:
    host.broker.answer = well("5")
    limit, watched = host.bounding(clock), 60 // 4
    assert watched <= host.asked_in_a_minute(limit, clock, 5, 4000) <= watched + 10
    # What is written over it is asked for at once.
    host.broker.answer = well("9")
    assert limit.ask(5, b"a message") == 9
    # And without a watcher it goes on by itself.
    assert 7 <= host.asked_in_a_minute(limit, clock, 9) <= 25


@pytest.mark.parametrize(
    ("position", "has_messages", "looks", "says"),
    [
        (100, True, 5, "but on disk there are whole messages at 100: it is another broker's"),
        (90, True, 5, "but on disk there are whole messages at 90: it is another broker's"),
        # At the end, on the way, or only for a moment: nothing is odd.
        (100, False, 5, None),
        (90, False, 5, None),
        (100, True, 3, None),
        # Read beyond it: cut, or another broker's.
        (150, False, 5, "read up to 150, so it was cut"),
    ],
)
def test_an_offset_that_the_log_on_disk_contradicts(
    host: Host, clock: Clock, position: int, has_messages: bool, looks: int, says: str | None
) -> None:
    host.broker.answer = well("100")
    limit = host.bounding(clock)
    limit.refresh()
    for _ in range(looks):
        is_held = limit.holds_back(position, has_messages=has_messages)
    assert is_held == (has_messages and looks > 3)
    found = limit.unsafe(is_expected=True)
    assert len(found) == (says is not None)
    assert all(str(says) in text and "correct broker_address and send HUP" in text for text in found)


# --- its configuration and its lock ---


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    (tmp_path / "store" / "lock").write_text("lock")
    return tmp_path / "store"


def test_what_a_look_says_without_a_broker(store: Path) -> None:
    row = BrokerLimit(config_of(store.parent), Disk()).look()
    assert {key: row[key] for key in ("alive", "pid", "how", "why", "indexing", "answers", "maxOffset", "unsafe")} == {
        "alive": False, "pid": None, "how": "none", "why": None, "indexing": None, "answers": None,
        "maxOffset": None, "unsafe": [],
    }  # fmt: skip
    assert row["indexingWhy"] == "no broker.conf is given"
    assert abs(row["checkedAt"] - time.time() * 1000) < 60_000


@pytest.mark.parametrize(
    ("flavour", "conf", "indexing"),
    [
        ("5.4", "", True),
        ("5.4", "messageIndexEnable=false\n", False),
        ("5.4", "indexFileWriteEnable=false\n", False),
        ("4.7", "indexFileWriteEnable=false\n", True),
        ("4.7", "messageIndexEnable=false\n", False),
    ],
)
def test_indexing_by_broker_conf(store: Path, flavour: str, conf: str, indexing: bool) -> None:
    row = BrokerLimit(config_of(store.parent, conf, flavour=flavour), Disk()).look()
    assert (row["indexing"], row["unsafe"]) == (indexing, [])


def check_lock(path: Path, alive: bool | None, pid: int | None, how: str, why: str = "", **more: Any) -> None:
    """What a look says of a lock; ``why`` is part of its words."""
    found = look_at_lock(path, **more)
    assert (found.alive, found.pid, found.how) == (alive, pid, how), found
    assert why in (found.why or ""), found


def test_a_broker_from_its_loading_to_its_end(store: Path) -> None:
    """A look takes no lock, leaves those of others, and is in nobody's way."""
    path, before = store / "lock", (store / "lock").stat()
    check_lock(path, False, None, "none")
    for _ in range(2):
        with stand_in(path) as broker:
            check_lock(path, True, broker.pid, "proc", "loading")
            broker.start()
            for _ in range(2):
                check_lock(path, True, broker.pid, "lock")
            assert look_at_lock(path).why is None
            broker.kill()
            check_lock(path, False, None, "none")
    after = path.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


def test_who_is_no_broker(store: Path, tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("lock")
    with stand_in(store / "lock", "r"), stand_in(tmp_path / "lock"):  # it only reads; it has another file of that name
        check_lock(store / "lock", False, None, "none")


def test_a_lock_file_that_is_removed_while_a_broker_has_it(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known by any path of the store."""
    (tmp_path / "link").symlink_to(store)
    monkeypatch.chdir(tmp_path)
    with stand_in(store / "lock") as broker:
        broker.start()
        (store / "lock").unlink()
        for path in (store / "lock", tmp_path / "link" / "lock", Path("store/lock")):
            check_lock(path, True, broker.pid, "proc", "removed")
    check_lock(store / "lock", False, None, "none", "no broker since 4.2")


def test_a_lock_that_cannot_be_opened_says_nothing(store: Path) -> None:
    # A name through a plain file: what even root may not open.
    check_lock(store / "lock" / "lock", None, None, "unknown", "Not a directory")


def test_a_broker_of_another_pid_namespace_is_alive_and_has_no_pid(store: Path) -> None:
    rights = [] if os.geteuid() == 0 else ["-Ur"]
    code = (
        "import sys, pathlib; from indexd.storage.lock import look_at_lock;"
        "found = look_at_lock(pathlib.Path(sys.argv[1])); print(found.alive, found.pid, found.how, found.why)"
    )
    with stand_in(store / "lock") as broker:
        broker.start()
        command = [need("unshare"), *rights, "-pf", sys.executable, "-c", code, str(store / "lock")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("True None lock its process cannot be seen from here")


def test_a_broker_that_may_not_be_looked_into_is_not_called_dead(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As under another user: its files are hidden, its command line is not.
    for pid, line in ((7, b"java\0org.apache.rocketmq.broker.BrokerStartup\0"), (8, b"/bin/sh\0")):
        (tmp_path / "proc" / str(pid)).mkdir(parents=True)
        (tmp_path / "proc" / str(pid) / "cmdline").write_bytes(line)

    def hidden(*_: object) -> bool:
        raise PermissionError

    monkeypatch.setattr(broker_lock, "_has_open", hidden)
    check_lock(store / "lock", None, None, "unknown", "process 7", proc=tmp_path / "proc")
    (tmp_path / "proc" / "7" / "cmdline").write_bytes(b"org.apache.rocketmq.namesrv.NamesrvStartup\0")
    check_lock(store / "lock", False, None, "none", proc=tmp_path / "proc")


@pytest.mark.parametrize(("kind", "name"), [(0x6969, "NFS"), (0x65735546, "FUSE"), (0xFF534D42, "CIFS")])
def test_a_free_lock_on_a_shared_file_system_says_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch, kind: int, name: str
) -> None:
    monkeypatch.setattr(broker_lock, "_file_system", lambda _: kind)
    check_lock(store / "lock", None, None, "unknown", name)
    with stand_in(store / "lock") as broker:  # one that is held says all
        broker.start()
        check_lock(store / "lock", True, broker.pid, "lock")


def test_a_lock_that_keeps_brokers_away(store: Path) -> None:
    path, lock = store / "lock", StoreLock(store / "lock")
    assert (lock.take(), lock.is_new) == (True, False)
    # A look of one's own process opens and closes the file: the lock is still there then.
    for _ in range(2):
        check_lock(path, False, None, "none", "indexd repair")
        path.read_bytes()
    command = [sys.executable, "-c", STAND_IN, str(path), "r+"]
    broker = subprocess.run(command, input="\n", capture_output=True, text=True, check=False)
    assert "BlockingIOError" in broker.stderr
    lock.release()
    with stand_in(path) as started:
        started.start()
        check_lock(path, True, started.pid, "lock")


def test_a_lock_beside_a_broker_or_another_one(store: Path) -> None:
    path, first, second = store / "lock", StoreLock(store / "lock"), StoreLock(store / "lock")
    with stand_in(path) as broker:
        broker.start()
        assert not first.take()
    assert first.take()
    with pytest.raises(BusyError, match="another indexd repair"):
        second.take()
    assert first.other() is None
    with stand_in(path) as broker:
        assert first.other() == broker.pid
    first.release()


def test_a_lock_where_there_was_no_lock_file(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path / "lock")
    assert (lock.take(), lock.is_new) == (True, True)
    lock.release()
    with pytest.raises(DiskError, match="cannot create"):
        StoreLock(tmp_path / "none" / "lock").take()
