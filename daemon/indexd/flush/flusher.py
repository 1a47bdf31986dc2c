"""Flusher: the one place where written becomes durable and is then written down (ARCHITECTURE.md, decision 5)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from indexd import __version__
from indexd.commitlog.evidence import Evidence
from indexd.consumequeue.progress import QueuesProgress
from indexd.errors import DiskError, DisturbedError
from indexd.flush.checkpoint import StoreCheckpoint
from indexd.flush.frontier import Frontier, Uncovered, write_frontier
from indexd.index.service import IndexMark
from indexd.sparse.service import SparseProgress
from indexd.storage.disk import Disk, Stamp
from indexd.storage.names import DataFiles

# So many files are synced one after the other; of more, so many at once.
_MANY = 64
_SYNC_THREADS = 8


@dataclass(frozen=True, slots=True)
class Progress:
    """How far building has come at one moment: the outputs' marks and the physical offset that they cover."""

    index: IndexMark
    queues: QueuesProgress | None
    sparse: SparseProgress | None
    begin_offset: int
    phy_offset: int
    store_timestamp: int
    messages: int
    uncovered: tuple[Uncovered, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    #: Less than ``phy_offset`` while queues and sparse indexes are built after the key index.
    refill_offset: int | None = None
    newest_timestamp: int | None = None

    @property
    def beside(self) -> tuple[QueuesProgress | SparseProgress, ...]:
        """The outputs besides the key index."""
        return tuple(output for output in (self.queues, self.sparse) if output is not None)

    @property
    def filled_offset(self) -> int:
        """All outputs hold every message before this physical offset."""
        return self.phy_offset if self.refill_offset is None else self.refill_offset

    @property
    def has_expired(self) -> bool:
        """Files wait for a frontier that does not name them, to be removed."""
        return bool(self.index.expired) or any(output.expired for output in self.beside)

    def without(self, done: Progress) -> Progress:
        """What is left to do of this newer one once ``done`` is durable, full files closed and expired ones removed."""
        names = {mark.name for mark in done.index.files if mark.full}
        full = {file for file in done.index.unsynced if file.path.name in names}
        index = replace(
            self.index,
            unsynced=tuple(file for file in self.index.unsynced if file not in full),
            expired=tuple(name for name in self.index.expired if name not in done.index.expired),
        )
        queues, sparse = self.queues, self.sparse
        if queues is not None and done.queues is not None:
            gone = set(done.queues.expired)
            queues = replace(queues, expired=tuple(path for path in queues.expired if path not in gone))
        if sparse is not None and done.sparse is not None:
            left = set(done.sparse.expired)
            sparse = replace(sparse, expired=tuple(name for name in sparse.expired if name not in left))
        return replace(self, index=index, queues=queues, sparse=sparse)


@dataclass(slots=True)
class FlushCounters:
    """Plain numbers that only grow; times in seconds."""

    flushes: int = 0
    files_synced: int = 0
    seconds: float = 0.0
    last_seconds: float = 0.0


class Flusher:
    """Owns checkpoint and frontier. A DiskError of ``persist`` must end the process: nothing is known after it."""

    def __init__(self, disk: Disk, files: DataFiles, frontier: Frontier) -> None:
        self._disk = disk
        self._files = files
        self.frontier = frontier
        self.counters = FlushCounters()
        #: Name -> stamp of what was written down last; empty while that is being replaced.
        self.written: dict[str, Stamp] = {}

    def __repr__(self) -> str:
        return f"Flusher(durable={self.frontier.phy_offset}, files={len(self.frontier.index)}, {self.counters})"

    def persist(self, progress: Progress) -> None:
        """Sync the files of ``progress``, then replace the checkpoint, then the frontier."""
        started = time.monotonic()
        self._sync(progress)
        self.written = {}
        full = [mark for mark in progress.index.files if mark.full]
        has_queues = progress.queues is not None and progress.filled_offset == progress.phy_offset
        StoreCheckpoint(
            physic_msg_timestamp=progress.store_timestamp,
            logics_msg_timestamp=progress.store_timestamp if has_queues else 0,
            index_msg_timestamp=full[-1].header.end_timestamp if full else 0,
            confirm_phy_offset=progress.phy_offset,
        ).write(self._disk, self._files.checkpoint)
        frontier = replace(
            self.frontier,
            begin_offset=progress.begin_offset,
            phy_offset=progress.phy_offset,
            store_timestamp=progress.store_timestamp,
            messages=progress.messages,
            newest_timestamp=progress.newest_timestamp,
            uncovered=progress.uncovered,
            index=progress.index.files,
            queues=progress.queues.marks if progress.queues is not None else None,
            queues_limit=progress.queues.limit if progress.queues is not None else None,
            sparse=progress.sparse.mark if progress.sparse is not None else None,
            refill_offset=progress.refill_offset,
            evidence=progress.evidence,
        )
        write_frontier(self._disk, self._files.frontier, frontier, __version__)
        self.frontier = frontier
        stamps = self._disk.stamps(self._files.data)
        names = (self._files.checkpoint.name, self._files.frontier.name)
        self.written = {name: stamps[name] for name in names if name in stamps}
        self.counters.flushes += 1
        self.counters.last_seconds = time.monotonic() - started
        self.counters.seconds += self.counters.last_seconds

    def _sync(self, progress: Progress) -> None:
        for file in progress.index.unsynced:
            file.file.fsync()
            self._count()
        for output in progress.beside:
            sync_files(self._disk, output.unsynced_files, self._count)
            # The names after what they name: a file that is found is whole.
            sync_dirs(self._disk, output.unsynced_directories)

    def _count(self) -> None:
        # One by one: whoever watches sees that a long flush goes on.
        self.counters.files_synced += 1


def sync_files(disk: Disk, paths: Sequence[Path], count: Callable[[], object] = lambda: None) -> None:
    """Make files durable; DisturbedError if one is not there. Thousands at a time: disks sync several together.

    ``count`` is called for each, in this thread.
    """
    _each(lambda path: _sync_file(disk, path), paths, count)


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
        for done in [pool.submit(sync, path) for path in paths]:
            done.result()
            count()


def _sync_file(disk: Disk, path: Path) -> None:
    try:
        with disk.open_write(path) as file:
            file.fsync()
    except DiskError as error:
        if not error.is_missing:
            raise
        raise DisturbedError(f"{path} was removed by somebody else") from error
