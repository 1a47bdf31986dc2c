"""The simulated disk: what it forgets and how it fails; and that it agrees with the real one, call by call."""

from __future__ import annotations

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
from support.sim_disk import Fault, SimDisk
from support.sim_inode import PAGE_SIZE

ROOT = Path("/simulated")
FILE = ROOT / "file"
CRASHES = 300


def made(*faults: Fault) -> SimDisk:
    """A disk on which ``file`` holds four synced pages of o."""
    disk = SimDisk(ROOT)
    with disk.open_write(FILE, create=True) as file:
        file.pwrite(b"o" * 4 * PAGE_SIZE, 0)
        file.fsync()
    disk.sync_dir(ROOT)
    disk.faults = list(faults)
    return disk


def after_crashes(disk: SimDisk, look: Callable[[SimDisk], object]) -> set[object]:
    """What ``look`` finds, over many crashes of the same disk."""
    found = set()
    for seed in range(CRASHES):
        twin = disk.fork()
        twin.crash(random.Random(seed))
        found.add(look(twin))
    return found


def pages(disk: SimDisk) -> str:
    """The first letter of each page."""
    return "".join(chr(byte) for byte in disk.read(FILE)[::PAGE_SIZE])


def names(disk: SimDisk) -> str:
    return " ".join(name for name, _ in disk.list_dir(ROOT))


def inodes(disk: SimDisk) -> tuple[int, int]:
    return disk.stamp(ROOT / "two").inode, disk.stamp(ROOT / "d" / "one").inode


def test_of_what_was_not_synced_any_subset_survives() -> None:
    disk = made()
    assert after_crashes(disk, pages) == {"oooo"}
    disk.open_write(FILE).pwrite(b"n" * 4 * PAGE_SIZE, 0)
    assert pages(disk) == "nnnn"
    assert len(after_crashes(disk, pages)) == 16
    disk = made()
    for name in ("a", "b"):
        disk.open_write(ROOT / name, create=True)
    disk.unlink(FILE)
    assert len(after_crashes(disk, names)) == 8


def test_an_exchange_of_two_directories_survives_whole_or_not_at_all() -> None:
    disk = SimDisk(ROOT)
    disk.make_dir(ROOT / "d" / "one")
    disk.make_dir(ROOT / "two")
    disk.exchange(ROOT / "two", ROOT / "d" / "one")
    now = inodes(disk)
    assert after_crashes(disk, inodes) == {now, now[::-1]}
    disk.sync_dir(ROOT / "d")  # one of the two is enough: it is one transaction
    assert after_crashes(disk, inodes) == {now}


def test_after_a_failed_sync_a_later_one_brings_nothing_out() -> None:
    kept = set()
    for seed in range(CRASHES):
        disk = made(Fault("fsync", "EIO"))
        disk.rand.seed(seed)
        file = disk.open_write(FILE)
        file.pwrite(b"n" * PAGE_SIZE, 0)
        with pytest.raises(DiskError, match="fsync /simulated/file"):
            file.fsync()
        assert pages(disk) == "nooo"
        file.fsync()
        disk.crash()
        kept.add(pages(disk))
    assert kept == {"oooo", "nooo"}


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
    path, other = root / name, root / ("abc"[number] if operation == "rename" else ALL_NAMES[number % len(ALL_NAMES)])
    try:
        match operation:
            case "read" | "create" | "write" | "truncate" | "allocate":
                is_new = operation == "create"
                with disk.open_read(path) if operation == "read" else disk.open_write(path, create=is_new) as file:
                    if operation in ("truncate", "allocate"):
                        getattr(file, operation)(number + 1)
                    elif operation != "read":
                        file.pwrite(bytes([number % 256]) * (number % 5000), number)
                    return file.size(), file.pread(9000, 10), file.stamp().size
            case "list":
                return disk.list_dir(path), {name: stamp.size for name, stamp in disk.stamps(path).items()}
            case "atomically":
                return disk.write_atomically(path, bytes(number), durable=number % 2 == 0)
            case "rename" | "link" | "exchange":
                getattr(disk, operation)(path, other)
                return operation == "rename" or disk.stamp(path).inode == disk.stamp(other).inode
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
