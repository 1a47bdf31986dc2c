"""The power fails at every single change of the disk, and again at every change of the recovery."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.sim_daemon import Shape
from support.simulation import World, at_every_change, crash_and_recover, script

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
    runs = 0

    def look(world: World, at: int) -> None:
        nonlocal runs
        if at % step == 0:
            crash_and_recover(world.fork(), 1000 * at)
            runs += 1

    changes = at_every_change(World(tmp_path, 1, shape), look)
    assert changes > 150
    assert runs >= changes // step


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
    looked = 0

    def look(world: World, at: int) -> None:
        nonlocal looked
        if at % 5:
            return
        looked += 1
        if is_power_lost:
            world.disk.crash(random.Random(at))
        else:
            world.disk.kill()
        states = []
        for _ in range(2):
            assert world.start()
            marks = world.up.pipeline.progress.frontier.index
            states.append(
                (world.read_files(marks), marks, world.up.pipeline.built.phy_offset, world.up.pipeline.built.messages)
            )
            world.kill()
        assert states[0] == states[1]

    at_every_change(World(tmp_path, 3, SHAPES[0]), look)
    assert looked > 30


def test_the_script_meets_every_change_that_there_is(tmp_path: Path) -> None:
    world = World(tmp_path, 1, SHAPES[0])
    script(world)
    met = {name for name in world.disk.counts if world.disk.counts[name]}
    assert {"create", "pwrite", "allocate", "fsync", "rename", "unlink", "make_dir", "sync_dir"} <= met
    assert world.tally["expired segments"]
    assert world.tally["lost"] == world.tally["invented"] == world.tally["twice"] == 0
