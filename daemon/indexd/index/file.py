"""Builds index files: IndexFile, one that is being built, and IndexService, the list of them (spec 3 and 4).

Slots live in memory as the bytes of the file; entries pass through a buffer. ``publish`` brings the file up to date for
every reader (page cache), ``flush`` makes it durable. Nothing is shared with the flusher but the descriptor: it syncs
what an earlier ``publish`` has written.

Files are in creation order; all but the last are full and never change again. Names only grow, whatever the clock does.

The check at the end of this module reads only, by pread, once through each file: header, every entry, every slot,
nothing else there. Entries are judged one after the other by the kernel; what it finds is put into words here.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns
from indexd.config import Config
from indexd.errors import DiskError, MissingOk
from indexd.findings import KEPT_MAX, Findings
from indexd.index.check_kernel import CODES, check_entries
from indexd.index.entries import WalkedEntries, read_slots, walk_entries
from indexd.index.format import ENTRY_SIZE, FLAVOURS, HEADER_SIZE, FileMark, Flavour, IndexHeader, IndexLayout
from indexd.index.kernel import (
    BEGIN_PHY_OFFSET,
    BEGIN_TIMESTAMP,
    BUFFER_FULL,
    END_PHY_OFFSET,
    END_TIMESTAMP,
    FILE_FULL,
    INDEX_COUNT,
    SLOTS_PER_PAGE_SHIFT,
    USED_SLOT_COUNT,
    count_right,
    put_batch,
)
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
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.names import is_index_name, next_index_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Entries that are collected before they are written: 1.25 MiB.
ENTRIES_PER_WRITE = 65536
_SLOTS_PER_PAGE = 1 << SLOTS_PER_PAGE_SHIFT
_INT_MAX = (1 << 31) - 1


class IndexFile:
    """One file of a layout, open for putting. Raises DiskError; one owner, no locks."""

    def __init__(
        self, path: Path, file: DiskFile, layout: IndexLayout, header: IndexHeader, slots: NDArray[np.uint32]
    ) -> None:
        self.path = path
        self.file = file
        self.layout = layout
        self._state = np.array(header.values(), dtype=np.int64)
        self._slots = slots
        self._pages = np.zeros((layout.hash_slot_num >> SLOTS_PER_PAGE_SHIFT) + 1, dtype=np.uint8)
        self._buffer = np.empty((min(ENTRIES_PER_WRITE, layout.index_num), 5), dtype=np.uint32)
        self._buffered = 0
        # Of our own last write; None when there was one since it was looked at.
        self._mtime_ns: int | None = None
        # Of the entries that are written, None when nobody knows it, and of the slots as the last flush left them.
        self._entries_crc: int | None = 0
        self._slots_crc: int | None = None

    @classmethod
    def create(cls, disk: Disk, path: Path, layout: IndexLayout, previous: IndexHeader | None) -> IndexFile:
        """Make a preallocated file that inherits the end of ``previous`` (spec 3.5); nothing is left of one that fails.

        The index count on disk stays 0 until the first put or flush (spec 3.1).
        """
        end = previous or IndexHeader()
        timestamp, phy_offset = max(end.end_timestamp, 0), max(end.end_phy_offset, 0)
        header = IndexHeader(timestamp, timestamp, phy_offset, phy_offset)
        file = disk.open_write(path, create=True)
        try:
            file.allocate(layout.file_size)
            file.pwrite(header.pack()[:36], 0)
        except DiskError:
            file.close()
            disk.unlink(path)
            raise
        return cls(path, file, layout, header, np.zeros(layout.hash_slot_num, dtype=np.uint32))

    @classmethod
    def load(cls, disk: Disk, path: Path, layout: IndexLayout, mark: FileMark) -> IndexFile:
        """Open a file whose bytes are known to hold ``mark``: after a clean stop, or after recovery."""
        with disk.open_read(path) as file:
            slots = read_slots(file, layout)
        loaded = cls(path, disk.open_write(path), layout, mark.header, slots)
        loaded._entries_crc = mark.entries_crc
        return loaded

    @property
    def header(self) -> IndexHeader:
        """The header as it stands in memory."""
        return IndexHeader(*(int(value) for value in self._state))

    def put_batch(self, batch: DispatchBatch, flavour: Flavour, row: int, key: int) -> tuple[int, int, int]:
        """Put rows from (``row``, ``key``) on, key -1 being a row's start; what it came to, and where to go on.

        FILE_FULL: in another file. BUFFER_FULL: here, after ``write_entries``. Never touches the disk itself.
        """
        status, next_row, next_key, written = put_batch(
            batch.columns, batch.rows, row, key, flavour.skip_mask, flavour.counts_every_put, self._slots, self._pages,
            self._buffer[self._buffered :], self.layout.index_num, self._state,
        )  # fmt: skip
        self._buffered += int(written)
        self._slots_crc = None
        return int(status), int(next_row), int(next_key)

    def publish(self) -> None:
        """Write what is new: entries, then the header, then the slot pages that changed."""
        self.write_entries()
        pages = np.flatnonzero(self._pages)
        if len(pages) == 0:
            return
        self._write(self.header.pack(), 0)
        breaks = np.flatnonzero(np.diff(pages) > 1)
        for first, last in zip(pages[np.r_[0, breaks + 1]], pages[np.r_[breaks, len(pages) - 1]], strict=True):
            begin, end = int(first) * _SLOTS_PER_PAGE, (int(last) + 1) * _SLOTS_PER_PAGE
            self._write(self._slots[begin:end].view(np.uint8).data, self.layout.slot_position(begin))
        self._pages[:] = 0

    def mark(self, *, full: bool) -> FileMark:
        """What is published, and when that was written: a later time is somebody else's."""
        if self._mtime_ns is None:
            self._mtime_ns = self.file.stamp().mtime_ns
        slots_crc = zlib.crc32(self._slots.data) if full else self._slots_crc
        return FileMark(self.path.name, self.header, full, self._mtime_ns, self._entries_crc, slots_crc)

    def flush(self) -> None:
        """Publish and make durable; an empty file's index count becomes 1 on disk, as RocketMQ's flush has it (3.8)."""
        self.publish()
        self._write(self.header.pack(), 0)
        self._slots_crc = zlib.crc32(self._slots.data)
        self.file.fsync()

    def close(self) -> None:
        """Close the descriptor."""
        self.file.close()

    def write_entries(self) -> None:
        """Write what is buffered; after a DiskError it still is."""
        if self._buffered:
            first = int(self._state[INDEX_COUNT]) - self._buffered
            entries = self._buffer[: self._buffered].view(np.uint8).data
            self._write(entries, self.layout.entry_position(first))
            if self._entries_crc is not None:
                self._entries_crc = zlib.crc32(entries, self._entries_crc)
            self._buffered = 0

    def _write(self, data: Buffer, position: int) -> None:
        self._mtime_ns = None
        self.file.pwrite(data, position)


