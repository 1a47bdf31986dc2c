"""Holds one index file against itself, and its entries against the messages of a stretch of the log, side by side.

Against itself: the entries are put again into slots as putKey does it. Where every link and every slot is as that
leaves it, all entries are reachable. Else the chains of the slots concerned are walked as selectPhyOffset walks them.

Against the log: a file in log order, as brokers write them, is read once from front to back, window by window. One
whose entries stand elsewhere has those of the stretch sorted first: 36 bytes an entry of them in memory meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.audit.kernel import (
    NOTED_COLUMNS,
    NOTED_MAX,
    UNREACHABLE,
    WITHOUT_MESSAGE,
    count_missing,
    match_rows,
    walk_chains,
)
from indexd.audit.plan import NEVER, BrokerFile, phy_offsets
from indexd.audit.result import FileSeen, Notes, Orphans, Part
from indexd.commitlog.batcher import DispatchBatch
from indexd.errors import MissingOk
from indexd.index.check import ENTRY_KINDS, judge_slot
from indexd.index.check_kernel import (
    FOUND,
    LAST_PHY_OFFSET,
    PHY_NEGATIVE,
    PHY_ORDER,
    PHY_OUTSIDE,
    USED_SLOT_COUNT,
    check_entries,
)
from indexd.index.entries import (
    ENTRIES_PER_READ,
    first_entry_at,
    phy_offset_of,
    read_entries,
    read_slots,
    time_diff_of,
)
from indexd.index.format import ENTRY_SIZE, FLAVOURS, HEADER_SIZE, IndexHeader, IndexLayout
from indexd.storage.disk import Disk, DiskFile

#: What the kernel's codes are called, and where in the entry the number stands that is wrong.
KINDS = (
    ("entry-without-message", 4, "no message begins at {phy}, where it points"),
    ("entry-without-key", 0, "key hash {value}, but the message at {phy} has no such key"),
    ("entry-hash", 0, "key hash {value}, but the message at {phy} has the key {wanted} there"),
    ("entry-twice", 0, "key hash {value} of the message at {phy} once more"),
    ("entry-time-difference", 12, "the time difference is {value}, but for the message at {phy} it is {wanted}"),
)
BEHIND_LOG = "entry-behind-log"
_ENTRIES_PER_WINDOW = 1 << 18
_FOUND_MAX = 4096
# A broker writes entry, slot and header one after the other: what is seen in between is gone a moment later.
_LOOKS = 3
_PAUSE = 0.05
_UNKNOWN = np.iinfo(np.int64).min


class Rows(NamedTuple):
    """Messages ``first`` .. ``last - 1`` of a batch."""

    batch: DispatchBatch
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What a file came to by itself.

    ``findable`` has a byte an entry number, 0 where no walk reaches; it is empty when all are reached. ``is_ordered``:
    offsets never fall and all lie where the file points. ``seen`` and ``notes`` are for the task that owns the file.
    """

    findable: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    is_ordered: bool = True
    seen: FileSeen | None = None
    notes: Notes = field(default_factory=Notes)

    @property
    def is_sound(self) -> bool:
        """Whether entries may be taken as they come: in the order of the log, and all of them reached by walks."""
        return self.is_ordered and len(self.findable) == 0


def check_file(
    disk: Disk,
    folder: Path,
    layout: IndexLayout,
    file: BrokerFile,
    log_begin: int,
    wait: Callable[[int], None] = lambda _: None,
) -> FileCheck | None:
    """Read a file from front to back and judge it; None if it has expired. Raises DiskError.

    ``wait`` is called with the bytes that are read next.
    """
    with MissingOk(), disk.open_read(folder / file.name) as opened:
        return _FileChecker(opened, layout, file, wait).check(log_begin)
    return None  # if it has not expired, its messages are a hole now


