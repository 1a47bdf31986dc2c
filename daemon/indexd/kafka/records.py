"""LogWalk: the record batches of one .log, read in bounded buffers, as arrays.

Memory does not depend on the log: batches that are larger than a buffer are summed up piece by piece. Whatever the
bytes are, a walk ends in an Outcome; only the system's refusal to read them is an exception.

What is known of a batch is what Kafka's recovery takes from it: position, size, last offset, largest timestamp, and
whether its checksum holds. Records are not looked into, so a compressed batch costs no more than any other, and of a
compressed wrapper of magic 0 or 1 the first offset is not known (``base_offset`` is the last one then). A wrapper of
magic 1 carries the largest timestamp of what is in it, and magic 0 has none (-1).

The slots of an index file as arrays, and where its zeros begin.

The entries that Kafka's recovery gives a segment, as the bytes of both files (spec kafka-index 8).

The rule itself is the sparse indexes' own kernel. Recovery starts with empty indexes and no timestamp known, walks from
position 0, and ends with the largest timestamp as the last time entry; both files are trimmed to their entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.bytes_kernel import CRC_TABLES, crc_go_on
from indexd.errors import CorruptDataError, UsageError
from indexd.kafka import kernel
from indexd.kafka.format import HEAD_SIZE_UP_TO_MAGIC, HEAD_SIZE_V2, MAGIC_V2, Fault, Outcome
from indexd.sparse.format import INT32_MAX, OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE
from indexd.sparse.kernel import final_time_entry, new_state, segment_entries
from indexd.storage.disk import Disk, DiskFile

BUFFER_SIZE = 4 << 20
_ROWS = 1 << 15
_SUM_START = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Successive batches, a column an array of int64; ``fault`` is a Fault (spec kafka-index 8 for what they are for).

    ``base_offset`` and ``last_offset`` are absolute; ``max_timestamp`` in ms, -1 for none; ``size`` the whole batch.
    """

    position: NDArray[np.int64]
    size: NDArray[np.int64]
    base_offset: NDArray[np.int64]
    last_offset: NDArray[np.int64]
    max_timestamp: NDArray[np.int64]
    magic: NDArray[np.int64]
    fault: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.position)

    def first(self, count: int) -> Batches:
        """The first ``count`` of them."""
        columns = (self.position, self.size, self.base_offset, self.last_offset, self.max_timestamp, self.magic)
        return Batches(*(column[:count] for column in (*columns, self.fault)))


