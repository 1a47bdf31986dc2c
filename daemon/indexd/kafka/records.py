"""Reads record batches of a .log (LogWalk) and slots of an index file (Slots) as arrays, in bounded buffers.

Memory does not depend on the log: the buffer holds the largest batch, of 256 MiB at most. Whatever the
bytes are, a walk ends in a WalkEnd; only the system's refusal to read them is an exception.

What is known of a batch is what Kafka's recovery takes from it: position, size, last offset, largest timestamp, and
whether its checksum holds. Records are not looked into, so a compressed batch costs no more than any other, and of a
compressed wrapper of magic 0 or 1 the first offset is not known (``base_offset`` is the last one then). A wrapper of
magic 1 carries the largest timestamp of what is in it, and magic 0 has none (-1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.bytes_kernel import CRC_TABLES
from indexd.kafka import kernel
from indexd.kafka.format import HEAD_SIZE_UP_TO_MAGIC, HEAD_SIZE_V2, Fault, WalkEnd
from indexd.output import find_nonzero
from indexd.sparse.format import INT32_MAX
from indexd.sparse.kernel import unpack_entries
from indexd.storage.disk import Disk, DiskFile

#: No broker is set to take larger ones; a length field that says more is damaged.
BATCH_SIZE_MAX = 1 << 28
_ROWS = 1 << 15


#: Successive batches: a row a column of the kernel (7, n), int64. Offsets are absolute; the largest timestamp in ms, -1
#: for none; SIZE of the whole batch; FAULT is a Fault.
Batches = NDArray[np.int64]


class LogWalk:
    """One pass along a log. Iterate once; then ``outcome`` says what stands at ``end``, where no batch follows.

    A batch with a fault is passed over when a head follows it that goes on with the offsets; else the walk ends before
    it: ``fault`` is not NONE then, and ``outcome`` CORRUPT.
    """

    def __init__(
        self,
        file: DiskFile,
        base: int,
        on_bytes: Callable[[int], None] = lambda _: None,
        buffer_size: int = 4 << 20,
    ) -> None:
        self.log_size = file.size()
        self.end = 0
        self.outcome = WalkEnd.END
        self.fault = Fault.NONE
        self._file = file
        self._base = base
        self._last_offset = base - 1
        self._on_bytes = on_bytes
        self._buffer = np.zeros(max(buffer_size, HEAD_SIZE_V2), dtype=np.uint8)
        self._buffer_start = self._buffer_end = 0  # the bytes of the log that are in it
        self._rows = np.zeros((_ROWS, kernel.COLUMNS), dtype=np.int64)

    def __iter__(self) -> Iterator[Batches]:
        while True:
            count, outcome = self._step()
            if count:
                rows = self._rows[:count]
                leads_on = self._leads_on(rows)
                if not leads_on:
                    self.fault, self.outcome = Fault(int(rows[-1, kernel.FAULT])), WalkEnd.CORRUPT
                    rows = rows[:-1]
                if len(rows):
                    columns = np.ascontiguousarray(rows.T)
                    before, self.end = self.end, int(columns[kernel.POSITION, -1] + columns[kernel.SIZE, -1])
                    self._last_offset = int(columns[kernel.LAST_OFFSET, -1])
                    self._on_bytes(self.end - before)
                    yield columns
                if not leads_on:
                    return
            if outcome >= 0:
                self.outcome = self._at_end(WalkEnd(outcome))
                return

    def _step(self) -> tuple[int, int]:
        """(rows filled from ``end`` on, WalkEnd or GO_ON); at least one row if it goes on."""
        while True:
            start = self.end - self._buffer_start
            count, outcome = kernel.walk(
                self._buffer, start, self._buffer_end - self._buffer_start, self.end, self.log_size,
                kernel.CRC32C_TABLES, CRC_TABLES, self._rows,
            )  # fmt: skip
            if outcome != kernel.BEHIND_BUFFER or count:
                return int(count), kernel.GO_ON if outcome == kernel.BEHIND_BUFFER else int(outcome)
            size = int(self._rows[0, kernel.SIZE]) if self._rows[0, kernel.FAULT] >= 0 else 0
            if size > BATCH_SIZE_MAX:
                return 0, WalkEnd.CORRUPT
            if size > len(self._buffer):
                self._buffer = np.zeros(size, dtype=np.uint8)
            done = self._file.pread_into(self._buffer[: self.log_size - self.end].data, self.end)
            if done < min(len(self._buffer), self.log_size - self.end):  # somebody cuts it while it is read
                self.log_size = self.end + done
            self._buffer_start, self._buffer_end = self.end, self.end + done

    def _leads_on(self, rows: NDArray[np.int64]) -> bool:
        """Whether the batch of the last row has no fault, or one that does not put its length in doubt."""
        row = rows[-1]
        if row[kernel.FAULT] == Fault.NONE:
            return True
        if row[kernel.FAULT] == Fault.MAGIC:
            return False
        position = int(row[kernel.POSITION] + row[kernel.SIZE])
        head = np.frombuffer(self._file.pread(HEAD_SIZE_V2, position), dtype=np.uint8)
        following = np.zeros((1, kernel.COLUMNS), dtype=np.int64)
        _, outcome = kernel.walk(
            head, 0, len(head), position, self.log_size, kernel.CRC32C_TABLES, CRC_TABLES, following
        )
        if outcome >= 0:
            return bool(outcome == WalkEnd.END)
        base_offset = int(following[0, kernel.BASE_OFFSET])
        is_sound = following[0, kernel.FAULT] in (Fault.NONE, Fault.CRC)
        last_offset = int(rows[-2, kernel.LAST_OFFSET]) if len(rows) > 1 else self._last_offset
        return bool(is_sound and last_offset < base_offset <= self._base + INT32_MAX)

    def _at_end(self, outcome: WalkEnd) -> WalkEnd:
        """ZEROS in place of HALF or CORRUPT where nothing else follows."""
        if outcome == WalkEnd.END or any(self._file.pread(HEAD_SIZE_UP_TO_MAGIC, self.end)):
            return outcome
        return outcome if find_nonzero(self._file, self.end, self.log_size)[1] else WalkEnd.ZEROS


#: So many slots of a file are looked at, 32 MiB of an .index; one of Kafka's default size holds a third of that.
SLOTS_MAX = 1 << 22
_WINDOW_SLOTS = 1 << 16


class Slots(NamedTuple):
    """``live`` slots, then ``zeros`` unused ones (a tail of nothing but zeros), then ``ragged`` bytes of no slot.

    None of them where ``is_there`` is False: there is no such file.

    ``first`` and ``second`` hold the live slots, SLOTS_MAX of them at most: int64 relative offsets and positions of an
    .index, timestamps and relative offsets of a .timeindex.
    """

    live: int
    zeros: int
    ragged: int
    entry_size: int
    is_there: bool
    first: NDArray[np.int64]
    second: NDArray[np.int64]


def read_slots(disk: Disk, path: Path, entry: np.dtype[np.void]) -> Slots:
    """Of an index file of these entries."""
    width = entry.itemsize
    if not disk.exists(path):
        return Slots(0, 0, 0, width, False, np.empty(0, np.int64), np.empty(0, np.int64))
    with disk.open_read(path) as file:
        slots, ragged = divmod(file.size(), width)
        end, live = slots, 0
        # The last slot that is not all zeros is looked for from the end, in bounded steps.
        while end > 0 and not live:
            start = max(0, end - _WINDOW_SLOTS)
            used = np.flatnonzero(np.frombuffer(file.pread((end - start) * width, start * width), dtype=np.uint8))
            live, end = start + int(used[-1]) // width + 1 if len(used) else 0, start
        rows = unpack_entries(file.pread(min(live, SLOTS_MAX) * width, 0), entry)
    return Slots(live, slots - live, ragged, width, True, rows[:, 0], rows[:, 1])
