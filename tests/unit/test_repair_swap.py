"""The exchange of the index on a simulated disk: what it leaves, what it refuses."""

from __future__ import annotations

import pytest

from indexd.errors import DiskError, UnsafeStoreError
from indexd.flush.frontier import StoreCheckpoint
from indexd.repair.swap import RepairFolder, index_timestamp_of, settle, swap, undo, unfinished
from support.repair_steps import (
    AFTER,
    BEFORE,
    NEW,
    NEW_TIME,
    OLD,
    OLD_TIME,
    STORE,
    fields,
    file_of,
    index_of,
    made,
    repair,
    write,
)
from support.sim_fault import FaultMap


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
        assert len(unfinished(disk, STORE)[0]) == 1
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
    (line,) = unfinished(disk, STORE)[1]
    assert "no manifest of a repair: it is of another version" in line
    assert settle(disk, STORE) == unfinished(disk, STORE)[0] == []
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
