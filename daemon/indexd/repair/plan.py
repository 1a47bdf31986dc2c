"""The plan of a repair: which index files stay as they are, and which ranges of the log get new ones.

Files can stay that have no finding and all keys exactly once. Ranges and kept files together cover every key of the log
once, in the order of the log and of the names, so a query is answered as over an index that was built anew. A range is
built by itself: those that are not reached keep the files that they would have replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexd.audit import AuditReport
from indexd.audit.causes import log_cut
from indexd.audit.plan import BrokerFile
from indexd.audit.result import FlavourRange
from indexd.config import Config
from indexd.index.entries import first_entry_at
from indexd.repair.ranges import Edges, Ranges, RepairRange
from indexd.storage.disk import Disk


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
        if not is_good or file.name in overlapping or whats.get(file.path):
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


__all__ = ["RepairPlan", "RepairRange", "plan_repair"]

_INDEX = "index/"


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """``ranges`` newest first; ``kept`` files in the order of their names, full ones never change any more.

    ``left_out`` are names in the index folder that the new one does without: foreign ones, of other sizes, without an
    entry that points into the log. ``ends_at``: what is built ends here, and ``unreadable`` says why no further, if the
    log goes on or ends in bytes that are no frame; behind it ``keys_behind``, roughly, are not findable afterwards.
    ``at_stake``: kept files that the broker's next start, an unclean one, would throw away or index the last message of
    again. Bytes of log and index ``bytes_to_read``, to build and to check; ``bytes_to_write`` of files;
    ``estimated_seconds`` at the rate of the audit.
    """

    folder: Path
    kept: tuple[BrokerFile, ...]
    ranges: tuple[RepairRange, ...]
    left_out: tuple[str, ...]
    eras: tuple[FlavourRange, ...]
    is_flavour_known: bool
    ends_at: int
    unreadable: str | None
    keys_behind: int
    at_stake: tuple[str, ...]
    bytes_to_read: int
    bytes_to_write: int
    estimated_seconds: float

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to do at all."""
        return bool(self.ranges or self.left_out or self.at_stake)

    def lines(self) -> list[str]:
        """What would be done, for people: a line a kind of thing, what is built in the order in which it is."""
        stays = "stays as it is" if len(self.kept) == 1 else "stay as they are"
        found = [f"{_files(len(self.kept))} {stays}"] if self.kept else ["no index file stays as it is"]
        for wanted in self.ranges:
            goes = f", in place of {_files(len(wanted.replaces))}" if wanted.replaces else ""
            size = _gigabytes(wanted.end - wanted.begin)
            found.append(f"{size} of log from {wanted.begin} on, about {wanted.keys:,} keys, indexed anew{goes}")
        if self.at_stake:
            found.append(
                "the broker ended without a clean stop: its next start would throw away sound index files, or index "
                "their last message again; the checkpoint is made to vouch for them"
            )
        if self.left_out:
            found.append(f"left out: {', '.join(self.left_out[:10])}{' and more' if len(self.left_out) > 10 else ''}")
        if self.ranges and not self.is_flavour_known:
            found.append(f"no index file says what the broker indexes: as flavour {self.eras[0].flavour} has it")
        reaches = any(wanted.end >= self.ends_at for wanted in self.ranges)
        if reaches and self.unreadable is not None and not self.keys_behind:
            found.append(f"what is built ends at log byte {self.ends_at}, where the log is no log: {self.unreadable}")
        return found

    def behind_lines(self) -> list[str]:
        """What no repair makes findable, whether anything else is to be done or not."""
        if not self.keys_behind:
            return []
        return [
            f"about {self.keys_behind:,} keys behind the unreadable bytes at {self.ends_at} are left out, because a "
            f"broker cuts its log there when it starts: the log wants a look first ({self.unreadable})"
        ]

    def to_json(self) -> dict[str, Any]:
        """The same for programs: kind "plan"."""
        return {
            "kind": "plan",
            "needed": self.is_needed,
            "kept": [file.name for file in self.kept],
            "ranges": [
                {
                    "beginOffset": wanted.begin,
                    "endOffset": wanted.end,
                    "keys": wanted.keys,
                    "replaces": list(wanted.replaces),
                }
                for wanted in self.ranges
            ],
            "leftOut": list(self.left_out),
            "atStake": list(self.at_stake),
            "flavours": [{"beginOffset": era.begin, "flavour": era.flavour} for era in self.eras],
            "flavourKnown": self.is_flavour_known,
            "endOffset": self.ends_at,
            "unreadable": self.unreadable,
            "keysBehind": self.keys_behind,
            "bytesToRead": self.bytes_to_read,
            "bytesToWrite": self.bytes_to_write,
            "estimatedSeconds": round(self.estimated_seconds, 1),
        }


