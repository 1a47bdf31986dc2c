"""Random worlds of the simulation, as many as CI has time for; and daemons that forget a step, which are caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from indexd.flush.pipeline import Pipeline
from indexd.recovery import open as open_module
from support.sim_checks import BrokenError
from support.sim_daemon import Shape
from support.sim_disk import SimDisk, SimFile
from support.sim_random import RandomRun
from support.simulation import World, at_every_change, crash_and_recover

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


MUTANT_RUNS = 60
SHAPE = Shape(index_num=60, hash_slot_num=1500)


def no_fsync(part: str) -> Callable[[SimFile], None]:
    """Syncs all but what has ``part`` in its path."""
    real = SimFile.fsync
    return lambda file: None if part in str(file.path) else real(file)


MUTANTS = {
    "index files are not synced": mock.patch.object(SimFile, "fsync", no_fsync("/index/")),
    "the frontier is not synced": mock.patch.object(SimFile, "fsync", no_fsync("/frontier.")),
    "names are not synced": mock.patch.object(SimDisk, "sync_dir", return_value=None),
    "what a crash left is not looked at": mock.patch.object(
        # Neither at the abort flag nor at the time of the last write.
        open_module,
        "look",
        lambda *args, unclean, **kwargs: replace(LOOK(*args, unclean=False, **kwargs), mtimes_ns={}),
    ),
    "a flush forgets the files that became full": mock.patch.object(
        Pipeline, "persist", lambda pipeline, progress: PERSIST(pipeline, without_full(progress))
    ),
}
LOOK = open_module.look
PERSIST = Pipeline.persist


def without_full(progress):  # type: ignore[no-untyped-def]
    """A progress whose full files nobody syncs."""
    index, *others = progress.marks
    left = tuple(file for file in index.unsynced if file not in index.final)
    return replace(progress, marks=(replace(index, unsynced=left), *others))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_random_runs_catch_it(tmp_path: Path, mutant: str) -> None:
    def go() -> None:
        for seed in range(MUTANT_RUNS):
            RandomRun(tmp_path / str(seed), seed).go()

    with MUTANTS[mutant], pytest.raises(BrokenError):
        go()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_crash_at_every_change_catches_it(tmp_path: Path, mutant: str) -> None:
    def look(world: World, at: int) -> None:
        for seed in range(2):
            crash_and_recover(world.fork(), 1000 * at + seed)

    with MUTANTS[mutant], pytest.raises(BrokenError):
        at_every_change(World(tmp_path, 1, SHAPE), look)
