"""Checks index files against what the frontier says of them: header, every entry, every slot, nothing else there.

Reads only, by pread, once through each file. Entries are judged one after the other by the kernel; what it finds is put
into words here, and only the few that are listed cost a look back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indexd.findings import Findings
from indexd.index.check_kernel import PREVIOUS
from indexd.index.entries import WalkedEntries, read_slots, walk_entries
from indexd.index.format import (
    ENTRY_SIZE,
    HEADER_SIZE,
    FileMark,
    Flavour,
    IndexHeader,
    IndexLayout,
    inherited,
    unpack_entry,
)
from indexd.index.kernel import (
    BEGIN_PHY_OFFSET,
    BEGIN_TIMESTAMP,
    END_PHY_OFFSET,
    END_TIMESTAMP,
    INDEX_COUNT,
    USED_SLOT_COUNT,
)
from indexd.output import CheckScope, Condition, LogBounds, find_nonzero
from indexd.storage.disk import Disk, DiskFile, ignore_missing
from indexd.storage.names import is_index_name

__all__ = ["Condition", "Place", "check_file", "check_index", "check_marks", "time_difference"]

_INT_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Place:
    """Which file is checked and how: ``name`` is what findings call it, ``before`` the header of the file before it.

    Without ``before`` it is not known from which time entry 1 counts, so nothing is asked of its time difference.
    """

    name: str
    mark: FileMark
    before: IndexHeader | None
    layout: IndexLayout
    flavour: Flavour
    condition: Condition

    @property
    def count(self) -> int:
        """The number behind the last entry that is checked: the mark's, within what the layout has room for."""
        return min(max(self.mark.header.index_count, 1), self.layout.index_num)


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


def _check_header(file: DiskFile, place: Place, walked: WalkedEntries, findings: Findings) -> None:
    # One finding for each field that the file, the frontier and the entries do not agree on.
    marked = place.mark.header.values()
    is_cut = place.condition is Condition.CUT_SHORT
    stored = marked if is_cut else _read_header(file, place.mark.header)
    said = {USED_SLOT_COUNT: walked.used_slot_count}
    if walked.first is not None and walked.last is not None:
        said |= {BEGIN_PHY_OFFSET: walked.first.phy_offset, END_PHY_OFFSET: walked.last.phy_offset}
    for field, ((name, position), here, wanted) in enumerate(zip(FIELDS, stored, marked, strict=True)):
        entries = said.get(field, wanted)
        if place.condition is Condition.GROWING and _may_grow(field, here, wanted, place):
            here = wanted  # noqa: PLW2901 - what the daemon has built since is not looked at
        if here == wanted == entries:
            continue
        others = [f"the frontier says {wanted}"] if here != wanted else []
        others += [f"the entries say {entries}"] if field in said else []
        text = f"{name} {here}, but {' and '.join(others)}"
        findings.add(place.name, position, f"header-{name.replace(' ', '-')}", text)


def _check_times(place: Place, walked: WalkedEntries, findings: Findings) -> None:
    # The two time differences that follow from headers alone: that of entry 1 and that of the last entry.
    header, first, last = place.mark.header, walked.first, walked.last
    if first is None or last is None:
        return
    asked = []
    if place.before is not None:
        # Entry 1 counts from the end of the file before, which this header held until then (spec 3.4, 3.5).
        wanted = time_difference(header.begin_timestamp, max(place.before.end_timestamp, 0))
        since = "the end of the file before to the begin timestamp of the header"
        asked.append(("first", 1, first, wanted, since))
    if place.count > 2:
        wanted = time_difference(header.end_timestamp, header.begin_timestamp)
        asked.append(("last", place.count - 1, last, wanted, "the begin to the end timestamp of the header"))
    elif header.begin_timestamp != header.end_timestamp:
        text = f"begin timestamp {header.begin_timestamp} and end timestamp {header.end_timestamp} of one entry differ"
        findings.add(place.name, 8, "header-end-timestamp", text)
    for which, number, entry, wanted, since in asked:
        if entry.time_diff >= 0 and entry.time_diff != wanted:
            text = f"entry {number}: the time difference is {entry.time_diff}, but from {since} it is {wanted}"
            position = place.layout.entry_position(number) + 12
            findings.add(place.name, position, f"entry-time-difference-{which}", text)


def _read_header(file: DiskFile, wanted: IndexHeader) -> list[int]:
    # The six fields as they stand there; the 0 that an empty file may count on disk is the 1 of ``wanted``.
    raw = file.pread(HEADER_SIZE, 0)
    values = list(IndexHeader.unpack(raw).values())
    count = int.from_bytes(raw[36:HEADER_SIZE], "big", signed=True)
    if count != 0 or wanted.index_count != 1:
        values[INDEX_COUNT] = count
    return values


