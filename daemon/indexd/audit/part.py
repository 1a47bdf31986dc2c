"""What one task came to: small, pickled, and put together with others by ``whole``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from indexd.audit.holes import Holes
from indexd.audit.notes import Notes
from indexd.audit.queues.seen import QueuesSeen
from indexd.commitlog.reader import SEGMENTS_MISSING


@dataclass(frozen=True, slots=True)
class FileSeen:
    """One index file as it was found; ``expired`` entries point before the log, ``unreachable`` ones no walk meets.

    ``used_slots`` by its entries; what the header counts may be these or the entries (before RocketMQ 4.7.1).
    ``header_count`` is how many entries the header counts, ``header_end`` the offset where it says that they end;
    ``first_time_difference`` is what entry 1 stores, seconds since the end of the file that was the last one then.
    """

    name: str
    entries: int
    begin: int
    end: int
    begin_timestamp: int
    end_timestamp: int
    used_slots: int
    used_slot_count: int
    expired: int
    unreachable: int
    header_count: int = 0
    header_end: int = 0
    first_time_difference: int = 0
    is_full: bool = False

    @property
    def counts_every_put(self) -> bool | None:
        """Which of both meanings the header's count has; None when they do not differ, or it is neither."""
        if self.used_slots == self.entries or self.used_slot_count not in (self.used_slots, self.entries):
            return None
        return self.used_slot_count == self.entries

    def to_json(self) -> dict[str, Any]:
        """A line of ``--json``."""
        return {
            "kind": "file",
            "name": self.name,
            "entries": self.entries,
            "beginOffset": self.begin,
            "endOffset": self.end,
            "beginTimestamp": self.begin_timestamp,
            "endTimestamp": self.end_timestamp,
            "usedSlots": self.used_slots,
            "usedSlotCount": self.used_slot_count,
            "countsEveryPut": self.counts_every_put,
            "expiredEntries": self.expired,
            "unreachableEntries": self.unreachable,
            "headerEntries": self.header_count,
            "headerEndOffset": self.header_end,
            "firstTimeDifference": self.first_time_difference,
            "full": self.is_full,
        }


@dataclass(frozen=True, slots=True)
class Gap:
    """``[begin, end)`` of the log could not be read: why; ``entries`` of index files point there."""

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
        row = {"beginOffset": self.begin, "endOffset": self.end, "reason": self.reason, "entries": self.entries}
        return row | {"missing": self.is_missing}


@dataclass(frozen=True, slots=True)
class Strays:
    """``count`` entries of file ``name`` point to ``low`` .. ``high`` of the log, where no message has their key."""

    name: str
    low: int
    high: int
    count: int


@dataclass(slots=True)
class Part:
    """What was met in ``[begin, end)`` of the log, and in the files that were checked there.

    ``keys`` of ``keyed_messages`` of ``messages``: ``missing_keys`` of them are not findable, of which
    ``unreachable_keys`` have entries that no walk meets. ``entries`` were held against messages; ``left_out_entries``
    point into ``gaps``, ``expired_entries`` before the log. ``log_end`` is where the log ends, if that is in here;
    ``log_begin`` where it began at last, and what had ``expired`` before it could be read.
    """

    begin: int
    end: int
    messages: int = 0
    keyed_messages: int = 0
    keys: int = 0
    missing_keys: int = 0
    unreachable_keys: int = 0
    entries: int = 0
    expired_entries: int = 0
    left_out_entries: int = 0
    log_begin: int | None = None
    log_end: int | None = None
    unreadable: str | None = None
    holes: Holes = field(default_factory=Holes)
    gaps: list[Gap] = field(default_factory=list)
    expired: list[Gap] = field(default_factory=list)
    files: list[FileSeen] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    #: Key hash, physical offset and store timestamp (ms) of messages that a sample asks for.
    sampled: list[tuple[int, int, int]] = field(default_factory=list)
    queues: QueuesSeen | None = None
    strays: list[Strays] = field(default_factory=list)
    #: Of each file whose entry 1 was met: its name, the time difference it stores (s), its message's store time (ms).
    first_times: list[tuple[str, int, int]] = field(default_factory=list)
