"""The audit beside a broker that goes on writing: what changes under it is no finding, and what is lost still is."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from indexd.audit import Audit, AuditPlan, audit_task, join, plan, plan_audit
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.reader import LogReader
from indexd.config import Config
from indexd.consumequeue.format import UNIT
from indexd.index.file import IndexService
from indexd.index.format import FLAVOURS, IndexLayout
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.whole_log import WholeLog, once
from indexd.storage.disk import Disk, DiskFile
from support.auditing import config_for, index_log, rows_of
from support.auditing_queues import audit_queues, build_queues, config_of, store_of
from support.commitlog_writer import CommitLogWriter
from support.data_directory import SEGMENT, T0, Store, spec
from support.small_log import SEGMENT_SIZE, messages, write_log

LAYOUT = IndexLayout(500, 2000)


@pytest.fixture(autouse=True)
def _runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # A lock that this process holds itself is not another's: tests/real has a broker that runs.
    monkeypatch.setattr(plan, "is_live", lambda *_: True)


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


def run(made: AuditPlan, config: Config) -> Audit:
    return join(made, [audit_task(one, Disk(), config) for one in made.tasks])


def test_what_the_broker_writes_meanwhile_is_not_asked_for(tmp_path: Path) -> None:
    store, every = tmp_path / "store", messages(5)
    config = config_for(store, LAYOUT, SEGMENT_SIZE)
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        for message in islice(every, 1500):
            writer.append(message)
        index_log(config)
        made, end = plan_audit(Disk(), config), writer.max_offset
        for message in islice(every, 1500):
            writer.append(message)
    assert (made.is_live, made.log_end) == (True, end)
    index_log(config, begin=end, name=20270101000000000)
    found = run(made, config)
    assert found.is_sound, rows_of(found)
    assert (found.messages, found.log_end) == (1500, end)


def test_entries_that_the_broker_puts_meanwhile_are_no_findings(config: Config) -> None:
    work, service = batches(config), service_of(config)
    for batch in work[: len(work) // 2]:
        service.build(batch)
    service.publish()
    made = plan_audit(Disk(), config)
    for batch in work[len(work) // 2 :]:
        service.build(batch)
        service.publish()
    service.close()
    found = run(made, config)
    assert found.counts == {}
    # They came too late to be counted: a hole that heals.
    assert found.tail is not None
    assert found.tail.begin >= work[len(work) // 2].begin_offset


def test_what_the_broker_does_not_index_is_a_hole_all_the_same(config: Config) -> None:
    work, service = batches(config), service_of(config)
    lost = len(work) // 2
    for number, batch in enumerate(work):
        if number != lost:
            service.build(batch)
    service.publish()
    service.close()
    found = run(plan_audit(Disk(), config), config)
    (hole,) = found.holes
    assert work[lost].begin_offset <= hole.begin < hole.end <= work[lost].end_offset
    assert (found.tail, found.counts) == (None, {})


class Dispatching(Disk):
    """At the third look at an index file the broker has put the rest into it."""

    def __init__(self, path: Path, whole: bytes) -> None:
        self.path, self.whole, self.looks = path, whole, 0

    def open_read(self, path: Path) -> DiskFile:
        self.looks += path == self.path
        if self.looks == 3:
            self.path.write_bytes(self.whole)
        return super().open_read(path)


def test_a_broker_between_two_keys_of_a_message_is_given_a_moment(tmp_path: Path) -> None:
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
    found = run(plan_audit(Dispatching(path, whole), config), config)
    assert found.is_sound, rows_of(found)
    assert found.keys == 80


def test_units_behind_the_end_are_the_brokers(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 500)
    config = config_of(tmp_path / "store")
    build_queues(config)
    (store_of(config) / "index").mkdir()
    assert audit_queues(config).is_sound
    # A unit that was dispatched since the end of the log was looked for.
    queue = store_of(config) / "consumequeue" / "OrderPaid" / "1"
    newest = max(queue.iterdir())
    used = len(newest.read_bytes().rstrip(b"\0"))
    with newest.open("r+b") as file:
        file.seek(-(-used // 20) * 20)
        file.write(UNIT.pack(1 << 40, 100, 0))
    assert audit_queues(config).is_sound
