"""OffsetIndex and TimeIndex: Kafka's two sparse indexes over one base, SparseIndex (spec kafka-index 2 to 5, 7).

They behave as Kafka's AbstractIndex does, call by call, with three differences, each for the better: a size that is too
small is refused before a file is made; opening for reading only makes no file and closing changes none; what does not
fit into 32 bits is refused before the first byte is written. One owner, no locks; raises DiskError.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

from indexd.errors import CorruptDataError, DiskError, IndexFullError, OffsetOverflowError, OutOfOrderError, UsageError
from indexd.sparse.format import (
    INT32_MAX,
    INT64_MAX,
    NO_TIMESTAMP,
    OFFSET_ENTRY,
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY,
    TIME_ENTRY_SIZE,
    OffsetPosition,
    TimestampOffset,
    is_in_range,
    search,
    signed_64,
)
from indexd.storage.disk import Disk, DiskFile

Entry = TypeVar("Entry", bound=tuple[int, int])


class SparseIndex(ABC, Generic[Entry]):
    """An open file of fixed entries for the segment that begins at ``base``: ``entries`` of ``max_entries`` slots.

    The entries are kept in memory from the first lookup on. ``length`` is the file's, in bytes.
    """

    entry_size: ClassVar[int]
    _struct: ClassVar[struct.Struct]

    def __init__(
        self, disk: Disk, path: Path, file: DiskFile, base: int, entries: int, max_index_size: int, is_writable: bool
    ) -> None:
        self.path = path
        self.base = base
        self.max_index_size = max_index_size
        self.is_writable = is_writable
        self._disk = disk
        self._file = file
        self._data: bytearray | None = None
        try:
            self.length = file.size()
            self.max_entries = self.length // self.entry_size
            self.entries = self.max_entries if entries < 0 else entries
            if self.entries > self.max_entries:
                raise CorruptDataError(f"{path} has {self.length} bytes and cannot hold {entries} entries")
            self._read_last()
        except BaseException:
            file.close()
            raise

    @classmethod
    def open(cls, disk: Disk, path: Path, base: int, max_index_size: int = -1, *, writable: bool = True) -> Self:
        """Open as Kafka does; make a file of ``max_index_size`` bytes, rounded down to whole entries, if none is there.

        In a file that is there every slot counts, zero or not, and ``max_index_size`` is for ``reset``. Not
        ``writable``: the file has to be there.
        """
        if not writable:
            return cls(disk, path, disk.open_read(path), base, -1, max_index_size, False)
        if disk.exists(path):
            return cls(disk, path, disk.open_write(path), base, -1, max_index_size, True)
        return cls.create(disk, path, base, max_index_size)

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
        return cls(disk, path, file, base, 0, max_index_size, True)

    @classmethod
    def load(
        cls, disk: Disk, path: Path, base: int, entries: int, max_index_size: int = -1, *, writable: bool = False
    ) -> Self:
        """Open a file of which ``entries`` are known to hold; CorruptDataError if it is too short for them."""
        file = disk.open_write(path) if writable else disk.open_read(path)
        return cls(disk, path, file, base, entries, max_index_size, writable)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path}, base={self.base}, entries={self.entries} of {self.max_entries})"

    def __iter__(self) -> Iterator[Entry]:
        return (self._entry(slot) for slot in range(self.entries))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_file()

    @property
    def size_in_bytes(self) -> int:
        """Of the entries, without what is behind them."""
        return self.entries * self.entry_size

    @property
    @abstractmethod
    def is_full(self) -> bool:
        """Whether an append would be refused."""

    def can_append_offset(self, offset: int) -> bool:
        """Whether ``offset`` can be held relative to the base."""
        return is_in_range(self.base, offset)

    def entry(self, slot: int) -> Entry:
        """The entry of a slot below ``entries``; UsageError for others."""
        if not 0 <= slot < self.entries:
            raise UsageError(f"{self.path} has no entry {slot}: it holds {self.entries}", "")
        return self._entry(slot)

    def extend(self, data: bytes) -> None:
        """Append entries, as the bytes of the file, that are known to go on from what is there; one write."""
        count, rest = divmod(len(data), self.entry_size)
        if rest or not count:
            if rest:
                raise UsageError(f"{len(data)} bytes are no whole entries of {self.entry_size}")
            return
        if self.entries + count > self.max_entries:
            raise IndexFullError(f"{self.path} has no room for {count} more entries: {self.entries} are in")
        self._write(data)

    def truncate_to(self, offset: int) -> None:
        """Drop the entries of ``offset`` and above; their bytes stay in the file until they are written over."""
        slot, _ = self._search(self._offset, offset)
        if slot >= 0 and self._offset(slot) != offset:
            slot += 1
        self._truncate_to_entries(max(slot, 0))

    def truncate(self) -> None:
        """Drop all entries, their bytes excepted."""
        self._truncate_to_entries(0)

    def resize(self, size: int) -> bool:
        """Give the file ``size`` bytes, rounded down to whole entries; whether that changed it.

        As in Kafka, a size below the used part cuts the file and is an error after that.
        """
        self._must_be_writable()
        if size < 0:
            raise UsageError(f"{self.path} cannot have {size} bytes")
        rounded = size // self.entry_size * self.entry_size
        if rounded == self.length:
            return False
        self._file.truncate(rounded)
        self.length = rounded
        self.max_entries = rounded // self.entry_size
        if self.size_in_bytes > rounded:
            self._data = None
            raise UsageError(f"{self.path} was cut to {rounded} bytes, below its {self.entries} entries")
        return True

    def trim_to_valid_size(self) -> None:
        """Cut the file behind its last entry; one without entries gets 0 bytes."""
        self.resize(self.size_in_bytes)

    @abstractmethod
    def sanity_check(self) -> None:
        """CorruptDataError if the last entry or the file's length cannot be; the rest is not looked at (spec 7)."""

    def flush(self) -> None:
        """Make entries and length durable."""
        self._file.fsync()

    def close(self, *, trim: bool = True) -> None:
        """Close, behind a trim as up to Kafka 4.3; from 4.4 on the roll trims, and closing does not."""
        if trim and self.is_writable and self._file.fileno() >= 0:
            self.trim_to_valid_size()
        self._close_file()

    @abstractmethod
    def _offset(self, slot: int) -> int:
        """The offset in a slot, absolute."""

    @abstractmethod
    def _set_last(self, last: Entry | None) -> None:
        """``last`` is the last entry now, or there is none."""

    def _read_last(self) -> None:
        # Without the rest: whoever only appends never needs it.
        if self.entries == 0:
            self._set_last(None)
            return
        data = self._file.pread(self.entry_size, self.size_in_bytes - self.entry_size)
        self._set_last(self._absolute(*self._struct.unpack(data)))

    def _entry(self, slot: int) -> Entry:
        return self._absolute(*self._unpack(slot))

    def _search(self, key: Callable[[int], int], target: int) -> tuple[int, int]:
        return search(key, self.entries, self.entry_size, target)

    def _unpack(self, slot: int) -> tuple[int, int]:
        if self._data is None or len(self._data) < self.size_in_bytes:
            data = bytearray(self.size_in_bytes)
            if self._file.pread_into(data, 0) < len(data):
                raise CorruptDataError(f"{self.path} is shorter than its {self.entries} entries")
            self._data = data
        first, second = self._struct.unpack_from(self._data, slot * self.entry_size)
        return first, second

    @abstractmethod
    def _absolute(self, first: int, second: int) -> Entry:
        """The two numbers of an entry, its offset no longer relative."""

    def _offset_of(self, relative: int) -> int:
        offset = self.base + relative
        return offset if -INT64_MAX - 1 <= offset <= INT64_MAX else signed_64(offset)

    def _relative(self, offset: int) -> int:
        if not self.can_append_offset(offset):
            raise OffsetOverflowError(
                f"{self.path} cannot hold offset {offset}: it is not within {INT32_MAX} of the base"
            )
        return signed_64(offset - self.base)

    def _pack(self, first: int, second: int) -> bytes:
        try:
            return self._struct.pack(first, second)
        except struct.error as error:
            raise UsageError(f"{self.path} cannot hold ({first}, {second}): {error}") from error

    def _write(self, data: bytes) -> None:
        self._must_be_writable()
        self._file.pwrite(data, self.size_in_bytes)
        if self._data is not None:
            self._data[self.size_in_bytes :] = data
        self.entries += len(data) // self.entry_size
        self._set_last(self._absolute(*self._struct.unpack_from(data, len(data) - self.entry_size)))

    def _truncate_to_entries(self, entries: int) -> None:
        self.entries = entries
        self._data = None if self._data is None else self._data[: self.size_in_bytes]
        self._read_last()

    def _must_be_writable(self) -> None:
        if not self.is_writable:
            raise UsageError(f"{self.path} is open for reading only")

    def _close_file(self) -> None:
        self._file.close()
        self._data = None


