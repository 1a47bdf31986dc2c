"""ConsumeQueueStore: marks, what has to be synced, files that end inside a batch, expiry, disks that refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from indexd.commitlog.batcher import TopicTable
from indexd.consumequeue import store as store_module
from indexd.consumequeue.format import BLANK_UNIT, UNIT, QueueMark, QueuesMark
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import DiskError
from indexd.output import OutputMark
from indexd.storage.disk import Disk
from support.naive_queue import NaiveConsumeQueueStore, NaiveMessage
from support.queues import batch_of, batches, sim_tree, stream, tree
from support.sim_disk import SimDisk
from support.sim_fault import FaultMap

ROOT = Path("/simulated")
QUEUES = ROOT / "consumequeue"


def make(disk: Disk | None = None, file_units: int = 4, root: Path = QUEUES) -> ConsumeQueueStore:
    return ConsumeQueueStore(disk or SimDisk(ROOT), root, 20 * file_units, 1 << 20)


def naive(messages: list[NaiveMessage], file_units: int = 4) -> NaiveConsumeQueueStore:
    store = NaiveConsumeQueueStore(file_units)
    for message in messages:
        store.put(message)
    return store


def one(queue_offset: int, phy_offset: int, queue_id: int = 0, topic: str = "T") -> NaiveMessage:
    return NaiveMessage(topic, queue_id, queue_offset, phy_offset, 10, 7)


def test_a_queue_that_starts_late_has_blank_units_up_to_its_first(tmp_path: Path) -> None:
    store = make(Disk(), 4, tmp_path)
    store.build(batch_of([one(10, 500)], TopicTable()))
    assert store.mark().held.queues == (QueueMark("T", 0, 8, 10, 11, 510, 10),)
    unit = UNIT.pack(500, 10, 7)
    assert tree(tmp_path) == {"T/0/00000000000000000160": 2 * BLANK_UNIT + unit + bytes(20)}


def test_ten_thousand_queues_need_few_descriptors_and_a_cheap_mark() -> None:
    store = make(file_units=2)
    messages = [one(turn, 10 * (10_000 * turn + n), n, f"T{n % 100}") for turn in range(2) for n in range(10_000)]
    disk = store._disk
    assert isinstance(disk, SimDisk)
    most = 0

    def look(operation: str, path: Path) -> None:
        nonlocal most
        most = max(most, len(disk.handles))

    disk.before_change = look
    table = TopicTable(128)
    store.build(batch_of(messages, table))
    first = store.mark()
    assert most <= 65
    assert [tuple(mark) for mark in first.held.queues] == naive(messages, 2).marks()
    assert len(first.unsynced) == 10_000
    assert len(first.directories) == 10_000 + 100 + 2
    calls = disk.operations
    store.build(batch_of([one(2, 10**7, 77, "T77")], table))
    second = store.mark()
    assert disk.operations - calls < 20
    changed = [new for old, new in zip(first.held.queues, second.held.queues, strict=True) if old != new]
    assert changed == [QueueMark("T77", 77, 0, 0, 3, 10**7 + 10)]
    store.close()


def test_what_was_written_after_a_mark_is_not_synced_with_it() -> None:
    store, table = make(), TopicTable()
    store.build(batch_of([one(0, 0), one(0, 10, 1)], table))
    first = store.mark()
    store.build(batch_of([one(1, 20)], table))
    second = store.mark()
    store.synced(first)
    assert store.mark().unsynced == (QUEUES / "T/0/00000000000000000000",)
    assert store.mark().directories == ()
    store.synced(second)
    assert store.mark().unsynced == ()
    store.synced(first)
    last = store.mark()
    assert last == OutputMark(second.held, serial=last.serial)


def test_a_loaded_store_goes_on_where_the_other_ended() -> None:
    disk, messages = SimDisk(ROOT), stream(2, 300, 7)
    marks: tuple[QueueMark, ...] = ()
    for part in (messages[:100], messages[100:101], messages[90:300]):
        store = make(disk)
        store.load(QueuesMark(80, marks))
        store.unsynced.add(QUEUES / "some")
        assert store.mark().unsynced == (QUEUES / "some",)
        for batch in batches(part, 64):
            store.build(batch)
        marks = store.mark().held.queues
        store.close()
    assert [tuple(mark) for mark in marks] == naive(messages).marks()
    assert sim_tree(disk, QUEUES) == naive(messages).tree()


def test_expired_files_go_once_no_frontier_names_them() -> None:
    disk = SimDisk(ROOT)
    store, twin = make(disk), naive([])
    messages = stream(3, 400, 4)
    for batch in batches(messages, 100):
        store.build(batch)
    for message in messages:
        twin.put(message)
    begin = messages[250].phy_offset
    names = store.expire(begin)
    assert len(names) == twin.delete_expired(begin) > 5
    progress = store.mark()
    assert [str(path.relative_to(QUEUES)) for path in progress.expired] == names
    assert [tuple(mark) for mark in progress.held.queues] == twin.marks()
    assert not set(progress.expired) & set(progress.unsynced)
    assert set(names) < set(sim_tree(disk, QUEUES))
    disk.faults = FaultMap.parse("unlink#2=EACCES")
    with pytest.raises(DiskError):
        store.synced(progress)
    store.synced(progress)
    assert sim_tree(disk, QUEUES) == twin.tree()
    assert store.mark().expired == ()
    calls = disk.operations
    assert store.expire(begin) == []
    assert store.expire(begin - 1) == []
    assert disk.operations == calls
    # All of it: the last file of each queue stays.
    end = messages[-1].phy_offset + messages[-1].size
    assert len(store.expire(end)) == twin.delete_expired(end)
    assert [tuple(mark) for mark in store.mark().held.queues] == twin.marks()
    assert all(mark.min_offset == mark.max_offset for mark in store.mark().held.queues)


def test_expiry_asks_the_disk_only_about_queues_that_may_have_changed() -> None:
    disk = SimDisk(ROOT)
    store = make(disk, 1000)
    messages = [*[one(n, 10 * n, 0) for n in range(50)], *[one(n, 500 + 10 * n, 1 + n % 9) for n in range(900)]]
    store.build(batch_of(messages, TopicTable()))
    store.publish()
    calls = disk.counts["pread"]
    store.expire(250)
    assert 0 < disk.counts["pread"] - calls < 10
    assert store.mark().held.queues[0].min_offset == 25


@pytest.mark.parametrize("is_removed_late", [True, False])
def test_behind_messages_that_nobody_has_read_all_begin_anew(*, is_removed_late: bool) -> None:
    disk, messages = SimDisk(ROOT), stream(6, 300, 7)
    store = make(disk)
    for batch in batches(messages[:80], 30):
        store.build(batch)
    store.synced(store.mark())
    store.build(batch_of(messages[80:100], TopicTable()))
    store.begin_anew()
    progress = store.mark()
    assert (progress.held.queues, progress.unsynced) == ((), ())
    assert len(progress.expired) == sum(len(queue.files()) for queue in naive(messages[:80]).queues.values())
    if not is_removed_late:
        store.synced(progress)
    for batch in batches(messages[110:], 30):
        store.build(batch)
    assert [tuple(mark) for mark in store.mark().held.queues] == naive(messages[110:]).marks()
    assert len(store.expire(1)) == len(progress.expired)
    # Some files have the names of old ones: they stay.
    store.synced(progress)
    assert sim_tree(disk, QUEUES) == naive(messages[110:]).tree()
    assert store.mark().expired == ()


@pytest.mark.parametrize("fault", ["ENOSPC", "EMFILE", "EACCES", "short"])
@pytest.mark.parametrize("operation", ["create", "truncate", "pwrite", "make_dir", "open_write"])
def test_what_a_disk_refused_is_done_later(operation: str, fault: str) -> None:
    if fault == "short" and operation != "pwrite":
        fault = "EDQUOT"
    messages, disk = stream(4, 120, 6), SimDisk(ROOT)
    with mock.patch.multiple(store_module, UNITS_PER_WRITE=10, _UNITS_A_QUEUE=0):
        store, refused = make(disk), 0
        for batch in batches(messages, 40):
            disk.faults = FaultMap.parse(";".join(f"{operation}#{nth}={fault}" for nth in range(1, 200, 3)))
            for _ in range(200):
                try:
                    store.build(batch)
                    break
                except DiskError:
                    refused += 1
            disk.faults = FaultMap()
        assert refused > 0
        assert [tuple(mark) for mark in store.mark().held.queues] == naive(messages).marks()
        assert sim_tree(disk, QUEUES) == naive(messages).tree()
    assert store.counters["units"] == store.counters["messages"] == len(messages)


def test_a_disk_that_refuses_at_any_call_changes_nothing_in_the_end() -> None:
    messages = stream(5, 60, 4)
    nth, wanted = 0, naive(messages).tree()
    while True:
        nth += 1
        disk = SimDisk(ROOT)
        disk.faults = FaultMap.parse(f"*#{nth}=ENOSPC; *#{nth + 1}=EROFS")
        store = make(disk)
        with mock.patch.multiple(store_module, UNITS_PER_WRITE=7, _UNITS_A_QUEUE=0):
            for batch in batches(messages, 25):
                _until_done(store.build, batch)
            _until_done(store.mark)
            _until_done(store.expire, messages[20].phy_offset)
            progress = store.mark()
            _until_done(store.synced, progress)
        gone = {str(path.relative_to(QUEUES)) for path in progress.expired}
        assert gone
        assert sim_tree(disk, QUEUES) == {name: data for name, data in wanted.items() if name not in gone}
        if not disk.faults.injected:
            break  # the run is over before the call that would fail
    assert nth > 100


def _until_done(step: Callable[..., object], *arguments: object) -> None:
    for _ in range(3):
        try:
            step(*arguments)
            return
        except DiskError:
            continue
    raise AssertionError("it is refused for ever")


def test_a_directory_in_the_place_of_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "T/0/00000000000000000000").mkdir(parents=True)
    store = make(Disk(), 4, tmp_path)
    store.build(batch_of([one(0, 0)], TopicTable()))
    with pytest.raises(DiskError, match="Is a directory"):
        store.publish()
