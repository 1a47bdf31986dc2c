"""The entries of one file that point into one stretch of the log, window by window, in the order of the log.

A file in log order, as brokers write them, is read once from front to back. One whose entries stand elsewhere has those
of the stretch sorted first: 36 bytes an entry of them in memory while that lasts.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.audit.gentle import IndexPages
from indexd.audit.ground import BrokerFile, phy_offsets
from indexd.index.entries import first_entry_at, read_entries, time_diff_of
from indexd.index.format import HEADER_SIZE, IndexHeader, IndexLayout
from indexd.storage.disk import Disk, DiskFile

_ENTRIES_PER_READ = 1 << 18


class EntrySource:
    """``entries[at:]`` of ``numbers`` are next; ``load`` brings more. Close it after use.

    ``header`` is what match_rows keeps of the file. ``findable``: a byte an entry number, 0 where no walk reaches. With
    ``grows`` the header is asked again at the end, for a file that the broker is writing. ``pages`` are given back as
    it goes on.
    """

    def __init__(
        self, disk: Disk, folder: Path, layout: IndexLayout, file: BrokerFile, findable: NDArray[np.uint8]
    ) -> None:
        self.file = file
        self.findable = findable
        self.entries: NDArray[np.uint32] = np.empty((0, 5), dtype=np.uint32)
        self.numbers: NDArray[np.uint32] = np.empty(0, dtype=np.uint32)
        self.at = 0
        self.grows = False
        self.pages: IndexPages | None = None
        self.header = np.array([file.header.begin_timestamp, file.count - 1, -1, 0], dtype=np.int64)
        self._layout = layout
        self._opened: DiskFile = disk.open_read(folder / file.name)
        self._next = self._count = 1

    def __repr__(self) -> str:
        return f"EntrySource({self.file.name}, entry {self._next} of {self._count})"

    def select(self, begin: int, end: int, *, is_ordered: bool) -> None:
        """Only those that point into ``[begin, end)``, and to where the file's entries may point."""
        file, self._count = self.file, self.file.count
        begin, end = max(begin, file.begin), min(end, file.end + 1)
        if begin >= end:
            self._next = self._count
        elif is_ordered:
            self._next = first_entry_at(self._opened, self._layout, 1, self._count, begin)
            self._count = first_entry_at(self._opened, self._layout, self._next, self._count, end)
        else:
            self._sort(begin, end)

    def follow(self, begin: int) -> None:
        """Those behind the ones that were counted when the audit began, as they come."""
        self._next = self._count = self.file.count
        self.grows = True
        self.refresh()
        self._next = first_entry_at(self._opened, self._layout, self._next, self._count, begin)

    def refresh(self) -> bool:
        """Whether a growing file has entries that were not there before."""
        if not self.grows:
            return False
        header = IndexHeader.unpack(self._opened.pread(HEADER_SIZE, 0))
        count = min(header.index_count, self._layout.index_num)
        grown, self._count = count > self._count, max(count, self._count)
        self.header[0] = header.begin_timestamp
        return grown

    def is_settled(self) -> bool:
        """Whether the header still is what it was when the audit began: else its fields may be of two moments."""
        return IndexHeader.unpack(self._opened.pread(HEADER_SIZE, 0)) == self.file.header

    def first_time_difference(self) -> int:
        """The time difference of entry 1, s."""
        return time_diff_of(read_entries(self._opened, self._layout, 1, 1)[0])

    def load(self) -> bool:
        """Have an entry at ``at``; False when there is none left."""
        if self.at < len(self.entries):
            return True
        count = min(self._count - self._next, _ENTRIES_PER_READ)
        if count <= 0:
            return False
        self.entries, self.at = read_entries(self._opened, self._layout, self._next, count), 0
        self.numbers = np.arange(self._next, self._next + len(self.entries), dtype=np.uint32)
        # A file that was cut meanwhile has no more of them.
        self._next = self._next + len(self.entries) if len(self.entries) == count else self._count
        if self.pages is not None:
            self.pages.give_back(self._layout.entry_position(self._next))
        return len(self.entries) > 0

    def take_below(self, phy_offset: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
        """Entries and numbers of the window that point below ``phy_offset``, up to the first that does not."""
        stops = np.flatnonzero(phy_offsets(self.entries[self.at :]) >= phy_offset)
        end = self.at + int(stops[0]) if len(stops) else len(self.entries)
        begin, self.at = self.at, end
        return self.entries[begin:end], self.numbers[begin:end]

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def _sort(self, begin: int, end: int) -> None:
        parts: list[NDArray[np.uint32]] = []
        numbers: list[NDArray[np.uint32]] = []
        number = 1
        while number < self._count:
            entries = read_entries(self._opened, self._layout, number, min(self._count - number, _ENTRIES_PER_READ))
            if len(entries) == 0:
                break
            offsets = phy_offsets(entries)
            rows = np.flatnonzero((offsets >= begin) & (offsets < end))
            parts.append(entries[rows])
            numbers.append((rows + number).astype(np.uint32))
            number += len(entries)
        self._next = self._count
        if not parts:
            return
        entries = np.concatenate(parts)
        order = np.argsort(phy_offsets(entries), kind="stable")
        self.entries, self.numbers = entries[order], np.concatenate(numbers)[order]
