"""The exchange of the index on a simulated disk: what it leaves and refuses; a crash at every operation."""

from __future__ import annotations

import errno
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from indexd.errors import DiskError, UnsafeStoreError
from indexd.flush.frontier import StoreCheckpoint
from indexd.index.format import IndexHeader
from indexd.repair.run import carry
from indexd.repair.swap import RepairFolder, index_timestamp_of, settle, swap, undo
from support.sim_disk import FaultMap, SimCrash, SimDisk

STORE = Path("/simulated")
OLD, NEW = "20260101000000000", "20260102000000000"
#: Of the checkpoint before; the new index ends later.
OLD_TIME, NEW_TIME = 1000, 5000
Index = dict[str, bytes]


def file_of(end_timestamp: int, count: int, body: bytes = b"") -> bytes:
    """What the steps here read of an index file."""
    return IndexHeader(1, end_timestamp, 0, 700, 3, count).pack() + body


BEFORE = {OLD: file_of(2000, 9, b"full"), "20260101500000000": file_of(3000, 4, b"open")}
AFTER = {OLD: BEFORE[OLD], NEW: file_of(NEW_TIME, 12, b"new")}


def made(*, checkpoint: bytes | None = StoreCheckpoint(7, 8, OLD_TIME, 9, 10).pack()) -> SimDisk:
    """A store with the index BEFORE, all of it durable."""
    disk = SimDisk(STORE)
    disk.make_dir(STORE / "index")
    for name, data in BEFORE.items():
        write(disk, STORE / "index" / name, data)
    disk.sync_dir(STORE / "index")
    if checkpoint is not None:
        write(disk, STORE / "checkpoint", checkpoint)
    disk.sync_dir(STORE)
    return disk


def write(disk: SimDisk, path: Path, data: bytes) -> None:
    with disk.open_write(path, create=True) as file:
        file.pwrite(data, 0)
        file.fsync()


def repair(disk: SimDisk) -> RepairFolder:
    """All that a repair does to the disk: one file is kept, one is new, one goes."""
    folder = RepairFolder.make(disk, STORE, 1_800_000_000)
    write(disk, folder.index / NEW, AFTER[NEW])
    carry(disk, STORE / "index" / OLD, folder.index / OLD, will_change=False)
    disk.sync_dir(folder.index)
    swap(disk, STORE, folder, (OLD,), ())
    return folder


def index_of(disk: SimDisk) -> Index:
    return {name: disk.peek(STORE / "index" / name) for name, _ in disk.list_dir(STORE / "index")}


def fields(disk: SimDisk) -> tuple[int, ...]:
    return struct.unpack_from(">5q", disk.peek(STORE / "checkpoint"))


def test_a_checkpoint_that_is_ahead_already_is_not_touched() -> None:
    disk = made(checkpoint=StoreCheckpoint(index_msg_timestamp=NEW_TIME + 1).pack())
    before = disk.stamp(STORE / "checkpoint")
    repair(disk)
    assert disk.stamp(STORE / "checkpoint") == before


def test_without_a_checkpoint_one_is_made_that_vouches_for_the_index_alone() -> None:
    disk = made(checkpoint=None)
    folder = repair(disk)
    assert fields(disk) == (0, 0, NEW_TIME, 0, 0)
    assert len(disk.peek(STORE / "checkpoint")) == 4096
    assert not disk.exists(folder.checkpoint)
    undo(disk, STORE)
    assert index_timestamp_of(disk, STORE / "checkpoint") == 0


def test_what_the_broker_wrote_meanwhile_stays_in_the_checkpoint_after_an_undo() -> None:
    disk = made()
    repair(disk)
    disk.write_atomically(STORE / "checkpoint", StoreCheckpoint(70, 80, 9000, 90, 100).pack())
    undo(disk, STORE)
    assert fields(disk) == (70, 80, OLD_TIME, 90, 100)


def test_repairs_are_undone_one_after_the_other() -> None:
    disk = made()
    first = repair(disk)
    second = RepairFolder.make(disk, STORE, 1_800_000_000)
    assert second.path.name > first.path.name
    write(disk, second.index / "20260104000000000", file_of(7000, 2))
    swap(disk, STORE, second, (), (OLD, NEW))
    assert list(index_of(disk)) == ["20260104000000000"]
    undo(disk, STORE)
    assert index_of(disk) == AFTER
    assert fields(disk)[2] == NEW_TIME
    undo(disk, STORE)
    assert index_of(disk) == BEFORE
    assert fields(disk)[2] == OLD_TIME


def test_an_undo_that_was_interrupted_before_its_folder_was_renamed() -> None:
    for is_settled in (False, True):
        disk = made()
        folder = repair(disk)
        disk.faults = FaultMap.parse(f"rename:{folder.undone.name}=EIO")
        with pytest.raises(DiskError):
            undo(disk, STORE)
        assert folder.read().state == "undone"
        # The broker has been at work since.
        disk.write_atomically(STORE / "checkpoint", StoreCheckpoint(70, 80, 9000, 90, 100).pack())
        assert len(settle(disk, STORE, only_look=True)[0]) == 1
        disk.faults = FaultMap()
        settle(disk, STORE) if is_settled else undo(disk, STORE)
        assert not RepairFolder.all_of(disk, STORE)
        assert fields(disk) == (70, 80, 9000, 90, 100)
        assert index_of(disk) == BEFORE


