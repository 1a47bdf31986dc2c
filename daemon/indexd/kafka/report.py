"""What a check or a rebuild of Kafka's indexes reports: findings, notes, counts, progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from indexd.findings import Findings
from indexd.kafka.format import Partition

#: Bytes done, bytes in all.
OnProgress = Callable[[int, int], None]


class Progress:
    """How far a pass over several logs is, told to ``on_progress`` if there is one."""

    def __init__(self, on_progress: OnProgress | None, total: int) -> None:
        self._on_progress = on_progress
        self._total = total
        self._done = 0

    def within(self, size: int) -> None:
        """``size`` bytes of the present log."""
        if self._on_progress is not None:
            self._on_progress(self._done + size, self._total)

    def finish(self, size: int) -> None:
        """The present log of ``size`` bytes is done with."""
        self.within(size)
        self._done += size


class Note(NamedTuple):
    """Something worth knowing that is not wrong, or could not be asked; as in a Finding, ``what`` is for programs."""

    file: str
    what: str
    text: str


@dataclass(slots=True)
class CheckReport:
    """``findings`` are what does not hold. ``batches`` and ``bytes`` are of the logs, ``entries`` of both indexes."""

    findings: Findings = field(default_factory=Findings)
    notes: list[Note] = field(default_factory=list)
    partitions: int = 0
    segments: int = 0
    batches: int = 0
    entries: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The summary: the last line of ``--json``."""
        return {
            "kind": "summary",
            "partitions": self.partitions,
            "segments": self.segments,
            "batches": self.batches,
            "entries": self.entries,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 3),
            "findings": len(self.findings),
            "counts": dict(sorted(self.findings.counts.items())),
            "notes": len(self.notes),
        }


class RebuiltSegment(NamedTuple):
    """One segment: its log's label, how far it was read, the entries made, and whether a file had to be written."""

    file: str
    read_bytes: int
    log_bytes: int
    batches: int
    offset_entries: int
    time_entries: int
    is_changed: bool

    def to_json(self) -> dict[str, Any]:
        """Its line of ``--json``, without its kind."""
        return {
            "file": self.file,
            "readBytes": self.read_bytes,
            "logBytes": self.log_bytes,
            "batches": self.batches,
            "offsetEntries": self.offset_entries,
            "timeEntries": self.time_entries,
            "changed": self.is_changed,
        }


@dataclass(slots=True)
class RebuildReport:
    """``problems`` are what could not be rebuilt, or not to the log's end; the rest is as Kafka's recovery makes it."""

    problems: Findings = field(default_factory=Findings)
    notes: list[Note] = field(default_factory=list)
    segments: list[RebuiltSegment] = field(default_factory=list)
    partitions: int = 0
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The summary: the last line of ``--json``."""
        return {
            "kind": "summary",
            "partitions": self.partitions,
            "segments": len(self.segments),
            "changed": sum(segment.is_changed for segment in self.segments),
            "bytes": sum(segment.read_bytes for segment in self.segments),
            "seconds": round(self.seconds, 3),
            "problems": len(self.problems),
            "counts": dict(sorted(self.problems.counts.items())),
            "notes": len(self.notes),
        }


def passing_notes(partition: Partition) -> list[Note]:
    """The files of a partition that are left alone because a broker's next start removes or renames them."""
    return [
        Note(partition.label(partition.path / name), "left_alone", "a deletion, cleaning or swap that has not ended")
        for name in partition.passing
    ]
