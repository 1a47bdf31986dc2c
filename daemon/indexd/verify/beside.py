"""Queues and sparse indexes: each one's own check, and both against the log, batch by batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from indexd.commitlog.batcher import QUEUE_COLUMNS, DispatchBatch, before
from indexd.config import Config
from indexd.consumequeue.check import Difference, QueueComparison, check_queues
from indexd.consumequeue.format import Unit
from indexd.consumequeue.recover import plan as plan_queues
from indexd.findings import Findings
from indexd.flush.frontier import Frontier, Uncovered
from indexd.sparse.check import SparseComparison, check_sparse
from indexd.sparse.format import SparseMark
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from indexd.verify.ground import Ground
from indexd.verify.records import sound_queues

_COLUMNS = QUEUE_COLUMNS | {"phy_offset", "store_timestamp", "sys_flag"}


def check_beside(disk: Disk, files: DataFiles, ground: Ground, on_bytes: Callable[[int], None]) -> Findings:
    """What the files say of themselves and of the frontier; of an output that is not built, that nothing is there."""
    found, frontier = Findings(), ground.frontier
    queues = sound_queues(frontier)
    found.merge(
        check_queues(
            disk,
            files.consumequeue,
            frontier.queue_file_size,
            queues,
            is_at_rest=ground.is_at_rest,
            is_owned=not ground.is_at_rest or len(queues) < len(frontier.queues or ()),
            on_bytes=on_bytes,
        )
    )
    found.merge(
        check_sparse(
            disk,
            files.sparse,
            frontier.segment_size,
            frontier.sparse or SparseMark(0),
            is_at_rest=ground.is_at_rest,
            is_owned=not ground.is_at_rest,
            on_bytes=on_bytes,
        )
    )
    return found


class BesideComparison:
    """Takes the log from ``begin``, the first offset of a segment, to where the frontier ends.

    ``left_out`` says in words what was not compared.
    """

    def __init__(self, config: Config, disk: Disk, files: DataFiles, ground: Ground, begin: int) -> None:
        frontier = ground.frontier
        self._files, self._frontier = files, frontier
        self._queues: QueueComparison | None = None
        self._sparse: SparseComparison | None = None
        self.findings = Findings()
        self.left_out: list[str] = []
        reason = _not_comparable(ground)
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


def _not_comparable(ground: Ground) -> str | None:
    frontier = ground.frontier
    if frontier.queues is None and frontier.sparse is None:
        return None
    if ground.is_opening:
        return f"indexd, pid {ground.owner}, is opening the directory"
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


def _words(found: Difference) -> str:
    return f"the unit is {_unit(found.found)}, by the log it is {_unit(found.wanted)}"


def _unit(unit: Unit | None) -> str:
    return "none" if unit is None else f"phy offset {unit.phy_offset}, size {unit.size}, tags code {unit.tags_code}"