def test_an_index_that_the_repair_did_not_make_is_not_undone() -> None:
    disk = made()
    repair(disk)
    disk.rename(STORE / "index", STORE / "moved")
    disk.make_dir(STORE / "index")
    with pytest.raises(UnsafeStoreError, match="is not the index that the repair of"):
        undo(disk, STORE)
    assert index_of(disk) == {}


def test_a_manifest_of_another_version_is_left_alone() -> None:
    disk = made()
    folder = repair(disk)
    disk.write_atomically(folder.manifest_path, b'{"format": 9}\n')
    done, (line,) = settle(disk, STORE)
    assert "no manifest of a repair, or one of another version" in line
    assert done == []
    assert disk.exists(folder.index)


@pytest.mark.parametrize("name", ["EINVAL", "ENOSYS", "EBUSY", "EXDEV"])
def test_where_nothing_can_be_exchanged_nothing_is_changed(name: str) -> None:
    disk = made()
    disk.faults = FaultMap.parse(f"exchange={name}")
    with pytest.raises(UnsafeStoreError, match="nothing is changed"):
        repair(disk)
    assert index_of(disk) == BEFORE
    assert fields(disk)[2] == OLD_TIME


def test_a_file_system_without_links_gets_copies() -> None:
    disk = made()
    disk.faults = FaultMap.parse("link=EPERM")
    folder = repair(disk)
    assert index_of(disk) == AFTER
    assert disk.stamp(STORE / "index" / OLD).inode != disk.stamp(folder.index / OLD).inode


CRASHES = 6


def outcome(disk: SimDisk) -> str:
    """What the store is; anything but before, after or between is a failure."""
    found = (index_of(disk), fields(disk))
    states = {
        "before": (BEFORE, (7, 8, OLD_TIME, 9, 10)),
        "between": (AFTER, (7, 8, OLD_TIME, 9, 10)),
        "after": (AFTER, (7, 8, NEW_TIME, 9, 10)),
    }
    return next(name for name, state in states.items() if state == found)


def crashes(start: Callable[[], SimDisk], work: Callable[[SimDisk], object]) -> list[SimDisk]:
    """``work`` interrupted before each of its operations: by the death of the process, and by some losses of power."""
    undisturbed = start()
    first = undisturbed.changes
    work(undisturbed)
    found = []
    for at in range(undisturbed.changes - first):
        disk = start()
        disk.crash_at = disk.changes + at
        with pytest.raises(SimCrash):
            work(disk)
        for seed in range(CRASHES):
            twin = disk.fork()
            twin.crash(random.Random(seed)) if seed else twin.kill()
            found.append(twin)
    return found


def test_a_crash_at_every_operation_of_a_repair() -> None:
    states = set()
    for disk in crashes(made, repair):
        state = outcome(disk)
        states.add(state)
        said = settle(disk, STORE)
        # In between there is the repaired index, and one step is left, which the next look takes.
        assert outcome(disk) == ("before" if state == "before" else "after"), said
        assert settle(disk, STORE) == ([], [])
        if state == "before":
            assert disk.list_dirs(STORE) == ["index"]
            repair(disk)
        assert outcome(disk) == "after"
        undo(disk, STORE)
        assert outcome(disk) == "before"
    assert states == {"before", "between", "after"}


def test_a_crash_while_an_interrupted_repair_is_settled() -> None:
    def interrupted() -> SimDisk:
        disk = made()
        disk.faults = FaultMap.parse("create:checkpoint.*.tmp#2=crash")
        with pytest.raises(SimCrash):
            repair(disk)
        disk.kill()
        assert outcome(disk) == "between"
        return disk

    for disk in crashes(interrupted, lambda disk: settle(disk, STORE)):
        settle(disk, STORE)
        assert outcome(disk) == "after"


def test_a_crash_at_every_operation_of_an_undo() -> None:
    def repaired() -> SimDisk:
        disk = made()
        repair(disk)
        return disk

    ends = set()
    for disk in crashes(repaired, lambda disk: undo(disk, STORE)):
        said = settle(disk, STORE)
        ends.add(outcome(disk))
        if outcome(disk) == "after":
            undo(disk, STORE)
        assert outcome(disk) == "before", said
        assert settle(disk, STORE) == ([], [])
        assert not RepairFolder.all_of(disk, STORE)
    assert ends == {"before", "after"}


def test_an_index_that_is_neither_is_left_alone() -> None:
    disk = made()
    folder = repair(disk)
    folder.set_state("ready")
    disk.rename(STORE / "index", STORE / "moved")
    disk.make_dir(STORE / "index")
    done, (line,) = settle(disk, STORE)
    assert done == []
    assert "neither its new nor its old one" in line
    assert disk.exists(folder.index / OLD)


def test_a_disk_that_fails_behind_the_exchange_is_finished_later() -> None:
    disk = made()
    disk.faults = FaultMap.parse("create:checkpoint.*.tmp#2=ENOSPC")
    with pytest.raises(DiskError) as raised:
        repair(disk)
    assert raised.value.errno == errno.ENOSPC
    assert outcome(disk) == "between"
    (line,), _ = settle(disk, STORE, only_look=True)
    assert "was interrupted" in line
    settle(disk, STORE)
    assert outcome(disk) == "after"
