"""Disk and DiskFile: the system calls, with errors that name the operation and the file.

What is written by ``pwrite`` is in the page cache and visible to every reader at once; it is durable only after
``fsync``. A rename or a new file is durable only after ``sync_dir`` of its directory. Nothing is ever written through
a mapping: on a full disk such a store kills the process without a word (ARCHITECTURE.md, decision 4).

Whatever is made, opened for writing, renamed or removed is named in an open directory, and no link is followed in the
last part of a path: whoever may write to a directory may put a link there at any moment. Root follows only links of its
own in what leads there, too, and what it makes belongs to whom its directory belongs. Two names change places in one
step by renameat2 with RENAME_EXCHANGE, which ext4, xfs, btrfs, tmpfs and overlayfs know; others answer EINVAL.

A disk that is ``nonblocking`` waits for nothing: it reads what is in memory already (RWF_NOWAIT) from files that are
open already, and raises WouldWaitError for everything else; whoever asked tries again in a thread that may wait.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from indexd.errors import DiskError, MissingOk

if TYPE_CHECKING:
    from typing_extensions import Buffer  # what ``os.pwrite`` takes: bytes, memoryview, a contiguous array


_RENAME_EXCHANGE = 2
#: What the name of a file ends with while ``write_atomically`` writes it.
TEMPORARY = ".tmp"
_NAMING = os.O_PATH | os.O_CLOEXEC
_LINKS_MAX = 40  # as the kernel's own
libc = ctypes.CDLL(None, use_errno=True)


class WouldWaitError(Exception):
    """What was asked for is not in memory, or it takes the system to say so."""


@contextmanager
def closed(fd: int) -> Iterator[int]:
    """The descriptor, closed at the end of the block."""
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to name files in, and for nothing else (O_PATH). Raises OSError."""
    name = os.fspath(path)
    fd = _opened_by_root(Path(name)) if os.geteuid() == 0 else os.open(name, _NAMING | os.O_DIRECTORY)
    with closed(fd):
        yield fd


def open_at(directory: int, name: str, flags: int, mode: int = 0) -> int:
    """As ``os.open``, but for links: they are refused (ELOOP), wherever they lead."""
    return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=directory)


