"""Where in an index: Kafka's search, binary but for the newest 8 KiB first (spec kafka-index 5), and the end of use.

On entries in order it finds what any binary search finds. On others (a tail of zeros, a wrong middle) the result
depends on which slots are looked at, so the steps are exactly Kafka's.
"""

from __future__ import annotations

from collections.abc import Callable

from indexd.storage.disk import DiskFile

#: Bytes at the end that are searched first: what nearly every lookup asks for, and what therefore stays in the memory.
WARM_SIZE = 8192


def search(key: Callable[[int], int], entries: int, entry_size: int, target: int) -> tuple[int, int]:
    """Slots of the largest key at most ``target`` and of the smallest at least it, -1 for none; ``key`` by slot."""
    if entries == 0:
        return -1, -1
    hot = max(0, entries - 1 - WARM_SIZE // entry_size)
    if key(hot) < target:
        return _binary(key, hot, entries - 1, entries, target)
    if key(0) > target:
        return -1, 0
    return _binary(key, 0, hot, entries, target)


def _binary(key: Callable[[int], int], low: int, high: int, entries: int, target: int) -> tuple[int, int]:
    while low < high:
        middle = (low + high + 1) // 2
        found = key(middle)
        if found == target:
            return middle, middle
        if found > target:
            high = middle - 1
        else:
            low = middle
    return low, low + 1 if low < entries - 1 else -1


def valid_entries(file: DiskFile, entry_size: int) -> int:
    """The entries of a file of ours before its unused slots, by binary search: a segment writes no other zeros.

    But one: the first time entry is all zeros if the first message came at 0 ms. It counts when another follows.
    """

    def is_used(slot: int) -> bool:
        return any(file.pread(entry_size, slot * entry_size))

    low, high = 0, file.size() // entry_size
    if high > 1 and is_used(1):
        low = 2
    while low < high:
        middle = (low + high) // 2
        if is_used(middle):
            low = middle + 1
        else:
            high = middle
    return low
