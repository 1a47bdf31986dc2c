"""Reading without taking memory from others: what only we brought into the page cache goes, everything else stays."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from indexd.storage.disk import Disk
from indexd.storage.page_cache import ReadPages
from support.commitlog_writer import CommitLogWriter
from support.page_cache import PAGE, Watched, forget, in_use, resident
from support.reading import drain, open_reader
from support.small_log import messages

SIZE = 48 << 20
READ_SIZE = 4 << 20
SEGMENT_SIZE = 1 << 20
#: What somebody else has read before, in bytes.
WARM = (20 << 20, 22 << 20)


def cool(path: Path) -> None:
    """Take a file out of the page cache, whole."""
    forget(path)
    if 1 in resident(path):
        pytest.fail(f"nothing can be taken out of the page cache of {path}: put TMPDIR on a disk", pytrace=False)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """What is asked of the kernel."""
    return Watched(monkeypatch)


@pytest.fixture
def cold(disk_path: Path) -> Path:
    """A file of 48 MiB of which nothing is in the page cache."""
    path = disk_path / "file"
    path.write_bytes(os.urandom(1 << 20) * (SIZE >> 20))
    cool(path)
    return path


def read_through(path: Path) -> Iterator[tuple[int, ReadPages]]:
    """Read a file to its end; each position behind what was read, before anything is given back there."""
    with Disk().open_read(path) as file:
        pages = ReadPages(file, SIZE)
        for begin in range(0, SIZE, READ_SIZE):
            file.pread(READ_SIZE, begin)
            yield begin + READ_SIZE, pages


def test_what_was_read_is_given_back_and_what_was_there_stays(cold: Path, watched: Watched) -> None:
    with in_use(cold, *WARM):
        most = dropped = 0
        for until, pages in read_through(cold):
            most = max(most, sum(resident(cold)))
            dropped += pages.give_back(until, is_last=until == SIZE)
        absent = watched.absent(cold)
        assert watched.asked(cold) == absent
        assert dropped == sum(absent) * PAGE
        warm = slice(WARM[0] // PAGE, WARM[1] // PAGE)
        assert 0 < len(absent) - sum(absent) < (6 << 20) // PAGE
        assert 1 not in absent[warm]
        after = resident(cold)
    assert 0 not in after[warm]
    assert not any(page and gone for page, gone in zip(after, absent, strict=True))
    assert most * PAGE <= 40 << 20  # in steps, and the kernel reads ahead: never the whole file at once


def test_what_a_broker_reads_meanwhile_stays(cold: Path, watched: Watched) -> None:
    # Brokers read through mappings, and the kernel keeps what is mapped.
    with cold.open("rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as mapping:
        for until, pages in read_through(cold):
            if until == WARM[0] + READ_SIZE:
                assert sum(mapping[at] for at in range(*WARM, PAGE)) > 0
            pages.give_back(until, is_last=until == SIZE)
        after = resident(cold)
        assert 0 not in watched.asked(cold)
        assert sum(after[WARM[0] // PAGE : WARM[1] // PAGE]) == (WARM[1] - WARM[0]) // PAGE
        assert sum(after) * PAGE < 6 << 20


def test_a_file_that_is_all_there_is_left_alone(cold: Path, watched: Watched) -> None:
    with in_use(cold):
        dropped = sum(pages.give_back(until, is_last=until == SIZE) for until, pages in read_through(cold))
        assert 0 not in resident(cold)
    assert 0 not in watched.seen[cold]
    assert 1 not in watched.asked(cold)
    assert dropped == 0


def write(store: Path) -> list[Path]:
    with CommitLogWriter(store, SEGMENT_SIZE) as writer:
        for spec in islice(messages(5), 2500):
            writer.append(replace(spec, body=spec.body * 40))
    paths = sorted(store.iterdir())
    assert len(paths) > 6
    for path in paths:
        cool(path)
    return paths


@pytest.mark.parametrize("workers", [0, 2])
def test_a_reader_leaves_only_the_newest_segments_in_the_cache(disk_path: Path, workers: int, watched: Watched) -> None:
    paths = write(disk_path)
    with in_use(paths[1]):
        reader = open_reader(disk_path, segment_size=SEGMENT_SIZE, drop_behind=2 * SEGMENT_SIZE, workers=workers)
        drain(reader)
        reader.close()
        assert sum(resident(paths[1])) == SEGMENT_SIZE // PAGE
    old = [path for path in paths[:-2] if path != paths[1]]
    # A segment's first page is looked at to see whether the one before it is closed.
    assert max(sum(resident(path)) for path in old) <= 16
    for path in old:
        assert watched.asked(path) == watched.absent(path)
    for path in (paths[1], *paths[-2:]):
        assert 1 not in watched.asked(path)
    assert reader.counters.dropped_bytes == sum(sum(watched.absent(path)) * PAGE for path in old) > 0


def test_a_reader_that_is_not_told_to_drops_nothing(disk_path: Path, watched: Watched) -> None:
    paths = write(disk_path)
    reader = open_reader(disk_path, segment_size=SEGMENT_SIZE)
    drain(reader)
    reader.close()
    assert not any(1 in watched.asked(path) for path in paths)
    assert reader.counters.dropped_bytes == 0
