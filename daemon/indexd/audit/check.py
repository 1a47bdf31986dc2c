"""Holds one index file of a broker against itself, and finds which of its entries a query comes to.

The entries are put again into slots as putKey does it. Where every link and every slot is as that leaves it, all
entries are reachable. Else the chains of the slots concerned are walked as selectPhyOffset walks them, which takes some
20 bytes of memory an entry. Only what the header counts is judged: a broker may be writing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.audit.kernel import walk_chains
from indexd.audit.plan import BrokerFile
from indexd.audit.result import FileSeen
from indexd.errors import MissingOk
from indexd.findings import Findings
from indexd.index.check import check_slots, note_entries
from indexd.index.check_kernel import PHY_NEGATIVE, PHY_ORDER, PHY_OUTSIDE
from indexd.index.entries import ENTRIES_PER_READ, WalkedEntries, first_entry_at, read_entries, walk_entries
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, IndexHeader, IndexLayout
from indexd.output import Condition
from indexd.storage.disk import Disk, DiskFile

# A broker writes entry, slot and header one after the other: what is seen in between is gone a moment later.
_LOOKS = 3
_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class FileCheck:
    """What a file came to by itself.

    ``findable`` has a byte an entry number, 0 where no walk reaches; it is empty when all are reached. ``is_ordered``:
    offsets never fall and all lie where the file points.
    """

    findable: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    is_ordered: bool = True
    seen: FileSeen | None = None
    findings: Findings = field(default_factory=Findings)

    @property
    def is_sound(self) -> bool:
        """Whether entries may be taken as they come: in the order of the log, and all of them reached by walks."""
        return self.is_ordered and len(self.findable) == 0

    def finds(self, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these entries a walk reaches."""
        is_sound = np.ones(len(numbers), dtype=np.bool_)
        return is_sound if not len(self.findable) else self.findable[numbers].astype(np.bool_)


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
        header = replace(file.header, begin_phy_offset=file.begin, end_phy_offset=file.end, index_count=file.count)
        mark = FileMark(file.name, header, full=file.is_full)
        # Where the header counts entries that were never written, slots that name them are wrong.
        is_growing = not file.is_full and file.header.index_count <= file.count
        condition = Condition.GROWING if is_growing else Condition.AT_REST
        walked = walk_entries(opened, layout, header, FLAVOURS["5.4"], wait)
        disorder = int(walked.counts[[PHY_ORDER, PHY_OUTSIDE, PHY_NEGATIVE]].sum())
        # An entry's order says nothing about a broker's file: it may hold the same messages twice.
        walked.counts[PHY_ORDER] = 0
        walked.found = walked.found[walked.found[:, 1] != PHY_ORDER]
        broken, findings = int(walked.counts.sum()), Findings()
        note_entries(mark, layout, walked, findings)
        wait(walked.slots.nbytes)
        for _ in range(_LOOKS):
            in_slots = Findings()
            wrong, values = check_slots(opened, file.path, file.count, layout, condition, walked, in_slots)
            if not (is_growing and len(wrong)):
                break
            time.sleep(_PAUSE)
        findings.merge(in_slots)
        _check_header(opened, file, walked, findings)
        findable = np.empty(0, dtype=np.uint8)
        if len(findings) and (broken or len(wrong)):
            slots = walked.slots.byteswap().view(np.int32)
            slots[wrong] = values
            chosen = np.full(layout.hash_slot_num, broken > len(walked.found), dtype=np.bool_)
            chosen[wrong] = True
            findable = _reach(opened, file.count, layout, slots, chosen, walked.found[:, 0])
        expired = first_entry_at(opened, layout, 1, file.count, log_begin) - 1 if file.begin < log_begin else 0
        seen = FileSeen(
            name=file.name,
            entries=file.entries,
            begin=file.begin,
            end=file.end,
            begin_timestamp=header.begin_timestamp,
            end_timestamp=header.end_timestamp,
            used_slots=walked.used_slot_count,
            used_slot_count=header.used_slot_count,
            expired=expired,
            unreachable=int(np.count_nonzero(findable[1:] == 0)),
            header_count=file.header.entries,
            header_end=file.header.end_phy_offset,
            first_time_difference=walked.first.time_diff if walked.first is not None else 0,
            is_full=file.is_full,
        )
        return FileCheck(findable, disorder == 0, seen, findings)
    return None


def _check_header(opened: DiskFile, file: BrokerFile, walked: WalkedEntries, findings: Findings) -> None:
    header, first, last = file.header, walked.first, walked.last
    is_unchanged = IndexHeader.unpack(opened.pread(HEADER_SIZE, 0)) == header
    if header.index_count != file.count and (header.index_count > file.count or is_unchanged):
        text = f"index count {header.index_count}, but the last entry that was put is {file.count - 1}"
        findings.add(file.path, 36, "header-index-count", text)
    if first is None or last is None:
        return
    rows = [("begin", 16, header.begin_phy_offset, first.phy_offset)]
    # A repair leaves one more, so that a broker that starts does not index its last message again.
    if is_unchanged and header.end_phy_offset != last.phy_offset + 1:
        rows.append(("end", 24, header.end_phy_offset, last.phy_offset))
    for name, position, here, wanted in rows:
        if here != wanted:
            text = f"{name} phy offset {here}, but the entries say {wanted}"
            findings.add(file.path, position, f"header-{name}-phy-offset", text)
    used = walked.used_slot_count
    # Counted once a slot, before 4.7.1 at every put, and in between where a broker was upgraded meanwhile.
    if is_unchanged and not used <= header.used_slot_count <= file.entries:
        text = f"used slot count {header.used_slot_count}, but {file.entries} entries use {used} slots"
        findings.add(file.path, 32, "header-used-slot-count", text)


def _reach(
    opened: DiskFile,
    count: int,
    layout: IndexLayout,
    slots: NDArray[np.int32],
    chosen: NDArray[np.bool_],
    broken: NDArray[np.int64],
) -> NDArray[np.uint8]:
    # Which entries walks from the ``chosen`` slots and from those of ``broken`` entries come to; others are reached.
    columns = np.zeros((3, count), dtype=np.uint32)  # key hash, previous entry and time difference, by number
    for number in range(1, count, ENTRIES_PER_READ):
        entries = read_entries(opened, layout, number, min(count - number, ENTRIES_PER_READ))
        columns[:, number : number + len(entries)] = entries[:, [0, 4, 3]].T.byteswap()
    hashes, previous, differences = columns[0], columns[1].view(np.int32), columns[2].view(np.int32)
    own = (hashes % np.uint32(layout.hash_slot_num)).astype(np.int64)
    chosen[own[broken]] = True
    findable = np.zeros(count, dtype=np.uint8)
    findable[~chosen[own] & (hashes < np.uint32(1 << 31))] = 1
    stamps = np.zeros(count, dtype=np.uint32)
    walk_chains(np.flatnonzero(chosen).astype(np.uint32), slots, hashes, previous, differences, stamps, findable)
    return findable