class OffsetIndex(SparseIndex[OffsetPosition]):
    """Kafka's OffsetIndex. Offsets rise strictly; positions are anything that 32 bits hold, and are not looked at."""

    entry_size = OFFSET_ENTRY_SIZE
    _struct = OFFSET_ENTRY

    #: (base, 0) without entries.
    last_entry: OffsetPosition

    @property
    def last_offset(self) -> int:
        """The last entry's offset, or the base without entries."""
        return self.last_entry.offset

    @property
    def is_full(self) -> bool:
        """Whether an append would be refused."""
        return self.entries >= self.max_entries

    def append(self, offset: int, position: int) -> None:
        """Add an entry: IndexFullError, OutOfOrderError or OffsetOverflowError, in that order, if it may not be."""
        if self.is_full:
            raise IndexFullError(f"{self.path} is full: {self.entries} entries")
        if self.entries and offset <= self.last_offset:
            raise OutOfOrderError(f"{self.path} cannot take offset {offset} behind {self.last_offset}")
        self._write(self._pack(self._relative(offset), position))

    def lookup(self, target: int) -> OffsetPosition:
        """The entry of the largest offset at most ``target``, or (base, 0): read the log from that position on."""
        slot, _ = self._search(self._offset, target)
        return OffsetPosition(self.base, 0) if slot < 0 else self._entry(slot)

    def sanity_check(self) -> None:
        """CorruptDataError if the last offset is below the base, or the length is not of whole entries (spec 7)."""
        if self.entries and self.last_offset < self.base:
            raise CorruptDataError(f"{self.path}: its last offset {self.last_offset} is below its base {self.base}")
        if self.length % self.entry_size:
            raise CorruptDataError(f"{self.path}: its {self.length} bytes are no multiple of {self.entry_size}")

    def _offset(self, slot: int) -> int:
        return self._offset_of(self._unpack(slot)[0])

    def _absolute(self, first: int, second: int) -> OffsetPosition:
        return OffsetPosition(self._offset_of(first), second)

    def _set_last(self, last: OffsetPosition | None) -> None:
        self.last_entry = OffsetPosition(self.base, 0) if last is None else last


