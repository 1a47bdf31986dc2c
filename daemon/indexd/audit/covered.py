"""Which part of the log all tasks have read: where it began and ended, what could not be read, what was gone before.

What cannot be read, or is missing between two segments, is a finding: keys of messages there may be asked for, and
nobody can say whether they are findable.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from indexd.audit.notes import Notes
from indexd.audit.part import Gap, Part
from indexd.audit.plan import AuditPlan

MISSING, UNREADABLE = "log-missing", "log-unreadable"
#: Findings that are none of the index files.
LOG_FINDINGS = frozenset({MISSING, UNREADABLE})


def joined(gaps: Iterable[Gap]) -> list[Gap]:
    """Gaps in log order, those that a cut between two tasks has parted put together again."""
    found: list[Gap] = []
    for gap in gaps:
        last = found[-1] if found else None
        if last is not None and last.end == gap.begin and last.reason == gap.reason:
            found[-1] = Gap(last.begin, gap.end, gap.reason, last.entries + gap.entries)
        else:
            found.append(gap)
    return found


def note_gaps(gaps: Sequence[Gap], notes: Notes) -> None:
    """A finding each; its file is the log as a whole, and its position a physical offset."""
    for gap in gaps:
        entries = f"{gap.entries:,} {'entry names' if gap.entries == 1 else 'entries name'} messages there"
        text = f"up to {gap.end}: {gap.reason}; {entries}"
        notes.add("commitlog", gap.begin, MISSING if gap.is_missing else UNREADABLE, text)


def log_bounds(plan: AuditPlan, parts: Sequence[Part]) -> tuple[int, int, str | None]:
    """From where to where the log was read, and what stands at its end if that is no frame."""
    # The first place where a task met the end, and behind which none met a message.
    last = max((number for number, part in enumerate(parts) if part.messages), default=0)
    ends = [(part.log_end, part.unreadable) for part in parts[last:] if part.log_end is not None]
    log_end, unreadable = ends[0] if ends else (plan.log_end, None)
    expired = joined(gap for part in parts for gap in part.expired)
    log_begin = expired[0].end if expired and expired[0].begin <= plan.log_begin else plan.log_begin
    return min(log_begin, log_end), log_end, unreadable
