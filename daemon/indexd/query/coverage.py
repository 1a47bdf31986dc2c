"""Which part of the log an answer speaks for, and why an exact answer is empty."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from indexd.flush.frontier import Uncovered

ABSENT = "absent"
NOT_YET_INDEXED = "not yet indexed"
EXPIRED = "expired"
UNREADABLE = "unreadable"
CUT_OFF = "cut off"
NEVER_INDEXED = "never indexed"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Every message of log bytes ``[begin, end)`` is in the index, but for those of ``uncovered``.

    ``log_begin`` is where the log begins now, None without a segment; ``complete`` says that no message stands behind
    ``end``; ``daemon_pid`` is who keeps the index up to date, None if no one does.
    """

    begin: int
    end: int
    log_begin: int | None
    complete: bool
    uncovered: tuple[Uncovered, ...] = ()
    daemon_pid: int | None = None

    @property
    def has_gaps(self) -> bool:
        """Whether messages that are still in the log are missing from the index."""
        starts_late = self.log_begin is not None and self.log_begin < self.begin
        return not self.complete or bool(self.uncovered) or starts_late

    def to_json(self) -> dict[str, Any]:
        """The ``coverage`` member of an answer."""
        return {
            "begin": self.begin,
            "end": self.end,
            "logBegin": self.log_begin,
            "complete": self.complete,
            "uncovered": [[gap.begin, gap.end, gap.reason] for gap in self.uncovered],
            "daemonPid": self.daemon_pid,
        }


def make_coverage(
    begin: int,
    end: int,
    uncovered: tuple[Uncovered, ...],
    log_begin: int | None,
    *,
    complete: bool,
    daemon_pid: int | None,
) -> Coverage:
    """The coverage, with those uncovered ranges alone that hold log which is still there."""
    first = max(begin, log_begin or 0)
    met = tuple(gap for gap in uncovered if gap.end > first and gap.begin < end)
    return Coverage(begin, end, log_begin, complete, met, daemon_pid)


def why_empty(coverage: Coverage, *, expired: int, unreadable: int, cut_off: bool, never_indexed: bool) -> str:
    """What an exact answer without hits leaves open, ``absent`` if nothing; several reasons are joined by ``; ``."""
    if never_indexed:
        return NEVER_INDEXED
    reasons = [
        reason
        for reason, holds in (
            (EXPIRED, expired > 0),
            (UNREADABLE, unreadable > 0),
            (CUT_OFF, cut_off),
            (NOT_YET_INDEXED, coverage.has_gaps),
        )
        if holds
    ]
    return "; ".join(reasons) or ABSENT
