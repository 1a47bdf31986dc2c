"""Which part of the log an answer speaks for, and why an exact answer is empty."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from indexd.commitlog.decoder import Message
from indexd.flush.frontier import Uncovered
from indexd.query.frames import FrameScan
from indexd.query.log import LogView

ABSENT = "absent"
NOT_YET_INDEXED = "not yet indexed"
EXPIRED = "expired"
UNREADABLE = "unreadable"
CUT_OFF = "cut off"
NEVER_INDEXED = "never indexed"
BEFORE_BEGIN = "before the index begins"
LEFT_OUT = "left out"
ABSENT_BEFORE = "absent before the cursor"
BEHIND_LAST = "behind the last message"
# Frames that are walked to find the end of the log, before its distance is only said to be more than that.
_BEHIND_FRAMES_MAX = 2000


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
    def starts_late(self) -> bool:
        """Whether the log has messages from before the index begins."""
        return self.log_begin is not None and self.log_begin < self.begin

    @property
    def has_gaps(self) -> bool:
        """Whether messages that are still in the log are missing from the index."""
        return not self.complete or bool(self.uncovered) or self.starts_late

    def up_to(self, before: int) -> Coverage:
        """The same for messages before that physical offset alone: complete when all of them are indexed."""
        begin = self.begin if self.log_begin is None or self.log_begin < before else min(self.begin, self.log_begin)
        met = tuple(gap for gap in self.uncovered if gap.begin < before)
        complete = self.complete or before <= self.end
        return replace(self, begin=begin, end=min(self.end, before), complete=complete, uncovered=met)

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


def why_empty(
    coverage: Coverage, log: LogView, *, expired: int, unreadable: int, cut_off: bool, never_indexed: bool = False
) -> str:
    """What an answer without hits leaves open, ``absent`` if nothing; several reasons are joined by ``; ``."""
    if never_indexed:
        return NEVER_INDEXED
    reasons = []
    if expired:
        reasons.append(EXPIRED)
    if unreadable:
        reasons.append(UNREADABLE)
    if cut_off:
        reasons.append(CUT_OFF)
    return "; ".join(reasons + gaps_in_words(coverage, log)) or ABSENT


def gaps_in_words(coverage: Coverage, log: LogView) -> list[str]:
    """Which messages of the log an answer does not speak for: not indexed yet, with how far behind, older, left out."""
    words = []
    if not coverage.complete:
        words.append(f"{NOT_YET_INDEXED}: {_behind(coverage, log)} behind")
    if coverage.starts_late:
        words.append(f"{BEFORE_BEGIN}: that is at {coverage.begin}, the log begins at {coverage.log_begin}")
    if coverage.uncovered:
        size = sum(gap.end - gap.begin for gap in coverage.uncovered)
        reasons = sorted({gap.reason for gap in coverage.uncovered})
        words.append(f"{LEFT_OUT}: {size} bytes of the log ({', '.join(reasons)})")
    return words


def expired_in_words(coverage: Coverage) -> str | None:
    """What cannot be found in the log any more, whatever the index says; None while the log is there from its begin.

    No gap of the index: an answer speaks for the log as it is.
    """
    if not coverage.log_begin:
        return None
    return f"the log begins at physical offset {coverage.log_begin}: what was before has expired"


def _behind(coverage: Coverage, log: LogView) -> str:
    # A segment behind another is begun only when that is full, so the newest one with a message holds the end.
    newest = max((s.base for s in log.segments if s.base > coverage.end and _has_message(log, s.base)), default=0)
    end, frames = max(coverage.end, newest), 0
    for frame in FrameScan(log).frames(end, log.segments[-1].end if log.segments else end):
        end, frames = frame.phy_offset + frame.size, frames + 1
        if frames == _BEHIND_FRAMES_MAX:
            return f"more than {end - coverage.end} bytes"
    return f"{end - coverage.end} bytes"


def _has_message(log: LogView, phy_offset: int) -> bool:
    return isinstance(log.at(phy_offset), Message)
