"""EntryCursor: the entries of all index files one behind the other, with the header as it was when each was put."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.errors import DiskError
from indexd.index.format import FileMark, IndexEntry, IndexHeader, IndexLayout, unpack_entry
from indexd.recovery.replay import ENTRIES_PER_READ, phy_offset_of, read_entries
from indexd.storage.disk import Disk

# Entries behind one that are asked whether they point lower: a few see an offset that is a little too high, many see
# beyond a damaged block of a file system, which holds 200.
_NEAR = 16
_AHEAD = 4096

_BEGIN_TIMESTAMP, _END_TIMESTAMP, _BEGIN_PHY, _END_PHY, _, _COUNT = range(6)


class EntryCursor:
    """Stands at entry ``number`` of ``files[at]``. ``state`` is the header before that entry, as match_batch moves it.

    ``on_end`` is called with the mark and the state of each file that was walked to its end.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        layout: IndexLayout,
        files: tuple[FileMark, ...],
        on_end: Callable[[FileMark, IndexHeader], None],
    ) -> None:
        self._disk, self._directory, self.layout = disk, directory, layout
        self._on_end = on_end
        self.files = files
        self.at = 0
        self.number = 1
        self.state = np.array(IndexHeader().values(), dtype=np.int64)
        self.window: NDArray[np.uint32] = np.empty((0, 5), dtype=np.uint32)
        self.position = 0
        #: Entries that were held against a message, or found to have none.
        self.walked = 0
        #: Files that could not be read to their end, with the entries that were left in them.
        self.lost: list[tuple[FileMark, int]] = []

    def __repr__(self) -> str:
        return f"EntryCursor({self.name}, entry {self.number}, {len(self.files)} files)"

    @property
    def done(self) -> bool:
        """Behind the last entry of the last file; ``load`` finds that out."""
        return self.at >= len(self.files)

    @property
    def name(self) -> str:
        """What findings call the file, the last one behind its end."""
        return f"index/{self.files[min(self.at, len(self.files) - 1)].name}" if self.files else "frontier"

    @property
    def place(self) -> int:
        """The byte position of the entry, or of the one that would come next."""
        if not self.files:
            return 0
        number = self.files[-1].header.index_count if self.done else self.number
        return self.layout.entry_position(number)

    @property
    def left(self) -> int:
        """Entries of the file from this one on."""
        return 0 if self.done else self.files[self.at].header.index_count - self.number

    def load(self) -> None:
        """Have an entry in the window, unless it is done; steps over files whose entries are used up."""
        while self.position >= len(self.window) and not self.done:
            if self.left <= 0:
                self._on_end(self.files[self.at], IndexHeader(*self.state.tolist()))
                self.leave_file()
                continue
            mark = self.files[self.at]
            try:
                with self._disk.open_read(self._directory / mark.name) as file:
                    self.window = read_entries(file, self.layout, self.number, min(self.left, ENTRIES_PER_READ))
            except DiskError as error:
                if not error.is_missing:
                    raise
                self.window = self.window[:0]
            self.position = 0
            if len(self.window) == 0:
                self.lost.append((mark, self.left))
                self.leave_file()

    def leave_file(self) -> None:
        """On to the first entry of the next file, whose header inherits this one's end (spec rocketmq-store 3.5)."""
        header = self.files[self.at].header
        end_time, end_phy = max(header.end_timestamp, 0), max(header.end_phy_offset, 0)
        self.state[:] = IndexHeader(end_time, end_time, end_phy, end_phy).values()
        self.at, self.number, self.position = self.at + 1, 1, 0
        self.window = self.window[:0]

    def entry(self) -> IndexEntry | None:
        """The entry it stands at; None behind the last one."""
        self.load()
        return None if self.done else unpack_entry(self.window[self.position].tobytes())

    def used(self, position: int) -> None:
        """match_batch has taken the window's entries up to ``position`` and moved the state."""
        self.walked += position - self.position
        self.number += position - self.position
        self.position = position

    def put(self, phy_offset: int, store_timestamp: int) -> None:
        """The entry belongs to that message: on to the next, with the header as its put left it."""
        state = self.state
        if state[_COUNT] <= 1:
            state[_BEGIN_PHY], state[_BEGIN_TIMESTAMP] = phy_offset, store_timestamp
        state[_END_PHY], state[_END_TIMESTAMP] = phy_offset, store_timestamp
        state[_COUNT] += 1
        self.used(self.position + 1)

    def stray(self) -> None:
        """The entry belongs to no message: on to the next, taking from the header's word what its put changed."""
        header = self.files[self.at].header
        if self.number == 1:
            self.state[_BEGIN_TIMESTAMP] = header.begin_timestamp
        if self.left == 1:
            self.state[_END_TIMESTAMP] = header.end_timestamp
        self.state[_COUNT] += 1
        self.used(self.position + 1)

    def skip_below(self, phy_offset: int) -> int:
        """Step over entries that point below ``phy_offset``, up to the first that does not; how many they were."""
        skipped = 0
        while True:
            self.load()
            if self.done:
                return skipped
            stops = np.flatnonzero(_phy_offsets(self.window[self.position :]) >= phy_offset)
            count = int(stops[0]) if len(stops) else len(self.window) - self.position
            if count:
                last = phy_offset_of(self.window[self.position + count - 1])
                header = replace(self.files[self.at].header, end_phy_offset=last, index_count=self.number + count)
                self.state[:] = header.values()
                self.number, self.position, skipped = self.number + count, self.position + count, skipped + count
            if len(stops):
                return skipped

    def is_outlier(self, phy_offset: int) -> bool:
        """Whether the entry points too high: above the file's end, or above what most entries behind it point to."""
        mark = self.files[self.at]
        if phy_offset > mark.header.end_phy_offset:
            return True
        try:
            with self._disk.open_read(self._directory / mark.name) as file:
                ahead = read_entries(file, self.layout, self.number + 1, min(self.left - 1, _AHEAD))
        except DiskError as error:
            if not error.is_missing:
                raise
            ahead = self.window[:0]  # it expires just now; the next load says so
        offsets = _phy_offsets(ahead)
        # Damaged ones among them, such as zeros, must not make this one look too high.
        offsets = offsets[offsets >= mark.header.begin_phy_offset]
        return any(2 * np.count_nonzero(part < phy_offset) > len(part) for part in (offsets[:_NEAR], offsets))


def _phy_offsets(entries: NDArray[np.uint32]) -> NDArray[np.int64]:
    halves = entries[:, 1:3].byteswap().astype(np.int64)
    return halves[:, 0].astype(np.int32).astype(np.int64) << 32 | halves[:, 1]
