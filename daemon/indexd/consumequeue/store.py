"""Queues: which queues there are and how far each has come; in memory only.

A queue is a slot, a number from 0 in order of first appearance. What the kernel needs of it lies in arrays, the rest in
lists; nothing here is bound to a file or a descriptor.

Expiry: what of a queue only points before the log's begin (spec rocketmq-store 5.5, 5.8).

Decides and reads; the store removes. Most queues are decided without a look at the disk: by where their newest message
ends and where the first one that counts stands.

What a ConsumeQueueStore has come to: for the flusher, and in numbers.

ConsumeQueueStore: all ConsumeQueues of a data directory, built from batches (spec rocketmq-store 5).

Units are collected until a buffer is full or ``publish`` is called, and then written queue by queue. The store knows no
frontier: ``mark`` says what stands and what has to be synced for it, the flusher does that and writes it down.
Messages of BatchConsumeQueue topics (inner batches) are recognised and get no unit: their files are not built.
ConsumeQueueExt is off in a broker unless it is asked for, and is not built either: a tags code is always the hash.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import decode_utf8
from indexd.consumequeue.files import PendingUnits, QueueFiles
from indexd.consumequeue.format import (
    BLANK_UNIT,
    OFFSET_MAX,
    UNIT_SIZE,
    QueueMark,
    file_name,
    is_topic_name,
    queue_directory,
)
from indexd.consumequeue.kernel import (
    BATCH_MESSAGES,
    GAPS,
    LEFT_OUT,
    MAX_PHY_OFFSET,
    NAMELESS,
    NEW_QUEUE,
    NEXT,
    REPEATS,
    UNITS,
    add_queues,
)
from indexd.storage.disk import Disk, DiskFile

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
        self.state = np.zeros((_QUEUES_FIRST, 3), dtype=np.int64)
        self.keys = np.zeros(_QUEUES_FIRST, dtype=np.uint64)
        self.table_keys = np.zeros(4 * _QUEUES_FIRST, dtype=np.uint64)
        self.table_slots = np.zeros(4 * _QUEUES_FIRST, dtype=np.int32)
        self._numbers: dict[str, int] = {}
        # A reader's table grows and is replaced by a bigger one; several readers have one each.
        self._numbers_of: weakref.WeakKeyDictionary[TopicTable, NDArray[np.int32]] = weakref.WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"Queues({len(self)} of {self.queues_max}, topics={len(self._numbers)})"

    @property
    def is_closed(self) -> bool:
        """No further queue is taken in."""
        return len(self) >= self.queues_max

    def load(self, mark: QueueMark) -> None:
        """Take in a queue as its mark says."""
        slot = self._add(mark.topic, mark.queue_id, mark.first_offset, mark.min_offset, UNKNOWN)
        self.written[slot] = mark.max_offset
        self.begin_offsets[slot] = mark.begin_offset
        self.state[slot] = (mark.max_offset, mark.max_phy_offset, 0)

    def begin(self, topic: str, queue_id: int, queue_offset: int, phy_offset: int) -> bool:
        """Take in a queue whose first message has ``queue_offset`` and stands at ``phy_offset``.

        Its first file begins at a whole multiple of the file size. False for an offset that no file's name can say.
        """
        if not 0 <= queue_offset <= OFFSET_MAX:
            return False
        slot = self._add(topic, queue_id, queue_offset - queue_offset % self.file_units, queue_offset, phy_offset)
        self.begin_offsets[slot] = queue_offset
        self.state[slot] = (queue_offset, -1, 0)
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
    if queues.min_phy[slot] >= min_phy_offset or queues.min[slot] >= queues.written[slot]:
        return None
    end = queues.written[slot]
    last_file = (end - 1) // queues.file_units * queues.file_units
    if queues.state[slot, MAX_PHY_OFFSET] <= min_phy_offset:
        return _move(queues, slot, last_file, end, -1)
    first = queues.first[slot]
    while first < last_file and _phy_offset(disk, queues, slot, first + queues.file_units - 1) < min_phy_offset:
        first += queues.file_units
    begin = max(first, queues.min[slot])
    with disk.open_read(_path(queues, slot, first)) as file:
        minimum, phy_offset = first_at(file, begin - first, min(end - first, queues.file_units), min_phy_offset)
    return _move(queues, slot, first, first + minimum, phy_offset)


def _move(queues: Queues, slot: int, first: int, minimum: int, phy_offset: int) -> list[Path] | None:
    old_first, old_min = queues.first[slot], queues.min[slot]
    queues.first[slot], queues.min[slot], queues.min_phy[slot] = first, minimum, phy_offset
    if (first, minimum) == (old_first, old_min):
        return None
    return [_path(queues, slot, offset) for offset in range(old_first, first, queues.file_units)]


def _path(queues: Queues, slot: int, first: int) -> Path:
    return queues.directories[slot] / file_name(first * UNIT_SIZE)


def _phy_offset(disk: Disk, queues: Queues, slot: int, offset: int) -> int:
    begin = offset // queues.file_units * queues.file_units
    with disk.open_read(_path(queues, slot, begin)) as file:
        return _phy_offset_at(file, offset - begin)


def _phy_offset_at(file: DiskFile, index: int) -> int:
    return int.from_bytes(file.pread(8, index * UNIT_SIZE), "big", signed=True)


def first_at(file: DiskFile, low: int, high: int, phy_offset: int) -> tuple[int, int]:
    """The first of the file's units ``[low, high)`` at ``phy_offset`` or behind it, and where its message stands.

    ``high`` and -1 without one. The units' physical offsets rise; blank ones come first and say 0.
    """
    found = -1
    while low < high:
        middle = (low + high) // 2
        here = _phy_offset_at(file, middle)
        if here < phy_offset:
            low = middle + 1
        else:
            high, found = middle, here
    return low, found


@dataclass(frozen=True, slots=True)
class QueuesProgress:
    """All queues at one moment, in order of first appearance, and what a flusher has to sync for ``marks`` to hold.

    First the files, then the directories. ``expired`` can be removed as soon as a frontier with these marks is durable.
    ``serial`` tells ``synced`` apart what was written after this moment.
    """

    marks: tuple[QueueMark, ...] = ()
    unsynced_files: tuple[Path, ...] = ()
    unsynced_directories: tuple[Path, ...] = ()
    expired: tuple[Path, ...] = ()
    serial: int = 0
    #: So many queues there were when further ones were left out; None if none was.
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class QueueCounters:
    """Plain numbers that only grow. ``messages`` that were given, and what they came to, one of these each.

    ``units`` were written, ``gaps`` of them behind a queue offset that never came. The others got none: ``repeats``
    were there already, ``batch_messages`` belong to a BatchConsumeQueue, ``nameless`` to a topic that no folder can be
    named after, ``left_out`` to a queue beyond ``queues_max``. What is no message yet, or was rolled back, is in none.
    """

    messages: int = 0
    units: int = 0
    repeats: int = 0
    gaps: int = 0
    batch_messages: int = 0
    nameless: int = 0
    left_out: int = 0
    expired_files: int = 0

    @property
    def without_unit(self) -> int:
        """Messages that enter a queue at the broker and have no unit here."""
        return self.batch_messages + self.nameless + self.left_out


class ConsumeQueueStore:
    """Builds into ``directory`` files of ``file_size`` bytes, a multiple of 20. Raises DiskError; one owner, no locks.

    ``files`` takes what is written, unless it is to become files.
    """

    def __init__(
        self, disk: Disk, directory: Path, file_size: int, queues_max: int, files: QueueFiles | None = None
    ) -> None:
        self._disk = disk
        self.directory = directory
        self.file_size = file_size
        self._file_units = file_size // UNIT_SIZE
        self._queues = Queues(directory, self._file_units, queues_max)
        self._files = files or QueueFiles(disk, directory, file_size) if files is None else files
        self._pending = PendingUnits()
        # (slot, first and last row of ``grouped``) of what was sorted and not written, the next one last.
        self._runs: list[tuple[int, int, int]] = []
        # How far a batch has come: the disk may refuse at any point.
        self._interrupted: tuple[DispatchBatch, int] | None = None
        self._marks: list[QueueMark] = []
        self._marked: tuple[QueueMark, ...] | None = ()
        self._changed: set[int] = set()
        self._min_phy_offset = 0
        # Queues that have a new last file: the one before may have expired long ago.
        self._rolled: set[int] = set()
        self._expired: dict[Path, None] = {}
        self._unreported: list[Path] = []
        self._messages = 0
        self._expired_files = 0
        self._limit: int | None = None

    def __repr__(self) -> str:
        return f"ConsumeQueueStore({self.directory}, queues={len(self._queues)}, {self.counters})"

    @property
    def counters(self) -> QueueCounters:
        """What has been done so far."""
        counts = self._pending.counts.tolist()
        return QueueCounters(
            self._messages,
            counts[UNITS],
            counts[REPEATS],
            counts[GAPS],
            counts[BATCH_MESSAGES],
            counts[NAMELESS],
            counts[LEFT_OUT],
            self._expired_files,
        )

    def __len__(self) -> int:
        return len(self._queues)

    def load(
        self,
        marks: Iterable[QueueMark],
        unsynced_files: Iterable[Path] = (),
        unsynced_directories: Iterable[Path] = (),
        limit: int | None = None,
    ) -> None:
        """Take over queues that are known to be as the marks say: after a clean stop, or after recovery.

        What recovery has changed and not synced is synced by the next flush. ``limit``: as in QueuesProgress.
        """
        self._limit = limit
        for mark in marks:
            self._queues.load(mark)
            self._marks.append(mark)
        self._marked = None
        for path in unsynced_files:
            self._files.files.add(path, self._files.serial)
        for path in unsynced_directories:
            self._files.directories.add(path, self._files.serial)

    def put_batch(self, batch: DispatchBatch) -> None:
        """RocketMQ's putMessagePositionInfo for each row, in order; the columns of a queue must be filled.

        After a DiskError the same batch may be given again: it goes on where it stopped.
        """
        row = 0
        if self._interrupted is not None and self._interrupted[0] is batch:
            row = self._interrupted[1]
            self._write_runs()
        numbers = self._queues.numbers(batch)
        while True:
            status, row = self._pending.put(batch, row, self._queues, numbers)
            if row == batch.rows:
                break
            if status == NEW_QUEUE:
                row += not self._begin_queue(batch, row)
                continue
            self._interrupted = (batch, row)
            self.publish()
        self._interrupted = None
        self._messages += batch.rows
        if self._queues.is_closed and self._pending.counts[LEFT_OUT]:
            self._limit = len(self._queues)

    def publish(self) -> None:
        """Write what has been collected: every reader sees it. After a DiskError it goes on where it stopped."""
        self._write_runs()
        self._runs = self._pending.group(self._queues)
        self._write_runs()

    def mark(self) -> QueuesProgress:
        """What stands now, published; a queue that has not changed keeps its QueueMark."""
        self.publish()
        for slot in sorted(self._changed):
            mark = self._queues.mark(slot)
            if slot < len(self._marks):
                self._marks[slot] = mark
            else:
                self._marks.append(mark)
        if self._changed or self._marked is None:
            self._marked = tuple(self._marks)
            self._changed.clear()
        files = self._files
        progress = QueuesProgress(
            self._marked,
            files.files.paths(),
            files.directories.paths(),
            tuple(self._expired),
            files.serial,
            self._limit,
        )
        files.serial += 1
        return progress

    @property
    def unsynced_files(self) -> tuple[Path, ...]:
        """The files that were written and are not known to be durable."""
        return self._files.files.paths()

    def synced(self, progress: QueuesProgress) -> None:
        """The flusher has made this durable; what was written since is not."""
        self._files.files.synced(progress.unsynced_files, progress.serial)
        self._files.directories.synced(progress.unsynced_directories, progress.serial)

    def delete_expired(self, min_phy_offset: int) -> list[str]:
        """The log begins at ``min_phy_offset`` now: leave out what only points before it (spec 5.5, 5.8).

        The names, below ``directory``, of files that are left out from now on; they go with ``remove_expired``, once a
        frontier without them is durable. Each queue keeps its last file, whatever is in it.
        """
        self.publish()
        is_later = min_phy_offset > self._min_phy_offset
        for slot in range(len(self._queues)) if is_later else sorted(self._rolled):
            paths = expire_queue(self._disk, self._queues, slot, min_phy_offset)
            if paths is None:
                continue
            self._changed.add(slot)
            for path in paths:
                self._files.expire(path)
                self._expired[path] = None
            self._unreported += paths
        self._min_phy_offset = max(min_phy_offset, self._min_phy_offset)
        self._rolled.clear()
        names = [str(path.relative_to(self.directory)) for path in self._unreported]
        self._expired_files += len(names)
        self._unreported.clear()
        return names

    def begin_anew(self) -> None:
        """The log from here on goes on behind messages that nobody has read and that have expired.

        Every unit there is has expired, too; a queue that went on would hold its next messages in the places of the
        lost ones. So all files expire, and each queue begins with its next message, as one that starts late.
        """
        queues = self._queues
        for slot in range(len(queues)):
            for offset in range(queues.first[slot], queues.written[slot], self._file_units):
                path = self._files.path(queues.directories[slot], offset)
                self._files.expire(path)
                self._expired[path] = None
                self._unreported.append(path)
        self._queues = Queues(self.directory, self._file_units, queues.queues_max)
        self._pending.clear()
        self._rolled.clear()
        self._runs.clear()
        self._interrupted = None
        self._marks.clear()
        self._changed.clear()
        self._marked = None

    def remove_expired(self, paths: Iterable[Path]) -> None:
        """Remove files that no durable frontier names any more."""
        for path in paths:
            if path in self._expired:
                self._disk.unlink(path)
                del self._expired[path]

    def flush(self) -> None:
        """Publish and make everything durable."""
        progress = self.mark()
        for path in progress.unsynced_files:
            with self._disk.open_write(path) as file:
                file.fsync()
        for path in progress.unsynced_directories:
            self._disk.sync_dir(path)
        self.synced(progress)

    def close(self) -> None:
        """Close what is open; writes nothing."""
        self._files.close()

    def _begin_queue(self, batch: DispatchBatch, row: int) -> bool:
        # The row is the first one of a queue; False if it cannot have one.
        columns = batch.columns
        is_new = self._queues.begin(
            decode_utf8(batch.topics.raw_name(int(columns.topic_id[row]))),
            int(columns.queue_id[row]),
            int(columns.queue_offset[row]),
            int(columns.phy_offset[row]),
        )
        if not is_new:
            self._pending.counts[LEFT_OUT] += 1
        return is_new

    def _write_runs(self) -> None:
        while self._runs:
            slot, row, last = self._runs[-1]
            self._write_blanks(slot)
            offset = self._queues.written[slot]
            count = min(last - row, self._file_units - offset % self._file_units)
            self._write(slot, self._pending.grouped[row : row + count])
            if row + count == last:
                self._runs.pop()
                self._changed.add(slot)
            else:
                self._runs[-1] = (slot, row + count, last)

    def _write_blanks(self, slot: int) -> None:
        # A queue that starts late: what its first file holds before its first unit (spec 5.2, step 3).
        count = self._queues.min[slot] - self._queues.written[slot]
        if count > 0:
            self._write(slot, np.frombuffer(BLANK_UNIT * count, dtype=np.uint32).reshape(-1, 5))

    def _write(self, slot: int, units: NDArray[np.uint32]) -> None:
        queues = self._queues
        directory, offset = queues.directories[slot], queues.written[slot]
        if self._expired and offset % self._file_units == 0:
            self._expired.pop(self._files.path(directory, offset), None)  # of the same name, and made anew
        if offset % self._file_units == 0 and offset > queues.first[slot]:
            self._rolled.add(slot)
        self._files.write(directory, offset, units.data)
        queues.written[slot] += len(units)
