"""TimeIndex: the largest timestamp so far and the offset that had it first (spec kafka-index 3 to 5)."""

from __future__ import annotations

from indexd.errors import CorruptDataError, IndexFullError, OutOfOrderError
from indexd.sparse.format import NO_TIMESTAMP, TIME_ENTRY, TIME_ENTRY_SIZE, TimestampOffset
from indexd.sparse.sparse_index import SparseIndex


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
