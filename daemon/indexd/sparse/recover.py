"""What is kept of the pairs: ``plan`` reads and decides, ``carry_out`` changes files.

In between the caller makes a frontier durable with the plan's mark, so that no durable mark ever names what is gone.
Only marks are believed. A segment whose files do not hold is built again, and so is everything behind it: the log is
read again from ``refill_from``. Both steps come to the same end however often they are broken off and repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from indexd.errors import DiskError
from indexd.sparse.format import (
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY_SIZE,
    ActiveMark,
    SegmentMark,
    SparseMark,
    index_name,
    own_base,
    time_index_name,
)
from indexd.sparse.sparse_index import OffsetIndex, TimeIndex
from indexd.storage.disk import Disk

_READ_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class SparsePlan:
    """``mark`` is what holds; the log has to be read again from ``refill_from`` on (None: from nowhere).

    ``delete``: files of ours that ``mark`` does not name. ``cut``: name -> bytes of the growing files whose rest has to
    become zeros again. ``reasons`` says what did not hold, a line each.
    """

    directory: Path
    mark: SparseMark
    refill_from: int | None
    delete: tuple[str, ...]
    cut: Mapping[str, int]
    reasons: tuple[str, ...]


def plan(
    disk: Disk, directory: Path, segment_size: int, mark: SparseMark, phy_offset: int, *, log_begin: int
) -> SparsePlan:
    """Decide what of ``mark`` is kept if all is to stand at ``phy_offset`` and the log begins at ``log_begin``.

    Segments that have expired are left out. Where the mark covers more than ``phy_offset``, the segment in which that
    lies goes, with all behind it: at most one segment of log is read again for that.
    """
    sizes = dict(disk.list_dir(directory)) if disk.exists(directory) else {}
    reasons: list[str] = []
    end = mark.phy_offset
    if end > phy_offset:
        end = phy_offset - phy_offset % segment_size
    kept: list[SegmentMark] = []
    active: ActiveMark | None = None
    for segment in mark.segments:
        if segment.base + segment_size <= log_begin:
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
    named = {name for segment in kept for name in (index_name(segment.base), time_index_name(segment.base))}
    refill_from = max(end, log_begin)
    return SparsePlan(
        directory,
        new,
        refill_from if end < mark.phy_offset and refill_from < phy_offset else None,
        tuple(name for name in sizes if own_base(name) is not None and name not in named),
        _cuts(disk, directory, new),
        tuple(reasons),
    )


def carry_out(disk: Disk, plan: SparsePlan) -> None:
    """Do what ``plan`` says. Files that other hands gave other names stay."""
    for name in plan.delete:
        disk.unlink(plan.directory / name)
    for name, size in plan.cut.items():
        with disk.open_write(plan.directory / name) as file:
            length = file.size()
            file.truncate(size)
            file.truncate(length)
            # Else it could come back behind a clean stop, when nobody looks for it.
            file.fsync()


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


def _cuts(disk: Disk, directory: Path, mark: SparseMark) -> dict[str, int]:
    # The growing pair's files that hold anything behind their entries: written after the mark, and torn perhaps.
    if mark.active is None:
        return {}
    growing = mark.segments[-1]
    rows = (
        (index_name(growing.base), growing.offset_entries * OFFSET_ENTRY_SIZE),
        (time_index_name(growing.base), growing.time_entries * TIME_ENTRY_SIZE),
    )
    return {name: size for name, size in rows if not _is_zero(disk, directory / name, size)}


def _is_zero(disk: Disk, path: Path, position: int) -> bool:
    with disk.open_read(path) as file:
        while data := file.pread(_READ_SIZE, position):
            if any(data):
                return False
            position += len(data)
    return True
