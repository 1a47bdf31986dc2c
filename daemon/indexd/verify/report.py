"""What a verification came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from indexd.findings import Findings


@dataclass(slots=True)
class Compared:
    """How much was held against the log: messages and entries; what could not be, and why (``left_out``, in words).

    ``gave_up`` are files with so many findings that the rest of them was not looked at.
    """

    messages: int = 0
    entries: int = 0
    expired_entries: int = 0
    left_out_entries: int = 0
    left_out: list[str] = field(default_factory=list)
    gave_up: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """``findings`` are what does not hold; ``notes`` what was not asked, and why. ``bytes`` are those of the files.

    ``units`` of ``queues``, and ``segments`` with sparse indexes.
    """

    findings: Findings = field(default_factory=Findings)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    entries: int = 0
    bytes: int = 0
    queues: int = 0
    units: int = 0
    segments: int = 0
    seconds: float = 0.0
    compared: Compared | None = None

    def to_json(self) -> dict[str, Any]:
        """The summary: the last line of ``--json``."""
        row: dict[str, Any] = {
            "kind": "summary",
            "files": self.files,
            "entries": self.entries,
            "bytes": self.bytes,
            "consumeQueues": self.queues,
            "consumeQueueUnits": self.units,
            "sparseSegments": self.segments,
            "seconds": round(self.seconds, 3),
            "findings": len(self.findings),
            "counts": dict(sorted(self.findings.counts.items())),
            "notes": self.notes,
            "deep": self.compared is not None,
        }
        if self.compared is not None:
            row |= {
                "comparedMessages": self.compared.messages,
                "comparedEntries": self.compared.entries,
                "expiredEntries": self.compared.expired_entries,
                "leftOutEntries": self.compared.left_out_entries,
                "leftOut": self.compared.left_out,
                "gaveUp": self.compared.gave_up,
            }
        return row
