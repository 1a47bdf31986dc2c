"""IndexFileReader: what an index file answers, read with pread while it may be growing (spec rocketmq-store 3.6, 3.7).

Imports no compiler and no numpy: a query starts in a fraction of a second. The writer's order is entries, header,
slots; the reader's is slot, then header: so every entry that a slot names is there, and the header counts it.
"""

from __future__ import annotations

from collections.abc import Callable

from indexd.errors import CorruptDataError
from indexd.index.format import (
    ENTRY,
    ENTRY_SIZE,
    HEADER_SIZE,
    SLOT,
    SLOT_SIZE,
    IndexHeader,
    IndexLayout,
)
from indexd.storage.disk import DiskFile

_LONG_MIN, _LONG_MAX = -(1 << 63), (1 << 63) - 1
_ENTRIES_PER_READ = 204


class IndexFileReader:
    """Reads one file of a known layout; raises CorruptDataError if the file is too short for it."""

    def __init__(self, file: DiskFile, layout: IndexLayout) -> None:
        self.file = file
        self.layout = layout
        self.check_size()

    def check_size(self) -> None:
        """CorruptDataError if the file is not as long as its layout says, or not any more."""
        size, layout = self.file.size(), self.layout
        if size != layout.file_size:
            raise CorruptDataError(
                f"index file {self.file.path} has {size} bytes, but {layout.hash_slot_num} slots and "
                f"{layout.index_num} entries make {layout.file_size}",
                "give the --hash-slot-num and --index-num it was made with, or run indexd --recover",
            )

    def header(self) -> IndexHeader:
        """The header as it stands in the file now."""
        return IndexHeader.unpack(self.file.pread(HEADER_SIZE, 0))

    def slot(self, number: int) -> int:
        """The newest entry of a slot, 0 = none."""
        return int(SLOT.unpack(self.file.pread(SLOT_SIZE, self.layout.slot_position(number)))[0])

    def select_phy_offset(
        self,
        key_hash: int,
        max_num: int,
        begin: int,
        end: int,
        header: IndexHeader | None = None,
        newest: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> list[int]:
        """RocketMQ's answer, newest first: collisions and repeats included, times at whole seconds (spec 3.7).

        ``header`` and ``newest``, the slot's entry, are read if they are not given: of a file that grows the header
        behind the slot. ``check`` is called before each read and every 204 entries, and ends the walk by raising.
        CorruptDataError for an entry that this file has not.
        """
        found: list[int] = []
        number = self.slot(self.layout.slot_of(key_hash)) if newest is None else newest
        header = header or self.header()
        count, base = header.index_count, header.begin_timestamp
        if number <= 0 or number > count or count <= 1:
            return found
        first, last, data, wanted = 0, -1, b"", 1
        for step in range(count + 1):  # a file of someone else may hold a loop that Java would walk for ever
            if len(found) >= max_num:
                break
            is_read = first <= number <= last
            if not is_read or step % _ENTRIES_PER_READ == 0:
                check()
            if not is_read:
                first, last = max(number - wanted + 1, 0), number
                data = self._entries(first, last)
            entry_hash, phy_offset, time_diff, previous = ENTRY.unpack_from(data, (number - first) * ENTRY_SIZE)
            if time_diff < 0:
                break
            time = base + time_diff * 1000
            if not _LONG_MIN <= time <= _LONG_MAX:  # a Java long wraps
                time = (time - _LONG_MIN) % (1 << 64) + _LONG_MIN
            if entry_hash == key_hash and begin <= time <= end:
                found.append(phy_offset)
            if previous <= 0 or previous > count or previous == number or time < begin:
                break
            # A hot key's entries stand close together.
            wanted = _ENTRIES_PER_READ if number - _ENTRIES_PER_READ < previous < number else 1
            number = previous
        return found

    def _entries(self, first: int, last: int) -> bytes:
        size = (last - first + 1) * ENTRY_SIZE
        data = self.file.pread(size, self.layout.entry_position(first))
        if last >= self.layout.index_num or len(data) < size:
            raise CorruptDataError(f"index file {self.file.path} names entry {last} of {self.layout.index_num}")
        return data
