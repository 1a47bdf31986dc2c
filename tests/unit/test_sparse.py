"""Sparse indexes: names and marks, building from batches however they are cut, checks, recovery."""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.compare.secondary import EntryDifference, SparseComparison
from indexd.errors import CorruptDataError, DiskError
from indexd.output import CheckScope, Condition, OutputRecovery
from indexd.sparse import check as check_module
from indexd.sparse import service as service_module
from indexd.sparse.check import check_sparse
from indexd.sparse.format import (
    ActiveMark,
    SegmentMark,
    SparseMark,
    base_of_name,
    index_name,
    own_base,
    search,
    time_index_name,
)
from indexd.sparse.service import SparseService
from indexd.sparse.sparse_index import OffsetIndex
from indexd.storage.disk import Disk
from support.output_recovery import carried_out, made_durable, planned_sparse
from support.sparse_log import SEGMENT_SIZE, Row, batch_of, batches_of, expected_files, log_rows
from support.verifying import change

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.findings import Findings


INT64S = st.integers(0, 2**63 - 1)

# --- names ---


def test_bases_of_names() -> None:
    assert base_of_name("00000000000000032450.index.deleted") == 32450
    assert base_of_name("-5.timeindex") == -5
    assert base_of_name("7") == 7
    for name in ("", ".index", "x.index", "9223372036854775808.index", "1_0.index", " 1.index"):
        with pytest.raises(ValueError, match="number"):
            base_of_name(name)


def test_our_own_names() -> None:
    assert own_base(index_name(5)) == own_base(time_index_name(5)) == 5
    for name in (
        "5.index",
        index_name(5) + ".deleted",
        "x" + index_name(5),
        f"{5:020d}",
        f"{5:020d}.log",
        "٣" * 20 + ".index",
    ):
        assert own_base(name) is None
    assert own_base(f"{2**63:020d}.index") is None


# --- marks ---

COUNTS = st.integers(0, 2**31 - 1)
SEGMENTS = st.lists(st.builds(SegmentMark, INT64S, COUNTS, COUNTS, COUNTS), max_size=4, unique_by=lambda s: s.base)
ACTIVE = st.builds(ActiveMark, *[st.integers(-(2**63) + 1, 2**63 - 1)] * 4)


@given(INT64S, INT64S, SEGMENTS, st.one_of(st.none(), ACTIVE))
def test_a_mark_to_json_and_back(
    interval: int, phy_offset: int, segments: list[SegmentMark], active: ActiveMark | None
) -> None:
    mark = SparseMark(interval, phy_offset, tuple(sorted(segments)), active if segments else None)
    assert SparseMark.from_json(mark.to_json()) == mark
    assert len(mark.sealed) == len(segments) - (mark.active is not None)


GOOD: dict[str, Any] = {
    "interval": 1,
    "phyOffset": 9,
    "segments": [[0, 1, 2, 3], [8, 1, 0, 0]],
    "active": [1, -1, 0, -1],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"interval": -1},
        {"interval": "1"},
        {"interval": True},
        {"interval": 1.5},
        {"phyOffset": -1},
        {"phyOffset": 1 << 64},
        {"phyOffset": None},
        {"segments": [[0, 1, 2]]},
        {"segments": [[0, 1, 2, -3]]},
        {"segments": [[8, 1, 2, 3], [0, 1, 2, 3]]},
        {"segments": [[8, 1, 2, 3], [8, 1, 2, 3]]},
        {"segments": [5]},
        {"segments": None},
        {"segments": []},
        {"active": [1, 2, 3]},
        {"active": "abcd"},
        {"active": 5},
    ],
)
def test_a_mark_that_nobody_wrote(wrong: dict[str, Any]) -> None:
    SparseMark.from_json(GOOD)
    with pytest.raises((ValueError, TypeError, KeyError)):
        SparseMark.from_json(GOOD | wrong)
    for key in GOOD:
        with pytest.raises(KeyError):
            SparseMark.from_json({name: value for name, value in GOOD.items() if name != key})
    for row in (None, 5, [], "x"):
        with pytest.raises((ValueError, TypeError, KeyError)):
            SparseMark.from_json(row)


# --- searching ---


