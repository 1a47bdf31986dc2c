"""IndexService over batches, however they are cut, against the naive service: file for file, byte for byte (spec 4)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from indexd.errors import DiskError
from indexd.index.file import IndexFile, IndexService
from indexd.index.format import FLAVOURS, IndexHeader, IndexLayout
from indexd.storage.disk import Disk
from support.commitlog_writer import FrameSpec
from support.naive import NaiveIndexService
from support.sim_disk import SimDisk
from support.sim_fault import FaultMap
from support.strategies import BASE_TIME, Sample, logs
from support.twins import batches, encode, naive_messages

ROOT = Path("/simulated")
LAYOUTS = st.tuples(st.integers(1, 50), st.integers(2, 60))
SPLITS = st.lists(st.integers(1, 12), min_size=1, max_size=4)


@contextmanager
def new_service(
    slots: int, entries: int, flavour: str = "5.4", disk: Disk | None = None, clock: Callable[[], float] = lambda: 0.0
) -> Iterator[tuple[IndexService, Path]]:
    with tempfile.TemporaryDirectory() as directory:
        layout = IndexLayout(slots, entries)
        service = IndexService(disk or Disk(), Path(directory), layout, FLAVOURS[flavour], clock)
        yield service, Path(directory)
        service.close()


def naive_service(data: bytes, slots: int, entries: int, flavour: str = "5.4") -> NaiveIndexService:
    naive = NaiveIndexService(slots, entries, flavour)
    for message in naive_messages(data):
        naive.build_index(message)
    return naive


def contents(directory: Path) -> list[bytes]:
    """The files in the order of their names."""
    return [path.read_bytes() for path in sorted(directory.iterdir())]


def specs(count: int, keys: int = 1, step: int = 1000) -> list[Sample]:
    """Messages of so many keys each, ``step`` ms apart."""
    words = [" ".join(f"k{number}-{key}" for key in range(keys)) for number in range(count)]
    return [
        Sample(FrameSpec("T", store_timestamp=BASE_TIME + step * number, properties={"KEYS": text} if text else {}))
        for number, text in enumerate(words)
    ]


# --- building ---


@given(logs(), LAYOUTS, SPLITS, st.sampled_from(list(FLAVOURS)))
def test_any_log_in_any_batches_makes_the_naive_files(
    samples: list[Sample], layout: tuple[int, int], split: list[int], flavour: str
) -> None:
    data = encode(samples)
    naive = naive_service(data, *layout, flavour)
    with new_service(*layout, flavour) as (service, directory):
        for batch in batches(data, flavour, split):
            service.build(batch)
            # What is marked is what stands in the files: published, and readable by anyone.
            for mark in service.mark().held:
                header = IndexHeader.unpack((directory / mark.name).read_bytes())
                assert header == mark.header
        service.publish()
        assert contents(directory) == [file.to_bytes() for file in naive.files]
        service.flush()
        last = len(naive.files) - 1
        assert contents(directory) == [file.to_bytes(number == last) for number, file in enumerate(naive.files)]
        assert service.entries == sum(file.index_count - 1 for file in naive.files)
        assert service.rolls == max(last, 0)


@given(st.data(), logs(max_size=20), LAYOUTS, SPLITS, st.sampled_from(list(FLAVOURS)))
def test_messages_given_again_are_treated_as_rocketmq_does(
    data: st.DataObject, samples: list[Sample], layout: tuple[int, int], split: list[int], flavour: str
) -> None:
    """A replay skips what lies before the last file's end, and repeats the last message's entries (spec 11.11)."""
    log = encode(samples)
    parts = batches(log, flavour, split)
    assume(parts)
    order = [*parts, *parts[data.draw(st.integers(0, len(parts) - 1)) :]]
    naive = NaiveIndexService(*layout, flavour)
    with new_service(*layout, flavour) as (service, directory):
        for batch in order:
            service.build(batch)
            for message in naive_messages(log[: batch.end_offset]):
                if message.phy_offset >= batch.begin_offset:
                    naive.build_index(message)
        service.publish()
        assert contents(directory) == [file.to_bytes() for file in naive.files]


# --- names ---


# --- stop, start, expiry ---


@given(st.integers(1, 30), st.integers(2, 6), st.integers(-100, 5000), st.booleans())
def test_expired_files_go_from_the_front_and_never_the_last(count: int, entries: int, least: int, again: bool) -> None:
    data = encode(specs(count))
    with new_service(3, entries) as (service, directory):
        for batch in batches(data, "5.4", [50]):
            service.build(batch)
        before = service.mark().held
        expected = []
        for mark in before[:-1]:
            if mark.header.end_phy_offset >= least:
                break
            expected.append(mark.name)
        assert service.expire(least) == expected
        mark = service.mark()
        assert [kept.name for kept in mark.held] == [kept.name for kept in before[len(expected) :]]
        assert sorted(path.name for path in directory.iterdir()) == [kept.name for kept in before]
        assert mark.expired == tuple(directory / name for name in expected)
        service.synced(mark)
        assert service.mark().expired == ()
        assert sorted(path.name for path in directory.iterdir()) == [kept.name for kept in before[len(expected) :]]
        assert service.expired_files == len(expected)
        if again:
            assert service.expire(least) == []


def test_the_only_file_stays_even_when_it_is_full_and_expired() -> None:
    with new_service(3, 4) as (service, directory):
        for batch in batches(encode(specs(3)), "5.4", [9]):
            service.build(batch)
        marks = tuple(service.mark().held)
        service.close()
        later = IndexService(Disk(), directory, IndexLayout(3, 4), FLAVOURS["5.4"])
        later.load(tuple(type(mark)(mark.name, mark.header, True) for mark in marks))
        assert later.expire(1 << 40) == []
        assert len(contents(directory)) == 1


# --- a disk without room for the next file ---


def test_a_file_that_finds_no_room_leaves_nothing_behind() -> None:
    disk = SimDisk(ROOT, 0, FaultMap.parse("allocate=ENOSPC"))
    with pytest.raises(DiskError, match="allocate"):
        IndexFile.create(disk, ROOT / "20240101000000000", IndexLayout(3, 4), None)
    assert disk.list_dir(ROOT) == []
