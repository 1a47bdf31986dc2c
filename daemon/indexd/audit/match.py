"""Messages and entries of a stretch side by side: every file's entries against the keys of each batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from indexd.audit.entries import EntrySource
from indexd.audit.ground import phy_offsets
from indexd.audit.holes import add_rows
from indexd.audit.kernel import NOTED_COLUMNS, NOTED_MAX, UNREACHABLE, count_missing, match_rows
from indexd.audit.part import Part, Strays
from indexd.audit.plan import AuditTask
from indexd.audit.stretch import Rows
from indexd.commitlog.batcher import DispatchBatch
from indexd.index.check import time_difference
from indexd.index.format import FLAVOURS, IndexLayout

#: What the kernel's codes are called, and where in the entry the number stands that is wrong.
KINDS = (
    ("entry-without-message", 4, "no message begins at {phy}, where it points"),
    ("entry-without-key", 0, "key hash {value}, but the message at {phy} has no such key"),
    ("entry-hash", 0, "key hash {value}, but the message at {phy} has the key {wanted} there"),
    ("entry-twice", 0, "key hash {value} of the message at {phy} once more"),
    ("entry-time-difference", 12, "the time difference is {value}, but for the message at {phy} it is {wanted}"),
)
BEHIND_LOG = "entry-behind-log"
FIRST_DIFFERENCE = "entry-time-difference-first"
# A broker dispatches a message some milliseconds after it was written.
_PAUSE = 0.05
_PATIENCE = 1.0
_NEVER = 1 << 62


class Matched:
    """One source, and what its entries have come to so far."""

    def __init__(self, source: EntrySource) -> None:
        self.source = source
        self.times = np.full(2, np.iinfo(np.int64).min, dtype=np.int64)
        self.strays = np.array([_NEVER, -1, 0], dtype=np.int64)
        self.counts = np.zeros(len(KINDS) + 1, dtype=np.int64)
        self.noted = np.zeros((len(KINDS) * NOTED_MAX, NOTED_COLUMNS), dtype=np.int64)
        self.entries = 0

    def match(self, batch: DispatchBatch, first: int, last: int, skip_mask: int, taken: NDArray[np.uint8]) -> None:
        """Those that point to messages ``first`` .. ``last - 1``, or between them."""
        source, row = self.source, np.uint64(first)
        while source.load():
            row, at = match_rows(
                batch.columns,
                row,
                last,
                skip_mask,
                source.entries,
                source.numbers,
                source.at,
                source.findable,
                source.header,
                taken,
                self.times,
                self.strays,
                self.counts,
                self.noted,
            )
            self.entries += int(at) - source.at
            source.at = int(at)
            if source.at < len(source.entries):
                return

    def pass_over(self, phy_offset: int) -> int:
        """Entries that point below ``phy_offset`` are nobody's business; how many they are."""
        passed = 0
        while self.source.load():
            entries, _ = self.source.take_below(phy_offset)
            passed += len(entries)
            if self.source.at < len(self.source.entries):
                break
        return passed

    def strays_below(self, phy_offset: int, kind: int | None, layout: IndexLayout, part: Part) -> None:
        """Entries that point below ``phy_offset``, to no message; ``kind`` None: because the log ends before."""
        file = self.source.file
        while self.source.load():
            entries, numbers = self.source.take_below(phy_offset)
            known = numbers < file.count
            entries, numbers = entries[known], numbers[known]
            self.entries += len(entries)
            if kind is not None:
                self._note_strays(kind, entries, numbers)
            elif len(entries):
                offsets = phy_offsets(entries[:NOTED_MAX]).tolist()
                for number, offset in zip(numbers[:NOTED_MAX].tolist(), offsets, strict=True):
                    text = f"entry {number}: points to {offset}, behind the end of the log"
                    part.notes.keep(file.path, layout.entry_position(number) + 4, BEHIND_LOG, text)
                part.notes.count(file.path, BEHIND_LOG, len(entries))
            if self.source.at < len(self.source.entries):
                break

    def _note_strays(self, kind: int, entries: NDArray[np.uint32], numbers: NDArray[np.uint32]) -> None:
        room = max(NOTED_MAX - int(self.counts[kind]), 0)
        at = int(self.counts[-1])
        rows = self.noted[at : at + min(room, len(entries))]
        rows[:, 0], rows[:, 1] = numbers[: len(rows)], kind
        offsets = phy_offsets(entries)
        rows[:, 4] = offsets[: len(rows)]
        self._add_strays(offsets)
        self.counts[kind] += len(entries)
        self.counts[-1] += len(rows)

    def _add_strays(self, offsets: NDArray[np.int64]) -> None:
        if len(offsets):
            low, high, _ = self.strays.tolist()
            self.strays[:2] = min(low, int(offsets.min())), max(high, int(offsets.max()))
            self.strays[2] += len(offsets)

    def say(self, layout: IndexLayout, part: Part) -> None:
        """Put the noted ones into words."""
        path = self.source.file.path
        for number, kind, value, wanted, phy in self.noted[: int(self.counts[-1])].tolist():
            what, at, text = KINDS[kind]
            words = text.format(value=value, wanted=wanted, phy=phy)
            part.notes.keep(path, layout.entry_position(number) + at, what, f"entry {number}: {words}")
        for kind, (what, _, _) in enumerate(KINDS):
            part.notes.count(path, what, int(self.counts[kind]))
        part.entries += self.entries
        low, high, count = self.strays.tolist()
        if count:
            part.strays.append(Strays(self.source.file.name, low, high, count))

    def judge_times(self, layout: IndexLayout, part: Part, before: Sequence[int] | None, *, is_settled: bool) -> None:
        """The header's times, and entry 1, which counts from the end of the file before (spec rocketmq-store 3.5).

        ``before`` are times it may count from, None if that is not known; ``is_settled``: the header has not changed.
        """
        file, header = self.source.file, self.source.file.header
        begin, end = (None if value == np.iinfo(np.int64).min else int(value) for value in self.times)
        if begin is not None:
            self._compare(part, "begin", 0, header.begin_timestamp, begin)
            stored = self.source.first_time_difference()
            part.first_times.append((file.name, stored, begin))
            if not counts_from(stored, begin, before):
                text = f"entry 1: the time difference {stored} counts from the end of no file that is here"
                part.notes.add(file.path, layout.entry_position(1) + 12, FIRST_DIFFERENCE, text)
        if end is not None and is_settled:
            self._compare(part, "end", 8, header.end_timestamp, end)

    def _compare(self, part: Part, name: str, position: int, here: int, wanted: int) -> None:
        if here != wanted:
            text = f"{name} timestamp {here}, but by its message it is {wanted}"
            part.notes.add(self.source.file.path, position, f"header-{name}-timestamp", text)


