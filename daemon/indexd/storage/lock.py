"""Locks: one instance per data directory; whether a broker has a store open; where a process listens.

DirectoryLock is ``flock`` on DATA/lock. The kernel drops it with the process, however it dies, so a lock file that is
left behind means nothing. It holds the pid of the last owner for the message that a second instance prints.

A broker opens STORE/lock when it is made, reads and recovers the whole store, and only then locks byte 0 (spec
rocketmq-store 6.3). So a lock that is held says that it runs; before that only the open file does. A look locks
nothing, it asks (F_GETLK). Whoever keeps brokers away takes a StoreLock, which a look can tell from theirs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import os
import re
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from indexd.config.units import RemotePath
from indexd.errors import BusyError, DiskError, MissingOk
from indexd.storage.disk import Disk, DiskFile, closed, libc


class _LockFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: DiskFile | None = None

    def release(self) -> None:
        """Give the lock back; the file stays, so that no one can hold a lock on a name that is gone."""
        if self._file is not None:
            self._file.close()
            self._file = None


class DirectoryLock(_LockFile):
    """Held from ``acquire`` to ``release``."""

    def acquire(self) -> None:
        """Take the lock or raise BusyError naming the owner.

        One that is held already, on a file that has lost its name, is kept until then.
        """
        file, _ = Disk().open_or_create(self._path)
        if not try_exclusive(file.fileno()):
            owner = file.pread(32, 0).decode("ascii", "replace").strip() or "unknown"
            file.close()
            raise BusyError(f"{self._path.parent} is in use by another indexd, pid {owner}")
        self.release()
        self._file = file
        file.truncate(0)
        file.pwrite(f"{os.getpid()}\n".encode(), 0)

    def renew(self) -> bool:
        """Take the lock again if its file is not the one that was locked any more; whether it was not.

        BusyError if another instance has it by now.
        """
        with MissingOk():
            if self._file is not None and Disk().stamp(self._path).inode == self._file.stamp().inode:
                return False
        self.acquire()
        return True


def try_exclusive(fd: int) -> bool:
    """Take ``flock`` on an open file, until it is closed; False while another process has it."""
    # A query that asks owner_pid() holds a shared lock for microseconds; that is no other instance.
    for pause in (0.02, 0.05, 0.1, 0):
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(pause)
    return False


def owner_pid(path: Path) -> int | None:
    """The pid of the instance that holds the lock now, or None if no one does."""
    try:
        with closed(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except FileNotFoundError:
        return None
    except BlockingIOError:
        text = Disk().read(path).decode("ascii", "replace").strip()
        return int(text) if text.isdecimal() else 0
    except OSError as error:
        raise DiskError("open", path, error) from error


# struct flock of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid, padding.
_FLOCK = struct.Struct("@hhqqi0q")
_BYTE_0 = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
#: What F_GETLK says for the pid of a lock that belongs to an open file and not to a process; Java takes none of those.
OURS = -1
_BROKER = re.compile(rb"org\.apache\.rocketmq\.(?:broker|container|proxy)\.")
# statfs f_type of file systems whose locks need not reach us, or need not be the other host's: man 2 statfs.
_SHARED = {
    0x6969: "NFS", 0x517B: "SMB", 0xFE534D42: "SMB", 0xFF534D42: "CIFS", 0x00C36400: "Ceph", 0x01021997: "9P",
    0x65735546: "FUSE", 0x47504653: "GPFS", 0x0BD00BD0: "Lustre", 0x01161970: "GFS2", 0x7461636F: "OCFS2",
}  # fmt: skip
_DELETED = " (deleted)"
_FLAGS = re.compile(r"^flags:\s*([0-7]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class BrokerLock:
    """What the lock says. ``alive`` is None when it cannot be told; ``why`` says so, or what else is to be known.

    ``how`` is ``lock`` for a broker that runs, ``proc`` for one that loads its store (or just ends), ``none`` when
    neither was seen, ``unknown`` when the look itself was not possible. ``pid`` is None for one of another pid
    namespace or host.
    """

    alive: bool | None
    pid: int | None
    how: Literal["lock", "proc", "none", "unknown"]
    why: str | None = None


class StoreLock(_LockFile):
    """Byte 0 of STORE/lock, locked as a broker locks it, from ``take`` to ``release``: none starts meanwhile.

    The lock belongs to the open file (F_OFD_SETLK): one of the process would go with the first descriptor of that file
    that anybody in it closes. ``flock``, which brokers do not take, tells another of these from a broker.
    """

    #: The file was not there.
    is_new = False

    def take(self) -> bool:
        """False while a broker has it; makes the file where there is none. Raises BusyError, DiskError."""
        self._file, self.is_new = Disk().open_or_create(self._path)
        if not try_exclusive(self._file.fileno()):
            self.release()
            raise BusyError(f"another indexd repair is at work in {self._path.parent}", "wait for its end")
        try:
            fcntl.fcntl(self._file.fileno(), fcntl.F_OFD_SETLK, _BYTE_0)
        except (BlockingIOError, PermissionError):
            self.release()
            return False
        except OSError as error:
            self.release()
            raise DiskError("lock", self._path, error) from error
        return True

    def other(self, proc: Path = Path("/proc")) -> int | None:
        """Another process that has the file open for writing: a broker that began to load its store; None for none."""
        return None if self._file is None else _opener(proc, self._path, os.fstat(self._file.fileno()))[0]


def look_at_lock(path: Path, proc: Path = Path("/proc")) -> BrokerLock:
    """Look at STORE/lock, and whether one of the processes in ``proc`` has it open; never raises, locks or writes."""
    if isinstance(path, RemotePath):
        return BrokerLock(False, None, "none", f"{path.parent} is a copy behind a URI")
    try:
        with closed(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)) as fd:
            return _look(fd, path, proc)
    except FileNotFoundError:
        # Whoever had it open when it was removed has it still.
        pid = _opener(proc, path, None)[0]
        if pid is not None:
            return BrokerLock(True, pid, "proc", f"{path} was removed while a broker has it open")
        return BrokerLock(False, None, "none", f"there is no {path}: no broker since 4.2 has opened this store")
    except OSError as error:
        return BrokerLock(None, None, "unknown", f"cannot look at {path}: {error.strerror}")


def _look(fd: int, path: Path, proc: Path) -> BrokerLock:
    kind, _, _, _, holder = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, _BYTE_0))
    if kind != fcntl.F_UNLCK and holder <= OURS:
        return BrokerLock(False, None, "none", "indexd repair holds its lock: no broker can start meanwhile")
    if kind != fcntl.F_UNLCK:
        why = None if holder else "its process cannot be seen from here: another pid namespace, or another host"
        return BrokerLock(True, holder or None, "lock", why)
    pid, hidden = _opener(proc, path, os.fstat(fd))
    if pid is not None:
        return BrokerLock(True, pid, "proc", "it has the lock file open and does not hold the lock: it is loading")
    if hidden is not None:
        why = (
            f"the lock is free, and process {hidden}, a broker by its command line, may not be looked into: "
            "it may be loading this store; run as its user"
        )
        return BrokerLock(None, None, "unknown", why)
    shared = _SHARED.get(_file_system(fd))
    if shared is not None:
        return BrokerLock(None, None, "unknown", f"the lock is free here, but {path} is on {shared}: ask its host")
    return BrokerLock(False, None, "none")


def _opener(proc: Path, path: Path, status: os.stat_result | None) -> tuple[int | None, int | None]:
    # A process that has the file open for writing, and else one that is a broker and may not be looked into.
    hidden = None
    numbers = {int(process.name) for process in proc.glob("[0-9]*") if process.name.isdecimal()}
    for pid in sorted(numbers - {os.getpid()}):
        try:
            if _has_open(proc / str(pid), path, status):
                return pid, None
        except PermissionError:
            if hidden is None and _is_broker(proc / str(pid)):
                hidden = pid
        except OSError:
            continue  # it has ended
    return None, hidden


def _has_open(process: Path, path: Path, status: os.stat_result | None) -> bool:
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            target = str(link.readlink())
            # Its name first: a look at each open file may wait for a server that is gone.
            if not target.removesuffix(_DELETED).endswith("/" + path.name):
                continue
            is_it = os.path.samestat(link.stat(), status) if status else target == f"{path.resolve()}{_DELETED}"
            # Whoever looks as we do has it open for reading only.
            flags = _FLAGS.search((process / "fdinfo" / link.name).read_text("ascii")) if is_it else None
            if flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                return True
    return False


def _is_broker(process: Path) -> bool:
    # Everybody may read a command line.
    try:
        return _BROKER.search((process / "cmdline").read_bytes()) is not None
    except OSError:
        return False


def _file_system(fd: int) -> int:
    # f_type is the first field of struct statfs, which os.statvfs leaves out.
    answer = (ctypes.c_long * 64)()
    if libc.fstatfs(fd, ctypes.byref(answer)) != 0:
        code = ctypes.get_errno() or errno.EIO
        raise OSError(code, os.strerror(code))
    return int(answer[0]) & 0xFFFFFFFF


def listening(pid: int) -> dict[int, str]:
    """Port -> host by which it is reached from here; OSError where that cannot be seen."""
    import psutil  # noqa: PLC0415 - a broker's port is asked for once

    if Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink():
        raise OSError(0, "it has a network of its own")
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.Error as error:
        raise OSError(0, str(error)) from error
    # Of a port that is open for both kinds of address, the one of IPv4.
    found.sort(key=lambda connection: connection.family == socket.AF_INET)
    return {each.laddr.port: _host(each.laddr.ip) for each in found if each.status == psutil.CONN_LISTEN}


def _host(text: str) -> str:
    address = ipaddress.ip_address(text)
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_unspecified:
        return "127.0.0.1"  # Java's :: takes both
    return f"[{address}]" if address.version == 6 else str(address)
