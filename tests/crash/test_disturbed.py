"""What somebody else does to the log or to our files while the daemon runs: it notices, mends it and goes on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from indexd.dispatch.reput import DiskWatermark
from indexd.errors import DisturbedError
from indexd.index.format import IndexLayout
from indexd.query import open_data
from support.beside_log import over_queues, write
from support.daemon import Daemon, assert_same_index, index_files, indexd
from support.faults import Place, check_directory, end_line
from support.inside import opened_inside, row_of, wait_until
from support.naive import naive_frames
from support.outputs import INTERVAL, UNITS, Built, build, copied
from support.reopened import config_for, cut_at, undisturbed, write_on
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, SIZES, write_log
from support.verifying import check, kinds

LAYOUT = IndexLayout(HASH_SLOT_NUM, INDEX_NUM)
UNSAFE, BUSY, INTERNAL = 3, 5, 70


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def check_mended(daemon: Daemon, end: int) -> None:
    """Once all is indexed again, its files are those of an undisturbed build, and it says the same of what they hold.

    Bytes of a longer log that stand behind ``end`` keep it from saying that it has caught up: no broker can be asked.
    """
    daemon.wait_state(lambda row: bool(row["phyOffset"] >= end and (row["caughtUp"] or row["corrupt"] is not None)))
    assert daemon.terminate() == 0
    check_directory(daemon.store, daemon.data)
    assert said(daemon.data) == said(daemon.data.with_name("undisturbed"))


def said(data: Path) -> tuple[Any, ...]:
    """What a data directory says that it covers, and whether that is all."""
    with open_data(data) as opened:
        coverage = opened.coverage()
    frontier = json.loads((data / "frontier").read_bytes())
    return coverage.begin, coverage.end, coverage.uncovered, coverage.complete, frontier["messages"]


def after(daemon: Daemon, event: str, count: int = 1) -> dict[str, Any]:
    """Wait until that event was logged so often, and then for the recovery that follows it."""
    daemon.wait_for(lambda: len(daemon.events(event)) >= count or None, event)
    daemon.wait_for(lambda: len(daemon.events("running")) > count or None, "running again")
    return daemon.events(event)[count - 1]


@pytest.mark.parametrize("name", ["abort", "frontier", "checkpoint", "lock"])
def test_a_small_file_is_removed(place: Place, name: str) -> None:
    with place.running() as daemon:
        (place.data / name).unlink()
        assert daemon.wait_event("restored")["names"] == [name]
        daemon.wait_for(lambda: (place.data / name).exists() or None, name)
        assert indexd(*place.words).returncode == BUSY
        assert not daemon.events("disturbed")
        check_mended(daemon, place.end)


def test_a_second_instance_that_took_a_new_lock_wins(place: Place) -> None:
    """Whoever removes the lock file lets two in; the first notices and leaves."""
    place.env = {"INDEXD_DRAIN_INTERVAL": "5"}
    with place.running() as first:
        (place.data / "lock").unlink()
        with Daemon(place.store, place.data, *SIZES) as second:
            second.wait_event("running")
            assert first.wait() == BUSY
            check_mended(second, place.end)


@pytest.mark.parametrize(("back", "written"), [(20, 3), (1500, 2000)])
def test_the_log_is_cut_and_written_on_beside_the_running_daemon(place: Place, back: int, written: int) -> None:
    place.env = {"INDEXD_CORRUPT_AFTER_MS": "200"}
    with place.running(3000) as daemon:
        offsets = [message.phy_offset for message in naive_frames(place.store / "commitlog", SEGMENT_SIZE)]
        with cut_at(place.store, offsets[-back]) as writer:
            end = write_on(writer, written, seed=33)
        assert "the log was cut" in after(daemon, "disturbed")["problem"]
        check_mended(daemon, end)


def test_another_store_takes_the_place_of_the_log_beside_the_running_daemon(place: Place, tmp_path: Path) -> None:
    with place.running() as daemon:
        write_log(tmp_path / "other", 1000, seed=2)
        (place.store / "commitlog").rename(tmp_path / "gone")
        (tmp_path / "other" / "commitlog").rename(place.store / "commitlog")
        assert daemon.wait() == UNSAFE
        assert f"{place.store} is not the store that {place.data} was built from" in end_line(daemon)


def test_a_log_that_goes_away_and_comes_back(place: Place) -> None:
    """A file system that is unmounted for a while."""
    log, away = place.store / "commitlog", place.store / "unmounted"
    with place.running() as daemon:
        log.rename(away)
        assert "there is no commitlog" in daemon.wait_event("degraded")["problem"]
        daemon.wait_state(lambda row: bool(row["problems"]))
        away.rename(log)
        daemon.wait_event("healed")
        place.log(200)
        check_mended(daemon, place.end)


# --- unclean starts that come to nothing ---


def kill_at_start(place: Place) -> None:
    with place.daemon() as daemon:
        daemon.wait_event("starting")


@pytest.fixture
def five(place: Place) -> Place:
    """So many may come to nothing."""
    place.env = {"INDEXD_UNCLEAN_STARTS_MAX": "5"}
    place.log(3000)
    return place


def test_after_five_it_refuses_and_recover_goes_on(five: Place) -> None:
    for _ in range(5):
        kill_at_start(five)
    for _ in range(2):  # being refused does not count, nor make it forget
        done = indexd(*five.words, env=five.env)
        assert done.returncode == INTERNAL
        assert "5 unclean starts within 600 s" in done.stderr.splitlines()[-1]
        assert "indexd --recover" in done.stderr.splitlines()[-1]
    five.recover()
    with five.daemon() as daemon:
        check_mended(daemon, five.end)


def test_catching_up_makes_it_forget(five: Place) -> None:
    for _ in range(3):
        kill_at_start(five)
    assert (five.data / "starts").exists()
    with five.daemon() as daemon:
        daemon.wait_caught_up(five.end)
        daemon.wait_for(lambda: not (five.data / "starts").exists() or None, "starts to go")


def test_old_starts_do_not_count_nor_those_of_the_future(five: Place) -> None:
    kill_at_start(five)
    now = int(time.time() * 1000)
    lines = [now - 601_000] * 10 + [now + 3_600_000] * 10
    (five.data / "starts").write_text("".join(f"{at}\n" for at in lines) + "no number\n")
    with five.daemon() as daemon:
        check_mended(daemon, five.end)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_it_opens_ends_well_and_does_not_count(place: Place, number: signal.Signals) -> None:
    place.env = {"INDEXD_UNCLEAN_STARTS_MAX": "2"}
    place.log(3000)
    kill_at_start(place)
    for _ in range(4):
        with place.daemon() as daemon:
            daemon.wait_event("starting")
            assert daemon.terminate(number) == 0
    with place.daemon() as daemon:
        check_mended(daemon, place.end)


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


def overwrite(built: Built, number: int, position: int) -> None:
    with index_files(built.data)[number].open("r+b") as file:
        file.seek(position)
        file.write(b"\x5a" * 64)


DAMAGES: dict[str, tuple[str, Callable[[Built], Any]]] = {
    "full index file removed": ("was removed", lambda built: index_files(built.data)[0].unlink()),
    "open index file removed": ("was removed", lambda built: index_files(built.data)[-1].unlink()),
    "open index file cut": ("was cut to 1000 bytes", lambda built: os.truncate(index_files(built.data)[-1], 1000)),
    "header of a full index file": ("was written", lambda built: overwrite(built, 0, 0)),
    "slots of the open index file": ("was written", lambda built: overwrite(built, -1, LAYOUT.slot_position(10))),
    "entries of the open index file": ("was written", lambda built: overwrite(built, -1, LAYOUT.entry_position(10))),
    "queue file removed": ("was removed", lambda built: growing(built).unlink()),
    "queue file cut": ("was cut to 100 bytes", lambda built: os.truncate(growing(built), 100)),
    "queue file replaced": ("was replaced", lambda built: replace_by_itself(growing(built))),
    "a full queue file removed": ("was removed", lambda built: growing(built).with_name("0" * 20).unlink()),
    "all queues removed": ("was removed", lambda built: shutil.rmtree(built.data / "consumequeue")),
    "offset index removed": ("was removed", lambda built: built.pair(0)[0].unlink()),
    "time index cut": ("was cut to 24 bytes", lambda built: os.truncate(built.pair(1)[1], 24)),
    "growing time index removed": ("was removed", lambda built: built.pair(-1)[1].unlink()),
    "growing pair replaced": ("was replaced", lambda built: [replace_by_itself(path) for path in built.pair(-1)]),
}


def check_outputs_mended(daemon: Daemon, built: Built) -> None:
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
        time.sleep(0.05)  # a write at the same tick of the clock would have the same time
        do(built)
        assert says in after(daemon, "disturbed")["problem"]
        daemon.wait_caught_up(write(built.store, over_queues(20, 8, 2), SEGMENT_SIZE))
        check_outputs_mended(daemon, built)
        assert len(daemon.events("disturbed")) == 1


def test_files_are_touched_while_messages_come(built: Built) -> None:
    """Removed between two drains, so that the builder may be the first to meet it."""
    with Daemon(built.store, built.data, *FLAGS, env={"INDEXD_DRAIN_INTERVAL": "0.3"}) as daemon:
        daemon.wait_event("running")
        for number, what in enumerate((growing(built).parent, built.data / "consumequeue", built.data / "sparse")):
            shutil.rmtree(what)
            end = write(built.store, over_queues(200, 8, number), SEGMENT_SIZE)
            after(daemon, "disturbed", number + 1)
            daemon.wait_caught_up(end)
        check_outputs_mended(daemon, built)
        assert not daemon.events("degraded")


@pytest.mark.parametrize(
    ("name", "remove"),
    [
        ("index", lambda built: shutil.rmtree(built.data / "index")),
        ("consumequeue/Topic0/0", lambda built: (built.data / "consumequeue/Topic0/0" / ("0" * 20)).unlink()),
        ("sparse", lambda built: built.pair(-1)[0].unlink()),
    ],
    ids=["index", "queue", "sparse"],
)
async def test_what_goes_while_a_drain_waits_is_not_waited_for(
    built: Built, name: str, remove: Callable[[Built], None]
) -> None:
    """Nobody looks at the files while a drain is tried again: the builder is the first to meet it."""
    with opened_inside(built.store, built.data, sparse_interval=str(INTERVAL)) as daemon:
        task = asyncio.create_task(daemon.run())
        end = write(built.store, over_queues(20, 8), SEGMENT_SIZE)
        await wait_until(lambda: row_of(daemon).get("durableOffset") == end)
        daemon._watermark = DiskWatermark(built.data, 0)
        write(built.store, over_queues(2200, 8, 2), SEGMENT_SIZE)
        await wait_until(lambda: "build" in row_of(daemon)["problems"])
        remove(built)
        daemon._watermark = DiskWatermark(built.data, 1)
        with pytest.raises(DisturbedError, match=f"{built.data / name}.* was removed"):
            await task


def test_thousands_of_queues_are_looked_at_in_turn(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(3000, 300), SEGMENT_SIZE)
    with Daemon(store, data, *FLAGS) as daemon:
        daemon.wait_durable(end)
        built = Built(store, data)
        daemon.wait_for(lambda: ((data / "frontier").exists() and len(built.marks) == 300) or None, "all queues")
        mark = built.marks[-1]
        built.queue_file(mark, 0).unlink()
        assert "was removed" in after(daemon, "disturbed")["problem"]
        daemon.wait_caught_up(end)
        check_outputs_mended(daemon, built)
