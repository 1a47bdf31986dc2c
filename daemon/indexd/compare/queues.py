"""ConsumeQueues compared with the log: the units that the log comes to against those that are there.

The store builds them once more, and where it would write, the files are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.commitlog.batcher import DispatchBatch
from indexd.consumequeue.files import QueueFiles
from indexd.consumequeue.format import UNIT, UNIT_SIZE, QueueMark, Unit, file_name, queue_directory
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import DiskError
from indexd.storage.disk import Disk

if TYPE_CHECKING:
    from indexd.storage.disk import Buffer


class QueueComparison:
    """Takes the batches of the log from where ``begins`` end, and compares with what ``marks`` say is there.

    Both name the same queues; ``begins`` what each holds of the messages before the first batch. Raises DiskError.
    """

    def __init__(
        self,
        disk: Disk,
        directory: Path,
        file_size: int,
        queues_max: int,
        begins: Iterable[QueueMark],
        marks: Iterable[QueueMark],
    ) -> None:
        self._disk, self._file_size = disk, file_size
        self._files = _ComparedFiles(disk, directory, file_size, marks)
        self._store = ConsumeQueueStore(disk, directory, file_size, queues_max, self._files)
        self._begins = {mark[:2]: mark for mark in begins}
        self._store.load(self._begins.values())

    def __repr__(self) -> str:
        return f"QueueComparison({self._store}, differences={len(self._files.differences)})"

    def differs(self, batch: DispatchBatch) -> int | None:
        """The lowest physical offset that the units of ``batch``, or those in their places, name; None if all agree."""
        self._store.put_batch(batch)
        self._store.publish()
        return min((offset for difference in self.differences for offset in difference.phy_offsets), default=None)

    @property
    def differences(self) -> list[UnitDifference]:
        """The first of each queue."""
        return list(self._files.differences.values())

    def more(self) -> list[UnitDifference]:
        """Of each queue that holds units behind all that the log has given, the first of those."""
        reached = {mark[:2]: mark.max_offset for mark in self._store.mark().marks}
        found = []
        for directory, mark in self._files.marks.items():
            offset = reached.get(mark[:2], mark.first_offset)
            if offset < mark.max_offset and directory not in self._files.differences:
                found.append(self._files.difference(directory, offset, b""))
        return found

    def hidden(self) -> list[UnitDifference]:
        """Of each queue whose mark calls units expired that the log has given, the first of those."""
        begun = {mark[:2]: mark.min_offset for mark in self._store.mark().marks}
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
    def __init__(self, disk: Disk, root: Path, file_size: int, marks: Iterable[QueueMark]) -> None:
        super().__init__(disk, root, file_size)
        self._reads = disk
        self._size = file_size
        self.marks = {queue_directory(root, mark.topic, mark.queue_id): mark for mark in marks}
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
