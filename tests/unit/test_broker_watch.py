"""The broker as it is seen from beside it: its lock and who has it open, its configuration, its index files."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from indexd.config import Config
from indexd.config.load import load
from indexd.errors import BusyError, DiskError
from indexd.service.broker import BrokerWatch
from indexd.storage import lock as broker_lock
from indexd.storage.disk import Disk
from indexd.storage.lock import StoreLock, look_at_lock
from support.fake_broker import STAND_IN, stand_in
from support.missing import need


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store" / "commitlog").mkdir(parents=True)
    (tmp_path / "store" / "lock").write_text("lock")
    return tmp_path / "store"


def config_of(store: Path, conf: str | None = None, **flags: str) -> Config:
    given = {"store": str(store), "data": str(store.parent / "data"), **flags}
    if conf is not None:
        path = store.parent / "broker.conf"
        path.write_text(conf)
        given["broker_conf"] = str(path)
    return load(given, None, {})


def test_what_a_look_says_without_a_broker(store: Path) -> None:
    row = BrokerWatch(config_of(store), Disk()).look()
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
def test_indexing_by_broker_conf(store: Path, flavour: str, conf: str, *, indexing: bool) -> None:
    watch = BrokerWatch(config_of(store, conf, flavour=flavour), Disk())
    with stand_in(store / "lock") as broker:
        broker.start()
        row = watch.look()
    assert (row["indexing"], row["unsafe"]) == (indexing, [])


OFF = "indexFileWriteEnable=false\n"


def write_index_header(store: Path, name: str, count: int) -> None:
    (store / "index").mkdir(exist_ok=True)
    (store / "index" / name).write_bytes(struct.pack(">qqqqii", 1, 2, 3, 4, 5, count))


def test_an_index_file_that_grows_is_believed_more_than_the_configuration(store: Path) -> None:
    watch = BrokerWatch(config_of(store, OFF, run_mode="offload"), Disk())
    write_index_header(store, "20240101000000000", 10)
    write_index_header(store, "20240102000000000", 20)
    with stand_in(store / "lock") as broker:
        broker.start()
        assert [watch.look()["indexing"] for _ in range(2)] == [False, False]
        write_index_header(store, "20240102000000000", 21)
        row = watch.look()
        assert (row["indexing"], row["indexingWhy"]) == (True, "its newest index file grows")
        assert "writes an index of its own (its newest index file grows)" in row["unsafe"][0]
        assert watch.look()["indexing"] is True  # a quiet minute is no change of its mind
    with stand_in(store / "lock") as another:
        another.start()
        # A broker deletes its newest file when it starts after a crash: that is no growth.
        assert watch.look()["indexing"] is False
        (store / "index" / "20240102000000000").unlink()
        assert watch.look()["indexing"] is False
        write_index_header(store, "20240103000000000", 1)
        assert watch.look()["indexing"] is True


def test_a_broker_from_its_loading_to_its_end(store: Path) -> None:
    path = store / "lock"
    assert look_at_lock(path).alive is False
    with stand_in(path) as broker:
        loading = look_at_lock(path)
        assert (loading.alive, loading.pid, loading.how) == (True, broker.pid, "proc")
        assert "loading" in str(loading.why)
        broker.start()
        running = look_at_lock(path)
        assert (running.alive, running.pid, running.how, running.why) == (True, broker.pid, "lock", None)
        broker.kill()
        ended = look_at_lock(path)
        assert (ended.alive, ended.pid, ended.how) == (False, None, "none")


def test_a_look_takes_no_lock_and_leaves_those_of_others(store: Path) -> None:
    path = store / "lock"
    with stand_in(path) as first:
        first.start()
        for _ in range(3):
            assert look_at_lock(path).pid == first.pid
    before = path.stat()
    assert look_at_lock(path).alive is False
    with stand_in(path) as second:  # nothing of a look is in its way
        second.start()
        assert look_at_lock(path).pid == second.pid
    after = path.stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)


def test_who_only_reads_the_lock_file_is_no_broker(store: Path) -> None:
    with stand_in(store / "lock", "r"):
        assert look_at_lock(store / "lock").alive is False


def test_a_lock_file_of_the_same_name_elsewhere_is_another(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "lock"
    other.write_text("lock")
    with stand_in(other):
        assert look_at_lock(store / "lock").alive is False


def test_a_lock_file_that_is_removed_while_a_broker_has_it(store: Path) -> None:
    path = store / "lock"
    with stand_in(path) as broker:
        broker.start()
        path.unlink()
        found = look_at_lock(path)
        assert (found.alive, found.pid, found.how) == (True, broker.pid, "proc")
        assert "removed" in str(found.why)


def test_a_removed_lock_file_is_known_by_any_path_of_the_store(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(store)
    monkeypatch.chdir(tmp_path)
    with stand_in(store / "lock") as broker:
        broker.start()
        (store / "lock").unlink()
        for path in (tmp_path / "link" / "lock", Path("store/lock")):
            assert (look_at_lock(path).alive, look_at_lock(path).pid) == (True, broker.pid)


def test_without_a_lock_file_no_broker_has_been_here(store: Path) -> None:
    (store / "lock").unlink()
    found = look_at_lock(store / "lock")
    assert (found.alive, found.how) == (False, "none")
    assert "no broker since 4.2" in str(found.why)


def test_a_lock_that_cannot_be_opened_says_nothing(store: Path) -> None:
    # A name through a plain file: what even root may not open.
    found = look_at_lock(store / "lock" / "lock")
    assert (found.alive, found.pid, found.how) == (None, None, "unknown")
    assert "Not a directory" in str(found.why)


def test_a_broker_of_another_pid_namespace_is_alive_and_has_no_pid(store: Path) -> None:
    rights = [] if os.geteuid() == 0 else ["-Ur"]
    code = (
        "import sys, pathlib; from indexd.storage.lock import look_at_lock;"
        "found = look_at_lock(pathlib.Path(sys.argv[1])); print(found.alive, found.pid, found.how, found.why)"
    )
    with stand_in(store / "lock") as broker:
        broker.start()
        command = [need("unshare"), *rights, "-pf", sys.executable, "-c", code, str(store / "lock")]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.startswith("True None lock its process cannot be seen from here")


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
    found = look_at_lock(store / "lock", proc=tmp_path / "proc")
    assert (found.alive, found.pid, found.how) == (None, None, "unknown")
    assert "process 7" in str(found.why)
    (tmp_path / "proc" / "7" / "cmdline").write_bytes(b"org.apache.rocketmq.namesrv.NamesrvStartup\0")
    assert look_at_lock(store / "lock", proc=tmp_path / "proc").alive is False


@pytest.mark.parametrize(("kind", "name"), [(0x6969, "NFS"), (0x65735546, "FUSE"), (0xFF534D42, "CIFS")])
def test_a_free_lock_on_a_shared_file_system_says_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch, kind: int, name: str
) -> None:
    monkeypatch.setattr(broker_lock, "_file_system", lambda _: kind)
    found = look_at_lock(store / "lock")
    assert (found.alive, found.how) == (None, "unknown")
    assert name in str(found.why)
    with stand_in(store / "lock") as broker:  # one that is held says all
        broker.start()
        assert look_at_lock(store / "lock").alive is True


def test_a_lock_that_keeps_brokers_away(store: Path) -> None:
    path = store / "lock"
    lock = StoreLock(path)
    assert lock.take()
    assert not lock.is_new
    # A look of one's own process opens and closes the file: the lock is still there then.
    for _ in range(2):
        found = look_at_lock(path)
        assert (found.alive, found.how) == (False, "none")
        assert "indexd repair" in str(found.why)
        path.read_bytes()
    command = [sys.executable, "-c", STAND_IN, str(path), "r+"]
    broker = subprocess.run(command, input="\n", capture_output=True, text=True, check=False)
    assert "BlockingIOError" in broker.stderr
    lock.release()
    with stand_in(path) as started:
        started.start()
        assert look_at_lock(path).pid == started.pid


def test_a_lock_beside_a_broker_or_another_one(store: Path) -> None:
    path = store / "lock"
    first, second = StoreLock(path), StoreLock(path)
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
    assert second.take()
    second.release()


def test_a_lock_where_there_was_no_lock_file(tmp_path: Path) -> None:
    lock = StoreLock(tmp_path / "lock")
    assert lock.take()
    assert lock.is_new
    lock.release()
    with pytest.raises(DiskError, match="cannot create"):
        StoreLock(tmp_path / "none" / "lock").take()
