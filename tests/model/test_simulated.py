"""Simulated worlds: a crash at every change of the disk, calls that fail, random runs; daemons that forget a step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from indexd.errors import CorruptDataError
from indexd.flush.pipeline import Pipeline
from indexd.recovery import open as open_module
from indexd.recovery.recover import OnDisk
from support.sim_daemon import Shape
from support.sim_disk import OPERATIONS, Fault, SimDisk, SimFile
from support.simulation import RandomRun, World, at_every_change, crash_and_recover

SHAPES = [
    # Several pages a file, a file every few drains; and files of less than a page, several a drain.
    Shape(index_num=250, hash_slot_num=1500, segment_size=16 << 10),
    Shape(index_num=20, hash_slot_num=50, segment_size=16 << 10, window=7),
]
#: So often a recovery is itself broken off, at each of its changes.
RECOVERIES = 4


@pytest.mark.parametrize(("shape", "step"), [(SHAPES[0], 1), (SHAPES[1], 3)], ids=["large", "small"])
def test_a_crash_at_every_change_loses_nothing(tmp_path: Path, shape: Shape, step: int) -> None:
    # Of the small files, of which each drain makes several, at every third; scripts/simulate crashes anywhere.
    def look(world: World, at: int) -> None:
        if at % step == 0:
            crash_and_recover(world.fork(), 1000 * at)

    world = World(tmp_path, 1, shape)
    assert at_every_change(world, look) > 150
    changes = {"create", "pwrite", "allocate", "fsync", "rename", "unlink", "make_dir", "sync_dir"}
    assert changes <= world.disk.counts.keys()
    assert world.tally["expired segments"]


@pytest.mark.parametrize("shape", SHAPES, ids=["large", "small"])
def test_a_crash_at_every_change_of_a_recovery_loses_nothing(tmp_path: Path, shape: Shape) -> None:
    # The changes at which the first crash comes are spread over the script.
    places = set(random.Random(1).sample(range(1, 250), RECOVERIES))
    second = 0

    def look(world: World, at: int) -> None:
        nonlocal second
        if at not in places:
            return
        world.disk.crash(random.Random(at))
        changes = 0
        while True:
            twin = world.fork()
            twin.disk.crash_at = twin.disk.changes + changes
            if twin.start():
                break
            second += 1
            twin.query(live=False)
            twin.finish()
            changes += 1

    at_every_change(World(tmp_path, 2, shape), look)
    assert second > 10 * RECOVERIES


@pytest.mark.parametrize("is_power_lost", [True, False], ids=["power", "kill"])
def test_a_recovery_of_what_was_recovered_changes_nothing(tmp_path: Path, *, is_power_lost: bool) -> None:
    def look(world: World, at: int) -> None:
        if at % 5:
            return
        if is_power_lost:
            world.disk.crash(random.Random(at))
        else:
            world.disk.kill()
        states = []
        for _ in range(2):
            assert world.start()
            marks, built = world.up.pipeline.progress.frontier.index, world.up.pipeline.built
            files = [world.disk.peek(world.data / "index" / mark.name) for mark in marks]
            states.append((files, marks, built.phy_offset, built.messages))
            world.kill()
        assert states[0] == states[1]

    assert at_every_change(World(tmp_path, 3, SHAPES[0]), look) > 150


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
        tally.update(run.tally)
    print(dict(tally))
    return tally


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
        lambda *args, unclean, **kwargs: as_it_was_left(LOOK(*args, unclean=False, **kwargs)),
    ),
    "a flush forgets the files that became full": mock.patch.object(
        Pipeline, "persist", lambda pipeline, progress: PERSIST(pipeline, without_full(progress))
    ),
}
LOOK = open_module.look
PERSIST = Pipeline.persist


def as_it_was_left(found: OnDisk) -> OnDisk:
    """With the times that the frontier knows."""
    known = {mark.name: mark.mtime_ns for mark in found.frontier.index} if found.frontier else {}
    stamps = {name: stamp._replace(mtime_ns=known.get(name, 0)) for name, stamp in found.stamps.items()}
    return replace(found, stamps=stamps)


def without_full(progress):  # type: ignore[no-untyped-def]
    """A progress whose full files nobody syncs."""
    index, *others = progress.marks
    full = {mark.name for mark in index.held if mark.full}
    left = tuple(path for path in index.unsynced if path.name not in full)
    return replace(progress, marks=(replace(index, unsynced=left), *others))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_crash_at_every_change_catches_it(tmp_path: Path, mutant: str) -> None:
    def look(world: World, at: int) -> None:
        for seed in range(2):
            crash_and_recover(world.fork(), 1000 * at + seed)

    with MUTANTS[mutant], pytest.raises((AssertionError, CorruptDataError)):
        at_every_change(World(tmp_path, 1, SHAPE), look)


SMALL = Shape(hash_slot_num=200, index_num=30, window=7)
ERRNOS = ["EIO", "ENOSPC", "EROFS", "EMFILE"]
#: A running daemon never asks for these, or only where it makes itself a directory that is there.
UNUSED = {"remove_dir", "link", "exchange"}
ROUNDS = 7


def live(world: World) -> None:
    """Some rounds of a daemon that is started again whenever it ends, with crashes and a stop in between."""
    for turn in range(ROUNDS):
        world.log.append(9)
        for step in (world.catch_up, world.flush, world.expire):
            if not world.is_up:
                world.start()
            if world.is_up:
                step()
        if world.is_up and turn == 2:
            world.stop()
        if world.is_up and turn == 4:
            world.crash(random.Random(turn))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> SimDisk:
    """What a disk has counted when nothing fails."""
    world = World(tmp_path_factory.mktemp("undisturbed"), 1, SMALL)
    live(world)
    world.kill()
    return world.disk


@pytest.mark.parametrize("name", ERRNOS)
@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - UNUSED))
def test_one_call_fails(tmp_path: Path, undisturbed: SimDisk, operation: str, name: str) -> None:
    count = undisturbed.counts[operation]
    for nth in sorted({1, max(count // 2, 1), max(count, 1)}):
        world = World(tmp_path / str(nth), 1, SMALL)
        world.disk.faults = [Fault(operation, name, nth=nth)]
        live(world)
        assert sum(world.disk.injected.values()) == (nth <= count)
        world.finish()


@pytest.mark.parametrize("name", ERRNOS)
@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - UNUSED))
def test_every_call_fails_until_it_is_mended(tmp_path: Path, operation: str, name: str) -> None:
    world = World(tmp_path, 1, SMALL)
    live(world)
    world.disk.faults = [Fault(operation, name, nth=0)]
    live(world)
    world.finish()


def test_each_write_is_short(tmp_path: Path, undisturbed: SimDisk) -> None:
    for nth in range(1, undisturbed.counts["pwrite"] + 1, 3):
        world = World(tmp_path / str(nth), 1, SMALL)
        world.disk.faults = [Fault("pwrite", "short", nth=nth)]
        live(world)
        world.finish()


def test_the_power_fails_while_it_lives(tmp_path: Path, undisturbed: SimDisk) -> None:
    for at in range(0, undisturbed.changes, 8):
        world = World(tmp_path / str(at), at, SMALL)
        world.disk.crash_at = at
        live(world)
        world.finish()
