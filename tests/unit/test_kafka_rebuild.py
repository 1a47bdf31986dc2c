"""kafka rebuild: equal to a slow twin of recovery, whole files by rename, logs never touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.errors import DiskError, UsageError
from indexd.kafka.check import check
from indexd.kafka.rebuild import rebuild, recover_entries
from indexd.kafka.records import LogWalk
from indexd.storage.disk import Disk
from support.kafka_records import Batch, batch, log_bytes, name, old_record, recovered, write_segment


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    """Two segments of 30 batches, an entry each 400 bytes."""
    path = tmp_path / "topic-0"
    for base in (0, 30):
        write_segment(path, base, [batch(base + i, base + i, 1000 + 7 * (i % 11), bytes(39)) for i in range(30)], 300)
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file()}


@st.composite
def segments(draw: st.DrawFn) -> list[Batch]:
    batches: list[Batch] = []
    offset = draw(st.integers(500, 505))
    for _ in range(draw(st.integers(0, 30))):
        payload = bytes(draw(st.integers(0, 300)))
        if draw(st.integers(0, 3)):
            last = offset + draw(st.integers(0, 5))
            batches.append(batch(offset, last, draw(st.integers(-1, 50)), payload))
        else:
            batches.append(old_record(offset, draw(st.integers(-1, 50)), payload, magic=draw(st.integers(0, 1))))
        offset = batches[-1].last_offset + draw(st.integers(1, 1 << 20))
    return batches


@given(segments(), st.integers(0, 1500), st.integers(61, 2000))
def test_as_the_slow_twin_makes_them(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Batch], interval: int, buffer_size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "twin.log"
    path.write_bytes(log_bytes(batches))
    with Disk().open_read(path) as file:
        made = recover_entries(LogWalk(file, 500, buffer_size=buffer_size), 500, interval, 1 << 20)
    assert (made.index, made.time_index) == recovered(500, batches, interval)
    assert (made.end, made.batches) == (path.stat().st_size, len(batches))


@given(segments(), st.integers(0, 500), st.data())
def test_up_to_the_first_batch_that_does_not_hold(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Batch], interval: int, data: st.DataObject
) -> None:
    log = bytearray(log_bytes(batches))
    path = tmp_path_factory.mktemp("cut")
    sound = data.draw(st.integers(0, len(batches)))
    start = sum(one.size for one in batches[:sound])
    if sound < len(batches):
        one = batches[sound]
        first = 21 if one.data[16] == 2 else 17
        log[start + data.draw(st.integers(first, one.size - 1))] ^= 1
    write_segment(path, 500, batches)
    (path / name(500, ".log")).write_bytes(bytes(log))
    report = rebuild(path, Disk(), interval=interval)
    assert bool(report.findings) == (sound < len(batches))
    index, times = recovered(500, batches[:sound], interval)
    assert contents(path) == {
        name(500, ".index"): index,
        name(500, ".log"): bytes(log),
        name(500, ".timeindex"): times,
    }
    shutil.rmtree(path)


def test_nothing_is_written_where_nothing_is_wrong(partition: Path) -> None:
    before = Disk().stamps(partition)
    report = rebuild(partition, Disk(), interval=300)
    assert (len(report.findings), [segment.is_changed for segment in report.segments]) == (0, [False, False])
    assert Disk().stamps(partition) == before


def test_in_place_with_the_logs_owner_and_mode(partition: Path) -> None:
    whole = contents(partition)
    log, index, times = (partition / name(0, suffix) for suffix in (".log", ".index", ".timeindex"))
    log.chmod(0o640)
    if os.getuid() == 0:
        os.chown(log, 1234, 1235)
    index.unlink()
    times.write_bytes(times.read_bytes() + bytes(120))
    (partition / (index.name + ".0123456789abcdef.tmp")).write_bytes(b"left behind by a crash")
    report = rebuild(partition, Disk(), interval=300)
    assert [segment.is_changed for segment in report.segments] == [True, False]
    assert contents(partition) == whole
    for path in (index, times):
        assert path.stat().st_mode & 0o777 == 0o640
        assert (path.stat().st_uid, path.stat().st_gid) == (log.stat().st_uid, log.stat().st_gid)
    assert not check(partition, Disk()).findings
    assert not list(partition.glob("*.tmp"))


def test_elsewhere(partition: Path, tmp_path: Path) -> None:
    write_segment(tmp_path / "other-1", 7, [batch(7, 9, 5)])
    whole = contents(partition)
    (partition / name(0, ".index")).write_bytes(b"wrong")
    damaged = contents(partition)
    rebuild(partition, Disk(), out=tmp_path / "a" / "b", interval=300)
    assert contents(tmp_path / "a" / "b") == {key: data for key, data in whole.items() if key.endswith("index")}
    report = rebuild(partition.parent, Disk(), out=tmp_path / "c", interval=300)
    assert report.partitions == 2
    assert contents(tmp_path / "c" / "topic-0") == contents(tmp_path / "a" / "b")
    assert contents(tmp_path / "c" / "other-1")[name(7, ".timeindex")] == bytes(7) + b"\x05" + bytes(3) + b"\x02"
    assert contents(partition) == damaged
    for same in (partition, partition / ".." / "topic-0"):
        with pytest.raises(UsageError, match="where the segments are"):
            rebuild(partition, Disk(), out=same)


def test_numbers_that_the_broker_would_refuse(partition: Path) -> None:
    for interval, size in ((-1, 100), (1 << 31, 100), (300, 11), (300, 1 << 31)):
        with pytest.raises(UsageError):
            rebuild(partition, Disk(), interval=interval, max_index_size=size)
    with pytest.raises(UsageError, match="longer indexes"):
        rebuild(partition, Disk(), interval=0, max_index_size=8 * 28)
    assert not rebuild(partition, Disk(), interval=0, max_index_size=8 * 29).findings


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([batch(10, 10, 1), batch(12, 12, 2), batch(11, 11, 3)], "do not rise"),
        ([batch(10, 10, 1), batch(20, 20, 9), batch(12, 12, 9), batch(12, 12, 8)], "do not rise"),
        ([batch(10, 10, 1), batch(12, 12, 2), batch(12, 12, 3)], "do not rise"),
        ([batch(10, 10, 1), batch(9, 9, 2)], "relative to the segment's base"),
        ([batch(10, 10, 1), batch(11, 11 + (1 << 31) - 1, 2)], "relative to the segment's base"),
    ],
)
def test_what_recovery_itself_fails_at(partition: Path, batches: list[Batch], words: str) -> None:
    (partition / name(0, ".log")).unlink()
    (partition / name(10, ".log")).write_bytes(log_bytes(batches))
    (partition / name(10, ".index")).write_bytes(b"as it was")
    report = rebuild(partition, Disk(), interval=0)
    assert [(problem.file, problem.what) for problem in report.findings.kept] == [(name(10, ".log"), "refused")]
    assert words in report.findings.kept[0].text
    assert (partition / name(10, ".index")).read_bytes() == b"as it was"
    assert [segment.file for segment in report.segments] == [name(30, ".log")]


def test_zeros_of_a_preallocated_newest_log(partition: Path) -> None:
    for base, problems in ((30, 0), (0, 1)):
        with (partition / name(base, ".log")).open("ab") as log:
            log.write(bytes(3000))
        report = rebuild(partition, Disk(), interval=300)
        assert len(report.findings) == problems
        assert [note.what for note in report.notes] == ["not_closed"]


def test_a_directory_that_may_not_be_written(partition: Path) -> None:
    (partition / name(0, ".index")).unlink()
    (partition / name(0, ".index")).mkdir()
    with pytest.raises(DiskError):
        rebuild(partition, Disk(), interval=300)