def plan_repair(
    disk: Disk, config: Config, report: AuditReport, *, everything: bool = False, in_pieces: bool = False
) -> RepairPlan:
    """Decide; reads a few messages and entries where kept files meet ranges, writes nothing.

    ``everything`` keeps no file. ``in_pieces``, for a limited time, cuts long ranges where old files begin. Raises
    DiskError.
    """
    ends_at, unreadable = log_cut(report.audit, report.state, report.crash.dispatch_offset)
    if report.audit.is_sound and not everything:
        return _plan(report, report.plan.files, [], (ends_at, unreadable), 0)
    files = log_order(
        file
        for file in report.plan.files
        if file.is_readable and file.entries and file.end >= report.audit.log_begin and file.begin < ends_at
    )
    edges = Edges(disk, config, report.plan, report.audit.eras)
    ranges = Ranges(report, edges, files, ends_at, in_pieces=in_pieces)
    kept = [] if everything else [file for file in candidates(report) if not ranges.missing_inside(file)]
    # What one file cannot stay beside, another one may: until all of them can.
    while isinstance(found := ranges.between(kept), BrokerFile):
        kept.remove(found)
    behind = keys_behind(disk, report, kept, ends_at) if unreadable is not None else 0
    return _plan(report, tuple(kept), found, (ends_at, unreadable), behind)


def _plan(
    report: AuditReport,
    kept: tuple[BrokerFile, ...],
    ranges: list[RepairRange],
    cut: tuple[int, str | None],
    behind: int,
) -> RepairPlan:
    audit, layout = report.audit, report.plan.layout
    foreign = [one.file.removeprefix(_INDEX) for one in audit.findings if one.what == "file-foreign"]
    names = {*(file.name for file in report.plan.files), *foreign}
    names -= {file.name for file in kept} | {name for wanted in ranges for name in wanted.replaces}
    count = sum(-(-wanted.keys // max(layout.index_num - 1, 1)) for wanted in ranges)
    to_write = count * layout.file_size
    to_read = 2 * sum(wanted.end - wanted.begin for wanted in ranges) + to_write
    return RepairPlan(
        folder=report.plan.folder,
        kept=kept,
        ranges=tuple(reversed(ranges)),
        left_out=tuple(sorted(names)),
        eras=audit.eras,
        is_flavour_known=audit.is_flavour_given or any(file.entries for file in audit.files),
        ends_at=cut[0],
        unreadable=cut[1],
        keys_behind=behind,
        at_stake=_at_stake(report, kept, cut[0]),
        bytes_to_read=to_read,
        bytes_to_write=to_write,
        estimated_seconds=(to_read + to_write) * report.seconds / max(report.bytes_read, 1),
    )


def _at_stake(report: AuditReport, kept: Sequence[BrokerFile], ends_at: int) -> tuple[str, ...]:
    # What an unclean start does to sound files (spec rocketmq-store 1.4, 7.3, 7.5), if one is next. A repair that
    # builds nothing still has the checkpoint vouch for them, and the last one say that all its messages are indexed.
    # Not for one that reaches behind where that start cuts the log: what comes there would be passed over.
    if report.crash.when != "next-start":
        return ()
    thrown = set(report.crash.thrown)
    last = max(kept, key=lambda file: file.name, default=None)
    if last is not None and last.entries and last.header.end_phy_offset <= last.end:
        thrown.add(last.name)
    return tuple(file.name for file in kept if file.name in thrown and file.end < ends_at)


def _files(count: int) -> str:
    return f"{count:,} index file" if count == 1 else f"{count:,} index files"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 100_000_000 else f"{size / 1e6:,.1f} MB"
