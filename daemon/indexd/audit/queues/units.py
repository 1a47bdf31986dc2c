"""The units of one queue that point into one stretch of the log, block by block, in the order of the log."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.audit.queues.ground import QueueGround, UnitFile
from indexd.consumequeue.check import UNIT_TYPE
from indexd.consumequeue.format import UNIT_SIZE, file_name, file_offset
from indexd.errors import DiskError
from indexd.storage.disk import Disk, DiskFile

#: Behind all that a unit may name.
BEHIND_ALL = (1 << 63) - 1
_UNITS_PER_READ = 1 << 16
_BLANK_SIZE = 2147483647

#: Units as rows of UNIT_TYPE, and their places in the queue.
Units = tuple[NDArray[np.void], NDArray[np.int64]]
#: A place to which ``rewind`` goes back.
Place = tuple[int, int, int]


class QueueUnits:
    """Brings units of a queue; holds no file open. ``begin`` is where the stretch begins.

    ``next_phy_offset``: no unit that was not brought points before it. ``known_end``: units from there on were not
    there when the audit began.
    """

    def __init__(self, disk: Disk, folder: Path, ground: QueueGround, begin: int) -> None:
        self._disk, self.folder = disk, folder
        self._files = list(ground.files)
        self.known_end = ground.end
        # A file whose first unit lies before those of the file before it says that it is not ordered.
        self._is_ordered = all(file.is_ordered for file in self._files)
        # Of a queue whose units rise: the file and the unit that are next.
        self._number, self._next = 0, 0
        self._begin = begin
        self.next_phy_offset = 0
        self._seek(begin)

    def __repr__(self) -> str:
        return f"QueueUnits({self.folder}, {len(self._files)} files, next at {self.next_phy_offset})"

    @property
    def place(self) -> Place:
        """Where it stands."""
        return self._number, self._next, self._begin

    def rewind(self, place: Place) -> None:
        """Bring again what was brought since, and what it has grown by."""
        self._number, self._next, self._begin = place
        self._seek(self._begin)

    def take(self, end: int, expected: int, most: int = BEHIND_ALL) -> Units:
        """Those that point before ``end`` and were not brought yet, probably ``expected``.

        No more are brought at a time, of a queue whose units rise, once there are ``most``.
        """
        if not self._is_ordered:
            return self._filter(end)
        parts: list[Units] = []
        while (file := self._file()) is not None:
            units = self._read(file, self._next, min(expected + 1, _UNITS_PER_READ))
            if not len(units):
                self._number, self._next = self._number + 1, 0  # it has expired
                continue
            offsets = units["phy_offset"].astype(np.int64)
            count = int(offsets.searchsorted(end))
            parts.append((units[:count], np.arange(self._next, self._next + count)))
            self._next += count
            most -= count
            if count < len(units):
                self.next_phy_offset = int(offsets[count])
                break
            if most <= 0:
                break
            expected = max(expected - count, 4 * count)
        else:
            self.next_phy_offset = BEHIND_ALL
        if self.next_phy_offset >= end:
            self._begin = end
        return _joined(parts)

    def grow(self) -> bool:
        """Whether the broker has put units behind those that are known; they are brought after a ``rewind``."""
        files, grown = self._list(), False
        last = self._files[-1] if self._files else None
        for offset in files:
            if last is not None and offset < last.offset:
                continue
            is_last = last is not None and offset == last.offset
            old = last if is_last and last is not None else UnitFile(offset, offset, offset, 0, 0, is_ordered=True)
            new = self._grown(old)
            if new is old:
                continue
            grown = True
            if is_last:
                self._files[-1] = new
            else:
                self._files.append(new)
        return grown

    def _file(self) -> UnitFile | None:
        # The file that holds the next unit.
        while self._number < len(self._files):
            file = self._files[self._number]
            self._next = max(self._next, file.first)
            if self._next < file.end:
                return file
            if self._number == len(self._files) - 1:
                break  # it may grow
            self._number, self._next = self._number + 1, 0
        return None

    def _seek(self, begin: int) -> None:
        # Only the file in which the first one stands is searched.
        self.next_phy_offset = 0
        if not self._is_ordered:
            return
        while (file := self._file()) is not None and file.highest < begin:
            if self._number == len(self._files) - 1:
                self._next = file.end
                break
            self._number, self._next = self._number + 1, 0
        file = self._file()
        if file is None:
            self.next_phy_offset = BEHIND_ALL
        elif file.lowest >= begin:
            self.next_phy_offset = file.lowest
        else:
            self._next = self._first_at(file, begin)

    def _first_at(self, file: UnitFile, phy_offset: int) -> int:
        opened = self._open(file)
        if opened is None:
            return self._next
        low, high = self._next, file.end
        with opened:
            while low < high:
                middle = (low + high) // 2
                data = opened.pread(8, (middle - file.offset) * UNIT_SIZE)
                if int.from_bytes(data, "big", signed=True) < phy_offset:
                    low = middle + 1
                else:
                    high = middle
        return low

    def _filter(self, end: int) -> Units:
        # Units stand anywhere: all of them are looked at, a window at a time.
        parts: list[Units] = []
        for file in self._files:
            if not file.points_into(self._begin, end):
                continue
            for first in range(file.first, file.end, _UNITS_PER_READ):
                units = self._read(file, first, _UNITS_PER_READ)
                offsets = units["phy_offset"].astype(np.int64)
                rows = np.flatnonzero((offsets >= self._begin) & (offsets < end) & _is_written(units))
                parts.append((units[rows], rows + first))
        self._begin, self.next_phy_offset = end, end
        return _joined(parts)

    def _read(self, file: UnitFile, first: int, count: int) -> NDArray[np.void]:
        opened = self._open(file)
        if opened is None:
            return np.empty(0, dtype=UNIT_TYPE)
        with opened:
            data = opened.pread(min(count, file.end - first) * UNIT_SIZE, (first - file.offset) * UNIT_SIZE)
        return np.frombuffer(data, UNIT_TYPE, len(data) // UNIT_SIZE)

    def _grown(self, file: UnitFile) -> UnitFile:
        # The same file with the units that are behind its last one; the same object without.
        first, end, lowest, highest = file.first, file.end, file.lowest, file.highest
        opened = self._open(file)
        if opened is None:
            return file
        with opened:
            while data := opened.pread(_UNITS_PER_READ * UNIT_SIZE, (end - file.offset) * UNIT_SIZE):
                units = np.frombuffer(data, UNIT_TYPE, len(data) // UNIT_SIZE)
                rows = np.flatnonzero(units["size"] <= 0)
                count = int(rows[0]) if len(rows) else len(units)
                if first == end:  # a new queue may begin with blank ones
                    blank = (units["phy_offset"][:count] == 0) & (units["size"][:count] == _BLANK_SIZE)
                    first += int(np.argmin(blank)) if count and not blank.all() else count
                    lowest = int(units["phy_offset"][first - end]) if first - end < count else lowest
                end += count
                if count:
                    highest = int(units["phy_offset"][count - 1])
                if count < len(units) or not count:
                    break
        return file if end == file.end else UnitFile(file.offset, first, end, lowest, highest, file.is_ordered)

    def _list(self) -> list[int]:
        try:
            rows = self._disk.list_dir(self.folder)
        except DiskError as error:
            if not error.is_missing:
                raise
            return []
        begins = [file_offset(name) for name, _ in rows]
        return [begin // UNIT_SIZE for begin in begins if begin is not None and begin % UNIT_SIZE == 0]

    def _open(self, file: UnitFile) -> DiskFile | None:
        try:
            return self._disk.open_read(self.folder / file_name(file.offset * UNIT_SIZE))
        except DiskError as error:
            if not error.is_missing:
                raise
            return None


def _is_written(units: NDArray[np.void]) -> NDArray[np.bool_]:
    phy_offset, size = units["phy_offset"], units["size"]
    is_blank = (phy_offset == 0) & ((size == _BLANK_SIZE) | ((size == 0) & (units["tags_code"] == 0)))
    written: NDArray[np.bool_] = ~is_blank
    return written


def _joined(parts: list[Units]) -> Units:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return np.empty(0, dtype=UNIT_TYPE), np.empty(0, dtype=np.int64)
    units, offsets = zip(*parts, strict=True)
    return np.concatenate(units), np.concatenate(offsets)
