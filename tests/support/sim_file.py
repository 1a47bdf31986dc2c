"""SimFile: one open file of a SimDisk. It dies with the process that opened it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.storage.disk import DiskFile, Stamp
from support.sim_inode import SimInode

if TYPE_CHECKING:
    from indexd.storage.disk import Buffer
    from support.sim_disk import SimDisk


def stamp_of(inode: SimInode) -> Stamp:
    """The stamp of a simulated file."""
    return Stamp(inode.size, inode.mtime_ns, inode.number)


class SimFile(DiskFile):
    """Reads and writes the inode that was opened, whatever has become of its name."""

    def __init__(self, disk: SimDisk, path: Path, inode: SimInode, *, is_writable: bool) -> None:
        super().__init__(path, -1, disk)
        self._sim = disk
        self._inode = inode
        self._is_writable = is_writable
        self._is_open = True
        self._life = disk.lives
        disk.handles.add(self)

    def __repr__(self) -> str:
        return f"SimFile({self.path}, {'open' if self._is_open else 'closed'}, inode={self._inode.number})"

    def size(self) -> int:
        self._meet("size")
        return self._inode.size

    def stamp(self) -> Stamp:
        self._meet("stamp")
        return stamp_of(self._inode)

    def pread(self, size: int, position: int) -> bytes:
        self._meet("pread")
        return self._inode.read(size, position)

    def pread_into(self, buffer: Buffer, position: int) -> int:
        self._meet("pread")
        with memoryview(buffer) as raw, raw.cast("B") as view:
            data = self._inode.read(len(view), position)
            view[: len(data)] = data
        return len(data)

    def next_data(self, position: int) -> int:
        self._meet("size")
        return position  # no hole is known here, as on a file system that does not tell

    def pwrite(self, data: Buffer, position: int) -> None:
        fault = self._meet("pwrite", is_write=True)
        with memoryview(data) as raw, raw.cast("B") as view:
            size = self._sim.rand.randrange(len(view) + 1) if fault == "short" else len(view)
            self._inode.write(view[:size], position)
        self._inode.touch(next(self._sim.ticks))
        if fault == "short":
            # The real DiskFile writes on, and is told then that there is no room.
            raise self._sim.error("pwrite", self.path, errno.ENOSPC)
        self._sim.leave(fault)

    def allocate(self, size: int) -> None:
        fault = self._meet("allocate", is_write=True)
        self._inode.resize(max(size, self._inode.size))
        self._sim.leave(fault)

    def truncate(self, size: int) -> None:
        fault = self._meet("truncate", is_write=True)
        self.cut(size)
        self._sim.leave(fault)

    def fsync(self) -> None:
        self._check()
        try:
            fault = self._sim.meet("fsync", self.path)
        except Exception:
            self._inode.fail_sync(self._sim.rand)
            raise
        self._inode.sync()
        self._sim.leave(fault)

    def fileno(self) -> int:
        """The descriptor of a copy: what is mapped through it is the file as it is now."""
        self._check()
        if self._fd < 0:
            self._fd = os.memfd_create(self.path.name)
            os.pwrite(self._fd, self._inode.read(self._inode.size, 0), 0)
        return self._fd

    def close(self) -> None:
        super().close()
        self._is_open = False
        self._sim.handles.discard(self)

    def cut(self, size: int) -> None:
        """Truncate without asking whether that fails."""
        self._inode.resize(size)
        self._inode.touch(next(self._sim.ticks))

    def _meet(self, operation: str, *, is_write: bool = False) -> str | None:
        self._check()
        fault = self._sim.meet(operation, self.path)
        if is_write and not self._is_writable:
            raise self._sim.error(operation, self.path, errno.EINVAL if operation == "truncate" else errno.EBADF)
        return fault

    def _check(self) -> None:
        if self._life != self._sim.lives:
            raise AssertionError(f"{self.path} is used through a handle of a process that died")
        if not self._is_open:
            raise self._sim.error("pread", self.path, errno.EBADF)
