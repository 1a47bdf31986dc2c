"""GrowingSegment: the pair of indexes of the commitlog segment that is being read (spec kafka-index 8).

What the kernel finds is kept here until it is written, so that a disk that refuses loses nothing.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.kernel import Columns
from indexd.errors import DiskError
from indexd.sparse.format import (
    OFFSET_ENTRY_SIZE,
    TIME_ENTRY_SIZE,
    ActiveMark,
    SegmentMark,
    index_name,
    time_index_name,
)
from indexd.sparse.kernel import (
    BYTES_SINCE,
    LAST_TIMESTAMP,
    MAX_TIMESTAMP,
    MAX_TIMESTAMP_OFFSET,
    MESSAGES,
    final_time_entry,
    message_entries,
    new_state,
)
from indexd.sparse.offset_index import OffsetIndex
from indexd.sparse.time_index import TimeIndex
from indexd.storage.disk import Disk

# Entries of either kind that are collected before they are written: 64 KiB of them.
_ENTRIES_PER_WRITE = 8192
# The shortest frame: no topic, no body, no properties.
_FRAME_SIZE_MIN = 91
_TIME_ENTRY = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])


def slots(segment_size: int, interval: int) -> int:
    """So many offset entries a segment comes to at most: one in every ``interval`` + 1 bytes or frame."""
    return segment_size // max(interval + 1, _FRAME_SIZE_MIN) + 1


class GrowingSegment:
    """``slots`` offset entries and two more time entries (Kafka keeps a slot, the roll takes one) fit. One owner."""

    def __init__(
        self,
        offset_index: OffsetIndex,
        time_index: TimeIndex,
        segment_size: int,
        interval: int,
        state: NDArray[np.int64],
    ) -> None:
        self.offset_index = offset_index
        self.time_index = time_index
        self.base = offset_index.base
        self._end = self.base + segment_size
        self._interval = interval
        self._state = state
        self._offset_entries = np.empty((_ENTRIES_PER_WRITE, 2), dtype=np.int64)
        # One more place for the roll's.
        self._time_entries = np.empty((_ENTRIES_PER_WRITE + 1, 2), dtype=np.int64)
        self._offset_count = 0
        self._time_count = 0

    @classmethod
    def create(cls, disk: Disk, directory: Path, base: int, segment_size: int, interval: int) -> Self:
        """Make both files, over what an earlier try has left; of a try that fails nothing is left."""
        count = slots(segment_size, interval)
        offset_path, time_path = directory / index_name(base), directory / time_index_name(base)
        disk.unlink(offset_path)
        disk.unlink(time_path)
        offset_index = OffsetIndex.create(disk, offset_path, base, count * OFFSET_ENTRY_SIZE)
        try:
            time_index = TimeIndex.create(disk, time_path, base, (count + 2) * TIME_ENTRY_SIZE)
        except DiskError:
            offset_index.close(trim=False)
            disk.unlink(offset_path)
            raise
        return cls(offset_index, time_index, segment_size, interval, new_state())

    @classmethod
    def load(
        cls, disk: Disk, directory: Path, mark: SegmentMark, active: ActiveMark, segment_size: int, interval: int
    ) -> Self:
        """Open files that are known to hold what the marks say."""
        base, count = mark.base, slots(segment_size, interval)
        with ExitStack() as opened:
            path = directory / index_name(base)
            offset_index = opened.enter_context(OffsetIndex.load(disk, path, base, mark.offset_entries, writable=True))
            path = directory / time_index_name(base)
            time_index = opened.enter_context(TimeIndex.load(disk, path, base, mark.time_entries, writable=True))
            # Recovery may have been broken off between cutting a file and giving it its length again.
            offset_index.resize(count * OFFSET_ENTRY_SIZE)
            time_index.resize((count + 2) * TIME_ENTRY_SIZE)
            opened.pop_all()
        state = new_state()
        state[BYTES_SINCE], state[MAX_TIMESTAMP], state[MAX_TIMESTAMP_OFFSET], state[LAST_TIMESTAMP] = active
        state[MESSAGES] = mark.messages
        return cls(offset_index, time_index, segment_size, interval, state)

    def __repr__(self) -> str:
        return f"GrowingSegment({self.mark()}, {self.active()})"

    @property
    def paths(self) -> tuple[Path, Path]:
        """Both files."""
        return self.offset_index.path, self.time_index.path

    @property
    def entries(self) -> int:
        """Of both kinds, with those that are not written yet."""
        return self.offset_index.entries + self._offset_count + self.time_index.entries + self._time_count

    @property
    def has_pending(self) -> bool:
        """Whether ``write`` would write."""
        return self._offset_count + self._time_count > 0

    def put(self, columns: Columns, row: int, rows: int) -> int:
        """Take rows of this segment from ``row`` on, as many as there is room for; the first that was not taken.

        Never touches the disk: when nothing was taken, ``write`` makes room.
        """
        row, offsets, times = message_entries(
            columns,
            row,
            rows,
            self.base,
            self._end,
            self._interval,
            self._state,
            self._offset_entries[self._offset_count :],
            self._time_entries[self._time_count : _ENTRIES_PER_WRITE],
        )
        self._offset_count += int(offsets)
        self._time_count += int(times)
        return int(row)

    def write(self) -> None:
        """Append what is collected to the files; after a DiskError the rest of it still is."""
        if self._offset_count:
            self.offset_index.extend(self._offset_entries[: self._offset_count].astype(">i4").tobytes())
            self._offset_count = 0
        if self._time_count:
            entries = np.empty(self._time_count, dtype=_TIME_ENTRY)
            entries["timestamp"] = self._time_entries[: self._time_count, 0]
            entries["offset"] = self._time_entries[: self._time_count, 1]
            self.time_index.extend(entries.tobytes())
            self._time_count = 0

    def seal(self) -> SegmentMark:
        """What Kafka's roll does: a last time entry if there is a later timestamp, both files trimmed and closed.

        After a DiskError it may be called again.
        """
        last = final_time_entry(self._state)
        if last is not None:
            self._time_entries[self._time_count] = last
            self._time_count += 1
        self.write()
        self.offset_index.trim_to_valid_size()
        self.time_index.trim_to_valid_size()
        self.close()
        return self.mark()

    def mark(self) -> SegmentMark:
        """What the files hold once ``write`` has written."""
        return SegmentMark(
            self.base,
            int(self._state[MESSAGES]),
            self.offset_index.entries + self._offset_count,
            self.time_index.entries + self._time_count,
        )

    def active(self) -> ActiveMark:
        """What building goes on with."""
        fields = (BYTES_SINCE, MAX_TIMESTAMP, MAX_TIMESTAMP_OFFSET, LAST_TIMESTAMP)
        return ActiveMark(*(int(self._state[field]) for field in fields))

    def close(self) -> None:
        """Close both files as they are; what was collected and not written is lost."""
        self.offset_index.close(trim=False)
        self.time_index.close(trim=False)
