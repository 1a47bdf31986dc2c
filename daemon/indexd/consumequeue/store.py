"""ConsumeQueueStore: all ConsumeQueues of a data directory, built from batches (spec rocketmq-store 5).

Units are collected until a buffer is full or ``publish`` is called, and then written queue by queue. There may be
thousands of queues, so a file is open only for as long as a write takes. It is made with its whole size and lies on the
disk only where it was written: a disk that is full shows at a write, as a DiskError, and what was written before stays.
Messages of BatchConsumeQueue topics (inner batches) are recognised and get no unit: their files are not built.
ConsumeQueueExt is off in a broker unless it is asked for, and is not built either: a tags code is always the hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.decoder import decode_utf8
from indexd.config import Config
from indexd.consumequeue.check import check_queue_marks, check_queues, recover_queues, sound_marks
from indexd.consumequeue.format import BLANK_UNIT, UNIT_SIZE, QueueMark, QueuesMark, file_name
from indexd.consumequeue.kernel import LEFT_OUT, MOVED_FROM, NEW_QUEUE
from indexd.consumequeue.queues import PendingUnits, Queues, expire_queue, load_kernels
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.output import CheckScope, LogBounds, Output, OutputMark, OutputRecovery, RecoveryScope, Row, Unsynced
from indexd.storage.disk import Disk, DiskFile

if TYPE_CHECKING:
    from indexd.storage.disk import Buffer


class QueueFiles:
    """Writes the files of queues below ``root``, noting in ``unsynced`` what was changed.

    Raises DiskError; after one the same write may be tried again. One owner, no locks.
    """

    def __init__(self, disk: Disk, root: Path, file_size: int, unsynced: Unsynced) -> None:
        self._disk, self._root, self._file_size, self._unsynced = disk, root, file_size, unsynced
        self._has_root = False

    def write(self, directory: Path, offset: int, units: Buffer) -> None:
        """Write whole units, all of one file, at unit ``offset`` of the queue; a file that begins there is made."""
        path, position = self.path(directory, offset), offset * UNIT_SIZE % self._file_size
        with self._made(path) if position == 0 else self._disk.open_write(path) as file:
            file.pwrite(units, position)
        self._unsynced.add(path)

    def path(self, directory: Path, offset: int) -> Path:
        """The file that holds unit ``offset`` of the queue in ``directory``."""
        return directory / file_name(offset * UNIT_SIZE // self._file_size * self._file_size)

    def _made(self, path: Path) -> DiskFile:
        if not self._has_root:
            self._disk.make_dir(self._root)
            self._has_root = True
        # Thousands of queues may appear at once: their directories are synced by the next flush, together. That goes
        # for those that are there already, too: whoever made them may have died before.
        self._disk.make_dir(path.parent, durable=False)
        for directory in (path.parent.parent, self._root, path.parent):
            self._unsynced.add_directory(directory)
        # Left of an attempt that failed, it holds nothing.
        file, _ = self._disk.open_or_create(path)
        try:
            file.truncate(0)
            file.truncate(self._file_size)
        except DiskError:
            file.close()
            raise
        return file


_MOVED_SHOWN = 1000


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


class ConsumeQueueStore(Output[QueuesMark]):
    """Builds into ``directory`` files of ``file_size`` bytes, a multiple of 20, of at most ``queues_max`` queues."""

    name, label, folder = "consumeQueue", "cq", "consumequeue"
    is_compared = True

    def __init__(
        self, disk: Disk, directory: Path, file_size: int, queues_max: int, files: QueueFiles | None = None
    ) -> None:
        super().__init__(disk, directory)
        self.file_size = file_size
        self._file_units = file_size // UNIT_SIZE
        self._queues = Queues(directory, self._file_units, queues_max)
        #: Takes what is written.
        self._files = QueueFiles(disk, directory, file_size, self.unsynced) if files is None else files
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
        self._unreported: list[str] = []
        self._messages = 0
        self._expired_files = 0
        self._limit: int | None = None
        # Of so many queues as there may be, counted once while they stay the same.
        self._totals: tuple[tuple[QueueMark, ...], Row] = ((), {})

    @classmethod
    def of(cls, config: Config, disk: Disk, directory: Path) -> Self:
        """An empty one, as configured."""
        return cls(disk, directory, config.store.consume_queue_file_size, config.outputs.queues_max)

    @classmethod
    def is_wanted(cls, config: Config) -> bool:
        """Whether the configuration asks for it."""
        return config.outputs.consume_queue

    load_kernels = staticmethod(load_kernels)

    @property
    def counters(self) -> QueueCounters:
        """What has been done so far."""
        units, repeats, gaps, batch_messages, nameless, left_out = self._pending.counts.tolist()
        return QueueCounters(
            self._messages, units, repeats, gaps, batch_messages, nameless, left_out, self._expired_files
        )

    def __len__(self) -> int:
        return len(self._queues)

    @property
    def empty(self) -> QueuesMark:
        """No queue."""
        return QueuesMark(self.file_size)

    def built_with(self, held: QueuesMark) -> tuple[str, int, int]:
        """The size of a file."""
        return "consume_queue_file_size", held.file_size, self.file_size

    def load(self, held: QueuesMark) -> None:
        """Take over queues that are known to be as the marks say: after a clean stop, or after recovery."""
        self._limit = held.limit
        for mark in held.queues:
            self._queues.load(mark)
            self._marks.append(mark)
        self._marked = None

    def build(self, batch: DispatchBatch) -> None:
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

    def mark(self) -> OutputMark[QueuesMark]:
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
        return self._mark(QueuesMark(self.file_size, self._marked, self._limit))

    def expire(self, min_phy_offset: int) -> list[str]:
        """The log begins at ``min_phy_offset`` now: leave out what only points before it (spec 5.5, 5.8).

        Each queue keeps its last file, whatever is in it.
        """
        self.publish()
        is_later = min_phy_offset > self._min_phy_offset
        for slot in range(len(self._queues)) if is_later else sorted(self._rolled):
            paths = expire_queue(self._disk, self._queues, slot, min_phy_offset)
            if paths is None:
                continue
            self._changed.add(slot)
            self._unreported += self._leave_out(paths)
        self._min_phy_offset = max(min_phy_offset, self._min_phy_offset)
        self._rolled.clear()
        names, self._unreported = self._unreported, []
        self._expired_files += len(names)
        return names

    def begin_anew(self) -> None:
        """The log from here on goes on behind messages that nobody has read and that have expired.

        Every unit there is has expired, too; a queue that went on would hold its next messages in the places of the
        lost ones. So all files expire, and each queue begins with its next message, as one that starts late.
        """
        queues = self._queues
        for slot in range(len(queues)):
            offsets = range(queues.first[slot], queues.written[slot], self._file_units)
            self._unreported += self._leave_out(self._files.path(queues.directories[slot], at) for at in offsets)
        self._queues = Queues(self.directory, self._file_units, queues.queues_max)
        self._pending.clear()
        self._rolled.clear()
        self._runs.clear()
        self._interrupted = None
        self._marks.clear()
        self._changed.clear()
        self._marked = None

    def close(self) -> None:
        """Nothing is open."""

    def recover(self, held: QueuesMark | None, scope: RecoveryScope) -> OutputRecovery[QueuesMark]:
        """What is left of the queues; those that were left out for want of room begin now where there is some."""
        return recover_queues(self._disk, self.directory, held, self.file_size, scope, self._queues.queues_max)

    def check(self, held: QueuesMark, scope: CheckScope) -> Findings:
        """Every unit of every queue; nothing else there."""
        marks = sound_marks(held, scope.bounds)
        is_owned = not scope.is_complete or len(marks) < len(held.queues)
        return check_queues(
            self._disk, self.directory, held.file_size, marks,
            is_at_rest=scope.is_at_rest, is_owned=is_owned, on_bytes=scope.on_bytes,
        )  # fmt: skip

    def check_mark(self, held: QueuesMark, bounds: LogBounds) -> list[str]:
        """Each queue's numbers."""
        return check_queue_marks(held, bounds)

    def parts(self, held: QueuesMark) -> list[tuple[tuple[str, int], QueuesMark]]:
        """Each queue."""
        return [(mark[:2], held._replace(queues=(mark,))) for mark in sound_marks(held)]

    def totals(self, held: QueuesMark) -> Row:
        """A queue has as many files as its units take."""
        marks = held.queues
        if self._totals[0] is not marks or not self._totals[1]:
            row = {
                "files": sum(-(-(mark.max_offset - mark.first_offset) // self._file_units) for mark in marks),
                "entries": sum(mark.max_offset - mark.min_offset for mark in marks),
                "bytes": UNIT_SIZE * sum(mark.max_offset - mark.first_offset for mark in marks),
                "fillRatio": None,
            }
            self._totals = (marks, row)
        return self._totals[1]

    def figures(self) -> Row:
        """Units, and the messages that got none, by why."""
        counters = self.counters
        return {
            "consumeQueues": len(self),
            "consumeQueueUnits": counters.units,
            "consumeQueueGaps": counters.gaps,
            "consumeQueuesMoved": self._moved(),
            "consumeQueueRepeats": counters.repeats,
            "batchMessages": counters.batch_messages,
            "leftOutMessages": counters.nameless + counters.left_out,
        }

    def _moved(self) -> list[tuple[str, int, int]]:
        # Topic, queue id and from where on in the log; the first ones, for a status.
        moved = self._queues.state[: len(self), MOVED_FROM]
        slots = np.flatnonzero(moved >= 0)[:_MOVED_SHOWN].tolist()
        return [(*self._queues.names[slot], int(moved[slot])) for slot in slots]

    def left_out(self) -> dict[str, int]:
        """How many messages have no unit, by why."""
        counters = self.counters
        return {
            "its topic is no folder's name": counters.nameless,
            "queues_max is reached, or its queue offset is none that a file can hold": counters.left_out,
            "its topic has batch consume queues, which are not built": counters.batch_messages,
        }

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
