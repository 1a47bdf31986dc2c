"""The chain of runs and the plan of index files, by hand: what one process would have read, in how many files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from indexd.commitlog.evidence import Evidence
from indexd.commitlog.format import Corrupt
from indexd.commitlog.reader import Skipped
from indexd.errors import CorruptDataError, DisturbedError
from indexd.spark.rebuild.job import Unreadable, chain, evidence_of, uncovered_of
from indexd.spark.rebuild.runs import Run
from indexd.spark.rebuild.stage_two import IndexTask
from indexd.spark.splits import Split
from support.reopened import config_for


def run_at(begin: int, end: int, next_offset: int | None = None, **keys: Any) -> Run:
    return Run(Split(begin, end), Path("x"), next_offset=end if next_offset is None else next_offset, **keys)


def unreadable(begin: int, end: int, offset: int) -> Unreadable:
    return Unreadable(Split(begin, end), offset, CorruptDataError(f"at {offset}"))


def chained(*found: Run | Unreadable, begin: int = 0, end: int = 300) -> tuple[list[tuple[int, int]], Split | None]:
    runs, missing = chain(found, begin, end, 100)
    return [(run.split.begin, run.next_offset) for run in runs], missing


def test_runs_that_chain() -> None:
    whole = [run_at(0, 100), run_at(100, 150), run_at(150, 200), run_at(200, 300, 260, ends_log=True)]
    ends = [(run.split.begin, run.next_offset) for run in whole]
    assert chained(*reversed(whole)) == (ends, None)
    assert chained(begin=0, end=0) == ([], None)
    assert chained(*whole[1:]) == ([], Split(0, 100))
    assert chained(*whole[:2], *whole[3:]) == (ends[:2], Split(150, 200))


def test_what_does_not_chain_is_read_again() -> None:
    # Beyond its end, as where a message reaches over it; short of it; over a whole segment.
    assert chained(run_at(0, 50, 60), run_at(50, 100)) == ([(0, 60)], Split(60, 100))
    assert chained(run_at(0, 50, 60), run_at(50, 100), run_at(60, 100)) == ([(0, 60), (60, 100)], Split(100, 200))
    assert chained(run_at(0, 50, 40), run_at(50, 100)) == ([(0, 40)], Split(40, 50))
    assert chained(run_at(0, 50, 220), run_at(50, 100)) == ([(0, 220)], Split(220, 300))
    with pytest.raises(DisturbedError):
        chained(run_at(0, 100, 0))


def test_the_logs_end_is_looked_at_again_where_more_was_planned() -> None:
    ended = run_at(0, 50, 40, ends_log=True)
    assert chained(ended, run_at(50, 100)) == ([(0, 40)], Split(40, 50))
    again = run_at(40, 50, 40, ends_log=True)
    assert chained(ended, run_at(50, 100), again) == ([(0, 40), (40, 40)], None)
    goes_on = run_at(40, 50)
    assert chained(ended, run_at(50, 100), goes_on)[0] == [(0, 40), (40, 50), (50, 100)]
    bad = unreadable(40, 50, 40)
    assert chained(run_at(0, 50, 40, ends_log=True), run_at(50, 100), bad) == ([(0, 40)], None)
    cut = run_at(0, 50, 40, ends_log=True, unreadable=Corrupt(40, "why"))
    assert chained(cut, run_at(50, 100)) == ([(0, 40)], None)


def test_a_split_that_does_not_begin_with_a_message_is_read_with_the_one_before_it() -> None:
    skipping = run_at(50, 100, skipped=(Skipped(50, 60, "why"),))
    for bad in (unreadable(50, 100, 50), skipping):
        assert chained(run_at(0, 50), bad) == ([(0, 50)], Split(0, 100))
        assert chained(run_at(0, 50), bad, run_at(0, 100)) == ([(0, 100)], Split(100, 200))
    with pytest.raises(CorruptDataError, match="at 70"):
        chained(run_at(0, 50), unreadable(50, 100, 70))
    with pytest.raises(CorruptDataError, match="at 20"):
        chained(run_at(0, 50), unreadable(50, 100, 50), unreadable(0, 100, 20))
    with pytest.raises(CorruptDataError, match="at 100"):
        chained(run_at(0, 100), unreadable(100, 200, 100))
    begins = run_at(100, 200, skipped=(Skipped(100, 120, "why"),))
    assert chained(run_at(0, 100), begins, end=200)[1] is None


def test_what_runs_say_together() -> None:
    def point(phy: int, messages: int) -> Evidence:
        return Evidence(phy, 10, phy, 0, messages)

    runs = [
        run_at(0, 100, messages=5, evidence=(point(0, 0), point(90, 4)), skipped=(Skipped(20, 30, "a"),)),
        run_at(100, 200),
        run_at(
            200, 300, messages=2, evidence=(point(200, 0),), skipped=(Skipped(200, 210, "a"), Skipped(210, 220, "a"))
        ),
    ]
    assert [(one.phy_offset, one.messages) for one in evidence_of(runs, 100)] == [(0, 0), (90, 4), (200, 5)]
    assert [(gap.begin, gap.end) for gap in uncovered_of(runs)] == [(20, 30), (200, 220)]
    assert evidence_of([], 100) == ()


@pytest.mark.parametrize(
    ("entries", "ends_with_entry", "files"),
    [
        ((), True, 0),
        ((0,), False, 1),
        ((3, 0, 6), True, 3),
        ((3, 0, 6), False, 4),
        ((9, 0), False, 4),
        ((10,), True, 4),
    ],
)
def test_how_many_index_files(tmp_path: Path, entries: tuple[int, ...], ends_with_entry: bool, files: int) -> None:
    config = config_for(tmp_path / "store", tmp_path / "data", index_num=4)
    runs = [
        run_at(number, number + 1, messages=max(count, 1), entries=count, ends_with_entry=count > 0)
        for number, count in enumerate(entries)
    ]
    if runs and not ends_with_entry:
        runs.append(run_at(99, 100, messages=1))
    tasks = IndexTask.plan(runs, config, tmp_path)
    assert len(tasks) == files
    assert sum(task.entries for task in tasks) == sum(entries)
    assert [task.is_full for task in tasks] == [True] * (files - 1) + [False] * (files > 0)
    for task in tasks:
        assert sum(run.entries for run in runs[task.first_run : task.last_run]) >= task.entries
        assert sum(run.entries for run in runs[: task.first_run]) == task.run_first
        assert (task.previous is None) == (task.first == 0)
        if task.previous is not None:
            run, entry = task.previous
            assert sum(one.entries for one in runs[:run]) + entry == task.first - 1
            assert entry < runs[run].entries
