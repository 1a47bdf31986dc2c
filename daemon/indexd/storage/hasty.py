"""HastyDisk: a disk that can be told to wait for nothing, for who must not be held up by one that is slow or dead.

In a hurry it reads what is in memory already (RWF_NOWAIT) from files that are open already, and raises WouldWaitError
for everything else; whoever asked tries again in a thread that may wait.
"""

from __future__ import annotations

import os
from pathlib import Path

from indexd.storage.disk import Disk, DiskFile, Stamp


class WouldWaitError(Exception):
    """What was asked for is not in memory, or it takes the system to say so."""


class HastyDisk(Disk):
    """For one thread at a time, which sets ``is_hasty`` as it wants. Only reading knows a hurry."""

    def __init__(self) -> None:
        super().__init__()
        self.is_hasty = False

    def open_read(self, path: Path) -> DiskFile:
        """See Disk."""
        self._wait()
        with super().open_read(path) as opened:
            return _HastyFile(path, os.dup(opened.fileno()), self)

    def exists(self, path: Path) -> bool:
        """See Disk."""
        self._wait()
        return super().exists(path)

    def stamp(self, path: Path) -> Stamp:
        """See Disk."""
        self._wait()
        return super().stamp(path)

    def stamps(self, path: Path) -> dict[str, Stamp]:
        """See Disk."""
        self._wait()
        return super().stamps(path)

    def list_dirs(self, path: Path) -> list[str]:
        """See Disk."""
        self._wait()
        return super().list_dirs(path)

    def _wait(self) -> None:
        if self.is_hasty:
            raise WouldWaitError


class _HastyFile(DiskFile):
    def __init__(self, path: Path, fd: int, disk: HastyDisk) -> None:
        super().__init__(path, fd)
        self._disk = disk

    def pread(self, size: int, position: int) -> bytes:
        if not self._disk.is_hasty:
            return super().pread(size, position)
        data = bytearray(size)
        try:
            count = os.preadv(self._fd, (data,), position, os.RWF_NOWAIT)
        except OSError as error:
            # Not in memory, or a file system that cannot tell; what is really wrong is found by who waits.
            raise WouldWaitError from error
        if count < size:  # the rest is not in memory, or it is the end: that is not told apart here
            raise WouldWaitError
        return bytes(data)
