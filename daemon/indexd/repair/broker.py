"""The broker of a store is stopped and stays so, and the store is a place where a repair can be made.

BrokerStopped holds the broker's own lock from the first look to the last write; check_place and check_room look, before
anything is read or built, whether folders can be exchanged there and whether there is room.
"""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Self

from indexd.errors import DiskError, UnsafeStoreError
from indexd.storage.disk import Disk
from indexd.storage.lock import StoreLock, look_at_lock

_COPY = "repair a copy of the store, and copy its index back"
# Manifest, checkpoint and directories.
_SPARE_SIZE = 1 << 20
_ESCAPED = re.compile(rb"\\([0-7]{3})")


def check_place(store: Path, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """UnsafeStoreError where STORE/index cannot change places with another folder, or the checkpoint be replaced."""
    index, checkpoint = store / "index", store / "checkpoint"
    if index.is_symlink():
        raise UnsafeStoreError(f"{index} is a symbolic link: it cannot be exchanged in one step", _COPY)
    if index.exists() and not index.is_dir():
        raise UnsafeStoreError(f"{index} is no folder", "move it away; indexd repair makes one")
    # A bind mount of the same file system looks like any folder, but for the list of mounts.
    if index.is_mount() or os.fsencode(index.resolve()) in _mount_points(mounts):
        raise UnsafeStoreError(f"{index} is a mount point: it cannot be exchanged in one step", _COPY)
    if checkpoint.is_symlink():
        raise UnsafeStoreError(
            f"{checkpoint} is a symbolic link: a repair would put a file in its place",
            "move the file that it names there; nothing was changed",
        )
    if checkpoint.exists() and not checkpoint.is_file():
        raise UnsafeStoreError(f"{checkpoint} is no plain file", "move it away; indexd repair makes one")


def check_room(disk: Disk, store: Path, size: int) -> None:
    """UnsafeStoreError unless ``size`` bytes, and those of a manifest and a checkpoint, can be written beside."""
    free = disk.free(store)
    if free < size + _SPARE_SIZE:
        raise UnsafeStoreError(
            f"up to {size + _SPARE_SIZE:,} bytes are written beside the index, and {free:,} are free",
            "free space on that file system; nothing was changed",
        )


def _mount_points(mounts: Path) -> set[bytes]:
    # The fifth field of a line; spaces and the like in octal (man 5 proc).
    try:
        lines = mounts.read_bytes().splitlines()
    except OSError:
        return set()
    return {_ESCAPED.sub(lambda found: bytes([int(found[1], 8)]), line.split(b" ")[4]) for line in lines}


_STOP_IT = "stop the broker first; indexd repair --plan says beside a running one what there is to do"
_HINTS = {
    errno.EROFS: "remount the file system read-write, or repair a copy of the store; nothing was changed",
    errno.EISDIR: "a broker keeps a file of that name: move the folder away",
    errno.ELOOP: "a broker keeps a file of that name: move the link away; nothing was changed",
    errno.EMLINK: "a broker keeps a file of its own there: move this one away; nothing was changed",
}


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
        self._check_rights()
        if not self._take():
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

    def _take(self) -> bool:
        try:
            return self._lock.take()
        except DiskError as error:
            if not (error.is_forbidden or error.is_full or error.errno in _HINTS):
                raise
            hint = _HINTS.get(error.errno or 0, "nothing was changed; free space there, or give this user the right")
            raise UnsafeStoreError(str(error), hint) from error

    def _refuse_alive(self) -> None:
        found = look_at_lock(self._path)
        if found.alive is None:
            raise UnsafeStoreError(f"whether a broker has {self._store} open cannot be told: {found.why}", _STOP_IT)
        if found.alive:
            who = f"a broker, pid {found.pid}," if found.pid is not None else "a broker"
            why = f": {found.why}" if found.why else ""
            raise UnsafeStoreError(f"{who} has {self._store} open{why}", _STOP_IT)

    def _check_rights(self) -> None:
        # What is made here belongs to whoever makes it, and the broker has to write to it.
        owner = self._store.stat().st_uid
        if os.geteuid() not in (0, owner):
            raise UnsafeStoreError(
                f"{self._store} belongs to user {owner}: a broker could not write to what this user makes there",
                "run as that user, or as root",
            )
