"""Every way indexd ends badly, one class a cause.

The message says what happened and where; ``hint`` says what the operator does next; ``exit_code`` is what the
process ends with. ``cli`` prints ``indexd: <message>; <hint>`` on one line and exits.
"""

from __future__ import annotations


class IndexdError(Exception):
    """An internal fault: a state that the code itself should have made impossible."""

    exit_code = 70
    default_hint = "this is a defect: please report it with the line above and the log around it"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = self.default_hint if hint is None else hint

    def line(self) -> str:
        """The one line an operator sees."""
        text = f"{self.args[0]}; {self.hint}" if self.hint else str(self.args[0])
        return " ".join(text.split())


class UsageError(IndexdError):
    """An option, a key of a configuration file or an argument is wrong."""

    exit_code = 2
    default_hint = "see indexd --help"


class UnsafeStoreError(IndexdError):
    """The store is not one that may be read or written as asked: wrong sizes, another owner, DLedger, missing."""

    exit_code = 3
    default_hint = "check --store"


class CorruptDataError(IndexdError):
    """Bytes that the store or the data directory vouches for do not hold."""

    exit_code = 4
    default_hint = "run indexd --recover"


class BusyError(IndexdError):
    """Another instance holds the data directory."""

    exit_code = 5
    default_hint = "stop it first, or use another --data"


class DiskError(IndexdError):
    """The file system refused: EIO, ENOSPC, EROFS, EMFILE, or a directory that cannot be made."""

    exit_code = 70
    default_hint = "free space, or mend the device or the permissions, and start again: nothing durable is lost"
