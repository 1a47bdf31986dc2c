"""The checks of sparse indexes: silent about what SparseService makes of any log, and not about anything else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.compare.sparse import EntryDifference, SparseComparison
from indexd.errors import DiskError
from indexd.output import CheckScope, Condition
from indexd.sparse import check as check_module
from indexd.sparse import service as service_module
from indexd.sparse.check import check_sparse
from indexd.sparse.format import SparseMark, index_name
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from support.sparse_log import SEGMENT_SIZE, Row, batches_of, log_rows
from support.verifying import change

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.findings import Findings

INTERVALS = st.sampled_from([0, 1, 91, 300, 4096])
SPLITS = st.lists(st.integers(1, 9), min_size=1, max_size=3)


def build(directory: Path, rows: list[Row], interval: int) -> SparseMark:
    directory.mkdir()
    service = SparseService(Disk(), directory, SEGMENT_SIZE, interval)
    for batch in batches_of(rows, [7]):
        service.build(batch)
    mark = service.mark().held
    service.close()
    return mark


def check(directory: Path, mark: SparseMark, *, is_at_rest: bool = True) -> Findings:
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
        assert check(directory, mark).kept == []
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
        for finding in check(directory, mark).kept:
            assert finding.file == f"sparse/{path.name}"
            assert 0 <= finding.position // width - position // width <= 1


ROWS: list[Row] = [(position, 100, 1000 + position) for position in range(0, 3 * SEGMENT_SIZE, 128)]


def test_windows_count_all_and_keep_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = build(tmp_path / "sparse", ROWS, 0)
    path = tmp_path / "sparse" / index_name(0)
    path.write_bytes(b"\xff" * path.stat().st_size)
    monkeypatch.setattr(check_module, "KEPT_MAX", 5)
    found = check(tmp_path / "sparse", mark)
    count = mark.segments[0].offset_entries
    assert found.counts["entry-offset"] == found.counts["entry-position"] == count == 31
    assert sum(finding.what == "entry-offset" for finding in found.kept) == 5


def test_what_is_missing_too_much_or_nobodys(tmp_path: Path) -> None:
    mark = build(tmp_path / "sparse", ROWS, 300)
    (tmp_path / "sparse" / index_name(0)).unlink()
    (tmp_path / "sparse" / index_name(SEGMENT_SIZE * 9)).touch()
    assert check(tmp_path / "sparse", mark).counts == {"file-missing": 1, "file-unnamed": 1}
    assert check(tmp_path / "sparse", mark, is_at_rest=False).counts == {"file-missing": 1}
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
        check(tmp_path / "sparse", mark)
    with pytest.raises(DiskError):
        compare(tmp_path / "sparse", mark, ROWS, [50])
