"""A fixed run of a World that meets every change of the disk that a daemon makes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from support.simulation import World


def script(world: World) -> None:
    """A first start, drains, rolls, an older persist between newer drains, expiry, a stop, a crash, a kill, a stop."""
    assert world.start()
    for count in (12, 30, 5):
        world.log.append(count)
        assert world.catch_up()
    world.do(lambda daemon: daemon.send())
    world.log.append(25)
    assert world.catch_up()
    world.do(lambda daemon: daemon.persist())
    world.log.append(8)
    assert world.catch_up()
    world.do(lambda daemon: daemon.persisted())
    assert world.flush()
    world.expire()
    world.log.append(20)
    assert world.catch_up()
    assert world.flush()
    world.log.append(3)
    assert world.catch_up()
    assert world.stop()
    for end in (world.crash, world.kill):
        assert world.start()
        world.log.append(15)
        assert world.catch_up()
        assert world.flush()
        world.log.append(10)
        assert world.catch_up()
        end()
    world.finish()


def at_every_change(world: World, look: Callable[[World, int], None]) -> int:
    """Run the script; before each change of the disk, ``look`` gets a copy of the world that is about to lose power.

    The number of changes.
    """
    seen = 0

    def before(operation: str, path: Path) -> None:
        nonlocal seen
        seen += 1
        look(world.fork(), seen)

    world.disk.before_change = before
    script(world)
    return seen


def crash_and_recover(world: World, seed: int) -> World:
    """Lose power with these pages kept, look at what lies there, start, catch up, stop; all of it is checked."""
    world.disk.crash(random.Random(seed))
    world.query(live=False)
    world.finish()
    return world
