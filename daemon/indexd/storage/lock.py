"""One instance per data directory, by ``flock`` on DATA/lock.

The kernel drops the lock with the process, however it dies, so a lock file that is left behind means nothing. The file
holds the pid of the last owner for the message that a second instance prints.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from indexd.errors import BusyError, DiskError
from indexd.storage.disk import Disk, DiskFile


class DirectoryLock:
    """Held from ``acquire`` to ``release``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: DiskFile | None = None

    def acquire(self) -> None:
        """Take the lock or raise BusyError naming the owner."""
        file, _ = Disk().open_or_create(self._path)
        try:
            if not try_exclusive(file.fileno()):
                owner = file.pread(32, 0).decode("ascii", "replace").strip() or "unknown"
                raise BusyError(f"{self._path.parent} is in use by another indexd, pid {owner}")
            file.truncate(0)
            file.pwrite(f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            file.close()
            raise
        self._file = file

    def is_held(self) -> bool:
        """Whether the lock file is still the one that was locked: nobody else can lock it then."""
        try:
            named = os.stat(self._path)  # noqa: PTH116 - beside fstat
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DiskError("stat", self._path, error) from error
        return self._file is not None and named.st_ino == self._file.stamp().inode

    def renew(self) -> None:
        """Take the lock on the file that now has the name, made anew if there is none; BusyError if another was faster.

        The old lock is kept until then, though no one can meet it any more.
        """
        old = self._file
        self.acquire()
        if old is not None:
            old.close()

    def release(self) -> None:
        """Give the lock back; the file stays, so that no one can hold a lock on a name that is gone."""
        if self._file is not None:
            self._file.close()
            self._file = None


def try_exclusive(fd: int) -> bool:
    """Take ``flock`` on an open file, until it is closed; False while another process has it."""
    # A query that asks owner_pid() holds a shared lock for microseconds; that is no other instance.
    for pause in (0.02, 0.05, 0.1, None):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if pause is not None:
                time.sleep(pause)
        else:
            return True
    return False


def owner_pid(path: Path) -> int | None:
    """The pid of the instance that holds the lock now, or None if no one does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DiskError("open", path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() else 0
    else:
        return None
    finally:
        os.close(fd)
