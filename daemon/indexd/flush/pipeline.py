"""Pipeline: all outputs of one data directory, from a batch of the log to durable files and a frontier that names them.

OUTPUTS says which outputs there are. A batch goes through every one before the position moves, so what is marked covers
what is in all of them. What is marked is made durable by another thread while building goes on: first the files, then
the checkpoint, then the frontier (ARCHITECTURE.md, decision 5).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from indexd import __version__
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.reader import Skipped
from indexd.commitlog.tail import UNREADABLE_TIMESTAMP
from indexd.config import Config
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import DiskError, DisturbedError
from indexd.flush.frontier import DOUBTED, UNPROVEN, Frontier, StoreCheckpoint, Uncovered, add_uncovered, write_frontier
from indexd.flush.watch import LogChangeDetector
from indexd.index.file import IndexService
from indexd.output import Output, OutputMark
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk, Stamp
from indexd.storage.names import DataFiles

Item = DispatchBatch | Skipped
#: The key index is the first: where it stands, all others are to stand. Another output is one more line here.
OUTPUTS: tuple[type[Output[Any]], ...] = (
    IndexService,
    ConsumeQueueStore,
    SparseService,
)

# So many files are synced one after the other; of more, so many at once.
_MANY = 64
_SYNC_THREADS = 8


@dataclass(frozen=True, slots=True)
class BuildProgress:
    """How far building has come at one moment: the frontier that is true once the files of ``marks`` are durable."""

    frontier: Frontier
    marks: tuple[OutputMark[Any], ...]

    @property
    def phy_offset(self) -> int:
        """All before it is built."""
        return self.frontier.phy_offset

    @property
    def has_work(self) -> bool:
        """Whether there is something to write down besides how far the log was read."""
        return any(mark.expired for mark in self.marks)


@dataclass(slots=True)
class FlushCounters:
    """Plain numbers that only grow; times in seconds."""

    flushes: int = 0
    files_synced: int = 0
    last_seconds: float = 0.0


class Pipeline:
    """``apply``, ``persisted`` and ``finish`` belong to the building thread, ``persist`` to any one other.

    ``built`` is the frontier as it would be of all that is built, ``progress`` what a ``persist`` may be given,
    published; ``frontier`` is durable. Raises DiskError; one of ``persist`` must end the process if it is an fsync's:
    nothing is known after it.
    """

    def __init__(
        self,
        disk: Disk,
        files: DataFiles,
        outputs: Sequence[Output[Any]],
        frontier: Frontier,
        detector: LogChangeDetector,
    ) -> None:
        self._disk = disk
        self._files = files
        self.outputs = tuple(outputs)
        self.frontier = self.built = frontier
        self.detector = detector
        self.counters = FlushCounters()
        #: When the last scrub that went through everything began, ms: in the next frontier.
        self.scrubbed_at = frontier.scrubbed_at
        #: Name -> stamp of what was written down last; empty while that is being replaced.
        self.written: dict[str, Stamp] = {}
        # How many outputs have the batch that the disk interrupted.
        self._done = 0
        self.progress = self.mark()

    @property
    def index(self) -> IndexService:
        """The first output."""
        index = self.outputs[0]
        assert isinstance(index, IndexService)
        return index

    @property
    def is_ahead(self) -> bool:
        """Whether ``progress`` says more than the frontier, or has work left."""
        known, found = self.frontier, self.progress.frontier
        stands = known.phy_offset, known.uncovered, known.stale_head
        return stands != (found.phy_offset, found.uncovered, found.stale_head) or self.progress.has_work

    def apply(self, items: list[Item], log_begin: int) -> list[str]:
        """Build ``items`` and drop what only points before ``log_begin``; the names of files that can go.

        Items that are done are removed, so that after a DiskError the same list goes on where it failed.
        """
        with missing_is_disturbed(self.outputs):
            try:
                while items:
                    self.build(items[0])
                    items.pop(0)
            except DiskError:
                # What was built before the disk failed can be found, and made durable, while it waits.
                self.progress = self.mark()
                raise
            expired = self.expire(log_begin)
            self.progress = self.mark()
            return expired

    def build(self, item: Item) -> None:
        """Take the next range of the log. After a DiskError the same item may be given again."""
        if isinstance(item, Skipped):
            gap = Uncovered(item.begin, item.end, item.reason)
            if item.is_expired:
                for output in self.outputs:
                    output.begin_anew()
            uncovered = add_uncovered(self.built.uncovered, gap)
            self.built = replace(self.built, uncovered=uncovered, phy_offset=item.end, stale_head=None)
            return
        if item.end_offset > self.built.phy_offset:  # else it is built, and only the log could not be looked at
            for output in self.outputs[self._done :]:
                output.build(item)
                self._done += 1
            self._done = 0
            self.built = replace(
                self.built,
                phy_offset=item.end_offset,
                store_timestamp=item.last_store_timestamp or self.built.store_timestamp,
                messages=self.built.messages + item.rows,
            )
        self._note_unproven(item)
        self.detector.saw(item, self.built.messages)

    def _note_unproven(self, batch: DispatchBatch) -> None:
        first = DOUBTED if batch.newest_timestamp == UNREADABLE_TIMESTAMP else UNPROVEN
        reason = next((gap.reason for gap in self.built.uncovered if gap.is_unproven), first)
        uncovered = tuple(gap for gap in self.built.uncovered if not gap.is_unproven)
        if batch.unproven_from is not None:
            uncovered = add_uncovered(uncovered, Uncovered(batch.unproven_from, batch.end_offset, reason))
        newest = self.built.newest_timestamp if batch.newest_timestamp is None else batch.newest_timestamp
        self.built = replace(self.built, uncovered=uncovered, newest_timestamp=newest, stale_head=batch.stale_head)

    def leave_out(self, gap: Uncovered) -> None:
        """A range of what is built already cannot be read any more."""
        gaps = sorted((*self.built.uncovered, gap), key=lambda one: one.begin)
        self.built = replace(self.built, uncovered=reduce(add_uncovered, gaps, ()))

    def expire(self, min_phy_offset: int) -> list[str]:
        """The log begins at ``min_phy_offset`` now: drop what only points before it; the names of files."""
        uncovered = tuple(gap for gap in self.built.uncovered if gap.end > min_phy_offset)
        self.built = replace(self.built, uncovered=uncovered)
        return [name for output in self.outputs for name in output.expire(min_phy_offset)]

    def mark(self) -> BuildProgress:
        """What stands now."""
        marks = tuple(output.mark() for output in self.outputs)
        held = {output.name: mark.held for output, mark in zip(self.outputs, marks, strict=True)}
        evidence = self.detector.points()
        return BuildProgress(replace(self.built, outputs=held, evidence=evidence, refill_offset=None), marks)

    def persist(self, progress: BuildProgress) -> None:
        """Make ``progress`` durable; ``persisted`` is told afterwards."""
        started = time.monotonic()
        progress = replace(progress, frontier=replace(progress.frontier, scrubbed_at=self.scrubbed_at))
        with missing_is_disturbed(self.outputs):
            for mark in progress.marks:
                sync_files(self._disk, mark.unsynced, self._count)
                # The names after what they name: a file that is found is whole.
                sync_dirs(self._disk, mark.directories)
        self.written = {}
        write_down(self._disk, self._files, progress.frontier)
        self.frontier = progress.frontier
        names = self._files.checkpoint.name, self._files.frontier.name
        self.written = {name: stamp for name, stamp in self._disk.stamps(self._files.data).items() if name in names}
        self.counters.flushes += 1
        self.counters.last_seconds = time.monotonic() - started

    def _count(self) -> None:
        # One by one: whoever watches sees that a long flush goes on.
        self.counters.files_synced += 1

    def persisted(self, progress: BuildProgress) -> None:
        """Close what is durable to its end and remove what no frontier names any more.

        Building has gone on meanwhile: what is to be persisted next was marked before these files are closed.
        """
        for output, mark in zip(self.outputs, progress.marks, strict=True):
            output.synced(mark)

    def finish(self) -> None:
        """Bring everything into the form a clean stop leaves, durably, and close it."""
        with missing_is_disturbed(self.outputs):
            for output in self.outputs:
                output.flush()
            progress = self.mark()
        self.persist(progress)
        self.persisted(progress)
        self.close()

    def close(self) -> None:
        """Close what is open; writes nothing."""
        for output in self.outputs:
            output.close()


def make_outputs(config: Config, disk: Disk, data: Path) -> tuple[Output[Any], ...]:
    """Those that are asked for, empty."""
    return tuple(output for output, is_wanted in all_outputs(config, disk, data) if is_wanted)


def all_outputs(config: Config, disk: Disk, data: Path) -> list[tuple[Output[Any], bool]]:
    """Each, and whether it is asked for; the files of others go."""
    return [(kind.of(config, disk, data / kind.folder), kind.is_wanted(config)) for kind in OUTPUTS]


@contextmanager
def missing_is_disturbed(outputs: Sequence[Output[Any]]) -> Iterator[None]:
    """Raises DisturbedError where something of an output's is not there: nobody would put it back, however long."""
    try:
        yield
    except DiskError as error:
        if not (error.is_missing and any(error.path.is_relative_to(output.directory) for output in outputs)):
            raise
        raise DisturbedError(f"{error.path} was removed by somebody else") from error


def write_down(disk: Disk, files: DataFiles, frontier: Frontier) -> None:
    """Replace the checkpoint, then the frontier; what it names has been synced."""
    disk.write_atomically(files.checkpoint, StoreCheckpoint.of(frontier).pack())
    write_frontier(disk, files.frontier, frontier, __version__)


def sync_files(disk: Disk, files: Sequence[Path], count: Callable[[], object] = lambda: None) -> None:
    """Make files durable; thousands at a time: disks sync several together. ``count`` is called for each, here."""

    def sync(file: Path) -> None:
        with disk.open_write(file) as opened:
            opened.fsync()

    _each(sync, files, count)


def sync_dirs(disk: Disk, paths: Sequence[Path]) -> None:
    """Make the names in directories durable; thousands at a time as well."""
    _each(disk.sync_dir, paths)


def _each(sync: Callable[[Path], None], paths: Sequence[Path], count: Callable[[], object] = lambda: None) -> None:
    if len(paths) < _MANY:
        for path in paths:
            sync(path)
            count()
        return
    with ThreadPoolExecutor(_SYNC_THREADS, "sync") as pool:
        for _ in pool.map(sync, paths):
            count()
