"""What random runs, the crash at every change and mutants have found, each as a plain run of its own; and mutants."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from indexd.query import open_data
from indexd.recovery.rebuild import rebuild
from indexd.storage.disk import Disk
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.mutants import MutantRun
from support.reading import SEGMENT_SIZE, patch
from support.reopened import config_for
from support.sim_daemon import Shape
from support.sim_disk import Fault
from support.simulation import World
from support.small_log import BASE_TIME

SHAPE = Shape(hash_slot_num=50, index_num=400)


def built(root: Path, count: int = 30, shape: Shape = SHAPE) -> World:
    """A running daemon that has made ``count`` messages durable."""
    world = World(root, 1, shape)
    assert world.start()
    world.build(count)
    assert world.flush()
    return world


def finish(world: World) -> None:
    """Ask the running daemon for keys of the log; then all of it is checked."""
    for _ in range(80):
        world.query(live=True)
    world.finish()


def test_what_could_not_be_published_is_not_said_to_be_covered(tmp_path: Path) -> None:
    """The last write of a drain fails, so its entries are in memory alone; DATA/state must not speak for them."""
    world = built(tmp_path)
    world.log.append(10)
    world.disk.faults = [Fault("pwrite", "ENOSPC", "index/*", nth=0)]
    assert not world.catch_up()
    finish(world)


def test_the_state_of_an_earlier_process_with_the_same_pid_is_not_believed(tmp_path: Path) -> None:
    """In a container every daemon is process 1: its pid in DATA/state does not say that it wrote it."""
    world = built(tmp_path, shape=Shape(hash_slot_num=50, index_num=400, same_pid=True))
    world.build(10)
    world.kill()
    assert world.start()
    finish(world)


def test_a_data_directory_whose_name_was_not_synced_is_synced_by_the_next_start(tmp_path: Path) -> None:
    """A start that fails, or is killed, between making the directory and syncing its parent leaves that to the next."""
    for seed in range(40):
        world = World(tmp_path / str(seed), seed, SHAPE)
        world.disk.faults = [Fault("sync_dir", "EIO", nth=1)]
        assert not world.start()
        assert world.start()
        world.build(10)
        assert world.flush()
        world.crash(random.Random(seed))
        world.finish()


# --- logs that are rewritten ---


def message(number: int, **properties: str) -> FrameSpec:
    """A message of one size, whatever its number; the clock goes on."""
    return FrameSpec("T", b"body", properties, store_timestamp=BASE_TIME + 1000 * number)


def cut(world: World, lost: int) -> None:
    """The broker loses the last messages, and nobody has seen it."""
    world.log.cut(world.log.history[-lost].phy_offset)
    world.is_outdated, world.promised = True, None


def test_a_message_with_keys_in_the_place_of_one_without_is_indexed(tmp_path: Path) -> None:
    """The entries that are there all agree with the log; but the log says more, and all of it was built already."""
    world = World(tmp_path, 1, Shape(rewrites=True))
    assert world.start()
    world.log.write(message(1, KEYS="a"), message(2, other="b"))
    assert world.catch_up()
    assert world.stop()
    cut(world, 1)
    world.log.write(message(3, KEYS="bb"))
    world.finish()


@pytest.mark.parametrize(
    ("drains", "lost", "written", "note_every", "forced"),
    [
        # The only noted frame still stands behind the new end: comparing must begin at the log's begin, not there.
        pytest.param([20], 10, 2, 64 << 10, False, id="before the only noted frame"),
        # The only noted frame is overwritten; those before it, which nobody noted, agree with the index.
        pytest.param([20], 3, 12, 64 << 10, False, id="the only noted frame"),
        # All of the log is compared; what was counted before its begin is not there to be seen, and stays counted.
        pytest.param([5] * 5, 6, 10, 1 << 10, True, id="with --recover"),
    ],
)
def test_a_log_whose_first_segment_expired_is_rewritten(
    tmp_path: Path, drains: list[int], lost: int, written: int, note_every: int, forced: bool
) -> None:
    world = World(tmp_path, 1, Shape(rewrites=True, note_every=note_every))
    assert world.start()
    world.log.roll()
    for count in drains:
        world.build(count)
    assert world.stop()
    assert world.expire()
    cut(world, lost)
    world.log.append(written)
    assert world.start(forced=forced)
    world.finish()


# --- damaged logs and data directories: every message is found, or the answer does not claim to be complete ---

FIRST, MUTANTS = 6000, 13


def test_no_answer_is_silent_about_what_it_lacks(tmp_path: Path) -> None:
    tally: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + MUTANTS):
        print(f"scripts/simulate --mutants 1 --seed {seed}")
        run = MutantRun(tmp_path / str(seed), seed)
        run.go()
        tally.update(run.tally)
    assert tally["found"] > 100 * MUTANTS
    assert tally["said to be missing"] > 0


def test_behind_a_cut_the_message_that_stands_there_now_is_found_even_if_its_body_is_damaged(tmp_path: Path) -> None:
    """No CRC is computed of a segment that is closed; the removed message, as long and with the same key, is gone."""
    log = tmp_path / "store" / "commitlog"

    def write(times: range, at: int = 0) -> list[int]:
        with CommitLogWriter(log, SEGMENT_SIZE, start_offset=at) as writer:
            return [writer.append(FrameSpec("T", b"x" * 50, {"KEYS": "k"}, store_timestamp=time)) for time in times]

    first = write(range(1000, 1010))
    wanted = [first[0], *write(range(5000, 5000 + 2 * SEGMENT_SIZE // first[1]), first[1])]
    patch(log / f"{0:020d}", first[1] + 10, bytes(2))
    config = config_for(tmp_path / "store", tmp_path / "data", segment_size=SEGMENT_SIZE)
    rebuild(config, Disk(), tmp_path / "data", lambda *_: None)
    with open_data(tmp_path / "data") as data:
        answer = data.by_key("T", "k", max_num=10_000)
    assert {hit.phy_offset: hit.store_timestamp for hit in answer.hits}[first[1]] == 5000
    assert sorted(hit.phy_offset for hit in answer.hits) == wanted
