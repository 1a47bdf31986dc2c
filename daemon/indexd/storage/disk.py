"""Disk and DiskFile: the system calls, with errors that name the operation and the file.

What is written by ``pwrite`` is in the page cache and visible to every reader at once; it is durable only after
``fsync``. A rename or a new file is durable only after ``sync_dir`` of its directory. Nothing is ever written through
a mapping: on a full disk such a store kills the process without a word (ARCHITECTURE.md, decision 4).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from indexd.errors import DiskError
from indexd.storage.exchange import exchange_names

if TYPE_CHECKING:
    from types import TracebackType

    class Buffer(Protocol):
        """Anything that ``os.pwrite`` takes: bytes, memoryview, a contiguous array."""

        def __buffer__(self, flags: int, /) -> memoryview: ...


# Linux moves at most this much in one call (man 2 write); a longer buffer takes several.
_CALL_SIZE_MAX = 0x7FFFF000


class _Named:
    # A class, not a generator: a query makes dozens of calls, and each of them passes through here.
    __slots__ = ("_operation", "_path")

    def __init__(self, operation: str, path: Path) -> None:
        self._operation, self._path = operation, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, OSError):
            raise DiskError(self._operation, self._path, error) from error


class Stamp(NamedTuple):
    """What tells that somebody else wrote, cut or replaced a file: bytes, time of the last write in ns, inode."""

    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """From what ``stat`` returns."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


