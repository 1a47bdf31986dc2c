"""All that a repair does to the disk, on a simulated one, with an index of a few bytes."""

from __future__ import annotations

import struct
from pathlib import Path

from indexd.flush.frontier import StoreCheckpoint
from indexd.index.format import IndexHeader
from indexd.repair.run import carry
from indexd.repair.swap import RepairFolder, swap
from support.sim_disk import SimDisk

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