class _FileChecker:
    def __init__(self, opened: DiskFile, layout: IndexLayout, file: BrokerFile, wait: Callable[[int], None]) -> None:
        self._opened, self._layout, self._file, self._wait = opened, layout, file, wait
        self._notes = Notes()
        self._wanted = np.zeros(layout.hash_slot_num, dtype=np.uint32)
        self._counts = np.zeros(len(ENTRY_KINDS), dtype=np.int64)
        self._found = np.empty((_FOUND_MAX, 4), dtype=np.int64)
        self._state = np.zeros(3, dtype=np.int64)
        self._state[LAST_PHY_OFFSET] = file.begin

    def check(self, log_begin: int) -> FileCheck:
        file, expired = self._file, 0
        for number in range(1, file.count, ENTRIES_PER_READ):
            entries = self._entries(number)
            check_entries(
                entries, number, self._wanted, False, self._layout.index_num, file.begin, file.end,
                self._state, self._counts, self._found,
            )  # fmt: skip
            if file.begin < log_begin:
                offsets = phy_offsets(entries)
                expired += int(np.count_nonzero((offsets >= file.begin) & (offsets < log_begin)))
        found = self._found[: int(self._state[FOUND])]
        self._note_entries(found)
        slots, wrong = self._slots()
        self._note_slots(slots, wrong)
        self._note_header()
        findable = np.empty(0, dtype=np.uint8)
        disorder = int(self._counts[[PHY_ORDER, PHY_OUTSIDE, PHY_NEGATIVE]].sum())
        if self._counts.sum() > disorder or len(wrong):
            findable = self._reach(slots, wrong, found)
        header = file.header
        seen = FileSeen(
            name=file.name,
            entries=file.entries,
            begin=file.begin,
            end=file.end,
            begin_timestamp=header.begin_timestamp,
            end_timestamp=header.end_timestamp,
            used_slots=int(self._state[USED_SLOT_COUNT]),
            used_slot_count=header.used_slot_count,
            expired=expired,
            unreachable=int(np.count_nonzero(findable[1:] == 0)),
            header_count=header.entries,
            header_end=header.end_phy_offset,
            first_time_difference=time_diff_of(self._entry(1)) if file.entries else 0,
            is_full=file.is_full,
        )
        return FileCheck(findable, disorder == 0, seen, self._notes)

    def _entries(self, number: int) -> NDArray[np.uint32]:
        count = min(self._file.count - number, ENTRIES_PER_READ)
        self._wait(count * ENTRY_SIZE)
        return read_entries(self._opened, self._layout, number, count)

    def _entry(self, number: int) -> NDArray[np.uint32]:
        entry: NDArray[np.uint32] = read_entries(self._opened, self._layout, number, 1)[0]
        return entry

    def _header(self) -> IndexHeader:
        return IndexHeader.unpack(self._opened.pread(HEADER_SIZE, 0))

    def _note_entries(self, found: NDArray[np.int64]) -> None:
        # An entry's order says nothing about a broker's file: it may hold the same messages twice.
        file = self._file
        for code, (what, at, text) in enumerate(ENTRY_KINDS):
            if code == PHY_ORDER or not self._counts[code]:
                continue
            for number, _, value, wanted in found[found[:, 1] == code][:NOTED_MAX].tolist():
                words = text.format(value=value, wanted=wanted, begin=file.begin, end=file.end)
                self._notes.add(file.path, self._layout.entry_position(number) + at, what, f"entry {number}: {words}")
            self._notes.counts[what] += int(self._counts[code]) - min(int((found[:, 1] == code).sum()), NOTED_MAX)

    def _slots(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        # Each slot's newest entry of those that were counted when the audit began, and the slots where it is wrong.
        file, wanted = self._file, self._wanted.byteswap().view(np.int32)
        for look in range(_LOOKS):
            stored = read_slots(self._opened, self._layout).byteswap().view(np.int32)
            # A broker has put entries since: which of the older ones stands before them is not asked.
            is_newer = (stored >= max(file.count, file.header.index_count)) & (stored < self._header().index_count)
            wrong = np.flatnonzero((stored != wanted) & ~is_newer)
            if not len(wrong) or file.is_full or look == _LOOKS - 1:
                break
            time.sleep(_PAUSE)
        self._wait(stored.nbytes)
        return np.where(is_newer, wanted, stored), wrong

    def _note_slots(self, slots: NDArray[np.int32], wrong: NDArray[np.int64]) -> None:
        file, layout = self._file, self._layout
        for slot in wrong[:NOTED_MAX].tolist():
            wanted = int(self._wanted[slot : slot + 1].byteswap()[0])
            what, text = judge_slot(layout, file.count, int(slots[slot]), wanted)
            self._notes.add(file.path, layout.slot_position(slot), what, f"slot {slot}: {text}")
        if len(wrong) > NOTED_MAX:
            self._notes.counts["slot"] += len(wrong) - NOTED_MAX

    def _note_header(self) -> None:
        file, header = self._file, self._file.header
        is_unchanged = self._header() == header
        if header.index_count != file.count and (header.index_count > file.count or is_unchanged):
            text = f"index count {header.index_count}, but the last entry that was put is {file.count - 1}"
            self._notes.add(file.path, 36, "header-index-count", text)
        if not file.entries:
            return
        first, last = (phy_offset_of(self._entry(number)) for number in (1, file.count - 1))
        self._compare("begin phy offset", 16, header.begin_phy_offset, first)
        # A repair leaves one more, so that a broker that starts does not index its last message again.
        if is_unchanged and header.end_phy_offset != last + 1:
            self._compare("end phy offset", 24, header.end_phy_offset, last)
        used = int(self._state[USED_SLOT_COUNT])
        # Counted once a slot, before 4.7.1 at every put, and in between where a broker was upgraded meanwhile.
        if is_unchanged and not used <= header.used_slot_count <= file.entries:
            text = f"used slot count {header.used_slot_count}, but {file.entries} entries use {used} slots"
            self._notes.add(file.path, 32, "header-used-slot-count", text)

    def _compare(self, name: str, position: int, here: int, wanted: int) -> None:
        if here != wanted:
            what = f"header-{name.replace(' ', '-')}"
            self._notes.add(self._file.path, position, what, f"{name} {here}, but the entries say {wanted}")

    def _reach(self, slots: NDArray[np.int32], wrong: NDArray[np.int64], found: NDArray[np.int64]) -> NDArray[np.uint8]:
        count, slot_num = self._file.count, self._layout.hash_slot_num
        # Key hash, previous entry and time difference of each entry, by its number.
        columns = np.zeros((3, count), dtype=np.uint32)
        for number in range(1, count, ENTRIES_PER_READ):
            entries = self._entries(number)
            columns[:, number : number + len(entries)] = entries[:, [0, 4, 3]].T.byteswap()
        hashes, previous, differences = columns[0], columns[1].view(np.int32), columns[2].view(np.int32)
        own = (hashes % np.uint32(slot_num)).astype(np.int64)
        chosen = np.full(slot_num, self._counts.sum() > len(found), dtype=np.bool_)
        chosen[wrong] = True
        chosen[own[found[:, 0]]] = True
        findable = np.zeros(count, dtype=np.uint8)
        findable[~chosen[own] & (hashes < np.uint32(1 << 31))] = 1
        stamps = np.zeros(count, dtype=np.uint32)
        walk_chains(np.flatnonzero(chosen).astype(np.uint32), slots, hashes, previous, differences, stamps, findable)
        return findable


class FileEntries:
    """The entries of one file that point into one stretch of the log, and what they have come to. Close it after use.

    ``entries[at:]`` of ``numbers`` are next; ``load`` brings more. ``findable``: a byte an entry number, 0 where no
    walk reaches. ``orphans`` are the smallest and largest offset of entries without a message that has their key, and
    how many they are. ``wait`` is called with the bytes that are read next.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        layout: IndexLayout,
        file: BrokerFile,
        findable: NDArray[np.uint8],
        wait: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.file, self._layout, self._findable, self._wait = file, layout, findable, wait
        self._entries: NDArray[np.uint32] = np.empty((0, 5), dtype=np.uint32)
        self._numbers: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self._at = 0
        self._next = self._end = 1
        self._compared = 0
        # What match_rows keeps of the file.
        self._header = np.array([file.header.begin_timestamp, file.count - 1, -1, 0], dtype=np.int64)
        self._times = np.full(2, _UNKNOWN, dtype=np.int64)
        self.orphans = np.array([NEVER, -1, 0], dtype=np.int64)
        self._counts = np.zeros(len(KINDS) + 1, dtype=np.int64)
        self._noted = np.zeros((len(KINDS) * NOTED_MAX, NOTED_COLUMNS), dtype=np.int64)
        self._opened: DiskFile = disk.open_read(folder / file.name)

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def select(self, begin: int, end: int, *, is_ordered: bool) -> None:
        """Take those that point into ``[begin, end)``, and to where the file's entries may point."""
        file, self._end = self.file, self.file.count
        begin, end = max(begin, file.begin), min(end, file.end + 1)
        if begin >= end:
            self._next = self._end
        elif is_ordered:
            self._next = first_entry_at(self._opened, self._layout, 1, self._end, begin)
            self._end = first_entry_at(self._opened, self._layout, self._next, self._end, end)
        else:
            self._sort(begin, end)

    def _sort(self, begin: int, end: int) -> None:
        parts, numbers = [self._entries], [self._numbers]
        for number in range(1, self._end, _ENTRIES_PER_WINDOW):
            entries = self._read(number, min(self._end - number, _ENTRIES_PER_WINDOW))
            offsets = phy_offsets(entries)
            rows = np.flatnonzero((offsets >= begin) & (offsets < end))
            parts.append(entries[rows])
            numbers.append((rows + number).astype(np.uint32))
        entries = np.concatenate(parts)
        order = np.argsort(phy_offsets(entries), kind="stable")
        self._entries, self._numbers, self._next = entries[order], np.concatenate(numbers)[order], self._end

    def _read(self, number: int, count: int) -> NDArray[np.uint32]:
        self._wait(count * ENTRY_SIZE)
        return read_entries(self._opened, self._layout, number, count)

    def _load(self) -> bool:
        # Have an entry at ``at``; False when there is none left.
        if self._at < len(self._entries):
            return True
        count = min(self._end - self._next, _ENTRIES_PER_WINDOW)
        if count <= 0:
            return False
        self._entries, self._at = self._read(self._next, count), 0
        self._numbers = np.arange(self._next, self._next + len(self._entries), dtype=np.uint32)
        # A file that was cut meanwhile has no more of them.
        self._next = self._next + count if len(self._entries) == count else self._end
        return len(self._entries) > 0

    def match(self, rows: Rows, skip_mask: int, taken: NDArray[np.uint8]) -> None:
        """Hold the entries that point to these messages, or between them, against their keys."""
        row = np.uint64(rows.first)
        while self._load():
            row, at = match_rows(
                rows.batch.columns, row, rows.last, skip_mask, self._entries, self._numbers, self._at, self._findable,
                self._header, taken, self._times, self.orphans, self._counts, self._noted,
            )  # fmt: skip
            self._compared += int(at) - self._at
            self._at = int(at)
            if self._at < len(self._entries):
                return

    def take_below(self, phy_offset: int) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """Pass over the entries that point below ``phy_offset``; their offsets, and the first of their numbers."""
        offsets, numbers = [np.empty(0, dtype=np.int64)], self._numbers[:0]
        while self._load():
            there = phy_offsets(self._entries[self._at :])
            stops = np.flatnonzero(there >= phy_offset)
            count = int(stops[0]) if len(stops) else len(there)
            offsets.append(there[:count])
            if len(numbers) < NOTED_MAX:
                numbers = np.concatenate([numbers, self._numbers[self._at : self._at + count]])
            self._at += count
            if len(stops):
                break
        return np.concatenate(offsets), numbers

    def orphan_below(self, phy_offset: int) -> None:
        """Entries that point below ``phy_offset`` have had their chance: no message begins where they point."""
        offsets, numbers = self.take_below(phy_offset)
        if not len(offsets):
            return
        self._compared += len(offsets)
        taken = int(self._counts[-1])
        room = max(NOTED_MAX - int(self._counts[WITHOUT_MESSAGE]), 0)
        rows = self._noted[taken : taken + min(room, len(offsets))]
        rows[:, 0], rows[:, 1], rows[:, 4] = numbers[: len(rows)], WITHOUT_MESSAGE, offsets[: len(rows)]
        low, high, _ = self.orphans.tolist()
        self.orphans[:2] = min(low, int(offsets.min())), max(high, int(offsets.max()))
        self.orphans[2] += len(offsets)
        self._counts[WITHOUT_MESSAGE] += len(offsets)
        self._counts[-1] += len(rows)

    def finish(self, part: Part, end: int, *, is_live: bool) -> None:
        """Write all down into ``part``; the stretch has no message from ``end`` on.

        Of a broker at work what points behind the end is not judged: it has written on.
        """
        path, layout, notes = self.file.path, self._layout, part.notes
        self.orphan_below(end)
        offsets, numbers = self.take_below(NEVER)
        for number, offset in zip(numbers[:NOTED_MAX].tolist(), offsets[:NOTED_MAX].tolist(), strict=True):
            text = f"entry {number}: points to {offset}, behind the end of the log"
            if not is_live:
                notes.add(path, layout.entry_position(number) + 4, BEHIND_LOG, text)
        if not is_live:
            self._compared += len(offsets)
            notes.counts[BEHIND_LOG] += max(len(offsets) - NOTED_MAX, 0)
        counts = self._counts.tolist()
        for number, kind, value, wanted, phy in self._noted[: counts[-1]].tolist():
            what, at, text = KINDS[kind]
            words = text.format(value=value, wanted=wanted, phy=phy)
            notes.add(path, layout.entry_position(number) + at, what, f"entry {number}: {words}")
        for (what, _, _), count in zip(KINDS, counts, strict=False):
            notes.counts[what] += max(count - NOTED_MAX, 0)
        part.entries += self._compared
        low, high, count = self.orphans.tolist()
        if count:
            part.orphans.append(Orphans(self.file.name, low, high, count))
        self._judge_times(notes)

    def _judge_times(self, notes: Notes) -> None:
        header = self.file.header
        begin, end = self._times.tolist()
        wanted = [("begin", 0, header.begin_timestamp, begin)]
        # Of a file that grows the fields may be of two moments.
        if IndexHeader.unpack(self._opened.pread(HEADER_SIZE, 0)) == header:
            wanted.append(("end", 8, header.end_timestamp, end))
        for name, position, here, by_message in wanted:
            if by_message not in (_UNKNOWN, here):
                text = f"{name} timestamp {here}, but by its message it is {by_message}"
                notes.add(self.file.path, position, f"header-{name}-timestamp", text)


class Matcher:
    """Takes the rows of a stretch one batch after the other and counts what is missing into ``part``.

    ``missing``: keys of each row of the last batch that are not findable, -1 of a message without keys.
    """

    def __init__(self, part: Part, flavour: str, files: list[FileEntries]) -> None:
        self._part, self._files = part, files
        self._skip_mask = FLAVOURS[flavour].skip_mask
        self.missing = np.empty(0, dtype=np.int32)

    def take(self, rows: Rows) -> None:
        """Hold messages against all entries that point to them."""
        batch, first, last = rows
        taken = np.zeros(max(batch.keys, 1), dtype=np.uint8)
        for file in self._files:
            file.match(rows, self._skip_mask, taken)
        if len(self.missing) < batch.rows:
            self.missing = np.empty(batch.rows, dtype=np.int32)
        totals = np.zeros(5, dtype=np.int64)
        count_missing(batch.columns, first, last, self._skip_mask, taken, self.missing, totals)
        messages, keyed, keys, lost, unreachable = totals.tolist()
        part = self._part
        part.messages, part.keyed_messages = part.messages + messages, part.keyed_messages + keyed
        part.keys, part.missing_keys = part.keys + keys, part.missing_keys + lost
        part.unreachable_keys += unreachable
        columns, at = batch.columns, slice(first, last)
        part.holes.add_rows(
            columns.phy_offset[at],
            columns.store_timestamp[at],
            self.missing[at],
            _unreachable(rows, taken) if unreachable else None,
        )


def _unreachable(rows: Rows, taken: NDArray[np.uint8]) -> NDArray[np.int64]:
    # Keys of each message that have an entry which no walk reaches.
    starts = rows.batch.columns.key_start[rows.first : rows.last + 1].astype(np.int64)
    sums = np.concatenate(([0], np.cumsum(taken == UNREACHABLE)))
    return np.diff(sums[starts])
