"""A directory by its descriptor: what is made, renamed or removed there lies in that directory and in no other.

Whoever may write to a directory may put a link there at any moment, and give a directory's name to a link. So no link
is followed in the last part of a path, and root follows only links of its own in what leads there: a service's user or
a broker's would else choose where root writes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FLAGS = os.O_PATH | os.O_CLOEXEC
_LINKS_MAX = 40  # as the kernel's own


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """A descriptor to name files in, and for nothing else (O_PATH). Raises OSError."""
    name = os.fspath(path)
    fd = _opened_by_root(Path(name)) if os.geteuid() == 0 else os.open(name, _FLAGS | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def open_at(directory: int, name: str, flags: int, mode: int = 0) -> int:
    """As ``os.open``, but for links: they are refused, wherever they lead."""
    try:
        return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link") from None
        raise


def open_file_at(directory: int, name: str) -> int:
    """Open a plain file for reading and writing."""
    fd = open_at(directory, name, os.O_RDWR)
    try:
        own = os.fstat(fd)
        if not stat.S_ISREG(own.st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        if os.geteuid() == 0 and own.st_uid != os.fstat(directory).st_uid:
            _refuse_other_names(own)
    except BaseException:
        os.close(fd)
        raise
    return fd


def make_file_at(directory: int, name: str, mode: int | None) -> int:
    """Make a file with exactly these rights, None for what the umask leaves of 0644; root's is the directory's owner's.

    Open for reading and writing.
    """
    fd = open_at(directory, name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644 if mode is None else 0o600)
    try:
        _settle(fd, directory, mode)
    except BaseException:
        os.close(fd)
        os.unlink(name, dir_fd=directory)
        raise
    return fd


def make_dir_at(directory: int, name: str, mode: int | None) -> None:
    """Make a directory, as ``make_file_at`` makes a file; None is what the umask leaves of 0777."""
    os.mkdir(name, 0o777 if mode is None else 0o700, dir_fd=directory)
    fd = open_at(directory, name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _settle(fd, directory, mode)
    finally:
        os.close(fd)


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
    left = list(reversed(path.parts))
    links = 0
    fd = os.open(".", _FLAGS | os.O_DIRECTORY)
    try:
        while left:
            name = left.pop()
            step = os.open(name, _FLAGS | os.O_NOFOLLOW, dir_fd=fd)
            status = os.fstat(step)
            if not stat.S_ISLNK(status.st_mode):
                os.close(fd)
                fd = step
                continue
            target = os.readlink("", dir_fd=step)
            os.close(step)
            links += 1
            if status.st_uid != 0:
                raise OSError(errno.ELOOP, f"{name} is a link of user {status.st_uid}, and root follows only its own")
            if links > _LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            left += reversed(Path(target).parts)
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except BaseException:
        os.close(fd)
        raise
    return fd
