"""Names of new files, and the exchange of the index on a simulated disk: what it leaves; a crash at every operation."""

from __future__ import annotations

import datetime
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.errors import DiskError, UnsafeStoreError
from indexd.flush.frontier import StoreCheckpoint
from indexd.index.format import IndexHeader
from indexd.repair.plan import names_between
from indexd.repair.run import carry
from indexd.repair.swap import RepairFolder, State, settle, swap, to_undo, undo
from support.sim_disk import Fault, SimCrash, SimDisk

STORE = Path("/simulated")
OLD, NEW = "20260101000000000", "20260102000000000"
#: Of the checkpoint before; the new index ends later.
OLD_TIME, NEW_TIME = 1000, 5000
Index = dict[str, bytes]
Fields = tuple[int, int, int, int, int]


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


def take_back(disk: SimDisk) -> None:
    folder, _ = to_undo(disk, STORE)
    undo(disk, STORE, folder)


def index_of(disk: SimDisk) -> Index:
    return {name: disk.peek(STORE / "index" / name) for name, _ in disk.list_dir(STORE / "index")}


def fields(disk: SimDisk) -> tuple[int, ...]:
    return struct.unpack_from(">5q", disk.peek(STORE / "checkpoint"))


@pytest.mark.parametrize(
    ("checkpoint", "repaired", "meanwhile", "undone"),
    [
        # One that is ahead already is not touched.
        ((0, 0, NEW_TIME + 1, 0, 0), (0, 0, NEW_TIME + 1, 0, 0), None, (0, 0, NEW_TIME + 1, 0, 0)),
        # Without one, that is made which vouches for the index alone.
        (None, (0, 0, NEW_TIME, 0, 0), None, (0, 0, 0, 0, 0)),
        # What the broker writes stays, but for that field.
        ((7, 8, OLD_TIME, 9, 10), (7, 8, NEW_TIME, 9, 10), (70, 80, 9000, 90, 100), (70, 80, OLD_TIME, 90, 100)),
    ],
)
def test_the_checkpoint(checkpoint: Fields | None, repaired: Fields, meanwhile: Fields | None, undone: Fields) -> None:
    disk = made(checkpoint=None if checkpoint is None else StoreCheckpoint(*checkpoint).pack())
    before = disk.stamp(STORE / "checkpoint") if checkpoint is not None else None
    folder = repair(disk)
    assert (fields(disk), len(disk.peek(STORE / "checkpoint"))) == (repaired, 4096)
    assert disk.exists(folder.checkpoint) == (checkpoint is not None)
    if repaired == checkpoint:
        assert disk.stamp(STORE / "checkpoint") == before
    if meanwhile is not None:
        disk.write_atomically(STORE / "checkpoint", StoreCheckpoint(*meanwhile).pack())
    take_back(disk)
    assert fields(disk) == undone


def test_repairs_are_undone_one_after_the_other() -> None:
    disk = made()
    first = repair(disk)
    second = RepairFolder.make(disk, STORE, 1_800_000_000)
    assert second.path.name > first.path.name
    write(disk, second.index / "20260104000000000", file_of(7000, 2))
    swap(disk, STORE, second, (), (OLD, NEW))
    assert list(index_of(disk)) == ["20260104000000000"]
    for index, timestamp in ((AFTER, NEW_TIME), (BEFORE, OLD_TIME)):
        take_back(disk)
        assert (index_of(disk), fields(disk)[2]) == (index, timestamp)


def test_an_undo_that_was_interrupted_before_its_folder_was_renamed() -> None:
    for is_settled in (False, True):
        disk = made()
        folder = repair(disk)
        disk.faults = [Fault("rename", "EIO", folder.undone.name)]
        with pytest.raises(DiskError):
            take_back(disk)
        assert folder.read().state == "undone"
        # The broker has been at work since.
        disk.write_atomically(STORE / "checkpoint", StoreCheckpoint(70, 80, 9000, 90, 100).pack())
        assert len(settle(disk, STORE, only_look=True)[0]) == 1
        disk.faults = []
        settle(disk, STORE) if is_settled else take_back(disk)
        assert not RepairFolder.all_of(disk, STORE)
        assert fields(disk) == (70, 80, 9000, 90, 100)
        assert index_of(disk) == BEFORE


