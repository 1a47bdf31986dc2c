"""One index file held against what the frontier says of it: header, every entry, every slot, nothing else there.

Reads only, by pread, once through the file. Entries are judged one after the other by the kernel; what it finds is put
into words here, and only the few that are listed cost a look back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from indexd.findings import Findings
from indexd.index.check_ground import Condition, Place, Seen
from indexd.index.check_header import check_header, check_times
from indexd.index.check_kernel import FOUND, LAST_PHY_OFFSET, PREVIOUS, USED_SLOT_COUNT, check_entries
from indexd.index.check_slots import check_slots
from indexd.index.format import ENTRY_SIZE, IndexLayout, unpack_entry
from indexd.storage.disk import DiskFile

_ENTRIES_PER_READ = 1 << 20
_FOUND_MAX = 1000
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
    seen = _walk_entries(file, place, findings, on_bytes)
    if place.condition is not Condition.CUT_SHORT:
        check_slots(file, place, seen, findings)
    check_header(file, place, seen, findings)
    check_times(place, seen, findings)
    on_bytes(layout.entry_position(0))
    _check_unused(file, place, findings, on_bytes)
    return findings


def _walk_entries(file: DiskFile, place: Place, findings: Findings, on_bytes: Callable[[int], None]) -> Seen:
    layout, header, count = place.layout, place.mark.header, place.count
    seen = Seen(np.zeros(layout.hash_slot_num, dtype=np.uint32))
    counts = np.zeros(len(ENTRY_KINDS), dtype=np.int64)
    found = np.empty((_FOUND_MAX, 4), dtype=np.int64)
    state = np.zeros(3, dtype=np.int64)
    state[LAST_PHY_OFFSET] = header.begin_phy_offset
    window = np.empty((min(count, _ENTRIES_PER_READ), 5), dtype=np.uint32)
    number = 1
    while number < count:
        entries = window[: count - number]
        file.pread_into(entries.reshape(-1).view(np.uint8).data, layout.entry_position(number))
        check_entries(
            entries,
            number,
            seen.slots,
            place.flavour.counts_every_put,
            layout.index_num,
            header.begin_phy_offset,
            header.end_phy_offset,
            state,
            counts,
            found,
        )
        if number == 1:
            seen.first = unpack_entry(entries[0].tobytes())
        seen.last = unpack_entry(entries[-1].tobytes())
        number += len(entries)
        on_bytes(entries.nbytes)
    seen.used_slot_count = int(state[USED_SLOT_COUNT])
    _put_into_words(file, place, found[: int(state[FOUND])], counts, findings)
    return seen


def _put_into_words(
    file: DiskFile, place: Place, found: NDArray[np.int64], counts: NDArray[np.int64], findings: Findings
) -> None:
    header = place.mark.header
    for number, code, value, wanted in found.tolist():
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
    buffer = np.empty(_ENTRIES_PER_READ * ENTRY_SIZE // 8, dtype=np.uint64)
    position = layout.entry_position(count)
    first, found = 0, 0
    while position < layout.file_size:
        part = buffer.view(np.uint8)[: layout.file_size - position]
        size = file.pread_into(part.data, position)
        if part[:size].any():
            wrong = np.flatnonzero(part[:size])
            first, found = first or position + int(wrong[0]), found + len(wrong)
        position += max(size, 1)
        on_bytes(size)
    if found:
        text = f"{found} bytes behind the last entry, {count - 1}, are not zero"
        findings.add(place.name, first, "behind-last-entry", text)