def _may_grow(field: int, here: int, marked: int, place: Place) -> bool:
    # A daemon has put entries since: counts and the end grow, the end time may even fall, and the first entry of
    # all also sets the begin.
    if field == INDEX_COUNT:
        return marked <= here <= place.layout.index_num
    if field in (BEGIN_TIMESTAMP, BEGIN_PHY_OFFSET):
        return place.mark.header.entries == 0 and (field == BEGIN_TIMESTAMP or here >= marked)
    return field == END_TIMESTAMP or here >= marked


# A slot that a daemon writes while it is read may be seen half old and half new; a moment later it is whole.
_LOOKS = 3
_PAUSE = 0.05
# Wrong slots that are looked at one by one even when there is hardly room for them.
_LOOKED_AT = 20


def _check_slots(file: DiskFile, place: Place, walked: WalkedEntries, findings: Findings) -> None:
    # One finding for each slot that does not name the newest of its entries.
    for look in range(_LOOKS):
        slots = read_slots(file, place.layout)
        wrong = np.flatnonzero(slots != walked.slots)
        values = slots[wrong].byteswap().view(np.int32)
        if place.condition is Condition.GROWING:
            # The header is written before the slots, so read behind them it counts every entry that they name.
            above = _read_header(file, place.mark.header)[INDEX_COUNT]
            is_old = (values < place.count) | (values >= min(above, place.layout.index_num))
            wrong, values = wrong[is_old], values[is_old]
        if place.condition is not Condition.GROWING or len(wrong) == 0 or look == _LOOKS - 1:
            break
        time.sleep(_PAUSE)
    newest = walked.slots[wrong].byteswap()
    for done, (slot, value, wanted) in enumerate(zip(wrong.tolist(), values.tolist(), newest.tolist(), strict=True)):
        if done >= _LOOKED_AT and not findings.has_room:
            findings.count("slot", len(wrong) - done)
            break
        what, text = judge_slot(file, place, slot, value, wanted)
        findings.add(place.name, place.layout.slot_position(slot), what, f"slot {slot}: {text}")


def judge_slot(file: DiskFile, place: Place, slot: int, value: int, wanted: int) -> tuple[str, str]:
    """The kind of finding, and its words, for a slot that holds ``value`` and not its newest entry, ``wanted``."""
    newest = f"its newest entry is {wanted}" if wanted else "it has no entries"
    if value == 0:
        return "slot-wiped", f"empty, but {newest}"
    if not 0 < value < place.layout.index_num:
        return "slot-range", f"{value} is no entry of this file; {newest}"
    if value >= place.count:
        return "slot-behind-last", f"names entry {value}, but the last one is {place.count - 1}; {newest}"
    if _slot_of(file, place.layout, value) != slot:
        return "slot-other", f"names entry {value} of another slot; {newest}"
    return "slot-old", f"names entry {value}, but {newest}"


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


def check_file(file: DiskFile, place: Place, on_bytes: Callable[[int], None]) -> Findings:
    """Everything that does not hold of one file; ``on_bytes`` is told how many bytes more have been looked at."""
    findings = Findings()
    layout = place.layout
    size = file.size()
    if size != layout.file_size:
        findings.add(place.name, min(size, layout.file_size), "file-size", f"{size} bytes, not {layout.file_size}")
        on_bytes(layout.file_size)
        return findings
    walked = walk_entries(file, layout, place.mark.header, place.flavour, on_bytes)
    _put_into_words(file, place, walked, findings)
    if place.condition is not Condition.CUT_SHORT:
        _check_slots(file, place, walked, findings)
    _check_header(file, place, walked, findings)
    _check_times(place, walked, findings)
    on_bytes(layout.entry_position(0))
    _check_unused(file, place, findings, on_bytes)
    return findings


def _put_into_words(file: DiskFile, place: Place, walked: WalkedEntries, findings: Findings) -> None:
    header, counts = place.mark.header, walked.counts
    for number, code, value, wanted in walked.found.tolist():
        what, at, text = ENTRY_KINDS[code]
        position = place.layout.entry_position(number)
        words = text.format(value=value, wanted=wanted, begin=header.begin_phy_offset, end=header.end_phy_offset)
        if code == PREVIOUS and value:
            own, other = (_slot_of(file, place.layout, one) for one in (number, value))
            if own != other:
                whose = "of no slot" if other is None else f"of slot {other}"
                what, words = "chain-slot", f"the previous entry {value} is {whose}, not of slot {own}"
        findings.add(place.name, position + at, what, f"entry {number}: {words}")
        counts[code] -= 1
    for (what, _, _), left in zip(ENTRY_KINDS, counts.tolist(), strict=True):
        findings.count(what, left)


