"""ConsumeQueues and sparse indexes compared with the log: units and entries that it comes to against what is there.

They are built once more, and where they would be written, the files are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.consumequeue.check import kept_queues
from indexd.consumequeue.format import UNIT, UNIT_SIZE, QueuesMark, Unit, file_name, queue_directory
from indexd.consumequeue.store import ConsumeQueueStore, QueueFiles
from indexd.errors import MissingOk
from indexd.findings import Findings
from indexd.flush.frontier import Frontier
from indexd.output import RecoveryScope, Unsynced
from indexd.sparse.format import OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE, SegmentMark, SparseMark, index_name
from indexd.sparse.service import GrowingSegment
from indexd.storage.disk import Disk

if TYPE_CHECKING:
    from typing_extensions import Buffer


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
        with MissingOk(), self._reads.open_read(self.path(directory, offset)) as file:
            return file.pread(size, offset * UNIT_SIZE % self._size)
        return b""


class QueueFindings:
    """What verify says of the ConsumeQueues, compared with the log from ``begin`` to the frontier's end."""

    name, folder = "consumeQueue", "consumequeue"

    def __init__(self, config: Config, disk: Disk, root: Path, frontier: Frontier, begin: int) -> None:
        self.findings, self.left_out = Findings(), list[str]()
        self._root, self._end = root, frontier.phy_offset
        part: QueuesMark = frontier.outputs[self.name]
        # Of each queue, what it holds of messages before ``begin`` is not asked.
        held, _ = kept_queues(disk, root, part, RecoveryScope(begin, begin, begin, is_unclean=False))
        self._queues = QueueComparison(disk, root, part.limit or config.outputs.queues_max, held, part)

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


@dataclass(frozen=True, slots=True)
class EntryDifference:
    """From byte ``position`` of a file on it is not what the log comes to; ``text`` says how."""

    name: str
    position: int
    text: str


class SparseComparison:
    """Takes the batches of the log from the begin of a segment on; gives each segment's differences when it is over.

    ``gone`` are files that were not there when they were to be read: they may have expired meanwhile.
    """

    def __init__(self, disk: Disk, directory: Path, segment_size: int, mark: SparseMark, begin: int) -> None:
        self._disk, self._directory, self._segment_size, self._mark = disk, directory, segment_size, mark
        self._marks = {segment.base: segment for segment in mark.segments if segment.base >= begin}
        self._segment: GrowingSegment | None = None
        self._files: tuple[_ComparedIndex, _ComparedIndex] | None = None
        self.gone: list[str] = []

    def take(self, batch: DispatchBatch) -> Iterator[EntryDifference]:
        """The messages of the next stretch; what differs in the segments that end before it."""
        offsets, row = batch.columns.phy_offset, 0
        while row < batch.rows:
            base = int(offsets[row]) - int(offsets[row]) % self._segment_size
            if self._segment is None or base != self._segment.base:
                yield from self._end()
                wanted = self._marks.get(base) or SegmentMark(base, 0, 0, 0)
                self._files = (
                    _ComparedIndex(self._disk, self._directory, wanted, 0, OFFSET_ENTRY_SIZE),
                    _ComparedIndex(self._disk, self._directory, wanted, 1, TIME_ENTRY_SIZE),
                )
                self._segment = GrowingSegment(SegmentMark(base, 0, 0, 0), self._segment_size, self._mark.interval)
            row = self._segment.put(batch.columns, row, batch.rows)
            self._segment.write(self._compare)

    def _compare(self, kind: int, position: int, data: bytes) -> None:
        if self._files is not None:
            self._files[kind].compare(position, data)

    def finish(self) -> Iterator[EntryDifference]:
        """No message is left: what differs in the last segment, and segments of which no message came."""
        yield from self._end()
        for base in self._marks:
            yield EntryDifference(index_name(base), 0, "the log has no message of this segment")

    def _end(self) -> Iterator[EntryDifference]:
        segment, self._segment = self._segment, None
        if segment is None or self._files is None:
            return
        wanted = self._marks.pop(segment.base, None)
        is_growing = wanted is not None and wanted.base == self._mark.segments[-1].base
        active = self._mark.active if is_growing else None
        if active is None:
            segment.end()
        segment.write(self._compare)
        found = segment.mark()
        if wanted is None:
            why = f"the segment has {found.messages} messages, and the frontier names no sparse indexes of it"
            yield EntryDifference(index_name(segment.base), 0, why)
            return
        for file in self._files:
            if file.is_gone:
                self.gone.append(file.name)
            elif (text := file.difference()) is not None:
                yield EntryDifference(file.name, file.differs_at * file.entry_size, text)
        # What the frontier alone says.
        if wanted.messages != found.messages:
            why = f"the segment has {found.messages} messages, but the frontier says {wanted.messages}"
            yield EntryDifference(index_name(segment.base), 0, why)
        elif active is not None and active != segment.active():
            why = f"building would go on with {active}, but the log comes to {segment.active()}"
            yield EntryDifference(index_name(segment.base), 0, why)


