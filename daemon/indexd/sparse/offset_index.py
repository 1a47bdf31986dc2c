"""OffsetIndex: logical offset -> where its message starts, for every few KiB of a segment (spec kafka-index 3 to 5)."""

from __future__ import annotations

from indexd.errors import CorruptDataError, IndexFullError, OutOfOrderError
from indexd.sparse.format import OFFSET_ENTRY, OFFSET_ENTRY_SIZE, OffsetPosition, signed_32
from indexd.sparse.sparse_index import SparseIndex


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

    def fetch_upper_bound_offset(self, fetch_offset: OffsetPosition, fetch_size: int) -> OffsetPosition | None:
        """The first entry at ``fetch_offset.position + fetch_size`` or behind it, or None.

        One that is exactly there may be passed over for the next, and the sum has 32 bits and wraps: near 2 GiB an
        early entry is the answer. Both are Kafka's.
        """
        _, slot = self._search(self._position, signed_32(fetch_offset.position + fetch_size))
        return None if slot < 0 else self._entry(slot)

    def sanity_check(self) -> None:
        """CorruptDataError if the last offset is below the base, or the length is not of whole entries (spec 7)."""
        if self.entries and self.last_offset < self.base:
            raise CorruptDataError(f"{self.path}: its last offset {self.last_offset} is below its base {self.base}")
        if self.length % self.entry_size:
            raise CorruptDataError(f"{self.path}: its {self.length} bytes are no multiple of {self.entry_size}")

    def _offset(self, slot: int) -> int:
        return self._offset_of(self._unpack(slot)[0])

    def _position(self, slot: int) -> int:
        return self._unpack(slot)[1]

    def _absolute(self, first: int, second: int) -> OffsetPosition:
        return OffsetPosition(self._offset_of(first), second)

    def _set_last(self, last: OffsetPosition | None) -> None:
        self.last_entry = OffsetPosition(self.base, 0) if last is None else last
