"""Recovers the outputs besides the key index: brings them to its physical offset, and says what of the log they lack.

What is missing of them alone does not touch the key index: the log is read once more from there (``refill``), and where
that stands meanwhile is in the frontier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from indexd.commitlog.batcher import DispatchBatch, before
from indexd.commitlog.format import Corrupt, NotYetWritten, Reason
from indexd.commitlog.reader import LogReader, Skipped
from indexd.compare.queues import QueueComparison
from indexd.config import Config
from indexd.consumequeue.check import kept_queues
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.flush.frontier import Frontier, Uncovered
from indexd.flush.pipeline import Pipeline
from indexd.output import Output, OutputRecovery, RecoveryScope
from indexd.storage.disk import Disk

_PAUSE = 0.01
# So much log is read again between two frontiers that say how far it has come.
_BYTES_PER_COMMIT = 4 << 30


class SecondaryRecovery:
    """From what a frontier names of these outputs to outputs that hold all before its physical offset.

    ``outputs`` with whether each is wanted. ``plan`` reads only, and may be asked again with another offset;
    ``carry_out`` changes files, after a frontier with what ``named`` gives is durable. Raises DiskError.
    """

    def __init__(
        self,
        disk: Disk,
        outputs: Sequence[tuple[Output[Any], bool]],
        known: Frontier,
        log_begin: int,
        *,
        unclean: bool,
        forced: bool,
    ) -> None:
        self._disk, self._outputs, self._known = disk, outputs, known
        self._log_begin = log_begin
        self._is_unclean, self._is_forced = unclean, forced
        self._plans: list[OutputRecovery[Any]] = []
        #: From here on the log has to be read again for them, up to where they are to stand.
        self.refill_from: int | None = None
        #: What did not hold, a line each.
        self.reasons: list[str] = []

    def plan(self, phy_offset: int, doubtful_from: int | None = None, queues_until: int | None = None) -> None:
        """All is to stand at ``phy_offset``.

        Behind ``doubtful_from`` nothing is believed that was not compared with the log, behind ``queues_until``
        nothing at all. What a refill that was broken off had come to was compared by nobody.
        """
        limits = [phy_offset, self._known.filled_offset]
        limits += [queues_until] if queues_until is not None else []
        limits += [self._log_begin] if self._is_forced else []
        believed = min(limits)
        self._plans, starts = [], []
        for output, is_wanted in self._outputs:
            own = believed if output.is_compared or doubtful_from is None else min(believed, doubtful_from)
            scope = RecoveryScope(phy_offset, own, self._log_begin, self._is_unclean, self._is_forced)
            plan = output.recover(self._known.outputs.get(output.name) if is_wanted else None, scope)
            self._plans.append(plan)
            if is_wanted and plan.refill_from is not None:
                starts.append(plan.refill_from)
        self.refill_from = min(starts, default=None)
        self.reasons = [reason for plan in self._plans for reason in plan.reasons]
        if queues_until is not None:
            self.reasons.append(f"the ConsumeQueues are not what the log says from offset {queues_until} on")

    def named(self, base: Frontier) -> Frontier:
        """``base`` with what has been planned: true before and after the files are changed."""
        held = {
            output.name: plan.held if is_wanted else None
            for (output, is_wanted), plan in zip(self._outputs, self._plans, strict=True)
        }
        return replace(base.with_outputs(**held), refill_offset=self.refill_from)

    def comparison(self, config: Config, begin: int, end: int) -> QueueComparison | None:
        """What the ConsumeQueues hold of log bytes ``[begin, end)``, to be compared; None where there are none."""
        name = ConsumeQueueStore.name
        held = self._known.outputs.get(name)
        store = next((one for one, is_wanted in self._outputs if one.name == name and is_wanted), None)
        if store is None or held is None or self._known.refill_offset is not None or self._is_forced:
            return None
        at_begin, at_end = (RecoveryScope(at, at, self._log_begin, self._is_unclean) for at in (begin, end))
        whole, is_whole = kept_queues(self._disk, store.directory, held, at_end)
        if not is_whole:
            return None
        begins, _ = kept_queues(self._disk, store.directory, held, at_begin)
        return QueueComparison(self._disk, store.directory, held.limit or config.outputs.queues_max, begins, whole)

    def carry_out(self) -> None:
        """Make the files what the plan says, durably; those of an output that is not wanted any more go."""
        for (output, is_wanted), plan in zip(self._outputs, self._plans, strict=True):
            if is_wanted:
                self._disk.make_dir(output.directory)
            plan.carry_out(self._disk, output.unsynced)

    @property
    def wanted(self) -> list[Output[Any]]:
        """The outputs that are asked for."""
        return [output for output, is_wanted in self._outputs if is_wanted]

    def load(self) -> None:
        """Have them stand where the plan says."""
        for (output, is_wanted), plan in zip(self._outputs, self._plans, strict=True):
            if is_wanted:
                output.load(plan.held)


def refill(
    reader: LogReader,
    pipeline: Pipeline,
    begin: int,
    commit: Callable[[int], None],
    on_progress: Callable[[int], None],
) -> None:
    """Read the log from ``begin`` to where ``pipeline`` stands, for all but the key index.

    ``commit`` is told now and then before which physical offset all is filled. What cannot be read (any more) is left
    out, and noted as uncovered.
    """
    end, committed = pipeline.built.phy_offset, begin
    reader.position = begin
    while reader.position < end:
        poll = reader.poll()
        if isinstance(poll, DispatchBatch):
            batch = before(poll, end)
            for output in pipeline.outputs[1:]:
                output.build(batch)
            if batch.end_offset - committed >= _BYTES_PER_COMMIT:
                committed = batch.end_offset
                commit(committed)
            on_progress(batch.end_offset)
        elif isinstance(poll, NotYetWritten) and reader.is_undecided:
            time.sleep(_PAUSE)
        elif isinstance(poll, Skipped):
            if not poll.is_expired:
                pipeline.leave_out(Uncovered(poll.begin, min(poll.end, end), poll.reason))
        elif reader.position < end:  # a segment's end is passed without a batch
            reader.pass_over(end)
            reason = poll.reason if isinstance(poll, Corrupt) else Reason.UNFINISHED.text
            pipeline.leave_out(Uncovered(poll.offset, reader.position, reason))