def open_file_at(directory: int, name: str, mode: int | None, *, create: bool) -> int:
    """Open a plain file for reading and writing. One that is made gets exactly these rights, None for what the umask
    leaves of 0644, and root's is the directory's owner's.
    """
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
    fd = open_at(directory, name, flags, 0o644 if mode is None else 0o600)
    try:
        own = os.fstat(fd)
        if not stat.S_ISREG(own.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        if create:
            _settle(fd, directory, mode)
        elif os.geteuid() == 0 and own.st_uid != os.fstat(directory).st_uid:
            _refuse_other_names(own)
    except BaseException:
        os.close(fd)
        raise
    return fd


def take_owner(fd: int, like: os.stat_result) -> None:
    """Where root calls: have what is open belong to whom ``like`` says."""
    own = os.fstat(fd)
    if os.geteuid() == 0 and (own.st_uid, own.st_gid) != (like.st_uid, like.st_gid):
        _refuse_other_names(own)
        os.fchown(fd, like.st_uid, like.st_gid)


def _settle(fd: int, directory: int, mode: int | None) -> None:
    # The owner first: to change it takes rights away.
    take_owner(fd, os.fstat(directory))
    if mode is not None:
        os.fchmod(fd, mode)


def _refuse_other_names(own: os.stat_result) -> None:
    # Whoever may write to a directory may, on some systems, give a file there that he cannot write to a second name.
    if stat.S_ISREG(own.st_mode) and own.st_nlink > 1:
        raise OSError(errno.EMLINK, "it is another user's file under a second name")


def _opened_by_root(path: Path) -> int:
    left, links = list(reversed(path.parts)), 0
    with ExitStack() as steps:
        at = steps.enter_context(closed(os.open(".", _NAMING)))
        while left:
            name = left.pop()
            step = steps.enter_context(closed(os.open(name, _NAMING | os.O_NOFOLLOW, dir_fd=at)))
            status = os.fstat(step)
            if not stat.S_ISLNK(status.st_mode):
                at = step
                continue
            if status.st_uid != 0:
                raise OSError(errno.ELOOP, f"{name} is a link of user {status.st_uid}, and root follows only its own")
            links += 1
            if links > _LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            left += reversed(Path(os.readlink("", dir_fd=step)).parts)
        return os.open(".", _NAMING | os.O_DIRECTORY, dir_fd=at)


class _Named:
    # A class, not a generator: a query makes dozens of calls, and each of them passes through here.
    __slots__ = ("_operation", "_path")

    def __init__(self, operation: str, path: Path) -> None:
        self._operation, self._path = operation, path

    def __enter__(self) -> None:
        os.fspath(self._path)  # a place that is not on this machine raises here, by its whole name

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
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

    def __init__(self, path: Path, fd: int, disk: Disk) -> None:
        self.path, self._fd, self._disk = path, fd, disk

    def size(self) -> int:
        """Bytes, as they are now."""
        return self.stamp().size

    def stamp(self) -> Stamp:
        """Size, time of the last write and inode, as they are now."""
        with _Named("stat", self.path):
            return Stamp.of(os.fstat(self._fd))

    def pread(self, size: int, position: int) -> bytes:
        """Up to ``size`` bytes; fewer only at the end of the file."""
        try:  # not _Named: a query makes dozens of these calls
            if not self._disk.nonblocking:
                return os.pread(self._fd, size, position)
            data = bytearray(size)
            count = os.preadv(self._fd, (data,), position, os.RWF_NOWAIT)
        except OSError as error:
            # Not in memory, or a file system that cannot tell; what is really wrong is found by who waits.
            raise WouldWaitError if self._disk.nonblocking else DiskError("read", self.path, error) from error
        if count < size:  # the rest is not in memory, or it is the end: that is not told apart here
            raise WouldWaitError
        return bytes(data)

    def pread_into(self, buffer: Buffer, position: int) -> int:
        """Fill ``buffer``; the number of bytes read, fewer than asked only at the end of the file."""
        with memoryview(buffer) as view, _Named("read", self.path):
            done = 0
            while done < len(view):
                count = os.preadv(self._fd, [view[done:]], position + done)
                if count == 0:
                    break
                done += count
            return done

    def pwrite(self, data: Buffer, position: int) -> None:
        """Write all of ``data``; raises DiskError if the device takes less."""
        with memoryview(data) as raw, raw.cast("B") as view, _Named("write", self.path):
            done = 0
            while done < len(view):
                count = os.pwrite(self._fd, view[done:], position + done)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Disk:
    """The calls that open, name and remove files."""

    #: Rights of what is made, whatever the umask; None leaves them to it.
    file_mode: int | None = 0o640
    directory_mode: int | None = 0o750
    #: Reading waits for nothing, for the one thread that says so.
    nonblocking = False

    def _may_wait(self) -> None:
        if self.nonblocking:
            raise WouldWaitError

    def open_read(self, path: Path) -> DiskFile:
        """Open for reading only: the sole way a broker's files are ever opened."""
        self._may_wait()
        with _Named("open", path):
            # Not blocking: a pipe of that name would wait for a writer for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                os.close(fd)
                raise OSError(errno.EINVAL, "it is no plain file")
            return DiskFile(path, fd, self)

    def open_write(self, path: Path, *, create: bool = False) -> DiskFile:
        """Open for reading and writing; ``create`` makes it, and fails if it is already there."""
        with _Named("create" if create else "open", path), opened(path.parent) as directory:
            return DiskFile(path, open_file_at(directory, path.name, self.file_mode, create=create), self)

    def open_or_create(self, path: Path) -> tuple[DiskFile, bool]:
        """Open for reading and writing, made where there is none; whether it was."""
        while True:
            for create in (False, True):
                try:
                    return self.open_write(path, create=create), create
                except DiskError as error:
                    # Another may make it, or remove it, in between.
                    if error.errno != (errno.EEXIST if create else errno.ENOENT):
                        raise

    def exists(self, path: Path) -> bool:
        """Whether anything has that name; a directory that may not be searched is an error, not an absence."""
        with MissingOk():
            return self.stamp(path) is not None
        return False

    def read(self, path: Path) -> bytes:
        """The whole of a small file."""
        with self.open_read(path) as file:
            return file.pread(file.size(), 0)

    def write_atomically(self, path: Path, data: bytes, *, durable: bool = True, like: Path | None = None) -> None:
        """Replace ``path`` by ``data``: temporary file, fsync, rename, fsync of the directory (decision 5).

        Without ``durable`` both fsyncs are left out: readers still never see half a file. With ``like`` it has the
        owner, the group and the rights of that before it has its name. One writer a file at a time.
        """
        temporary = path.with_name(path.name + TEMPORARY)
        if self.exists(temporary):  # of a writer that has died
            self.unlink(temporary)
        try:
            with self.open_write(temporary, create=True) as file:
                file.pwrite(data, 0)
                if like is not None:
                    self.give(temporary, like)
                if durable:
                    file.fsync()
            self.rename(temporary, path)
        except BaseException:
            with suppress(DiskError):  # the error itself is what has to be said
                self.unlink(temporary)
            raise
        if durable:
            self.sync_dir(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        """Rename, replacing a file that is there."""
        with _Named(f"rename {source} to", target), opened(source.parent) as here, opened(target.parent) as there:
            os.replace(source.name, target.name, src_dir_fd=here, dst_dir_fd=there)

    def link(self, source: Path, target: Path) -> None:
        """Give a file a second name, on the same file system; neither is a copy of the other."""
        with _Named(f"link {source} to", target), opened(source.parent) as here, opened(target.parent) as there:
            os.link(source.name, target.name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)

    def exchange(self, one: Path, other: Path) -> None:
        """Two names change places in one step, whatever they name; durable in each directory that is synced then.

        Raises DiskError: EINVAL or ENOSYS where it is not known, EXDEV between file systems, EBUSY for a mount point.
        """
        with _Named(f"exchange {one} with", other), opened(one.parent) as here, opened(other.parent) as there:
            if libc.renameat2(here, os.fsencode(one.name), there, os.fsencode(other.name), _RENAME_EXCHANGE) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def free(self, path: Path) -> int:
        """Bytes that this user may still allocate on the file system of ``path``."""
        with _Named("stat", path):
            return (status := os.statvfs(path)).f_bavail * status.f_frsize

    def give(self, path: Path, like: Path, rights: int | None = None) -> None:
        """``rights``, else those of ``like``; its owner and group, too, where root calls."""
        with _Named("change the owner of", path), opened(path.parent) as directory:
            wanted = like.stat()
            with closed(open_at(directory, path.name, os.O_RDONLY | os.O_NONBLOCK)) as fd:
                take_owner(fd, wanted)
                mask = 0o777 if stat.S_ISDIR(os.fstat(fd).st_mode) else 0o666
                os.fchmod(fd, (wanted.st_mode if rights is None else rights) & mask)

    def unlink(self, path: Path) -> None:
        """Remove; a file that is already gone is no error."""
        with _Named("remove", path), suppress(FileNotFoundError), opened(path.parent) as directory:
            os.unlink(path.name, dir_fd=directory)

    def remove_dir(self, path: Path) -> None:
        """Remove an empty directory."""
        with _Named("remove", path), opened(path.parent) as directory:
            os.rmdir(path.name, dir_fd=directory)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and all below; links go as links."""
        with _Named("remove", path), opened(path.parent) as directory:
            shutil.rmtree(path.name, dir_fd=directory)

    def list_dir(self, path: Path) -> list[tuple[str, int]]:
        """(name, size in bytes) of the plain files in ``path``, by name; files that vanish meanwhile are left out."""
        return [(name, stamp.size) for name, stamp in self.stamps(path).items()]

    def stamp(self, path: Path) -> Stamp:
        """The stamp of what has that name."""
        self._may_wait()
        try:  # not _Named: a query asks this of half a dozen files and directories
            return Stamp.of(os.stat(path))  # noqa: PTH116 - half the time of Path's own
        except OSError as error:
            raise DiskError("stat", path, error) from error

    def stamps(self, path: Path) -> dict[str, Stamp]:
        """The stamp of each plain file in ``path``, by name; files that vanish meanwhile are left out."""
        self._may_wait()
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
        self._may_wait()
        with _Named("list", path), os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())

    def make_dir(self, path: Path, *, durable: bool = True) -> None:
        """Make ``path`` and its parents; each is durable in its parent then, those found there included.

        Whoever made one before may have died before that. Without ``durable`` nothing is synced.
        """
        missing = list(takewhile(lambda step: not self.exists(step), (path, *path.parents)))
        found = missing[-1].parent if missing else path
        try:
            if durable:
                self.sync_dir(found.parent)
        except DiskError as error:
            if not error.is_forbidden:  # a parent that may not be read is another's, and older than this
                raise
        for step in reversed(missing):
            with _Named("make directory", step), suppress(FileExistsError), opened(step.parent) as directory:
                # As ``open_file_at`` makes a file; without a mode it is what the umask leaves of 0777.
                os.mkdir(step.name, 0o777 if self.directory_mode is None else 0o700, dir_fd=directory)
                with closed(open_at(directory, step.name, os.O_RDONLY | os.O_DIRECTORY)) as fd:
                    _settle(fd, directory, self.directory_mode)
            if durable:
                self.sync_dir(step.parent)
        if not path.is_dir():
            raise DiskError("use", path, OSError(errno.ENOTDIR, "it is not a directory"))

    def sync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        with _Named("open", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with closed(fd), _Named("fsync directory", path):
            os.fsync(fd)


class OutputDisk(Disk):
    """For what a user has written where he says, a report, a table, an export: his umask says who may read it."""

    file_mode = directory_mode = None


def used_ratio(path: Path) -> float:
    """How full the file system of ``path`` is, as the broker and ``df`` count it: of what is not kept for root alone.

    Raises DiskError.
    """
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise DiskError("stat", path, error) from error
    used = status.f_blocks - status.f_bfree
    return used / (used + status.f_bavail) if used + status.f_bavail else 0.0
