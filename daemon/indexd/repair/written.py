"""Files that a repair writes: whoever runs it, and with whatever umask, they are its store's own."""

from __future__ import annotations

from pathlib import Path

from indexd.storage.disk import Disk


def write_owned(disk: Disk, path: Path, data: bytes, like: Path, temporary: Path) -> None:
    """Replace ``path`` by ``data``, durably, by way of ``temporary``; owner, group and rights are those of ``like``.

    They are set before the file has its name. Not ``Disk.write_atomically``: what that makes is the caller's, with the
    rights that the umask leaves. Raises DiskError.
    """
    disk.unlink(temporary)
    with disk.open_write(temporary, create=True) as file:
        file.pwrite(data, 0)
        disk.give(temporary, like)
        file.fsync()
    disk.rename(temporary, path)
    disk.sync_dir(path.parent)
