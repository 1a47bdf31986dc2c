"""The kept entries against the log itself: what ``indexd --recover`` adds to the chain check.

The log is decoded again and each key of each message is held against the next entry, in order, without writing. The
first entry that differs, or that lies behind the end of the log, ends what is kept. Entries of messages that have
expired cannot be compared; they stand on the chain check alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader
from indexd.commitlog.reading import Skipped
from indexd.index.flavour import Flavour
from indexd.index.format import FileMark, IndexHeader, IndexLayout
from indexd.index.kernel import BUFFER_FULL, DONE, MISMATCH, match_batch
from indexd.recovery.replay import ENTRIES_PER_READ, phy_offset_of, read_entries
from indexd.storage.disk import Disk

_SETTLE_PAUSE = 0.01


@dataclass(frozen=True, slots=True)
class Agreed:
    """The entries that agree with the log: all of ``files``, or those of messages before ``phy_offset``."""

    files: tuple[FileMark, ...]
    phy_offset: int | None
    reason: str


class _Cursor:
    """Walks the entries of all kept files in order, keeping the header as it was when each was put."""

    def __init__(self, disk: Disk, directory: Path, layout: IndexLayout, files: tuple[FileMark, ...]) -> None:
        self._disk, self._directory, self._layout = disk, directory, layout
        self.files = files
        self.at = 0
        self.number = 1
        self.state = np.array(IndexHeader().values(), dtype=np.int64)
        self.window: NDArray[np.uint32] = np.empty((0, 5), dtype=np.uint32)
        self.position = 0

    @property
    def done(self) -> bool:
        return self.at >= len(self.files)

    def load(self) -> None:
        """Bring the next entries into the window; steps over files whose entries are used up."""
        while not self.done and self.number >= self.files[self.at].header.index_count:
            header = self.files[self.at].header
            self.at, self.number = self.at + 1, 1
            times = max(header.end_timestamp, 0), max(header.end_phy_offset, 0)
            self.state[:] = IndexHeader(times[0], times[0], times[1], times[1]).values()
        self.position = 0
        if self.done:
            self.window = self.window[:0]
            return
        mark = self.files[self.at]
        count = min(mark.header.index_count - self.number, ENTRIES_PER_READ)
        with self._disk.open_read(self._directory / mark.name) as file:
            self.window = read_entries(file, self._layout, self.number, count)

    def used(self, position: int) -> None:
        """The window is matched up to ``position``."""
        self.number += position - self.position
        self.position = position

    def skip_before(self, phy_offset: int) -> None:
        """Step over the entries of messages before ``phy_offset``."""
        while True:
            if self.position >= len(self.window):
                self.load()
            if self.done or phy_offset_of(self.window[self.position]) >= phy_offset:
                return
            header = self.files[self.at].header
            offsets = self.window[self.position :, 1:3].astype(">u4").byteswap().view(">u4").astype(np.int64)
            before = int(np.count_nonzero((offsets[:, 0] << 32 | offsets[:, 1]) < phy_offset))
            # Offsets never fall along a file, so these are the first ones.
            last_phy = phy_offset_of(self.window[self.position + before - 1])
            self.state[:] = replace(header, end_phy_offset=last_phy, index_count=self.number + before).values()
            self.used(self.position + before)


def compare_with_log(
    disk: Disk,
    directory: Path,
    layout: IndexLayout,
    flavour: Flavour,
    files: tuple[FileMark, ...],
    reader: LogReader,
    on_progress: Callable[[int], None],
) -> Agreed:
    """Hold ``files`` against the log that ``reader`` stands at the begin of; reads only."""
    cursor = _Cursor(disk, directory, layout, files)
    cursor.skip_before(reader.position)
    while True:
        if cursor.position >= len(cursor.window):
            cursor.load()
        if cursor.done:
            return Agreed(files, None, "every entry agrees with the log")
        poll = reader.poll()
        if isinstance(poll, Skipped):
            cursor.skip_before(poll.end)
        elif isinstance(poll, NotYetWritten):
            if reader.is_settling:
                # The newest message of the log: there it is, it only has to prove itself.
                time.sleep(_SETTLE_PAUSE)
                continue
            return _cut(cursor, poll.offset, "entries stand behind the end of the log")
        elif isinstance(poll, Corrupt):
            return Agreed(files, None, f"compared up to offset {poll.offset}, where the log is unreadable")
        else:
            differs = _match(cursor, flavour, poll)
            if differs is not None:
                return _cut(cursor, differs, "entries differ from the log")
            on_progress(poll.end_offset)


def _match(cursor: _Cursor, flavour: Flavour, batch: DispatchBatch) -> int | None:
    # The phy offset of the first message that differs, or None.
    row, key = 0, -1
    while True:
        if cursor.position >= len(cursor.window):
            cursor.load()
            if cursor.done:
                return None
        status, row, key, at = match_batch(
            batch.columns,
            batch.rows,
            row,
            key,
            flavour.skip_mask,
            cursor.window,
            cursor.position,
            cursor.state,
        )
        row, key = int(row), int(key)
        cursor.used(int(at))
        if status == DONE:
            return None
        if status == MISMATCH:
            return int(batch.columns.phy_offset[row])
        assert status == BUFFER_FULL


def _cut(cursor: _Cursor, phy_offset: int, reason: str) -> Agreed:
    kept = list(cursor.files[: cursor.at])
    if cursor.number > 1:
        mark = cursor.files[cursor.at]
        begin, end, begin_phy, end_phy, _, _ = (int(value) for value in cursor.state)
        header = IndexHeader(begin, end, begin_phy, end_phy, mark.header.used_slot_count, cursor.number)
        kept.append(FileMark(mark.name, header, full=False))
    return Agreed(tuple(kept), phy_offset, f"{reason}, from offset {phy_offset} on")
