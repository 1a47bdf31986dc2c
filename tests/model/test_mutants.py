"""A daemon that forgets one of the steps on which durability hangs is caught: the simulation can fail."""

from __future__ import annotations

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

RUNS = 60
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
        for seed in range(RUNS):
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
