"""ConsumeQueueReader: any stretch of any queue, our own and a broker's."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from indexd.consumequeue.format import BLANK_UNIT, UNIT, UNIT_SIZE, QueueMark, Unit
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.storage.disk import Disk


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
