"""What somebody else does to ConsumeQueues and sparse indexes while the daemon runs: it notices and mends it."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from support.beside_log import over_queues, write
from support.daemon import Daemon, assert_same_index
from support.outputs import INTERVAL, UNITS, Built, build, copied
from support.reopened import config_for, undisturbed
from support.small_log import SEGMENT_SIZE, SIZES
from support.verifying import check, kinds

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLAGS = (*SIZES, "--sparse-interval", str(INTERVAL))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("outputs"))


@pytest.fixture
def built(base: Built, tmp_path: Path) -> Built:
    shutil.copytree(base.store, tmp_path / "store")
    made = copied(base, tmp_path)
    made.store = tmp_path / "store"
    made.change_frontier(store=str(made.store), commit_log_paths=(str(made.store / "commitlog"),))
    return made


def growing(built: Built, number: int = 0) -> Path:
    """The last file of a queue, with room for a few units more."""
    marks = [mark for mark in built.marks if mark.topic == "TopicTest" and 0 < mark.max_offset % UNITS < UNITS - 10]
    return built.queue_file(marks[number], marks[number].max_offset)


def replace_by_itself(path: Path) -> None:
    """The same bytes under the same name, and another file."""
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    copy.rename(path)


DAMAGES: dict[str, tuple[str, Callable[[Built], Any]]] = {
    "queue file removed": ("was removed", lambda built: growing(built).unlink()),
    "queue file cut": ("was cut to 100 bytes", lambda built: os.truncate(growing(built), 100)),
    "queue file replaced": ("was replaced", lambda built: replace_by_itself(growing(built))),
    "a full queue file removed": ("was removed", lambda built: growing(built).with_name("0" * 20).unlink()),
    "a topic removed": ("was removed", lambda built: shutil.rmtree(growing(built).parent.parent)),
    "all queues removed": ("was removed", lambda built: shutil.rmtree(built.data / "consumequeue")),
    "offset index removed": ("was removed", lambda built: built.pair(0)[0].unlink()),
    "time index cut": ("was cut to 24 bytes", lambda built: os.truncate(built.pair(1)[1], 24)),
    "growing offset index cut": ("was cut to 24 bytes", lambda built: os.truncate(built.pair(-1)[0], 24)),
    "growing time index removed": ("was removed", lambda built: built.pair(-1)[1].unlink()),
    "growing pair replaced": ("was replaced", lambda built: [replace_by_itself(path) for path in built.pair(-1)]),
    "all sparse indexes removed": ("was removed", lambda built: shutil.rmtree(built.data / "sparse")),
}


def check_mended(daemon: Daemon, built: Built) -> None:
    assert daemon.terminate() == 0
    config = config_for(built.store, built.data, sparse_interval=INTERVAL)
    whole = undisturbed(config, built.root / "whole")
    assert_same_index(built.data, whole)
    report = check(built.data, deep=True)
    # The clock of this log goes back, and no broker is there to be asked: that is noted of any index of it.
    assert (kinds(report), report.notes) == ({}, check(whole, deep=True).notes)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_is_touched(built: Built, damage: str) -> None:
    says, do = DAMAGES[damage]
    with Daemon(built.store, built.data, *FLAGS) as daemon:
        daemon.wait_event("running")
        end = write(built.store, over_queues(20, 8), SEGMENT_SIZE)
        daemon.wait_durable(end)
        do(built)
        assert says in daemon.wait_event("disturbed")["problem"]
        daemon.wait_for(lambda: len(daemon.events("running")) > 1 or None, "running again")
        daemon.wait_caught_up(write(built.store, over_queues(20, 8, 2), SEGMENT_SIZE))
        check_mended(daemon, built)
        assert len(daemon.events("disturbed")) == 1


def test_files_are_touched_while_messages_come(built: Built) -> None:
    """Removed between two drains, so that the builder may be the first to meet it."""
    with Daemon(built.store, built.data, *FLAGS, env={"INDEXD_DRAIN_INTERVAL": "0.3"}) as daemon:
        daemon.wait_event("running")
        for number, what in enumerate((growing(built).parent, built.data / "consumequeue", built.data / "sparse")):
            shutil.rmtree(what)
            end = write(built.store, over_queues(200, 8, number), SEGMENT_SIZE)
            daemon.wait_for(lambda count=number: len(daemon.events("running")) > count + 1 or None, "running again")
            daemon.wait_caught_up(end)
        check_mended(daemon, built)
        assert not daemon.events("degraded")


def test_thousands_of_queues_are_looked_at_in_turn(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(3000, 300), SEGMENT_SIZE)
    with Daemon(store, data, *FLAGS) as daemon:
        daemon.wait_durable(end)
        built = Built(store, data)
        daemon.wait_for(lambda: ((data / "frontier").exists() and len(built.marks) == 300) or None, "all queues")
        mark = built.marks[-1]
        built.queue_file(mark, 0).unlink()
        assert "was removed" in daemon.wait_event("disturbed")["problem"]
        daemon.wait_for(lambda: len(daemon.events("running")) > 1 or None, "running again")
        daemon.wait_caught_up(end)
        check_mended(daemon, built)


def test_verified_while_segments_expire(tmp_path: Path) -> None:
    """A frontier may name files that are gone a moment later; verify looks again, and compares what is left."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(12_000, 8), SEGMENT_SIZE)
    segments = sorted((store / "commitlog").iterdir())[:-2]
    assert len(segments) > 10
    with Daemon(store, data, *FLAGS) as daemon:
        daemon.wait_durable(end)
        for number, segment in enumerate(segments):
            segment.unlink()
            assert kinds(check(data, deep=bool(number % 2))) == {}
        daemon.wait_for(lambda: Built(store, data).marks[0].first_offset > 0 or None, "expired units")
        assert daemon.terminate() == 0
        assert not daemon.events("disturbed")
    report = check(data, deep=True)
    assert kinds(report) == {}
    assert report.segments == 2
