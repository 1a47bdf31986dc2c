"""SparseIndex: the entries of one of Kafka's two sparse indexes, read from an open file (spec kafka-index 2, 7).

They are read and judged as Kafka's AbstractIndex does it. Imports no numpy.
"""

from __future__ import annotations

from indexd.errors import CorruptDataError
from indexd.sparse.format import NO_TIMESTAMP, OFFSET_ENTRY, TIME_ENTRY
from indexd.storage.disk import DiskFile


class SparseIndex:
    """The first ``entries`` entries of a file for the segment that begins at ``base``; all slots unless told.

    ``is_time``: a TimeIndex, entries (timestamp, offset); else an OffsetIndex, entries (offset, position). Offsets are
    absolute. CorruptDataError if the file is too short; ``length`` is its size in bytes.
    """

    def __init__(self, file: DiskFile, base: int, entries: int | None = None, *, is_time: bool) -> None:
        self.base, self.is_time, self._file, self.length = base, is_time, file, file.size()
        self._packed = TIME_ENTRY if is_time else OFFSET_ENTRY
        self.entry_size = self._packed.size
        self.entries = self.length // self.entry_size if entries is None else entries
        if self.entries * self.entry_size > self.length:
            raise CorruptDataError(f"{file.path} has {self.length} bytes and cannot hold {entries} entries")

    @property
    def last_entry(self) -> tuple[int, int]:
        """Without entries (base, 0) of an OffsetIndex, (-1, base) of a TimeIndex."""
        nothing = (NO_TIMESTAMP, self.base) if self.is_time else (self.base, 0)
        return self.entry(self.entries - 1) if self.entries else nothing

    def entry(self, slot: int) -> tuple[int, int]:
        """The entry of a slot below ``entries``."""
        first, second = self._packed.unpack(self._file.pread(self.entry_size, slot * self.entry_size))
        return (first, self.base + second) if self.is_time else (self.base + first, second)

    def sanity_check(self) -> None:
        """CorruptDataError if the last entry or the file's length cannot be; the rest is not looked at (spec 7)."""
        last, path = self.last_entry, self._file.path
        if self.is_time and self.entries and last[0] < self.entry(0)[0]:
            raise CorruptDataError(f"{path}: its last timestamp {last[0]} is below the first")
        if last[self.is_time] < self.base:
            raise CorruptDataError(f"{path}: its last offset {last[self.is_time]} is below its base {self.base}")
        if self.length % self.entry_size:
            raise CorruptDataError(f"{path}: its {self.length} bytes are no multiple of {self.entry_size}")