class LogWalk:
    """One pass along a log. Iterate once; then ``outcome`` says what stands at ``end``, where no batch follows.

    A batch with a fault is passed over when a head follows it that goes on with the offsets; else the walk ends before
    it: ``fault`` is not NONE then, and ``outcome`` CORRUPT.
    """

    def __init__(
        self, file: DiskFile, base: int, on_bytes: Callable[[int], None] | None = None, buffer_size: int = BUFFER_SIZE
    ) -> None:
        self.log_size = file.size()
        self.end = 0
        self.outcome = Outcome.END
        self.fault = Fault.NONE
        self._file = file
        self._base = base
        self._last_offset = base - 1
        self._on_bytes = on_bytes
        self._buffer = np.zeros(max(buffer_size, HEAD_SIZE_V2), dtype=np.uint8)
        self._buffer_start = self._buffer_end = 0  # the bytes of the log that are in it
        self._rows = np.zeros((_ROWS, kernel.COLUMNS), dtype=np.int64)

    def __repr__(self) -> str:
        return f"LogWalk({self._file.path}, {self.end} of {self.log_size} bytes, {self.outcome.name})"

    def __iter__(self) -> Iterator[Batches]:
        while True:
            count, outcome = self._step()
            if count:
                rows = self._rows[:count]
                leads_on = self._leads_on(rows)
                if not leads_on:
                    self.fault = Fault(int(rows[-1, kernel.FAULT]))
                    rows = rows[:-1]
                if len(rows):
                    yield self._accept(rows)
                if not leads_on:
                    self.outcome = Outcome.CORRUPT
                    return
            if outcome >= 0:
                self.outcome = self._at_end(Outcome(outcome))
                return

    def _step(self) -> tuple[int, int]:
        """(rows filled from ``end`` on, Outcome or GO_ON); at least one row if it goes on."""
        while True:
            start = self.end - self._buffer_start
            count, outcome = kernel.walk(
                self._buffer, start, self._buffer_end - self._buffer_start, self.end, self.log_size,
                kernel.CRC32C_TABLES, CRC_TABLES, self._rows,
            )  # fmt: skip
            if outcome != kernel.BEHIND_BUFFER or count:
                return int(count), kernel.GO_ON if outcome == kernel.BEHIND_BUFFER else int(outcome)
            if self._rows[0, kernel.FAULT] >= 0 and self._buffer_start == self.end:
                self._sum_up(self._rows[0])
                return 1, kernel.GO_ON
            self._load(self.end)

    def _load(self, position: int) -> int:
        """Fill the buffer from ``position`` of the log; the number of bytes."""
        size = min(len(self._buffer), self.log_size - position)
        done = self._file.pread_into(self._buffer[:size].data, position)
        if done < size:  # somebody cuts it while it is read
            self.log_size = position + done
        self._buffer_start, self._buffer_end = position, position + done
        return done

    def _sum_up(self, row: NDArray[np.int64]) -> None:
        """The checksum of a batch that no buffer holds."""
        crc, covered = kernel.batch_sum(self._buffer, 0)
        tables = kernel.CRC32C_TABLES if row[kernel.MAGIC] == MAGIC_V2 else CRC_TABLES
        position, left = self.end, int(row[kernel.SIZE])
        register, start = _SUM_START, int(covered)
        while left:
            size = min(left, self._load(position))
            if not size:  # the log was cut meanwhile
                break
            register = crc_go_on(self._buffer, start, size, register, tables)
            position, left, start = position + size, left - size, 0
        row[kernel.FAULT] = Fault.NONE if int(register ^ _SUM_START) == int(crc) else Fault.CRC

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
            return bool(outcome == Outcome.END)
        base_offset = int(following[0, kernel.BASE_OFFSET])
        is_sound = following[0, kernel.FAULT] in (Fault.NONE, Fault.CRC)
        last_offset = int(rows[-2, kernel.LAST_OFFSET]) if len(rows) > 1 else self._last_offset
        return bool(is_sound and last_offset < base_offset <= self._base + INT32_MAX)

    def _accept(self, rows: NDArray[np.int64]) -> Batches:
        columns = np.ascontiguousarray(rows.T)
        self.end = int(columns[kernel.POSITION, -1] + columns[kernel.SIZE, -1])
        self._last_offset = int(columns[kernel.LAST_OFFSET, -1])
        if self._on_bytes is not None:
            self._on_bytes(self.end)
        return Batches(*columns)

    def _at_end(self, outcome: Outcome) -> Outcome:
        """ZEROS in place of HALF or CORRUPT where nothing else follows."""
        head = self._file.pread(HEAD_SIZE_UP_TO_MAGIC, self.end)
        if outcome == Outcome.END or any(head):
            return outcome
        position = self.end
        while position < self.log_size:
            size = self._load(position)
            if not size:
                break
            if self._buffer[:size].any():
                return outcome
            position += size
        return Outcome.ZEROS


#: So many slots of a file are looked at, 32 MiB of an .index; one of Kafka's default size holds a third of that.
SLOTS_MAX = 1 << 22
_WINDOW_SLOTS = 1 << 16
_TIME_ENTRY = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """``live`` slots, then ``zeros`` unused ones (a tail of nothing but zeros), then ``ragged`` bytes of no slot.

    ``first`` and ``second`` hold the live slots, SLOTS_MAX of them at most: int64 relative offsets and positions of an
    .index, timestamps and relative offsets of a .timeindex.
    """

    live: int
    zeros: int
    ragged: int
    entry_size: int
    first: NDArray[np.int64]
    second: NDArray[np.int64]

    @property
    def judged(self) -> int:
        """How many slots are in the arrays."""
        return len(self.first)

    def without_first(self) -> Slots:
        """The same with no live slot at all: for a file whose only one turned out to be unused."""
        return Slots(0, self.zeros + self.live, self.ragged, self.entry_size, self.first[:0], self.second[:0])


