"""SparseService over batches, however they are cut, interrupted and repeated, against the plain rule."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from indexd.commitlog.batcher import DispatchBatch
from indexd.errors import DiskError
from indexd.sparse.format import SparseMark
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.output_recovery import made_durable
from support.reading import open_reader
from support.sim_disk import SimDisk
from support.sim_fault import FaultMap
from support.small_log import messages
from support.sparse_log import SEGMENT_SIZE, Row, batch_of, batches_of, expected_files, log_rows
from support.twins import request_at

INTERVALS = st.sampled_from([0, 90, 91, 300, 1000, 4096, 1 << 30])
SPLITS = st.lists(st.integers(1, 12), min_size=1, max_size=4)
ROOT = Path("/simulated")


def files_of(disk: Disk, directory: Path, mark: SparseMark) -> dict[str, bytes]:
    """Name -> what the mark says of each file: a sealed one is exactly that, a growing one ends in zeros."""
    found = {}
    for segment in mark.segments:
        for name, size in (
            (f"{segment.base:020d}.index", 8 * segment.offset_entries),
            (f"{segment.base:020d}.timeindex", 12 * segment.time_entries),
        ):
            data = disk.read(directory / name)
            is_growing = mark.active is not None and segment is mark.segments[-1]
            assert is_growing or len(data) == size
            assert not any(data[size:])
            found[name] = data[:size]
    assert found.keys() == {name for name, _ in disk.list_dir(directory)}
    return found


def check(
    service: SparseService, directory: Path, rows: Sequence[Row], interval: int, disk: Disk | None = None
) -> None:
    mark = service.mark().held
    assert files_of(disk or Disk(), directory, mark) == expected_files(rows, interval)
    assert SparseMark.from_json(mark.to_json()) == mark
    assert sum(segment.messages for segment in mark.segments) == len(rows)


# --- building ---


@given(log_rows(), INTERVALS, SPLITS, st.data())
def test_any_log_in_any_batches_makes_the_files_of_the_plain_rule(
    rows: list[Row], interval: int, split: list[int], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        service = SparseService(Disk(), Path(name), SEGMENT_SIZE, interval)
        for batch in batches_of(rows, split):
            service.build(batch)
            if data.draw(st.booleans()):
                done = [row for row in rows if row[0] < batch.end_offset]
                check(service, Path(name), done, interval)
        check(service, Path(name), rows, interval)
        assert service.entries == sum(
            segment.offset_entries + segment.time_entries for segment in service.mark().held.segments
        )
        service.close()


@given(log_rows(), INTERVALS, SPLITS, st.data())
def test_a_service_goes_on_from_a_mark(rows: list[Row], interval: int, split: list[int], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        service = SparseService(Disk(), Path(name), SEGMENT_SIZE, interval)
        parts = batches_of(rows, split)
        for at, batch in enumerate(parts):
            service.build(batch)
            if data.draw(st.integers(0, 2)) == 0:
                mark = SparseMark.from_json(service.mark().held.to_json())
                service.close()
                service = SparseService(Disk(), Path(name), SEGMENT_SIZE, interval)
                service.load(mark)
                assert service.mark().held == mark
            if data.draw(st.integers(0, 4)) == 0:
                for earlier in data.draw(st.lists(st.sampled_from(parts[: at + 1]), max_size=2)):
                    service.build(earlier)  # is in already
        check(service, Path(name), rows, interval)
        service.close()


def test_a_real_log_of_small_segments(tmp_path: Path) -> None:
    """Written by the log's writer, blank records and all, and read by the reader."""
    interval, size = 1000, 1 << 16
    with CommitLogWriter(tmp_path / "commitlog", size) as writer:
        for spec in islice(messages(3), 900):
            writer.append(spec)
        for number in range(3):  # each has a segment of its own
            writer.append(FrameSpec("T", body=bytes(size - 200), store_timestamp=number))
    (tmp_path / "sparse").mkdir()
    service = SparseService(Disk(), tmp_path / "sparse", size, interval)
    reader = open_reader(tmp_path / "commitlog", segment_size=size, check_tail=False)
    rows: list[Row] = []
    while isinstance(batch := reader.poll(), DispatchBatch):
        service.build(batch)
        requests = [request_at(batch, row) for row in range(batch.rows)]
        rows += [(each.commit_log_offset, each.msg_size, each.store_timestamp) for each in requests]
    reader.close()
    assert len(rows) >= 902  # the reader keeps back what may still change
    assert [segment.messages for segment in service.mark().held.segments][-2:] == [1, 1]
    found = files_of(Disk(), tmp_path / "sparse", service.mark().held)
    assert found == expected_files(rows, interval, size)
    service.close()


