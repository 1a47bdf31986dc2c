"""The simulated disk: what it forgets and how it fails; and that it agrees with the real one, call by call."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexd.errors import DiskError
from indexd.storage import disk as disk_module
from indexd.storage.disk import Disk
from support.sim_disk import SimDisk
from support.sim_fault import OPERATIONS, FaultMap, SimCrash
from support.sim_inode import PAGE_SIZE, SECTOR_SIZE


def every_call(disk: Disk, root: Path) -> None:
    """On an empty directory ``root``, which is empty again afterwards."""
    disk.make_dir(root / "d")
    with disk.open_write(root / "new", create=True) as file:
        file.allocate(10)
        file.pwrite(b"x", 3)
        file.truncate(5)
        file.fsync()
        file.size()
        file.stamp()
        file.pread(3, 0)
    with disk.open_write(root / "new") as file:
        file.pread_into(bytearray(3), 0)
    disk.open_read(root / "new").close()
    disk.exists(root / "new")
    disk.list_dir(root)
    disk.stamps(root)
    disk.write_atomically(root / "new", b"1")
    disk.rename(root / "new", root / "newer")
    disk.link(root / "newer", root / "d" / "twin")
    disk.exchange(root / "newer", root / "d" / "twin")
    disk.unlink(root / "d" / "twin")
    disk.stamp(root / "newer")
    disk.free(root)
    disk.unlink(root / "newer")
    disk.remove_dir(root / "d")
    disk.sync_dir(root)


ROOT = Path("/simulated")
FILE = ROOT / "file"
CRASHES = 300


def made(faults: str = "") -> SimDisk:
    """A disk on which ``file`` holds four synced pages of o."""
    disk = SimDisk(ROOT)
    with disk.open_write(FILE, create=True) as file:
        file.pwrite(b"o" * 4 * PAGE_SIZE, 0)
        file.fsync()
    disk.sync_dir(ROOT)
    disk.faults = FaultMap.parse(faults)
    return disk


def after_crashes(disk: SimDisk, look: Callable[[SimDisk], object]) -> set[object]:
    """What ``look`` finds, over many crashes of the same disk."""
    found = set()
    for seed in range(CRASHES):
        twin = disk.fork()
        twin.crash(random.Random(seed))
        found.add(look(twin))
    return found


def content(disk: SimDisk) -> bytes:
    return disk.read(FILE)


def test_what_was_synced_survives() -> None:
    assert after_crashes(made(), content) == {b"o" * 4 * PAGE_SIZE}


def test_of_what_was_not_synced_any_subset_of_pages_survives() -> None:
    disk = made()
    disk.open_write(FILE).pwrite(b"n" * 4 * PAGE_SIZE, 0)
    assert content(disk) == b"n" * 4 * PAGE_SIZE

    def pages(found: SimDisk) -> str:
        data = content(found)
        return "".join(chr(data[page * PAGE_SIZE]) for page in range(4))

    assert len(after_crashes(disk, pages)) == 16


def test_an_intermediate_state_of_a_page_can_survive_and_a_write_can_tear_at_sectors() -> None:
    disk = made()
    file = disk.open_write(FILE)
    file.pwrite(b"1" * PAGE_SIZE, 0)
    file.pwrite(b"2" * PAGE_SIZE, 0)
    found = after_crashes(disk, lambda twin: content(twin)[:PAGE_SIZE])
    assert {b"o" * PAGE_SIZE, b"1" * PAGE_SIZE, b"2" * PAGE_SIZE} < found
    for page in found:
        assert isinstance(page, bytes)
        sectors = {page[at : at + SECTOR_SIZE] for at in range(0, PAGE_SIZE, SECTOR_SIZE)}
        assert all(len(set(sector)) == 1 for sector in sectors)


def test_sizes_are_durable_after_a_sync_only() -> None:
    def sizes(change: str, size: int, *, sync: bool) -> set[object]:
        disk = made()
        file = disk.open_write(FILE)
        getattr(file, change)(size)
        if sync:
            file.fsync()
        return after_crashes(disk, lambda twin: len(content(twin)))

    assert sizes("allocate", 9 * PAGE_SIZE, sync=False) == {4 * PAGE_SIZE, 9 * PAGE_SIZE}
    assert sizes("allocate", 9 * PAGE_SIZE, sync=True) == {9 * PAGE_SIZE}
    assert sizes("truncate", 100, sync=False) == {4 * PAGE_SIZE, 100}
    assert sizes("truncate", 100, sync=True) == {100}


def test_what_is_cut_off_reads_as_zeros_when_the_file_grows_again() -> None:
    disk = made()
    with disk.open_write(FILE) as file:
        file.truncate(100)
        file.allocate(4 * PAGE_SIZE)
        assert file.pread(5 * PAGE_SIZE, 0) == b"o" * 100 + bytes(4 * PAGE_SIZE - 100)
        file.fsync()
    assert after_crashes(disk, content) == {b"o" * 100 + bytes(4 * PAGE_SIZE - 100)}


def names(disk: SimDisk) -> object:
    return tuple(disk.list_dir(ROOT))


def test_a_rename_that_was_not_synced_can_vanish_and_is_one_change() -> None:
    disk = made()
    disk.rename(FILE, ROOT / "other")
    assert after_crashes(disk, names) == {(("file", 4 * PAGE_SIZE),), (("other", 4 * PAGE_SIZE),)}
    disk.sync_dir(ROOT)
    assert after_crashes(disk, names) == {(("other", 4 * PAGE_SIZE),)}


def test_of_changes_in_a_directory_any_subset_survives() -> None:
    disk = made()
    for name in ("a", "b"):
        disk.open_write(ROOT / name, create=True)
    disk.unlink(FILE)
    assert len(after_crashes(disk, names)) == 8


def test_a_file_that_was_synced_is_lost_with_its_name() -> None:
    disk = SimDisk(ROOT)
    with disk.open_write(FILE, create=True) as file:
        file.pwrite(b"data", 0)
        file.fsync()
    assert after_crashes(disk, names) == {(), (("file", 4),)}


def test_a_name_that_was_synced_survives_without_its_content() -> None:
    disk = SimDisk(ROOT)
    disk.open_write(FILE, create=True).pwrite(b"data", 0)
    disk.sync_dir(ROOT)
    assert {b"", b"data", bytes(4)} == after_crashes(disk, content)


def test_after_a_failed_sync_a_later_one_brings_nothing_out() -> None:
    disk = made("fsync:file=EIO")
    file = disk.open_write(FILE)
    file.pwrite(b"n" * PAGE_SIZE, 0)
    with pytest.raises(DiskError, match="fsync /simulated/file"):
        file.fsync()
    assert content(disk)[:PAGE_SIZE] == b"n" * PAGE_SIZE
    kept = set()
    for seed in range(CRASHES):
        disk = made("fsync:file=EIO")
        disk.rand.seed(seed)
        file = disk.open_write(FILE)
        file.pwrite(b"n" * PAGE_SIZE, 0)
        with pytest.raises(DiskError):
            file.fsync()
        file.fsync()
        disk.crash()
        kept.add(content(disk)[:1])
    assert kept == {b"o", b"n"}


def test_a_process_that_dies_leaves_the_cache_and_dead_handles() -> None:
    disk = made()
    file = disk.open_write(FILE)
    file.pwrite(b"n", 0)
    disk.kill()
    assert content(disk)[:1] == b"n"
    with pytest.raises(AssertionError, match="process that died"):
        file.fsync()


def test_a_fork_shares_nothing() -> None:
    disk = made()
    twin = disk.fork()
    twin.open_write(FILE).pwrite(b"n", 0)
    twin.unlink(FILE)
    assert content(disk)[:1] == b"o"
    assert names(disk) != names(twin)


def test_crash_is_before_and_crash_after_is_behind_the_call() -> None:
    for fault, written in (("crash", b"o"), ("crash-after", b"n")):
        disk = made(f"fsync={fault}")
        file = disk.open_write(FILE)
        file.pwrite(b"n", 0)
        with pytest.raises(SimCrash):
            file.fsync()
        with pytest.raises(SimCrash):  # the machine is off
            disk.exists(FILE)
        found = after_crashes(disk, lambda twin: content(twin)[:1])
        assert (found == {b"n"}) == (written == b"n")


def test_the_change_with_the_given_number_is_not_reached() -> None:
    disk = made()
    disk.crash_at = disk.changes + 1
    disk.unlink(FILE)
    disk.exists(FILE)
    with pytest.raises(SimCrash):
        disk.sync_dir(ROOT)
    assert after_crashes(disk, names) == {(), (("file", 4 * PAGE_SIZE),)}


def test_a_short_write_leaves_a_part_and_says_that_the_disk_is_full() -> None:
    sizes = set()
    for seed in range(50):
        disk = made("pwrite#2=short")
        disk.rand.seed(seed)
        file = disk.open_write(FILE)
        file.pwrite(b"x", 0)
        with pytest.raises(DiskError) as caught:
            file.pwrite(b"n" * 20, 0)
        assert caught.value.errno == errno.ENOSPC
        sizes.add(content(disk).count(b"n"))
    assert len(sizes) > 10


def test_rules_choose_calls_by_operation_place_and_number() -> None:
    disk = made("create:a*#2=EMFILE; rename:b=EROFS; exists@all=EIO; list_dir:nowhere=EIO")
    disk.open_write(ROOT / "a1", create=True)
    with pytest.raises(DiskError, match="create /simulated/a2") as caught:
        disk.open_write(ROOT / "a2", create=True)
    assert caught.value.errno == errno.EMFILE
    disk.open_write(ROOT / "a2", create=True)
    with pytest.raises(DiskError, match="rename /simulated/a1 to /simulated/b"):
        disk.rename(ROOT / "a1", ROOT / "b")
    for _ in range(3):
        with pytest.raises(DiskError, match="stat"):
            disk.exists(FILE)
    assert names(disk) == (("a1", 0), ("a2", 0), ("file", 4 * PAGE_SIZE))
    assert disk.faults.injected == {"create=EMFILE": 1, "rename=EROFS": 1, "exists=EIO": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pwrite", "is not operation"),
        ("pwrite:#3=EIO", "is not operation"),
        ("pwrite#x=EIO", "is not operation"),
        ("pwrite#1@all=EIO", "is not operation"),
        ("pwrite#0=EIO", "counted from 1"),
        ("write=EIO", "is none of open_read"),
        ("pwrite=EWHAT", "is no errno"),
        ("fsync=short", "only a pwrite"),
    ],
)
def test_a_bad_fault_map_says_what_is_wrong_with_it(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        FaultMap.parse(f"unlink=EIO; {text}")
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_can_fail(tmp_path: Path, operation: str) -> None:
    disk = made(f"{operation}@all=EIO")
    with pytest.raises(DiskError) as caught:
        every_call(disk, ROOT)
    assert caught.value.errno == errno.EIO
    assert disk.faults.injected == {f"{operation}=EIO": 1}


def test_an_exchange_of_two_directories_survives_whole_or_not_at_all() -> None:
    disk = SimDisk(ROOT)
    disk.make_dir(ROOT / "d" / "one")
    disk.make_dir(ROOT / "two")
    disk.exchange(ROOT / "two", ROOT / "d" / "one")

    def inodes(found: SimDisk) -> tuple[int, int]:
        return found.stamp(ROOT / "two").inode, found.stamp(ROOT / "d" / "one").inode

    now = inodes(disk)
    assert after_crashes(disk, inodes) == {now, now[::-1]}
    disk.sync_dir(ROOT / "d")  # one of the two is enough: it is one transaction
    assert after_crashes(disk, inodes) == {now}


def test_a_linked_file_is_one_file_with_two_names() -> None:
    disk = made()
    disk.make_dir(ROOT / "d")
    disk.link(FILE, ROOT / "d" / "twin")
    with disk.open_write(FILE) as file:
        file.pwrite(b"n", 0)
    assert disk.read(ROOT / "d" / "twin")[:2] == b"no"
    assert after_crashes(disk, lambda twin: twin.exists(ROOT / "d" / "twin")) == {True, False}
    disk.sync_dir(ROOT / "d")
    disk.unlink(FILE)
    assert after_crashes(disk, lambda twin: twin.exists(ROOT / "d" / "twin")) == {True}


def test_other_paths_are_the_real_disk_s(tmp_path: Path) -> None:
    disk = SimDisk(tmp_path / "simulated")
    every_call(disk, tmp_path)
    disk.write_atomically(tmp_path / "file", b"data")
    assert (tmp_path / "file").read_bytes() == b"data"
    assert disk.operations == 0


def test_the_real_disk_makes_the_same_calls_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """make_dir is written twice, here and there; the order of calls is what durability hangs on."""
    real: list[str] = []

    def recorded(word: str, call: Callable[..., object]) -> Callable[..., object]:
        return lambda *args, **kwargs: (real.append(word), call(*args, **kwargs))[1]

    simulated = SimDisk(ROOT)
    sequence: list[str] = []
    simulated.before_change = lambda operation, path: sequence.append(operation)
    for disk, root in ((Disk(), tmp_path), (simulated, ROOT)):
        disk.make_dir(root / "base")  # its parent's name is in neither's hands
    sequence.clear()
    monkeypatch.setattr(disk_module.os, "fsync", recorded("fsync", os.fsync))
    monkeypatch.setattr(disk_module.os, "pwrite", recorded("pwrite", os.pwrite))
    monkeypatch.setattr(disk_module.os, "replace", recorded("rename", os.replace))
    monkeypatch.setattr(disk_module.os, "mkdir", recorded("make_dir", os.mkdir))
    for disk, root in ((Disk(), tmp_path / "base"), (simulated, ROOT / "base")):
        disk.write_atomically(root / "a", b"data")
        disk.write_atomically(root / "a", b"more", durable=False)
        disk.make_dir(root / "b" / "c")
    assert [call.replace("sync_dir", "fsync") for call in sequence if call != "create"] == real
    assert real.count("fsync") == 5


ALL_NAMES = ["a", "b", "c", "d/a", "d/b", "d", "e/x"]
NAMES = st.sampled_from(ALL_NAMES)
CALLS = st.one_of(
    st.tuples(st.sampled_from(["create", "write", "read", "truncate", "allocate"]), NAMES, st.integers(0, 9000)),
    st.tuples(st.sampled_from(["unlink", "list", "exists", "make_dir", "remove_dir"]), NAMES, st.just(0)),
    st.tuples(st.just("atomically"), NAMES, st.integers(0, 9000)),
    st.tuples(st.just("rename"), st.sampled_from(["a", "b", "c"]), st.integers(0, 2)),
    st.tuples(st.sampled_from(["link", "exchange"]), NAMES, st.integers(0, len(ALL_NAMES) - 1)),
)


def outcome(disk: Disk, root: Path, call: tuple[str, str, int]) -> object:
    """What one call comes to: a result, or the errno and the words of its error."""
    operation, name, number = call
    path = root / name
    try:
        if operation in ("create", "write", "read", "truncate", "allocate"):
            opened = (
                disk.open_read(path) if operation == "read" else disk.open_write(path, create=operation == "create")
            )
            with opened as file:
                if operation in ("truncate", "allocate"):
                    getattr(file, operation)(number + 1)
                elif operation != "read":
                    file.pwrite(bytes([number % 256]) * (number % 5000), number)
                return file.size(), file.pread(9000, 10), file.stamp().size
        if operation == "list":
            return disk.list_dir(path), {name: stamp.size for name, stamp in disk.stamps(path).items()}
        if operation == "atomically":
            return disk.write_atomically(path, bytes(number), durable=number % 2 == 0)
        if operation == "rename":
            return disk.rename(path, root / "abc"[number])
        if operation in ("link", "exchange"):
            getattr(disk, operation)(path, root / ALL_NAMES[number])
            return disk.stamp(path).inode == disk.stamp(root / ALL_NAMES[number]).inode
        return getattr(disk, operation)(path)
    except DiskError as error:
        return error.errno, error.operation.replace(str(root), ""), str(error).replace(str(root), "")


@given(st.lists(CALLS, max_size=25))
@example(calls=[("make_dir", "d/a", 0), ("read", "d/a", 0), ("write", "d/a", 0), ("create", "d/a", 0)])
@example(calls=[("make_dir", "d/b", 0), ("exchange", "d", 3), ("exchange", "d/a", 5), ("exchange", "d", 4)])
@example(calls=[("create", "d", 0), ("link", "d/a", 0), ("link", "d/a", 4), ("exchange", "d/a", 0)])
def test_both_disks_agree_on_any_calls(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, str, int]]
) -> None:
    root = tmp_path_factory.mktemp("real")
    twin = SimDisk(ROOT)
    for call in calls:
        assert outcome(twin, ROOT, call) == outcome(Disk(), root, call), call
    assert not twin.handles
