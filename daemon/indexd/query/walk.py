"""The entries of one key hash in one index file, newest first: along the chain, or without trusting the slots."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from indexd.errors import CorruptDataError
from indexd.index.format import ENTRY_SIZE, FileMark, IndexEntry, IndexHeader, unpack_entry, unpack_fields
from indexd.index.reader import IndexFileReader

_DIFF_MAX = 2**31 - 1
#: Behind every physical offset.
OFFSET_END = 2**63
# Beyond this a begin timestamp can make Java's subtraction wrap into a plausible difference.
_BEGIN_BELIEVED = 2**53
# A hot key's entries stand close together: after two within so many, one read brings these, and then up to 64 KiB.
_NEAR = 204
_ENTRIES_PER_READ = 16 * _NEAR
_ENTRIES_PER_SCAN = 52_428  # 1 MiB


class Wanted(NamedTuple):
    """What a walk looks for: store times of ``[begin, end]`` in ms, physical offsets below ``before``."""

    begin: int
    end: int
    before: int = OFFSET_END

    def differences(self, header: IndexHeader) -> tuple[int, int]:
        """The least and the largest time difference of such a store time, as ``may_match`` takes them."""
        base = header.begin_timestamp
        if not 0 < base < _BEGIN_BELIEVED:
            return 0, _DIFF_MAX
        return -((base + 999 - self.begin) // 1000), (self.end - base) // 1000


def may_match(number: int, time_diff: int, least: int, largest: int) -> bool:
    """Whether a message whose entry has this ``time_diff`` can have one of the wanted store times.

    Never False for one that has: a difference is cut to whole seconds and clamped into 0 .. 2**31-1, entry 1 of a
    rolled file is counted from the file before, and without a begin timestamp nothing is counted (spec 3.4).
    """
    if number == 1 or not 0 <= time_diff < _DIFF_MAX:
        return True
    return least <= time_diff and (time_diff == 0 or time_diff <= largest)


def chain(
    file: IndexFileReader, key_hash: int, wanted: Wanted, header: IndexHeader | None = None
) -> Iterator[tuple[int, IndexEntry | None]]:
    """(physical offset, entry) of the hash's slot, those of other keys included; no entry for one that is not wanted.

    Of those that are not wanted only one for each piece that is read comes, so that a caller can end the walk. Entry
    numbers fall strictly, so it ends by itself; a chain that breaks the rule raises CorruptDataError.
    """
    slot = file.layout.slot_of(key_hash)
    number, above = file.slot(slot), file.layout.index_num
    # After the slot, never before: the first put of a rolled file moves its begin timestamp.
    least, largest = wanted.differences(header or file.header()) if number > 0 else (0, 0)
    first, data, count, before = above, b"", 1, wanted.before
    while number > 0:
        if number >= above:
            raise CorruptDataError(
                f"index file {file.file.path}: the chain of slot {slot} goes up from entry {above} to {number}"
            )
        is_read = number < first
        if is_read:
            count = min(max(4 * count, _NEAR), _ENTRIES_PER_READ) if above - number < _NEAR else 1
            first = max(number - count + 1, 0)
            data = file.file.pread((number - first + 1) * ENTRY_SIZE, file.layout.entry_position(first))
        fields = unpack_fields(data, (number - first) * ENTRY_SIZE)
        phy_offset = fields[1]
        if phy_offset < before and may_match(number, fields[2], least, largest):
            yield phy_offset, IndexEntry(*fields)
        elif is_read:
            yield phy_offset, None
        above, number = number, fields[3]


def scan(
    file: IndexFileReader, key_hash: int, wanted: Wanted, mark: FileMark
) -> Iterator[tuple[int, IndexEntry | None]]:
    """The same of the hash's entries among those that ``mark`` vouches for, read from the last to the first.

    For a file whose slots a crash may have left behind or ahead of its entries.
    """
    looked_for = struct.pack(">i", key_hash)
    end = min(mark.header.index_count, file.layout.index_num)
    least, largest = wanted.differences(mark.header)
    while end > 1:
        first, is_read = max(end - _ENTRIES_PER_SCAN, 1), True
        data = file.file.pread((end - first) * ENTRY_SIZE, file.layout.entry_position(first))
        position = data.rfind(looked_for)
        while position >= 0:
            number, rest = divmod(position, ENTRY_SIZE)
            if rest == 0:
                entry = unpack_entry(data[position : position + ENTRY_SIZE])
                if entry.phy_offset < wanted.before and may_match(first + number, entry.time_diff, least, largest):
                    yield entry.phy_offset, entry
                elif is_read:
                    yield entry.phy_offset, None
                number, is_read = number - 1, False
            # The next place that counts is the start of an entry: for hash 0 most bytes look like one.
            position = data.rfind(looked_for, 0, max(number * ENTRY_SIZE + len(looked_for), 0))
        end = first
