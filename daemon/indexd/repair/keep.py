"""Which index files can stay as they are: those without a finding, whose keys are all there exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from indexd.audit import AuditReport
from indexd.audit.ground import BrokerFile

#: It holds again where what is built in front of the file ends as its old neighbour did.
MENDED_BY_NEIGHBOUR = frozenset({"entry-time-difference-first"})
# Segments whose frames a broker goes through when it starts, before and from 5.4 on (spec rocketmq-store 7.2).
_CHECKED_SEGMENTS = 3
_CHECKED_SEGMENTS_5_4 = 1


def log_order(files: Iterable[BrokerFile]) -> list[BrokerFile]:
    """By where their entries begin, then where they end."""
    return sorted(files, key=lambda file: (file.begin, file.end, file.name))


def findings_by_file(report: AuditReport) -> dict[str, set[str]]:
    """Kinds of findings by the path inside the store that they name."""
    found: dict[str, set[str]] = {}
    for finding in report.audit.findings:
        found.setdefault(finding.file, set()).add(finding.what)
    return found


def index_ends_at(report: AuditReport) -> tuple[int, str | None]:
    """How far the log may be indexed, and why no further if it ends in bytes that are no frame.

    A broker that starts cuts its log at the first bytes that are no frame, in the segments that it goes through. An
    index that reaches behind that would have it pass over what it writes there (spec rocketmq-store 4.2, 7.4, 7.5).
    """
    audit, standing = report.audit, report.standing
    begins = [segment.begin for segment in standing.segments if segment.begin < audit.log_end]
    count = _CHECKED_SEGMENTS_5_4 if audit.eras[-1].flavour == "5.4" else _CHECKED_SEGMENTS
    checked_from = begins[-count:][0] if begins else audit.log_begin
    if standing.has_abort or standing.is_live:
        checked_from = min(checked_from, report.crash.dispatch_offset)
    for gap in audit.gaps:
        if gap.end > checked_from:
            return max(gap.begin, checked_from), gap.reason
    return audit.log_end, audit.unreadable


def candidates(report: AuditReport, ends_at: int) -> list[BrokerFile]:
    """Files that could stay, in the order of the log and of their names; what is missing inside them is not asked."""
    whats, seen = findings_by_file(report), {file.name for file in report.audit.files}
    overlapping = _overlapping(log_order(file for file in report.plan.files if file.is_readable and file.entries))
    found: list[BrokerFile] = []
    for file in log_order(report.plan.files):
        is_good = file.is_readable and file.entries and file.name in seen and file.end < ends_at
        if not is_good or file.name in overlapping or whats.get(file.path, set()) - MENDED_BY_NEIGHBOUR:
            continue
        if not found or found[-1].name < file.name:
            found.append(file)
    return found


def _overlapping(files: Sequence[BrokerFile]) -> set[str]:
    # Which of two has a key that both could have is not known: neither is believed to have all.
    found: set[str] = set()
    open_ones: list[BrokerFile] = []
    for file in files:
        open_ones = [one for one in open_ones if one.end > file.begin]
        if open_ones:
            found |= {file.name, *(one.name for one in open_ones)}
        open_ones.append(file)
    return found
