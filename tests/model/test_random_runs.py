"""As many random runs as CI has time for; ``scripts/simulate`` makes as many more as it is asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from support.sim_random import RandomRun

RUNS = 25
REWRITING_RUNS = 20
FIRST_SEED = 20260716
#: What so many runs must have met, or they have looked at nothing.
MET = {"recoveries": 100, "crashes": 40, "crashes inside a recovery": 2, "kills": 20, "queries": 40}


def test_random_runs_lose_nothing_and_invent_nothing(tmp_path: Path) -> None:
    tally = run_many(tmp_path, RUNS, rewrites=False)
    assert all(tally[what] >= least for what, least in MET.items())


def test_nor_do_they_when_the_broker_rewrites_the_end_of_its_log(tmp_path: Path) -> None:
    tally = run_many(tmp_path, REWRITING_RUNS, rewrites=True)
    assert tally["rewrites"] > REWRITING_RUNS


@pytest.mark.parametrize(
    ("seed", "rewrites"),
    [
        # A refill was broken off, and the log expired before it went on: the queues begin anew behind that.
        (2963390509, False),
        (20670725, True),
        # A message without keys gave way to one that enters no queue.
        (2705521268, True),
        # A segment was closed for a message that the disk refused, and then the log was cut before that one.
        (2076348614, True),
        # A segment that was closed when it was read became the last one, and was written anew before the drain.
        (992389382, True),
    ],
)
def test_what_failed_once(tmp_path: Path, seed: int, rewrites: bool) -> None:
    RandomRun(tmp_path, seed, rewrites=rewrites).go()


def run_many(root: Path, count: int, *, rewrites: bool) -> Counter[str]:
    """The first run that breaks something ends the test."""
    tally: Counter[str] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + count):
        print(f"scripts/simulate --seed {seed}" + (" --rewrites" if rewrites else ""))
        run = RandomRun(root / str(seed), seed, rewrites=rewrites)
        run.go()
        tally.update(run.tally())
    print(dict(tally))
    assert tally["lost"] == tally["invented"] == tally["twice"] == 0
    return tally


def test_one_seed_is_one_run(tmp_path: Path) -> None:
    runs = []
    for place in ("a", "b"):
        run = RandomRun(tmp_path / place, 12)
        run.go()
        runs.append((run.history, run.tally()))
    assert runs[0] == runs[1]
