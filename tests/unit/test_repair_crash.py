"""A crash at every operation of a repair and of its undo, on a simulated disk: as before, or repaired."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from indexd.errors import DiskError
from indexd.repair.swap import RepairFolder, settle, undo, unfinished
from support.repair_steps import (
    AFTER,
    BEFORE,
    NEW_TIME,
    OLD,
    OLD_TIME,
    STORE,
    fields,
    index_of,
    made,
    repair,
)
from support.sim_disk import SimDisk
from support.sim_fault import FaultMap, SimCrash

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
        assert settle(disk, STORE) == unfinished(disk, STORE)[0] == []
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
        assert settle(disk, STORE) == []
        assert not RepairFolder.all_of(disk, STORE)
    assert ends == {"before", "after"}


def test_an_index_that_is_neither_is_left_alone() -> None:
    disk = made()
    folder = repair(disk)
    folder.set_state("ready")
    disk.rename(STORE / "index", STORE / "moved")
    disk.make_dir(STORE / "index")
    assert settle(disk, STORE) == []
    (line,) = unfinished(disk, STORE)[1]
    assert "neither its new nor its old one" in line
    assert disk.exists(folder.index / OLD)


def test_a_disk_that_fails_behind_the_exchange_is_finished_later() -> None:
    disk = made()
    disk.faults = FaultMap.parse("create:checkpoint.*.tmp#2=ENOSPC")
    with pytest.raises(DiskError) as raised:
        repair(disk)
    assert raised.value.errno == errno.ENOSPC
    assert outcome(disk) == "between"
    (line,) = unfinished(disk, STORE)[0]
    assert "was interrupted" in line
    settle(disk, STORE)
    assert outcome(disk) == "after"
