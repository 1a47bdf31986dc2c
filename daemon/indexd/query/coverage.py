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
from indexd.errors import DiskError
from indexd.flush.frontier import Frontier, Uncovered
from indexd.query.log import FrameScan, LogView
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
MOVED = "the queue lacks messages, or has others in their places"
_ZEROS = Reason.ZEROS_BEFORE_END.text
# Frames that are walked to find the end of the log, before its distance is only said to be more than that.
_BEHIND_FRAMES_MAX = 2000


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


class Known(NamedTuple):
    """What an index knows of the log: bytes ``[begin, end)``, but for ``uncovered``.

    ``published``: how far queues are, None: by their marks. ``stale_head``: how bytes at ``end`` begin that the broker
    did not know; None for nothing.
    """

    begin: int
    end: int
    uncovered: tuple[Uncovered, ...]
    published: int | None
    stale_head: bytes | None


def make_coverage(known: Known, log: LogView, behind: Behind | None, daemon_pid: int | None) -> Coverage:
    """The coverage, with those uncovered ranges alone that hold log which is still there.

    ``behind``: where a running daemon stands at bytes that are no frame; without it the log itself is looked at.
    """
    first, end = max(known.begin, log.begin or 0), known.end
    met = tuple(gap for gap in known.uncovered if gap.end > first and gap.begin < end)
    return Coverage(known.begin, end, log.begin, behind or find_behind(log, end, known.stale_head), met, daemon_pid)


def find_behind(log: LogView, end: int, stale_head: bytes | None = None) -> Behind | None:
    """What may be a message at ``end`` or behind it; None when the log ends there, be it in zeros that are not used.

    It does where ``stale_head`` still stands there: nothing was written since the broker named that end.
    """
    if stale_head:
        with log.frame_reader() as frames:
            if frames.read(end, end + len(stale_head)) == stale_head:
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
        framed = log.frame(phy_offset, log.frame_size_max)
        return framed.reason if isinstance(framed, Corrupt) else None
    return found.reason if isinstance(found, Corrupt) else Reason.CUT_OFF.text


def why_empty(coverage: Coverage, log: LogView, *, expired: int, unreadable: int, never_indexed: bool = False) -> str:
    """What an answer without hits leaves open, ``absent`` if nothing; several reasons are joined by ``; ``."""
    if never_indexed:
        return NEVER_INDEXED
    reasons = []
    if expired:
        reasons.append(EXPIRED)
    if unreadable:
        reasons.append(UNREADABLE)
    return "; ".join(reasons + gaps_in_words(coverage, log)) or ABSENT


def gaps_in_words(coverage: Coverage, log: LogView | None) -> list[str]:
    """Why an answer is not complete, nothing if it is; ``log``: to be measured how far the index is behind it."""
    words = [CUT_OFF] if coverage.is_cut_off else []
    behind = coverage.behind
    if behind is not None and behind.reason is not None:
        words.append(f"{NOT_KNOWN} {behind.phy_offset}: {behind.reason}")
    elif behind is not None:
        far = f"the log from physical offset {coverage.end} on" if log is None else f"{_behind(coverage, log)} behind"
        words.append(f"{NOT_YET_INDEXED}: {far}")
    if coverage.starts_late:
        words.append(f"{BEFORE_BEGIN}: that is at {coverage.begin}, the log begins at {coverage.log_begin}")
    if coverage.uncovered:
        size = sum(gap.end - gap.begin for gap in coverage.uncovered)
        reasons = sorted({gap.reason for gap in coverage.uncovered})
        words.append(f"{LEFT_OUT}: {size} bytes of the log ({', '.join(reasons)})")
    return words


def why_not_complete(coverage: Coverage) -> str | None:
    """The same in one line, nothing measured; None for one that is complete."""
    return "; ".join(gaps_in_words(coverage, None)) or None


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


def progress(frontier: Frontier, state: dict[str, Any], pid: int | None) -> Known:
    """By the word of the daemon ``pid`` that runs, else by the frontier."""
    if state.get("pid") != pid or not isinstance(state.get("phyOffset"), int):
        return Known(frontier.begin_offset, frontier.phy_offset, frontier.uncovered, None, frontier.stale_head)
    begin = state.get("beginOffset", frontier.begin_offset)
    uncovered = frontier.uncovered
    if isinstance(state.get("uncovered"), list):
        uncovered = tuple(Uncovered(int(first), int(last), str(why)) for first, last, why in state["uncovered"])
    published = state["phyOffset"]
    if isinstance(state.get("filledOffset"), int):
        published = min(published, state["filledOffset"])
    elif frontier.filled_offset < frontier.phy_offset:
        published = min(published, frontier.filled_offset)
    try:
        stale_head = bytes.fromhex(state.get("staleHead") or "")
    except (TypeError, ValueError):
        stale_head = None
    return Known(int(begin), state["phyOffset"], uncovered, published, stale_head)


def stands_at(state: dict[str, Any], pid: int | None) -> Behind | None:
    """Where the daemon that runs stands at bytes that are no frame; None if it does not."""
    corrupt = state.get("corrupt")
    if state.get("pid") != pid or not isinstance(corrupt, dict):
        return None
    return Behind(int(corrupt["offset"]), str(corrupt["reason"]))


def read_state(disk: Disk, path: Path) -> dict[str, Any]:
    """DATA/state. A hint only: whatever cannot be read says nothing."""
    try:
        row = json.loads(disk.read(path))
    except (DiskError, ValueError):
        return {}
    return row if isinstance(row, dict) else {}
