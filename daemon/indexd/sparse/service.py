"""SparseService: an OffsetIndex and a TimeIndex for every commitlog segment, built from batches (spec kafka-index 8).

A message's logical offset is its segment's base plus its ordinal there. A segment is sealed when the first message of a
later one is seen. The files do not depend on how the log is split into batches. What the kernel finds is kept by
GrowingSegment until it is written, so that a disk that refuses loses nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.commitlog.kernel import Columns
from indexd.config import Config
from indexd.errors import DiskError, IndexdError
from indexd.findings import Findings
from indexd.output import CheckScope, LogBounds, Output, OutputMark, OutputRecovery, RecoveryScope, Row, ratio
from indexd.sparse.check import check_sparse, check_sparse_mark, recover_sparse
from indexd.sparse.format import (
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY_SIZE,
    ActiveMark,
    SegmentMark,
    SparseMark,
    index_name,
    time_index_name,
)
from indexd.sparse.kernel import (
    MESSAGES,
    OFFSET_ENTRY_TYPE,
    TIME_ENTRY_TYPE,
    active_mark,
    final_time_entry,
    load_kernels,
    message_entries,
    new_state,
    pack_entries,
)
from indexd.sparse.sparse_index import OffsetIndex, TimeIndex
from indexd.storage.disk import Disk

# Entries of either kind that are collected before they are written: 64 KiB of them.
_ENTRIES_PER_WRITE = 8192


def slots(segment_size: int, interval: int) -> int:
    """So many offset entries a segment comes to at most: one in every ``interval`` + 1 bytes or frame."""
    return segment_size // max(interval + 1, FRAME_SIZE_MIN) + 1


class EntryFile(Protocol):
    """What takes the entries of a segment: an OffsetIndex or a TimeIndex, or what compares them with one."""

    path: Path
    base: int
    entries: int

    def extend(self, data: bytes) -> None:
        """Append entries, as the bytes of the file."""

    def trim_to_valid_size(self) -> None:
        """No entry follows."""

    def close(self) -> None:
        """Let go of it."""


class GrowingSegment:
    """Both files of the segment that grows, and the entries that are not written yet. One owner.

    ``slots`` offset entries and two more time entries (Kafka keeps a slot, the roll takes one) fit.
    """

    def __init__(
        self, offsets: EntryFile, times: EntryFile, segment_size: int, interval: int, state: NDArray[np.int64]
    ) -> None:
        self.base = offsets.base
        self.files = offsets, times
        self._end, self._interval, self._state = self.base + segment_size, interval, state
        # Of either kind, with a place more for the roll's; and how many are in use.
        self._pending = np.empty((2, _ENTRIES_PER_WRITE + 1, 2), dtype=np.int64)
        self._counts = [0, 0]

    @classmethod
    def create(cls, disk: Disk, directory: Path, base: int, segment_size: int, interval: int) -> Self:
        """Make both files, over what an earlier try has left; of a try that fails nothing is left."""
        count, path, time_path = slots(segment_size, interval), *(directory / name for name in _names(base))
        disk.unlink(path)
        disk.unlink(time_path)
        offsets = OffsetIndex.create(disk, path, base, count * OFFSET_ENTRY_SIZE)
        try:
            times = TimeIndex.create(disk, time_path, base, (count + 2) * TIME_ENTRY_SIZE)
        except DiskError:
            offsets.close()
            disk.unlink(path)
            raise
        return cls(offsets, times, segment_size, interval, new_state())

    @classmethod
    def load(
        cls, disk: Disk, directory: Path, mark: SegmentMark, active: ActiveMark, segment_size: int, interval: int
    ) -> Self:
        """Open files that are known to hold what the marks say."""
        count, path, time_path = slots(segment_size, interval), *(directory / name for name in _names(mark.base))
        with ExitStack() as opened:
            offsets = opened.enter_context(OffsetIndex.load(disk, path, mark.base, mark.offset_entries, writable=True))
            times = opened.enter_context(TimeIndex.load(disk, time_path, mark.base, mark.time_entries, writable=True))
            # Recovery may have been broken off between cutting a file and giving it its length again.
            offsets.resize(count * OFFSET_ENTRY_SIZE)
            times.resize((count + 2) * TIME_ENTRY_SIZE)
            opened.pop_all()
        return cls(offsets, times, segment_size, interval, np.array([*active, mark.messages], dtype=np.int64))

    @property
    def entries(self) -> int:
        """Of both kinds, with those that are not written yet."""
        return sum(file.entries for file in self.files) + sum(self._counts)

    @property
    def has_pending(self) -> bool:
        """Whether ``write`` would write."""
        return any(self._counts)

    def put(self, columns: Columns, row: int, rows: int) -> int:
        """Take rows of this segment from ``row`` on, as many as there is room for; the first that was not taken.

        Never touches the disk: when nothing was taken, ``write`` makes room.
        """
        offsets, times = (self._pending[kind, count:_ENTRIES_PER_WRITE] for kind, count in enumerate(self._counts))
        row, *more = message_entries(
            columns, row, rows, self.base, self._end, self._interval, self._state, offsets, times
        )
        self._counts = [count + new for count, new in zip(self._counts, more, strict=True)]
        return row

    def write(self) -> None:
        """Append what is collected to the files; after a DiskError the rest of it still is."""
        for kind, entry in enumerate((OFFSET_ENTRY_TYPE, TIME_ENTRY_TYPE)):
            if self._counts[kind]:
                self.files[kind].extend(pack_entries(self._pending[kind, : self._counts[kind]], entry))
                self._counts[kind] = 0

    def seal(self) -> SegmentMark:
        """What Kafka's roll does: a last time entry if there is a later timestamp, both files trimmed and closed.

        After a DiskError it may be called again.
        """
        last = final_time_entry(self._state)
        if last is not None:
            self._pending[1, self._counts[1]] = last
            self._counts[1] += 1
        self.write()
        for file in self.files:
            file.trim_to_valid_size()
        self.close()
        return self.mark()

    def mark(self) -> SegmentMark:
        """What the files hold once ``write`` has written."""
        entries = (file.entries + count for file, count in zip(self.files, self._counts, strict=True))
        return SegmentMark(self.base, int(self._state[MESSAGES]), *entries)

    def active(self) -> ActiveMark:
        """What building goes on with."""
        return active_mark(self._state)

    def close(self) -> None:
        """Close both files as they are; what was collected and not written is lost."""
        for file in self.files:
            file.close()


def _names(base: int) -> tuple[str, str]:
    return index_name(base), time_index_name(base)


class SparseService(Output[SparseMark]):
    """Builds into ``directory``, which has to be there.

    ``segment_size``: of the commitlog, bytes. ``interval``: more than so many bytes of log lie between two offset
    entries (Kafka's index.interval.bytes). Batches need their column ``size``.
    """

    name, label, folder = "sparse", "sparse", "sparse"

    def __init__(self, disk: Disk, directory: Path, segment_size: int, interval: int) -> None:
        super().__init__(disk, directory)
        self.segment_size = segment_size
        self.interval = interval
        self._sealed: list[SegmentMark] = []
        self._growing: GrowingSegment | None = None
        #: All before it is built: rows of a batch that was interrupted, or is given once more, are passed over.
        self._phy_offset = 0
        #: Of both kinds, since it was opened.
        self.entries = 0

    @classmethod
    def of(cls, config: Config, disk: Disk, directory: Path) -> Self:
        """An empty one, as configured."""
        return cls(disk, directory, config.store.segment_size, config.outputs.sparse_interval)

    @classmethod
    def is_wanted(cls, config: Config) -> bool:
        """Whether the configuration asks for it."""
        return config.outputs.sparse

    load_kernels = staticmethod(load_kernels)

    @property
    def empty(self) -> SparseMark:
        """No segment."""
        return SparseMark(self.interval)

    def built_with(self, held: SparseMark) -> tuple[str, int, int]:
        """The distance of two offset entries."""
        return "sparse_interval", held.interval, self.interval

    def load(self, held: SparseMark) -> None:
        """Take over files that are known to be as the mark says: after a clean stop, or after recovery."""
        if held.interval != self.interval:
            raise IndexdError(f"{self.directory} was built with interval {held.interval}, not {self.interval}")
        self._sealed = list(held.sealed)
        self._phy_offset = held.phy_offset
        if held.active is not None:
            self._growing = GrowingSegment.load(
                self._disk, self.directory, held.segments[-1], held.active, self.segment_size, self.interval
            )

    def build(self, batch: DispatchBatch) -> None:
        """Take the messages that are not in yet."""
        phy_offsets, sizes = batch.columns.phy_offset, batch.columns.size
        row = int(np.searchsorted(phy_offsets[: batch.rows], self._phy_offset))
        while row < batch.rows:
            growing = self._segment_of(int(phy_offsets[row]))
            before = growing.entries
            taken = growing.put(batch.columns, row, batch.rows)
            if taken == row:
                self._write(growing)
                continue
            self.entries += growing.entries - before
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

    def mark(self) -> OutputMark[SparseMark]:
        """What stands now, published."""
        self.publish()
        held = SparseMark(self.interval, self._phy_offset, tuple(self._sealed))
        if (growing := self._growing) is not None:
            held = held._replace(segments=(*self._sealed, growing.mark()), active=growing.active())
        return self._mark(held)

    def expire(self, min_phy_offset: int) -> list[str]:
        """Leave out sealed segments that end before the log begins, oldest first, and say their files' names."""
        names: list[str] = []
        while self._sealed and self._sealed[0].base + self.segment_size <= min_phy_offset:
            names += _names(self._sealed.pop(0).base)
        return self._leave_out(self.directory / name for name in names)

    def recover(self, held: SparseMark | None, scope: RecoveryScope) -> OutputRecovery[SparseMark]:
        """What is left of the pairs; a segment whose files do not hold is built again, and all behind it."""
        return recover_sparse(self._disk, self.directory, self.segment_size, held, self.interval, scope)

    def check(self, held: SparseMark, scope: CheckScope) -> Findings:
        """Every entry of every pair; nothing else there."""
        return check_sparse(self._disk, self.directory, self.segment_size, held, scope)

    def check_mark(self, held: SparseMark, bounds: LogBounds) -> list[str]:
        """Each segment's numbers."""
        return [f"sparse indexes: {text}" for text in check_sparse_mark(held, bounds.segment_size)]

    def parts(self, held: SparseMark) -> list[tuple[int, SparseMark]]:
        """Each sealed segment."""
        return [(mark.base, held._replace(segments=(mark,), active=None)) for mark in held.sealed]

    def totals(self, held: SparseMark) -> Row:
        """Entries of both kinds; the growing segment fills."""
        newest = held.segments[-1].offset_entries if held.segments else 0
        return {
            "files": 2 * len(held.segments),
            "entries": sum(segment.offset_entries + segment.time_entries for segment in held.segments),
            "bytes": sum(size for segment in held.segments for _, size in segment.files),
            "fillRatio": ratio(newest, slots(self.segment_size, self.interval)),
        }

    def figures(self) -> Row:
        """Since it was opened."""
        return {"sparseEntries": self.entries}

    def close(self) -> None:
        """Close what is open; writes nothing."""
        if self._growing is not None:
            self._growing.close()
            self._growing = None

    def _segment_of(self, phy_offset: int) -> GrowingSegment:
        base = phy_offset - phy_offset % self.segment_size
        if self._growing is not None and self._growing.base < base:
            self._seal(self._growing)
        if self._growing is None and (not self._sealed or self._sealed[-1].base < base):
            self._growing = GrowingSegment.create(self._disk, self.directory, base, self.segment_size, self.interval)
            self._changed(self._growing)
            self.unsynced.add_directory(self.directory)
        if self._growing is None or self._growing.base > base:
            raise IndexdError(f"a later segment is sealed or grows, and a message at {phy_offset} came")
        return self._growing

    def _seal(self, growing: GrowingSegment) -> None:
        self._changed(growing)
        before = growing.entries
        try:
            self._sealed.append(growing.seal())
        finally:
            self.entries += growing.entries - before
        self._growing = None

    def _write(self, growing: GrowingSegment) -> None:
        if growing.has_pending:
            self._changed(growing)
            growing.write()

    def _changed(self, growing: GrowingSegment) -> None:
        # Before the change: where the disk refuses half way, a file was changed as well.
        for file in growing.files:
            self.unsynced.add(file.path)
