"""Holds every output against the log, message by message, and words all that disagrees: ``indexd verify --deep``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from indexd.commitlog.batcher import QUEUE_COLUMNS, DispatchBatch, before
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from indexd.compare.index import GIVE_UP_AT, EntryCursor, Resync
from indexd.compare.queues import QueueFindings
from indexd.compare.sparse import SparseFindings
from indexd.config import Config
from indexd.findings import Findings
from indexd.flush.frontier import Frontier, Uncovered
from indexd.index.format import FLAVOURS, FileMark, IndexHeader
from indexd.index.kernel import BUFFER_FULL, DONE, match_batch
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

_PAUSE = 0.002
_NEVER = 1 << 63
# Of a batch without keys, what the secondary outputs are built from.
_COLUMNS = QUEUE_COLUMNS | {"phy_offset", "store_timestamp", "sys_flag"}
#: The comparators of the outputs besides the key index.
SECONDARY: tuple[type[QueueFindings] | type[SparseFindings], ...] = (QueueFindings, SparseFindings)


@dataclass(slots=True)
class Compared:
    """How much was held against the log: messages and entries; what could not be, and why (``left_out``, in words).

    ``gave_up``: the file of the key index with so many findings that nothing of it was compared from there on.
    """

    messages: int = 0
    entries: int = 0
    expired_entries: int = 0
    left_out_entries: int = 0
    left_out: list[str] = field(default_factory=list)
    gave_up: list[str] = field(default_factory=list)


class DeepComparison:
    """Of all that the frontier covers and the log still has. ``incomparable``: why secondary outputs are left out."""

    def __init__(
        self, config: Config, disk: Disk, frontier: Frontier, reader: LogReader, incomparable: str | None
    ) -> None:
        self.compared = Compared()
        files = DataFiles(config.store.data)
        self._frontier, self._reader = frontier, reader
        self._skip_mask = FLAVOURS[frontier.flavour].skip_mask
        self._cursor = EntryCursor(disk, files.index, frontier.layout, frontier.index, self._check_times)
        begin = reader.log.min_offset
        self._start = max(begin if begin is not None else frontier.phy_offset, frontier.begin_offset)
        self._secondary = [
            kind(config, disk, files.data / kind.folder, frontier, self._start)
            for kind in SECONDARY
            if kind.name in frontier.outputs and incomparable is None
        ]
        if incomparable is not None and any(kind.name in frontier.outputs for kind in SECONDARY):
            self._say(f"queues and sparse indexes were not compared: {incomparable}")
        # Entries and messages in these ranges are not held against one another.
        self._left_out = [(gap.begin, gap.end) for gap in frontier.left_out]
        for gap in frontier.uncovered:
            self._say(f"log bytes {gap.begin} to {gap.end} are not covered: {gap.reason}")
        end = max((mark.header.end_phy_offset for mark in frontier.index if mark.header.entries), default=-1)
        if end >= frontier.phy_offset:
            self._left_out.append((frontier.phy_offset, end + 1))
            self._say(f"entries of messages behind {frontier.phy_offset}: the disk refused before all were built")
        if not reader.log.segments:
            self._say("the log has no segments")
        self._resync = Resync(self._cursor, self._left_out, knows_first=self._start == frontier.begin_offset)
        # A file is gone: messages up to here belong to it.
        self._resume_behind = -1
        self._lost = 0
        self._is_over = False

    @property
    def found(self) -> list[Findings]:
        """The findings, by file."""
        return list(self._resync.found.values())

    def run(self, on_bytes: Callable[[int], None]) -> None:
        """To the frontier's physical offset, or to where the log ends."""
        frontier, reader, compared = self._frontier, self._reader, self.compared
        if self._start > frontier.begin_offset:
            compared.expired_entries = self._leave_out(frontier.begin_offset, self._start)
            if compared.expired_entries:
                self._say(f"{compared.expired_entries} entries of messages before {self._start}, which have expired")
        reader.position = self._start
        while reader.position < frontier.phy_offset and (self._secondary or not self._is_over):
            position = reader.position
            poll = reader.poll()
            if isinstance(poll, DispatchBatch):
                self._compare_batch(poll)
                self._take_secondary(poll)
            elif isinstance(poll, Skipped):
                end = min(poll.end, frontier.phy_offset)
                compared.left_out_entries += self._leave_out(poll.begin, end)
                self._say(f"log bytes {poll.begin} to {end} were not compared: {poll.reason}")
                if poll.is_expired or not self._is_left_out(poll):
                    self._give_up_secondary(poll.reason)
            elif reader.is_undecided and isinstance(poll, NotYetWritten):
                time.sleep(_PAUSE)
            else:
                self._meet_end(poll)
                break
            on_bytes(reader.position - position)
        if not self._is_over:
            self._orphans_below(_NEVER)
        if reader.position < frontier.phy_offset:
            self._give_up_secondary(f"the comparison ended at {reader.position}")
        else:
            self._finish_secondary(is_whole=True)
        self._finish()

    def _take_secondary(self, batch: DispatchBatch) -> None:
        if self._secondary:
            batch = _covered(before(batch, self._frontier.phy_offset), self._frontier.left_out)
        for one in self._secondary:
            one.take(batch)

    def _give_up_secondary(self, reason: str) -> None:
        # The log cannot be read there: what it comes to behind that nobody knows.
        if self._secondary:
            self._say(f"queues and sparse indexes were not compared from there on: {reason}")
            self._finish_secondary(is_whole=False)

    def _finish_secondary(self, *, is_whole: bool) -> None:
        for one in self._secondary:
            one.finish(is_whole=is_whole)
            self._resync.found[one.name] = one.findings
            for text in one.left_out:
                self._say(text)
        self._secondary = []

    def _finish(self) -> None:
        compared, cursor = self.compared, self._cursor
        compared.entries = cursor.walked
        compared.left_out_entries += self._resync.skipped
        for mark, left in cursor.lost:
            compared.left_out_entries += left
            self._say(f"{left} entries of index/{mark.name}, which is gone or too short")
        if compared.left_out_entries:
            self._say(f"{compared.left_out_entries} entries in all that were not compared for these reasons")

    def _is_left_out(self, skipped: Skipped) -> bool:
        # It was passed over when the outputs were built, too.
        return any(gap.begin <= skipped.begin and skipped.end <= gap.end for gap in self._frontier.left_out)

    def _meet_end(self, poll: NotYetWritten | Corrupt) -> None:
        # The log ends before what the frontier covers, or in bytes that are no frame.
        end = self._frontier.phy_offset
        if isinstance(poll, Corrupt):
            self.compared.left_out_entries += self._leave_out(poll.offset, end)
            self._say(f"log bytes {poll.offset} to {end} were not compared: {poll.reason}")
            return
        self._orphans_below(poll.offset)
        if self._is_over:
            return
        entry = self._cursor.entry()
        if entry is None and poll.offset >= end:
            return
        text = f"the log ends at {poll.offset}, but the frontier covers it to {end}"
        self._resync.found.setdefault("frontier", Findings()).add("frontier", 0, "log-end", text)
        if entry is not None:
            text = f"entry {self._cursor.number}: from here on entries point behind the end of the log, {poll.offset}"
            self._resync.add("entry-behind-log", text)
            self.compared.left_out_entries += self._cursor.skip_below(_NEVER - 1)

    def _compare_batch(self, batch: DispatchBatch) -> None:
        if self._is_over:
            return
        offsets = batch.columns.phy_offset[: batch.rows]
        row, end = 0, int(offsets.searchsorted(self._frontier.phy_offset))
        if end:
            self._orphans_below(int(offsets[0]))
        for gap in self._frontier.left_out:
            gap_begin, gap_end = max(gap.begin, batch.begin_offset), min(gap.end, batch.end_offset)
            if gap_begin < gap_end:
                self._match(batch, row, int(offsets.searchsorted(gap_begin)))
                self.compared.left_out_entries += self._leave_out(gap_begin, gap_end)
                row = int(offsets.searchsorted(gap_end))
        self._match(batch, row, end)

    def _match(self, batch: DispatchBatch, row: int, end: int) -> None:
        cursor, columns = self._cursor, batch.columns
        self.compared.messages += max(end - row, 0)
        key = -1
        while row < end and not self._is_over:
            cursor.load()
            self._pass_over_lost()
            later = int(columns.phy_offset[:end].searchsorted(self._resume_behind, "right"))
            if later > row:
                self.compared.messages -= later - row
                row, key = later, -1
                continue
            status, row, key, at = match_batch(
                columns, end, row, key, self._skip_mask, cursor.window, cursor.position, cursor.state
            )
            row, key = int(row), int(key)
            cursor.used(int(at))
            if status == DONE:
                return
            if status == BUFFER_FULL and not cursor.done:
                continue
            self._resync.row(batch, row, key)
            row, key = row + 1, -1
            self._give_up_if_needed()

    def _pass_over_lost(self) -> None:
        # A file expired meanwhile. Its messages may still have been read, from a segment that is gone as well.
        cursor = self._cursor
        while len(cursor.lost) > self._lost:
            self._resume_behind = cursor.lost[self._lost][0].header.end_phy_offset
            self._lost += 1
            self.compared.left_out_entries += cursor.skip_below(self._resume_behind + 1)

    def _leave_out(self, begin: int, end: int) -> int:
        # Entries that point into [begin, end) stand for themselves; those before it have had their chance.
        self._orphans_below(begin)
        self._left_out.append((begin, end))
        return self._cursor.skip_below(end)

    def _orphans_below(self, phy_offset: int) -> None:
        if not self._is_over:
            self._resync.orphans_below(phy_offset)
            self._give_up_if_needed()

    def _give_up_if_needed(self) -> None:
        self._is_over = self._resync.has_enough
        if self._is_over:
            self.compared.gave_up.append(self._cursor.name)
            self.compared.left_out_entries += self._cursor.left
            self._say(f"{self._cursor.name}: {GIVE_UP_AT} findings so far, so no more of the key index was compared")

    def _check_times(self, mark: FileMark, header: IndexHeader) -> None:
        # The header's times to the millisecond, which no entry knows.
        if not mark.header.entries or header.index_count != mark.header.index_count:
            return
        found = self._resync.found.setdefault(f"index/{mark.name}", Findings())
        for name, position, here, wanted in (
            ("begin", 0, mark.header.begin_timestamp, header.begin_timestamp),
            ("end", 8, mark.header.end_timestamp, header.end_timestamp),
        ):
            if here != wanted:
                text = f"{name} timestamp {here}, but by its message it is {wanted}"
                found.add(f"index/{mark.name}", position, f"header-{name}-timestamp", text)

    def _say(self, text: str) -> None:
        self.compared.left_out.append(text)


def _covered(batch: DispatchBatch, gaps: tuple[Uncovered, ...]) -> DispatchBatch:
    # Without the messages that were passed over when the outputs were built; keys are left out.
    offsets = batch.columns.phy_offset[: batch.rows]
    is_covered = np.ones(batch.rows, dtype=np.bool_)
    for gap in gaps:
        first, last = offsets.searchsorted((gap.begin, gap.end))
        is_covered[first:last] = False
    if is_covered.all():
        return batch
    kept = {name: getattr(batch.columns, name)[: batch.rows][is_covered] for name in _COLUMNS}
    return replace(batch, columns=batch.columns._replace(**kept), rows=int(is_covered.sum()), crc=None)
