"""Kafka's lock on a log directory: ``.lock``, an fcntl lock over the whole file, held as long as a broker runs.

A check only asks whether somebody holds it. It must not hold it itself: a broker that is started meanwhile would end
because of it. Whoever changes files holds it, and a broker that is started then ends with a clear message. The file
is never made here: a copied directory has none, and nobody else that could be met.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from indexd.errors import BusyError
from indexd.kafka.directory import lock_paths
from indexd.storage.disk import Disk, DiskFile

# struct flock of Linux on 64-bit machines: type, whence, start, length, pid.
_FLOCK = struct.Struct("@hhqqi4x")
_HINT = "stop the broker first: a partition can only be looked at while nobody writes it"


def refuse_while_locked(disk: Disk, directory: Path) -> None:
    """BusyError if another process holds the lock of the log directory that ``directory`` is or belongs to."""
    for path in lock_paths(disk, directory):
        with disk.open_read(path) as file:
            asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(file.fileno(), fcntl.F_GETLK, asked))
        if kind != fcntl.F_UNLCK:
            owner = f"process {pid}" if pid > 0 else "another process"
            raise BusyError(f"{path} is locked by {owner}", _HINT)


class LogDirectoryLock:
    """The lock itself, for the length of a ``with`` block; BusyError if another process holds it."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory
        self._files = ExitStack()

    def __enter__(self) -> LogDirectoryLock:
        refuse_while_locked(self._disk, self._directory)
        with ExitStack() as files:
            for path in lock_paths(self._disk, self._directory):
                _lock(files.enter_context(self._disk.open_write(path)), path)
            self._files = files.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def _lock(file: DiskFile, path: Path) -> None:
    try:
        fcntl.lockf(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise BusyError(f"{path} is locked by another process", _HINT) from None