class IndexService(Output[tuple[FileMark, ...]]):
    """The key index: of all its files only the last is open. New files are named by ``names``, else by ``clock``."""

    name, label, folder = "index", "key", "index"
    clock: Callable[[], float] = staticmethod(time.time)

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        layout: IndexLayout,
        flavour: Flavour,
        names: Iterator[str] | None = None,
    ) -> None:
        super().__init__(disk, directory)
        self.layout = layout
        self.flavour = flavour
        self._names = names
        self._full: list[FileMark] = []
        self._open: IndexFile | None = None
        # How far a batch has come: the disk may refuse at any point.
        self._interrupted: tuple[DispatchBatch, int, int] | None = None
        #: Since it was opened.
        self.entries = self.rolls = self.expired_files = 0

    @classmethod
    def of(cls, config: Config, disk: Disk, directory: Path) -> Self:
        """An empty one, as configured."""
        layout = IndexLayout(config.index.hash_slot_num, config.index.index_num)
        return cls(disk, directory, layout, FLAVOURS[config.index.flavour])

    @staticmethod
    def load_kernels() -> None:
        """Have putKey and what recovery asks compiled, or loaded from where it is kept."""
        columns, slots, numbers = make_columns(1, 1), np.zeros(1, np.uint32), np.zeros(CODES, np.int64)
        columns.key_start[:] = 0
        file = IndexFile(Path(), DiskFile(Path(), -1, Disk()), IndexLayout(1, 2), IndexHeader(), slots)
        file.put_batch(DispatchBatch(columns, 0, 0, 0, TopicTable()), FLAVOURS["5.4"], 0, -1)
        entries, keys = file._buffer, (numbers[:1], columns.key_hash)
        count_right(columns.phy_offset, columns.store_timestamp, *keys, 0, entries, np.ones(1, np.int32), 0, 0)
        check_entries(entries[:0], 1, slots, False, 2, 0, 0, numbers[:3], numbers, np.empty((1, 4), np.int64))

    def built_with(self, _: tuple[FileMark, ...]) -> tuple[str, int, int]:
        """Nothing: the frontier itself has the layout."""
        return "index_num", self.layout.index_num, self.layout.index_num

    def load(self, held: tuple[FileMark, ...]) -> None:
        """Take over files that are known to be as the marks say: after a clean stop, or after recovery."""
        for mark in held:
            if mark.full:
                self._full.append(mark)
            else:
                self._open = IndexFile.load(self._disk, self.directory / mark.name, self.layout, mark)

    def adopt(self, mark: FileMark) -> None:
        """What is now known of a full file, as somebody has read it; nothing if it is gone meanwhile."""
        self._full = [mark if known.full and known == mark else known for known in self._full]

    def build(self, batch: DispatchBatch) -> None:
        """Index a batch: RocketMQ's buildIndex for each row, in order (spec 4.2)."""
        row, key = 0, -1
        if self._interrupted is not None and self._interrupted[0] is batch:
            _, row, key = self._interrupted
        while row < batch.rows:
            if self._open is None:
                self._open = self._create_file()
            file = self._open
            count = file.header.index_count
            status, row, key = file.put_batch(batch, self.flavour, row, key)
            self.entries += file.header.index_count - count
            # Up to here it is in the file's buffer, whatever the disk says next.
            self._interrupted = (batch, row, key)
            if status == FILE_FULL:
                self._roll(file)
            elif status == BUFFER_FULL:
                file.write_entries()
        self._interrupted = None

    def publish(self) -> None:
        """Let every reader see what has been built: once a drain, for a batch touches slots all over the file."""
        if self._open is not None:
            self.unsynced.add(self._open.path)
            self._open.publish()

    def mark(self) -> OutputMark[tuple[FileMark, ...]]:
        """What stands now, published."""
        self.publish()
        files = list(self._full)
        if self._open is not None:
            files.append(self._open.mark(full=False))
        return self._mark(tuple(files))

    def flush(self) -> None:
        """Make the open file durable with its header as in memory: what a clean stop leaves (spec 3.8)."""
        if self._open is not None:
            self.unsynced.add(self._open.path)
            self._open.flush()

    def expire(self, min_phy_offset: int) -> list[str]:
        """Leave out full files that end before the log begins, oldest first, and say their names (spec 4.6).

        RocketMQ never removes the last file of its list; neither does this.
        """
        names = []
        while self._full and self._full[0].header.end_phy_offset < min_phy_offset:
            if len(self._full) == 1 and self._open is None:
                break
            names.append(self._full.pop(0).name)
        self.expired_files += len(names)
        return self._leave_out(self.directory / name for name in names)

    def close(self) -> None:
        """Close what is open; writes nothing."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def recover(self, held: tuple[FileMark, ...] | None, _: RecoveryScope) -> OutputRecovery[tuple[FileMark, ...]]:
        """As it is: what of it holds is decided first of all (``recovery.index``), and where all else is to stand."""
        return OutputRecovery(held or ())

    def check(self, held: tuple[FileMark, ...] | None, scope: CheckScope) -> Findings:
        """Every file's header, entries and slots; nothing else there."""
        return check_index(self._disk, self.directory, held or (), self.layout, self.flavour, scope)

    def parts(self, held: tuple[FileMark, ...]) -> list[tuple[str, tuple[FileMark, ...]]]:
        """Each file."""
        return [(mark.name, (mark,)) for mark in held]

    def totals(self, held: tuple[FileMark, ...]) -> Row:
        """Each file takes its whole size; the newest one fills."""
        return {
            "files": len(held),
            "entries": sum(mark.header.entries for mark in held),
            "bytes": len(held) * self.layout.file_size,
            "fillRatio": ratio(held[-1].header.entries if held else 0, self.layout.index_num - 1),
        }

    def figures(self) -> Row:
        """Since it was opened; ``indexFiles`` are those that are there."""
        return {
            "indexEntries": self.entries,
            "indexFiles": len(self._full) + (self._open is not None),
            "rollOvers": self.rolls,
            "expiredFiles": self.expired_files,
        }

    def _create_file(self) -> IndexFile:
        last, previous = (self._full[-1].name, self._full[-1].header) if self._full else (None, None)
        name = next_index_name(self.clock(), last) if self._names is None else next(self._names)
        file = IndexFile.create(self._disk, self.directory / name, self.layout, previous)
        self.unsynced.add(file.path)
        self.unsynced.add_directory(self.directory)
        return file

    def _roll(self, file: IndexFile) -> None:
        self.publish()
        self._full.append(file.mark(full=True))
        self.close()
        self.rolls += 1


