"""Holds every output against the log, message by message, and words all that disagrees: ``indexd verify --deep``."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from indexd.commitlog.batcher import QUEUE_COLUMNS, DispatchBatch, before
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from indexd.compare.index import BEHIND_LOG, NO_KEYS, NOTED_MAX, ComparedFile, compare_files, keys_of
from indexd.compare.queues import QueueFindings
from indexd.compare.sparse import SparseFindings
from indexd.config import Config
from indexd.findings import Findings
from indexd.flush.frontier import Frontier, Uncovered
from indexd.index.format import FLAVOURS, HEADER_SIZE
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

_PAUSE = 0.002
_NEVER = (1 << 63) - 1
# Of a batch without keys, what the secondary outputs are built from.
_COLUMNS = QUEUE_COLUMNS | {"phy_offset", "store_timestamp", "sys_flag"}
#: The comparators of the outputs besides the key index.
SECONDARY: tuple[type[QueueFindings] | type[SparseFindings], ...] = (QueueFindings, SparseFindings)


@dataclass(slots=True)
class Compared:
    """How much was held against the log: messages and entries; what could not be, and why (``left_out``, in words)."""

    messages: int = 0
    entries: int = 0
    expired_entries: int = 0
    left_out_entries: int = 0
    left_out: list[str] = field(default_factory=list)


class DeepComparison:
    """All that the frontier covers and the log still has; what differs goes to ``findings``.

    ``findings`` name the files that do not hold by themselves already. ``incomparable``: why secondary outputs are left
    out.
    """

    def __init__(
        self, config: Config, disk: Disk, frontier: Frontier, reader: LogReader, findings: Findings, incomparable: str
    ) -> None:
        self.compared = Compared()
        self._disk, self._files = disk, DataFiles(config.store.data)
        self._frontier, self._reader, self._findings = frontier, reader, findings
        self._skip_mask = FLAVOURS[frontier.flavour].skip_mask
        self._marks, self._open = deque(frontier.index), list[ComparedFile]()
        self._begins = [mark.header.begin_phy_offset for mark in frontier.index]
        self._damaged = {finding.file for finding in findings.kept}
        begin = reader.log.min_offset
        self._start = max(begin if begin is not None else frontier.phy_offset, frontier.begin_offset)
        self._secondary = [
            kind(config, disk, self._files.data / kind.folder, frontier, self._start)
            for kind in SECONDARY
            if kind.name in frontier.outputs and not incomparable
        ]
        if incomparable and any(kind.name in frontier.outputs for kind in SECONDARY):
            self._say(f"queues and sparse indexes were not compared: {incomparable}")
        for gap in frontier.uncovered:
            self._say(f"log bytes {gap.begin} to {gap.end} are not covered: {gap.reason}")
        # From where entry 1 of the next file counts; nobody knows it of one behind messages that have expired.
        self._end = 0 if self._start == frontier.begin_offset else None
        # Of these ranges the entries are gone: their messages are not asked for.
        self._lost: list[tuple[int, int]] = []
        if not reader.log.segments:
            self._say("the log has no segments")

    def run(self, on_bytes: Callable[[int], None]) -> None:
        """To the frontier's physical offset, or to where the log ends."""
        frontier, reader, compared = self._frontier, self._reader, self.compared
        if self._start > frontier.begin_offset:
            compared.expired_entries = self._leave_out(frontier.begin_offset, self._start)
            if compared.expired_entries:
                self._say(f"{compared.expired_entries} entries of messages before {self._start}, which have expired")
        reader.position = self._start
        while reader.position < frontier.phy_offset:
            position = reader.position
            poll = reader.poll()
            if isinstance(poll, DispatchBatch):
                self._compare_batch(poll)
            elif isinstance(poll, Skipped):
                end = min(poll.end, frontier.phy_offset)
                compared.left_out_entries += self._leave_out(poll.begin, end)
                self._say(f"log bytes {poll.begin} to {end} were not compared: {poll.reason}")
                is_known = any(gap.begin <= poll.begin and poll.end <= gap.end for gap in frontier.left_out)
                if poll.is_expired or not is_known:  # else it was passed over when they were built, too
                    self._give_up_secondary(poll.reason)
            elif reader.is_undecided and isinstance(poll, NotYetWritten):
                time.sleep(_PAUSE)
            else:
                self._meet_end(poll)
                self._give_up_secondary(f"the comparison ended at {reader.position}")
                break
            on_bytes(reader.position - position)
        self._finish_secondary(is_whole=True)
        self._orphans_below(frontier.phy_offset)
        end = max((mark.header.end_phy_offset for mark in frontier.index if mark.header.entries), default=-1) + 1
        if refused := self._leave_out(frontier.phy_offset, max(end, frontier.phy_offset)):
            compared.left_out_entries += refused
            self._say(f"entries of messages behind {frontier.phy_offset}: the disk refused before all were built")
        self._orphans_below(_NEVER)
        if compared.left_out_entries:
            self._say(f"{compared.left_out_entries} entries in all that were not compared for these reasons")

    def _give_up_secondary(self, reason: str) -> None:
        # The log cannot be read there: what it comes to behind that nobody knows.
        if self._secondary:
            self._say(f"queues and sparse indexes were not compared from there on: {reason}")
            self._finish_secondary(is_whole=False)

    def _finish_secondary(self, *, is_whole: bool) -> None:
        for one in self._secondary:
            one.finish(is_whole=is_whole)
            self._findings.merge(one.findings)
            self.compared.left_out += one.left_out
        self._secondary = []

    def _meet_end(self, poll: NotYetWritten | Corrupt) -> None:
        # The log ends before what the frontier covers, or in bytes that are no frame.
        end, compared = self._frontier.phy_offset, self.compared
        if isinstance(poll, Corrupt):
            compared.left_out_entries += self._leave_out(poll.offset, end)
            self._say(f"log bytes {poll.offset} to {end} were not compared: {poll.reason}")
            return
        self._orphans_below(poll.offset)
        text = f"the log ends at {poll.offset}, but the frontier covers it to {end}"
        self._findings.add("frontier", 0, "log-end", text)
        for file in self._reached(end):
            entries = file.take_below(end)
            first = entries.only(slice(0 if compared.left_out_entries else 1))
            file.note(first, BEHIND_LOG, first.number, first.number)
            compared.left_out_entries += len(entries.number)

    def _compare_batch(self, batch: DispatchBatch) -> None:
        covered = before(batch, self._frontier.phy_offset)
        for one in self._secondary:
            one.take(_covered(covered, self._frontier.left_out))
        offsets, row = covered.columns.phy_offset[: covered.rows], 0
        for gap in self._frontier.left_out:
            begin, end = max(gap.begin, batch.begin_offset), min(gap.end, batch.end_offset)
            if begin < end:
                self._match(batch, row, int(offsets.searchsorted(begin)))
                self.compared.left_out_entries += self._leave_out(begin, end)
                row = int(offsets.searchsorted(end))
        self._match(batch, row, covered.rows)

    def _match(self, batch: DispatchBatch, first: int, last: int) -> None:
        if first >= last:
            return
        keys = keys_of(batch, first, last, self._skip_mask)
        bound = int(keys.phy_offset[-1]) + 1
        match = compare_files(keys, bound, self._reached(bound))
        self._close_files()
        is_lost = np.zeros(len(keys.phy_offset), dtype=np.bool_)
        for begin, end in self._lost:
            is_lost |= (keys.phy_offset >= begin) & (keys.phy_offset < end)
        self.compared.messages += int((~is_lost).sum())
        missing = match.unpaired[~is_lost[keys.row[match.unpaired]]]
        for key in missing[:NOTED_MAX].tolist():
            phy_offset, key_hash = keys.phy_offset[keys.row[key]], keys.key_hash[key]
            text = f"the message at {phy_offset} has a key with hash {key_hash}, and no entry for it here"
            at = max(bisect_right(self._begins, int(phy_offset)) - 1, 0)
            names = [f"index/{mark.name}" for mark in self._frontier.index[at : at + 1]] or ["frontier"]
            self._findings.add(names[0], HEADER_SIZE, "key-without-entry", text)
        self._findings.count("key-without-entry", max(len(missing) - NOTED_MAX, 0))

    def _reached(self, bound: int) -> list[ComparedFile]:
        # The files with entries that point below it, opened as the log comes to them.
        while self._marks and self._marks[0].header.begin_phy_offset < bound:
            mark = self._marks.popleft()
            header = replace(mark.header, index_count=max(mark.header.index_count, 1))
            path, layout = self._files.index / mark.name, self._frontier.layout
            file = ComparedFile(self._disk, path, layout, header, previous_end=self._end)
            self._end = header.end_timestamp
            file.select(-_NEVER, _NEVER, is_ordered=file.name not in self._damaged)
            self._open.append(file)
        return self._open

    def _close_files(self) -> None:
        for file in [file for file in self._open if file.is_over]:
            self._open.remove(file)
            if file.is_gone:
                self._lost.append((file.header.begin_phy_offset, file.header.end_phy_offset + 1))
                left = file.header.entries - file.taken
                self.compared.left_out_entries += left
                self._say(f"{left} entries of {file.name}, which is gone or too short")
            else:
                file.judge_times()
            self.compared.entries += file.compared
            self._findings.merge(file.findings)

    def _leave_out(self, begin: int, end: int) -> int:
        # Entries that point into [begin, end) stand for themselves; those before it have had their chance.
        self._orphans_below(begin)
        count = sum(len(file.take_below(end).number) for file in self._reached(end))
        self._close_files()
        return count

    def _orphans_below(self, phy_offset: int) -> None:
        compare_files(NO_KEYS, phy_offset, self._reached(phy_offset))
        self._close_files()

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