def _slot_of(file: DiskFile, layout: IndexLayout, number: int) -> int | None:
    key_hash = unpack_entry(file.pread(ENTRY_SIZE, layout.entry_position(number))).key_hash
    return layout.slot_of(key_hash) if key_hash >= 0 else None


def _check_unused(file: DiskFile, place: Place, findings: Findings, on_bytes: Callable[[int], None]) -> None:
    # Entry 0 is never written; neither is what lies behind the last entry, unless somebody is or was building there.
    layout, count = place.layout, place.count
    if any(file.pread(ENTRY_SIZE, layout.entry_position(0))):
        findings.add(place.name, layout.entry_position(0), "entry-0", "entry 0 is not zero, and is never written")
    if place.condition is not Condition.AT_REST:
        on_bytes(layout.file_size - layout.entry_position(count))
        return
    first, found = find_nonzero(file, layout.entry_position(count), layout.file_size, on_bytes)
    if found:
        text = f"{found} bytes behind the last entry, {count - 1}, are not zero"
        findings.add(place.name, first, "behind-last-entry", text)


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
    # Nothing expired before the first entry of all, so nothing was inherited there.
    begin = marks[0].header.begin_phy_offset if marks else 0
    before = IndexHeader() if scope.bounds is not None and begin == scope.bounds.begin_offset else None
    for mark in marks:
        if mark not in scope.sound or scope.sound[mark] != before:
            condition = Condition.AT_REST if mark.full else scope.condition
            place = Place(f"index/{mark.name}", mark, before, layout, flavour, condition)
            wrong = _check_named(disk, directory, place, scope)
            found.merge(wrong)
            if len(wrong) == 0:
                scope.sound[mark] = before
        before = mark.header
    if scope.is_complete and disk.exists(directory):
        named = {mark.name for mark in marks}
        for name, _ in disk.list_dir(directory):
            if is_index_name(name) and name not in named:
                found.add(f"index/{name}", 0, "file-unnamed", "the frontier does not name it, and no daemon runs")
    return found


def _check_named(disk: Disk, directory: Path, place: Place, scope: CheckScope) -> Findings:
    with ignore_missing(), disk.open_read(directory / place.mark.name) as file:
        return check_file(file, place, scope.on_bytes)
    missing = Findings()
    begin = scope.log_begin()
    if begin is not None and place.mark.full and place.mark.header.end_phy_offset < begin:
        scope.notes.append(f"{place.name} is gone, and only named messages that have expired")
    else:
        missing.add(place.name, 0, "file-missing", "the frontier names it, but it is not there")
    return missing


def check_marks(marks: tuple[FileMark, ...], index_num: int, bounds: LogBounds) -> list[str]:
    """What no builder writes of its files: offsets out of order, a file that does not go on where the last ended."""
    found: list[str] = []
    for before, mark in zip((None, *marks), marks, strict=False):
        wrong = _check_mark(mark, index_num, bounds) + ([] if before is None else _check_follows(mark, before))
        found += [f"index file {mark.name}: {text}" for text in wrong]
    return found


def _check_mark(mark: FileMark, index_num: int, bounds: LogBounds) -> list[str]:
    header = mark.header
    begin, end, count = header.begin_phy_offset, header.end_phy_offset, header.index_count
    # The last file may have come to its last entry, and is called full when another entry begins the next one.
    is_count = 1 <= count <= max(index_num, 1) and not (mark.full and count < index_num)
    is_covered = bounds.begin_offset <= begin and end < bounds.phy_offset + bounds.slack
    wrong = {
        "that is no index file's name": not is_index_name(mark.name),
        f"index count {count} of {index_num}, {'full' if mark.full else 'not full'}": not is_count,
        f"phy offsets {begin} to {end}": header.entries and begin > end,
        f"phy offsets {begin} to {end} outside what is covered": header.entries and not is_covered,
    }
    return [text for text, is_wrong in wrong.items() if is_wrong]


def _check_follows(mark: FileMark, before: FileMark) -> list[str]:
    header, end = mark.header, max(before.header.end_phy_offset, 0)
    begins_before = f"it begins at phy offset {header.begin_phy_offset}, before {before.name} ends, {end}"
    wrong = {
        f"it follows {before.name}, which is not full": not before.full,
        f"empty, but its header is not what it inherits from {before.name}": header.entries == 0
        and header != inherited(before.header),
        begins_before: header.entries and header.begin_phy_offset < end,
    }
    return [text for text, is_wrong in wrong.items() if is_wrong]
