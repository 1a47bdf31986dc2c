"""The outputs beside the key index: what of them holds, and what the log has to give again.

Queues and sparse indexes are brought to the same physical offset as the key index. What is missing of them alone does
not touch it: the log is read once more from there (``refill``), and where it stands meanwhile is in the frontier.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from indexd.commitlog.batcher import DispatchBatch, before
from indexd.commitlog.format import Corrupt, NotYetWritten, Reason
from indexd.commitlog.reader import LogReader, Skipped
from indexd.compare.queues import QueueComparison
from indexd.config import Config
from indexd.consumequeue import recover as queues_recovery
from indexd.consumequeue.recover import QueuesPlan, QueuesRecovered
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.flush.flusher import Outputs
from indexd.flush.frontier import Frontier, Uncovered
from indexd.sparse import recover as sparse_recovery
from indexd.sparse.format import SparseMark
from indexd.sparse.recover import SparsePlan
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

_PAUSE = 0.01
# So much log is read again between two frontiers that say how far it has come.
_BYTES_PER_COMMIT = 4 << 30


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is built beside the key index, as the configuration says."""

    queues: bool
    queue_file_size: int
    queues_max: int
    sparse: bool
    sparse_interval: int
    segment_size: int

    @classmethod
    def of(cls, config: Config) -> Wanted:
        """Read off the configuration."""
        return cls(
            config.outputs.consume_queue,
            config.store.consume_queue_file_size,
            config.outputs.queues_max,
            config.outputs.sparse,
            config.outputs.sparse_interval,
            config.store.segment_size,
        )

    def make(self, disk: Disk, files: DataFiles) -> tuple[ConsumeQueueStore | None, SparseService | None]:
        """Builders of what is wanted, empty."""
        queues = ConsumeQueueStore(disk, files.consumequeue, self.queue_file_size, self.queues_max)
        sparse = SparseService(disk, files.sparse, self.segment_size, self.sparse_interval)
        return queues if self.queues else None, sparse if self.sparse else None


