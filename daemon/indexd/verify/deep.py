"""Decodes the log again and compares every output with it: ``indexd verify --deep``."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from indexd.commitlog.batcher import QUEUE_COLUMNS, DispatchBatch, before
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from indexd.compare.index import EntryCursor, Resync
from indexd.compare.queues import QueueComparison, UnitDifference
from indexd.compare.sparse import SparseComparison
from indexd.config import Config
from indexd.consumequeue.format import Unit
from indexd.consumequeue.recover import plan as plan_queues
from indexd.findings import Findings
from indexd.flush.frontier import Frontier, Uncovered
from indexd.index.format import FLAVOURS, FileMark, IndexHeader
from indexd.index.kernel import BUFFER_FULL, DONE, match_batch
from indexd.recovery.compare import once
from indexd.recovery.open import decode_rules, reader_options
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from indexd.verify.records import StoreState, sound_queues

_PAUSE = 0.002
_NEVER = 1 << 63
# Of a batch without keys, what the queues and the sparse indexes are built from.
_COLUMNS = QUEUE_COLUMNS | {"phy_offset", "store_timestamp", "sys_flag"}


def compare(
    config: Config, disk: Disk, state: StoreState, findings: Findings, on_bytes: Callable[[int], None]
) -> Compared:
    """Compare what the frontier covers and the log still has; ``config`` is that of the data directory."""
    options = replace(once(reader_options(config)), skip_corrupt=True)
    reader = LogReader(disk, config.store.commit_log_directories, decode_rules(config), options)
    reader.refresh()
    try:
        comparison = _Comparison(config, DataFiles(config.store.data), disk, state, reader)
        comparison.run(on_bytes)
    finally:
        reader.close()
    for found in comparison.found().values():
        findings.merge(found)
    return comparison.compared


class _Comparison:
    def __init__(self, config: Config, files: DataFiles, disk: Disk, state: StoreState, reader: LogReader) -> None:
        self.compared = Compared()
        frontier = state.frontier
        self._frontier, self._reader = frontier, reader
        self._skip_mask = FLAVOURS[frontier.flavour].skip_mask
        self._cursor = EntryCursor(disk, files.index, frontier.layout, frontier.index, self._check_times)
        begin = reader.log.min_offset
        self._start = max(begin if begin is not None else frontier.phy_offset, frontier.begin_offset)
        self._secondary = SecondaryComparison(config, disk, files, state, self._start)
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
        # A file was given up or is gone: messages up to here belong to it.
        self._resume_behind = -1
        self._lost = 0
        self._is_over = False

    def found(self) -> dict[str, Findings]:
        """The findings by file."""
        return self._resync.found

    def run(self, on_bytes: Callable[[int], None]) -> None:
        """To the frontier's physical offset, or to where the log ends."""
        frontier, reader, compared = self._frontier, self._reader, self.compared
        if self._start > frontier.begin_offset:
            compared.expired_entries = self._leave_out(frontier.begin_offset, self._start)
            if compared.expired_entries:
                self._say(f"{compared.expired_entries} entries of messages before {self._start}, which have expired")
        reader.position = self._start
        batch: DispatchBatch | None = None
        while reader.position < frontier.phy_offset and not (self._is_over and self._secondary.is_over):
            before = reader.position
            poll = reader.poll()
            if isinstance(poll, DispatchBatch):
                self._compare_batch(poll, batch)
                self._secondary.take(poll)
                batch = poll
            elif isinstance(poll, Skipped):
                end = min(poll.end, frontier.phy_offset)
                compared.left_out_entries += self._leave_out(poll.begin, end)
                self._say(f"log bytes {poll.begin} to {end} were not compared: {poll.reason}")
                if poll.is_expired or not self._is_left_out(poll):
                    self._secondary.give_up(poll.reason)
            elif reader.is_undecided and isinstance(poll, NotYetWritten):
                time.sleep(_PAUSE)
            else:
                self._meet_end(poll)
                break
            on_bytes(reader.position - before)
        if not self._is_over:
            self._orphans_below(_NEVER, batch)
        if reader.position < frontier.phy_offset:
            self._secondary.give_up(f"the comparison ended at {reader.position}")
        else:
            self._secondary.finish()
        self._resync.found["secondary"] = self._secondary.findings
        for text in self._secondary.left_out:
            self._say(text)
        self._finish()

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
        self._orphans_below(poll.offset, None)
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

    def _compare_batch(self, batch: DispatchBatch, before: DispatchBatch | None) -> None:
        # Where entries are left over from the batch before, that one can say of which message they are.
        if self._is_over:
            return
        offsets = batch.columns.phy_offset[: batch.rows]
        row, end = 0, int(offsets.searchsorted(self._frontier.phy_offset))
        if before is not None and end:
            self._orphans_below(int(offsets[0]), before)
        for gap in self._frontier.left_out:
            first, last = max(gap.begin, batch.begin_offset), min(gap.end, batch.end_offset)
            if first < last:
                self._match(batch, row, int(offsets.searchsorted(first)))
                self.compared.left_out_entries += self._leave_out(first, last)
                row = int(offsets.searchsorted(last))
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
        self._orphans_below(begin, None)
        self._left_out.append((begin, end))
        return self._cursor.skip_below(end)

    def _orphans_below(self, phy_offset: int, batch: DispatchBatch | None) -> None:
        while not self._is_over:
            self._resync.orphans_below(phy_offset, batch)
            if not self._resync.has_enough:
                return
            self._give_up_if_needed()

    def _give_up_if_needed(self) -> None:
        if not self._resync.has_enough:
            return
        cursor, name = self._cursor, self._cursor.name
        self.compared.gave_up.append(name)
        self._say(f"{name}: {len(self._resync.found[name])} findings, so the rest of it was not compared")
        if not cursor.done:
            self.compared.left_out_entries += cursor.left
            cursor.leave_file()
        entry = cursor.entry()
        if entry is None:
            self._is_over = True
            return
        # A message may straddle two files: the next one is compared from its first whole message on.
        self._resume_behind = entry.phy_offset
        self.compared.left_out_entries += cursor.skip_below(entry.phy_offset + 1)

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


