"""Audit: what all tasks together came to. The same however the log was cut, and in whatever order they ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from indexd.audit.covered import LOG_FINDINGS, joined, log_bounds, note_gaps
from indexd.audit.flavour import FlavourRange
from indexd.audit.holes import Hole, Holes
from indexd.audit.notes import Notes
from indexd.audit.part import FileSeen, Gap, Part, Strays
from indexd.audit.plan import AuditPlan
from indexd.findings import Finding


@dataclass(frozen=True, slots=True)
class Audit:
    """``keys`` of ``keyed_messages`` of ``messages`` in ``[log_begin, log_end)``; those no query finds are in holes.

    ``unreachable_keys`` of the missing ones have an entry that no walk meets. ``entries`` were held against messages,
    ``expired_entries`` point before the log, ``left_out_entries`` into ``gaps``, which could not be read. ``holes`` are
    the largest of ``hole_count``; a hole is at the ``tail`` when no key behind it is findable. ``findings`` are the
    first of a kind and file, ``counts`` how many there are of a kind. ``strays``: one for a file that has any.
    ``log_begin_now`` is where the log began in the end: a broker may have deleted segments that were read, and
    ``expired`` before they could be.
    """

    log_begin: int
    log_end: int
    unreadable: str | None
    messages: int
    keyed_messages: int
    keys: int
    missing_keys: int
    unreachable_keys: int
    entries: int
    expired_entries: int
    left_out_entries: int
    holes: tuple[Hole, ...]
    hole_count: int
    tail: Hole | None
    gaps: tuple[Gap, ...]
    files: tuple[FileSeen, ...]
    eras: tuple[FlavourRange, ...]
    is_flavour_given: bool
    findings: tuple[Finding, ...]
    counts: dict[str, int]
    strays: tuple[Strays, ...] = ()
    log_begin_now: int = 0
    expired: tuple[Gap, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Every key that could be read is findable, and nothing is wrong with the index files."""
        return not self.missing_keys and not self.index_findings

    @property
    def index_findings(self) -> int:
        """How many findings there are about index files; the others are about the log."""
        return sum(count for what, count in self.counts.items() if what not in LOG_FINDINGS)

    @property
    def log_size(self) -> int:
        """Bytes of log that were read, what could not be read included."""
        return self.log_end - self.log_begin - sum(gap.end - gap.begin for gap in self.expired)

    @property
    def findable_keys(self) -> int:
        """Keys that the broker's own query would find, asked without bounds."""
        return self.keys - self.missing_keys

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines of ``--json``: files, holes, findings, and the summary last."""
        for file in self.files:
            yield file.to_json()
        for hole in self.holes:
            yield hole.to_json() | {"tail": hole == self.tail}
        for finding in self.findings:
            row = {"file": finding.file, "position": finding.position, "what": finding.what, "text": finding.text}
            yield {"kind": "finding", **row}
        yield {
            "kind": "summary",
            "beginOffset": self.log_begin,
            "endOffset": self.log_end,
            "unreadable": self.unreadable,
            "messages": self.messages,
            "keyedMessages": self.keyed_messages,
            "keys": self.keys,
            "findableKeys": self.findable_keys,
            "missingKeys": self.missing_keys,
            "unreachableKeys": self.unreachable_keys,
            "holes": self.hole_count,
            "files": len(self.files),
            "comparedEntries": self.entries,
            "expiredEntries": self.expired_entries,
            "leftOutEntries": self.left_out_entries,
            "leftOut": [gap.to_json() for gap in self.gaps],
            "logBegin": self.log_begin_now,
            "expired": [{"beginOffset": gap.begin, "endOffset": gap.end} for gap in self.expired],
            "flavours": [{"beginOffset": era.begin, "flavour": era.flavour} for era in self.eras],
            "flavourGiven": self.is_flavour_given,
            "findings": sum(self.counts.values()),
            "counts": self.counts,
        }


def join(plan: AuditPlan, parts: Sequence[Part]) -> Audit:
    """Put the parts together; ``parts[i]`` is what ``plan.tasks[i]`` came to."""
    notes, holes = Notes(), Holes()
    notes.merge(plan.notes)
    for part in parts:
        notes.merge(part.notes)
        holes.merge(part.holes)
    gaps = joined(gap for part in parts for gap in part.gaps)
    note_gaps(gaps, notes)
    counts: Counter[str] = Counter()
    for (_, what), count in notes.counts.items():
        counts[what] += count
    kept, hole_count = holes.all()
    files = sorted((file for part in parts for file in part.files), key=lambda file: file.name)
    expired = joined(gap for part in parts for gap in part.expired)
    log_begin, log_end, unreadable = log_bounds(plan, parts)
    return Audit(
        log_begin=log_begin,
        log_end=log_end,
        unreadable=unreadable,
        messages=sum(part.messages for part in parts),
        keyed_messages=sum(part.keyed_messages for part in parts),
        keys=sum(part.keys for part in parts),
        missing_keys=sum(part.missing_keys for part in parts),
        unreachable_keys=sum(part.unreachable_keys for part in parts),
        entries=sum(part.entries for part in parts),
        expired_entries=sum(part.expired_entries for part in parts),
        left_out_entries=sum(part.left_out_entries for part in parts),
        holes=tuple(kept),
        hole_count=hole_count,
        tail=holes.last if holes.is_open_behind else None,
        gaps=tuple(gaps),
        files=tuple(files),
        eras=_named(plan, files),
        is_flavour_given=plan.is_flavour_given,
        findings=tuple(notes.findings()),
        counts=dict(sorted(counts.items())),
        strays=_strays(parts),
        log_begin_now=max([plan.log_begin, *(part.log_begin or 0 for part in parts)]),
        expired=tuple(gap for gap in expired if log_begin < gap.end <= log_end),
    )


def _strays(parts: Sequence[Part]) -> tuple[Strays, ...]:
    found: dict[str, Strays] = {}
    for one in (one for part in parts for one in part.strays):
        other = found.get(one.name, one)
        count = one.count + other.count if one.name in found else one.count
        found[one.name] = Strays(one.name, min(one.low, other.low), max(one.high, other.high), count)
    return tuple(found[name] for name in sorted(found))


def _named(plan: AuditPlan, files: Sequence[FileSeen]) -> tuple[FlavourRange, ...]:
    # 4.0 and 4.7 index the same; how the headers count tells which it was.
    meanings = {file.counts_every_put for file in files} - {None}
    if plan.is_flavour_given or meanings != {True}:
        return plan.eras
    return tuple(FlavourRange(era.begin, "4.0") if era.flavour == "4.7" else era for era in plan.eras)
