"""Which ConsumeQueues there are, how far each has come, its units that are not written yet: in memory.

A queue is a slot, a number from 0 in order of first appearance. What the kernel needs of it lies in arrays, the rest in
lists; nothing here is bound to a file or a descriptor. PendingUnits are in the order of the log until they are sorted.
expire_queue finds what of a queue only points before the log's begin (spec rocketmq-store 5.5, 5.8): most queues are
decided without a look at the disk, by where their newest message ends and where the first one that counts stands.
"""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns
from indexd.commitlog.decoder import decode_utf8
from indexd.consumequeue.format import OFFSET_MAX, UNIT_SIZE, QueueMark, file_name, is_topic_name, queue_directory
from indexd.consumequeue.kernel import MAX_PHY_OFFSET, MOVED_FROM, NEXT, add_queues, group_units, put_units
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.storage.disk import Disk

_QUEUES_FIRST = 64
_LOW_32 = 0xFFFFFFFF
#: Of ``min_phy``: nobody has looked yet.
UNKNOWN = -1


class Queues:
    """All queues of a store, at most ``queues_max``; ``file_units`` are the units of one file."""

    def __init__(self, root: Path, file_units: int, queues_max: int) -> None:
        self.root = root
        self.file_units = file_units
        self.queues_max = queues_max
        self.names: list[tuple[str, int]] = []
        #: By slot: the unit with which the queue once began; the first unit of the oldest file; the first that is not
        #: blank or expired and, if known, where the message of that one stands; the next unit that is to be written;
        #: where the files lie.
        self.begin_offsets: list[int] = []
        self.first: list[int] = []
        self.min: list[int] = []
        self.min_phy: list[int] = []
        self.written: list[int] = []
        self.directories: list[Path] = []
        #: For the kernel: see there.
        self.state = np.zeros((_QUEUES_FIRST, 4), dtype=np.int64)
        self.keys = np.zeros(_QUEUES_FIRST, dtype=np.uint64)
        self.table_keys = np.zeros(4 * _QUEUES_FIRST, dtype=np.uint64)
        self.table_slots = np.zeros(4 * _QUEUES_FIRST, dtype=np.int32)
        self._numbers: dict[str, int] = {}
        # A reader's table grows and is replaced by a bigger one; several readers have one each.
        self._numbers_of: weakref.WeakKeyDictionary[TopicTable, NDArray[np.int32]] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_closed(self) -> bool:
        """No further queue is taken in."""
        return len(self) >= self.queues_max

    def load(self, mark: QueueMark) -> None:
        """Take in a queue as its mark says."""
        slot = self._add(mark.topic, mark.queue_id, mark.first_offset, mark.min_offset, UNKNOWN)
        self.written[slot] = mark.max_offset
        self.begin_offsets[slot] = mark.begin_offset
        self.state[slot] = (mark.max_offset, mark.max_phy_offset, 0, mark.moved_from)

    def begin(self, topic: str, queue_id: int, queue_offset: int, phy_offset: int) -> bool:
        """Take in a queue whose first message has ``queue_offset`` and stands at ``phy_offset``.

        Its first file begins at a whole multiple of the file size. False for an offset that no file's name can say.
        """
        if not 0 <= queue_offset <= OFFSET_MAX:
            return False
        slot = self._add(topic, queue_id, queue_offset - queue_offset % self.file_units, queue_offset, phy_offset)
        self.begin_offsets[slot] = queue_offset
        self.state[slot] = (queue_offset, -1, 0, -1)
        return True

    def mark(self, slot: int) -> QueueMark:
        """What holds of a queue of which nothing is pending."""
        return QueueMark(
            *self.names[slot],
            self.first[slot],
            self.min[slot],
            int(self.state[slot, NEXT]),
            int(self.state[slot, MAX_PHY_OFFSET]),
            self.begin_offsets[slot],
            int(self.state[slot, MOVED_FROM]),
        )

    def numbers(self, batch: DispatchBatch) -> NDArray[np.int32]:
        """By topic id of the batch's table, the store-wide number of the topic; -1 for one that is no folder's name."""
        known = self._numbers_of.get(batch.topics)
        if known is not None and len(known) == len(batch.topics):
            return known
        # Not all of the table: its reader may be at work on the next batch.
        count = int(batch.columns.topic_id[: batch.rows].max(initial=-1)) + 1
        if known is not None and count <= len(known):
            return known
        old = [] if known is None else known.tolist()
        new = [self._number(decode_utf8(batch.topics.raw_name(topic_id))) for topic_id in range(len(old), count)]
        known = self._numbers_of[batch.topics] = np.array(old + new, dtype=np.int32)
        return known

    def _number(self, topic: str) -> int:
        # Two names in the log may be one: bytes that are no UTF-8 read as replacement characters.
        if not is_topic_name(topic):
            return -1
        return self._numbers.setdefault(topic, len(self._numbers))

    def _add(self, topic: str, queue_id: int, first: int, minimum: int, min_phy: int) -> int:
        slot = len(self)
        if slot == len(self.keys):
            self._grow()
        self.names.append((topic, queue_id))
        self.begin_offsets.append(0)
        self.first.append(first)
        self.min.append(minimum)
        self.min_phy.append(min_phy)
        self.written.append(first)
        self.directories.append(queue_directory(self.root, topic, queue_id))
        self.keys[slot] = self._number(topic) << 32 | (queue_id & _LOW_32)
        add_queues(self.keys, slot, slot + 1, self.table_keys, self.table_slots)
        return slot

    def _grow(self) -> None:
        count = len(self)
        self.state = np.concatenate([self.state, np.zeros_like(self.state)])
        self.keys = np.concatenate([self.keys, np.zeros_like(self.keys)])
        self.table_keys = np.zeros(4 * len(self.keys), dtype=np.uint64)
        self.table_slots = np.zeros(4 * len(self.keys), dtype=np.int32)
        add_queues(self.keys, 0, count, self.table_keys, self.table_slots)


