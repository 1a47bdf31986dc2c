"""RemoteDisk: Disk for a store that is given as a URI, read by pyarrow's file systems, and never written.

Paths of this machine are Disk's, so one disk reads a log of which a part lies elsewhere and writes what is ours here. A
read is a request over the network: whoever reads in small pieces has to read ahead himself.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.config import Config, RemotePath
from indexd.errors import DiskError, UsageError
from indexd.storage.disk import Disk, DiskFile, Stamp

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from pyarrow import fs
    from typing_extensions import Buffer

# What an object store's answer says where a file system has a number.
_CAUSES = (
    ("ACCESS_DENIED", errno.EACCES),
    ("Forbidden", errno.EACCES),
    ("HTTP status 403", errno.EACCES),
    ("NO_SUCH_BUCKET", errno.ENOENT),
    ("Path does not exist", errno.ENOENT),
    ("NETWORK_CONNECTION", errno.ENETUNREACH),
)


def disk_for(place: Config | Path) -> Disk:
    """What reads this place, or the store of this configuration: Disk, or RemoteDisk where any of it is a URI."""
    paths = place.store.commit_log_directories if isinstance(place, Config) else (place,)
    return RemoteDisk() if any(isinstance(path, RemotePath) for path in paths) else Disk()


def locate(path: RemotePath) -> tuple[fs.FileSystem, str]:
    """The file system and the path in it; one file system a process and root. Raises DiskError, UsageError."""
    with named("reach", path):
        system, base = _file_system(path.root_uri)
    return system, "/".join((base.rstrip("/"), *path.names)) or "/"


@lru_cache(16)
def _file_system(root_uri: str) -> tuple[fs.FileSystem, str]:
    try:
        from pyarrow import fs  # noqa: PLC0415 - heavy and optional: a store on this machine does without
    except ImportError:
        raise UsageError(
            "a URI is read by pyarrow, which is not installed", "pip install 'rocketmq-indexd[spark]'"
        ) from None
    found: tuple[fs.FileSystem, str] = fs.FileSystem.from_uri(root_uri)
    return found


@contextmanager
def named(operation: str, path: Path) -> Iterator[None]:
    """A DiskError of this operation from what pyarrow raises.

    That is an OSError, with a number where a system gave one and else with words, or a ValueError for bad options.
    """
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:
        text = " ".join(str(error).split()[:60])
        said = next((number for word, number in _CAUSES if word in text), errno.EIO)
        number = getattr(error, "errno", None) or said
        failed = DiskError(operation, path, OSError(number, text))
        if isinstance(path, RemotePath) and path.scheme != "file" and not failed.is_missing:
            failed.hint = "check the URI, the credentials and the network"
        raise failed from error


class RemoteFile(DiskFile):
    """One open file behind a URI; its size is the one that it had when it was opened. Threads may share it."""

    def __init__(self, path: RemotePath, file: pa.NativeFile, stamp: Stamp, disk: Disk) -> None:
        super().__init__(path, -1, disk)
        self._file, self._stamp = file, stamp

    def stamp(self) -> Stamp:
        """As of when it was opened; there are no inodes: 0."""
        return self._stamp

    def pread(self, size: int, position: int) -> bytes:
        """Up to ``size`` bytes; fewer only at the end of the file."""
        size = min(size, self._stamp.size - position)
        if size <= 0:
            return b""
        with named("read", self.path):
            data: bytes = self._file.read_at(size, position)
            return data

    def pread_into(self, buffer: Buffer, position: int) -> int:
        """Fill ``buffer``; the number of bytes read, fewer than asked only at the end of the file."""
        with memoryview(buffer) as raw, raw.cast("B") as view:
            data = self.pread(len(view), position)
            view[: len(data)] = data
            return len(data)

    def next_data(self, position: int) -> int:
        """``position``: a remote file has no holes that one could ask for."""
        return position

    def fileno(self) -> int:
        """Refused: there is nothing to map."""
        raise DiskError("map", self.path, OSError(errno.ENOTSUP, "it is not on this machine"))

    def close(self) -> None:
        """Close once; a second call does nothing."""
        self._file.close()


class RemoteDisk(Disk):
    """Reads what a RemotePath names, and is Disk for every other path. Keeps nothing: it may be pickled.

    What writes refuses a RemotePath with UnsafeStoreError, as everything does that takes it for a path of this machine.
    """

    def open_read(self, path: Path) -> DiskFile:
        """Open for reading only."""
        if not isinstance(path, RemotePath):
            return super().open_read(path)
        system, place = locate(path)
        stamp = self.stamp(path)
        with named("open", path):
            return RemoteFile(path, system.open_input_file(place), stamp, self)

    def stamp(self, path: Path) -> Stamp:
        """The stamp of the file that has that name; its inode is 0."""
        if not isinstance(path, RemotePath):
            return super().stamp(path)
        system, place = locate(path)
        with named("stat", path):
            info = system.get_file_info(place)
        if not info.type:
            raise DiskError("stat", path, FileNotFoundError(errno.ENOENT, "there is no such file"))
        return Stamp(info.size or 0, info.mtime_ns or 0, 0)

    def stamps(self, path: Path) -> dict[str, Stamp]:
        """The stamp of each file in ``path``, by name."""
        if not isinstance(path, RemotePath):
            return super().stamps(path)
        rows = {one.base_name: Stamp(one.size or 0, one.mtime_ns or 0, 0) for one in _list(path) if one.is_file}
        return dict(sorted(rows.items()))

    def list_dirs(self, path: Path) -> list[str]:
        """The names of the directories in ``path``, in order."""
        if not isinstance(path, RemotePath):
            return super().list_dirs(path)
        return sorted(info.base_name for info in _list(path) if not info.is_file)


def _list(path: RemotePath) -> list[fs.FileInfo]:
    from pyarrow import fs  # noqa: PLC0415 - heavy and optional: locate() has loaded it

    system, place = locate(path)
    with named("list", path):
        return list(system.get_file_info(fs.FileSelector(place)))
