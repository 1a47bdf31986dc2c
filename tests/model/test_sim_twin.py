"""The simulated disk and the real one agree, call by call, as long as nothing fails."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexd.errors import DiskError
from indexd.storage import disk as disk_module
from indexd.storage.disk import Disk
from support.sim_disk import SimDisk
from support.sim_every_call import every_call

ROOT = Path("/simulated")


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
