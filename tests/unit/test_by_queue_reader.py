"""ConsumeQueueReader: any stretch of any queue, our own and a broker's."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.consumequeue.format import BLANK_UNIT, UNIT, UNIT_SIZE, QueueMark, Unit
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.errors import DiskError
from indexd.storage.disk import Disk, DiskFile


@given(st.integers(0, 30), st.integers(0, 40), st.integers(1, 9), st.integers(0, 45), st.integers(0, 45), st.booleans())
def test_any_stretch_of_any_queue(
    begin: int, count: int, file_units: int, asked: int, wanted: int, has_empty_file: bool
) -> None:
    units = [Unit(100 + 10 * number, 10, number) for number in range(begin, begin + count)]
    first = begin - begin % file_units
    with tempfile.TemporaryDirectory() as directory:
        root, size = Path(directory), file_units * UNIT_SIZE
        folder = root / "T" / "0"
        folder.mkdir(parents=True)
        content = BLANK_UNIT * (begin - first) + b"".join(UNIT.pack(*unit) for unit in units)
        content += bytes(size if has_empty_file and len(content) % size == 0 else 0)
        for at in range(0, len(content), size):
            name = f"{first * UNIT_SIZE + at:020d}"
            (folder / name).write_bytes(content[at : at + size].ljust(size, b"\0"))
        end = begin + count
        mark = QueueMark("T", 0, first, begin, end, -1)
        with ConsumeQueueReader.of_mark(Disk(), root, mark, size) as reader:
            low, high = max(asked, begin), min(max(asked, begin) + wanted, end)
            assert reader.get(asked, wanted) == units[max(low - begin, 0) : max(high - begin, 0)]
            assert [reader.unit(q) for q in range(begin, end)] == units
            expired = begin + wanted
            reader.correct_min_offset(100 + 10 * expired)
            assert reader.min_offset == min(max(begin, expired), end)
        reader = ConsumeQueueReader.of_broker(Disk(), root, "T", 0, size, log_begin=1)
        if count or begin > first:
            assert reader is not None
            # What the broker reads of it: blank units count, but stand before any log.
            assert (reader.first_offset, reader.max_offset) == (first, end)
            assert reader.min_offset == begin
            assert reader.get(0, 99) == units
        if reader is not None:
            reader.close()


def test_a_brokers_queue_ends_where_its_units_do(tmp_path: Path) -> None:
    folder, size = tmp_path / "T" / "0", 4 * UNIT_SIZE
    folder.mkdir(parents=True)
    unit = UNIT.pack(10, 10, 0)
    for number, content in enumerate([unit * 4, unit * 4, unit * 2 + UNIT.pack(-1, 5, 0) + unit, unit * 4]):
        (folder / f"{number * size:020d}").write_bytes(content)
    (folder / "notes").write_text("not a file of the queue")
    with ConsumeQueueReader.of_broker(Disk(), tmp_path, "T", 0, size) as reader:
        assert (reader.min_offset, reader.max_offset, list(reader.file_offsets())) == (0, 10, [0, 4, 8])


class _CountingDisk(Disk):
    """Keeps each file that it has opened; from ``broken`` files on, opening fails."""

    def __init__(self, broken: int = 99) -> None:
        self.files: list[DiskFile] = []
        self._broken = broken

    def open_read(self, path: Path) -> DiskFile:
        if len(self.files) == self._broken:
            raise DiskError("open", path, OSError(errno.EIO, "it broke"))
        self.files.append(super().open_read(path))
        return self.files[-1]

    def check_closed(self) -> None:
        """Something was opened, and all of it is closed."""
        assert self.files
        assert [file for file in self.files if file.fileno() >= 0] == []


def test_a_queue_that_is_not_opened_leaves_nothing_open(tmp_path: Path) -> None:
    folder, size = tmp_path / "T" / "0", 2 * UNIT_SIZE
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number * size:020d}").write_bytes(
            UNIT.pack(number * 20 + 1, 10, 0) + UNIT.pack(number * 20 + 11, 10, 0)
        )
    mark = QueueMark("T", 0, 0, 0, 1, -1)
    disk = _CountingDisk()
    assert ConsumeQueueReader.of_new(disk, tmp_path, "T", 0, size, published=1) is None  # nothing of it counts yet
    disk.check_closed()
    for open_queue in (
        lambda disk: ConsumeQueueReader.of_new(disk, tmp_path, "T", 0, size, published=99),
        lambda disk: ConsumeQueueReader.of_mark(disk, tmp_path, mark, size, published=99),
        lambda disk: ConsumeQueueReader.of_broker(disk, tmp_path, "T", 0, size),
    ):
        disk = _CountingDisk(broken=1)
        with pytest.raises(DiskError, match="it broke"):
            open_queue(disk)
        disk.check_closed()