@given(
    st.lists(st.integers(-50, 50), max_size=40, unique=True), st.integers(-60, 60), st.sampled_from([8, 12, 2048, 4096])
)
def test_a_search_on_keys_in_order_is_any_search(keys: list[int], target: int, entry_size: int) -> None:
    keys.sort()
    below = [slot for slot, key in enumerate(keys) if key <= target]
    above = [slot for slot, key in enumerate(keys) if key >= target]
    largest, smallest = search(keys.__getitem__, len(keys), entry_size, target)
    assert largest == (below[-1] if below else -1)
    # Kafka's steps may end beside an exact match without having looked at it.
    assert smallest in (above[:2] if target in keys else above[:1]) or smallest == -1
    assert smallest >= 0 or not above or target == keys[-1]


# --- files ---


def test_an_index_has_the_entries_that_it_is_told_of(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(struct.pack(">6i", 1, 9, 2, 9, 3, 9))
    with Disk().open_read(path) as file:
        assert [OffsetIndex(file, 100).entry(slot) for slot in range(3)] == [(101, 9), (102, 9), (103, 9)]
        assert OffsetIndex(file, 100, 2).last_entry == (102, 9)
        with pytest.raises(CorruptDataError):
            OffsetIndex(file, 100, 4)


def test_reading_needs_no_numpy() -> None:
    code = "import sys, indexd.sparse.sparse_index; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


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


# --- what a flusher has to do ---


# --- a disk that refuses ---


def build(directory: Path, rows: list[Row], interval: int) -> SparseMark:
    directory.mkdir()
    service = SparseService(Disk(), directory, SEGMENT_SIZE, interval)
    for batch in batches_of(rows, [7]):
        service.build(batch)
    mark = service.mark().held
    service.close()
    return mark


def checked(directory: Path, mark: SparseMark, *, is_at_rest: bool = True) -> Findings:
    scope = CheckScope(Condition.AT_REST if is_at_rest else Condition.GROWING, is_at_rest, lambda _: None)
    return check_sparse(Disk(), directory, SEGMENT_SIZE, mark, scope)


def compare(
    directory: Path, mark: SparseMark, rows: list[Row], split: list[int], begin: int = 0
) -> list[EntryDifference]:
    comparison = SparseComparison(Disk(), directory, SEGMENT_SIZE, mark, begin)
    found = [
        one for batch in batches_of([row for row in rows if row[0] >= begin], split) for one in comparison.take(batch)
    ]
    return found + list(comparison.finish())


@settings(max_examples=40)
@given(rows=log_rows(), interval=INTERVALS, split=SPLITS, window=st.sampled_from([1, 2, 3, 1000]))
def test_nothing_is_found_in_what_was_built(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], interval: int, split: list[int], window: int
) -> None:
    directory = tmp_path_factory.mktemp("any") / "sparse"
    mark = build(directory, rows, interval)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_module, "_ENTRIES_PER_READ", window)
        patch.setattr(service_module, "_ENTRIES_PER_WRITE", window)
        assert checked(directory, mark).kept == []
        assert compare(directory, mark, rows, split) == []
        begin = rows[len(rows) // 2][0] // SEGMENT_SIZE * SEGMENT_SIZE
        assert compare(directory, mark, rows, split, begin) == []


@settings(max_examples=40)
@given(rows=log_rows(), interval=INTERVALS, window=st.sampled_from([1, 3, 1000]), data=st.data())
def test_every_changed_byte_is_found_where_it_is(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], interval: int, window: int, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("any") / "sparse"
    mark = build(directory, rows, interval)
    files = [
        (directory / f"{segment.base:020d}{suffix}", count, width)
        for segment in mark.segments
        for suffix, count, width in ((".index", segment.offset_entries, 8), (".timeindex", segment.time_entries, 12))
        if count
    ]
    if not files:
        return
    path, count, width = data.draw(st.sampled_from(files))
    position = data.draw(st.integers(0, count * width - 1))
    change(path, position, bytes([path.read_bytes()[position] ^ 1 << data.draw(st.integers(0, 7))]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check_module, "_ENTRIES_PER_READ", window)
        patch.setattr(service_module, "_ENTRIES_PER_WRITE", window)
        (found,) = compare(directory, mark, rows, [7])
        assert (found.name, found.position) == (path.name, position // width * width)
        # Without the log not every wrong number can be told; those that are told are this one or its neighbour.
        for finding in checked(directory, mark).kept:
            assert finding.file == f"sparse/{path.name}"
            assert 0 <= finding.position // width - position // width <= 1


ROWS: list[Row] = [(position, 100, 1000 + position) for position in range(0, 3 * SEGMENT_SIZE, 128)]


def test_what_is_missing_too_much_or_nobodys(tmp_path: Path) -> None:
    mark = build(tmp_path / "sparse", ROWS, 300)
    (tmp_path / "sparse" / index_name(0)).unlink()
    (tmp_path / "sparse" / index_name(SEGMENT_SIZE * 9)).touch()
    assert checked(tmp_path / "sparse", mark).counts == {"file-missing": 1, "file-unnamed": 1}
    assert checked(tmp_path / "sparse", mark, is_at_rest=False).counts == {"file-missing": 1}
    comparison = SparseComparison(Disk(), tmp_path / "sparse", SEGMENT_SIZE, mark, 0)
    assert [one for batch in batches_of(ROWS, [50]) for one in comparison.take(batch)] == []
    assert comparison.gone == [index_name(0)]


def test_a_log_that_is_longer_shorter_or_has_other_segments(tmp_path: Path) -> None:
    mark = build(tmp_path / "sparse", ROWS, 300)
    name = index_name(2 * SEGMENT_SIZE)
    texts = [found.text for found in compare(tmp_path / "sparse", mark, ROWS[:-1], [50])]
    assert texts == [f"the segment has {mark.segments[-1].messages - 1} messages, but the frontier says 32"]
    (found, *_) = compare(tmp_path / "sparse", mark, ROWS[:-20], [50])
    assert (found.name, found.text) == (name, f"{mark.segments[-1].offset_entries} entries, but the log comes to 2")
    assert compare(tmp_path / "sparse", mark, ROWS[:64], [50])[-1].text == "the log has no message of this segment"
    less = mark._replace(segments=mark.segments[1:])
    assert [one.text for one in compare(tmp_path / "sparse", less, ROWS, [50])] == [
        "the segment has 32 messages, and the frontier names no sparse indexes of it"
    ]


def test_what_may_not_be_read_is_an_error(tmp_path: Path) -> None:
    mark = build(tmp_path / "sparse", ROWS, 300)
    path = tmp_path / "sparse" / index_name(0)
    path.unlink()
    path.mkdir()
    with pytest.raises(DiskError):
        checked(tmp_path / "sparse", mark)
    with pytest.raises(DiskError):
        compare(tmp_path / "sparse", mark, ROWS, [50])


def rows_of(segments: int, each: int = 30) -> list[Row]:
    return [
        (SEGMENT_SIZE * segment + 100 * number, 100, 1000 * segment + number)
        for segment in range(segments)
        for number in range(each)
    ]


def built(disk: Disk, directory: Path, rows: Sequence[Row], interval: int = 300) -> SparseMark:
    """Build, and close as a clean stop does."""
    service = SparseService(disk, directory, SEGMENT_SIZE, interval)
    service.build(batch_of(rows))
    mark: SparseMark = made_durable(disk, service).held
    service.close()
    return mark


def recovered(
    disk: Disk, directory: Path, mark: SparseMark, phy_offset: int, log_begin: int = 0
) -> OutputRecovery[SparseMark]:
    """Plan, and do it; a second plan has nothing to do."""
    first = planned_sparse(disk, directory, SEGMENT_SIZE, mark, phy_offset, log_begin=log_begin)
    carried_out(disk, first)
    second = planned_sparse(disk, directory, SEGMENT_SIZE, first.held, phy_offset, log_begin=log_begin)
    assert (second.held, second.delete, second.cut, second.reasons) == (first.held, (), (), ())
    return first


def go_on(
    disk: Disk, directory: Path, done: OutputRecovery[SparseMark], rows: Sequence[Row], interval: int = 300
) -> None:
    """Read the log again as far as needed, and on; the files are those of an undisturbed build."""
    service = SparseService(disk, directory, SEGMENT_SIZE, interval)
    service.load(done.held)
    begin = done.held.phy_offset if done.refill_from is None else done.refill_from
    left = [row for row in rows if row[0] >= begin]
    if left:
        service.build(batch_of(left))
    mark = service.mark().held
    service.close()
    assert files_of(disk, directory, mark) == expected_files(rows, interval)


def test_a_clean_stop_leaves_nothing_to_do(tmp_path: Path) -> None:
    rows = rows_of(3)
    mark = built(Disk(), tmp_path, rows)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    done = recovered(Disk(), tmp_path, mark, mark.phy_offset)
    assert (done.held, done.refill_from, done.delete, done.reasons) == (mark, None, (), ())
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    go_on(Disk(), tmp_path, done, rows)


def test_no_directory_and_an_empty_mark(tmp_path: Path) -> None:
    done = planned_sparse(Disk(), tmp_path / "none", SEGMENT_SIZE, SparseMark(300), 12345, log_begin=0)
    assert (done.held, done.refill_from, done.delete) == (SparseMark(300), None, ())
    carried_out(Disk(), done)
    assert not list(tmp_path.iterdir())


def test_what_no_mark_names_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    mark = built(Disk(), tmp_path, rows_of(2))
    for name in (
        f"{9 * SEGMENT_SIZE:020d}.index",
        f"{5:020d}.timeindex",
        "notes.txt",
        f"{5:020d}.index.deleted",
        "5.index",
    ):
        (tmp_path / name).write_bytes(b"x")
    done = recovered(Disk(), tmp_path, mark, mark.phy_offset)
    assert {path.name for path in done.delete} == {f"{9 * SEGMENT_SIZE:020d}.index", f"{5:020d}.timeindex"}
    assert {"notes.txt", f"{5:020d}.index.deleted", "5.index"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    "damage",
    ["missing", "missing time", "short", "long", "position", "offset", "time offset", "timestamp", "active short"],
)
def test_what_does_not_hold_is_built_again_with_all_behind(damage: str, tmp_path: Path) -> None:
    rows = rows_of(4)
    mark = built(Disk(), tmp_path, rows)
    number = 3 if damage in ("timestamp", "active short") else 1
    base = number * SEGMENT_SIZE
    index, time_index = tmp_path / f"{base:020d}.index", tmp_path / f"{base:020d}.timeindex"
    size, time_size = 8 * mark.segments[number].offset_entries, 12 * mark.segments[number].time_entries
    data, time_data = bytearray(index.read_bytes()), bytearray(time_index.read_bytes())
    match damage:
        case "missing":
            index.unlink()
        case "missing time":
            time_index.unlink()
        case "short":
            index.write_bytes(data[:-8])
        case "long":
            time_index.write_bytes(time_data + bytes(12))
        case "position":
            index.write_bytes(data[: size - 4] + bytes(4))
        case "offset":
            index.write_bytes(data[: size - 8] + b"\0\0\0\x7f" + data[size - 4 :])
        case "time offset":
            time_index.write_bytes(time_data[: time_size - 4] + b"\xff\xff\xff\xff" + time_data[time_size:])
        case "timestamp":
            time_index.write_bytes(time_data[: time_size - 5] + b"\x00" + time_data[time_size - 4 :])
        case "active short":
            index.write_bytes(data[: size - 1])
    done = recovered(Disk(), tmp_path, mark, mark.phy_offset)
    assert done.refill_from == base
    assert len(done.reasons) == 1
    assert f"{base:020d}" in done.reasons[0]
    assert done.held == SparseMark(300, base, mark.segments[:number], None)
    go_on(Disk(), tmp_path, done, rows)


def test_bytes_behind_the_mark_become_zeros(tmp_path: Path) -> None:
    rows = rows_of(2)
    mark = built(Disk(), tmp_path, rows)
    path = tmp_path / f"{SEGMENT_SIZE:020d}.index"
    size = 8 * mark.segments[-1].offset_entries
    length = path.stat().st_size
    path.write_bytes(path.read_bytes()[:size] + bytes(20) + b"torn".ljust(length - size - 20, b"\0"))
    done = planned_sparse(Disk(), tmp_path, SEGMENT_SIZE, mark, mark.phy_offset, log_begin=0)
    assert done.cut == ((path, size, length),)
    carried_out(Disk(), done)
    assert path.stat().st_size == length
    assert not any(path.read_bytes()[size:])
    # Broken off between cutting and lengthening: the length comes back when it is opened.
    path.write_bytes(path.read_bytes()[:size])
    go_on(Disk(), tmp_path, recovered(Disk(), tmp_path, mark, mark.phy_offset), rows)
    assert path.stat().st_size == length


# --- a crash at any moment ---


def test_a_disk_that_cannot_be_read_is_not_a_damaged_file(tmp_path: Path) -> None:
    class Unreadable(Disk):
        def open_read(self, path: Path):  # type: ignore[no-untyped-def]
            raise DiskError("open", path, OSError(13, "Permission denied"))

    mark = built(Disk(), tmp_path, rows_of(2))
    with pytest.raises(DiskError):
        planned_sparse(Unreadable(), tmp_path, SEGMENT_SIZE, mark, mark.phy_offset, log_begin=0)
