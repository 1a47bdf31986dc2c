"""One file against itself: every chain link, every slot, the header; and which entries the broker's walk reaches.

The entries are put again into slots as putKey does it. Where every link and every slot is as that leaves it, all
entries are reachable. Else the chains of the slots concerned are walked as selectPhyOffset walks them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.audit.ground import BrokerFile, phy_offsets
from indexd.audit.kernel import NOTED_MAX, walk_chains
from indexd.audit.notes import Notes
from indexd.index.check import ENTRY_KINDS
from indexd.index.check_kernel import (
    FOUND,
    LAST_PHY_OFFSET,
    PHY_NEGATIVE,
    PHY_ORDER,
    PHY_OUTSIDE,
    USED_SLOT_COUNT,
    check_entries,
)
from indexd.index.entries import phy_offset_of, read_entries
from indexd.index.format import HEADER_SIZE, IndexHeader, IndexLayout
from indexd.storage.disk import Disk, DiskFile

_ENTRIES_PER_READ = 1 << 20
_FOUND_MAX = 4096
# A broker writes entry, slot and header one after the other: what is seen in between is gone a moment later.
_LOOKS = 3
_PAUSE = 0.05
# An entry's order says nothing about a broker's file: it may hold the same messages twice.
_NO_FINDINGS = (PHY_ORDER,)


@dataclass(frozen=True, slots=True)
class Chained:
    """What a file came to by itself.

    ``findable`` has a byte an entry number, 0 where no walk reaches; it is empty when all are reached. ``is_ordered``:
    offsets never fall and all lie where the file points. ``expired`` are entries that point before the log begins.
    """

    findable: NDArray[np.uint8]
    is_ordered: bool
    used_slots: int
    expired: int
    unreachable: int


def check_chains(
    disk: Disk, folder: Path, layout: IndexLayout, file: BrokerFile, log_begin: int, notes: Notes | None
) -> Chained:
    """Read a file from front to back; what does not hold goes into ``notes``, if they are given."""
    with disk.open_read(folder / file.name) as opened:
        return _Chains(opened, layout, file, notes if notes is not None else Notes()).check(log_begin)


class _Chains:
    def __init__(self, opened: DiskFile, layout: IndexLayout, file: BrokerFile, notes: Notes) -> None:
        self._opened, self._layout, self._file, self._notes = opened, layout, file, notes
        self._wanted = np.zeros(layout.hash_slot_num, dtype=np.uint32)
        self._counts = np.zeros(len(ENTRY_KINDS), dtype=np.int64)
        self._found = np.empty((_FOUND_MAX, 4), dtype=np.int64)
        self._state = np.zeros(3, dtype=np.int64)
        self._stored = np.zeros(layout.hash_slot_num, dtype=np.int32)
        self._expired = 0

    def check(self, log_begin: int) -> Chained:
        self._walk_entries(log_begin)
        found = self._found[: int(self._state[FOUND])]
        self._say_entries(found)
        slots, wrong = self._slots()
        self._say_slots(wrong)
        self._check_header()
        findable = np.empty(0, dtype=np.uint8)
        broken = self._counts.sum() - self._counts[[PHY_ORDER, PHY_OUTSIDE, PHY_NEGATIVE]].sum()
        if broken or len(wrong):
            findable = self._reach(slots, wrong, found, all_slots=self._counts.sum() > len(found))
        disordered = self._counts[[PHY_ORDER, PHY_OUTSIDE, PHY_NEGATIVE]].any()
        return Chained(
            findable,
            is_ordered=not disordered,
            used_slots=int(self._state[USED_SLOT_COUNT]),
            expired=self._expired,
            unreachable=int(np.count_nonzero(findable[1:] == 0)),
        )

    def _walk_entries(self, log_begin: int) -> None:
        file, number = self._file, 1
        self._state[LAST_PHY_OFFSET] = file.begin
        while number < file.count:
            entries = read_entries(self._opened, self._layout, number, min(file.count - number, _ENTRIES_PER_READ))
            if len(entries) == 0:
                break
            check_entries(
                entries,
                number,
                self._wanted,
                False,
                self._layout.index_num,
                file.begin,
                file.end,
                self._state,
                self._counts,
                self._found,
            )
            if file.begin < log_begin:
                offsets = phy_offsets(entries)
                self._expired += int(np.count_nonzero((offsets >= file.begin) & (offsets < log_begin)))
            number += len(entries)

    def _say_entries(self, found: NDArray[np.int64]) -> None:
        file, layout, notes = self._file, self._layout, self._notes
        words = {"begin": file.begin, "end": file.end}
        for number, code, value, wanted in found.tolist():
            if code in _NO_FINDINGS:
                continue
            what, at, text = ENTRY_KINDS[code]
            position = layout.entry_position(number) + at
            notes.keep(file.path, position, what, f"entry {number}: {text.format(value=value, wanted=wanted, **words)}")
        for code, (what, _, _) in enumerate(ENTRY_KINDS):
            if code not in _NO_FINDINGS:
                notes.count(file.path, what, int(self._counts[code]))

    def _slots(self) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        # Each slot's newest entry that was counted when the audit began, and the slots where that is a wrong one.
        layout = self._layout
        raw = np.zeros(layout.hash_slot_num, dtype=np.uint32)
        wanted = self._wanted.byteswap().view(np.int32)
        for look in range(_LOOKS):
            self._opened.pread_into(raw.view(np.uint8).data, layout.slot_position(0))
            self._stored = raw.byteswap().view(np.int32)
            slots = self._stored.copy()
            above = np.flatnonzero(slots >= self._file.count)
            late = self._resolve(slots, above) if len(above) else above
            wrong = np.union1d(np.flatnonzero(slots != wanted), late)
            if len(wrong) == 0 or self._file.is_full or look == _LOOKS - 1:
                break
            time.sleep(_PAUSE)
        return slots, wrong

    def _resolve(self, slots: NDArray[np.int32], above: NDArray[np.int64]) -> NDArray[np.int64]:
        # The broker has put entries since, so some slots name those: back along their links. The entry that is being
        # put is one of them, for a slot may name it before the header counts it, and the broker walks on from there.
        # Returns the slots that name what the header does not count.
        known = self._file.count
        header = IndexHeader.unpack(self._opened.pread(HEADER_SIZE, 0))
        behind = min(header.index_count + 1, self._layout.index_num)
        entries = read_entries(self._opened, self._layout, known, max(behind - known, 0))
        previous = entries[:, 4].byteswap().view(np.int32)
        for slot in above.tolist():
            number = steps = int(slots[slot])
            while known <= number < known + len(previous) and steps >= known:
                number, steps = int(previous[number - known]), steps - 1
            if number < known:
                slots[slot] = number
        return above[self._stored[above] >= header.index_count]

    def _say_slots(self, wrong: NDArray[np.int64]) -> None:
        file, layout = self._file, self._layout
        for slot in wrong[:NOTED_MAX].tolist():
            what, text = self._judge_slot(slot, int(self._stored[slot]))
            wanted = int(self._wanted[slot : slot + 1].byteswap()[0])
            newest = f"its newest entry is {wanted}" if wanted else "it has no entries"
            self._notes.add(file.path, layout.slot_position(slot), what, f"slot {slot}: {text}, but {newest}")
        self._notes.count(file.path, "slot", max(len(wrong) - NOTED_MAX, 0))

    def _judge_slot(self, slot: int, value: int) -> tuple[str, str]:
        layout = self._layout
        if value == 0:
            return "slot-wiped", "empty"
        if not 0 < value < layout.index_num:
            return "slot-range", f"{value} is no entry of this file"
        if value >= self._file.count:
            return "slot-behind-last", f"names entry {value}, and the last one is {self._file.count - 1}"
        key_hash = int(read_entries(self._opened, layout, value, 1).byteswap().view(np.int32)[0, 0])
        if key_hash < 0 or layout.slot_of(key_hash) != slot:
            return "slot-other", f"names entry {value} of another slot"
        return "slot-old", f"names entry {value}"

    def _check_header(self) -> None:
        file, notes = self._file, self._notes
        header = file.header
        is_unchanged = self._is_unchanged()
        if header.index_count != file.count and (header.index_count > file.count or is_unchanged):
            text = f"index count {header.index_count}, but the last entry that was put is {file.count - 1}"
            notes.add(file.path, 36, "header-index-count", text)
        if file.count <= 1:
            return
        first = phy_offset_of(read_entries(self._opened, self._layout, 1, 1)[0])
        last = phy_offset_of(read_entries(self._opened, self._layout, file.count - 1, 1)[0])
        self._compare("begin phy offset", 16, header.begin_phy_offset, first)
        if is_unchanged:
            # A repair leaves one more, so that a broker that starts does not index its last message again.
            if header.end_phy_offset != last + 1:
                self._compare("end phy offset", 24, header.end_phy_offset, last)
            used = int(self._state[USED_SLOT_COUNT])
            # Counted once a slot, before 4.7.1 at every put, and in between where a broker was upgraded meanwhile.
            if not used <= header.used_slot_count <= file.entries:
                text = f"used slot count {header.used_slot_count}, but {file.entries} entries use {used} slots"
                notes.add(file.path, 32, "header-used-slot-count", text)

    def _is_unchanged(self) -> bool:
        # Else its fields may be of two moments.
        return IndexHeader.unpack(self._opened.pread(HEADER_SIZE, 0)) == self._file.header

    def _compare(self, name: str, position: int, here: int, wanted: int) -> None:
        if here != wanted:
            what = f"header-{name.replace(' ', '-')}"
            self._notes.add(self._file.path, position, what, f"{name} {here}, but the entries say {wanted}")

    def _reach(
        self, slots: NDArray[np.int32], wrong: NDArray[np.int64], found: NDArray[np.int64], *, all_slots: bool
    ) -> NDArray[np.uint8]:
        count, slot_num = self._file.count, self._layout.hash_slot_num
        hashes, previous, differences = self._columns()
        own = (hashes % np.uint32(slot_num)).astype(np.int64)
        chosen = np.ones(slot_num, dtype=np.bool_) if all_slots else np.zeros(slot_num, dtype=np.bool_)
        chosen[wrong] = True
        chosen[own[found[:, 0]]] = True
        findable = np.zeros(count, dtype=np.uint8)
        findable[~chosen[own] & (hashes < np.uint32(1 << 31))] = 1
        stamps = np.zeros(count, dtype=np.uint32)
        walk_chains(np.flatnonzero(chosen).astype(np.uint32), slots, hashes, previous, differences, stamps, findable)
        return findable

    def _columns(self) -> tuple[NDArray[np.uint32], NDArray[np.int32], NDArray[np.int32]]:
        # Key hash, previous entry and time difference of each entry, by its number.
        count, number = self._file.count, 1
        columns = np.zeros((3, count), dtype=np.uint32)
        while number < count:
            entries = read_entries(self._opened, self._layout, number, min(count - number, _ENTRIES_PER_READ))
            if len(entries) == 0:
                break
            for column, member in enumerate((0, 4, 3)):
                columns[column, number : number + len(entries)] = entries[:, member].byteswap()
            number += len(entries)
        return columns[0], columns[1].view(np.int32), columns[2].view(np.int32)
