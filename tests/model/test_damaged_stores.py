"""Damaged logs and data directories: every intact message is found, or the answer does not claim to be complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from indexd.query import open_data
from indexd.recovery.rebuild import rebuild
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.mutant_run import MutantRun
from support.reading import SEGMENT_SIZE, patch
from support.reopened import config_for

#: One of them is asked over HTTP as well, and one by the command line.
FIRST, MUTANTS = 6012, 13


def test_no_answer_is_silent_about_what_it_lacks(tmp_path: Path) -> None:
    tally = run_many(tmp_path, range(FIRST, FIRST + MUTANTS))
    assert tally["found"] > 100 * MUTANTS
    assert tally["said to be missing"] > 0


def run_many(root: Path, seeds: Iterable[int]) -> Counter[str]:
    """Mutants; the first silent answer ends the test."""
    tally: Counter[str] = Counter()
    for seed in seeds:
        print(f"scripts/simulate --mutants 1 --seed {seed}")
        run = MutantRun(root / str(seed), seed)
        run.go()
        tally.update(run.tally())
    print(dict(tally))
    return tally


def write(directory: Path, times: range, at: int = 0) -> list[int]:
    with CommitLogWriter(directory, SEGMENT_SIZE, start_offset=at) as writer:
        return [writer.append(FrameSpec("T", b"x" * 50, {"KEYS": "k"}, store_timestamp=time)) for time in times]


def test_behind_a_cut_the_message_that_stands_there_now_is_found_even_if_its_body_is_damaged(tmp_path: Path) -> None:
    """No CRC is computed of a segment that is closed; the removed message, as long and with the same key, is gone."""
    log = tmp_path / "store" / "commitlog"
    first = write(log, range(1000, 1010))
    wanted = [first[0], *write(log, range(5000, 5000 + 2 * SEGMENT_SIZE // first[1]), first[1])]
    patch(log / f"{0:020d}", first[1] + 10, bytes(2))
    config = config_for(tmp_path / "store", tmp_path / "data", segment_size=SEGMENT_SIZE)
    rebuild(config, Disk(), tmp_path / "data", lambda *_: None)
    with open_data(tmp_path / "data") as data:
        answer = data.by_key("T", "k", max_num=10_000)
    assert {hit.phy_offset: hit.store_timestamp for hit in answer.hits}[first[1]] == 5000
    assert sorted(hit.phy_offset for hit in answer.hits) == wanted
