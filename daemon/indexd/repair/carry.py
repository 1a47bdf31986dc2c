"""Old index files in a new index folder: as the same file where nobody will write to it, else as a copy."""

from __future__ import annotations

import errno
from pathlib import Path

from indexd.errors import DiskError
from indexd.storage.disk import Disk

_COPY_SIZE = 1 << 20
# What a file system says that cannot give a file a second name, or not this one.
_NO_LINK = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV})


def carry(disk: Disk, source: Path, target: Path, *, will_change: bool) -> bool:
    """Have ``source`` as ``target``, too, durable but for its name. What changes there must not change here.

    Whether ``target`` is a file of its own: else its owner and rights are those of ``source``, and stay so.
    """
    if not will_change:
        try:
            disk.link(source, target)
        except DiskError as error:
            if error.errno not in _NO_LINK:
                raise
        else:
            # A broker that was killed has left it in the page cache, perhaps.
            with disk.open_read(target) as file:
                file.fsync()
            return False
    _copy(disk, source, target)
    return True


def _copy(disk: Disk, source: Path, target: Path) -> None:
    with disk.open_read(source) as old, disk.open_write(target, create=True) as new:
        size = old.size()
        new.allocate(size)
        for position in range(0, size, _COPY_SIZE):
            data = old.pread(_COPY_SIZE, position)
            if data != bytes(len(data)):
                new.pwrite(data, position)
        new.fsync()
