"""The broker of a store is stopped and stays so, and the store is a place where a repair can be made.

BrokerStopped holds the broker's own lock from the first look to the last write; check_place and check_room look, before
anything is read or built, whether folders can be exchanged there and whether there is room.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Self

from indexd.errors import DiskError, UnsafeStoreError
from indexd.storage.disk import Disk
from indexd.storage.lock import StoreLock, look_at_lock

# Manifest, checkpoint and directories.
_SPARE_SIZE = 1 << 20
_STOP_IT = "stop the broker first; indexd repair --plan says beside a running one what there is to do"
_HINTS = {
    errno.EROFS: "remount the file system read-write, or repair a copy of the store; nothing was changed",
    errno.EISDIR: "a broker keeps a file of that name: move the folder away",
    errno.ELOOP: "a broker keeps a file of that name: move the link away; nothing was changed",
    errno.EMLINK: "a broker keeps a file of its own there: move this one away; nothing was changed",
}


def check_place(store: Path) -> None:
    """UnsafeStoreError where STORE/index cannot change places with another folder, or the checkpoint be replaced."""
    index, checkpoint = store / "index", store / "checkpoint"
    for path, is_right, what in ((index, index.is_dir(), "folder"), (checkpoint, checkpoint.is_file(), "plain file")):
        if path.is_symlink() or (what == "folder" and path.is_mount()):
            what = "symbolic link" if path.is_symlink() else "mount point"  # noqa: PLW2901 - what it is in place of one
            raise UnsafeStoreError(
                f"{path} is a {what}: a repair puts another one in its place",
                "move what it leads to there, or repair a copy of the store and copy its index back",
            )
        if path.exists() and not is_right:
            raise UnsafeStoreError(f"{path} is no {what}", "move it away; indexd repair makes one")


def check_room(disk: Disk, store: Path, size: int) -> None:
    """UnsafeStoreError unless ``size`` bytes, and those of a manifest and a checkpoint, can be written beside."""
    free = disk.free(store)
    if free < size + _SPARE_SIZE:
        raise UnsafeStoreError(
            f"up to {size + _SPARE_SIZE:,} bytes are written beside the index, and {free:,} are free",
            "free space on that file system; nothing was changed",
        )


class BrokerStopped:
    """For use in a ``with`` block. ``has_made_lock``: there was no lock file, so this is a copy, or a new store."""

    def __init__(self, disk: Disk, store: Path) -> None:
        self._disk, self._store = disk, store
        self._path = store / "lock"
        self._lock = StoreLock(self._path)
        self.has_made_lock = False

    def __enter__(self) -> Self:
        """Take the lock. UnsafeStoreError if a broker runs, loads, or may do so; BusyError beside another repair."""
        self._refuse_alive()
        # What is made here belongs to whoever makes it, and the broker has to write to it.
        owner = self._store.stat().st_uid
        if os.geteuid() not in (0, owner):
            raise UnsafeStoreError(
                f"{self._store} belongs to user {owner}: a broker could not write to what this user makes there",
                "run as that user, or as root",
            )
        try:
            is_taken = self._lock.take()
        except DiskError as error:
            if not (error.is_forbidden or error.is_full or error.errno in _HINTS):
                raise
            hint = _HINTS.get(error.errno or 0, "nothing was changed; free space there, or give this user the right")
            raise UnsafeStoreError(str(error), hint) from error
        if not is_taken:
            self._refuse_alive()
            raise UnsafeStoreError(f"{self._path} is locked by another process", _STOP_IT)
        try:
            self.has_made_lock = self._lock.is_new
            if self.has_made_lock:
                self._disk.give(self._path, self._store)
            self.check()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def check(self) -> None:
        """UnsafeStoreError if a broker is loading: it will not come to its start, and has perhaps changed something."""
        pid = self._lock.other()
        if pid is not None:
            raise UnsafeStoreError(f"a broker, pid {pid}, has begun to load {self._store}", _STOP_IT)

    def _refuse_alive(self) -> None:
        found = look_at_lock(self._path)
        if found.alive is None:
            raise UnsafeStoreError(f"whether a broker has {self._store} open cannot be told: {found.why}", _STOP_IT)
        if found.alive:
            who = f"a broker, pid {found.pid}," if found.pid is not None else "a broker"
            why = f": {found.why}" if found.why else ""
            raise UnsafeStoreError(f"{who} has {self._store} open{why}", _STOP_IT)
