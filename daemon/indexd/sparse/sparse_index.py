"""OffsetIndex and TimeIndex: the entries of Kafka's two sparse indexes, read from an open file (spec kafka-index 2, 7).

They are read and judged as Kafka's AbstractIndex does it. Imports no numpy.
"""

from __future__ import annotations

import struct
from typing import ClassVar, Generic, TypeVar

from indexd.errors import CorruptDataError
from indexd.sparse.format import (
    NO_TIMESTAMP,
    OFFSET_ENTRY,
    TIME_ENTRY,
    OffsetPosition,
    TimestampOffset,
    signed_64,
)
from indexd.storage.disk import DiskFile

Entry = TypeVar("Entry", OffsetPosition, TimestampOffset)


class SparseIndex(Generic[Entry]):
    """The first ``entries`` entries of a file for the segment that begins at ``base``; all slots unless told.

    CorruptDataError if the file is too short for them; ``length`` is its size in bytes.
    """

    entry_size: ClassVar[int]
    _struct: ClassVar[struct.Struct]
    #: Which number of an entry is the relative offset.
    _offset_at: ClassVar[int]
    #: What stands for the last entry where there is none.
    _nothing: ClassVar[tuple[int, int]]
    _entry_type: type[Entry]

    def __init__(self, file: DiskFile, base: int, entries: int | None = None) -> None:
        self.base, self._file, self.length = base, file, file.size()
        self.entries = self.length // self.entry_size if entries is None else entries
        if self.entries * self.entry_size > self.length:
            raise CorruptDataError(f"{file.path} has {self.length} bytes and cannot hold {entries} entries")

    @property
    def last_entry(self) -> Entry:
        """Without entries (base, 0) of an OffsetIndex, (-1, base) of a TimeIndex."""
        return self.entry(self.entries - 1) if self.entries else self._absolute(*self._nothing)

    def entry(self, slot: int) -> Entry:
        """The entry of a slot below ``entries``."""
        return self._absolute(*self._struct.unpack(self._file.pread(self.entry_size, slot * self.entry_size)))

    def sanity_check(self) -> None:
        """CorruptDataError if the last entry or the file's length cannot be; the rest is not looked at (spec 7)."""
        last, path = self.last_entry, self._file.path
        if self.entries and last.offset < self.base:
            raise CorruptDataError(f"{path}: its last offset {last.offset} is below its base {self.base}")
        if self.length % self.entry_size:
            raise CorruptDataError(f"{path}: its {self.length} bytes are no multiple of {self.entry_size}")

    def _absolute(self, first: int, second: int) -> Entry:
        if self._offset_at == 0:
            return self._entry_type(signed_64(self.base + first), second)
        return self._entry_type(first, signed_64(self.base + second))


class OffsetIndex(SparseIndex[OffsetPosition]):
    """Kafka's OffsetIndex: offsets rise strictly."""

    entry_size, _struct, _entry_type = OFFSET_ENTRY.size, OFFSET_ENTRY, OffsetPosition
    _offset_at, _nothing = 0, (0, 0)


class TimeIndex(SparseIndex[TimestampOffset]):
    """Kafka's TimeIndex: timestamps rise strictly, offsets do not fall."""

    entry_size, _struct, _entry_type = TIME_ENTRY.size, TIME_ENTRY, TimestampOffset
    _offset_at, _nothing = 1, (NO_TIMESTAMP, 0)

    def sanity_check(self) -> None:
        """The same, and if the last timestamp is below the first."""
        if self.entries and self.last_entry.timestamp < self.entry(0).timestamp:
            path, last = self._file.path, self.last_entry.timestamp
            raise CorruptDataError(f"{path}: its last timestamp {last} is below the first")
        super().sanity_check()
