"""A data directory with all outputs, small enough for a test of each byte: built once, copied for each test."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

from indexd.consumequeue.format import UNIT_SIZE, QueueMark, file_name
from indexd.flush.frontier import Frontier, read_frontier, write_frontier
from indexd.sparse.format import SparseMark, index_name, time_index_name
from indexd.storage.disk import Disk
from support.data_directory import changed
from support.reopened import config_for, undisturbed
from support.small_log import QUEUE_FILE_SIZE, write_log

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.verify import VerifyReport

MESSAGES = 3000
UNITS = QUEUE_FILE_SIZE // UNIT_SIZE
#: One offset entry in so many bytes of log.
INTERVAL = 1000


@dataclass
class Built:
    """``data`` is a copy of what an undisturbed build of ``store`` makes."""

    store: Path
    data: Path

    @property
    def frontier(self) -> Frontier:
        found = read_frontier(Disk(), self.data / "frontier")
        assert found is not None
        return found

    def change_frontier(self, **changes: object) -> None:
        write_frontier(Disk(), self.data / "frontier", changed(self.frontier, **changes), "0")

    @property
    def marks(self) -> tuple[QueueMark, ...]:
        assert self.frontier.queues is not None
        return self.frontier.queues

    @property
    def sparse(self) -> SparseMark:
        assert self.frontier.sparse is not None
        return self.frontier.sparse

    def queue_file(self, mark: QueueMark, unit: int) -> Path:
        """The file that holds a unit."""
        begin = unit // UNITS * QUEUE_FILE_SIZE
        return self.data / "consumequeue" / mark.topic / str(mark.queue_id) / file_name(begin)

    @property
    def root(self) -> Path:
        """A folder of the test's own."""
        return self.data.parent

    def pair(self, at: int) -> tuple[Path, Path]:
        """The sparse indexes of a segment by its number; -1 is the growing one."""
        return self.pair_of(self.sparse.segments[at].base)

    def pair_of(self, base: int) -> tuple[Path, Path]:
        """The same by the segment's base."""
        return self.data / "sparse" / index_name(base), self.data / "sparse" / time_index_name(base)

    def name(self, path: Path) -> str:
        """As findings call it."""
        return str(path.relative_to(self.data))


def build(root: Path, **keys: object) -> Built:
    """Write the log and build it."""
    write_log(root / "store", MESSAGES)
    config = config_for(root / "store", root / "data", **{"sparse_interval": INTERVAL} | keys)
    return Built(root / "store", undisturbed(config, root / "data"))


def copied(built: Built, root: Path) -> Built:
    """The same store, and a data directory of the test's own."""
    return Built(built.store, shutil.copytree(built.data, root / "data"))


def found(report: VerifyReport) -> list[tuple[str, int, str]]:
    """File, byte and kind of each finding that was kept."""
    return [(finding.file, finding.position, finding.what) for finding in report.findings.kept]


def live_bytes(built: Built) -> list[tuple[Path, int]]:
    """Each file that the frontier names, and how many of its bytes are units or entries."""
    rows = []
    for mark in built.marks:
        units = range(0, mark.max_offset, UNITS)
        rows += [(built.queue_file(mark, unit), min(mark.max_offset - unit, UNITS) * UNIT_SIZE) for unit in units]
    for at, segment in enumerate(built.sparse.segments):
        offsets, times = built.pair(at)
        rows += [(offsets, 8 * segment.offset_entries), (times, 12 * segment.time_entries)]
    return rows
