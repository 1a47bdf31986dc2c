"""Sparse indexes compared with the log: the entries that the log comes to against those that are there.

The segment is built once more, and where entries would be written, the files are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.flush.frontier import Frontier
from indexd.sparse.format import OFFSET_ENTRY_SIZE, TIME_ENTRY_SIZE, SegmentMark, SparseMark, index_name
from indexd.sparse.service import GrowingSegment
from indexd.storage.disk import Disk


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
        self._files: tuple[_ComparedFile, _ComparedFile] | None = None
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
                    _ComparedFile(self._disk, self._directory, wanted, 0, OFFSET_ENTRY_SIZE),
                    _ComparedFile(self._disk, self._directory, wanted, 1, TIME_ENTRY_SIZE),
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


class _ComparedFile:
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
        try:
            with self._disk.open_read(self.path) as file:
                found = file.pread(max(min(position + len(data), self._size) - position, 0), position)
        except DiskError as error:
            if not error.is_missing:
                raise
            self.is_gone = True
            return
        here, there = (np.frombuffer(part, np.uint8, min(len(found), len(data))) for part in (data, found))
        wrong = np.flatnonzero(here != there)
        self.differs_at = (position + int(wrong[0] if len(wrong) else len(here))) // self.entry_size

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
