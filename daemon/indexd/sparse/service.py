"""SparseService: an OffsetIndex and a TimeIndex for every commitlog segment, built from batches (spec kafka-index 8).

A message's logical offset is its segment's base plus its ordinal there. A segment is sealed when the first message of a
later one is seen. The files do not depend on how the log is split into batches. The service knows no frontier: ``mark``
says what stands now, the flusher makes that durable and writes it down.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indexd.commitlog.dispatch import DispatchBatch
from indexd.errors import IndexdError
from indexd.sparse.format import SegmentMark, SparseMark, index_name, time_index_name
from indexd.sparse.segment import GrowingSegment
from indexd.storage.disk import Disk


@dataclass(frozen=True, slots=True)
class SparseProgress:
    """All pairs at one moment; files and directories that have to be synced for it; names that can go after this."""

    mark: SparseMark
    unsynced_files: tuple[Path, ...] = ()
    unsynced_directories: tuple[Path, ...] = ()
    expired: tuple[str, ...] = ()
    #: The writes that it covers, as the service counts them.
    writes: int = 0


@dataclass(slots=True)
class SparseCounters:
    """Plain numbers that only grow; ``entries`` of both kinds."""

    messages: int = 0
    entries: int = 0
    sealed: int = 0
    expired_segments: int = 0


class SparseService:
    """Builds into ``directory``, which has to be there. Raises DiskError; one owner, no locks.

    ``segment_size``: of the commitlog, bytes. ``interval``: more than so many bytes of log lie between two offset
    entries (Kafka's index.interval.bytes). Batches need their column ``size``.
    """

    def __init__(self, disk: Disk, directory: Path, segment_size: int, interval: int) -> None:
        self._disk = disk
        self._directory = directory
        self.segment_size = segment_size
        self.interval = interval
        self._sealed: list[SegmentMark] = []
        self._growing: GrowingSegment | None = None
        #: All before it is built: rows of a batch that was interrupted, or is given once more, are passed over.
        self._phy_offset = 0
        # When each file, or the directory, was changed last and not synced since, in writes.
        self._unsynced: dict[Path, int] = {}
        self._writes = 0
        self._expired: list[str] = []
        self.counters = SparseCounters()

    def __repr__(self) -> str:
        return f"SparseService({len(self._sealed)} sealed, growing={self._growing}, {self.counters})"

    def load(self, mark: SparseMark) -> None:
        """Take over files that are known to be as ``mark`` says: after a clean stop, or after recovery."""
        if mark.interval != self.interval:
            raise IndexdError(f"{self._directory} was built with interval {mark.interval}, not {self.interval}")
        self._sealed = list(mark.sealed)
        self._phy_offset = mark.phy_offset
        if mark.active is not None:
            self._growing = GrowingSegment.load(
                self._disk, self._directory, mark.segments[-1], mark.active, self.segment_size, self.interval
            )

    def put_batch(self, batch: DispatchBatch) -> None:
        """Take the messages that are not in yet. After a DiskError the same batch may be given again."""
        phy_offsets, sizes = batch.columns.phy_offset, batch.columns.size
        row = int(np.searchsorted(phy_offsets[: batch.rows], self._phy_offset))
        while row < batch.rows:
            growing = self._segment_of(int(phy_offsets[row]))
            before = growing.entries
            taken = growing.put(batch.columns, row, batch.rows)
            if taken == row:
                self._write(growing)
                continue
            self.counters.entries += growing.entries - before
            self.counters.messages += taken - row
            row = taken
            self._phy_offset = int(phy_offsets[row - 1]) + int(sizes[row - 1])
        self._phy_offset = max(self._phy_offset, batch.end_offset)

    def publish(self) -> None:
        """Write what has been built: readers see it from then on."""
        if self._growing is not None:
            self._write(self._growing)

    def seal(self) -> None:
        """The segment that grows is over, though no message of a later one has come. After a DiskError try it again."""
        if self._growing is not None:
            self._seal(self._growing)

    def mark(self) -> SparseProgress:
        """What stands now, published; the rest is what a flusher has to sync for it."""
        self.publish()
        growing = self._growing
        mark = SparseMark(
            self.interval,
            self._phy_offset,
            (*self._sealed, *((growing.mark(),) if growing is not None else ())),
            growing.active() if growing is not None else None,
        )
        files = tuple(path for path in self._unsynced if path != self._directory)
        directories = (self._directory,) if self._directory in self._unsynced else ()
        return SparseProgress(mark, files, directories, tuple(self._expired), self._writes)

    def synced(self, progress: SparseProgress) -> None:
        """The files and directories of ``progress`` are durable as they were then."""
        for path in (*progress.unsynced_files, *progress.unsynced_directories):
            if self._unsynced.get(path, progress.writes + 1) <= progress.writes:
                del self._unsynced[path]

    def delete_expired(self, log_begin: int) -> list[str]:
        """Leave out sealed segments that end before the log begins, oldest first, and say their files' names.

        The files themselves go with ``remove_expired``, once a frontier without them is durable.
        """
        names: list[str] = []
        while self._sealed and self._sealed[0].base + self.segment_size <= log_begin:
            base = self._sealed.pop(0).base
            names += (index_name(base), time_index_name(base))
            self.counters.expired_segments += 1
        for name in names:
            self._unsynced.pop(self._directory / name, None)
        self._expired += names
        return names

    def remove_expired(self, names: tuple[str, ...]) -> None:
        """Remove files that no durable frontier names any more."""
        for name in names:
            if name in self._expired:
                self._disk.unlink(self._directory / name)
                self._expired.remove(name)

    def flush(self) -> None:
        """Publish, and make all durable."""
        progress = self.mark()
        for path in progress.unsynced_files:
            with self._disk.open_write(path) as file:
                file.fsync()
        for path in progress.unsynced_directories:
            self._disk.sync_dir(path)
        self.synced(progress)

    def close(self) -> None:
        """Close what is open; writes nothing."""
        if self._growing is not None:
            self._growing.close()
            self._growing = None

    def _segment_of(self, phy_offset: int) -> GrowingSegment:
        base = phy_offset - phy_offset % self.segment_size
        if self._growing is not None and self._growing.base < base:
            self._seal(self._growing)
        if self._growing is None:
            if self._sealed and self._sealed[-1].base >= base:
                raise IndexdError(f"segment {base} is sealed, and a message at {phy_offset} came")
            self._growing = GrowingSegment.create(self._disk, self._directory, base, self.segment_size, self.interval)
            self._changed(*self._growing.paths, self._directory)
        elif self._growing.base > base:
            raise IndexdError(f"segment {self._growing.base} grows, and a message at {phy_offset} came")
        return self._growing

    def _seal(self, growing: GrowingSegment) -> None:
        self._changed(*growing.paths)
        before = growing.entries
        try:
            self._sealed.append(growing.seal())
        finally:
            self.counters.entries += growing.entries - before
        self._growing = None
        self.counters.sealed += 1

    def _write(self, growing: GrowingSegment) -> None:
        if growing.has_pending:
            self._changed(*growing.paths)
            growing.write()

    def _changed(self, *paths: Path) -> None:
        # Before the change: where the disk refuses half way, a file was changed as well.
        self._writes += 1
        self._unsynced.update(dict.fromkeys(paths, self._writes))
