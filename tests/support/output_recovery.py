"""Outputs brought back and made durable by hand, as recovery and the pipeline do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from indexd.consumequeue.check import recover_queues
from indexd.consumequeue.format import QueueMark, QueuesMark
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.output import Output, OutputMark, OutputRecovery, RecoveryScope, Unsynced
from indexd.sparse.check import recover_sparse

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from indexd.sparse.format import SparseMark
    from indexd.storage.disk import Disk

EVERYTHING = 1 << 60


def planned_queues(
    disk: Disk,
    root: Path,
    file_size: int,
    marks: Sequence[QueueMark],
    phy_offset: int = EVERYTHING,
    *,
    is_unclean: bool = False,
    log_begin: int = 0,
) -> OutputRecovery[QueuesMark]:
    """What is left of queues, if all before ``phy_offset`` is believed, and reading the log goes on there."""
    scope = RecoveryScope(phy_offset, phy_offset, log_begin, is_unclean)
    return recover_queues(disk, root, QueuesMark(file_size, tuple(marks)), file_size, scope, 1000)


def planned_sparse(
    disk: Disk, directory: Path, segment_size: int, mark: SparseMark, phy_offset: int, log_begin: int = 0
) -> OutputRecovery[SparseMark]:
    """The same of sparse indexes."""
    scope = RecoveryScope(phy_offset, phy_offset, log_begin, is_unclean=True)
    return recover_sparse(disk, directory, segment_size, mark, mark.interval, scope)


def carried_out(disk: Disk, recovery: OutputRecovery[Any]) -> Unsynced:
    """Done, with what has to be synced for it."""
    unsynced = Unsynced()
    recovery.carry_out(disk, unsynced)
    return unsynced


def made_durable(disk: Disk, output: Output[Any]) -> OutputMark[Any]:
    """All that was built, as a clean stop leaves it."""
    output.flush()
    mark = output.mark()
    sync_files(disk, mark.unsynced)
    sync_dirs(disk, mark.directories)
    output.synced(mark)
    return mark