# --- what a flusher has to do ---


def test_what_is_unsynced_until_when(tmp_path: Path) -> None:
    service = SparseService(Disk(), tmp_path, SEGMENT_SIZE, 0)
    assert service.mark().unsynced == ()
    service.build(batch_of([(0, 91, 1), (91, 91, 2)]))
    first = service.mark()
    assert {path.name for path in first.unsynced} == {f"{0:020d}.index", f"{0:020d}.timeindex"}
    assert first.directories == (tmp_path,)
    service.build(batch_of([(182, 91, 3)]))
    second = service.mark()
    service.synced(first)
    assert set(service.mark().unsynced) == set(first.unsynced)  # written since
    assert service.mark().directories == ()
    service.synced(second)
    assert service.mark().unsynced == ()
    service.build(batch_of([(SEGMENT_SIZE, 91, 3)]))
    assert len(service.mark().unsynced) == 4
    made_durable(Disk(), service)
    assert (service.mark().unsynced, service.mark().directories) == ((), ())
    service.close()


def test_expiry(tmp_path: Path) -> None:
    service = SparseService(Disk(), tmp_path, SEGMENT_SIZE, 0)
    service.build(batch_of([(SEGMENT_SIZE * number, 91, number) for number in range(4)]))
    assert service.expire(SEGMENT_SIZE - 1) == []
    names = service.expire(2 * SEGMENT_SIZE)
    assert names == [f"{SEGMENT_SIZE * number:020d}.{end}" for number in range(2) for end in ("index", "timeindex")]
    progress = service.mark()
    assert [segment.base for segment in progress.held.segments] == [2 * SEGMENT_SIZE, 3 * SEGMENT_SIZE]
    assert progress.expired == tuple(tmp_path / name for name in names)
    assert not {path.name for path in progress.unsynced} & set(names)
    assert len(list(tmp_path.iterdir())) == 8
    service.synced(progress)
    assert len(list(tmp_path.iterdir())) == 4
    assert service.mark().expired == ()
    # The segment that grows stays, whatever the log says.
    assert len(service.expire(100 * SEGMENT_SIZE)) == 2
    assert [segment.base for segment in service.mark().held.segments] == [3 * SEGMENT_SIZE]
    service.close()


# --- a disk that refuses ---


@given(log_rows(max_size=25), INTERVALS, SPLITS, st.integers(1, 60), st.sampled_from(["ENOSPC", "EIO", "short"]))
def test_after_an_error_the_same_batch_goes_on_where_it_stopped(
    rows: list[Row], interval: int, split: list[int], number: int, fault: str
) -> None:
    operation = "pwrite" if fault == "short" else "*"
    disk = SimDisk(ROOT, number, FaultMap.parse(f"{operation}#{number}={fault};{operation}#{number + 3}={fault}"))
    service = SparseService(disk, ROOT, SEGMENT_SIZE, interval)
    for batch in batches_of(rows, split):
        for step in (lambda batch=batch: service.build(batch), service.publish):
            for _ in range(3):
                try:
                    step()
                    break
                except DiskError:
                    continue
            else:
                raise AssertionError("three faults for two")
    disk.faults = FaultMap()
    check(service, ROOT, rows, interval, disk)
    assert service.entries == sum(
        segment.offset_entries + segment.time_entries for segment in service.mark().held.segments
    )
    assert not disk.handles
