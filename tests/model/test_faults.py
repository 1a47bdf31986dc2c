"""Each call fails once, or for as long as nobody mends it; in the end the index is as if nothing had been."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.sim_daemon import Shape
from support.sim_fault import OPERATIONS, FaultMap
from support.simulation import World

SHAPE = Shape(hash_slot_num=200, index_num=30, window=7)
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
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """How often each operation is called when nothing fails."""
    world = World(tmp_path_factory.mktemp("undisturbed"), 1, SHAPE)
    live(world)
    world.kill()
    return dict(world.disk.counts)


@pytest.mark.parametrize("name", ERRNOS)
@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - UNUSED))
def test_one_call_fails(tmp_path: Path, calls: dict[str, int], operation: str, name: str) -> None:
    count = calls.get(operation, 0)
    for nth in sorted({1, max(count // 3, 1), max(2 * count // 3, 1), max(count, 1)}):
        world = World(tmp_path / str(nth), 1, SHAPE)
        faults = world.disk.faults = FaultMap.parse(f"{operation}#{nth}={name}")
        live(world)
        assert sum(faults.injected.values()) == (nth <= count)
        world.finish()


@pytest.mark.parametrize("name", ERRNOS)
@pytest.mark.parametrize("operation", sorted(set(OPERATIONS) - UNUSED))
def test_every_call_fails_until_it_is_mended(tmp_path: Path, operation: str, name: str) -> None:
    world = World(tmp_path, 1, SHAPE)
    live(world)
    world.disk.faults = FaultMap.parse(f"{operation}@all={name}")
    live(world)
    world.finish()


def test_each_write_is_short(tmp_path: Path, calls: dict[str, int]) -> None:
    for nth in range(1, calls["pwrite"] + 1, 3):
        world = World(tmp_path / str(nth), 1, SHAPE)
        world.disk.faults = FaultMap.parse(f"pwrite#{nth}=short")
        live(world)
        world.finish()


@pytest.mark.parametrize("fault", ["crash", "crash-after"])
@pytest.mark.parametrize("operation", ["fsync", "rename", "sync_dir", "unlink", "allocate"])
def test_the_power_fails_beside_a_call(tmp_path: Path, calls: dict[str, int], operation: str, fault: str) -> None:
    for nth in range(1, calls[operation] + 1, 4):
        world = World(tmp_path / str(nth), nth, SHAPE)
        world.disk.faults = FaultMap.parse(f"{operation}#{nth}={fault}")
        live(world)
        world.finish()
