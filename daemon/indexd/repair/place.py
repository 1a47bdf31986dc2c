"""Whether STORE is a place where folders can be exchanged: looked at before anything is read or built there."""

from __future__ import annotations

import os
import re
from pathlib import Path

from indexd.errors import UnsafeStoreError
from indexd.storage.disk import Disk

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
