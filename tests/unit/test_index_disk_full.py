"""A disk without room for the next index file: nothing is left behind, and the same batch goes on where it stopped."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.errors import DiskError
from indexd.index.file import IndexFile, IndexService
from indexd.index.format import FLAVOURS, IndexLayout
from indexd.storage.disk import Disk, DiskFile
from support.naive import NaiveIndexService
from support.strategies import Sample, logs
from support.twins import batches, encode, naive_messages

LAYOUTS = st.tuples(st.integers(1, 50), st.integers(2, 60))
SPLITS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


def contents(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(directory.iterdir())]


class FullDisk(Disk):
    """A disk with room for so many files."""

    def __init__(self, room: int) -> None:
        self.room = room

    def open_write(self, path: Path, *, create: bool = False) -> DiskFile:
        file = super().open_write(path, create=create)
        if not create:
            return file
        self.room -= 1
        return file if self.room >= 0 else _FullFile(path, file)


class _FullFile(DiskFile):
    def __init__(self, path: Path, file: DiskFile) -> None:
        super().__init__(path, file.fileno())

    def allocate(self, size: int) -> None:
        raise DiskError("allocate space for", self.path, OSError(errno.ENOSPC, "No space left on device"))


def test_a_file_that_finds_no_room_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="allocate") as caught:
        IndexFile.create(FullDisk(0), tmp_path / "20240101000000000", IndexLayout(3, 4), None)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@given(logs(max_size=25), LAYOUTS, SPLITS, st.sampled_from(list(FLAVOURS)), st.integers(1, 3))
def test_after_a_full_disk_the_same_batch_goes_on_where_it_stopped(
    samples: list[Sample], layout: tuple[int, int], split: list[int], flavour: str, room: int
) -> None:
    data = encode(samples)
    naive = NaiveIndexService(*layout, flavour)
    for message in naive_messages(data):
        naive.build_index(message)
    disk = FullDisk(room)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        service = IndexService(disk, directory, IndexLayout(*layout), FLAVOURS[flavour])
        for batch in batches(data, flavour, split):
            while True:
                try:
                    service.build(batch)
                    break
                except DiskError:
                    # Readers and the flusher go on meanwhile, over files that are all whole.
                    count = len(service.mark().held)
                    assert contents(directory) == [file.to_bytes() for file in naive.files[:count]]
                    disk.room = room
        service.publish()
        assert contents(directory) == [file.to_bytes() for file in naive.files]
        assert service.counters.entries == sum(file.index_count - 1 for file in naive.files)
        service.close()