class _ComparedIndex:
    # What would be written is compared with what is there, as far as the mark says that there are entries.
    def __init__(self, disk: Disk, directory: Path, mark: SegmentMark, kind: int, entry_size: int) -> None:
        self.entry_size, self.entries = entry_size, 0
        self.name, self._size = mark.files[kind]
        self.path = directory / self.name
        self.is_gone = False
        #: The first entry that is not what the log comes to; so many as were compared, without one.
        self.differs_at = 0
        self._disk = disk

    def compare(self, position: int, data: bytes) -> None:
        """These entries come next."""
        first, self.entries = self.entries, self.entries + len(data) // self.entry_size
        if self.is_gone or self.differs_at < first:
            return
        self.is_gone = True
        with MissingOk(), self._disk.open_read(self.path) as file:
            found = file.pread(max(min(position + len(data), self._size) - position, 0), position)
            here, there = (np.frombuffer(part, np.uint8, min(len(found), len(data))) for part in (data, found))
            wrong = np.flatnonzero(here != there)
            self.differs_at = (position + int(wrong[0] if len(wrong) else len(here))) // self.entry_size
            self.is_gone = False

    def difference(self) -> str | None:
        """What the first one is, once all entries have come."""
        there = self._size // self.entry_size
        if self.differs_at < self.entries:
            return f"entry {self.differs_at} of {there} is not what the log comes to"
        return f"{there} entries, but the log comes to {self.entries}" if self.entries < there else None


class SparseFindings:
    """What verify says of the sparse indexes, compared with the log from ``begin`` to the frontier's end."""

    name, folder = "sparse", "sparse"

    def __init__(self, _: Config, disk: Disk, root: Path, frontier: Frontier, begin: int) -> None:
        self.findings, self.left_out = Findings(), list[str]()
        mark: SparseMark = frontier.outputs[self.name]
        self._is_ahead = mark.phy_offset > frontier.phy_offset
        self._sparse = SparseComparison(disk, root, frontier.segment_size, mark, begin)

    def take(self, batch: DispatchBatch) -> None:
        """The next range of the log."""
        self._add(self._sparse.take(batch))

    def finish(self, *, is_whole: bool) -> None:
        """No message is left; not ``is_whole``: the log could not be read to the end."""
        if is_whole and self._is_ahead:
            self.left_out.append("the growing pair of sparse indexes: the disk refused before all of a drain was built")
        elif is_whole:
            self._add(self._sparse.finish())
        if gone := self._sparse.gone:
            self.left_out.append(f"{len(gone)} files of sparse indexes, {gone[0]} first: they are not there")

    def _add(self, differences: Iterator[EntryDifference]) -> None:
        for found in differences:
            self.findings.add(f"sparse/{found.name}", found.position, "entry-log", found.text)
