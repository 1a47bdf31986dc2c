"""Logs as rows (physical offset, size, store timestamp), the batches made of them, and the files they must come to."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import groupby

from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns
from support.kafka_model import Entries

Row = tuple[int, int, int]
#: Not much, so that small examples have several segments.
SEGMENT_SIZE = 4096
_BLANK_SIZE = 8
_FRAME_SIZE_MIN = 91
_TABLE = TopicTable(16, 64)


def batch_of(rows: Sequence[Row], end_offset: int | None = None) -> DispatchBatch:
    """A batch of these rows with the columns that sparse indexes need; it ends behind the last one unless told."""
    columns = make_columns(len(rows), 0)
    for at, (phy_offset, size, timestamp) in enumerate(rows):
        columns.phy_offset[at], columns.size[at], columns.store_timestamp[at] = phy_offset, size, timestamp
    columns.key_start[:] = 0
    end = rows[-1][0] + rows[-1][1] if end_offset is None else end_offset
    return DispatchBatch(columns, len(rows), rows[0][0], end, _TABLE)


def batches_of(rows: Sequence[Row], split: Sequence[int]) -> list[DispatchBatch]:
    """All rows in batches of so many rows, round and round."""
    made: list[DispatchBatch] = []
    at = 0
    while at < len(rows):
        count = split[len(made) % len(split)]
        part = rows[at : at + count]
        at += count
        made.append(batch_of(part, rows[at][0] if at < len(rows) else None))
    return made


@st.composite
def log_rows(draw: st.DrawFn, segment_size: int = SEGMENT_SIZE, max_size: int = 60) -> list[Row]:
    """A log of several segments: frames of 91 bytes and more, blanks at ends, clocks that stand and go back."""
    rows: list[Row] = []
    position = segment_size * draw(st.integers(0, 2))
    timestamps = st.one_of(st.integers(1000, 1010), st.sampled_from([-1, 0, -(2**63), 2**63 - 1]), st.just(1005))
    sizes = st.one_of(st.integers(_FRAME_SIZE_MIN, 200), st.integers(_FRAME_SIZE_MIN, segment_size - _BLANK_SIZE))
    for _ in range(draw(st.integers(1, max_size))):
        size = draw(sizes)
        if position % segment_size + size + _BLANK_SIZE > segment_size:
            position += segment_size - position % segment_size
            if draw(st.integers(0, 9)) == 0:
                position += segment_size  # a segment that is not there
        rows.append((position, size, draw(timestamps)))
        position += size
    return rows


def expected_files(rows: Sequence[Row], interval: int, segment_size: int = SEGMENT_SIZE) -> dict[str, bytes]:
    """Name -> entries of every file, by the plain rule; the last segment has not been rolled."""
    files: dict[str, bytes] = {}
    segments = [list(part) for _, part in groupby(rows, key=lambda row: row[0] // segment_size)]
    for number, part in enumerate(segments):
        base = part[0][0] // segment_size * segment_size
        entries = Entries(interval)
        for ordinal, (phy_offset, size, timestamp) in enumerate(part):
            entries.put(phy_offset - base, size, ordinal, timestamp)
        if number < len(segments) - 1:
            entries.roll()
        files[f"{base:020d}.index"] = b"".join(struct.pack(">ii", *entry) for entry in entries.offsets)
        files[f"{base:020d}.timeindex"] = b"".join(struct.pack(">qi", *entry) for entry in entries.times)
    return files