NO_OFFSET_SLOTS = Slots(0, 0, 0, OFFSET_ENTRY_SIZE, np.empty(0, np.int64), np.empty(0, np.int64))
NO_TIME_SLOTS = Slots(0, 0, 0, TIME_ENTRY_SIZE, np.empty(0, np.int64), np.empty(0, np.int64))


def read_offset_slots(disk: Disk, path: Path) -> Slots:
    """Of an .index."""
    with disk.open_read(path) as file:
        size = file.size()
        live = _live(file, size, OFFSET_ENTRY_SIZE)
        data = file.pread(min(live, SLOTS_MAX) * OFFSET_ENTRY_SIZE, 0)
    pairs = np.frombuffer(data[: len(data) - len(data) % OFFSET_ENTRY_SIZE], dtype=">i4").astype(np.int64)
    slots = size // OFFSET_ENTRY_SIZE
    return Slots(live, slots - live, size % OFFSET_ENTRY_SIZE, OFFSET_ENTRY_SIZE, pairs[0::2], pairs[1::2])


def read_time_slots(disk: Disk, path: Path) -> Slots:
    """Of a .timeindex. The first slot counts as live even if all are zeros: it may be an entry of 1970."""
    with disk.open_read(path) as file:
        size = file.size()
        slots = size // TIME_ENTRY_SIZE
        live = min(max(_live(file, size, TIME_ENTRY_SIZE), 1), slots)
        data = file.pread(min(live, SLOTS_MAX) * TIME_ENTRY_SIZE, 0)
    rows = np.frombuffer(data[: len(data) - len(data) % TIME_ENTRY_SIZE], dtype=_TIME_ENTRY)
    timestamps, offsets = rows["timestamp"].astype(np.int64), rows["offset"].astype(np.int64)
    return Slots(live, slots - live, size % TIME_ENTRY_SIZE, TIME_ENTRY_SIZE, timestamps, offsets)


def _live(file: DiskFile, size: int, entry_size: int) -> int:
    """The number of slots up to the last that is not all zeros; looked for from the end, in bounded steps."""
    end = size // entry_size
    while end > 0:
        start = max(0, end - _WINDOW_SLOTS)
        window = np.frombuffer(file.pread((end - start) * entry_size, start * entry_size), dtype=np.uint8)
        used = np.flatnonzero(window)
        if len(used):
            return start + int(used[-1]) // entry_size + 1
        end = start
    return 0


def refuse_interval(interval: int) -> None:
    """UsageError for a number that index.interval.bytes cannot have."""
    if not 0 <= interval <= INT32_MAX:
        raise UsageError(f"--interval {interval} is not index.interval.bytes: 0 to {INT32_MAX}")