class DiskFile:
    """One open file. ``pread`` and ``pwrite`` take absolute positions and keep no cursor."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def size(self) -> int:
        """Bytes, as ``fstat`` says now."""
        with _Named("stat", self.path):
            return os.fstat(self._fd).st_size

    def stamp(self) -> Stamp:
        """Size, time of the last write and inode, as they are now."""
        with _Named("stat", self.path):
            return Stamp.of(os.fstat(self._fd))

    def pread(self, size: int, position: int) -> bytes:
        """Up to ``size`` bytes; fewer only at the end of the file."""
        try:  # not _Named: a query makes dozens of these calls
            return os.pread(self._fd, size, position)
        except OSError as error:
            raise DiskError("read", self.path, error) from error

    def pread_into(self, buffer: Buffer, position: int) -> int:
        """Fill ``buffer``; the number of bytes read, fewer than asked only at the end of the file."""
        with memoryview(buffer) as view, _Named("read", self.path):
            done = 0
            while done < len(view):
                count = os.preadv(self._fd, [view[done : done + _CALL_SIZE_MAX]], position + done)
                if count == 0:
                    break
                done += count
            return done

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of ``data``; raises DiskError if the device takes less."""
        with memoryview(data) as raw, raw.cast("B") as view, _Named("write", self.path):
            done = 0
            while done < len(view):
                count = os.pwrite(self._fd, view[done : done + _CALL_SIZE_MAX], position + done)
                if count == 0:
                    raise OSError(errno.EIO, "the device took no bytes")
                done += count

    def allocate(self, size: int) -> None:
        """Give the file ``size`` bytes of real space; what was not there reads as zeros (posix_fallocate)."""
        with _Named("allocate space for", self.path):
            os.posix_fallocate(self._fd, 0, size)

    def truncate(self, size: int) -> None:
        """Cut or extend to ``size`` bytes; an extension reads as zeros."""
        with _Named("truncate", self.path):
            os.ftruncate(self._fd, size)

    def fsync(self) -> None:
        """Make content and size durable. After a failure nothing is known: the process must end and recover."""
        with _Named("fsync", self.path):
            os.fsync(self._fd)

    def next_data(self, position: int) -> int:
        """The first byte from ``position`` on that may not be zero; the file's size if all were never written."""
        with _Named("read", self.path):
            try:
                return os.lseek(self._fd, position, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                return max(os.fstat(self._fd).st_size, position)

    def fileno(self) -> int:
        """The descriptor, for a read-only mapping of a sealed file."""
        return self._fd

    def close(self) -> None:
        """Close once; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DiskFile({self.path}, fd={self._fd})"


class Disk:
    """The calls that open, name and remove files."""

    def open_read(self, path: Path) -> DiskFile:
        """Open for reading only: the sole way a broker's files are ever opened."""
        with _Named("open", path):
            # Not blocking: a pipe of that name would wait for a writer for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "it is no plain file")
            return DiskFile(path, fd)

    def open_write(self, path: Path, *, create: bool = False) -> DiskFile:
        """Open for reading and writing; ``create`` makes it, and fails if it is already there."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        with _Named("create" if create else "open", path):
            return DiskFile(path, os.open(path, flags, 0o644))

    def exists(self, path: Path) -> bool:
        """Whether anything has that name; a directory that may not be searched is an error, not an absence."""
        with _Named("stat", path):
            try:
                path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return False
        return True

    def read(self, path: Path) -> bytes:
        """The whole of a small file."""
        with self.open_read(path) as file:
            return file.pread(file.size(), 0)

    def write_atomically(self, path: Path, data: bytes, *, durable: bool = True) -> None:
        """Replace ``path`` by ``data``: temporary file, fsync, rename, fsync of the directory (decision 5).

        Without ``durable`` both fsyncs are left out: readers still never see half a file.
        """
        temporary = path.with_name(path.name + ".tmp")
        with _Named("create", temporary):
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            file = DiskFile(temporary, os.open(temporary, flags, 0o644))
        with file:
            file.pwrite(data, 0)
            if durable:
                file.fsync()
        self.rename(temporary, path)
        if durable:
            self.sync_dir(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, replacing a file that is there."""
        with _Named(f"rename {source} to", target):
            source.replace(target)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, on the same file system; neither is a copy of the other."""
        with _Named(f"link {source} to", target):
            target.hardlink_to(source)

    def exchange(self, one: Path, other: Path) -> None:
        """Two names change places in one step, whatever they name; durable in each directory that is synced then."""
        with _Named(f"exchange {one} with", other):
            exchange_names(one, other)

    def free(self, path: Path) -> int:
        """Bytes that this user may still allocate on the file system of ``path``."""
        with _Named("stat", path):
            return (status := os.statvfs(path)).f_bavail * status.f_frsize

    def give(self, path: Path, like: Path, rights: int | None = None) -> None:
        """``rights``, else those of ``like``; its owner and group, too, where root calls."""
        with _Named("change the owner of", path):
            wanted = like.stat()
            if os.geteuid() == 0:
                os.chown(path, wanted.st_uid, wanted.st_gid)
            path.chmod((wanted.st_mode if rights is None else rights) & (0o777 if path.is_dir() else 0o666))

    def unlink(self, path: Path) -> None:
        """Remove; a file that is already gone is no error."""
        with _Named("remove", path):
            path.unlink(missing_ok=True)

    def remove_dir(self, path: Path) -> None:
        """Remove an empty directory."""
        with _Named("remove", path):
            path.rmdir()

    def list_dir(self, path: Path) -> list[tuple[str, int]]:
        """(name, size in bytes) of the plain files in ``path``, by name; files that vanish meanwhile are left out."""
        return [(name, stamp.size) for name, stamp in self.stamps(path).items()]

    def stamp(self, path: Path) -> Stamp:
        """The stamp of what has that name."""
        try:  # not _Named: a query asks this of half a dozen files and directories
            return Stamp.of(os.stat(path))  # noqa: PTH116 - half the time of Path's own
        except OSError as error:
            raise DiskError("stat", path, error) from error

    def stamps(self, path: Path) -> dict[str, Stamp]:
        """The stamp of each plain file in ``path``, by name; files that vanish meanwhile are left out."""
        rows = {}
        with _Named("list", path), os.scandir(path) as entries:
            for entry in entries:
                try:
                    if entry.is_file():
                        rows[entry.name] = Stamp.of(entry.stat())
                except FileNotFoundError:
                    continue
                except OSError as error:  # a link that leads in a circle: which one
                    raise DiskError("stat", path / entry.name, error) from error
        return dict(sorted(rows.items()))

    def list_dirs(self, path: Path) -> list[str]:
        """The names of the directories in ``path``, in order."""
        with _Named("list", path), os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def make_dir(self, path: Path, *, durable: bool = True) -> None:
        """Make ``path`` and its parents; each is durable in its parent then, those found there included.

        Whoever made one before may have died before that. Without ``durable`` nothing is synced.
        """
        missing = []
        step = path
        while not self.exists(step):
            missing.append(step)
            step = step.parent
        try:
            if durable:
                self.sync_dir(step.parent)
        except DiskError as error:
            if not error.is_forbidden:  # a parent that may not be read is another's, and older than this
                raise
        for step in reversed(missing):
            with _Named("make directory", step):
                step.mkdir(exist_ok=True)
            if durable:
                self.sync_dir(step.parent)
        if not path.is_dir():
            raise DiskError("use", path, OSError(errno.ENOTDIR, "it is not a directory"))

    def sync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        with _Named("open", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            with _Named("fsync directory", path):
                os.fsync(fd)
        finally:
            os.close(fd)
