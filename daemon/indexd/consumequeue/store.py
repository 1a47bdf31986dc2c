"""ConsumeQueueStore: all ConsumeQueues of a data directory, built from batches (spec rocketmq-store 5).

Units are collected until a buffer is full or ``publish`` is called, and then written queue by queue. There may be
thousands of queues, so a file is open only for as long as a write takes. It is made with its whole size and lies on the
disk only where it was written: a disk that is full shows at a write, as a DiskError, and what was written before stays.
Messages of BatchConsumeQueue topics (inner batches) are recognised and get no unit: their files are not built.
ConsumeQueueExt is off in a broker unless it is asked for, and is not built either: a tags code is always the hash.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable, make_columns
from indexd.commitlog.decoder import decode_utf8
from indexd.config import Config
from indexd.consumequeue.check import check_queues, recover_queues
from indexd.consumequeue.format import (
    BLANK_UNIT,
    OFFSET_MAX,
    UNIT_SIZE,
    QueueMark,
    QueuesMark,
    file_name,
    is_topic_name,
    queue_directory,
)
from indexd.consumequeue.kernel import (
    LEFT_OUT,
    MAX_PHY_OFFSET,
    MOVED_FROM,
    NEW_QUEUE,
    NEXT,
    add_queues,
    group_units,
    put_units,
)
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.findings import Findings
from indexd.output import CheckScope, Output, OutputMark, OutputRecovery, RecoveryScope, Row
from indexd.storage.disk import Disk

_MOVED_SHOWN = 1000
# The memory of the longest buffers is the system's until it is used.
_UNITS_MAX = 1 << 20
_QUEUES_FIRST = 64
_LOW_32 = 0xFFFFFFFF
# Columns of a queue's ``places``: the first unit of its oldest file; the first unit that is not blank or expired and
#: the least offset at which the message of that one can stand; the next unit that is to be written; the unit with which
#: the queue once began.
FIRST, MIN, MIN_PHY, WRITTEN, BEGIN = range(5)


class Queues:
    """Which queues there are and how far each has come, in memory; at most ``queues_max``.

    A queue is a slot, a number from 0 in order of first appearance. What is known of it lies in arrays; nothing here is
    bound to a file or a descriptor. ``file_units`` are the units of one file.
    """

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


class ConsumeQueueStore(Output[QueuesMark]):
    """Builds into ``directory`` files of ``file_size`` bytes, a multiple of 20, of at most ``queues_max`` queues."""

    name, label, folder = "consumeQueue", "cq", "consumequeue"
    is_compared = True
    #: Units that are collected before they are written: 5 MiB, or more if there are many queues, so that an open and a
    #: write are worth it.
    units_per_write, units_a_queue = 1 << 18, 128

    def __init__(self, disk: Disk, directory: Path, file_size: int, queues_max: int) -> None:
        super().__init__(disk, directory)
        self.file_size = file_size
        self._file_units = file_size // UNIT_SIZE
        self._queues = Queues(self._file_units, queues_max)
        # What the kernel collects, and the same sorted by queue, the bytes of the files.
        self._units = np.empty((_UNITS_MAX, 5), dtype=np.uint32)
        self._grouped = np.empty((_UNITS_MAX, 5), dtype=np.uint32)
        self._slots = np.empty(_UNITS_MAX, dtype=np.int32)
        self._touched = np.empty(_UNITS_MAX, dtype=np.int32)
        self._used = np.zeros(2, dtype=np.int64)
        #: What has become of the messages, by the places of the kernel.
        self._counts = np.zeros(6, dtype=np.int64)
        # (slot, first and last row of ``grouped``) of what was sorted and not written, the next one last.
        self._runs: list[tuple[int, int, int]] = []
        # How far a batch has come: the disk may refuse at any point.
        self._interrupted: tuple[DispatchBatch, int] | None = None
        self._limit: int | None = None

    @classmethod
    def of(cls, config: Config, disk: Disk, directory: Path) -> Self:
        """An empty one, as configured."""
        return cls(disk, directory, config.store.consume_queue_file_size, config.outputs.queues_max)

    @classmethod
    def is_wanted(cls, config: Config) -> bool:
        """Whether the configuration asks for it."""
        return config.outputs.consume_queue

    @staticmethod
    def load_kernels() -> None:
        """Have putMessagePositionInfo compiled, or loaded from where it is kept."""
        store = ConsumeQueueStore(Disk(), Path(), UNIT_SIZE, 2)
        store._queues.begin("T", 0, 0, 0)
        store.build(DispatchBatch(make_columns(1, 1), 0, 0, 0, TopicTable()))
        store.publish()

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def begins(self) -> tuple[int, ...]:
        """Of each queue in the order of its mark, where its first message stands, as long as nothing has expired."""
        return tuple(self._queues.places[: len(self), MIN_PHY].tolist())

    def built_with(self, held: QueuesMark) -> tuple[str, int, int]:
        """The size of a file."""
        return "consume_queue_file_size", held.file_size, self.file_size

    def load(self, held: QueuesMark) -> None:
        """Take over queues that are known to be as the marks say: after a clean stop, or after recovery."""
        self._limit = held.limit
        for mark in held.queues:
            self._queues.load(mark)

    def build(self, batch: DispatchBatch) -> None:
        """RocketMQ's putMessagePositionInfo for each row, in order; the columns of a queue must be filled.

        After a DiskError the same batch may be given again: it goes on where it stopped.
        """
        row, queues = 0, self._queues
        if self._interrupted is not None and self._interrupted[0] is batch:
            row = self._interrupted[1]
        numbers = queues.numbers(batch)
        while True:
            room = max(self.units_per_write, min(self.units_a_queue * len(queues), _UNITS_MAX))
            status, row = put_units(
                batch.columns, batch.rows, row, numbers, queues.table_keys, queues.table_slots, queues.is_closed,
                queues.state, self._units[:room], self._slots, self._used, self._touched, self._counts,
            )  # fmt: skip
            if row == batch.rows:
                break
            if status == NEW_QUEUE:
                columns, topic = batch.columns, batch.topics.raw_name(int(batch.columns.topic_id[row]))
                place = (int(c[row]) for c in (columns.queue_id, columns.queue_offset, columns.phy_offset))
                is_left_out = not queues.begin(decode_utf8(topic), *place)
                self._counts[LEFT_OUT] += is_left_out
                row += is_left_out
                continue
            self._interrupted = (batch, int(row))
            self.publish()
        self._interrupted = None
        if queues.is_closed and self._counts[LEFT_OUT]:
            self._limit = len(queues)

    def publish(self) -> None:
        """Write what has been collected: every reader sees it. After a DiskError it goes on where it stopped."""
        self._write_runs()
        touched, lengths = self._touched[: self._used[1]].tolist(), np.empty(self._used[1], dtype=np.int64)
        group_units(self._units, self._slots, self._used, self._touched, self._queues.state, self._grouped, lengths)
        ends = np.cumsum(lengths).tolist()
        self._runs = list(zip(touched, [0, *ends], ends, strict=False))[::-1]
        self._write_runs()

    def mark(self) -> OutputMark[QueuesMark]:
        """What stands now, published."""
        self.publish()
        return self._mark(QueuesMark(self.file_size, self._queues.marks(), self._limit))

    def expire(self, min_phy_offset: int) -> list[str]:
        """The log begins at ``min_phy_offset`` now: leave out what only points before it (spec 5.5, 5.8).

        Most queues are decided without a look at the disk, by where their newest message ends and where the first one
        that counts stands. Each queue keeps its last file, whatever is in it.
        """
        self.publish()
        known, names = self._queues.places[: len(self)], list[str]()
        for slot in np.flatnonzero((known[:, MIN_PHY] < min_phy_offset) & (known[:, MIN] < known[:, WRITTEN])).tolist():
            names += self._leave_out(self._expire_queue(slot, min_phy_offset))
        return names

    def _expire_queue(self, slot: int, min_phy_offset: int) -> list[Path]:
        # A message never reaches over the begin of a segment, so the one that ends at or before ``min_phy_offset`` also
        # stands before it. All units are written.
        queues = self._queues
        old, minimum, _, end, _ = queues.places[slot].tolist()
        phy_offset = 0
        if queues.state[slot, MAX_PHY_OFFSET] > min_phy_offset:
            queue = self._disk, self.directory, *queues.names[slot], self.file_size
            with ConsumeQueueReader(*queue, (old, minimum, end)) as reader:
                reader.correct_min_offset(min_phy_offset)
                minimum, phy_offset = reader.min_offset, reader.unit(reader.min_offset).phy_offset
        else:
            minimum = end
        # The last file stays, whatever is in it.
        first = min(minimum, end - 1) // self._file_units * self._file_units
        queues.places[slot, [FIRST, MIN, MIN_PHY]] = first, minimum, phy_offset
        return self._paths(slot, old, first)

    def begin_anew(self) -> None:
        """The log from here on goes on behind messages that nobody has read and that have expired.

        Every unit there is has expired, too; a queue that went on would hold its next messages in the places of the
        lost ones. So all files expire, and each queue begins with its next message, as one that starts late.
        """
        queues = self._queues
        for slot, (first, _, _, end, _) in enumerate(queues.places[: len(queues)].tolist()):
            self._leave_out(self._paths(slot, first, end))
        self._queues = Queues(self._file_units, queues.queues_max)
        self._used[:] = 0
        self._runs.clear()
        self._interrupted = None

    def recover(self, held: QueuesMark | None, scope: RecoveryScope) -> OutputRecovery[QueuesMark]:
        """What is left of the queues; those that were left out for want of room begin now where there is some."""
        return recover_queues(self._disk, self.directory, held, self.file_size, scope, self._queues.queues_max)

    def check(self, held: QueuesMark | None, scope: CheckScope) -> Findings:
        """Every unit of every queue; nothing else there."""
        return check_queues(self._disk, self.directory, held or QueuesMark(self.file_size), scope)

    def parts(self, held: QueuesMark) -> list[tuple[tuple[str, int], QueuesMark]]:
        """Each queue."""
        return [(mark[:2], held._replace(queues=(mark,))) for mark in held.queues]

    def totals(self, held: QueuesMark) -> Row:
        """A queue has as many files as its units take."""
        marks = held.queues
        return {
            "files": sum(-(-(mark.max_offset - mark.first_offset) // self._file_units) for mark in marks),
            "entries": sum(mark.max_offset - mark.min_offset for mark in marks),
            "bytes": UNIT_SIZE * sum(mark.max_offset - mark.first_offset for mark in marks),
            "fillRatio": None,
        }

    def figures(self) -> Row:
        """Units, ``gaps`` of them behind a queue offset that never came; the messages that got none, by why."""
        moved, (units, repeats, gaps, batch, *left_out) = self._queues.state[: len(self), MOVED_FROM], self._counts
        slots = np.flatnonzero(moved >= 0)[:_MOVED_SHOWN].tolist()
        return {
            "consumeQueues": len(self),
            "consumeQueueUnits": int(units),
            "consumeQueueGaps": int(gaps),
            # Topic, queue id and from where on in the log.
            "consumeQueuesMoved": [(*self._queues.names[slot], int(moved[slot])) for slot in slots],
            "consumeQueueRepeats": int(repeats),
            "batchMessages": int(batch),
            "leftOutMessages": int(sum(left_out)),
        }

    def left_out(self) -> dict[str, int]:
        """How many messages have no unit, by why."""
        *_, batch, nameless, left_out = self._counts.tolist()
        return {
            "its topic is no folder's name": nameless,
            "queues_max is reached, or its queue offset is none that a file can hold": left_out,
            "its topic has batch consume queues, which are not built": batch,
        }

    def _path(self, slot: int, offset: int) -> Path:
        # The file that holds unit ``offset`` of the queue.
        name = file_name(offset * UNIT_SIZE // self.file_size * self.file_size)
        return queue_directory(self.directory, *self._queues.names[slot]) / name

    def _paths(self, slot: int, first: int, end: int) -> list[Path]:
        # The files of a queue from the one that begins with unit ``first`` on.
        return [self._path(slot, at) for at in range(first, end, self._file_units)]

    def _write_runs(self) -> None:
        while self._runs:
            slot, row, last = self._runs[-1]
            _, minimum, _, offset, _ = self._queues.places[slot].tolist()
            if offset < minimum:
                # A queue that starts late: what its first file holds before its first unit (spec 5.2, step 3).
                blanks = np.frombuffer(BLANK_UNIT * (minimum - offset), dtype=np.uint32).reshape(-1, 5)
                self._write(slot, offset, blanks)
                continue
            count = min(last - row, self._file_units - offset % self._file_units)
            self._write(slot, offset, self._grouped[row : row + count])
            self._runs[-1:] = [(slot, row + count, last)] if row + count < last else []

    def _write(self, slot: int, offset: int, units: NDArray[np.uint32]) -> None:
        # Whole units, all of one file; one that begins there is made.
        path, position = self._path(slot, offset), offset * UNIT_SIZE % self.file_size
        if position == 0:
            self._expired.pop(path, None)  # of the same name, and made anew
            self._make(path)
        with self._disk.open_write(path) as file:
            file.pwrite(units.data, position)
        self.unsynced.add(path)
        self._queues.places[slot, WRITTEN] = offset + len(units)

    def _make(self, path: Path) -> None:
        # Thousands of queues may appear at once: their directories are synced by the next flush, together. That goes
        # for those that are there already, too: whoever made them may have died before.
        self._disk.make_dir(path.parent, durable=False)
        for directory in (path.parent.parent, self.directory, path.parent, self.directory.parent):
            self.unsynced.add_directory(directory)
        # Left of an attempt that failed, it holds nothing.
        file, _ = self._disk.open_or_create(path)
        with file:
            file.truncate(0)
            file.truncate(self.file_size)
