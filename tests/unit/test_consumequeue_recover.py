"""Recovery of ConsumeQueues: what is kept, what the log has to give again, and a crash at any moment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from indexd.consumequeue.format import QueueMark, QueuesMark
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import DiskError
from indexd.output import OutputRecovery
from indexd.storage.disk import Disk
from support.naive_queue import NaiveConsumeQueueStore, NaiveMessage
from support.output_recovery import EVERYTHING, carried_out, made_durable, planned_queues
from support.queues import batches, sim_tree, stream, tree
from support.sim_disk import SimDisk
from support.sim_fault import FaultMap

ROOT = Path("/simulated")
QUEUES = ROOT / "consumequeue"
FILE_SIZE = 80


def naive(messages: Sequence[NaiveMessage]) -> NaiveConsumeQueueStore:
    store = NaiveConsumeQueueStore(FILE_SIZE // 20)
    for message in messages:
        store.put(message)
    return store


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


def test_nothing_at_all_is_planned_without_a_folder() -> None:
    assert planned(SimDisk(ROOT), ()) == OutputRecovery(QueuesMark(FILE_SIZE))


@pytest.mark.parametrize("at", [0, 1, 2, 30, 75, 149, 150])
def test_a_cut_takes_the_units_back_as_if_they_had_never_been(messages: list[NaiveMessage], at: int) -> None:
    disk = SimDisk(ROOT)
    marks = build(disk, messages)
    cut_at = messages[at].phy_offset if at < len(messages) else EVERYTHING
    found = planned(disk, marks, cut_at)
    shorter = naive(messages[:at])
    assert [tuple(mark) for mark in found.held.queues] == shorter.marks()
    assert (found.refill_from, found.reasons) == (None, ())
    carried_out(disk, found)
    assert sim_tree(disk, QUEUES) == shorter.tree()
    assert set(disk.list_dirs(QUEUES)) == {name.split("/")[0] for name in shorter.tree()}
    go_on(disk, found.held.queues, messages, cut_at)


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


def test_an_unclean_stop_leaves_zeros_behind_the_last_unit(messages: list[NaiveMessage]) -> None:
    disk = SimDisk(ROOT)
    marks = build(disk, messages[:70])
    build_on(disk, marks, messages[70:130])
    found = planned(disk, marks, messages[70].phy_offset, is_unclean=True)
    assert found.held.queues == marks
    recovered = carried_out(disk, found)
    assert sim_tree(disk, QUEUES) == naive(messages[:70]).tree()
    full = [mark for mark in marks if mark.max_offset % 4 == 0]
    assert len(recovered.files()) == len(marks) - len(full)
    assert {path.parent for path in found.delete} == set(recovered.directories())
    go_on(disk, found.held.queues, messages, messages[70].phy_offset)


def build_on(disk: Disk, marks: Sequence[QueueMark], messages: Sequence[NaiveMessage]) -> None:
    store = ConsumeQueueStore(disk, QUEUES, FILE_SIZE, 1000)
    store.load(QueuesMark(FILE_SIZE, tuple(marks)))
    for batch in batches(messages, 16):
        store.build(batch)
    store.publish()
    store.close()


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


def test_behind_a_log_that_expired_meanwhile_all_begin_anew(messages: list[NaiveMessage]) -> None:
    disk = SimDisk(ROOT)
    marks = build(disk, messages[:50])
    end = messages[50].phy_offset
    found = planned(disk, marks, end, log_begin=end)
    assert found.held.queues == marks
    found = planned(disk, marks, end, log_begin=messages[60].phy_offset)
    assert (found.held.queues, found.refill_from) == ((), None)
    carried_out(disk, found)
    go_on(disk, (), messages[60:], 0)


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


def test_reasons_are_bounded(messages: list[NaiveMessage]) -> None:
    disk = SimDisk(ROOT)
    marks = build(disk, stream(9, 2000, 100))
    for mark in marks:
        disk.unlink(QUEUES / mark.topic / str(mark.queue_id) / f"{mark.first_offset * 20:020d}")
    found = planned(disk, marks)
    assert found.held.queues == ()
    assert len(found.reasons) == 11
    assert found.reasons[-1] == f"{len(marks) - 10} more queues that are not whole"


def test_a_recovery_that_the_disk_refuses_is_repeated(messages: list[NaiveMessage]) -> None:
    nth = 0
    while True:
        nth += 1
        disk = SimDisk(ROOT)
        marks = build(disk, messages)
        disk.faults = FaultMap.parse(f"*#{nth}=EACCES")
        cut_at = messages[70].phy_offset
        while True:
            try:
                found = planned(disk, marks, cut_at, is_unclean=True)
                marks = found.held.queues
                carried_out(disk, found)
                break
            except DiskError:
                assert disk.faults.injected
        assert sim_tree(disk, QUEUES) == naive(messages[:70]).tree()
        if not disk.faults.injected:
            break
    assert nth > 30