@pytest.mark.parametrize("state", ["done", "ready"])
def test_an_index_that_the_repair_did_not_make_is_left_alone(state: State) -> None:
    disk = made()
    folder = repair(disk)
    folder.set_state(state)
    disk.rename(STORE / "index", STORE / "moved")
    disk.make_dir(STORE / "index")
    done, left_alone = settle(disk, STORE)
    assert (done, ["neither its new nor its old one" in line for line in left_alone]) == (
        [],
        [True] * (state == "ready"),
    )
    with pytest.raises(UnsafeStoreError, match="is not the index that the repair of"):
        take_back(disk)
    assert index_of(disk) == {}
    assert disk.exists(folder.index / OLD)


@pytest.mark.parametrize("name", ["EINVAL", "ENOSYS", "EBUSY", "EXDEV"])
def test_where_nothing_can_be_exchanged_nothing_is_changed(name: str) -> None:
    disk = made()
    disk.faults = [Fault("exchange", name)]
    with pytest.raises(UnsafeStoreError, match="nothing is changed"):
        repair(disk)
    assert index_of(disk) == BEFORE
    assert fields(disk)[2] == OLD_TIME


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
        take_back(disk)
        assert outcome(disk) == "before"
    assert states == {"before", "between", "after"}


def test_a_crash_while_an_interrupted_repair_is_settled() -> None:
    def interrupted() -> SimDisk:
        disk = made()
        disk.faults = [Fault("create", "crash", "checkpoint.tmp", nth=2)]
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
    for disk in crashes(repaired, take_back):
        said = settle(disk, STORE)
        ends.add(outcome(disk))
        if outcome(disk) == "after":
            take_back(disk)
        assert outcome(disk) == "before", said
        assert settle(disk, STORE) == ([], [])
        assert not RepairFolder.all_of(disk, STORE)
    assert ends == {"before", "after"}


# --- names of new files

names = st.one_of(
    st.integers(10**15, 10**17 - 1).map(lambda number: f"{number:017d}"),
    st.integers(631_152_000_000, 4_102_444_800_000).map(
        lambda ms: f"{datetime.datetime.fromtimestamp(ms // 1000, datetime.UTC):%Y%m%d%H%M%S}{ms % 1000:03d}"
    ),
)


@given(
    st.none() | names,
    st.none() | names,
    st.integers(0, 5),
    st.sets(names, max_size=3),
    st.integers(-(2**63), 2**63 - 1),
)
def test_names_are_new_times_in_order_between_their_neighbours(
    low: str | None, high: str | None, count: int, others: set[str], timestamp: int
) -> None:
    taken = others | {name for name in (low, high) if name}
    flat = names_between(low, high, count, taken, timestamp)
    if flat is None:
        assert high is not None or timestamp > 0 or (low or "") > "9999"
        return
    assert len(flat) == count
    assert list(flat) == sorted(set(flat))
    for name in flat:
        assert datetime.datetime.strptime(name[:14], "%Y%m%d%H%M%S").replace(tzinfo=datetime.UTC)
    assert not taken & set(flat)
    assert all((low is None or low < name) and (high is None or name < high) for name in flat)


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        ("20260101000000000", "20260101000000003", 2, ("20260101000000001", "20260101000000002")),
        ("20260101000000000", "20260101000000002", 2, None),
        ("20260101000000000", "20260101000000001", 1, None),
        # Over the end of a second, a day, a leap year's February; and from names that are no times.
        ("20240228235959999", "20240229000000002", 2, ("20240229000000000", "20240229000000001")),
        ("20260101000060000", None, 1, ("20260101000100000",)),
        ("20260001000000000", None, 1, ("20260101000000000",)),
        ("20261399999999999", None, 1, ("20270101000000000",)),
        ("99991231235959999", None, 1, None),
        (None, "20260101000000000", 1, ("20251231235959998",)),
    ],
)
def test_between(low: str | None, high: str | None, count: int, expected: tuple[str, ...] | None) -> None:
    far = 4_000_000_000_000 if low is None else 0
    assert names_between(low, high, count, (), far) == expected


def test_without_neighbours_they_sort_before_what_a_broker_makes_in_any_time_zone() -> None:
    now = datetime.datetime(2026, 3, 1, 5, 0, tzinfo=datetime.UTC)
    found = names_between(None, None, 2, (), int(now.timestamp() * 1000))
    assert found == ("20260228170000000", "20260228170000001")
    earliest = now.astimezone(datetime.timezone(datetime.timedelta(hours=-12)))
    assert found[0] <= f"{earliest:%Y%m%d%H%M%S}000"
