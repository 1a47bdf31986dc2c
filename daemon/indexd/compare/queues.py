"""ConsumeQueues compared with the log: the units that the log comes to against those that are there.

The store builds them once more, and where it would write, the files are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.consumequeue.check import kept_queues, sound_marks
from indexd.consumequeue.format import UNIT, UNIT_SIZE, QueuesMark, Unit, file_name, queue_directory
from indexd.consumequeue.store import ConsumeQueueStore, QueueFiles
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.flush.frontier import Frontier
from indexd.output import LogBounds, RecoveryScope, Unsynced
from indexd.storage.disk import Disk

if TYPE_CHECKING:
    from indexd.storage.disk import Buffer


class QueueComparison:
    """Takes the batches of the log from where ``begins`` end, and compares with what ``marks`` say is there.

    Both name the same queues; ``begins`` what each holds of the messages before the first batch. Raises DiskError.
    """

    def __init__(self, disk: Disk, directory: Path, queues_max: int, begins: QueuesMark, marks: QueuesMark) -> None:
        self._disk, self._file_size = disk, marks.file_size
        self._files = _ComparedFiles(disk, directory, marks)
        self._store = ConsumeQueueStore(disk, directory, marks.file_size, queues_max, self._files)
        self._begins = {mark[:2]: mark for mark in begins.queues}
        self._store.load(begins._replace(queues=tuple(self._begins.values()), limit=None))

    def differs(self, batch: DispatchBatch) -> int | None:
        """The lowest physical offset that the units of ``batch``, or those in their places, name; None if all agree."""
        self._store.build(batch)
        self._store.publish()
        return min((offset for difference in self.differences for offset in difference.phy_offsets), default=None)

    @property
    def differences(self) -> list[UnitDifference]:
        """The first of each queue."""
        return list(self._files.differences.values())

    def more(self) -> list[UnitDifference]:
        """Of each queue that holds units behind all that the log has given, the first of those."""
        reached = {mark[:2]: mark.max_offset for mark in self._store.mark().held.queues}
        found = []
        for directory, mark in self._files.marks.items():
            offset = reached.get(mark[:2], mark.first_offset)
            if offset < mark.max_offset and directory not in self._files.differences:
                found.append(self._files.difference(directory, offset, b""))
        return found

    def hidden(self) -> list[UnitDifference]:
        """Of each queue whose mark calls units expired that the log has given, the first of those."""
        begun = {mark[:2]: mark.min_offset for mark in self._store.mark().held.queues}
        found = []
        for directory, mark in self._files.marks.items():
            # Behind what it held before the first batch; or where it has begun since.
            begin = self._begins.get(mark[:2])
            offset = begun.get(mark[:2], mark.min_offset) if begin is None else begin.max_offset
            if offset < mark.min_offset and directory not in self._files.differences:
                found.append(self._files.difference(directory, offset, b""))
        return found

    def is_whole(self, difference: UnitDifference) -> bool:
        """Whether the files of its queue are there, with all units; one that lost some cannot be compared."""
        folder = difference.path.parent
        mark = self._files.marks.get(folder)
        if mark is None:
            return True
        sizes = dict(self._disk.list_dir(folder)) if self._disk.exists(folder) else {}
        first, end = mark.first_offset * UNIT_SIZE, mark.max_offset * UNIT_SIZE
        return all(
            sizes.get(file_name(begin), 0) >= min(end - begin, self._file_size)
            for begin in range(first, end, self._file_size)
        )


@dataclass(frozen=True, slots=True)
class UnitDifference:
    """At byte ``position`` of the file at ``path`` stands ``found``, and the log comes to ``wanted``; None: nothing."""

    path: Path
    position: int
    wanted: Unit | None
    found: Unit | None

    @property
    def phy_offsets(self) -> list[int]:
        """Where in the log the two say that a message stands."""
        units = (self.wanted, self.found)
        return [unit.phy_offset for unit in units if unit is not None and unit.is_valid and not unit.is_blank]


class _ComparedFiles(QueueFiles):
    # Where units would be written, those that are there are read.
    def __init__(self, disk: Disk, root: Path, marks: QueuesMark) -> None:
        super().__init__(disk, root, marks.file_size, Unsynced())
        self._reads = disk
        self._size = marks.file_size
        self.marks = {queue_directory(root, mark.topic, mark.queue_id): mark for mark in marks.queues}
        self.differences: dict[Path, UnitDifference] = {}

    def write(self, directory: Path, offset: int, units: Buffer) -> None:
        wanted = bytes(units)
        if directory in self.differences or self._read(directory, offset, len(wanted)) == wanted:
            return
        for at in range(0, len(wanted), UNIT_SIZE):
            unit = wanted[at : at + UNIT_SIZE]
            if self._read(directory, offset + at // UNIT_SIZE, UNIT_SIZE) != unit:
                self.differences[directory] = self.difference(directory, offset + at // UNIT_SIZE, unit)
                return

    def difference(self, directory: Path, offset: int, wanted: bytes) -> UnitDifference:
        """What is there and what should be, at unit ``offset`` of a queue."""
        found = self._read(directory, offset, UNIT_SIZE)
        units = [Unit(*UNIT.unpack(data)) if len(data) == UNIT_SIZE else None for data in (wanted, found)]
        return UnitDifference(self.path(directory, offset), offset * UNIT_SIZE % self._size, *units)

    def _read(self, directory: Path, offset: int, size: int) -> bytes:
        # As far as the mark says that there are units.
        end = self.marks[directory].max_offset if directory in self.marks else 0
        size = min(size, max(end - offset, 0) * UNIT_SIZE)
        if size == 0:
            return b""
        try:
            with self._reads.open_read(self.path(directory, offset)) as file:
                return file.pread(size, offset * UNIT_SIZE % self._size)
        except DiskError as error:
            if not error.is_missing:
                raise
            return b""


class QueueFindings:
    """What verify says of the ConsumeQueues, compared with the log from ``begin`` to the frontier's end."""

    name, folder = "consumeQueue", "consumequeue"

    def __init__(self, config: Config, disk: Disk, root: Path, frontier: Frontier, begin: int) -> None:
        self.findings, self.left_out = Findings(), list[str]()
        self._root, self._end = root, frontier.phy_offset
        part: QueuesMark = frontier.outputs[self.name]
        bounds = LogBounds(frontier.begin_offset, frontier.phy_offset, frontier.segment_size, 0)
        marks = part._replace(queues=sound_marks(part, bounds))
        # Of each queue, what it holds of messages before ``begin`` is not asked.
        held, _ = kept_queues(disk, root, marks, RecoveryScope(begin, begin, begin, is_unclean=False))
        self._queues = QueueComparison(disk, root, part.limit or config.outputs.queues_max, held, marks)

    def take(self, batch: DispatchBatch) -> None:
        """The next range of the log."""
        self._queues.differs(batch)

    def finish(self, *, is_whole: bool) -> None:
        """No message is left; not ``is_whole``: the log could not be read to the end."""
        queues = self._queues
        rows = [("unit-log", found) for found in queues.differences]
        if is_whole:
            # What a drain that waits for the disk has written lies behind the frontier's physical offset.
            rows += [("unit-log", found) for found in queues.more() if min(found.phy_offsets, default=0) < self._end]
            rows += [("queue-min", found) for found in queues.hidden()]
        broken = 0
        for what, found in rows:
            if not queues.is_whole(found):
                broken += 1
                continue
            text = f"the unit is {_words(found.found)}, by the log it is {_words(found.wanted)}"
            if what == "queue-min":
                text = f"{_words(found.found)} is in the log, and called expired"
            name = f"consumequeue/{found.path.relative_to(self._root)}"
            self.findings.add(name, found.position, what, text)
        if broken:
            self.left_out.append(f"{broken} queues were not compared to their ends: some of their files are not there")


def _words(unit: Unit | None) -> str:
    return "none" if unit is None else f"phy offset {unit.phy_offset}, size {unit.size}, tags code {unit.tags_code}"
