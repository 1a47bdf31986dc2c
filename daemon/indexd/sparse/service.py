"""SparseService: an OffsetIndex and a TimeIndex for every commitlog segment, built from batches (spec kafka-index 8).

A message's logical offset is its segment's base plus its ordinal there. A segment is sealed when the first message of a
later one is seen. The files do not depend on how the log is split into batches. What the kernel finds is kept by
GrowingSegment until it is written, so that a disk that refuses loses nothing.

What can be said of the files without the log is checked at the end of this module: an entry lies behind the one before
it, more than an interval of log on, and inside its segment. Recovery asks the sizes and the last entries only; a
segment whose files do not hold is built again, and so is everything behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, make_columns
from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.commitlog.kernel import Columns
from indexd.config import Config
from indexd.errors import MissingOk
from indexd.findings import KEPT_MAX, Findings
from indexd.output import (
    CheckScope,
    Condition,
    Output,
    OutputMark,
    OutputRecovery,
    RecoveryScope,
    Row,
    find_nonzero,
    ratio,
)
from indexd.sparse.format import (
    INT32_MAX,
    NO_TIMESTAMP,
    OFFSET_ENTRY_SIZE,
    ActiveMark,
    SegmentMark,
    SparseMark,
    growing_sizes,
    own_base,
)
from indexd.sparse.kernel import (
    ENTRY_TYPES,
    MESSAGES,
    final_time_entry,
    pack_entries,
    segment_entries,
    unpack_entries,
)
from indexd.storage.disk import Disk

# Entries of either kind that are collected before they are written: 64 KiB of them.
ENTRIES_PER_WRITE = 8192
ENTRIES_PER_READ = 1 << 16
# So many of a file's newest entries recovery looks at.
_NEWEST = 2
# A segment's first message has no offset entry, but may have a time entry; a timestamp below 0 never has.
_NOTHING = np.array([[(0, 0)], [(NO_TIMESTAMP, -1)]], dtype=np.int64)
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


def check_sparse(disk: Disk, directory: Path, segment_size: int, mark: SparseMark, scope: CheckScope) -> Findings:
    """Everything of the files that does not hold."""
    findings = Findings()
    for segment in mark.segments:
        _check_pair(disk, directory, segment_size, mark, segment, scope, findings)
    named = {segment.base for segment in mark.segments}
    for other, _ in disk.list_dir(directory) if scope.is_complete and disk.exists(directory) else ():
        base = own_base(other)
        if base is not None and base not in named:
            findings.add(f"sparse/{other}", 0, "file-unnamed", "the frontier does not name it, and no daemon runs")
    return findings


def recover_sparse(
    disk: Disk, directory: Path, segment_size: int, held: SparseMark | None, interval: int, scope: RecoveryScope
) -> OutputRecovery[SparseMark]:
    """What of ``held`` is kept if what lies behind ``scope.believed`` is not believed; reads only.

    Segments that have expired are left out. Where the mark covers more than what is believed, the segment in which that
    ends goes, with all behind it: at most one segment of log is read again for that.
    """
    mark, believed = held or SparseMark(interval), max(scope.believed, scope.log_begin)
    end = mark.phy_offset if mark.phy_offset <= believed else believed - believed % segment_size
    kept: list[SegmentMark] = []
    active, found = None, Findings()
    newest = CheckScope(Condition.CUT_SHORT, is_complete=False, on_bytes=lambda _: None)
    for segment in mark.segments:
        if segment.base + segment_size <= scope.log_begin:
            continue
        if segment.base >= end:
            break
        is_last = segment is mark.segments[-1]
        growing = mark.active if is_last else None
        # A sealed last one was closed for a message that the disk then refused; the log may have been cut since.
        is_cut = is_last and growing is None and end < segment.base + segment_size
        if not is_cut:
            _check_pair(disk, directory, segment_size, mark, segment, newest, found, entries=_NEWEST)
        if is_cut or found:
            end = segment.base
            break
        kept.append(segment)
        active = growing
    named = {name for segment in kept for name, _ in segment.files}
    there = disk.list_dir(directory) if disk.exists(directory) else []
    is_lost = held is None or end < mark.phy_offset or scope.believed < scope.phy_offset
    refill_from = max(end, scope.log_begin)
    # What grows may have been written on, and trimmed, after the mark.
    growing_files = kept[-1].files if active is not None and scope.is_unclean else ()
    lengths = growing_sizes(segment_size, mark.interval)
    return OutputRecovery(
        SparseMark(mark.interval, end, tuple(kept), active),
        refill_from if is_lost and refill_from < scope.phy_offset else None,
        delete=tuple(directory / name for name, _ in there if own_base(name) is not None and name not in named),
        cut=tuple(
            (directory / name, size, length) for (name, size), length in zip(growing_files, lengths, strict=False)
        ),
        reasons=tuple(f"{finding.file}: {finding.text}" for finding in found.kept[:1]),
    )


def _check_pair(
    disk: Disk,
    directory: Path,
    segment_size: int,
    mark: SparseMark,
    segment: SegmentMark,
    scope: CheckScope,
    findings: Findings,
    *,
    entries: int = INT32_MAX,
) -> None:
    # What of a segment's files does not hold, as far as they tell by themselves; at most so many of the newest entries.
    active = mark.active if segment is mark.segments[-1] else None
    for is_time, (name, size) in enumerate(segment.files):
        last, entry, file_name = _NOTHING[is_time], ENTRY_TYPES[is_time], f"sparse/{name}"
        width = entry.itemsize
        with MissingOk(), disk.open_read(directory / name) as file:
            there = file.size()
            if there < size or (there > size and active is None):
                findings.add(file_name, min(there, size), "file-size", f"{there} bytes, but the entries take {size}")
            for position in range(max(size - entries * width, 0), size, ENTRIES_PER_READ * width):
                data = file.pread(min(size - position, ENTRIES_PER_READ * width), position)
                scope.on_bytes(len(data))
                rows = np.concatenate([last, unpack_entries(data, entry)])
                for what, at, wrong in _rules(rows, is_time, segment, segment_size, mark.interval):
                    found = np.flatnonzero(wrong)
                    for row in found[:KEPT_MAX].tolist():
                        text = f"entry {position // width + row}: {rows[row + 1].tolist()} behind {rows[row].tolist()}"
                        findings.add(file_name, position + row * width + at, what, text)
                    findings.count(what, max(len(found) - KEPT_MAX, 0))
                last = rows[-1:]
            if is_time and active is not None and there >= size and last[0, 0] != active.last_timestamp:
                text = f"the last entry's timestamp is {last[0, 0]}, not {active.last_timestamp} as the frontier says"
                findings.add(file_name, max(size - width, 0), "segment-end", text)
            first, count = find_nonzero(file, size, there) if scope.is_at_rest and active is not None else (0, 0)
            if count:
                findings.add(file_name, first, "behind-last-entry", f"{count} bytes behind the last entry are not zero")
            continue
        findings.add(file_name, 0, "file-missing", "the frontier names it, but it is not there")


def _rules(
    rows: NDArray[np.int64], is_time: int, segment: SegmentMark, segment_size: int, interval: int
) -> list[tuple[str, int, NDArray[np.bool_]]]:
    # What of entries cannot be, given the one before each: kind, place in the entry, which. Row 0 is before all.
    (firsts, seconds), offsets = rows[1:].T, rows[:, is_time]
    is_outside = (offsets[1:] < 0) | (offsets[1:] >= segment.messages)
    falls = (offsets[1:] <= offsets[:-1]) & ~is_outside
    if is_time:
        return [("entry-offset", 8, is_outside), ("entry-order", 0, firsts <= rows[:-1, 0]), ("entry-order", 8, falls)]
    least = np.where(is_outside, 1, offsets[1:]) * FRAME_SIZE_MIN
    is_misplaced = (seconds < least) | (seconds > segment_size - FRAME_SIZE_MIN)
    is_close = (np.diff(rows[:, 1]) <= interval) & ~is_misplaced
    return [
        ("entry-offset", 0, is_outside),
        ("entry-position", 4, is_misplaced),
        ("entry-order", 0, falls),
        ("entry-distance", 4, is_close),
    ]
