"""OffsetIndex and TimeIndex: the files of Kafka's two sparse indexes over one base (spec kafka-index 2 and 7).

They are opened, filled, trimmed and checked as Kafka's AbstractIndex does it, with these differences: a size that is
too small is refused before a file is made or cut; opening for reading makes no file and closing changes none. One
owner, no locks; raises DiskError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

from indexd.errors import CorruptDataError, DiskError, IndexFullError, UsageError
from indexd.sparse.format import (
    NO_TIMESTAMP,
    OFFSET_ENTRY,
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY,
    TIME_ENTRY_SIZE,
    OffsetPosition,
    TimestampOffset,
    signed_64,
)
from indexd.storage.disk import Disk, DiskFile

Entry = TypeVar("Entry", OffsetPosition, TimestampOffset)


class SparseIndex(Generic[Entry]):
    """An open file of fixed entries for the segment that begins at ``base``: ``entries`` of ``max_entries`` slots.

    ``length`` is the file's, in bytes.
    """

    entry_size: ClassVar[int]
    _struct: ClassVar[struct.Struct]
    #: Which number of an entry is the relative offset.
    _offset_at: ClassVar[int]
    #: What stands for the last entry where there is none.
    _nothing: ClassVar[tuple[int, int]]
    _entry_type: type[Entry]

    def __init__(self, path: Path, file: DiskFile, base: int, entries: int) -> None:
        self.path, self.base, self._file = path, base, file
        try:
            self.length = file.size()
            self.max_entries = self.length // self.entry_size
            self.entries = self.max_entries if entries < 0 else entries
            if self.entries > self.max_entries:
                raise CorruptDataError(f"{path} has {self.length} bytes and cannot hold {entries} entries")
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(cls, disk: Disk, path: Path, base: int, *, writable: bool = True) -> Self:
        """Open as Kafka does: every slot of the file counts, zero or not."""
        return cls.load(disk, path, base, -1, writable=writable)

    @classmethod
    def create(cls, disk: Disk, path: Path, base: int, max_index_size: int) -> Self:
        """Make the file, which must not be there: zeros that take no space yet."""
        if max_index_size < cls.entry_size:
            raise UsageError(f"an index of {max_index_size} bytes cannot hold an entry of {cls.entry_size}")
        file = disk.open_write(path, create=True)
        try:
            file.truncate(max_index_size // cls.entry_size * cls.entry_size)
        except DiskError:
            file.close()
            disk.unlink(path)
            raise
        return cls(path, file, base, 0)

    @classmethod
    def load(cls, disk: Disk, path: Path, base: int, entries: int, *, writable: bool = False) -> Self:
        """Open a file of which ``entries`` are known to hold; CorruptDataError if it is too short for them."""
        return cls(path, disk.open_write(path) if writable else disk.open_read(path), base, entries)

    def __iter__(self) -> Iterator[Entry]:
        return (self._entry(slot) for slot in range(self.entries))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size_in_bytes(self) -> int:
        """Of the entries, without what is behind them."""
        return self.entries * self.entry_size

    @property
    def last_entry(self) -> Entry:
        """Without entries (base, 0) of an OffsetIndex, (-1, base) of a TimeIndex."""
        return self._entry(self.entries - 1) if self.entries else self._absolute(*self._nothing)

    def entry(self, slot: int) -> Entry:
        """The entry of a slot below ``entries``; UsageError for others."""
        if not 0 <= slot < self.entries:
            raise UsageError(f"{self.path} has no entry {slot}: it holds {self.entries}", "")
        return self._entry(slot)

    def extend(self, data: bytes) -> None:
        """Append entries, as the bytes of the file, that are known to go on from what is there; one write."""
        if self.size_in_bytes + len(data) > self.max_entries * self.entry_size:
            raise IndexFullError(f"{self.path} has no room for {len(data)} bytes more: {self.entries} entries are in")
        self._file.pwrite(data, self.size_in_bytes)
        self.entries += len(data) // self.entry_size

    def resize(self, size: int) -> None:
        """Give the file ``size`` bytes, rounded down to whole entries; UsageError if less than it uses."""
        rounded = size // self.entry_size * self.entry_size
        if rounded < self.size_in_bytes:
            raise UsageError(f"{self.path} cannot have {size} bytes: it holds {self.entries} entries")
        if rounded != self.length:
            self._file.truncate(rounded)
            self.length, self.max_entries = rounded, rounded // self.entry_size

    def trim_to_valid_size(self) -> None:
        """Cut the file behind its last entry; one without entries gets 0 bytes."""
        self.resize(self.size_in_bytes)

    def sanity_check(self) -> None:
        """CorruptDataError if the last entry or the file's length cannot be; the rest is not looked at (spec 7)."""
        last = self.last_entry
        if self.entries and last.offset < self.base:
            raise CorruptDataError(f"{self.path}: its last offset {last.offset} is below its base {self.base}")
        if self.length % self.entry_size:
            raise CorruptDataError(f"{self.path}: its {self.length} bytes are no multiple of {self.entry_size}")

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def _entry(self, slot: int) -> Entry:
        return self._absolute(*self._struct.unpack(self._file.pread(self.entry_size, slot * self.entry_size)))

    def _absolute(self, first: int, second: int) -> Entry:
        if self._offset_at == 0:
            return self._entry_type(signed_64(self.base + first), second)
        return self._entry_type(first, signed_64(self.base + second))


class OffsetIndex(SparseIndex[OffsetPosition]):
    """Kafka's OffsetIndex: offsets rise strictly."""

    entry_size, _struct, _entry_type = OFFSET_ENTRY_SIZE, OFFSET_ENTRY, OffsetPosition
    _offset_at, _nothing = 0, (0, 0)


class TimeIndex(SparseIndex[TimestampOffset]):
    """Kafka's TimeIndex: timestamps rise strictly, offsets do not fall."""

    entry_size, _struct, _entry_type = TIME_ENTRY_SIZE, TIME_ENTRY, TimestampOffset
    _offset_at, _nothing = 1, (NO_TIMESTAMP, 0)

    def sanity_check(self) -> None:
        """The same, and if the last timestamp is below the first."""
        if self.entries and self.last_entry.timestamp < self._entry(0).timestamp:
            raise CorruptDataError(f"{self.path}: its last timestamp {self.last_entry.timestamp} is below the first")
        super().sanity_check()
