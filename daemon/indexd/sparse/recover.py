"""Recovery of the sparse indexes: what of the pairs holds, and what has to be changed and read again.

Only marks are believed. A segment whose files do not hold is built again, and so is everything behind it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from indexd.errors import DiskError
from indexd.output import OutputRecovery, RecoveryScope, find_nonzero
from indexd.sparse.format import (
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY_SIZE,
    ActiveMark,
    SegmentMark,
    SparseMark,
    index_name,
    own_base,
    pair_names,
    time_index_name,
)
from indexd.sparse.sparse_index import OffsetIndex, TimeIndex
from indexd.storage.disk import Disk


def recover_sparse(
    disk: Disk, directory: Path, segment_size: int, held: SparseMark | None, interval: int, scope: RecoveryScope
) -> OutputRecovery[SparseMark]:
    """What of ``held`` is kept if what lies behind ``scope.believed`` is not believed; reads only.

    Segments that have expired are left out. Where the mark covers more than what is believed, the segment in which that
    ends goes, with all behind it: at most one segment of log is read again for that.
    """
    mark, believed = held or SparseMark(interval), max(scope.believed, scope.log_begin)
    sizes = dict(disk.list_dir(directory)) if disk.exists(directory) else {}
    reasons: list[str] = []
    end = mark.phy_offset
    if end > believed:
        end = believed - believed % segment_size
    kept: list[SegmentMark] = []
    active: ActiveMark | None = None
    for segment in mark.segments:
        if segment.base + segment_size <= scope.log_begin:
            continue
        if segment.base >= end:
            break
        is_last = segment is mark.segments[-1]
        if is_last and mark.active is None and end < segment.base + segment_size:
            # It was closed for a message that the disk then refused; the log may have been cut before that one since.
            end = segment.base
            break
        growing = mark.active if is_last else None
        fault = _fault(disk, directory, segment, growing, sizes, segment_size)
        if fault:
            end = segment.base
            reasons.append(fault)
            break
        kept.append(segment)
        active = growing
    new = SparseMark(mark.interval, end, tuple(kept), active)
    named = {name for segment in kept for name in pair_names(segment.base)}
    is_lost = held is None or end < mark.phy_offset or scope.believed < scope.phy_offset
    refill_from = max(end, scope.log_begin)
    return OutputRecovery(
        new,
        refill_from if is_lost and refill_from < scope.phy_offset else None,
        delete=tuple(directory / name for name in sizes if own_base(name) is not None and name not in named),
        cut=_cuts(disk, directory, new, sizes),
        reasons=tuple(reasons),
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
    for name, size in (
        (index_name(segment.base), segment.offset_entries * OFFSET_ENTRY_SIZE),
        (time_index_name(segment.base), segment.time_entries * TIME_ENTRY_SIZE),
    ):
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] < size or (sizes[name] > size and active is None):
            return f"{name} has {sizes[name]} bytes, not {size}"
    base = segment.base
    try:
        with OffsetIndex.load(disk, directory / index_name(base), base, segment.offset_entries) as offsets:
            offset, position = offsets.last_entry
            if offsets.entries and not (base < offset < base + segment.messages and 0 < position < segment_size):
                return f"{index_name(base)} ends with offset {offset} at {position}, which cannot be"
        with TimeIndex.load(disk, directory / time_index_name(base), base, segment.time_entries) as times:
            timestamp, offset = times.last_entry
            if times.entries and not base <= offset < base + segment.messages:
                return f"{time_index_name(base)} ends with offset {offset}, which cannot be"
            if active is not None and timestamp != active.last_timestamp:
                return f"{time_index_name(base)} ends with timestamp {timestamp}, not {active.last_timestamp}"
    except DiskError as error:
        if not error.is_missing:
            raise
        return f"{directory / index_name(base)} or its time index is missing"
    return None


def _cuts(disk: Disk, directory: Path, mark: SparseMark, sizes: Mapping[str, int]) -> tuple[tuple[Path, int, int], ...]:
    # The growing pair's files that hold anything behind their entries: written after the mark, and torn perhaps.
    if mark.active is None:
        return ()
    growing, found = mark.segments[-1], []
    for name, size in (
        (index_name(growing.base), growing.offset_entries * OFFSET_ENTRY_SIZE),
        (time_index_name(growing.base), growing.time_entries * TIME_ENTRY_SIZE),
    ):
        with disk.open_read(directory / name) as file:
            if find_nonzero(file, size, sizes[name])[1]:
                found.append((directory / name, size, sizes[name]))
    return tuple(found)
