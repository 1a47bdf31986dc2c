"""The pairs held against what the frontier says of them: sizes, order of entries, nothing else there. Reads only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.sparse.format import (
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY_SIZE,
    SegmentMark,
    SparseMark,
    index_name,
    own_base,
    time_index_name,
)
from indexd.storage.disk import Disk

_OFFSET_ENTRY = np.dtype([("offset", ">i4"), ("position", ">i4")])
_TIME_ENTRY = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])


def check_sparse(
    disk: Disk,
    directory: Path,
    segment_size: int,
    mark: SparseMark,
    *,
    is_at_rest: bool,
    is_owned: bool,
    on_bytes: Callable[[int], None],
    name: str = "sparse",
) -> Findings:
    """Everything that does not hold; the words as in ``consumequeue.check.check_queues``."""
    findings = Findings()
    for segment in mark.segments:
        grows = mark.active is not None and segment is mark.segments[-1]
        for file, entry, count in (
            (index_name(segment.base), _OFFSET_ENTRY, segment.offset_entries),
            (time_index_name(segment.base), _TIME_ENTRY, segment.time_entries),
        ):
            data = _read(disk, directory / file)
            if data is None:
                findings.add(f"{name}/{file}", 0, "file-missing", "the frontier names it, but it is not there")
                continue
            on_bytes(len(data))
            size = count * entry.itemsize
            if len(data) < size or (len(data) > size and not grows):
                text = f"{len(data)} bytes, but {count} entries take {size}"
                findings.add(f"{name}/{file}", min(len(data), size), "file-size", text)
                continue
            rest = np.flatnonzero(np.frombuffer(data, np.uint8, offset=size))
            if is_at_rest and len(rest):
                text = f"{len(rest)} bytes behind the last entry, {count - 1}, are not zero"
                findings.add(f"{name}/{file}", size + int(rest[0]), "behind-last-entry", text)
            for at, text in _wrong(np.frombuffer(data, entry, count), segment, segment_size):
                findings.add(f"{name}/{file}", at * entry.itemsize, "entry-order", f"entry {at}: {text}")
    if not is_owned:
        named = {base for segment in mark.segments if (base := segment.base) is not None}
        for file, _ in disk.list_dir(directory) if disk.exists(directory) else ():
            if own_base(file) is not None and own_base(file) not in named:
                findings.add(f"{name}/{file}", 0, "file-unnamed", "the frontier does not name it, and no daemon runs")
    return findings


def _wrong(rows: np.ndarray, segment: SegmentMark, segment_size: int) -> list[tuple[int, str]]:
    # What no segment can come to: (entry, in words), the first of each kind.
    found: list[tuple[int, str]] = []
    for field in rows.dtype.names or ():
        values = rows[field].astype(np.int64)
        # Several timestamps may stand for one message only where it was the largest twice, which cannot be.
        falls = np.flatnonzero(np.diff(values) <= 0)
        if len(falls):
            at = int(falls[0]) + 1
            found.append((at, f"the {field} {values[at]} follows {values[at - 1]}"))
    offsets = rows["offset"].astype(np.int64)
    outside = np.flatnonzero((offsets < 0) | (offsets >= segment.messages))
    if len(outside):
        found.append((int(outside[0]), f"offset {offsets[outside[0]]} of {segment.messages} messages"))
    if "position" in (rows.dtype.names or ()):
        positions = rows["position"].astype(np.int64)
        outside = np.flatnonzero((positions <= 0) | (positions >= segment_size))
        if len(outside):
            found.append((int(outside[0]), f"position {positions[outside[0]]} in a segment of {segment_size} bytes"))
    return found


def _read(disk: Disk, path: Path) -> bytes | None:
    try:
        return disk.read(path)
    except DiskError as error:
        if not error.is_missing:
            raise
        return None


assert (_OFFSET_ENTRY.itemsize, _TIME_ENTRY.itemsize) == (OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE)
