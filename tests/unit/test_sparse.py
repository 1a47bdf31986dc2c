"""Sparse indexes: names and marks, building from batches however they are cut, checks, recovery."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.compare.secondary import EntryDifference, SparseComparison
from indexd.errors import DiskError
from indexd.findings import Findings
from indexd.output import Condition, OutputRecovery, RecoveryScope
from indexd.sparse.check import check_sparse, recover_sparse
from indexd.sparse.format import (
    SparseMark,
    index_name,
    own_base,
    time_index_name,
)
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from support.queues import (
    SEGMENT_SIZE,
    Row,
    carried_out,
    expected_files,
    log_rows,
    made_durable,
    scope_of,
    sparse_batch,
    sparse_batches,
)
from support.verifying import change

SPLITS = st.lists(st.integers(1, 12), min_size=1, max_size=4)

# --- names and marks ---


def test_bases_of_names() -> None:
    assert own_base(index_name(5)) == own_base(time_index_name(5)) == 5
    others = ["5.index", index_name(5) + ".deleted", "x" + index_name(5), f"{5:020d}", f"{5:020d}.log"]
    assert {own_base(name) for name in (*others, "٣" * 20 + ".index", f"{2**63:020d}.index")} == {None}


GOOD = {"interval": 1, "phyOffset": 9, "segments": [[0, 1, 2, 3], [8, 1, 0, 0]], "active": [1, -1, 0, -1]}
WRONG: dict[str, list[Any]] = {
    "interval": [-1, "1", True, 1.5],
    "phyOffset": [-1, 1 << 64, None],
    "segments": [[[0, 1, 2]], [[0, 1, 2, -3]], [[8, 1, 2, 3], [0, 1, 2, 3]], [[8, 1, 2, 3]] * 2, [5], None, []],
    "active": [[1, 2, 3], "abcd", 5],
}


def test_a_mark_that_nobody_wrote() -> None:
    SparseMark.from_json(GOOD)
    rows = [GOOD | {key: value} for key, values in WRONG.items() for value in values]
    missing = [{name: value for name, value in GOOD.items() if name != key} for key in GOOD]
    for row in (*rows, *missing, None, 5, [], "x"):
        with pytest.raises((ValueError, TypeError, KeyError)):
            SparseMark.from_json(row)


# --- sparse indexes: building and checks ---

INTERVALS = st.sampled_from([0, 90, 91, 300, 1000, 4096, 1 << 30])


def sparse_files(directory: Path, mark: SparseMark) -> dict[str, bytes]:
    """Name -> what the mark says of each file: a sealed one is exactly that, a growing one ends in zeros."""
    found = {}
    for segment in mark.segments:
        for name, size in segment.files:
            data = (directory / name).read_bytes()
            assert segment not in mark.sealed or len(data) == size
            assert not any(data[size:])
            found[name] = data[:size]
    assert found.keys() == {path.name for path in directory.iterdir()}
    return found


@given(log_rows(), INTERVALS, SPLITS, st.data())
def test_any_log_in_any_batches_makes_the_files_of_the_plain_rule(
    rows: list[Row], interval: int, split: list[int], data: st.DataObject
) -> None:
    """Now and then a service goes on from the mark of another, or gets what is in already."""
    with tempfile.TemporaryDirectory() as name:
        service, entries = SparseService(Disk(), Path(name), SEGMENT_SIZE, interval), 0
        parts = sparse_batches(rows, split)
        for at, batch in enumerate(parts):
            service.build(batch)
            what = data.draw(st.integers(0, 5))
            if what < 2:
                mark = service.mark().held
                done = [row for row in rows if row[0] < batch.end_offset]
                assert sparse_files(Path(name), mark) == expected_files(done, interval)
                assert sum(segment.messages for segment in mark.segments) == len(done)
            if what == 0:
                service.close()
                entries += service.entries
                service = SparseService(Disk(), Path(name), SEGMENT_SIZE, interval)
                service.load(SparseMark.from_json(mark.to_json()))
                assert service.mark().held == mark
            elif what == 5:
                for earlier in data.draw(st.lists(st.sampled_from(parts[: at + 1]), max_size=2)):
                    service.build(earlier)
        mark = service.mark().held
        assert sparse_files(Path(name), mark) == expected_files(rows, interval)
        made = sum(segment.offset_entries + segment.time_entries for segment in mark.segments)
        assert service.entries + entries == made
        service.close()


def build_sparse(directory: Path, rows: Sequence[Row], interval: int = 300) -> SparseMark:
    """Build, and close as a clean stop does."""
    directory.mkdir(exist_ok=True)
    service = SparseService(Disk(), directory, SEGMENT_SIZE, interval)
    for batch in sparse_batches(rows, [7]):
        service.build(batch)
    held: SparseMark = made_durable(Disk(), service).held
    return held


def check(directory: Path, mark: SparseMark, condition: Condition = Condition.AT_REST) -> Findings:
    return check_sparse(Disk(), directory, SEGMENT_SIZE, mark, scope_of(condition))


def compare(
    directory: Path, mark: SparseMark, rows: Sequence[Row], split: Sequence[int] = (50,), begin: int = 0
) -> list[EntryDifference]:
    comparison = SparseComparison(Disk(), directory, SEGMENT_SIZE, mark, begin)
    parts = sparse_batches([row for row in rows if row[0] >= begin], split)
    return [found for batch in parts for found in comparison.take(batch)] + list(comparison.finish())


@settings(max_examples=40)
@given(rows=log_rows(), interval=INTERVALS, split=SPLITS, data=st.data())
def test_every_changed_byte_of_a_sparse_index_is_found_where_it_is(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row], interval: int, split: list[int], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("any")
    mark = build_sparse(directory, rows, interval)
    begin = rows[len(rows) // 2][0] // SEGMENT_SIZE * SEGMENT_SIZE
    assert check(directory, mark).kept == []
    assert compare(directory, mark, rows, split) == compare(directory, mark, rows, split, begin) == []
    widths = zip(mark.segments, strict=True)
    files = [(*file, width) for (segment,) in widths for file, width in zip(segment.files, (8, 12), strict=True)]
    if not (used := [row for row in files if row[1]]):
        return
    name, size, width = data.draw(st.sampled_from(used))
    position, path = data.draw(st.integers(0, size - 1)), directory / name
    change(path, position, bytes([path.read_bytes()[position] ^ 1 << data.draw(st.integers(0, 7))]))
    (found,) = compare(directory, mark, rows, [7])
    assert (found.name, found.position) == (path.name, position // width * width)
    # Without the log not every wrong number can be told; those that are told are this one or its neighbour.
    for finding in check(directory, mark).kept:
        assert finding.file == f"sparse/{path.name}"
        assert 0 <= finding.position // width - position // width <= 1


ROWS: list[Row] = [(position, 100, 1000 + position) for position in range(0, 3 * SEGMENT_SIZE, 128)]


def test_a_log_that_is_longer_shorter_or_has_other_segments(tmp_path: Path) -> None:
    mark = build_sparse(tmp_path, ROWS)
    last = mark.segments[-1]
    texts = [found.text for found in compare(tmp_path, mark, ROWS[:-1])]
    assert texts == [f"the segment has {last.messages - 1} messages, but the frontier says 32"]
    (found, *_) = compare(tmp_path, mark, ROWS[:-20])
    wanted = index_name(2 * SEGMENT_SIZE), f"{last.offset_entries} entries, but the log comes to 2"
    assert (found.name, found.text) == wanted
    assert compare(tmp_path, mark, ROWS[:64])[-1].text == "the log has no message of this segment"
    texts = [found.text for found in compare(tmp_path, mark._replace(segments=mark.segments[1:]), ROWS)]
    assert texts == ["the segment has 32 messages, and the frontier names no sparse indexes of it"]
    # Files that are gone are for the check to say, and no difference; a directory in their place is an error.
    path = tmp_path / index_name(0)
    path.unlink()
    (tmp_path / index_name(SEGMENT_SIZE * 9)).touch()
    assert check(tmp_path, mark).counts == {"file-missing": 1, "file-unnamed": 1}
    assert check(tmp_path, mark, Condition.GROWING).counts == {"file-missing": 1}
    comparison = SparseComparison(Disk(), tmp_path, SEGMENT_SIZE, mark, 0)
    assert [one for batch in sparse_batches(ROWS, [50]) for one in comparison.take(batch)] == []
    assert comparison.gone == [path.name]
    path.mkdir()
    for call in (check, lambda *about: compare(*about, ROWS)):
        with pytest.raises(DiskError):
            call(tmp_path, mark)


# --- sparse indexes: recovery ---


def rows_of(segments: int) -> list[Row]:
    places = [(segment, number) for segment in range(segments) for number in range(30)]
    return [(SEGMENT_SIZE * segment + 100 * number, 100, 1000 * segment + number) for segment, number in places]


def planned_sparse(
    directory: Path, mark: SparseMark, disk: Disk | None = None, *, is_unclean: bool = True
) -> OutputRecovery[SparseMark]:
    end = mark.phy_offset
    scope = RecoveryScope(end, end, 0, is_unclean)
    return recover_sparse(disk or Disk(), directory, SEGMENT_SIZE, mark, mark.interval, scope)


def recovered(directory: Path, mark: SparseMark) -> OutputRecovery[SparseMark]:
    """Plan, and do it; a second plan keeps all of it."""
    first = planned_sparse(directory, mark)
    carried_out(Disk(), first)
    second = planned_sparse(directory, first.held)
    assert (second.held, second.delete, second.reasons) == (first.held, (), ())
    return first


def go_on_sparse(directory: Path, done: OutputRecovery[SparseMark], rows: Sequence[Row]) -> None:
    """Read the log again as far as needed, and on; the files are those of an undisturbed build."""
    service = SparseService(Disk(), directory, SEGMENT_SIZE, 300)
    service.load(done.held)
    begin = done.held.phy_offset if done.refill_from is None else done.refill_from
    if left := [row for row in rows if row[0] >= begin]:
        service.build(sparse_batch(left))
    assert sparse_files(directory, made_durable(Disk(), service).held) == expected_files(rows, 300)


def test_a_clean_stop_leaves_nothing_to_do(tmp_path: Path) -> None:
    rows = rows_of(3)
    mark = build_sparse(tmp_path, rows)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    done = planned_sparse(tmp_path, mark, is_unclean=False)
    assert done == OutputRecovery(mark)
    carried_out(Disk(), done)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    go_on_sparse(tmp_path, done, rows)
    done = planned_sparse(tmp_path / "none", SparseMark(300))
    assert (done.held, done.refill_from, done.delete) == (SparseMark(300), None, ())


def test_indexes_that_no_mark_names_go_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    mark = build_sparse(tmp_path, rows_of(2))
    leftovers = {f"{9 * SEGMENT_SIZE:020d}.index", f"{5:020d}.timeindex"}
    foreign = {"notes.txt", f"{5:020d}.index.deleted", "5.index"}
    for name in leftovers | foreign:
        (tmp_path / name).write_bytes(b"x")
    assert {path.name for path in recovered(tmp_path, mark).delete} == leftovers
    assert foreign <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("number", "is_time", "keep", "data"),
    [
        pytest.param(1, False, None, b"", id="missing"),
        pytest.param(1, True, None, b"", id="missing time"),
        pytest.param(1, False, 8, b"", id="short"),
        pytest.param(1, True, 0, bytes(12), id="long"),
        pytest.param(1, False, 4, bytes(4), id="position"),
        pytest.param(1, False, 8, b"\0\0\0\x7f\0\0\x0c\x1c", id="offset"),
        pytest.param(1, True, 4, b"\xff\xff\xff\xff", id="time offset"),
        pytest.param(3, True, 5, b"\x00\0\0\0\x1d", id="timestamp"),
        pytest.param(3, False, 1, b"", id="active short"),
    ],
)
def test_what_does_not_hold_is_built_again_with_all_behind(
    tmp_path: Path, number: int, is_time: bool, keep: int | None, data: bytes
) -> None:
    """``keep``: so many bytes at the end of the entries give way to ``data``; without it the file is gone."""
    rows = rows_of(4)
    mark = build_sparse(tmp_path, rows)
    base, (name, size) = number * SEGMENT_SIZE, mark.segments[number].files[is_time]
    if keep is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[: size - keep] + data)
    done = recovered(tmp_path, mark)
    assert done.refill_from == base
    (reason,) = done.reasons
    assert f"{base:020d}" in reason
    assert done.held == SparseMark(300, base, mark.segments[:number], None)
    go_on_sparse(tmp_path, done, rows)


def test_bytes_behind_the_mark_become_zeros(tmp_path: Path) -> None:
    rows = rows_of(2)
    mark = build_sparse(tmp_path, rows)
    name, size = mark.segments[-1].files[0]
    path = tmp_path / name
    length = path.stat().st_size
    path.write_bytes(path.read_bytes()[:size] + bytes(20) + b"torn".ljust(length - size - 20, b"\0"))
    done = recovered(tmp_path, mark)
    assert (path, size, length) in done.cut
    assert path.stat().st_size == length
    assert not any(path.read_bytes()[size:])
    # Trimmed, as a segment that was closed after the mark: the length comes back.
    path.write_bytes(path.read_bytes()[:size])
    go_on_sparse(tmp_path, recovered(tmp_path, mark), rows)
    assert path.stat().st_size == length


def test_a_disk_that_cannot_be_read_is_not_a_damaged_file(tmp_path: Path) -> None:
    class Unreadable(Disk):
        def open_read(self, path: Path):  # type: ignore[no-untyped-def]
            raise DiskError("open", path, OSError(13, "Permission denied"))

    mark = build_sparse(tmp_path, rows_of(2))
    with pytest.raises(DiskError):
        planned_sparse(tmp_path, mark, Unreadable())
