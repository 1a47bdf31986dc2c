"""Holds the files of sparse indexes against their mark: all of them for a check, what is left of them for recovery.

What can be said without the log: an entry lies behind the one before it, more than an interval of log on, and inside
its segment. Recovery asks the sizes and the last entries only; a segment whose files do not hold is built again, and
so is everything behind it. Both only read, a window at a time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.errors import MissingOk
from indexd.findings import KEPT_MAX, Findings
from indexd.output import CheckScope, Condition, OutputRecovery, RecoveryScope, find_nonzero
from indexd.sparse.format import (
    INT32_MAX,
    NO_TIMESTAMP,
    SegmentMark,
    SparseMark,
    growing_sizes,
    own_base,
)
from indexd.sparse.kernel import ENTRY_TYPES, unpack_entries
from indexd.storage.disk import Disk

ENTRIES_PER_READ = 1 << 16
# So many of a file's newest entries recovery looks at.
_NEWEST = 2
# A segment's first message has no offset entry, but may have a time entry; a timestamp below 0 never has.
_NOTHING = np.array([[(0, 0)], [(NO_TIMESTAMP, -1)]], dtype=np.int64)


def check_sparse(disk: Disk, directory: Path, segment_size: int, mark: SparseMark, scope: CheckScope) -> Findings:
    """Everything of the files that does not hold."""
    findings = Findings()
    for segment in mark.segments:
        _check_pair(disk, directory, segment_size, mark, segment, scope, findings)
    named = {segment.base for segment in mark.segments}
    for other, _ in disk.list_dir(directory) if scope.is_complete and disk.exists(directory) else ():
        base = own_base(other)
        if base is not None and base not in named:
            findings.add(f"sparse/{other}", 0, "file-unnamed", "the frontier does not name it, and no daemon runs")
    return findings


def recover_sparse(
    disk: Disk, directory: Path, segment_size: int, held: SparseMark | None, interval: int, scope: RecoveryScope
) -> OutputRecovery[SparseMark]:
    """What of ``held`` is kept if what lies behind ``scope.believed`` is not believed; reads only.

    Segments that have expired are left out. Where the mark covers more than what is believed, the segment in which that
    ends goes, with all behind it: at most one segment of log is read again for that.
    """
    mark, believed = held or SparseMark(interval), max(scope.believed, scope.log_begin)
    end = mark.phy_offset if mark.phy_offset <= believed else believed - believed % segment_size
    kept: list[SegmentMark] = []
    active, found = None, Findings()
    newest = CheckScope(Condition.CUT_SHORT, is_complete=False, on_bytes=lambda _: None)
    for segment in mark.segments:
        if segment.base + segment_size <= scope.log_begin:
            continue
        if segment.base >= end:
            break
        is_last = segment is mark.segments[-1]
        growing = mark.active if is_last else None
        # A sealed last one was closed for a message that the disk then refused; the log may have been cut since.
        is_cut = is_last and growing is None and end < segment.base + segment_size
        if not is_cut:
            _check_pair(disk, directory, segment_size, mark, segment, newest, found, entries=_NEWEST)
        if is_cut or found:
            end = segment.base
            break
        kept.append(segment)
        active = growing
    named = {name for segment in kept for name, _ in segment.files}
    there = disk.list_dir(directory) if disk.exists(directory) else []
    is_lost = held is None or end < mark.phy_offset or scope.believed < scope.phy_offset
    refill_from = max(end, scope.log_begin)
    # What grows may have been written on, and trimmed, after the mark.
    growing_files = kept[-1].files if active is not None and scope.is_unclean else ()
    lengths = growing_sizes(segment_size, mark.interval)
    return OutputRecovery(
        SparseMark(mark.interval, end, tuple(kept), active),
        refill_from if is_lost and refill_from < scope.phy_offset else None,
        delete=tuple(directory / name for name, _ in there if own_base(name) is not None and name not in named),
        cut=tuple(
            (directory / name, size, length) for (name, size), length in zip(growing_files, lengths, strict=False)
        ),
        reasons=tuple(f"{finding.file}: {finding.text}" for finding in found.kept[:1]),
    )


def _check_pair(
    disk: Disk,
    directory: Path,
    segment_size: int,
    mark: SparseMark,
    segment: SegmentMark,
    scope: CheckScope,
    findings: Findings,
    *,
    entries: int = INT32_MAX,
) -> None:
    # What of a segment's files does not hold, as far as they tell by themselves; at most so many of the newest entries.
    active = mark.active if segment is mark.segments[-1] else None
    for is_time, (name, size) in enumerate(segment.files):
        last, entry, file_name = _NOTHING[is_time], ENTRY_TYPES[is_time], f"sparse/{name}"
        width = entry.itemsize
        with MissingOk(), disk.open_read(directory / name) as file:
            there = file.size()
            if there < size or (there > size and active is None):
                findings.add(file_name, min(there, size), "file-size", f"{there} bytes, but the entries take {size}")
            for position in range(max(size - entries * width, 0), size, ENTRIES_PER_READ * width):
                data = file.pread(min(size - position, ENTRIES_PER_READ * width), position)
                scope.on_bytes(len(data))
                rows = np.concatenate([last, unpack_entries(data, entry)])
                for what, at, wrong in _rules(rows, is_time, segment, segment_size, mark.interval):
                    found = np.flatnonzero(wrong)
                    for row in found[:KEPT_MAX].tolist():
                        text = f"entry {position // width + row}: {rows[row + 1].tolist()} behind {rows[row].tolist()}"
                        findings.add(file_name, position + row * width + at, what, text)
                    findings.count(what, max(len(found) - KEPT_MAX, 0))
                last = rows[-1:]
            if is_time and active is not None and there >= size and last[0, 0] != active.last_timestamp:
                text = f"the last entry's timestamp is {last[0, 0]}, not {active.last_timestamp} as the frontier says"
                findings.add(file_name, max(size - width, 0), "segment-end", text)
            first, count = find_nonzero(file, size, there) if scope.is_at_rest and active is not None else (0, 0)
            if count:
                findings.add(file_name, first, "behind-last-entry", f"{count} bytes behind the last entry are not zero")
            continue
        findings.add(file_name, 0, "file-missing", "the frontier names it, but it is not there")


def _rules(
    rows: NDArray[np.int64], is_time: int, segment: SegmentMark, segment_size: int, interval: int
) -> list[tuple[str, int, NDArray[np.bool_]]]:
    # What of entries cannot be, given the one before each: kind, place in the entry, which. Row 0 is before all.
    (firsts, seconds), offsets = rows[1:].T, rows[:, is_time]
    is_outside = (offsets[1:] < 0) | (offsets[1:] >= segment.messages)
    falls = (offsets[1:] <= offsets[:-1]) & ~is_outside
    if is_time:
        return [("entry-offset", 8, is_outside), ("entry-order", 0, firsts <= rows[:-1, 0]), ("entry-order", 8, falls)]
    least = np.where(is_outside, 1, offsets[1:]) * FRAME_SIZE_MIN
    is_misplaced = (seconds < least) | (seconds > segment_size - FRAME_SIZE_MIN)
    is_close = (np.diff(rows[:, 1]) <= interval) & ~is_misplaced
    return [
        ("entry-offset", 0, is_outside),
        ("entry-position", 4, is_misplaced),
        ("entry-order", 0, falls),
        ("entry-distance", 4, is_close),
    ]
