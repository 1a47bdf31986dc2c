"""A log that is cut in the middle of a queue file, a pair or an index file and written on, with queue offsets as a
broker counts them: all outputs are rolled back together, and come to what a fresh build makes.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from support.beside_log import assert_beside, flags, frames, over_queues, prepared, segments_of, spec, write
from support.daemon import Daemon, assert_same_index, indexd_here
from support.reopened import config_for, reopen, undisturbed

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.config import Config
    from support.commitlog_writer import FrameSpec
    from support.naive import NaiveMessage

SEGMENT_SIZE = 64 << 10
QUEUE_FILE_SIZE = 400
UNITS = QUEUE_FILE_SIZE // 20
INDEX_NUM = 701
WORDS = flags(SEGMENT_SIZE, QUEUE_FILE_SIZE, "--index-num", INDEX_NUM)
SOON = {"INDEXD_CORRUPT_AFTER_MS": "200"}
SEED = 20260716


def later(specs: list[FrameSpec]) -> list[FrameSpec]:
    """Of another time, so that none of them is one that was there before."""
    return [replace(one, store_timestamp=one.store_timestamp + 3_600_000) for one in specs]


def config(tmp_path: Path) -> Config:
    return config_for(
        tmp_path / "store",
        tmp_path / "data",
        segment_size=SEGMENT_SIZE,
        consume_queue_file_size=QUEUE_FILE_SIZE,
        index_num=INDEX_NUM,
    )


def check(tmp_path: Path) -> None:
    """What a stopped daemon left is the log's, by the slow truth and by a build."""
    store, data = tmp_path / "store", tmp_path / "data"
    whole = tmp_path / f"whole{len(list(tmp_path.glob('whole*')))}"
    assert_beside(data, store, SEGMENT_SIZE, QUEUE_FILE_SIZE)
    assert_same_index(data, undisturbed(config(tmp_path), whole))
    done = indexd_here("verify", "--deep", "--store", store, "--data", data, *WORDS)
    assert done.returncode == 0, done.stdout + done.stderr


