"""Outputs: all builders behind one call, and what they have come to.

A batch goes through every builder before the progress moves, so the progress covers what is in all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.reading import Skipped
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.flush.flusher import Progress
from indexd.flush.frontier import UNPROVEN, Frontier, Uncovered, add_uncovered
from indexd.flush.witness import Witness
from indexd.index.service import IndexService
from indexd.sparse.service import SparseService


class Outputs:
    """Applies the log, stretch by stretch, to the builders. One owner, no locks; raises DiskError."""

    def __init__(
        self,
        index: IndexService,
        queues: ConsumeQueueStore | None,
        sparse: SparseService | None,
        frontier: Frontier,
        witness: Witness,
    ) -> None:
        self.index = index
        self.queues = queues
        self.sparse = sparse
        self.witness = witness
        self._builders: tuple[Callable[[DispatchBatch], None], ...] = (
            index.build_index,
            *(output.put_batch for output in self.beside),
        )
        # How many of them have the batch that the disk interrupted.
        self._built = 0
        self.begin_offset = frontier.begin_offset
        self.phy_offset = frontier.phy_offset
        self.store_timestamp = frontier.store_timestamp
        self.messages = frontier.messages
        self.newest_timestamp = frontier.newest_timestamp
        self.uncovered = frontier.uncovered

    def __repr__(self) -> str:
        return f"Outputs([{self.begin_offset}, {self.phy_offset}), messages={self.messages}, {self.index})"

    @property
    def beside(self) -> tuple[ConsumeQueueStore | SparseService, ...]:
        """The outputs besides the key index."""
        return tuple(output for output in (self.queues, self.sparse) if output is not None)

    def apply(self, item: DispatchBatch | Skipped) -> None:
        """Take the next stretch of the log. After a DiskError the same item may be given again."""
        if isinstance(item, Skipped):
            self.uncovered = add_uncovered(self.uncovered, Uncovered(item.begin, item.end, item.reason))
            if item.is_expired and self.queues is not None:
                self.queues.begin_anew()
            self.phy_offset = item.end
            return
        if item.end_offset > self.phy_offset:  # else it is built, and only the log could not be looked at
            for build in self._builders[self._built :]:
                build(item)
                self._built += 1
            self._built = 0
            self.phy_offset = item.end_offset
            self.store_timestamp = item.last_store_timestamp or self.store_timestamp
            self.messages += item.rows
        self._note_unproven(item)
        self.witness.saw(item, self.messages)

    def _note_unproven(self, batch: DispatchBatch) -> None:
        if batch.newest_timestamp is not None:
            self.newest_timestamp = batch.newest_timestamp
        self.uncovered = tuple(gap for gap in self.uncovered if not gap.is_unproven)
        if batch.unproven_from is not None:
            gap = Uncovered(batch.unproven_from, batch.end_offset, UNPROVEN)
            self.uncovered = add_uncovered(self.uncovered, gap)

    def check_log(self) -> None:
        """DisturbedError if the log no longer says what was built from it, as far as a quick look tells."""
        self.witness.check()

    def remember_log(self) -> None:
        """For the next ``check_log``: what stands now at the end of what is built."""
        self.witness.remember_tail(self.phy_offset)

    def expire(self, min_phy_offset: int) -> list[str]:
        """The log begins at ``min_phy_offset`` now: drop what only points before it; the names of removed files."""
        self.uncovered = tuple(gap for gap in self.uncovered if gap.end > min_phy_offset)
        expired = self.index.delete_expired_file(min_phy_offset)
        for output in self.beside:
            expired += output.delete_expired(min_phy_offset)
        return expired

    def progress(self) -> Progress:
        """What stands now, for the flusher."""
        return Progress(
            index=self.index.mark(),
            queues=self.queues.mark() if self.queues is not None else None,
            sparse=self.sparse.mark() if self.sparse is not None else None,
            begin_offset=self.begin_offset,
            phy_offset=self.phy_offset,
            store_timestamp=self.store_timestamp,
            messages=self.messages,
            newest_timestamp=self.newest_timestamp,
            uncovered=self.uncovered,
            evidence=self.witness.points(),
        )

    def flush(self) -> None:
        """Bring the open files into the form a clean stop leaves."""
        self.index.flush()

    def synced(self, progress: Progress) -> None:
        """``progress`` is durable: what is full there is closed, and what no frontier names any more is removed."""
        names = {mark.name for mark in progress.index.files if mark.full}
        self.index.synced(tuple(file for file in progress.index.unsynced if file.path.name in names))
        self.index.remove_expired(progress.index.expired)
        if self.queues is not None and progress.queues is not None:
            self.queues.synced(progress.queues)
            self.queues.remove_expired(progress.queues.expired)
        if self.sparse is not None and progress.sparse is not None:
            self.sparse.synced(progress.sparse)
            self.sparse.remove_expired(progress.sparse.expired)

    def close(self) -> None:
        """Close what is open; writes nothing."""
        self.index.close()
        for output in self.beside:
            output.close()
