"""Checks index files against what the frontier says of them: header, every entry, every slot, nothing else there.

Reads only, by pread, once through each file. Entries are judged one after the other by the kernel; what it finds is put
into words here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.errors import MissingOk
from indexd.findings import KEPT_MAX, Findings
from indexd.index.entries import WalkedEntries, read_slots, walk_entries
from indexd.index.format import ENTRY_SIZE, HEADER_SIZE, FileMark, Flavour, IndexHeader, IndexLayout
from indexd.index.kernel import (
    BEGIN_PHY_OFFSET,
    BEGIN_TIMESTAMP,
    END_PHY_OFFSET,
    END_TIMESTAMP,
    USED_SLOT_COUNT,
)
from indexd.output import CheckScope, Condition, find_nonzero
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.names import is_index_name

_INT_MAX = (1 << 31) - 1


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
