"""Each call of a Disk and of its files, once."""

from __future__ import annotations

from pathlib import Path

from indexd.storage.disk import Disk


def every_call(disk: Disk, root: Path) -> None:
    """On an empty directory ``root``, which is empty again afterwards."""
    disk.make_dir(root / "d")
    with disk.open_write(root / "new", create=True) as file:
        file.allocate(10)
        file.pwrite(b"x", 3)
        file.truncate(5)
        file.fsync()
        file.size()
        file.stamp()
        file.pread(3, 0)
    with disk.open_write(root / "new") as file:
        file.pread_into(bytearray(3), 0)
    disk.open_read(root / "new").close()
    disk.exists(root / "new")
    disk.list_dir(root)
    disk.stamps(root)
    disk.write_atomically(root / "new", b"1")
    disk.rename(root / "new", root / "newer")
    disk.link(root / "newer", root / "d" / "twin")
    disk.exchange(root / "newer", root / "d" / "twin")
    disk.unlink(root / "d" / "twin")
    disk.stamp(root / "newer")
    disk.free(root)
    disk.unlink(root / "newer")
    disk.remove_dir(root / "d")
    disk.sync_dir(root)