class Beside:
    """From what a frontier names of these outputs to builders that hold all before its physical offset.

    ``plan`` reads only, and may be asked again with another offset; ``carry_out`` changes files, after a frontier with
    what ``named`` gives is durable. Raises DiskError.
    """

    def __init__(
        self,
        disk: Disk,
        files: DataFiles,
        wanted: Wanted,
        known: Frontier,
        log_begin: int,
        *,
        unclean: bool,
        forced: bool,
    ) -> None:
        self._disk, self._files, self._wanted, self._known = disk, files, wanted, known
        self._log_begin = log_begin
        self._is_unclean, self._is_forced = unclean, forced
        self._queues: QueuesPlan | None = None
        self._sparse: SparsePlan | None = None
        self._recovered = QueuesRecovered()
        self._limit: int | None = None
        self._queues_until: int | None = None
        #: From here on the log has to be read again for them, up to where they are to stand.
        self.refill_from: int | None = None

    def __repr__(self) -> str:
        return f"Beside({self._wanted}, refill_from={self.refill_from})"

    def plan(self, phy_offset: int, doubtful_from: int | None = None, queues_until: int | None = None) -> None:
        """All is to stand at ``phy_offset``.

        What sparse indexes say behind ``doubtful_from``, and queues behind ``queues_until``, is not believed.
        """
        known, wanted, begin = self._known, self._wanted, self._log_begin
        starts = [phy_offset, max(known.filled_offset, begin)]
        self._limit = known.queues_limit
        if known.queues_limit is not None and (self._is_forced or wanted.queues_max > known.queues_limit):
            # There is room now for queues that were left out.
            starts.append(begin)
            self._limit = None
        if self._is_forced or (wanted.queues and known.queues is None) or (wanted.sparse and known.sparse is None):
            starts.append(begin)
        self._queues_until = queues_until
        if self._is_forced:
            queues_until = begin
        elif queues_until is not None and wanted.queues:
            starts.append(queues_until)
            doubtful_from = min(queues_until, phy_offset if doubtful_from is None else doubtful_from)
        sound = min(phy_offset, max(known.filled_offset, begin))
        if known.refill_offset is not None:
            # What a refill that was broken off had come to was compared with the log by nobody.
            doubtful_from = min(sound, phy_offset if doubtful_from is None else doubtful_from)
        # A refill that was broken off and whose log has expired meanwhile left a gap: the queues begin anew behind it.
        sound_queues = min(phy_offset, known.filled_offset) if known.filled_offset < begin else sound
        self._queues = self._plan_queues(sound_queues if queues_until is None else min(sound_queues, queues_until))
        if wanted.queues and self._queues.refill_from is not None:
            starts.append(self._queues.refill_from)
        # They pass over what they have, however early the log is read again for the queues.
        sound = begin if self._is_forced else phy_offset if doubtful_from is None else min(phy_offset, doubtful_from)
        self._sparse = self._plan_sparse(max(sound, begin))
        if wanted.sparse and sound < phy_offset:
            starts.append(max(self._sparse.mark.phy_offset, begin))
        elif wanted.sparse and self._sparse.refill_from is not None:
            starts.append(self._sparse.refill_from)
        self.refill_from = min(starts) if min(starts) < phy_offset else None

    def named(self, base: Frontier) -> Frontier:
        """``base`` with what has been planned: true before and after the files are changed."""
        return replace(
            base,
            queue_file_size=self._wanted.queue_file_size,
            queues=self._queues.marks if self._queues and self._wanted.queues else None,
            queues_limit=self._limit if self._wanted.queues else None,
            sparse=self._sparse.mark if self._sparse and self._wanted.sparse else None,
            refill_offset=self.refill_from,
        )

    def comparison(self, begin: int, end: int) -> QueueComparison | None:
        """What the queues hold of log bytes ``[begin, end)``, to be compared with it; None where there are none."""
        known, wanted = self._known, self._wanted
        if known.queues is None or not wanted.queues or known.refill_offset is not None or self._is_forced:
            return None
        whole = self._plan_queues(end)
        if whole.refill_from is not None:
            return None
        return QueueComparison(
            self._disk,
            self._files.consumequeue,
            wanted.queue_file_size,
            known.queues_limit or wanted.queues_max,
            self._plan_queues(begin).marks,
            whole.marks,
        )

    @property
    def reasons(self) -> list[str]:
        """What did not hold, a line each."""
        found = [reason for plan in (self._queues, self._sparse) if plan is not None for reason in plan.reasons]
        if self._queues_until is not None:
            found.append(f"the ConsumeQueues are not what the log says from offset {self._queues_until} on")
        return found

    def carry_out(self) -> None:
        """Make the files what the plan says, durably; those of an output that is not wanted any more go."""
        assert self._queues is not None
        assert self._sparse is not None
        for directory, is_wanted in (
            (self._files.consumequeue, self._wanted.queues),
            (self._files.sparse, self._wanted.sparse),
        ):
            if is_wanted:
                self._disk.make_dir(directory)
        self._recovered = queues_recovery.carry_out(self._disk, self._queues)
        sparse_recovery.carry_out(self._disk, self._sparse)

    def open(self, frontier: Frontier) -> tuple[ConsumeQueueStore | None, SparseService | None]:
        """The builders, standing where ``frontier`` says."""
        queues, sparse = self._wanted.make(self._disk, self._files)
        if queues is not None:
            recovered = self._recovered
            files, directories = recovered.unsynced_files, recovered.unsynced_directories
            queues.load(frontier.queues or (), files, directories, frontier.queues_limit)
        if sparse is not None and frontier.sparse is not None:
            sparse.load(frontier.sparse)
        return queues, sparse

    def _plan_queues(self, phy_offset: int) -> QueuesPlan:
        known = self._known
        return queues_recovery.plan(
            self._disk,
            self._files.consumequeue,
            self._wanted.queue_file_size,
            known.queues if known.queues is not None and self._wanted.queues else (),
            phy_offset,
            # Also where it is not lower: a drain that the disk broke off may have left units behind it.
            is_cut=True,
            is_unclean=self._is_unclean,
            log_begin=self._log_begin,
        )

    def _plan_sparse(self, phy_offset: int) -> SparsePlan:
        mark = SparseMark(self._wanted.sparse_interval)
        if self._wanted.sparse and self._known.sparse is not None:
            mark = self._known.sparse
        return sparse_recovery.plan(
            self._disk,
            self._files.sparse,
            self._wanted.segment_size,
            mark,
            phy_offset,
            log_begin=self._log_begin,
        )


def refill(
    reader: LogReader,
    outputs: Outputs,
    begin: int,
    commit: Callable[[int], None],
    on_progress: Callable[[int], None],
) -> None:
    """Read the log from ``begin`` to where ``outputs`` stand, for all but the key index.

    ``commit`` is told now and then before which physical offset all is filled. What cannot be read (any more) is left
    out, and noted as uncovered.
    """
    end, committed = outputs.phy_offset, begin
    reader.position = begin
    while reader.position < end:
        poll = reader.poll()
        if isinstance(poll, DispatchBatch):
            batch = before(poll, end)
            for output in outputs.beside:
                output.put_batch(batch)
            if batch.end_offset - committed >= _BYTES_PER_COMMIT:
                committed = batch.end_offset
                commit(committed)
            on_progress(batch.end_offset)
        elif isinstance(poll, NotYetWritten) and reader.is_undecided:
            time.sleep(_PAUSE)
        elif isinstance(poll, Skipped):
            if not poll.is_expired:
                outputs.leave_out(Uncovered(poll.begin, min(poll.end, end), poll.reason))
        elif reader.position < end:  # a segment's end is passed without a batch
            reader.pass_over(end)
            reason = poll.reason if isinstance(poll, Corrupt) else Reason.UNFINISHED.text
            outputs.leave_out(Uncovered(poll.offset, reader.position, reason))
