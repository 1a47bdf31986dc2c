"""Which ConsumeQueues there are and how far each has come, in memory.

A queue is a slot, a number from 0 in order of first appearance. What is known of it lies in arrays; nothing here is
bound to a file or a descriptor.
"""

from __future__ import annotations

import weakref

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import decode_utf8
from indexd.consumequeue.format import OFFSET_MAX, QueueMark, is_topic_name
from indexd.consumequeue.kernel import MAX_PHY_OFFSET, MOVED_FROM, NEXT, add_queues

_QUEUES_FIRST = 64
_LOW_32 = 0xFFFFFFFF
#: Columns of a queue's ``places``: the first unit of its oldest file; the first unit that is not blank or expired and
#: the least offset at which the message of that one can stand; the next unit that is to be written; the unit with which
#: the queue once began.
FIRST, MIN, MIN_PHY, WRITTEN, BEGIN = range(5)


class Queues:
    """All queues of a store, at most ``queues_max``; ``file_units`` are the units of one file."""

    def __init__(self, file_units: int, queues_max: int) -> None:
        self.file_units, self.queues_max = file_units, queues_max
        self.names: list[tuple[str, int]] = []
        self.places = np.zeros((_QUEUES_FIRST, 5), dtype=np.int64)
        #: For the kernel: see there.
        self.state = np.zeros((_QUEUES_FIRST, 4), dtype=np.int64)
        self.keys = np.zeros(_QUEUES_FIRST, dtype=np.uint64)
        self.table_keys = np.zeros(4 * _QUEUES_FIRST, dtype=np.uint64)
        self.table_slots = np.zeros(4 * _QUEUES_FIRST, dtype=np.int32)
        # As they were marked last, and the numbers of that.
        self._marks: list[QueueMark] = []
        self._marked = np.empty((0, 6), dtype=np.int64)
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
        places = mark.first_offset, mark.min_offset, 0, mark.max_offset, mark.begin_offset
        self._add(mark[:2], places, (mark.max_offset, mark.max_phy_offset, 0, mark.moved_from))

    def begin(self, topic: str, queue_id: int, queue_offset: int, phy_offset: int) -> bool:
        """Take in a queue whose first message has ``queue_offset`` and stands at ``phy_offset``.

        Its first file begins at a whole multiple of the file size. False for an offset that no file's name can say.
        """
        if not 0 <= queue_offset <= OFFSET_MAX:
            return False
        first = queue_offset - queue_offset % self.file_units
        places = first, queue_offset, phy_offset, first, queue_offset
        self._add((topic, queue_id), places, (queue_offset, -1, 0, -1))
        return True

    def marks(self) -> tuple[QueueMark, ...]:
        """What holds of each queue, of which nothing is pending. There are thousands: only what changed is marked."""
        places, state, old = self.places[: len(self)], self.state[: len(self)], self._marked
        columns = places[:, [FIRST, MIN]], state[:, [NEXT, MAX_PHY_OFFSET]], places[:, [BEGIN]], state[:, [MOVED_FROM]]
        self._marked = np.concatenate(columns, axis=1)
        is_changed = np.ones(len(self), dtype=np.bool_)
        is_changed[: len(old)] = (self._marked[: len(old)] != old).any(axis=1)
        for slot in np.flatnonzero(is_changed).tolist():
            self._marks[slot : slot + 1] = [QueueMark(*self.names[slot], *self._marked[slot].tolist())]
        return tuple(self._marks)

    def numbers(self, batch: DispatchBatch) -> NDArray[np.int32]:
        """By topic id of the batch's table, the store-wide number of the topic; -1 for one that is no folder's name."""
        known = self._numbers_of.get(batch.topics, np.empty(0, dtype=np.int32))
        # Not all of the table: its reader may be at work on the next batch.
        count = int(batch.columns.topic_id[: batch.rows].max(initial=-1)) + 1
        if count > len(known):
            new = [self._number(decode_utf8(batch.topics.raw_name(number))) for number in range(len(known), count)]
            known = self._numbers_of[batch.topics] = np.concatenate([known, np.array(new, dtype=np.int32)])
        return known

    def _number(self, topic: str) -> int:
        # Two names in the log may be one: bytes that are no UTF-8 read as replacement characters.
        if not is_topic_name(topic):
            return -1
        return self._numbers.setdefault(topic, len(self._numbers))

    def _add(self, name: tuple[str, int], places: tuple[int, ...], state: tuple[int, ...]) -> None:
        slot = len(self)
        if slot == len(self.keys):
            self.places, self.state, self.keys = (
                np.concatenate([known, np.zeros_like(known)]) for known in (self.places, self.state, self.keys)
            )
            self.table_keys = np.zeros(4 * len(self.keys), dtype=np.uint64)
            self.table_slots = np.zeros(4 * len(self.keys), dtype=np.int32)
            add_queues(self.keys, 0, slot, self.table_keys, self.table_slots)
        self.names.append(name)
        self.places[slot], self.state[slot] = places, state
        self.keys[slot] = self._number(name[0]) << 32 | (name[1] & _LOW_32)
        add_queues(self.keys, slot, slot + 1, self.table_keys, self.table_slots)
