"""The index file: its bytes (spec rocketmq-store 3), its key hash, and what each RocketMQ version puts into it.

::

    +0             i64 begin timestamp   i64 end timestamp   i64 begin phy offset   i64 end phy offset
    +32            i32 used slot count   (Java: hashSlotCount)
    +36            i32 index count       the next free entry number: 1 in an empty file, 0 on disk until a put or flush
    +40            S x i32 slot          number of the newest entry of that slot, 0 = none
    +40+4S         N x entry             entry 0 is never written; 1 .. N-1 are used in order
    entry          i32 key hash, i64 phy offset, i32 time difference in s, i32 previous entry of the slot

Written by indexd alone, by pwrite into a preallocated file: first entries, then the header, then slots, so that whoever
reads a slot and then the header finds every entry that they name. Read by queries of any process, and by RocketMQ's own
classes. A crash can leave any subset of that: only what the frontier names is trusted, the slots are rebuilt from the
entries, and what lies behind the last durable entry is cut off.

Flavours (spec rocketmq-store 4.3, 4.8): 3.x indexes KEYS alone and leaves prepared and rollback messages out; 4.0 added
UNIQ_KEY and takes prepared ones; 4.7.1 counts a slot once instead of at every put; 5.4 adds an entry for the tag.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from indexd.commitlog.decoder import key_hash
from indexd.commitlog.format import TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from indexd.errors import CorruptDataError

HEADER_SIZE = 40
SLOT_SIZE = 4
ENTRY_SIZE = 20

_HEADER = struct.Struct(">qqqqii")
#: The entry number in a slot.
SLOT = struct.Struct(">i")
#: Key hash, physical offset, time difference, previous entry.
ENTRY = struct.Struct(">iqii")


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """How a file is divided; no file says so itself, and read with another layout it answers wrongly."""

    hash_slot_num: int
    index_num: int

    @property
    def file_size(self) -> int:
        """Bytes of every file of this layout."""
        return HEADER_SIZE + SLOT_SIZE * self.hash_slot_num + ENTRY_SIZE * self.index_num

    def slot_position(self, slot: int) -> int:
        """Byte position of a slot."""
        return HEADER_SIZE + SLOT_SIZE * slot

    def entry_position(self, number: int) -> int:
        """Byte position of an entry."""
        return HEADER_SIZE + SLOT_SIZE * self.hash_slot_num + ENTRY_SIZE * number

    def slot_of(self, key_hash: int) -> int:
        """The slot that a key hash falls into."""
        return key_hash % self.hash_slot_num


@dataclass(frozen=True, slots=True)
class IndexHeader:
    """The 40 bytes at the front. Times in ms. ``index_count`` is as in memory: at least 1."""

    begin_timestamp: int = 0
    end_timestamp: int = 0
    begin_phy_offset: int = 0
    end_phy_offset: int = 0
    used_slot_count: int = 0
    index_count: int = 1

    def pack(self) -> bytes:
        """The 40 bytes."""
        return _HEADER.pack(*self.values())

    @classmethod
    def unpack(cls, data: bytes) -> IndexHeader:
        """Read the 40 bytes; an index count of 0 or less means an empty file (spec 3.1)."""
        if len(data) < HEADER_SIZE:
            raise CorruptDataError(f"an index header has {HEADER_SIZE} bytes, not {len(data)}")
        begin, end, begin_phy, end_phy, used, count = _HEADER.unpack(data[:HEADER_SIZE])
        return cls(begin, end, begin_phy, end_phy, used, max(count, 1))

    def values(self) -> tuple[int, int, int, int, int, int]:
        """The six fields in the order of the file."""
        return (
            self.begin_timestamp,
            self.end_timestamp,
            self.begin_phy_offset,
            self.end_phy_offset,
            self.used_slot_count,
            self.index_count,
        )

    def is_time_matched(self, begin: int, end: int) -> bool:
        """RocketMQ's test, which misses a range that ends in the middle of an older second (spec 3.6)."""
        first, last = self.begin_timestamp, self.end_timestamp
        return (begin < first and end > last) or first <= begin <= last or first <= end <= last

    @property
    def entries(self) -> int:
        """How many entries the file holds."""
        return self.index_count - 1


@dataclass(frozen=True, slots=True)
class FileMark:
    """One index file at one moment: entries below ``header.index_count`` are written; ``full`` files are final.

    ``mtime_ns`` is when it was last written, by us: another time means by somebody else. 0: not known. ``entries_crc``
    is the CRC-32 of the entries from the first on, ``slots_crc`` that of the slots, of a full file or after a clean
    stop; None: not known.
    """

    name: str
    header: IndexHeader
    full: bool
    mtime_ns: int = field(default=0, compare=False)
    entries_crc: int | None = field(default=None, compare=False)
    slots_crc: int | None = field(default=None, compare=False)


def files_to_json(marks: tuple[FileMark, ...]) -> list[dict[str, Any]]:
    """What the frontier says of the key index."""
    return [
        {
            "name": mark.name,
            "full": mark.full,
            "mtimeNs": mark.mtime_ns,
            "header": list(mark.header.values()),
            "crc": [mark.entries_crc, mark.slots_crc],
        }
        for mark in marks
    ]


def files_from_json(rows: Any) -> tuple[FileMark, ...]:
    """The opposite; ValueError, TypeError or KeyError for what ``files_to_json`` does not make."""
    names = [str(row["name"]) for row in rows]
    if names != sorted(set(names)):
        raise ValueError("index files out of order")
    if not all(abs(int(value)) < 1 << 63 for row in rows for value in row["header"]):
        raise ValueError("a number of more than 64 bits")
    return tuple(
        FileMark(
            str(row["name"]),
            IndexHeader(*(int(value) for value in row["header"])),
            bool(row["full"]),
            int(row.get("mtimeNs", 0)),
            *(None if crc is None else int(crc) for crc in row.get("crc", ())),
        )
        for row in rows
    )


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One entry; ``time_diff`` in seconds from the file's begin timestamp."""

    key_hash: int
    phy_offset: int
    time_diff: int
    prev_index: int


def unpack_entry(data: bytes) -> IndexEntry:
    """One entry of 20 bytes."""
    return IndexEntry(*ENTRY.unpack(data))


INDEX_TYPES = ("K", "U", "T")


def index_key_hash(topic: str, key: str, index_type: str | None = None) -> int:
    """The key hash; a tag (index type T) is hashed under ``topic#T#tag``, all else under ``topic#key``."""
    return key_hash(f"{topic}#T#{key}" if index_type == "T" else f"{topic}#{key}")


@dataclass(frozen=True, slots=True)
class Flavour:
    """One compatibility level; ``skipped_types`` are transaction values of the sysFlag that get no entries."""

    name: str
    uniq_key: bool
    tags: bool
    counts_every_put: bool
    skipped_types: tuple[int, ...]

    @property
    def skip_mask(self) -> int:
        """Bit t is set when the transaction value t (0, 4, 8 or 12) is skipped."""
        return sum(1 << value for value in self.skipped_types)


FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour("3.x", False, False, True, (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK)),
        Flavour("4.0", True, False, True, (TRANSACTION_ROLLBACK,)),
        Flavour("4.7", True, False, False, (TRANSACTION_ROLLBACK,)),
        Flavour("5.4", True, True, False, (TRANSACTION_ROLLBACK,)),
    )
}
