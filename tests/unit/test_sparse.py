"""Sparse indexes: names and marks, building from batches however they are cut, checks, recovery."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.output import OutputRecovery, RecoveryScope
from indexd.sparse.format import (
    SparseMark,
    index_name,
    own_base,
    time_index_name,
)
from indexd.sparse.service import SparseService, check_sparse, recover_sparse
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


def test_more_entries_than_are_written_or_read_at_once(tmp_path: Path) -> None:
    rows: list[Row] = [(number * 96, 96, number) for number in range(70_000)]
    service = SparseService(Disk(), tmp_path, 1 << 23, 0)
    service.build(sparse_batch(rows))
    mark = service.mark().held
    assert sparse_files(tmp_path, mark) == expected_files(rows, 0, 1 << 23)
    assert check_sparse(Disk(), tmp_path, 1 << 23, mark, scope_of()).kept == []


# --- sparse indexes: recovery ---


def rows_of(segments: int) -> list[Row]:
    places = [(segment, number) for segment in range(segments) for number in range(30)]
    return [(SEGMENT_SIZE * segment + 100 * number, 100, 1000 * segment + number) for segment, number in places]


def planned_sparse(directory: Path, mark: SparseMark, *, is_unclean: bool = True) -> OutputRecovery[SparseMark]:
    end = mark.phy_offset
    scope = RecoveryScope(end, end, 0, is_unclean)
    return recover_sparse(Disk(), directory, SEGMENT_SIZE, mark, mark.interval, scope)


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
