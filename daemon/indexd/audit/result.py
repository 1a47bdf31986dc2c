"""What the tasks of an audit find, each by itself (Part) and all together (Audit): the same however the log was cut.

A hole is a run of messages with keys that no query finds. It goes on until a message comes whose keys are all
findable; messages without keys neither end nor begin one. Every list is bounded, and what is left out is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.reader import SEGMENTS_MISSING
from indexd.consumequeue.format import UNIT_SIZE, file_name
from indexd.findings import Finding, Findings
from indexd.index.format import IndexHeader

#: So many of the largest holes are kept; all are counted.
HOLES_MAX = 1000
_PRUNE_AT = 8 * HOLES_MAX
QUEUES_FOLDER = "consumequeue"
MISSING, UNREADABLE = "log-missing", "log-unreadable"
#: Findings that are about the log and not about index files.
LOG_FINDINGS = frozenset({MISSING, UNREADABLE})


@dataclass(frozen=True, slots=True)
class FlavourRange:
    """Messages from physical offset ``begin`` on, to the next range, were indexed as ``flavour`` says."""

    begin: int
    flavour: str


@dataclass(frozen=True, slots=True)
class Hole:
    """Messages from physical offset ``begin`` on; ``last`` is where the last of them begins, ``end`` where it ends.

    ``messages`` have ``keys`` that are not findable, of which ``unreachable`` have an entry that no chain walk meets.
    The timestamps are the smallest and the largest store timestamp, ms.
    """

    begin: int
    last: int
    begin_timestamp: int
    end_timestamp: int
    messages: int
    keys: int
    end: int = 0
    unreachable: int = 0

    @property
    def size(self) -> int:
        """Bytes of log, messages without lost keys included."""
        return self.end - self.begin

    def joined(self, later: Hole) -> Hole:
        """This hole and the one behind it, with no findable message between them."""
        return replace(
            later,
            begin=self.begin,
            begin_timestamp=min(self.begin_timestamp, later.begin_timestamp),
            end_timestamp=max(self.end_timestamp, later.end_timestamp),
            messages=self.messages + later.messages,
            keys=self.keys + later.keys,
            unreachable=self.unreachable + later.unreachable,
        )

    def to_json(self) -> dict[str, Any]:
        """A line of ``--json``."""
        return {
            "kind": "hole",
            "beginOffset": self.begin,
            "endOffset": self.end,
            "bytes": self.size,
            "beginTimestamp": self.begin_timestamp,
            "endTimestamp": self.end_timestamp,
            "messages": self.messages,
            "keys": self.keys,
            "unreachableKeys": self.unreachable,
        }


def largest(holes: list[Hole]) -> set[Hole]:
    """Those that are kept of too many."""
    return set(sorted(holes, key=lambda hole: (-hole.keys, -hole.messages, hole.begin))[:HOLES_MAX])


@dataclass(slots=True)
class Holes:
    """The holes of a stretch of the log in order; None stands for findable messages between them.

    So a stretch that begins or ends with a hole may go on with it beside. ``dropped`` small holes were only counted.
    """

    runs: list[Hole | None] = field(default_factory=list)
    dropped: int = 0

    @property
    def found(self) -> list[Hole]:
        """The holes alone."""
        return [hole for hole in self.runs if hole is not None]

    def add(self, run: Hole | None) -> None:
        """Add messages none of which is findable, or all of which are, behind all that were added before."""
        last = self.runs[-1] if self.runs else None
        if last is not None and run is not None:
            self.runs[-1] = last.joined(run)
        elif last is not run or not self.runs:
            self.runs.append(run)
            if len(self.runs) > _PRUNE_AT:
                self.prune()

    def merge(self, later: Holes) -> None:
        """Take over the next stretch of the log."""
        for run in later.runs:
            self.add(run)
        self.dropped += later.dropped

    def prune(self) -> None:
        """Keep what may go on at both ends, and the largest of the others."""
        inner = [hole for hole in self.runs[1:-1] if hole is not None]
        kept = largest(inner)
        self.dropped += len(inner) - len(kept)
        runs, self.runs = self.runs, []
        for at, run in enumerate(runs):
            self.add(run if run in kept or at in (0, len(runs) - 1) else None)

    def add_rows(
        self,
        phy_offsets: NDArray[np.int64],
        timestamps: NDArray[np.int64],
        lost: NDArray[np.int64],
        unreachable: NDArray[np.int64],
    ) -> None:
        """Add messages with keys: ``lost`` of each are not findable, and ``unreachable`` of these have an entry."""
        is_lost = lost > 0
        begins = np.flatnonzero(np.diff(is_lost, prepend=~is_lost[:1]))
        for first, behind in pairwise([*begins.tolist(), len(lost)]):
            at, run = slice(first, behind), None
            if is_lost[first]:
                run = Hole(
                    begin=int(phy_offsets[first]),
                    last=int(phy_offsets[behind - 1]),
                    begin_timestamp=int(timestamps[at].min()),
                    end_timestamp=int(timestamps[at].max()),
                    messages=behind - first,
                    keys=int(lost[at].sum()),
                    unreachable=int(unreachable[at].sum()),
                )
            self.add(run)


@dataclass(frozen=True, slots=True)
class BrokerFile:
    """An index file of the broker. ``header`` as in memory, ``count`` what it may be believed to hold, as a number.

    Entries 1 .. ``count`` - 1 point to physical offsets ``begin`` .. ``end``, both included; those that do not are no
    entries that a broker wrote there. An empty file has ``begin`` 0 and ``end`` -1. ``is_readable`` is False for a
    file of another size: the broker reads such a one as what it is not.

    Known once it was checked: ``used_slots`` by its entries, how many entries point before the log (``expired``) or are
    met by no walk (``unreachable``), and ``first_time_difference``, which entry 1 stores: seconds since the end of the
    file that was the last one then.
    """

    name: str
    header: IndexHeader
    count: int
    begin: int
    end: int
    is_full: bool
    is_readable: bool = True
    used_slots: int = 0
    expired: int = 0
    unreachable: int = 0
    first_time_difference: int = 0

    @property
    def path(self) -> str:
        """What findings call it: its path inside the store."""
        return f"index/{self.name}"

    @property
    def entries(self) -> int:
        """How many entries it may be believed to hold."""
        return self.count - 1

    def points_into(self, begin: int, end: int) -> bool:
        """Whether entries of it may point into ``[begin, end)``."""
        return self.is_readable and self.begin < end and self.end >= begin

    def to_json(self) -> dict[str, Any]:
        """A line of ``--json``."""
        return {
            "kind": "file",
            "name": self.name,
            "entries": self.entries,
            "beginOffset": self.begin,
            "endOffset": self.end,
            "beginTimestamp": self.header.begin_timestamp,
            "endTimestamp": self.header.end_timestamp,
            "usedSlots": self.used_slots,
            "usedSlotCount": self.header.used_slot_count,
            "expiredEntries": self.expired,
            "unreachableEntries": self.unreachable,
            "headerEntries": self.header.entries,
            "headerEndOffset": self.header.end_phy_offset,
            "firstTimeDifference": self.first_time_difference,
            "full": self.is_full,
        }


@dataclass(frozen=True, slots=True)
class Gap:
    """``[begin, end)`` of the log could not be read, and why; ``entries`` of index files point there."""

    begin: int
    end: int
    reason: str
    entries: int = 0

    @property
    def is_missing(self) -> bool:
        """No segment is there at all."""
        return self.reason == SEGMENTS_MISSING

    def to_json(self) -> dict[str, Any]:
        """An item of the summary of ``--json``."""
        return {
            "beginOffset": self.begin,
            "endOffset": self.end,
            "reason": self.reason,
            "entries": self.entries,
            "missing": self.is_missing,
        }


@dataclass(frozen=True, slots=True)
class Orphans:
    """``count`` entries of file ``name`` point to ``low`` .. ``high`` of the log, where no message has their key."""

    name: str
    low: int
    high: int
    count: int


@dataclass(slots=True)
class QueueSeen:
    """One queue: ranges of queue offsets that messages have, and what differs, of each kind the first in words."""

    topic: str
    queue_id: int
    ranges: list[tuple[int, int]] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)

    def note(self, file_size: int, place: int, at: int, what: str, text: str) -> None:
        """Something is wrong with byte ``at`` of unit ``place``."""
        position = place * UNIT_SIZE
        path = f"{QUEUES_FOLDER}/{self.topic}/{self.queue_id}/{file_name(position // file_size * file_size)}"
        self.findings.add(path, position % file_size + at, what, f"unit {place}: {text}")

    def to_json(self) -> dict[str, Any]:
        """A line of ``--json``."""
        return {
            "kind": "queue",
            "topic": self.topic,
            "queueId": self.queue_id,
            "counts": dict(sorted(self.findings.counts.items())),
            "differences": len(self.findings),
            "findings": [asdict(finding) for finding in self.findings.kept],
        }


@dataclass(slots=True)
class QueuesSeen:
    """What a stretch comes to, by ``TOPIC/QUEUE``; ``skipped_messages`` belong to queues that are not compared."""

    messages: int = 0
    skipped_messages: int = 0
    queues: dict[str, QueueSeen] = field(default_factory=dict)


@dataclass(slots=True)
class Totals:
    """``keys`` of ``keyed_messages`` of ``messages``: ``missing_keys`` of them are not findable.

    ``unreachable_keys`` of the missing ones have an entry that no chain walk meets. ``entries`` were held against
    messages, ``expired_entries`` point before the log, ``left_out_entries`` to where it could not be read.
    """

    messages: int = 0
    keyed_messages: int = 0
    keys: int = 0
    missing_keys: int = 0
    unreachable_keys: int = 0
    entries: int = 0
    expired_entries: int = 0
    left_out_entries: int = 0


@dataclass(slots=True, kw_only=True)
class TaskResult(Totals):
    """What one task found in its range of the log and in the files that it checked.

    ``log_end`` is where the log ends, if that is in here, and ``unreadable`` what stands there if it is no frame;
    ``log_begin`` is where the log began at last, and ``expired`` what had gone before it could be read. ``samples`` are
    physical offsets of messages whose keys are asked for.
    """

    log_begin: int | None = None
    log_end: int | None = None
    unreadable: str | None = None
    holes: Holes = field(default_factory=Holes)
    gaps: list[Gap] = field(default_factory=list)
    expired: list[Gap] = field(default_factory=list)
    files: list[BrokerFile] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    orphans: list[Orphans] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    queues: QueuesSeen | None = None


@dataclass(slots=True, kw_only=True)
class Audit(Totals):
    """What all tasks found together in ``[log_begin, log_end)``.

    ``holes`` are the largest of ``hole_count``; a hole is the ``tail`` when no key behind it is findable. ``findings``
    are the first of a kind and file, ``counts`` how many there are of a kind. ``log_begin_now`` is where the log began
    in the end: a broker may have deleted segments that were read, and ``expired`` before they could be.
    """

    log_begin: int
    log_end: int
    log_begin_now: int
    unreadable: str | None
    holes: tuple[Hole, ...]
    hole_count: int
    tail: Hole | None
    gaps: tuple[Gap, ...]
    expired: tuple[Gap, ...]
    files: tuple[BrokerFile, ...]
    eras: tuple[FlavourRange, ...]
    findings: tuple[Finding, ...]
    counts: dict[str, int]
    orphans: tuple[Orphans, ...] = ()

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
        """Bytes of log that were read, and of those that could not be."""
        return self.log_end - self.log_begin - sum(gap.end - gap.begin for gap in self.expired)

    @property
    def findable_keys(self) -> int:
        """Keys that the broker's own query would find, asked without bounds of time."""
        return self.keys - self.missing_keys

    def rows(self) -> Iterator[dict[str, Any]]:
        """The lines of ``--json``: files, holes, findings, and the summary last."""
        yield from (file.to_json() for file in self.files)
        yield from (hole.to_json() | {"tail": hole == self.tail} for hole in self.holes)
        for finding in self.findings:
            yield {"kind": "finding"} | asdict(finding)
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
            "findings": sum(self.counts.values()),
            "counts": self.counts,
        }