class TimeIndex(SparseIndex[TimestampOffset]):
    """Kafka's TimeIndex. Timestamps rise strictly, offsets do not fall. The last slot is kept for the roll's entry."""

    entry_size = TIME_ENTRY_SIZE
    _struct = TIME_ENTRY

    #: (-1, base) without entries.
    last_entry: TimestampOffset

    @property
    def is_full(self) -> bool:
        """Whether all slots but the last are taken: a file of one slot is full from the start."""
        return self.entries >= self.max_entries - 1

    def maybe_append(self, timestamp: int, offset: int, skip_full_check: bool = False) -> None:
        """Add an entry if ``timestamp`` is larger than the last one; nothing happens if it is equal.

        IndexFullError, even where nothing would happen, OutOfOrderError for an offset or a timestamp that falls,
        OffsetOverflowError, in that order. ``skip_full_check`` lets the last slot be used: for the roll.
        """
        if self.is_full and not skip_full_check:
            raise IndexFullError(f"{self.path} is full: {self.entries} entries")
        last = self.last_entry
        if self.entries and offset < last.offset:
            raise OutOfOrderError(f"{self.path} cannot take offset {offset} behind {last.offset}")
        if self.entries and timestamp < last.timestamp:
            raise OutOfOrderError(f"{self.path} cannot take timestamp {timestamp} behind {last.timestamp}")
        if timestamp <= last.timestamp:
            return
        if self.entries >= self.max_entries:
            raise IndexFullError(f"{self.path} has no slot left: {self.entries} entries")
        # Kafka writes the timestamp before it finds that the offset cannot follow, and the file stays torn.
        self._write(self._pack(timestamp, self._relative(offset)))

    def lookup(self, target: int) -> TimestampOffset:
        """The entry of the largest timestamp at most ``target``, or (-1, base).

        Every message that is later than its timestamp comes behind its offset.
        """
        slot, _ = self._search(self._timestamp, target)
        return TimestampOffset(NO_TIMESTAMP, self.base) if slot < 0 else self._entry(slot)

    def sanity_check(self) -> None:
        """CorruptDataError if the last timestamp is below the first, the last offset below the base, or the length is
        not of whole entries (spec 7).
        """
        if self.entries and self.last_entry.timestamp < self._timestamp(0):
            raise CorruptDataError(f"{self.path}: its last timestamp {self.last_entry.timestamp} is below the first")
        if self.entries and self.last_entry.offset < self.base:
            raise CorruptDataError(
                f"{self.path}: its last offset {self.last_entry.offset} is below its base {self.base}"
            )
        if self.length % self.entry_size:
            raise CorruptDataError(f"{self.path}: its {self.length} bytes are no multiple of {self.entry_size}")

    def _timestamp(self, slot: int) -> int:
        return self._unpack(slot)[0]

    def _offset(self, slot: int) -> int:
        return self._offset_of(self._unpack(slot)[1])

    def _absolute(self, first: int, second: int) -> TimestampOffset:
        return TimestampOffset(first, self._offset_of(second))

    def _set_last(self, last: TimestampOffset | None) -> None:
        self.last_entry = TimestampOffset(NO_TIMESTAMP, self.base) if last is None else last
