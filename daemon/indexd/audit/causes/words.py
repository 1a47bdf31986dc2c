"""Causes by their names, which programs rely on, and what people call them."""

from __future__ import annotations

from dataclasses import dataclass

_WORDS = {
    "unclean-stop": "unclean stop",
    "file-deleted": "index file deleted",
    "index-off": "indexing was off",
    "roll-over-failure": "roll-over to a new file failed",
    "log-replaced": "log cut or replaced",
    "not-dispatched-yet": "not dispatched yet",
    "behind-unreadable": "behind unreadable log",
    "file-damaged": "index file damaged",
    "log-damaged": "log damaged",
    "file-unreadable": "index file unreadable",
    "unknown": "no cause is evident",
}

#: Of holes that nobody mends before the log is mended.
LOG_CAUSES = frozenset({"behind-unreadable", "log-damaged"})


@dataclass(frozen=True, slots=True)
class Cause:
    """``what`` is a stable identifier for programs, ``words`` the same for people; ``evidence``: one line a fact."""

    what: str
    words: str
    evidence: tuple[str, ...] = ()


def make_cause(what: str, *evidence: str) -> Cause:
    """One of the known causes."""
    return Cause(what, _WORDS[what], evidence)


def counted(number: int, one: str, many: str) -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else many}"
