"""What the log comes to, held against the units that are there; nothing is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.commitlog.dispatch import DispatchBatch
from indexd.consumequeue.files import QueueFiles
from indexd.consumequeue.format import UNIT, UNIT_SIZE, QueueMark, Unit, queue_directory
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
        self._files = _ComparedFiles(disk, directory, file_size, marks)
        self._store = ConsumeQueueStore(disk, directory, file_size, queues_max, self._files)
        self._store.load(begins)

    def differs(self, batch: DispatchBatch) -> int | None:
        """The lowest physical offset that the units of ``batch``, or those in their places, name; None if all agree."""
        self._store.put_batch(batch)
        self._store.publish()
        return min((offset for difference in self.differences for offset in difference.phy_offsets), default=None)

    @property
    def differences(self) -> list[Difference]:
        """The first of each queue."""
        return list(self._files.differences.values())

    def more(self) -> list[Difference]:
        """Of each queue that holds units behind all that the log has given, the first of those."""
        reached = {(mark.topic, mark.queue_id): mark.max_offset for mark in self._store.mark().marks}
        found = []
        for mark in self._files.marks:
            offset = reached.get((mark.topic, mark.queue_id), mark.first_offset)
            directory = queue_directory(self._store.directory, mark.topic, mark.queue_id)
            if offset < mark.max_offset and directory not in self._files.differences:
                found.append(self._files.difference(directory, offset, b""))
        return found


@dataclass(frozen=True, slots=True)
class Difference:
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
        self.marks = tuple(marks)
        self._ends = {queue_directory(root, mark.topic, mark.queue_id): mark.max_offset for mark in self.marks}
        self.differences: dict[Path, Difference] = {}

    def write(self, directory: Path, offset: int, units: Buffer) -> None:
        wanted = bytes(units)
        if directory in self.differences or self._read(directory, offset, len(wanted)) == wanted:
            return
        for at in range(0, len(wanted), UNIT_SIZE):
            unit = wanted[at : at + UNIT_SIZE]
            if self._read(directory, offset + at // UNIT_SIZE, UNIT_SIZE) != unit:
                self.differences[directory] = self.difference(directory, offset + at // UNIT_SIZE, unit)
                return

    def difference(self, directory: Path, offset: int, wanted: bytes) -> Difference:
        """What is there and what should be, at unit ``offset`` of a queue."""
        found = self._read(directory, offset, UNIT_SIZE)
        units = [Unit(*UNIT.unpack(data)) if len(data) == UNIT_SIZE else None for data in (wanted, found)]
        return Difference(self.path(directory, offset), offset * UNIT_SIZE % self._size, *units)

    def _read(self, directory: Path, offset: int, size: int) -> bytes:
        # As far as the mark says that there are units.
        size = min(size, max(self._ends.get(directory, 0) - offset, 0) * UNIT_SIZE)
        try:
            with self._reads.open_read(self.path(directory, offset)) as file:
                return file.pread(size, offset * UNIT_SIZE % self._size)
        except DiskError as error:
            if not error.is_missing:
                raise
            return b""
