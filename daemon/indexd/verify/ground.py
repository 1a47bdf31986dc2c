"""What stands in a data directory at one moment, and whether somebody works in it.

What a verification came to.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.flush.frontier import Frontier
from indexd.index.check import Condition
from indexd.index.format import FileMark
from indexd.query.source import known_frontier
from indexd.storage.disk import Disk
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles, is_index_name


@dataclass(frozen=True, slots=True)
class Ground:
    """``owner`` holds the lock; while it ``is_opening``, recovery may be at work. ``sizes`` of the index files by name.

    ``is_unclean``: no one holds the lock, and the last one who did was killed.
    """

    frontier: Frontier
    owner: int | None
    is_opening: bool
    is_unclean: bool
    sizes: dict[str, int]

    @property
    def is_at_rest(self) -> bool:
        """Nobody works there, and the last one who did has stopped cleanly."""
        return self.owner is None and not self.is_unclean

    def condition(self, mark: FileMark) -> Condition:
        """What may be asked of a file: a full one never changes again."""
        if mark.full or self.is_at_rest:
            return Condition.AT_REST
        return Condition.CUT_SHORT if self.is_unclean or self.is_opening else Condition.GROWING

    def same_as(self, other: Ground) -> bool:
        """Whether nobody came, went or wrote a frontier between the two looks."""
        return (self.frontier, self.owner, self.is_opening, self.is_unclean) == (
            other.frontier,
            other.owner,
            other.is_opening,
            other.is_unclean,
        )

    def notes(self) -> list[str]:
        """What is not asked because of who works there, or was killed there."""
        if self.is_unclean:
            return [
                "the last stop was unclean: indexd --recover or the next start mends it; "
                "of the open file only the entries that the frontier names were checked"
            ]
        if self.is_opening:
            return [f"indexd, pid {self.owner}, is opening the directory: of the open file only entries were checked"]
        if self.owner is not None:
            return [f"indexd, pid {self.owner}, is at work: what it has built since the last flush was not checked"]
        return []


def look(disk: Disk, files: DataFiles) -> Ground:
    """What stands there now. Raises UsageError without a frontier, CorruptDataError for one that cannot be read."""
    owner = owner_pid(files.lock)
    unclean = owner is None and disk.exists(files.abort)
    frontier = known_frontier(disk, files)
    try:
        sizes = {name: size for name, size in disk.list_dir(files.index) if is_index_name(name)}
    except DiskError as error:
        if not error.is_missing:
            raise
        sizes = {}
    return Ground(frontier, owner, owner is not None and not _is_building(disk, files, owner), unclean, sizes)


def _is_building(disk: Disk, files: DataFiles, owner: int) -> bool:
    # A daemon writes where it stands at each drain, from the first one behind its recovery on.
    try:
        row = json.loads(disk.read(files.state))
    except (DiskError, ValueError):
        return False
    return isinstance(row, dict) and row.get("pid") == owner and "phyOffset" in row


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
