"""Queues and sparse indexes: each one's own check, and both against the log, batch by batch."""

from __future__ import annotations

from collections.abc import Callable

from indexd.commitlog.dispatch import DispatchBatch, before
from indexd.config import Config
from indexd.consumequeue.check import check_queues
from indexd.consumequeue.compare import Difference, QueueComparison
from indexd.consumequeue.format import Unit
from indexd.consumequeue.recover import plan as plan_queues
from indexd.findings import Findings
from indexd.flush.frontier import Frontier
from indexd.sparse.check import check_sparse
from indexd.sparse.compare import SparseComparison
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from indexd.verify.ground import Ground


def check_beside(disk: Disk, files: DataFiles, ground: Ground, on_bytes: Callable[[int], None]) -> Findings:
    """What the files say of themselves and of the frontier."""
    found, frontier = Findings(), ground.frontier
    is_at_rest = ground.owner is None and not ground.is_unclean
    is_owned = not is_at_rest
    if frontier.queues is not None:
        found.merge(
            check_queues(
                disk,
                files.consumequeue,
                frontier.queue_file_size,
                frontier.queues,
                is_at_rest=is_at_rest,
                is_owned=is_owned,
                on_bytes=on_bytes,
            )
        )
    if frontier.sparse is not None:
        found.merge(
            check_sparse(
                disk,
                files.sparse,
                frontier.segment_size,
                frontier.sparse,
                is_at_rest=is_at_rest,
                is_owned=is_owned,
                on_bytes=on_bytes,
            )
        )
    return found


class BesideComparison:
    """Takes the log from ``begin``, the first offset of a segment, to where the frontier ends."""

    def __init__(self, config: Config, disk: Disk, files: DataFiles, frontier: Frontier, begin: int) -> None:
        self._files, self._end = files, frontier.phy_offset
        self._queues: QueueComparison | None = None
        self._sparse: SparseComparison | None = None
        self.findings = Findings()
        self.left_out: list[str] = []
        if frontier.queues is None and frontier.sparse is None:
            return
        if frontier.filled_offset < frontier.phy_offset:
            self.left_out.append(f"queues and sparse indexes are filled up to {frontier.filled_offset} only")
            return
        if frontier.queues is not None:
            size = frontier.queue_file_size
            first = plan_queues(
                disk, files.consumequeue, size, frontier.queues, begin, is_cut=True, is_unclean=False, log_begin=begin
            )
            self._queues = QueueComparison(
                disk, files.consumequeue, size, config.outputs.queues_max, first.marks, frontier.queues
            )
        if frontier.sparse is not None:
            self._sparse = SparseComparison(disk, files.sparse, frontier.segment_size, frontier.sparse)

    def take(self, batch: DispatchBatch) -> None:
        """The next stretch of the log."""
        batch = before(batch, self._end)
        if self._queues is not None:
            self._queues.differs(batch)
        if self._sparse is not None:
            self._add_sparse(self._sparse, batch)

    def give_up(self, reason: str) -> None:
        """The log cannot be read there: what it comes to behind that nobody knows."""
        if self._queues is not None or self._sparse is not None:
            self.left_out.append(f"queues and sparse indexes were not compared from there on: {reason}")
        self._add_queues(is_whole=False)
        self._queues = self._sparse = None

    def finish(self) -> None:
        """The log has been given to its end."""
        self._add_queues(is_whole=True)
        if self._sparse is not None:
            self._add_sparse(self._sparse, None)

    def _add_queues(self, *, is_whole: bool) -> None:
        if self._queues is None:
            return
        for found in (*self._queues.differences, *(self._queues.more() if is_whole else ())):
            name = f"consumequeue/{found.path.relative_to(self._files.consumequeue)}"
            self.findings.add(name, found.position, "unit-log", _words(found))

    def _add_sparse(self, sparse: SparseComparison, batch: DispatchBatch | None) -> None:
        for found in sparse.finish() if batch is None else sparse.take(batch):
            self.findings.add(f"sparse/{found.name}", found.position, "entry-log", found.text)


def _words(found: Difference) -> str:
    return f"the unit is {_unit(found.found)}, by the log it is {_unit(found.wanted)}"


def _unit(unit: Unit | None) -> str:
    return "none" if unit is None else f"phy offset {unit.phy_offset}, size {unit.size}, tags code {unit.tags_code}"
