"""ConsumeQueues and sparse indexes compared with the log: units and entries that it comes to against what is there.

They are built once more on a disk that writes nothing: where a builder would write, it reads what is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.consumequeue.check import kept_queues
from indexd.consumequeue.format import UNIT, UNIT_SIZE, QueueMark, QueuesMark, Unit, file_name, queue_directory
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import MissingOk
from indexd.findings import Findings
from indexd.flush.frontier import Frontier
from indexd.output import RecoveryScope
from indexd.sparse.format import OFFSET_ENTRY_SIZE, OFFSET_SUFFIX, TIME_ENTRY_SIZE, SegmentMark, SparseMark, index_name
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk, DiskFile

if TYPE_CHECKING:
    from typing_extensions import Buffer


class Difference(NamedTuple):
    """At byte ``position`` of the file at ``path`` stands the entry ``found``, and the log comes to ``wanted``.

    Either is shorter than an entry, or empty, where nothing stands there, or nothing should.
    """

    path: Path
    position: int
    wanted: bytes
    found: bytes


class ComparingDisk(Disk):
    """Compares what is to be written with what ``disk`` has, and notes the first difference of each file.

    ``extent`` says of a path how many bytes count there, and how many of them are an entry. ``gone`` are files that are
    not there, or too short for that: they may have expired meanwhile.
    """

    def __init__(self, disk: Disk, extent: Callable[[Path], tuple[int, int]]) -> None:
        self._reads, self._extent = disk, extent
        self.differences: dict[Path, Difference] = {}
        self.gone: list[Path] = []

    def open_write(self, path: Path, *, create: bool = False) -> DiskFile:  # noqa: ARG002 - as of every disk
        """A file that may be written to and stays as it is, be it there or not."""
        return _ComparedFile(path, self)

    def make_dir(self, path: Path, *, durable: bool = True) -> None:
        """Nothing is made."""

    def held(self, path: Path, position: int, size: int) -> bytes:
        """Up to ``size`` bytes of a file, as far as they count."""
        size, found = min(size, max(self._extent(path)[0] - position, 0)), b""
        with MissingOk(), self._reads.open_read(path) as file:
            found = file.pread(size, position)
        if len(found) < size and path not in self.gone:
            self.gone.append(path)
        return found

    def compare(self, path: Path, position: int, wanted: bytes) -> None:
        """The file should have these bytes there."""
        if path in self.differences or (found := self.held(path, position, len(wanted))) == wanted:
            return
        width = self._extent(path)[1]
        same = next(at for at in range(0, len(wanted), width) if wanted[at : at + width] != found[at : at + width])
        entry = slice(same, same + width)
        self.differences[path] = Difference(path, position + same, wanted[entry], found[entry])


class _ComparedFile(DiskFile):
    def __init__(self, path: Path, disk: ComparingDisk) -> None:
        super().__init__(path, -1, disk)
        self._comparing = disk

    def pwrite(self, data: Buffer, position: int) -> None:
        self._comparing.compare(self.path, position, bytes(data))

    def truncate(self, size: int) -> None:
        """It stays as long as it is."""


class QueueComparison:
    """Takes the batches of the log from where ``begins`` end, and compares with what ``marks`` say is there.

    Both name the same queues; ``begins`` what each holds of the messages before the first batch. Raises DiskError.
    """

    def __init__(self, disk: Disk, directory: Path, queues_max: int, begins: QueuesMark, marks: QueuesMark) -> None:
        self._file_size, self._begins = marks.file_size, begins
        self._marks = {queue_directory(directory, mark.topic, mark.queue_id): mark for mark in marks.queues}
        self._disk = ComparingDisk(disk, self._extent)
        self._store = ConsumeQueueStore(self._disk, directory, marks.file_size, queues_max)
        self._store.load(begins._replace(limit=None))
        self.left_out: list[str] = []

    def _extent(self, path: Path) -> tuple[int, int]:
        mark = self._marks.get(path.parent)
        return 0 if mark is None else mark.max_offset * UNIT_SIZE - int(path.name), UNIT_SIZE

    def take(self, batch: DispatchBatch) -> None:
        """The next range of the log."""
        self._store.build(batch)
        self._store.publish()

    def differs(self, batch: DispatchBatch) -> int | None:
        """The lowest physical offset that the units of ``batch``, or those in their places, name; None if all agree."""
        self.take(batch)
        return min((offset for found in self._disk.differences.values() for offset in phy_offsets(found)), default=None)

    def more(self) -> list[Difference]:
        """Of each queue that holds units behind all that the log has given, the first of those."""
        reached = {mark[:2]: mark.max_offset for mark in self._store.mark().held.queues}
        marks = self._marks.values()
        return self._first_units((mark, reached.get(mark[:2], mark.first_offset), mark.max_offset) for mark in marks)

    def _hidden(self) -> list[Difference]:
        # Of each queue whose mark calls units expired that the log has given, the first of those: behind what it held
        # before the first batch, or where it has begun since.
        begun = {mark[:2]: mark.min_offset for mark in self._store.mark().held.queues}
        begun |= {mark[:2]: mark.max_offset for mark in self._begins.queues}
        marks = self._marks.values()
        return self._first_units((mark, begun.get(mark[:2], mark.min_offset), mark.min_offset) for mark in marks)

    def _first_units(self, ranges: Iterable[tuple[QueueMark, int, int]]) -> list[Difference]:
        # Of each range that is not empty the first unit, but of queues that differ already.
        differing, found = {path.parent for path in self._disk.differences}, []
        folders = {mark: folder for folder, mark in self._marks.items() if folder not in differing}
        for mark, first, end in ranges:
            if first < end and mark in folders:
                base = first * UNIT_SIZE // self._file_size * self._file_size
                path, position = folders[mark] / file_name(base), first * UNIT_SIZE - base
                found.append(Difference(path, position, b"", self._disk.held(path, position, UNIT_SIZE)))
        return found

    def finish(self, end: int | None) -> Findings:
        """What differs. ``end``: where the frontier ends in the log; None if the log could not be read up to there."""
        findings, firsts = Findings(), dict[Path, Difference]()
        for found in self._disk.differences.values():
            firsts.setdefault(found.path.parent, found)
        rows = [("unit-log", found) for found in firsts.values()]
        if end is not None:
            # What a drain that waits for the disk has written lies behind the frontier's physical offset.
            rows += [("unit-log", found) for found in self.more() if min(phy_offsets(found), default=0) < end]
            rows += [("queue-min", found) for found in self._hidden()]
        for what, found in rows:
            text = f"the unit is {_words(found.found)}, by the log it is {_words(found.wanted)}"
            if what == "queue-min":
                text = f"{_words(found.found)} is in the log, and called expired"
            if found.path not in self._disk.gone:
                findings.add("/".join(("consumequeue", *found.path.parts[-3:])), found.position, what, text)
        if broken := len({path.parent for path in self._disk.gone}):
            self.left_out.append(f"{broken} queues were not compared to their ends: some of their files are not there")
        return findings


def phy_offsets(found: Difference) -> list[int]:
    """Where in the log the two units say that a message stands."""
    units = [Unit(*UNIT.unpack(data)) for data in (found.wanted, found.found) if len(data) == UNIT_SIZE]
    return [unit.phy_offset for unit in units if unit.is_valid and not unit.is_blank]


def _words(unit: bytes) -> str:
    values = UNIT.unpack(unit) if len(unit) == UNIT_SIZE else None
    return "none" if values is None else "phy offset {}, size {}, tags code {}".format(*values)


class SparseComparison:
    """Takes the batches of the log from the begin of a segment on, and compares with the pairs that ``mark`` names."""

    def __init__(self, disk: Disk, directory: Path, segment_size: int, mark: SparseMark, begin: int) -> None:
        self._mark = mark
        self._marks = {segment.base: segment for segment in mark.segments if segment.base >= begin}
        self._sizes = {directory / name: size for segment in self._marks.values() for name, size in segment.files}
        self._disk = ComparingDisk(disk, self._extent)
        self._service = SparseService(self._disk, directory, segment_size, mark.interval)
        self.left_out: list[str] = []

    def _extent(self, path: Path) -> tuple[int, int]:
        return self._sizes.get(path, 0), OFFSET_ENTRY_SIZE if path.suffix == OFFSET_SUFFIX else TIME_ENTRY_SIZE

    def take(self, batch: DispatchBatch) -> None:
        """The next range of the log."""
        self._service.build(batch)

    def finish(self, end: int | None) -> Findings:
        """What differs. ``end``: where the frontier ends in the log; None if the log could not be read up to there."""
        findings, is_ahead = Findings(), end is not None and self._mark.phy_offset > end
        if end is not None and self._mark.active is None:
            self._service.seal()
        built = self._service.mark().held
        for path, found in self._disk.differences.items():
            if path in self._sizes and path not in self._disk.gone:
                number = found.position // self._extent(path)[1]
                text = f"entry {number} is not what the log comes to"
                findings.add(f"sparse/{path.name}", found.position, "entry-log", text)
        if gone := self._disk.gone:
            self.left_out.append(f"{len(gone)} files of sparse indexes, {gone[0].name} first: they are not there")
        if is_ahead:
            self.left_out.append("the growing pair of sparse indexes: the disk refused before all of a drain was built")
        if end is None or is_ahead:
            return findings
        # What the frontier alone says.
        there = {segment.base: segment for segment in built.segments}
        for base in sorted({*there, *self._marks}):
            here, wanted = self._marks.get(base), there.get(base)
            if here != wanted:
                text = f"the frontier says {_counts(here)}, but the log comes to {_counts(wanted)}"
                findings.add(f"sparse/{index_name(base)}", 0, "entry-log", text)
        if there and self._mark.active not in (None, built.active):
            text = f"building would go on with {self._mark.active}, but the log comes to {built.active}"
            findings.add(f"sparse/{index_name(self._mark.segments[-1].base)}", 0, "entry-log", text)
        return findings


def _counts(mark: SegmentMark | None) -> str:
    counts = "{} messages, {} offset and {} time entries"
    return "nothing of the segment" if mark is None else counts.format(*mark[1:])


def comparisons(
    config: Config, disk: Disk, data: Path, frontier: Frontier, begin: int
) -> list[QueueComparison | SparseComparison]:
    """One for each output of ``frontier`` besides the key index, for the log from ``begin`` on."""
    found: list[QueueComparison | SparseComparison] = []
    if frontier.queues is not None:
        queues, root = frontier.outputs[ConsumeQueueStore.name], data / ConsumeQueueStore.folder
        # Of each queue, what it holds of messages before ``begin`` is not asked.
        held, _ = kept_queues(disk, root, queues, RecoveryScope(begin, begin, begin, is_unclean=False))
        found.append(QueueComparison(disk, root, queues.limit or config.outputs.queues_max, held, queues))
    if frontier.sparse is not None:
        root = data / SparseService.folder
        found.append(SparseComparison(disk, root, frontier.segment_size, frontier.sparse, begin))
    return found
