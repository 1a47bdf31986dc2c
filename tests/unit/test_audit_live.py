"""The audit beside a broker that goes on writing: what changes under it is no finding, and what is lost still is."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from indexd.audit import Audit, audit_task, join, plan_audit, task
from indexd.audit.live import is_live
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.reader import LogReader
from indexd.commitlog.writer import CommitLogWriter
from indexd.config import Config
from indexd.index.file import IndexService
from indexd.index.format import FLAVOURS, IndexLayout
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.whole_log import WholeLog, once
from indexd.storage.disk import Disk
from indexd.storage.names import segment_name
from support.auditing import audit, config_for, index_log, rows_of
from support.data_directory import SEGMENT, T0, Store, spec
from support.small_log import SEGMENT_SIZE, messages, write_log

LAYOUT = IndexLayout(500, 2000)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    store = tmp_path / "store"
    write_log(store, 4000)
    (store / "index").mkdir()
    return config_for(store, LAYOUT, SEGMENT_SIZE, read_bytes=64 << 10)


def batches(config: Config) -> list[DispatchBatch]:
    reader = LogReader(Disk(), config.store.commit_log_directories, decode_rules(config), once(reader_options(config)))
    reader.refresh()
    found = [item for item in WholeLog(reader) if isinstance(item, DispatchBatch)]
    reader.close()
    assert len(found) > 10
    return found


def service_of(config: Config) -> IndexService:
    assert config.store.store is not None
    return IndexService(Disk(), config.store.store / "index", LAYOUT, FLAVOURS["5.4"])


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97])
def test_what_the_broker_indexes_meanwhile_is_found(
    config: Config, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, service = batches(config), service_of(config)
    done = int(len(work) * share)
    for batch in work[:done]:
        service.build(batch)
    service.publish()
    plan = plan_audit(Disk(), config)
    for batch in work[done:]:
        service.build(batch)
        service.publish()
    service.close()

    def run() -> Audit:
        return join(plan, [audit_task(one, Disk(), config) for one in plan.tasks])

    monkeypatch.setattr(task, "is_live", lambda *_: True)
    found = run()
    assert found.is_sound, rows_of(found)
    assert found.messages == 4000
    # A copy that is not written any more is what it is.
    monkeypatch.setattr(task, "is_live", lambda *_: False)
    stopped = run()
    assert stopped.tail is not None
    assert stopped.counts == {}
    assert audit(config).is_sound


def test_what_the_broker_does_not_index_is_a_hole_all_the_same(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    work, service = batches(config), service_of(config)
    for number, batch in enumerate(work):
        if number != len(work) // 2:
            service.build(batch)
        if number == len(work) // 3:
            service.publish()
            plan = plan_audit(Disk(), config)
    service.publish()
    service.close()
    monkeypatch.setattr(task, "is_live", lambda *_: True)
    found = join(plan, [audit_task(one, Disk(), config) for one in plan.tasks])
    (hole,) = found.holes
    lost = work[len(work) // 2]
    assert lost.begin_offset <= hole.begin < hole.end <= lost.end_offset
    assert found.tail is None
    assert found.missing_keys == hole.keys > 0


def test_messages_that_nobody_indexes_are_waited_for_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    work, service = batches(config), service_of(config)
    for batch in work[: len(work) // 2]:
        service.build(batch)
    service.publish()
    service.close()
    monkeypatch.setattr(task, "is_live", lambda *_: True)
    found = audit(config)
    assert found.tail is not None
    assert found.tail.begin >= work[len(work) // 2].begin_offset
    assert found.counts == {}


def test_a_broker_is_known_by_its_lock(tmp_path: Path) -> None:
    assert not is_live(Disk(), tmp_path)
    lock = tmp_path / "lock"
    lock.write_bytes(b"lock")
    assert not is_live(Disk(), tmp_path)
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+b'); fcntl.lockf(file, fcntl.LOCK_EX, 1, 0);"
        "print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert is_live(Disk(), tmp_path)
        with lock.open("r+b") as file, pytest.raises(BlockingIOError):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        holder.communicate()
    assert not is_live(Disk(), tmp_path)


def test_a_broker_that_is_caught_up_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # All is indexed when the audit looks, and the next segment is there already, empty.
    store = tmp_path / "store"
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    every = messages(5)
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        for _ in range(1500):
            writer.append(next(every))
        begin = writer.max_offset
        (store / "commitlog" / segment_name(-(-begin // SEGMENT_SIZE) * SEGMENT_SIZE)).write_bytes(bytes(SEGMENT_SIZE))
        index_log(config)
        plan = plan_audit(Disk(), config)
        while writer.max_offset % SEGMENT_SIZE < SEGMENT_SIZE - 20_000:
            writer.append(next(every))
    shutil.rmtree(store / "index")
    index_log(config)
    monkeypatch.setattr(task, "is_live", lambda *_: True)
    found = join(plan, [audit_task(one, Disk(), config) for one in plan.tasks])
    assert found.is_sound, rows_of(found)
    assert found.log_end > begin + 10_000


def test_a_broker_between_two_keys_of_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, LAYOUT)
    for number in range(20):
        store.append(spec(T0 + number, KEYS="a b c", UNIQ_KEY=f"u{number}"))
    config = config_for(store.root, LAYOUT, SEGMENT, flavour="5.4")
    index_log(config)
    (path,) = (store.root / "index").iterdir()
    whole = path.read_bytes()
    # As it was two entries ago: their slots name those before them, and the header does not count them.
    count = int.from_bytes(whole[36:40], "big")
    data = bytearray(whole)
    for number in (count - 1, count - 2):
        at = LAYOUT.entry_position(number)
        slot = LAYOUT.slot_position(LAYOUT.slot_of(int.from_bytes(data[at : at + 4], "big")))
        data[slot : slot + 4] = data[at + 16 : at + 20]
        data[at : at + 20] = bytes(20)
    data[36:40] = (count - 2).to_bytes(4, "big")
    path.write_bytes(data)
    plan = plan_audit(Disk(), config)
    path.write_bytes(whole)
    monkeypatch.setattr(task, "is_live", lambda *_: True)
    found = join(plan, [audit_task(one, Disk(), config) for one in plan.tasks])
    assert found.is_sound, rows_of(found)
    assert found.keys == 80
