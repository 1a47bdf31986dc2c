"""What random runs and the crash at every change have found, each as a plain run of its own."""

from __future__ import annotations

import random
from pathlib import Path

from indexd.query import KeyQuery
from support.commitlog_writer import FrameSpec
from support.naive import split_keys
from support.sim_checks import check_answer
from support.sim_daemon import Shape
from support.sim_fault import FaultMap
from support.simulation import World
from support.small_log import BASE_TIME

SHAPE = Shape(hash_slot_num=50, index_num=400)
CRASHES = 40


def built(root: Path, count: int = 30, shape: Shape = SHAPE) -> World:
    """A running daemon that has made ``count`` messages durable."""
    world = World(root, 1, shape)
    assert world.start()
    world.log.append(count)
    assert world.catch_up()
    assert world.flush()
    return world


def query_all(world: World) -> None:
    """Ask the running daemon for every key of the log."""
    for message in world.log.history:
        for key in split_keys(message.keys):
            query = KeyQuery(message.topic, key, 10_000, index_type="K")
            world.do(lambda daemon, query=query: check_answer(daemon.query(query), world.log, (), world.shape.flavour))


def test_what_could_not_be_published_is_not_said_to_be_covered(tmp_path: Path) -> None:
    """The last write of a drain fails, so its entries are in memory alone; DATA/state must not speak for them."""
    world = built(tmp_path)
    world.log.append(10)
    world.disk.faults = FaultMap.parse("pwrite:index/*@all=ENOSPC")
    assert not world.catch_up()
    query_all(world)
    world.finish()


def test_the_state_of_an_earlier_process_with_the_same_pid_is_not_believed(tmp_path: Path) -> None:
    """In a container every daemon is process 1: its pid in DATA/state does not say that it wrote it."""
    world = built(tmp_path, shape=Shape(hash_slot_num=50, index_num=400, same_pid=True))
    world.log.append(10)
    assert world.catch_up()
    world.kill()
    assert world.start()
    query_all(world)
    world.finish()


def test_a_data_directory_whose_name_was_not_synced_is_synced_by_the_next_start(tmp_path: Path) -> None:
    """A start that fails, or is killed, between making the directory and syncing its parent leaves that to the next."""
    for seed in range(CRASHES):
        world = World(tmp_path / str(seed), seed, SHAPE)
        world.disk.faults = FaultMap.parse("sync_dir#1=EIO")
        assert not world.start()
        assert world.start()
        world.log.append(10)
        assert world.catch_up()
        assert world.flush()
        world.crash(random.Random(seed))
        world.finish()


def test_recoveries_that_are_broken_off_do_not_go_back_further_each_time(tmp_path: Path) -> None:
    """A file is cut before the frontier says so: the next recovery takes the cut for damage, and one message more."""
    for index_num in range(50, 80):
        world = built(tmp_path / str(index_num), 20, Shape(hash_slot_num=50, index_num=index_num))
        world.log.append(6)
        world.disk.faults = FaultMap.parse("create:index/*=ENOSPC")  # inside the batch, if a file becomes full there
        if not world.catch_up():
            assert world.flush()
        world.kill()
        for _ in range(8):
            world.disk.faults = FaultMap.parse("fsync:index/*=EIO")
            if world.start():  # nothing was left to be synced
                break
        world.finish()


def message(number: int, **properties: str) -> FrameSpec:
    """A message of one size, whatever its number; the clock goes on."""
    return FrameSpec("T", b"body", properties, store_timestamp=BASE_TIME + 1000 * number)


def test_a_message_with_keys_in_the_place_of_one_without_is_indexed(tmp_path: Path) -> None:
    """The entries that are there all agree with the log; but the log says more, and all of it was built already."""
    world = World(tmp_path, 1, Shape(rewrites=True))
    assert world.start()
    world.log.write(message(1, KEYS="a"), message(2, other="b"))
    assert world.catch_up()
    assert world.stop()
    world.log.cut(world.log.history[-1].phy_offset)
    world.log.write(message(3, KEYS="bb"))
    world.is_outdated, world.promised = True, None
    assert world.start()
    world.finish()


def expired_log(root: Path) -> World:
    """A stopped daemon that built two segments, the first of which is gone; few frames were noted in the second."""
    world = World(root, 1, Shape(rewrites=True, note_every=64 << 10))
    assert world.start()
    world.log.roll()
    world.log.append(20)
    assert world.catch_up()
    assert world.stop()
    assert world.expire()
    return world


def rewritten(world: World, lost: int, written: int) -> None:
    """The broker loses the last messages and writes others."""
    world.log.cut(world.log.history[-lost].phy_offset)
    world.log.append(written)
    world.is_outdated, world.promised = True, None


def test_a_log_that_was_rewritten_before_the_only_noted_frame_is_noticed(tmp_path: Path) -> None:
    """That frame still stands behind the new end: comparing must begin at the log's begin, not at the frame."""
    world = expired_log(tmp_path)
    rewritten(world, 10, 2)
    world.finish()


def test_a_rewritten_log_whose_other_segments_expired_is_still_the_same_store(tmp_path: Path) -> None:
    """The only noted frame is overwritten; the frames before it, which nobody noted, agree with the index."""
    world = expired_log(tmp_path)
    rewritten(world, 3, 12)
    world.finish()


def test_messages_of_expired_segments_stay_counted_when_the_end_is_rolled_back(tmp_path: Path) -> None:
    """With --recover all of the log is compared; what was counted before its begin is not there to be seen."""
    world = World(tmp_path, 1, Shape(rewrites=True))
    assert world.start()
    world.log.roll()
    for _ in range(5):
        world.log.append(5)
        assert world.catch_up()
    assert world.stop()
    assert world.expire()
    rewritten(world, 6, 10)
    assert world.start(forced=True)
    world.finish()
