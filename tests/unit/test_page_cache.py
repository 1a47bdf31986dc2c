"""Reading without taking memory from others: what only we brought into the page cache goes, everything else stays."""

from __future__ import annotations

import mmap
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
#: What somebody else has read before, in bytes, and in pages.
WARM = (20 << 20, 22 << 20)
WARM_PAGES = slice(WARM[0] // PAGE, WARM[1] // PAGE)


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
    path.write_bytes(bytes(range(256)) * (SIZE >> 8))
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
        absent, after = watched.absent(cold), resident(cold)
    assert (watched.asked(cold), dropped) == (absent, sum(absent) * PAGE)
    assert 0 < len(absent) - sum(absent) < (6 << 20) // PAGE
    assert (1 in absent[WARM_PAGES], 0 in after[WARM_PAGES]) == (False, False)
    assert not any(page and gone for page, gone in zip(after, absent, strict=True))
    assert most * PAGE <= 40 << 20  # in steps, and the kernel reads ahead: never the whole file at once


def test_what_a_broker_reads_meanwhile_stays(cold: Path, watched: Watched) -> None:
    # Brokers read through mappings, and the kernel keeps what is mapped.
    with cold.open("rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as mapping:
        for until, pages in read_through(cold):
            if until == WARM[0] + READ_SIZE:
                assert sum(mapping[at] for at in range(*WARM, PAGE)) == 0
            pages.give_back(until, is_last=until == SIZE)
        after = resident(cold)
    assert 0 not in watched.asked(cold)
    assert 0 not in after[WARM_PAGES]
    assert sum(after) * PAGE < 6 << 20


def test_a_file_that_is_all_there_is_left_alone(cold: Path, watched: Watched) -> None:
    with in_use(cold):
        dropped = sum(pages.give_back(until, is_last=until == SIZE) for until, pages in read_through(cold))
        assert 0 not in resident(cold)
    assert (0 in watched.seen[cold], 1 in watched.asked(cold), dropped) == (False, False, 0)


@pytest.mark.parametrize(("workers", "drops"), [(0, True), (2, True), (0, False)])
def test_a_reader_leaves_only_the_newest_segments_in_the_cache_if_it_is_told_to(
    disk_path: Path, workers: int, drops: bool, watched: Watched
) -> None:
    with CommitLogWriter(disk_path, SEGMENT_SIZE) as writer:
        for spec in islice(messages(5), 2500):
            writer.append(replace(spec, body=spec.body * 40))
    first, used, *paths = sorted(disk_path.iterdir())
    for path in (first, used, *paths):
        cool(path)
    drop_behind = 2 * SEGMENT_SIZE if drops else None
    with in_use(used):
        reader = open_reader(disk_path, segment_size=SEGMENT_SIZE, drop_behind=drop_behind, workers=workers)
        drain(reader)
        reader.close()
        assert sum(resident(used)) == SEGMENT_SIZE // PAGE
    old = [first, *paths[:-2]] if drops else []
    # A segment's first page is looked at to see whether the one before it is closed.
    assert all(sum(resident(path)) <= 16 and watched.asked(path) == watched.absent(path) for path in old)
    assert not any(1 in watched.asked(path) for path in {first, used, *paths} - {*old})
    dropped = sum(sum(watched.absent(path)) * PAGE for path in old)
    assert (reader.counters.dropped_bytes, dropped > 0, len(paths) > 4) == (dropped, drops, True)
