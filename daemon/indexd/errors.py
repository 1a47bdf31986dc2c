"""Every way indexd ends badly, one class a cause.

The message says what happened and where; ``hint`` says what the operator does next; ``exit_code`` is what the
process ends with. ``cli`` prints ``indexd: <message>; <hint>`` on one line and exits.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any


class IndexdError(Exception):
    """An internal fault: a state that the code itself should have made impossible."""

    exit_code = 70
    default_hint = "this is a defect: please report it with the line above and the log around it"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = self.default_hint if hint is None else hint
        if self.hint:
            self.add_note(self.hint)  # of what a data source raises, Spark shows the traceback

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as what it is, whatever its constructor asks for: errors come back from other processes."""
        return _unpickled, (type(self), self.args), self.__dict__

    def line(self) -> str:
        """The one line an operator sees."""
        text = f"{self.args[0]}; {self.hint}" if self.hint else str(self.args[0])
        return " ".join(text.split())


def _unpickled(kind: type[IndexdError], args: tuple[Any, ...]) -> IndexdError:
    return kind.__new__(kind, *args)


class NoRoomError(IndexdError):
    """The system gives no more memory, or no thread."""

    default_hint = "give it more memory, or more threads (TasksMax of its unit, ulimit -u)"

    @classmethod
    def of(cls, error: BaseException) -> NoRoomError | None:
        """What stands for Python's own ``error``; None for any other."""
        if isinstance(error, MemoryError):
            return cls("there is no memory left")
        is_thread = isinstance(error, RuntimeError) and "start new thread" in str(error)
        return cls("there is no memory for another thread") if is_thread else None


class UsageError(IndexdError):
    """An option, a key of a configuration file or an argument is wrong."""

    exit_code = 2
    default_hint = "see indexd --help"


class UnsafeStoreError(IndexdError):
    """The store is not one that may be read or written as asked: wrong sizes, another owner, DLedger, missing."""

    exit_code = 3
    default_hint = "check --store"


class MissingStoreError(UnsafeStoreError):
    """There is no commitlog at all: not mounted, moved, or not made yet."""


class CorruptDataError(IndexdError):
    """Bytes that the store or the data directory vouches for do not hold."""

    exit_code = 4
    default_hint = "run indexd --recover"


class DisturbedError(CorruptDataError):
    """What the index stands on is not what it was: the log was rewritten, or somebody touched our files.

    A running daemon recovers and goes on; whoever runs once ends with it.
    """


class CrashLoopError(IndexdError):
    """The daemon ended again and again before it had caught up: somebody has to look first."""


class BusyError(IndexdError):
    """Another instance holds the data directory."""

    exit_code = 5
    default_hint = "stop it first, or use another --data"


class DiskError(IndexdError):
    """A system call failed: EIO, ENOSPC, EROFS, EMFILE, a directory that cannot be made.

    ``errno`` says how, so that a caller can tell a file that expired from a disk that died.
    """

    exit_code = 70
    default_hint = "mend the device or the file system and start again: nothing durable is lost"

    def __init__(self, operation: str, path: Path, error: OSError) -> None:
        super().__init__(f"cannot {operation} {path}: {error.strerror or error}", _DISK_HINTS.get(error.errno or 0))
        self.operation = operation
        self.path = path
        self.errno = error.errno

    @property
    def is_full(self) -> bool:
        """No space or no quota."""
        return self.errno in (errno.ENOSPC, errno.EDQUOT)

    @property
    def is_forbidden(self) -> bool:
        """This user may not, or nobody may write there."""
        return self.errno in (errno.EACCES, errno.EPERM, errno.EROFS)

    @property
    def is_transient(self) -> bool:
        """It may go by itself or by an operator's hand, and trying again harms nothing.

        Whatever only looks may be tried again. What changes a file may be when nothing was changed for want of space,
        right, descriptors or a directory. A failed fsync never: the kernel may have dropped what it could not write.
        """
        return self.operation in _LOOKS or (not self.operation.startswith("fsync") and self.errno in _TRANSIENT)

    @property
    def is_missing(self) -> bool:
        """The file or its directory is not there (any more)."""
        return self.errno in (errno.ENOENT, errno.ENOTDIR)


class SparkError(IndexdError):
    """A job on Spark failed, was lost, or Spark itself did not start."""

    default_hint = "what failed is in the line above; indexd doctor shows what Spark is started with"


class SparkMissingError(SparkError):
    """What the Spark pipeline needs is not installed here: pyspark, pandas, pyarrow, a Java."""

    exit_code = 2
    default_hint = "pip install 'rocketmq-indexd[spark]'"


_LOOKS = frozenset({"open", "read", "stat", "list"})
_TRANSIENT = frozenset(
    {
        errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
        errno.ENOENT,
    }
)  # fmt: skip

_DISK_HINTS = {
    errno.ENOSPC: "free space on that file system; nothing durable is lost",
    errno.EDQUOT: "raise the quota of this user; nothing durable is lost",
    errno.EROFS: "remount the file system read-write, or use another --data",
    errno.EACCES: "give this user the permission, or run as the user that owns the files",
    errno.EPERM: "give this user the permission, or run as the user that owns the files",
    errno.EMFILE: "raise LimitNOFILE (ulimit -n)",
    errno.ENFILE: "raise fs.file-max",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a directory is expected there",
    errno.EISDIR: "a file is expected there",
    errno.EEXIST: "remove it, or choose another place",
    errno.EINVAL: "a plain file is expected there, and no link to anything else",
    errno.ELOOP: "it is a symbolic link, or a circle of them: put what it leads to in its place, or run as its owner",
    errno.EMLINK: "remove it, or make it a file of its own",
}


class MissingOk:
    """Passes over the DiskError of a file or folder that is not there: it may have expired."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: object, _trace: object) -> bool:
        return isinstance(error, DiskError) and error.is_missing
