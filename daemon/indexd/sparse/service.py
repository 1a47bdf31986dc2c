"""SparseService: an OffsetIndex and a TimeIndex for every commitlog segment, built from batches (spec kafka-index 8).

A message's logical offset is its segment's base plus its ordinal there. A segment is sealed when the first message of a
later one is seen. The files do not depend on how the log is split into batches. What the kernel finds is kept by
GrowingSegment until it is written, so that a disk that refuses loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from indexd.commitlog.batcher import DispatchBatch, make_columns
from indexd.commitlog.kernel import Columns
from indexd.config import Config
from indexd.findings import Findings
from indexd.output import CheckScope, Output, OutputMark, OutputRecovery, RecoveryScope, Row, ratio
from indexd.sparse.check import check_sparse, recover_sparse
from indexd.sparse.format import (
    OFFSET_ENTRY_SIZE,
    ActiveMark,
    SegmentMark,
    SparseMark,
    growing_sizes,
)
from indexd.sparse.kernel import (
    ENTRY_TYPES,
    MESSAGES,
    final_time_entry,
    pack_entries,
    segment_entries,
)
from indexd.storage.disk import Disk

# Entries of either kind that are collected before they are written: 64 KiB of them.
ENTRIES_PER_WRITE = 8192
_NEW = ActiveMark(0, -1, 0, -1)


class GrowingSegment:
    """The entries of a segment: how many of each kind have been written, and those that have not. No disk."""

    def __init__(self, mark: SegmentMark, segment_size: int, interval: int, active: ActiveMark = _NEW) -> None:
        self.base, self._end, self._interval = mark.base, mark.base + segment_size, interval
        self._state = np.array([*active, mark.messages], dtype=np.int64)
        self._written = [mark.offset_entries, mark.time_entries]
        # Of either kind, with a place more for the roll's; and how many are in use.
        self._pending = np.empty((2, ENTRIES_PER_WRITE + 1, 2), dtype=np.int64)
        self._counts = [0, 0]

    def put(self, columns: Columns, row: int, rows: int) -> int:
        """Take rows of this segment from ``row`` on, as many as there is room for; the first that was not taken."""
        left = slice(row, row + int(np.searchsorted(columns.phy_offset[row:rows], self._end)))
        # Each message is a batch of its own, whose offset is its ordinal.
        positions, sizes = columns.phy_offset[left] - self.base, columns.size[left].astype(np.int64)
        ordinals = np.arange(len(sizes)) + self._state[MESSAGES]
        pending = (self._pending[kind, count:ENTRIES_PER_WRITE] for kind, count in enumerate(self._counts))
        taken, *more = segment_entries(
            positions, sizes, ordinals, columns.store_timestamp[left], 0, len(sizes), self._interval, self._state,
            *pending,
        )  # fmt: skip
        self._counts = [count + int(new) for count, new in zip(self._counts, more, strict=True)]
        return row + int(taken)

    def end(self) -> None:
        """No message follows: Kafka's roll adds a last time entry if there is a later timestamp."""
        last = final_time_entry(self._state)
        if last is not None:
            self._pending[1, self._counts[1]] = last
            self._counts[1] += 1

    def write(self, write: Callable[[int, int, bytes], None]) -> None:
        """Give ``write`` the kind, byte position and bytes of what is collected; where it raises, that still is."""
        for kind, entry in enumerate(ENTRY_TYPES):
            if self._counts[kind]:
                data = pack_entries(self._pending[kind, : self._counts[kind]], entry)
                write(kind, self._written[kind] * entry.itemsize, data)
                self._written[kind] += self._counts[kind]
                self._counts[kind] = 0

    def mark(self) -> SegmentMark:
        """What the files hold once ``write`` has written."""
        return SegmentMark(self.base, int(self._state[MESSAGES]), *self._written)

    def active(self) -> ActiveMark:
        """What building goes on with."""
        return ActiveMark(*self._state[:MESSAGES].tolist())


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

    @staticmethod
    def load_kernels() -> None:
        """Have the rule compiled, or loaded from where it is kept."""
        GrowingSegment(SegmentMark(0, 0, 0, 0), 1, 0).put(make_columns(1, 1), 0, 0)

    def built_with(self, held: SparseMark) -> tuple[str, int, int]:
        """The distance of two offset entries."""
        return "sparse_interval", held.interval, self.interval

    def load(self, held: SparseMark) -> None:
        """Take over files that are known to be as the mark says: after a clean stop, or after recovery."""
        self._sealed = list(held.sealed)
        self._phy_offset = held.phy_offset
        if held.active is not None:
            self._growing = GrowingSegment(held.segments[-1], self.segment_size, self.interval, held.active)

    def build(self, batch: DispatchBatch) -> None:
        """Take the messages that are not in yet."""
        phy_offsets, sizes = batch.columns.phy_offset, batch.columns.size
        row = int(np.searchsorted(phy_offsets[: batch.rows], self._phy_offset))
        while row < batch.rows:
            taken = self._segment_of(int(phy_offsets[row])).put(batch.columns, row, batch.rows)
            if taken == row:
                self.publish()
                continue
            row, self._phy_offset = taken, int(phy_offsets[taken - 1]) + int(sizes[taken - 1])
        self._phy_offset = max(self._phy_offset, batch.end_offset)

    def publish(self) -> None:
        """Write what has been built: readers see it from then on."""
        if (growing := self._growing) is None:
            return
        paths = [self.directory / name for name, _ in growing.mark().files]

        def write(kind: int, position: int, data: bytes) -> None:
            # Before the change: where the disk refuses half way, the file was changed as well.
            self.unsynced.add(paths[kind])
            with self._disk.open_write(paths[kind]) as file:
                file.pwrite(data, position)
            self.entries += len(data) // ENTRY_TYPES[kind].itemsize

        growing.write(write)

    def seal(self) -> None:
        """The segment that grows is over: its last time entry, both files trimmed. After a DiskError try it again."""
        if (growing := self._growing) is None:
            return
        growing.end()
        self.publish()
        for name, size in growing.mark().files:
            self.unsynced.add(self.directory / name)
            with self._disk.open_write(self.directory / name) as file:
                file.truncate(size)
        self._sealed.append(growing.mark())
        self._growing = None

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
            names += [name for name, _ in self._sealed.pop(0).files]
        return self._leave_out(self.directory / name for name in names)

    def recover(self, held: SparseMark | None, scope: RecoveryScope) -> OutputRecovery[SparseMark]:
        """What is left of the pairs; a segment whose files do not hold is built again, and all behind it."""
        return recover_sparse(self._disk, self.directory, self.segment_size, held, self.interval, scope)

    def check(self, held: SparseMark | None, scope: CheckScope) -> Findings:
        """Every entry of every pair; nothing else there."""
        return check_sparse(self._disk, self.directory, self.segment_size, held or SparseMark(self.interval), scope)

    def parts(self, held: SparseMark) -> list[tuple[int, SparseMark]]:
        """Each sealed segment."""
        return [(mark.base, held._replace(segments=(mark,), active=None)) for mark in held.sealed]

    def totals(self, held: SparseMark) -> Row:
        """Entries of both kinds; the growing segment fills."""
        newest = held.segments[-1].offset_entries * OFFSET_ENTRY_SIZE if held.segments else 0
        return {
            "files": 2 * len(held.segments),
            "entries": sum(segment.offset_entries + segment.time_entries for segment in held.segments),
            "bytes": sum(size for segment in held.segments for _, size in segment.files),
            "fillRatio": ratio(newest, growing_sizes(self.segment_size, self.interval)[0]),
        }

    def figures(self) -> Row:
        """Since it was opened."""
        return {"sparseEntries": self.entries}

    def _segment_of(self, phy_offset: int) -> GrowingSegment:
        base = phy_offset - phy_offset % self.segment_size
        if self._growing is not None and self._growing.base < base:
            self.seal()
        if self._growing is not None:
            return self._growing
        mark = SegmentMark(base, 0, 0, 0)
        # Over what an earlier try has left.
        for (name, _), size in zip(mark.files, growing_sizes(self.segment_size, self.interval), strict=True):
            file, _ = self._disk.open_or_create(self.directory / name)
            with file:
                file.truncate(0)
                file.truncate(size)
            self.unsynced.add(file.path)
        self.unsynced.add_directory(self.directory)
        self._growing = GrowingSegment(mark, self.segment_size, self.interval)
        return self._growing