class RecoveredEntries:
    """Feed it the sound batches of a segment from its first on; ``finish`` gives (.index, .timeindex).

    CorruptDataError where Kafka's own recovery fails: offsets that do not fit the base, entries whose offsets do not
    rise. UsageError when an index would be longer than ``max_index_size`` bytes.
    """

    def __init__(self, base: int, interval: int, max_index_size: int) -> None:
        self._base = base
        self._interval = interval
        self._offset_entries_max = max_index_size // OFFSET_ENTRY_SIZE
        # The last slot is kept for the entry that recovery ends with.
        self._time_entries_max = max_index_size // TIME_ENTRY_SIZE - 1
        self._state = new_state()
        self._index: list[bytes] = []
        self._time_index: list[bytes] = []
        self._last = (-1, 0)  # the last offset entry's offset, and the last time entry's
        self.offset_entries = 0
        self.time_entries = 0

    def put(self, batches: Batches) -> None:
        """The next batches."""
        relative = batches.last_offset - self._base
        outside = np.flatnonzero((relative < 0) | (relative > INT32_MAX))
        if len(outside):
            row = int(outside[0])
            raise CorruptDataError(
                f"the batch at byte {batches.position[row]} ends with offset {batches.last_offset[row]}, which cannot "
                f"be held relative to the segment's base {self._base}",
                "Kafka's recovery ends here as well",
            )
        rows = len(batches)
        offset_entries = np.empty((rows, 2), dtype=np.int64)
        time_entries = np.empty((rows, 2), dtype=np.int64)
        _, count, time_count = segment_entries(
            batches.position, batches.size, relative, batches.max_timestamp, 0, rows, self._interval, self._state,
            offset_entries, time_entries,
        )  # fmt: skip
        self._add(offset_entries[: int(count)], time_entries[: int(time_count)])

    def finish(self) -> tuple[bytes, bytes]:
        """Both files, whole; with the final time entry, which may take the last slot."""
        final = final_time_entry(self._state)
        if final is not None:
            self._refuse_falling(self._last[1], np.array([final[1]], dtype=np.int64), 0)
            self._time_index.append(np.array([final], dtype=_TIME_ENTRY).tobytes())
            self.time_entries += 1
        return b"".join(self._index), b"".join(self._time_index)

    def _add(self, offset_entries: NDArray[np.int64], time_entries: NDArray[np.int64]) -> None:
        self._refuse_falling(self._last[0], offset_entries[:, 0], 1)
        self._refuse_falling(self._last[1], time_entries[:, 1], 0)
        if len(offset_entries):
            self._last = (int(offset_entries[-1, 0]), self._last[1])
        if len(time_entries):
            self._last = (self._last[0], int(time_entries[-1, 1]))
        self.offset_entries += len(offset_entries)
        self.time_entries += len(time_entries)
        if self.offset_entries > self._offset_entries_max or self.time_entries > self._time_entries_max:
            raise UsageError(
                f"the segment with base {self._base} needs longer indexes than the segment.index.bytes that was given",
                "give --max-index-size as the broker has it, and --interval as well",
            )
        self._index.append(offset_entries.astype(">i4").tobytes())
        packed = np.empty(len(time_entries), dtype=_TIME_ENTRY)
        packed["timestamp"], packed["offset"] = time_entries[:, 0], time_entries[:, 1]
        self._time_index.append(packed.tobytes())

    def _refuse_falling(self, last: int, offsets: NDArray[np.int64], rise_min: int) -> None:
        row = np.flatnonzero(np.diff(offsets, prepend=last) < rise_min)
        if len(row):
            raise CorruptDataError(
                f"the offsets of the batches do not rise at offset {self._base + int(offsets[row[0]])}",
                "Kafka's recovery ends here as well",
            )


@dataclass(frozen=True, slots=True)
class Recovered:
    """What recovery makes of a segment: the bytes of both files, and of how many log bytes and batches."""

    index: bytes
    time_index: bytes
    end: int
    batches: int

    @property
    def offset_entries(self) -> int:
        """Of ``index``."""
        return len(self.index) // OFFSET_ENTRY_SIZE

    @property
    def time_entries(self) -> int:
        """Of ``time_index``."""
        return len(self.time_index) // TIME_ENTRY_SIZE


def recover_entries(walk: LogWalk, base: int, interval: int, max_index_size: int) -> Recovered:
    """Walk a segment as recovery does: to the first batch with a fault, which recovery cuts off with all behind it."""
    entries = RecoveredEntries(base, interval, max_index_size)
    end = count = 0
    for batches in walk:
        faulty = np.flatnonzero(batches.fault != Fault.NONE)
        sound = batches.first(int(faulty[0])) if len(faulty) else batches
        if len(sound):
            entries.put(sound)
            end = int(sound.position[-1] + sound.size[-1])
            count += len(sound)
        if len(faulty):
            break
    index, time_index = entries.finish()
    return Recovered(index, time_index, end, count)
