"""The entries of one key hash in one index file, newest first: along the chain, or without trusting the slots."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from indexd.errors import CorruptDataError
from indexd.index.format import ENTRY_SIZE, FileMark, IndexEntry, IndexHeader, unpack_entry
from indexd.index.reader import IndexFileReader

_DIFF_MAX = 2**31 - 1
# Beyond this a begin timestamp can make Java's subtraction wrap into a plausible difference.
_BEGIN_BELIEVED = 2**53
# A hot key's entries stand close together: after two of those one read brings this many, not one.
_ENTRIES_PER_READ = 204
_ENTRIES_PER_SCAN = 52_428  # 1 MiB


def chain(file: IndexFileReader, key_hash: int) -> Iterator[tuple[int, IndexEntry]]:
    """(number, entry) of every entry in the hash's slot, those of other keys included, so that a caller can count them.

    Entry numbers fall strictly, so a walk ends; a chain that breaks the rule raises CorruptDataError.
    """
    slot = file.layout.slot_of(key_hash)
    number, above = file.slot(slot), file.layout.index_num
    first, data, count = above, b"", 1
    while number > 0:
        if number >= above:
            raise CorruptDataError(
                f"index file {file.file.path}: the chain of slot {slot} goes up from entry {above} to {number}"
            )
        if number < first:
            first = max(number - count + 1, 0)
            data = file.file.pread((number - first + 1) * ENTRY_SIZE, file.layout.entry_position(first))
        position = (number - first) * ENTRY_SIZE
        entry = unpack_entry(data[position : position + ENTRY_SIZE])
        yield number, entry
        count = _ENTRIES_PER_READ if number - entry.prev_index < _ENTRIES_PER_READ else 1
        above, number = number, entry.prev_index


def scan(file: IndexFileReader, key_hash: int, mark: FileMark) -> Iterator[tuple[int, IndexEntry]]:
    """(number, entry) of the hash's entries among those that ``mark`` vouches for, read from the last to the first.

    For a file whose slots a crash may have left behind or ahead of its entries.
    """
    wanted = struct.pack(">i", key_hash)
    end = min(mark.header.index_count, file.layout.index_num)
    while end > 1:
        first = max(end - _ENTRIES_PER_SCAN, 1)
        data = file.file.pread((end - first) * ENTRY_SIZE, file.layout.entry_position(first))
        position = data.rfind(wanted)
        while position >= 0:
            number, rest = divmod(position, ENTRY_SIZE)
            if rest == 0:
                yield first + number, unpack_entry(data[position : position + ENTRY_SIZE])
                number -= 1
            # The next place that counts is the start of an entry: for hash 0 most bytes look like one.
            position = data.rfind(wanted, 0, max(number * ENTRY_SIZE + len(wanted), 0))
        end = first


def may_match(number: int, time_diff: int, header: IndexHeader, begin: int, end: int) -> bool:
    """Whether a message whose entry has this ``time_diff`` can have a store time of ``[begin, end]``.

    Never False for one that has: a difference is cut to whole seconds and clamped into 0 .. 2**31-1, entry 1 of a
    rolled file is counted from the file before, and without a begin timestamp nothing is counted (spec 3.4).
    """
    base = header.begin_timestamp
    if number == 1 or not 0 < base < _BEGIN_BELIEVED or not 0 <= time_diff < _DIFF_MAX:
        return True
    earliest = base + time_diff * 1000
    return begin <= earliest + 999 and (time_diff == 0 or earliest <= end)