def expire_queue(disk: Disk, queues: Queues, slot: int, min_phy_offset: int) -> list[Path] | None:
    """Move the queue's first file and first unit on; the files that it has left, or None if nothing has changed.

    All units must be written. A message never reaches over the begin of a segment, so the one that ends at or before
    ``min_phy_offset`` also stands before it.
    """
    old_first, old_min, end = queues.first[slot], queues.min[slot], queues.written[slot]
    if queues.min_phy[slot] >= min_phy_offset or old_min >= end:
        return None
    minimum, phy_offset = end, -1
    if queues.state[slot, MAX_PHY_OFFSET] > min_phy_offset:
        file_size = queues.file_units * UNIT_SIZE
        with ConsumeQueueReader.of_mark(disk, queues.root, queues.mark(slot), file_size) as reader:
            reader.correct_min_offset(min_phy_offset)
            minimum, phy_offset = reader.min_offset, reader.unit(reader.min_offset).phy_offset
    # The last file stays, whatever is in it.
    first = min(minimum, end - 1) // queues.file_units * queues.file_units
    queues.first[slot], queues.min[slot], queues.min_phy[slot] = first, minimum, phy_offset
    if (first, minimum) == (old_first, old_min):
        return None
    offsets = range(old_first, first, queues.file_units)
    return [queues.directories[slot] / file_name(offset * UNIT_SIZE) for offset in offsets]


# Units that are collected before they are written: 5 MiB, or more if there are many queues, so that an open and a
# write are worth it. The memory of the longest buffers is the system's until it is used.
UNITS_PER_WRITE = 1 << 18
_UNITS_A_QUEUE = 128
_UNITS_MAX = 1 << 20


class PendingUnits:
    """What the kernel collects, and the same sorted by queue: ``grouped``, (n, 5) uint32, the bytes of the files."""

    def __init__(self) -> None:
        self._units = np.empty((_UNITS_MAX, 5), dtype=np.uint32)
        self._slots = np.empty(_UNITS_MAX, dtype=np.int32)
        self._touched = np.empty(_UNITS_MAX, dtype=np.int32)
        self._lengths = np.empty(_UNITS_MAX, dtype=np.int64)
        self._used = np.zeros(2, dtype=np.int64)
        self.grouped = np.empty((_UNITS_MAX, 5), dtype=np.uint32)
        #: See the kernel; they only grow.
        self.counts = np.zeros(6, dtype=np.int64)

    def clear(self) -> None:
        """Forget what is there."""
        self._used[:] = 0

    def put(self, batch: DispatchBatch, row: int, queues: Queues, numbers: NDArray[np.int32]) -> tuple[int, int]:
        """Take rows from ``row`` on; why it stopped (DONE, NEW_QUEUE, BUFFER_FULL), and at which row.

        ``numbers`` are ``queues.numbers`` of the batch.
        """
        status, next_row = put_units(
            batch.columns,
            batch.rows,
            row,
            numbers,
            queues.table_keys,
            queues.table_slots,
            queues.is_closed,
            queues.state,
            self._units[: max(UNITS_PER_WRITE, min(_UNITS_A_QUEUE * len(queues), _UNITS_MAX))],
            self._slots,
            self._used,
            self._touched,
            self.counts,
        )
        return int(status), int(next_row)

    def group(self, queues: Queues) -> list[tuple[int, int, int]]:
        """Sort what is there into ``grouped``; each queue's slot, first and last row, the one that came first last."""
        touched = self._touched[: self._used[1]].tolist()
        group_units(self._units, self._slots, self._used, self._touched, queues.state, self.grouped, self._lengths)
        ends = np.cumsum(self._lengths[: len(touched)]).tolist()
        return list(zip(touched, [0, *ends], ends, strict=False))[::-1]


def load_kernels() -> None:
    """Have putMessagePositionInfo compiled, or loaded from where it is kept."""
    queues = Queues(Path(), 1, 1)
    queues.begin("T", 0, 0, 0)
    units, slots = np.empty((1, 5), dtype=np.uint32), np.empty(1, dtype=np.int32)
    used, counts = np.zeros(2, dtype=np.int64), np.zeros(6, dtype=np.int64)
    keys, table, state = queues.table_keys, queues.table_slots, queues.state
    put_units(make_columns(1, 1), 0, 0, slots, keys, table, False, state, units, slots, used, slots, counts)
    group_units(units, slots, used, slots, state, units, counts)