def cuts(known: list[NaiveMessage]) -> dict[str, int]:
    """Where it may be cut: the physical offset of the first message that goes."""
    segments = segments_of(known, SEGMENT_SIZE)
    of_one = [one for one in known if (one.topic, one.queue_id, one.sys_flag) == ("Topic0", 0, 0)]
    in_last_file = of_one[len(of_one) // UNITS * UNITS :]
    return {
        "in a queue file": in_last_file[len(in_last_file) // 2].phy_offset,
        "where a queue file begins": of_one[len(of_one) // UNITS * UNITS].phy_offset,
        "where the file before begins": of_one[(len(of_one) // UNITS - 1) * UNITS].phy_offset,
        "in a segment": segments[-2][len(segments[-2]) // 2].phy_offset,
        "where a segment begins": segments[-2][0].phy_offset,
        "the second message of a segment": segments[-1][1].phy_offset,
        "the last message": known[-1].phy_offset,
        "almost all": known[1].phy_offset,
    }


CUTS = (
    *("in a queue file", "where a queue file begins", "where the file before begins", "in a segment"),
    *("where a segment begins", "the second message of a segment", "the last message", "almost all"),
)


@pytest.mark.parametrize("written", [1, 2000])
@pytest.mark.parametrize("where", CUTS)
def test_cut_while_nobody_looks(tmp_path: Path, where: str, written: int) -> None:
    """Stopped or killed before, in turn."""
    store, unclean = tmp_path / "store", (CUTS.index(where) % 2 == 0) == (written == 1)
    write(store, over_queues(2000, 6), SEGMENT_SIZE)
    reopen(config(tmp_path))
    cut = cuts(frames(store, SEGMENT_SIZE))[where]
    end = write(store, later(over_queues(written, 7, seed=2, first=5000)), SEGMENT_SIZE, at=cut)
    came_to = reopen(config(tmp_path), unclean=unclean)
    assert (came_to.resumed_at, came_to.phy_offset) == (cut, end)
    check(tmp_path)
    assert reopen(config(tmp_path), unclean=unclean).resumed_at == end
    check(tmp_path)


@pytest.mark.parametrize("where", ["in a queue file", "in a segment", "where a segment begins", "almost all"])
def test_cut_beside_the_running_daemon(tmp_path: Path, where: str) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(2000, 6), SEGMENT_SIZE)
    with Daemon(store, data, *WORDS, env=SOON) as daemon:
        daemon.wait_durable(end)
        cut = cuts(frames(store, SEGMENT_SIZE))[where]
        end = write(store, later(over_queues(3000, 7, seed=2, first=5000)), SEGMENT_SIZE, at=cut)
        assert "the log was cut" in daemon.wait_event("disturbed")["problem"]
        daemon.wait_caught_up(end)
        assert daemon.terminate() == 0
    check(tmp_path)


def wait_at(daemon: Daemon, end: int) -> None:
    """The log may have been longer before: right there, not behind it."""
    daemon.wait_state(lambda row: bool(row["phyOffset"] == end))


def test_cut_again_and_again_beside_the_running_daemon(tmp_path: Path) -> None:
    """By a little and by much, now and then with a kill; queues are gone for good and come back."""
    rand = random.Random(SEED)
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(1500, 6, seed=SEED), SEGMENT_SIZE)
    turn = 0
    while turn < 6:
        with Daemon(store, data, *WORDS, env=SOON) as daemon:
            wait_at(daemon, end)
            while turn < 6:
                turn += 1
                cut = rand.choice(frames(store, SEGMENT_SIZE)[1:]).phy_offset
                count = rand.choice([1, 100, 1500])
                fresh = over_queues(count, rand.choice([2, 40]), seed=turn, first=10_000 * turn)
                fresh = [replace(one, store_timestamp=one.store_timestamp + 3_600_000 * turn) for one in fresh]
                end = write(store, fresh, SEGMENT_SIZE, at=cut)
                if rand.random() < 0.4:
                    break
                wait_at(daemon, end)
    with Daemon(store, data, *WORDS, env=SOON) as daemon:
        wait_at(daemon, end)
        assert daemon.terminate() == 0
    check(tmp_path)


def test_stale_frames_reach_to_the_end_of_a_segment_behind_which_the_log_is_gone(tmp_path: Path) -> None:
    """A cut at a message without a word behind it: the rest of its segment stands as before, and then nothing comes.

    What is built ends with its last message: its blank record counts when a next segment is in use, and there is none.
    """
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(2000, 6), SEGMENT_SIZE)
    with Daemon(store, data, *WORDS, env=SOON) as daemon:
        daemon.wait_durable(end)
        known = frames(store, SEGMENT_SIZE)
        cut = segments_of(known, SEGMENT_SIZE)[-3][5].phy_offset
        for path in (store / "commitlog").iterdir():
            if int(path.name) > cut:
                path.unlink()
        daemon.wait_event("disturbed")
        last = segments_of(known, SEGMENT_SIZE)[-3][-1]
        daemon.wait_state(lambda row: bool(row["phyOffset"] == last.phy_offset + last.size))
        end = write(store, later(over_queues(900, 7, seed=2, first=5000)), SEGMENT_SIZE, at=cut)
        daemon.wait_caught_up(end)
        assert daemon.terminate() == 0
        assert len(daemon.events("disturbed")) <= 3
    check(tmp_path)


def test_a_queue_goes_and_comes_back_later(tmp_path: Path) -> None:
    """All messages of a queue are cut off: its folder goes, and its next message begins it anew."""
    store, data = tmp_path / "store", tmp_path / "data"
    begin = [spec(number, queue_id=0) for number in range(300)]
    write(store, [*begin, *(spec(300 + number, "Gone", 5) for number in range(50))], SEGMENT_SIZE)
    reopen(config(tmp_path))
    assert (data / "consumequeue" / "Gone" / "5").exists()
    cut = frames(store, SEGMENT_SIZE)[300].phy_offset
    write(store, later([spec(1000 + number) for number in range(100)]), SEGMENT_SIZE, at=cut)
    reopen(config(tmp_path))
    assert not (data / "consumequeue" / "Gone").exists()
    check(tmp_path)
    write(store, later([spec(2000 + number, "Gone", 5) for number in range(30)]), SEGMENT_SIZE)
    reopen(config(tmp_path))
    check(tmp_path)
    done = indexd_here("query-offset", "--json", "-t", "Gone", "-i", 5, "-o", 0, "--data", data)
    assert json.loads(done.stdout)["maxOffset"] == 30


@pytest.mark.parametrize("more", [[], [1]], ids=["the log ends", "a key follows"])
def test_a_message_without_keys_gives_way_to_one_of_no_queue(tmp_path: Path, more: list[int]) -> None:
    """Nothing of the key index differs before what follows: the unit that is left over has to tell."""
    store = tmp_path / "store"
    write(store, over_queues(300, 6), SEGMENT_SIZE)
    cut = write(store, [], SEGMENT_SIZE)
    keyless = replace(spec(400, "Topic0", body=200), properties={})
    write(store, [keyless, *[spec(401 + number) for number in more]], SEGMENT_SIZE)
    reopen(config(tmp_path))
    shorter = prepared(replace(keyless, body=b"x" * 50, store_timestamp=keyless.store_timestamp + 1))
    end = write(store, [shorter, *later([spec(501 + number) for number in more])], SEGMENT_SIZE, at=cut)
    assert reopen(config(tmp_path)).phy_offset == end
    check(tmp_path)
