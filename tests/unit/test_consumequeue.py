"""ConsumeQueueStore: marks, expiry, disks that refuse; and what recovery keeps and the log has to give again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.batcher import TopicTable
from indexd.consumequeue.format import BLANK_UNIT, UNIT, QueueMark, QueuesMark
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import DiskError
from indexd.output import OutputRecovery
from indexd.storage.disk import Disk
from support.naive_queue import NaiveConsumeQueueStore, NaiveMessage
from support.output_recovery import EVERYTHING, carried_out, made_durable, planned_queues
from support.queues import batch_of, batches, sim_tree, stream, tree
from support.sim_disk import SimDisk

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


def test_a_directory_in_the_place_of_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "T/0/00000000000000000000").mkdir(parents=True)
    store = make(Disk(), 4, tmp_path)
    store.build(batch_of([one(0, 0)], TopicTable()))
    with pytest.raises(DiskError, match="Is a directory"):
        store.publish()


FILE_SIZE = 80


def build(disk: Disk, messages: Sequence[NaiveMessage], root: Path = QUEUES) -> tuple[QueueMark, ...]:
    store = ConsumeQueueStore(disk, root, FILE_SIZE, 1000)
    for batch in batches(messages, 16):
        store.build(batch)
    mark = made_durable(disk, store)
    store.close()
    held: QueuesMark = mark.held
    return held.queues


def planned(
    disk: Disk, marks: Sequence[QueueMark], phy_offset: int = EVERYTHING, *, root: Path = QUEUES, **keys: Any
) -> OutputRecovery[QueuesMark]:
    return planned_queues(disk, root, FILE_SIZE, marks, phy_offset, **keys)


def go_on(disk: SimDisk, marks: Sequence[QueueMark], messages: Sequence[NaiveMessage], begin: int) -> None:
    """Build what the log has from ``begin`` on, and hold the whole against an undisturbed build."""
    store = ConsumeQueueStore(disk, QUEUES, FILE_SIZE, 1000)
    store.load(QueuesMark(FILE_SIZE, tuple(marks)))
    for batch in batches([message for message in messages if message.phy_offset >= begin], 13):
        store.build(batch)
    done = {mark[:2]: mark for mark in store.mark().held.queues}
    assert done == {mark[:2]: QueueMark(*mark) for mark in naive(messages).marks()}
    assert sim_tree(disk, QUEUES) == naive(messages).tree()
    store.close()


@pytest.fixture
def messages() -> list[NaiveMessage]:
    return stream(7, 150, 6)


def test_what_is_whole_is_left_alone(messages: list[NaiveMessage]) -> None:
    disk = SimDisk(ROOT)
    marks = build(disk, messages)
    found = planned(disk, marks)
    assert found == OutputRecovery(QueuesMark(FILE_SIZE, marks))
    assert found.held.queues[0] is marks[0]
    changes = disk.changes
    carried_out(disk, found)
    assert disk.changes == changes


def test_a_queue_of_blank_units_alone_is_none(messages: list[NaiveMessage]) -> None:
    disk = SimDisk(ROOT)
    marks = build(disk, [message._replace(queue_offset=message.queue_offset + 3) for message in messages])
    found = planned(disk, marks, 0)
    assert found.held.queues == ()
    carried_out(disk, found)
    assert sim_tree(disk, QUEUES) == {}
    assert disk.list_dirs(QUEUES) == []


@pytest.mark.parametrize("nth", [0, 1, 2, -1])
@pytest.mark.parametrize("damage", ["missing", "short", "long", "unwritten"])
def test_units_that_are_gone_come_from_the_log_again(messages: list[NaiveMessage], nth: int, damage: str) -> None:
    disk = SimDisk(ROOT)
    marks = build(disk, messages)
    victim = marks[2]
    begins = range(victim.first_offset, victim.max_offset, 4)
    path = QUEUES / victim.topic / str(victim.queue_id) / f"{begins[nth] * 20:020d}"
    if damage == "missing":
        disk.unlink(path)
    else:
        with disk.open_write(path) as file:
            file.truncate({"short": 15, "long": FILE_SIZE + 20, "unwritten": 0}[damage])
    end = messages[-1].phy_offset + messages[-1].size
    found = planned(disk, marks, end, is_unclean=True)
    others = [mark for mark in marks if mark != victim]
    assert list(found.held.queues) == others
    assert len(found.reasons) == 1
    assert f"ConsumeQueue {victim.topic}/{victim.queue_id}: file {path.name} " in found.reasons[0]
    assert found.refill_from == 0
    carried_out(disk, found)
    assert found.refill_from is not None
    go_on(disk, found.held.queues, messages, found.refill_from)


def test_a_last_unit_that_is_another_makes_the_queue_anew(messages: list[NaiveMessage]) -> None:
    disk = SimDisk(ROOT)
    marks = build(disk, messages)
    victim, last = marks[1], marks[1].max_offset - 1
    with disk.open_write(QUEUES / victim.topic / str(victim.queue_id) / f"{last // 4 * 80:020d}") as file:
        file.pwrite(b"\1", last % 4 * 20 + 7)
    assert planned(disk, marks).held.queues == marks
    found = planned(disk, marks, messages[-1].phy_offset, is_unclean=True)
    assert victim not in found.held.queues
    assert found.refill_from == 0
    assert f"unit {last} is not the one that was written" in found.reasons[0]
    carried_out(disk, found)
    go_on(disk, found.held.queues, messages, 0)


def test_units_that_are_gone_and_have_expired_are_not_asked_for(messages: list[NaiveMessage]) -> None:
    disk = SimDisk(ROOT)
    marks = build(disk, messages)
    victim = marks[0]
    folder = QUEUES / victim.topic / str(victim.queue_id)
    disk.unlink(folder / f"{(victim.first_offset + 4) * 20:020d}")
    found = planned(disk, marks, EVERYTHING - 1, log_begin=messages[5].phy_offset)
    assert (found.held.queues, found.refill_from) == (marks[1:], messages[5].phy_offset)
    found = planned(disk, marks, EVERYTHING - 1, log_begin=victim.max_phy_offset)
    assert (found.held.queues, found.refill_from) == (marks[1:], None)


def test_what_no_mark_names_goes_and_what_is_not_ours_stays(tmp_path: Path, messages: list[NaiveMessage]) -> None:
    disk, root = Disk(), tmp_path / "q"
    marks = build(disk, messages, root)
    ours = tree(root)
    name = "00000000000000000000"
    leftovers = [
        f"Topic0/77/{name}",
        f"Gone/0/{name}",
        f"Gone/-3/{name}",
        "Topic0/0/00000000000099999980",
        f"Half/1/{name}",
    ]
    foreign = [
        "Topic0/readme",
        "Topic0/0/notes.txt",
        f"Topic0/007/{name}",
        f"other/{name}",
        "file",
        "Half/1/x/y",
        "Half/2",
    ]
    for path in (*leftovers, *foreign):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x")
    (root / "empty").mkdir()
    found = planned(disk, marks, root=root)
    recovered = carried_out(disk, found)
    assert tree(root) == ours | dict.fromkeys(foreign, b"x")
    assert {str(path.relative_to(root)) for path in found.delete} == set(leftovers)
    assert not (root / "Gone").exists()
    assert not (root / "Topic0/77").exists()
    assert (root / "empty").exists()
    assert {root, root / "Topic0", root / "Topic0/0", root / "Half/1"} == set(recovered.directories())
    assert planned(disk, marks, root=root).delete == ()


@pytest.mark.parametrize(
    "mark",
    [
        QueueMark("Topic0", 0, 1, 1, 3, 100),
        QueueMark("Topic0", 0, -4, 1, 3, 100),
        QueueMark("Topic0", 0, 4, 1, 8, 100),
        QueueMark("Topic0", 0, 0, 9, 8, 100),
        QueueMark("Topic0", 0, 4, 4, 4, -1, 4),
    ],
)
def test_a_mark_that_contradicts_itself_is_not_believed(mark: QueueMark) -> None:
    found = planned(SimDisk(ROOT), [mark], 500)
    assert found.held.queues == ()
    assert "contradicts itself" in found.reasons[0]
