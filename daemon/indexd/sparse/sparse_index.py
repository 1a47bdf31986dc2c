"""SparseIndex: what OffsetIndex and TimeIndex have in common (spec kafka-index 2, 4 and 7).

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

from indexd.errors import CorruptDataError, DiskError, IndexFullError, OffsetOverflowError, UsageError
from indexd.sparse.format import INT32_MAX, INT64_MAX, is_in_range, signed_64
from indexd.sparse.searching import search
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
