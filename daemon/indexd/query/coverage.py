"""Which part of the log an answer speaks for, and why an exact answer is empty.

How far an index stands: by the word of the daemon that runs, else by its frontier.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from indexd.commitlog.decoder import Decoded, Message
from indexd.commitlog.format import BLANK_SIZE, Corrupt, EndOfFile, NotYetWritten, Reason
from indexd.commitlog.lookup import LogView
from indexd.errors import DiskError
from indexd.flush.frontier import Frontier, Uncovered
from indexd.storage.disk import Disk

ABSENT = "absent"
NOT_KNOWN = "not known behind offset"
NOT_YET_INDEXED = "not yet indexed"
EXPIRED = "expired"
UNREADABLE = "unreadable"
CUT_OFF = "cut off"
NEVER_INDEXED = "never indexed"
BEFORE_BEGIN = "before the index begins"
LEFT_OUT = "left out"
ABSENT_BEFORE = "absent before the cursor"
BEHIND_LAST = "behind the last message"
LOG_ENDS = "the log ends before it by now"
REWRITTEN = "the log was written since, and not behind it: it may have been cut"
MOVED = "the queue lacks messages, or has others in their places"
_ZEROS = Reason.ZEROS_BEFORE_END.text


class Behind(NamedTuple):
    """What the log holds behind an index, at ``phy_offset``: a message, or for a ``reason`` bytes that are no frame."""

    phy_offset: int
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Coverage:
    """Every message of log bytes ``[begin, end)`` is in the index, but for those of ``uncovered``.

    ``log_begin`` is where the log begins now, None without a segment; ``behind`` what it holds behind ``end``, None for
    nothing; ``daemon_pid`` is who keeps the index up to date, None if no one does. ``is_cut_off``: the answer was ended
    before all that is covered had been looked at.
    """

    begin: int
    end: int
    log_begin: int | None
    behind: Behind | None = None
    uncovered: tuple[Uncovered, ...] = ()
    daemon_pid: int | None = None
    is_cut_off: bool = False

    @property
    def starts_late(self) -> bool:
        """Whether the log has messages from before the index begins."""
        return self.log_begin is not None and self.log_begin < self.begin

    @property
    def complete(self) -> bool:
        """Whether an answer speaks for every message that is still in the log; ``gaps_in_words`` says why not."""
        return not (self.behind or self.uncovered or self.starts_late or self.is_cut_off)

    @property
    def passed_over(self) -> tuple[Uncovered, ...]:
        """The uncovered ranges that a scan of the log leaves out; one that was written anew is read as it is now."""
        return tuple(gap for gap in self.uncovered if gap.reason != REWRITTEN)

    def up_to(self, before: int) -> Coverage:
        """The same for messages before that physical offset alone."""
        begin = self.begin if self.log_begin is None or self.log_begin < before else min(self.begin, self.log_begin)
        met = tuple(gap for gap in self.uncovered if gap.begin < before)
        behind = self.behind if before > self.end else None
        return replace(self, begin=begin, end=min(self.end, before), behind=behind, uncovered=met)

    def to_json(self) -> dict[str, Any]:
        """The ``coverage`` member of an answer; ``why`` where it is not complete."""
        why = why_not_complete(self)
        return {
            "begin": self.begin,
            "end": self.end,
            "logBegin": self.log_begin,
            "complete": self.complete,
            **({} if why is None else {"why": why}),
            "uncovered": [[gap.begin, gap.end, gap.reason] for gap in self.uncovered],
            "daemonPid": self.daemon_pid,
        }


def make_coverage(
    frontier: Frontier, state: dict[str, Any], pid: int | None, log: LogView
) -> tuple[Coverage, int | None]:
    """The coverage by the word of the daemon ``pid`` that runs, else by the frontier; and how far its queues are.

    None for the latter: by their marks. Only those uncovered ranges count that hold log which is still there. Where the
    daemon does not say that it stands at bytes that are no frame, the log itself is looked at.
    """
    begin, end, uncovered = frontier.begin_offset, frontier.phy_offset, frontier.uncovered
    published, behind, stale_head = None, None, frontier.stale_head
    if state.get("pid") == pid and "phyOffset" in state:
        begin, end = state.get("beginOffset", begin), state["phyOffset"]
        uncovered = tuple(Uncovered(*row) for row in state.get("uncovered", uncovered))
        published, stale_head = min(end, state.get("filledOffset", end)), bytes.fromhex(state.get("staleHead") or "")
        corrupt = state.get("corrupt")
        behind = None if corrupt is None else Behind(corrupt["offset"], corrupt["reason"])
    first = max(begin, log.begin or 0)
    met = tuple(gap for gap in uncovered if gap.end > first and gap.begin < end)
    return Coverage(begin, end, log.begin, behind or find_behind(log, end, stale_head), met, pid), published


def find_behind(log: LogView, end: int, stale_head: bytes | None = None) -> Behind | None:
    """What may be a message at ``end`` or behind it; None when the log ends there, be it in zeros that are not used.

    It does where ``stale_head`` still stands there: nothing was written since the broker named that end.
    """
    if stale_head and log.read(end, end + len(stale_head)) == stale_head:
        return None
    zeros = blank = None
    for segment in log.segments:
        if segment.end <= end:
            continue
        at = max(end, segment.base)
        found = log.at(at)
        if isinstance(found, EndOfFile) and zeros is None:
            blank = at
        if found is None or blank == at:
            continue
        if not isinstance(found, NotYetWritten) or found.needed:
            return Behind(at, _why_no_message(log, at, found)) if zeros is None else Behind(zeros, _ZEROS)
        if zeros is None:
            zeros, written = at, log.written_end(at)
            if written > at:
                return Behind(at, f"zeros before bytes that are written, up to {written}")
    if blank is not None and log.written_end(blank + BLANK_SIZE) > blank + BLANK_SIZE:
        return Behind(blank, Reason.BLANK_BEFORE_FRAMES.text)
    return None


def _why_no_message(log: LogView, phy_offset: int, found: Decoded) -> str | None:
    if isinstance(found, Message):  # by its lengths alone so far
        framed = log.frame(phy_offset, log.options.frame_size_max)
        return framed.reason if isinstance(framed, Corrupt) else None
    return found.reason if isinstance(found, Corrupt) else Reason.CUT_OFF.text


def why_empty(coverage: Coverage, *, expired: int, unreadable: int, never_indexed: bool = False) -> str:
    """What an answer without hits leaves open, ``absent`` if nothing; several reasons are joined by ``; ``."""
    if never_indexed:
        return NEVER_INDEXED
    reasons = [EXPIRED] * bool(expired) + [UNREADABLE] * bool(unreadable)
    return "; ".join(reasons + gaps_in_words(coverage)) or ABSENT


def gaps_in_words(coverage: Coverage) -> list[str]:
    """Why an answer is not complete, nothing if it is."""
    words, behind = [CUT_OFF] if coverage.is_cut_off else [], coverage.behind
    if behind is not None and behind.reason is not None:
        words.append(f"{NOT_KNOWN} {behind.phy_offset}: {behind.reason}")
    elif behind is not None:
        words.append(f"{NOT_YET_INDEXED}: the log from physical offset {coverage.end} on")
    if coverage.starts_late:
        words.append(f"{BEFORE_BEGIN}: that is at {coverage.begin}, the log begins at {coverage.log_begin}")
    if coverage.uncovered:
        size = sum(gap.end - gap.begin for gap in coverage.uncovered)
        reasons = sorted({gap.reason for gap in coverage.uncovered})
        words.append(f"{LEFT_OUT}: {size} bytes of the log ({', '.join(reasons)})")
    return words


def why_not_complete(coverage: Coverage) -> str | None:
    """The same in one line; None for one that is complete."""
    return "; ".join(gaps_in_words(coverage)) or None


def expired_in_words(coverage: Coverage) -> str | None:
    """What cannot be found in the log any more, whatever the index says; None while the log is there from its begin.

    No gap of the index: an answer speaks for the log as it is.
    """
    if not coverage.log_begin:
        return None
    return f"the log begins at physical offset {coverage.log_begin}: what was before has expired"


def read_state(disk: Disk, path: Path) -> dict[str, Any]:
    """DATA/state. A hint only: whatever cannot be read says nothing."""
    try:
        row = json.loads(disk.read(path))
    except (DiskError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}
