"""Damaged logs and data directories: every intact message is found, or the answer does not claim to be complete.

As many as CI has time for; ``scripts/simulate --mutants`` makes as many more as it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from support.mutant_run import MutantRun

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
