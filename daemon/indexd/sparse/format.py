"""The bytes of Kafka's sparse indexes, and the mark that says which of them hold (spec kafka-index 1 and 2).

::

    DATA/sparse/BASE.index        one pair for each commitlog segment, BASE being the segment's base, 20 digits
    DATA/sparse/BASE.timeindex
    .index      n x entry of 8 bytes     i32 relative offset, i32 position
    .timeindex  n x entry of 12 bytes    i64 timestamp in ms, i32 relative offset

Signed, big-endian, no header. In an entry of ``.index`` the message (Kafka: the batch) that starts at ``position`` of
the segment has the logical offset base + relative offset; one of ``.timeindex`` says that ``timestamp`` is the largest
store timestamp up to there and which message had it first. A message's logical offset here is the segment's base plus
its ordinal in the segment. An entry of zeros is an unused slot: a segment's first message never gets an entry.

Written by SparseService alone, by pwrite, in order; a growing file is longer than its entries (zeros), that of a sealed
segment ends with the last one. Read by queries of any process, and by Kafka's own classes. A crash can leave anything
behind the entries that a durable mark counts, and files that no mark names.
"""

from __future__ import annotations

import re
import struct
from typing import Any, NamedTuple

from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.storage.disk import DiskFile

OFFSET_ENTRY_SIZE = 8
TIME_ENTRY_SIZE = 12
OFFSET_ENTRY = struct.Struct(">ii")
TIME_ENTRY = struct.Struct(">qi")
OFFSET_SUFFIX = ".index"
TIME_SUFFIX = ".timeindex"
#: Kafka appends these to a whole name while it deletes, cleans or swaps a file.
PASSING_SUFFIXES = (".deleted", ".cleaned", ".swap")
#: The largest relative offset and position.
INT32_MAX = 0x7FFFFFFF
INT64_MAX = 0x7FFFFFFFFFFFFFFF
#: The timestamp of "nothing yet", in lookups and before the first time entry.
NO_TIMESTAMP = -1


class SegmentMark(NamedTuple):
    """One pair: the segment's base, how many messages it has seen, and how many entries hold in each file."""

    base: int
    messages: int
    offset_entries: int
    time_entries: int

    @property
    def files(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """The names of the OffsetIndex and the TimeIndex, and the bytes that the entries of each take."""
        return (
            (index_name(self.base), self.offset_entries * OFFSET_ENTRY_SIZE),
            (time_index_name(self.base), self.time_entries * TIME_ENTRY_SIZE),
        )


class ActiveMark(NamedTuple):
    """What building the growing segment goes on with; offsets are relative to its base, times in ms.

    ``bytes_since``: log bytes since its last offset entry. ``max_timestamp`` is the largest so far, -1 without any, and
    ``max_timestamp_offset`` the message that had it first. ``last_timestamp`` stands in its last time entry, or is -1.
    """

    bytes_since: int
    max_timestamp: int
    max_timestamp_offset: int
    last_timestamp: int


class SparseMark(NamedTuple):
    """What holds of all pairs: the messages before ``phy_offset`` are in; ``segments`` from the oldest to the newest.

    The newest one grows as long as ``active`` says how; without it all are sealed. JSON::

        {"interval": 4096, "phyOffset": 81234, "segments": [[base, messages, offset entries, time entries]],
         "active": null or [bytes since, max timestamp, its offset, last timestamp]}
    """

    interval: int
    phy_offset: int = 0
    segments: tuple[SegmentMark, ...] = ()
    active: ActiveMark | None = None

    @property
    def sealed(self) -> tuple[SegmentMark, ...]:
        """Those that are final, files and all."""
        return self.segments[:-1] if self.active is not None else self.segments

    def to_json(self) -> dict[str, Any]:
        """The object of the drawing above."""
        return {
            "interval": self.interval,
            "phyOffset": self.phy_offset,
            "segments": [list(segment) for segment in self.segments],
            "active": None if self.active is None else list(self.active),
        }

    @classmethod
    def from_json(cls, row: Any) -> SparseMark:
        """The opposite; ValueError, TypeError or KeyError for what ``to_json`` does not make."""
        segments = tuple(SegmentMark(*_numbers(segment, 4)) for segment in row["segments"])
        active = None if row["active"] is None else ActiveMark(*_numbers(row["active"], 4))
        interval, phy_offset = _numbers([row["interval"], row["phyOffset"]], 2)
        bases = [segment.base for segment in segments]
        if (
            bases != sorted(set(bases))
            or min(interval, phy_offset) < 0
            or any(min(segment) < 0 or max(segment[1:]) > INT32_MAX for segment in segments)
            or (active is not None and not segments)
        ):
            raise ValueError("segments out of order or without the growing one, or numbers that nothing counts")
        return cls(interval, phy_offset, segments, active)


def growing_sizes(segment_size: int, interval: int) -> tuple[int, int]:
    """Bytes of the two files while they grow: an entry in every ``interval`` + 1 bytes or frame.

    Kafka keeps a slot of a TimeIndex, and the roll takes one.
    """
    count = segment_size // max(interval + 1, FRAME_SIZE_MIN) + 1
    return count * OFFSET_ENTRY_SIZE, (count + 2) * TIME_ENTRY_SIZE


def index_name(base: int) -> str:
    """The name of a segment's OffsetIndex."""
    return f"{base:020d}{OFFSET_SUFFIX}"


def time_index_name(base: int) -> str:
    """The name of a segment's TimeIndex."""
    return f"{base:020d}{TIME_SUFFIX}"


def own_base(name: str) -> int | None:
    """The base if that is exactly the name of one of our files, else None."""
    found = re.fullmatch(r"([0-9]{20})\.(time)?index", name)
    return int(found[1]) if found is not None and int(found[1]) <= INT64_MAX else None


def _numbers(row: Any, count: int) -> list[int]:
    if len(row) != count or not all(type(value) is int and abs(value) <= INT64_MAX for value in row):
        raise ValueError(f"not {count} numbers of 64 bits: {row!r}")
    return list(row)


def sanity_problem(file: DiskFile, base: int, entries: int, packed: struct.Struct) -> str | None:
    """What Kafka's sanity check has against a file with so many entries (spec 7): its last entry, its length."""
    slots = (0, entries - 1) if entries else ()
    rows = [packed.unpack(file.pread(packed.size, slot * packed.size)) for slot in slots]
    offset = rows[-1][packed is TIME_ENTRY] if rows else 0
    if packed is TIME_ENTRY and rows and rows[-1][0] < rows[0][0]:
        return f"its last timestamp {rows[-1][0]} is below the first"
    if offset < 0:
        return f"its last offset {base + offset} is below its base {base}"
    if file.size() % packed.size:
        return f"its {file.size()} bytes are no multiple of {packed.size}"
    return None
