"""Holds the files of sparse indexes against their mark: all of them for a check, what is left of them for recovery.

What can be said without the log: an entry lies behind the one before it, more than an interval of log on, and inside
its segment. Recovery asks the sizes and the last entries only; a segment whose files do not hold is built again, and
so is everything behind it. Both only read, a window at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.errors import MissingOk
from indexd.findings import KEPT_MAX, Findings
from indexd.output import CheckScope, OutputRecovery, RecoveryScope, find_nonzero
from indexd.sparse.format import NO_TIMESTAMP, TIME_ENTRY_SIZE, ActiveMark, SegmentMark, SparseMark, own_base
from indexd.sparse.kernel import OFFSET_ENTRY_TYPE, TIME_ENTRY_TYPE, unpack_entries
from indexd.sparse.sparse_index import OffsetIndex, TimeIndex
from indexd.storage.disk import Disk, DiskFile

_ENTRIES_PER_READ = 1 << 16
Entries = NDArray[np.int64]


def check_sparse(disk: Disk, directory: Path, segment_size: int, mark: SparseMark, scope: CheckScope) -> Findings:
    """Everything of the files that does not hold."""
    findings = Findings()
    for segment in mark.segments:
        active = mark.active if segment is mark.segments[-1] else None
        for is_time, (name, size) in enumerate(segment.files):
            with MissingOk(), disk.open_read(directory / name) as file:
                there = file.size()
                if there < size or (there > size and active is None):
                    text = f"{there} bytes, but the entries take {size}"
                    findings.add(f"sparse/{name}", min(there, size), "file-size", text)
                last = _check_entries(file, size, bool(is_time), segment, segment_size, mark.interval, scope, findings)
                if is_time and active is not None and there >= size and last != active.last_timestamp:
                    text = f"the last entry's timestamp is {last}, not {active.last_timestamp} as the frontier says"
                    findings.add(f"sparse/{name}", max(size - TIME_ENTRY_SIZE, 0), "segment-end", text)
                first, count = find_nonzero(file, size, there) if scope.is_at_rest and active is not None else (0, 0)
                if count:
                    text = f"{count} bytes behind the last entry are not zero"
                    findings.add(f"sparse/{name}", first, "behind-last-entry", text)
                continue
            findings.add(f"sparse/{name}", 0, "file-missing", "the frontier names it, but it is not there")
    named = {segment.base for segment in mark.segments}
    for other, _ in disk.list_dir(directory) if scope.is_complete and disk.exists(directory) else ():
        base = own_base(other)
        if base is not None and base not in named:
            findings.add(f"sparse/{other}", 0, "file-unnamed", "the frontier does not name it, and no daemon runs")
    return findings


def check_sparse_mark(mark: SparseMark, segment_size: int) -> list[str]:
    """What no builder writes: more messages than a segment holds, more entries than messages."""
    found = [
        f"{list(segment)} is nothing that a segment can be"
        for segment in mark.segments
        if segment.base % segment_size
        or segment.base >= mark.phy_offset
        or not 1 <= segment.messages <= segment_size // FRAME_SIZE_MIN
        or not 0 <= segment.offset_entries < segment.messages
        or not 0 <= segment.time_entries <= segment.offset_entries + 1
    ]
    active = mark.active
    if active is not None and not (
        0 <= active.bytes_since <= segment_size
        and 0 <= active.max_timestamp_offset < mark.segments[-1].messages
        and active.last_timestamp <= active.max_timestamp
    ):
        found.append(f"{list(active)} is nothing that building can go on with")
    return found


def recover_sparse(
    disk: Disk, directory: Path, segment_size: int, held: SparseMark | None, interval: int, scope: RecoveryScope
) -> OutputRecovery[SparseMark]:
    """What of ``held`` is kept if what lies behind ``scope.believed`` is not believed; reads only.

    Segments that have expired are left out. Where the mark covers more than what is believed, the segment in which that
    ends goes, with all behind it: at most one segment of log is read again for that.
    """
    mark, believed = held or SparseMark(interval), max(scope.believed, scope.log_begin)
    sizes = dict(disk.list_dir(directory)) if disk.exists(directory) else {}
    end = mark.phy_offset if mark.phy_offset <= believed else believed - believed % segment_size
    kept: list[SegmentMark] = []
    active, fault = None, None
    for segment in mark.segments:
        if segment.base + segment_size <= scope.log_begin:
            continue
        if segment.base >= end:
            break
        is_last = segment is mark.segments[-1]
        growing = mark.active if is_last else None
        # A sealed last one was closed for a message that the disk then refused; the log may have been cut since.
        is_cut = is_last and growing is None and end < segment.base + segment_size
        fault = None if is_cut else _fault(disk, directory, segment, growing, sizes, segment_size)
        if is_cut or fault:
            end = segment.base
            break
        kept.append(segment)
        active = growing
    named = {name for segment in kept for name, _ in segment.files}
    is_lost = held is None or end < mark.phy_offset or scope.believed < scope.phy_offset
    refill_from = max(end, scope.log_begin)
    cut = []
    for name, size in kept[-1].files if active is not None else ():
        # Written after the mark, and torn perhaps.
        with disk.open_read(directory / name) as file:
            if find_nonzero(file, size, sizes[name])[1]:
                cut.append((directory / name, size, sizes[name]))
    return OutputRecovery(
        SparseMark(mark.interval, end, tuple(kept), active),
        refill_from if is_lost and refill_from < scope.phy_offset else None,
        delete=tuple(directory / name for name in sizes if own_base(name) is not None and name not in named),
        cut=tuple(cut),
        reasons=(fault,) if fault else (),
    )


def _fault(
    disk: Disk,
    directory: Path,
    segment: SegmentMark,
    active: ActiveMark | None,
    sizes: Mapping[str, int],
    segment_size: int,
) -> str | None:
    # Why the segment's files are not what its mark says, as far as sizes and last entries tell.
    for name, size in segment.files:
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] < size or (sizes[name] > size and active is None):
            return f"{name} has {sizes[name]} bytes, not {size}"
    base, (index, time_index) = segment.base, (directory / name for name, _ in segment.files)
    with disk.open_read(index) as file:
        offset, position = OffsetIndex(file, base, segment.offset_entries).last_entry
    is_possible = base < offset < base + segment.messages and 0 < position < segment_size
    if segment.offset_entries and not is_possible:
        return f"{index.name} ends with offset {offset} at {position}, which cannot be"
    with disk.open_read(time_index) as file:
        timestamp, offset = TimeIndex(file, base, segment.time_entries).last_entry
    if segment.time_entries and not base <= offset < base + segment.messages:
        return f"{time_index.name} ends with offset {offset}, which cannot be"
    if active is not None and timestamp != active.last_timestamp:
        return f"{time_index.name} ends with timestamp {timestamp}, not {active.last_timestamp}"
    return None


def _check_entries(
    file: DiskFile,
    size: int,
    is_time: bool,
    segment: SegmentMark,
    segment_size: int,
    interval: int,
    scope: CheckScope,
    findings: Findings,
) -> int:
    # Returns the first number of the last entry, or of what stands for it.
    entry = TIME_ENTRY_TYPE if is_time else OFFSET_ENTRY_TYPE
    width, name = entry.itemsize, f"sparse/{file.path.name}"
    # A segment's first message has no offset entry, but may have a time entry; a timestamp below 0 never has.
    before = np.array([(NO_TIMESTAMP, -1) if is_time else (0, 0)], dtype=np.int64)
    for position in range(0, size, _ENTRIES_PER_READ * width):
        data = file.pread(min(size - position, _ENTRIES_PER_READ * width), position)
        scope.on_bytes(len(data))
        rows = np.concatenate([before, unpack_entries(data, entry)])
        rules = _time_rules(rows, segment) if is_time else _offset_rules(rows, segment, segment_size, interval)
        for what, at, wrong in rules:
            found = np.flatnonzero(wrong)
            for row in found[:KEPT_MAX].tolist():
                text = f"entry {position // width + row}: {rows[row + 1].tolist()} behind {rows[row].tolist()}"
                findings.add(name, position + row * width + at, what, text)
            findings.count(what, max(len(found) - KEPT_MAX, 0))
        before = rows[-1:]
    return int(before[0, 0])


#: What of entries cannot be, given the one before each: kind, place in the entry, which. Row 0 is the one before all.
Broken = list[tuple[str, int, NDArray[np.bool_]]]


def _offset_rules(rows: Entries, segment: SegmentMark, segment_size: int, interval: int) -> Broken:
    (offsets, positions), rise = rows[1:].T, np.diff(rows, axis=0)
    is_outside = (offsets < 0) | (offsets >= segment.messages)
    least = np.where(is_outside, 1, offsets) * FRAME_SIZE_MIN
    is_misplaced = (positions < least) | (positions > segment_size - FRAME_SIZE_MIN)
    return [
        ("entry-offset", 0, is_outside),
        ("entry-position", 4, is_misplaced),
        ("entry-order", 0, (rise[:, 0] <= 0) & ~is_outside),
        ("entry-distance", 4, (rise[:, 1] <= interval) & ~is_misplaced),
    ]


def _time_rules(rows: Entries, segment: SegmentMark) -> Broken:
    offsets = rows[1:, 1]
    is_outside = (offsets < 0) | (offsets >= segment.messages)
    return [
        ("entry-offset", 8, is_outside),
        ("entry-order", 0, rows[1:, 0] <= rows[:-1, 0]),
        ("entry-order", 8, (offsets <= rows[:-1, 1]) & ~is_outside),
    ]