def time_difference(store_timestamp: int, begin_timestamp: int) -> int:
    """What an entry stores of a time: whole seconds since ``begin_timestamp``, in 31 bits (spec rocketmq-store 3.4)."""
    if begin_timestamp <= 0:
        return 0
    difference = (store_timestamp - begin_timestamp + (1 << 63)) % (1 << 64) - (1 << 63)  # a Java long wraps
    return min(max(difference, 0) // 1000, _INT_MAX)


FIELDS = (
    ("begin timestamp", 0),
    ("end timestamp", 8),
    ("begin phy offset", 16),
    ("end phy offset", 24),
    ("used slot count", 32),
    ("index count", 36),
)
# What the kernel's codes are called, and where in the entry the number stands that is wrong.
ENTRY_KINDS = (
    ("entry-key-hash", 0, "the key hash {value} is negative"),
    ("entry-phy-offset", 4, "the phy offset {value} is negative"),
    ("entry-phy-offset-range", 4, "the phy offset {value} lies outside the header's {begin} to {end}"),
    ("entry-order", 4, "the phy offset {value} is lower than {wanted} before it"),
    ("entry-time-difference", 12, "the time difference {value} is negative"),
    ("chain-loop", 16, "the previous entry is the entry itself, not {wanted}"),
    ("chain-forward", 16, "the previous entry {value} is a later one, not {wanted}"),
    ("chain-range", 16, "the previous entry {value} is none of this file's, not {wanted}"),
    ("chain-previous", 16, "the previous entry is {value}, but its slot held {wanted} then"),
)


def _judge_slot(layout: IndexLayout, count: int, value: int, wanted: int) -> tuple[str, str]:
    """The kind of finding, and its words, for a slot that holds ``value`` and not its newest entry, ``wanted``.

    Entries below ``count`` are written.
    """
    newest = f"its newest entry is {wanted}" if wanted else "it has no entries"
    if value == 0:
        return "slot-wiped", f"empty, but {newest}"
    if not 0 < value < layout.index_num:
        return "slot-range", f"{value} is no entry of this file; {newest}"
    if value >= count:
        return "slot-behind-last", f"names entry {value}, but the last one is {count - 1}; {newest}"
    return "slot-old", f"names entry {value}, but {newest}"


def note_entries(mark: FileMark, layout: IndexLayout, walked: WalkedEntries, findings: Findings) -> None:
    """Put what was found of a file's entries into words."""
    for number, code, value, wanted in walked.found.tolist():
        what, at, text = ENTRY_KINDS[code]
        begin, end = mark.header.begin_phy_offset, mark.header.end_phy_offset
        words = f"entry {number}: {text.format(value=value, wanted=wanted, begin=begin, end=end)}"
        findings.add(f"index/{mark.name}", layout.entry_position(number) + at, what, words)
        walked.counts[code] -= 1
    for (what, _, _), left in zip(ENTRY_KINDS, walked.counts.tolist(), strict=True):
        findings.count(what, left)


def check_file(
    file: DiskFile,
    mark: FileMark,
    layout: IndexLayout,
    flavour: Flavour,
    condition: Condition,
    on_bytes: Callable[[int], None],
) -> Findings:
    """Everything that does not hold of one file; ``on_bytes`` is told how many bytes more have been looked at."""
    findings, name, size = Findings(), f"index/{mark.name}", file.size()
    if size != layout.file_size:
        findings.add(name, min(size, layout.file_size), "file-size", f"{size} bytes, not {layout.file_size}")
        on_bytes(layout.file_size)
        return findings
    walked = walk_entries(file, layout, mark.header, flavour, on_bytes)
    note_entries(mark, layout, walked, findings)
    # The last entry is the mark's, within what the layout has room for.
    first, count = layout.entry_position(0), min(max(mark.header.index_count, 1), layout.index_num)
    if condition is not Condition.CUT_SHORT:
        check_slots(file, name, count, layout, condition, walked, findings)
    _check_header(file, name, mark, condition, walked, findings)
    on_bytes(layout.file_size - (walked.number - 1) * ENTRY_SIZE)
    # Entry 0 is never written; neither is what lies behind the last entry, unless somebody is or was building there.
    if any(file.pread(ENTRY_SIZE, first)):
        findings.add(name, first, "entry-0", "entry 0 is not zero, and is never written")
    is_at_rest = condition is Condition.AT_REST
    first, found = find_nonzero(file, layout.entry_position(count), layout.file_size) if is_at_rest else (0, 0)
    if found:
        text = f"{found} bytes behind the last entry, {count - 1}, are not zero"
        findings.add(name, first, "behind-last-entry", text)
    return findings


def _check_header(
    file: DiskFile, name: str, mark: FileMark, condition: Condition, walked: WalkedEntries, findings: Findings
) -> None:
    # One finding for each field that the file, the frontier and the entries do not agree on.
    marked = mark.header.values()
    stored = marked if condition is Condition.CUT_SHORT else IndexHeader.unpack(file.pread(HEADER_SIZE, 0)).values()
    said = {USED_SLOT_COUNT: walked.used_slot_count}
    if walked.first is not None and walked.last is not None:
        said |= {BEGIN_PHY_OFFSET: walked.first.phy_offset, END_PHY_OFFSET: walked.last.phy_offset}
    for field, ((title, position), here, wanted) in enumerate(zip(FIELDS, stored, marked, strict=True)):
        entries = said.get(field, wanted)
        # What a daemon has built since is not looked at: all but the end's time only grow, the begin from nothing.
        has_begun = field in (BEGIN_TIMESTAMP, BEGIN_PHY_OFFSET) and mark.header.entries
        may_be_newer = field in (BEGIN_TIMESTAMP, END_TIMESTAMP) or here >= wanted
        seen = wanted if condition is Condition.GROWING and may_be_newer and not has_begun else here
        if seen == wanted == entries:
            continue
        others = [f"the frontier says {wanted}"] if seen != wanted else []
        others += [f"the entries say {entries}"] if field in said else []
        findings.add(name, position, f"header-{title.replace(' ', '-')}", f"{title} {here}, but {' and '.join(others)}")


def check_slots(
    file: DiskFile,
    name: str,
    count: int,
    layout: IndexLayout,
    condition: Condition,
    walked: WalkedEntries,
    findings: Findings,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """One finding for each slot that does not name the newest of its entries; these slots, and what stands there."""
    stored, newest = (slots.byteswap().view(np.int32) for slots in (read_slots(file, layout), walked.slots))
    is_wrong = stored != newest
    if condition is Condition.GROWING:
        # The header is written before the slots, so read behind them it counts every entry that they name.
        above = IndexHeader.unpack(file.pread(HEADER_SIZE, 0)).index_count
        is_wrong &= (stored < count) | (stored >= min(above, layout.index_num))
    wrong = np.flatnonzero(is_wrong)
    for slot in wrong[:KEPT_MAX].tolist():
        what, text = _judge_slot(layout, count, int(stored[slot]), int(newest[slot]))
        findings.add(name, layout.slot_position(slot), what, f"slot {slot}: {text}")
    findings.count("slot", max(len(wrong) - KEPT_MAX, 0))
    return wrong, stored[wrong]


def check_index(
    disk: Disk,
    directory: Path,
    marks: tuple[FileMark, ...],
    layout: IndexLayout,
    flavour: Flavour,
    scope: CheckScope,
) -> Findings:
    """All files of a data directory: each against its mark, and, if nobody is at work there, no others."""
    found = Findings()
    for mark in marks:
        if mark in scope.sound:
            continue
        condition, wrong = Condition.AT_REST if mark.full else scope.condition, None
        with MissingOk(), disk.open_read(directory / mark.name) as file:
            wrong = check_file(file, mark, layout, flavour, condition, scope.on_bytes)
        begin = scope.log_begin() if wrong is None else None
        if wrong is not None:
            found.merge(wrong)
            if len(wrong) == 0:
                scope.sound[mark] = None
        elif begin is not None and mark.full and mark.header.end_phy_offset < begin:
            scope.notes.append(f"index/{mark.name} is gone, and only named messages that have expired")
        else:
            found.add(f"index/{mark.name}", 0, "file-missing", "the frontier names it, but it is not there")
    if scope.is_complete and disk.exists(directory):
        named = {mark.name for mark in marks}
        for name, _ in disk.list_dir(directory):
            if is_index_name(name) and name not in named:
                found.add(f"index/{name}", 0, "file-unnamed", "the frontier does not name it, and no daemon runs")
    return found
