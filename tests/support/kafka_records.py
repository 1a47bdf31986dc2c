"""A small writer of Kafka logs, and slow truths about their indexes, from the formats' description alone."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from hypothesis import strategies as st

from indexd.kafka.kernel import CRC32C_TABLES
from support.queues import Entries

# The table itself is Kafka's: the goldens' batches have its sums.
_TABLE = CRC32C_TABLES[0].tolist()


def crc32c(data: bytes) -> int:
    """Byte by byte."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


@dataclass(frozen=True)
class Batch:
    """One batch as it lies in a log; ``max_timestamp`` is -1 for magic 0."""

    data: bytes
    base_offset: int
    last_offset: int
    max_timestamp: int

    @property
    def size(self) -> int:
        return len(self.data)


def batch(
    base_offset: int,
    last_offset: int,
    max_timestamp: int,
    payload: bytes = b"",
    *,
    attributes: int = 0,
    count: int | None = None,
) -> Batch:
    """Magic 2; ``payload`` stands for the records, which nothing here looks into."""
    delta = last_offset - base_offset
    records = min(delta + 1, (1 << 31) - 1) if count is None else count
    body = struct.pack(">hiqqqhii", attributes, delta, max_timestamp, max_timestamp, -1, -1, -1, records)
    covered = body + payload
    head = struct.pack(">qiibI", base_offset, 9 + len(covered), 0, 2, crc32c(covered))
    return Batch(head + covered, base_offset, last_offset, max_timestamp)


def old_record(offset: int, timestamp: int, value: bytes = b"", *, magic: int = 1, attributes: int = 0) -> Batch:
    """Magic 0 or 1: a record, or with a codec in ``attributes`` a wrapper, whose offset is the last one in it."""
    covered = struct.pack(">bb", magic, attributes)
    if magic == 1:
        covered += struct.pack(">q", timestamp)
    covered += struct.pack(">ii", -1, len(value)) + value
    record = struct.pack(">I", zlib.crc32(covered)) + covered
    data = struct.pack(">qi", offset, len(record)) + record
    return Batch(data, offset, offset, timestamp if magic == 1 else -1)


def log_bytes(batches: list[Batch]) -> bytes:
    """The .log."""
    return b"".join(one.data for one in batches)


def positions(batches: list[Batch]) -> list[int]:
    """Where each begins."""
    return list(accumulate((one.size for one in batches[:-1]), initial=0)) if batches else []


def recovered(base: int, batches: list[Batch], interval: int) -> tuple[bytes, bytes]:
    """(.index, .timeindex) as recovery makes them."""
    made = Entries(interval)
    for one, position in zip(batches, positions(batches), strict=True):
        made.put(position, one.size, one.last_offset - base, one.max_timestamp)
    made.roll()
    index = b"".join(struct.pack(">ii", *entry) for entry in made.offsets)
    return index, b"".join(struct.pack(">qi", *entry) for entry in made.times)


def name(base: int, suffix: str) -> str:
    """Of a segment's file."""
    return f"{base:020d}{suffix}"


def write_segment(directory: Path, base: int, batches: list[Batch], interval: int = 4096) -> None:
    """A segment with the indexes that recovery gives it."""
    directory.mkdir(parents=True, exist_ok=True)
    index, times = recovered(base, batches, interval)
    (directory / name(base, ".log")).write_bytes(log_bytes(batches))
    (directory / name(base, ".index")).write_bytes(index)
    (directory / name(base, ".timeindex")).write_bytes(times)


def true_offset_entry(batches: list[Batch], offset: int, position: int) -> bool:
    """Whether a batch begins at ``position``, and that or, in a set, a later one ends with ``offset``."""
    starts = positions(batches)
    ends = {one.last_offset: start for one, start in zip(batches, starts, strict=True)}
    return position in starts and ends.get(offset, -1) >= position


def true_time_entry(batches: list[Batch], timestamp: int, offset: int) -> bool:
    """Whether the batch that ends with ``offset`` is the first with ``timestamp``, and none before has a larger one."""
    largest = -1
    for one in batches:
        if one.last_offset == offset:
            return one.max_timestamp == timestamp and timestamp > largest
        largest = max(largest, one.max_timestamp)
    return False


@st.composite
def segments(draw: st.DrawFn, base: int = 0, count: int = 30, step: int = 3, *, old: bool = True) -> list[Batch]:
    """Batches of a segment, those of the old formats too."""
    batches: list[Batch] = []
    offset = base + draw(st.integers(0, 5))
    for _ in range(draw(st.integers(0, count))):
        payload = bytes([draw(st.integers(0, 255))]) * draw(st.integers(0, 300))
        if not old or draw(st.integers(0, 3)):
            last = offset + draw(st.integers(0, 5))
            batches.append(batch(offset, last, draw(st.integers(-1, 60)), payload))
        else:
            batches.append(old_record(offset, draw(st.integers(-1, 60)), payload, magic=draw(st.integers(0, 1))))
        offset = batches[-1].last_offset + draw(st.integers(1, step))
    return batches