class SecondaryComparison:
    """Takes the log from ``begin``, the first offset of a segment, to where the frontier ends.

    ``left_out`` says in words what was not compared.
    """

    def __init__(self, config: Config, disk: Disk, files: DataFiles, state: StoreState, begin: int) -> None:
        frontier = state.frontier
        self._files, self._frontier = files, frontier
        self._queues: QueueComparison | None = None
        self._sparse: SparseComparison | None = None
        self.findings = Findings()
        self.left_out: list[str] = []
        reason = _not_comparable(state)
        if reason is not None:
            self.left_out.append(f"queues and sparse indexes were not compared: {reason}")
            return
        if frontier.queues is not None:
            self._queues = _queue_comparison(config, disk, files, frontier, begin)
        if frontier.sparse is not None:
            self._sparse = SparseComparison(disk, files.sparse, frontier.segment_size, frontier.sparse, begin)

    @property
    def is_over(self) -> bool:
        """It does not want any more of the log."""
        return self._queues is None and self._sparse is None

    def take(self, batch: DispatchBatch) -> None:
        """The next stretch of the log."""
        if self.is_over:
            return
        batch = _covered(before(batch, self._frontier.phy_offset), self._frontier.left_out)
        if self._queues is not None:
            self._queues.differs(batch)
        if self._sparse is not None:
            self._add_sparse(self._sparse, batch)

    def give_up(self, reason: str) -> None:
        """The log cannot be read there: what it comes to behind that nobody knows."""
        if not self.is_over:
            self.left_out.append(f"queues and sparse indexes were not compared from there on: {reason}")
        self._end(is_whole=False)

    def finish(self) -> None:
        """The log has been given to its end."""
        sparse = self._frontier.sparse
        if sparse is not None and sparse.phy_offset > self._frontier.phy_offset:
            self.left_out.append("the growing pair of sparse indexes: the disk refused before all of a drain was built")
        elif self._sparse is not None:
            self._add_sparse(self._sparse, None)
        self._end(is_whole=True)

    def _end(self, *, is_whole: bool) -> None:
        if self._sparse is not None and self._sparse.gone:
            names = self._sparse.gone
            self.left_out.append(f"{len(names)} files of sparse indexes, {names[0]} first: they are not there")
        if self._queues is not None:
            self._add_queues(self._queues, is_whole=is_whole)
        self._queues = self._sparse = None

    def _add_queues(self, queues: QueueComparison, *, is_whole: bool) -> None:
        rows = [("unit-log", found) for found in queues.differences]
        if is_whole:
            # What a drain that waits for the disk has written lies behind the frontier's physical offset.
            end = self._frontier.phy_offset
            rows += [("unit-log", found) for found in queues.more() if min(found.phy_offsets, default=0) < end]
            rows += [("queue-min", found) for found in queues.hidden()]
        broken = 0
        for what, found in rows:
            if not queues.is_whole(found):
                broken += 1
                continue
            name = f"consumequeue/{found.path.relative_to(self._files.consumequeue)}"
            text = _words(found) if what == "unit-log" else f"{_unit(found.found)} is in the log, and called expired"
            self.findings.add(name, found.position, what, text)
        if broken:
            self.left_out.append(f"{broken} queues were not compared to their ends: some of their files are not there")

    def _add_sparse(self, sparse: SparseComparison, batch: DispatchBatch | None) -> None:
        for found in sparse.finish() if batch is None else sparse.take(batch):
            self.findings.add(f"sparse/{found.name}", found.position, "entry-log", found.text)


def _not_comparable(state: StoreState) -> str | None:
    frontier = state.frontier
    if frontier.queues is None and frontier.sparse is None:
        return None
    if state.is_opening:
        return f"indexd, pid {state.owner}, is opening the directory"
    if frontier.filled_offset < frontier.phy_offset:
        return f"they are filled up to {frontier.filled_offset} only"
    return None


def _queue_comparison(
    config: Config, disk: Disk, files: DataFiles, frontier: Frontier, begin: int
) -> QueueComparison | None:
    # Of each queue, what it holds of messages before ``begin`` is not asked.
    marks, size = sound_queues(frontier), frontier.queue_file_size
    if size < 1:
        return None
    held = plan_queues(disk, files.consumequeue, size, marks, begin, is_cut=True, is_unclean=False, log_begin=begin)
    most = frontier.queues_limit or config.outputs.queues_max
    return QueueComparison(disk, files.consumequeue, size, most, held.marks, marks)


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


def _words(found: UnitDifference) -> str:
    return f"the unit is {_unit(found.found)}, by the log it is {_unit(found.wanted)}"


def _unit(unit: Unit | None) -> str:
    return "none" if unit is None else f"phy offset {unit.phy_offset}, size {unit.size}, tags code {unit.tags_code}"


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
