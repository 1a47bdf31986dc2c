"""Which index files can stay as they are: those without a finding, whose keys are all there exactly once."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from indexd.audit import AuditReport
from indexd.audit.ground import BrokerFile
from indexd.recovery.replay import first_entry_at
from indexd.storage.disk import Disk

#: It holds again where what is built in front of the file ends as its old neighbour did.
MENDED_BY_NEIGHBOUR = frozenset({"entry-time-difference-first"})


def log_order(files: Iterable[BrokerFile]) -> list[BrokerFile]:
    """By where their entries begin, then where they end."""
    return sorted(files, key=lambda file: (file.begin, file.end, file.name))


def findings_by_file(report: AuditReport) -> dict[str, set[str]]:
    """Kinds of findings by the path inside the store that they name."""
    found: dict[str, set[str]] = {}
    for finding in report.audit.findings:
        found.setdefault(finding.file, set()).add(finding.what)
    return found


def candidates(report: AuditReport) -> list[BrokerFile]:
    """Files that could stay, in the order of the log and of their names; what is missing inside them is not asked.

    Those, too, that point behind bytes where a broker cuts its log: what they find now must not go for a repair.
    """
    whats, seen = findings_by_file(report), {file.name for file in report.audit.files}
    overlapping = _overlapping(log_order(file for file in report.plan.files if file.is_readable and file.entries))
    found: list[BrokerFile] = []
    for file in log_order(report.plan.files):
        is_good = file.is_readable and file.entries and file.name in seen and file.end < report.audit.log_end
        if not is_good or file.name in overlapping or whats.get(file.path, set()) - MENDED_BY_NEIGHBOUR:
            continue
        if not found or found[-1].name < file.name:
            found.append(file)
    return found


def keys_behind(disk: Disk, report: AuditReport, kept: Collection[BrokerFile], ends_at: int) -> int:
    """Keys of messages from ``ends_at`` on that are not findable, or will not be when the files not ``kept`` are gone.

    Of a hole that lies on both sides all are counted. Reads some entries of files. Raises DiskError.
    """
    log_end, layout = report.audit.log_end, report.plan.layout
    found = sum(hole.keys for hole in report.audit.holes if hole.last >= ends_at)
    names = {file.name for file in kept}
    for file in report.plan.files:
        if file.name not in names and file.points_into(ends_at, log_end):
            with disk.open_read(report.plan.folder / file.name) as opened:
                first, behind = (first_entry_at(opened, layout, 1, file.count, offset) for offset in (ends_at, log_end))
            found += behind - first
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