class Matcher:
    """Takes the rows of a stretch one batch after the other; ``part`` is what they come to.

    ``arrivals`` is asked for sources of files that a working broker has made since the audit began.
    """

    def __init__(
        self, part: Part, flavour: str, matched: list[Matched], arrivals: Callable[[], list[Matched]] | None
    ) -> None:
        self._part, self._matched, self._arrivals = part, matched, arrivals
        self._skip_mask = FLAVOURS[flavour].skip_mask
        self._totals = np.zeros(5, dtype=np.int64)
        self._missing = np.empty(0, dtype=np.int32)
        self._patience = _PATIENCE

    def take(self, rows: Rows) -> None:
        """Messages with all entries that point to them."""
        batch, first, last = rows
        taken = np.zeros(max(batch.keys, 1), dtype=np.uint8)
        for matched in self._matched:
            matched.match(batch, first, last, self._skip_mask, taken)
        if len(self._missing) < batch.rows:
            self._missing = np.empty(batch.rows, dtype=np.int32)
        totals = np.zeros_like(self._totals)
        count_missing(batch.columns, first, last, self._skip_mask, taken, self._missing, totals)
        if totals[3] and self._arrivals is not None:
            totals = self._wait_for(rows, taken, totals)
        self._totals += totals
        columns = batch.columns
        part = slice(first, last)
        offsets, timestamps = columns.phy_offset[part], columns.store_timestamp[part]
        unreachable = _unreachable(rows, taken) if totals[4] else None
        add_rows(self._part.holes, offsets, timestamps, self._missing[part], unreachable)

    def close(self) -> None:
        """Write the totals down."""
        part = self._part
        part.messages, part.keyed_messages, part.keys, part.missing_keys, part.unreachable_keys = self._totals.tolist()

    def _wait_for(self, rows: Rows, taken: NDArray[np.uint8], totals: NDArray[np.int64]) -> NDArray[np.int64]:
        # The broker works: what it has indexed since, and what it is about to index.
        assert self._arrivals is not None
        batch, first, last = rows
        # Keys are indexed in the order of the log: once there are entries behind these messages, no more will come.
        while totals[3] and not any(matched.source.grows and matched.source.load() for matched in self._matched):
            new = self._arrivals()
            self._matched += new
            grown = [matched for matched in self._matched if matched in new or matched.source.refresh()]
            if not grown and self._patience <= 0:
                break
            if not grown:
                time.sleep(_PAUSE)
                self._patience -= _PAUSE
                continue
            self._patience = _PATIENCE
            for matched in grown:
                matched.match(batch, first, last, self._skip_mask, taken)
            totals[:] = 0
            count_missing(batch.columns, first, last, self._skip_mask, taken, self._missing, totals)
        return totals


def _unreachable(rows: Rows, taken: NDArray[np.uint8]) -> NDArray[np.int64]:
    # Keys of each message that have an entry which no walk reaches.
    starts = rows.batch.columns.key_start[rows.first : rows.last + 1].astype(np.int64)
    sums = np.concatenate(([0], np.cumsum(taken == UNREACHABLE)))
    return np.diff(sums[starts])


def ends_before(task: AuditTask, name: str) -> list[int] | None:
    """The ends (ms) that entry 1 of a file may count from, if that is known.

    That is the end of the file that was the last one then; before the first one there may have been one that is gone.
    """
    ends = zip(task.names, task.end_timestamps, strict=True)
    return [end for other, end in ends if other != name] if name in task.names[1:] else None


def counts_from(stored: int, begin: int, before: Sequence[int] | None) -> bool:
    """Whether ``stored`` seconds may lie between one of these ends and ``begin``; they may where none is known."""
    return before is None or stored in {0, *(time_difference(begin, one) for one in before)}
