"""Logs that were cut and written on from there, and messages older than one before them, which a cut may have left."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from indexd.errors import DisturbedError, UnsafeStoreError
from indexd.flush.frontier import DOUBTED, UNPROVEN, Frontier, Uncovered, read_frontier
from indexd.query import open_data as open_query
from indexd.recovery import recover as recover_module
from indexd.recovery.open import open_data
from indexd.recovery.rebuild import rebuild
from indexd.storage.disk import Disk
from support.beside_log import assert_beside, flags, frames, over_queues, prepared, segments_of, spec, write
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.daemon import Daemon, assert_same_index, indexd_here
from support.fake_broker import FakeBroker, Named, well
from support.naive import naive_frames
from support.reading import patch
from support.reopened import Reopened, config_for, cut_at, reopen, undisturbed, write_on
from support.small_log import BASE_TIME, SEGMENT_SIZE, SIZES, write_log

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.compare.log import Agreed
    from indexd.config import Config
    from support.naive import NaiveMessage


SEED = 5


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A store of three segments, and its data directory after a clean stop."""
    config = config_for(tmp_path / "store", tmp_path / "data")
    write_log(tmp_path / "store", 2500, seed=SEED)
    reopen(config)
    return config


def offsets(config: Config) -> list[int]:
    assert config.store.store is not None
    return [message.phy_offset for message in naive_frames(config.store.store / "commitlog", SEGMENT_SIZE)]


def assert_as_built(config: Config, tmp_path: Path) -> Path:
    """A data directory holds what an undisturbed build makes of its log, which is returned."""
    whole = undisturbed(config, tmp_path / f"whole{len(list(tmp_path.glob('whole*')))}")
    assert_same_index(config.store.data, whole)
    ours, theirs = frontier_of(config), frontier_of(config, whole)
    assert [mark.header for mark in ours.index] == [mark.header for mark in theirs.index]
    for name in ("phy_offset", "messages", "store_timestamp"):
        assert getattr(ours, name) == getattr(theirs, name)
    return whole


def check(config: Config, tmp_path: Path, *, unclean: bool = False) -> Reopened:
    """A start finds the difference, and what it makes is what an undisturbed build makes; the next finds nothing."""
    came_to = reopen(config, unclean=unclean)
    whole = assert_as_built(config, tmp_path)
    again = reopen(config, unclean=unclean)
    assert again.recovered.dropped_entries == 0
    assert again.resumed_at == came_to.phy_offset
    assert_same_index(config.store.data, whole)
    return came_to


def test_what_lies_before_the_recheck_is_found_by_its_evidence(tmp_path: Path) -> None:
    """A short stretch between two points, far behind the end: not yet; but as soon as it reaches a point."""
    config = config_for(tmp_path / "store", tmp_path / "data", recheck_bytes=0)
    write_log(tmp_path / "store", 3000, seed=SEED)
    reopen(config)
    known = offsets(config)
    cut = known[-350]
    assert cut // SEGMENT_SIZE == known[-1] // SEGMENT_SIZE
    with cut_at(tmp_path / "store", cut) as writer:
        write_on(writer, 5, seed=8)
        assert reopen(config).recovered.dropped_entries == 0
        write_on(writer, 1500, seed=9)
    assert check(config, tmp_path).resumed_at == cut


def test_cut_in_the_middle_of_a_frame_and_not_continued(config: Config, tmp_path: Path) -> None:
    """What a power cut leaves before the broker has started again: zeros from somewhere on."""
    known = offsets(config)
    cut = known[-300] + 30
    for path in sorted((tmp_path / "store" / "commitlog").iterdir()):
        base = int(path.name)
        data = path.read_bytes()
        path.write_bytes(data[: max(cut - base, 0)].ljust(SEGMENT_SIZE, b"\0"))
    came_to = check(config, tmp_path)
    assert came_to.resumed_at == known[-300]


def test_frames_of_equal_size_so_that_stale_ones_go_on_where_new_ones_end(tmp_path: Path) -> None:
    config = config_for(tmp_path / "store", tmp_path / "data")
    known = write_times(tmp_path / "store", list(range(1000)))
    reopen(config)
    write_times(tmp_path / "store", [100_000, 100_001, 100_002], start=known[400], key="n")
    assert check(config, tmp_path).resumed_at == known[400]


def test_an_emptied_store_is_refused(config: Config, tmp_path: Path) -> None:
    for path in (tmp_path / "store" / "commitlog").iterdir():
        path.unlink()
    with pytest.raises(UnsafeStoreError, match="its commitlog is empty"):
        reopen(config)


@pytest.mark.parametrize("back", [0, 1])
def test_what_is_written_while_a_start_compares_is_noticed_at_the_first_look(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back: int
) -> None:
    compare = recover_module.compare_with_log
    known = offsets(config)
    cut = [offset for offset in known if offset // SEGMENT_SIZE == known[-1] // SEGMENT_SIZE - back][-40]
    with cut_at(tmp_path / "store", cut) as writer:

        def compare_and_write(*args: Any) -> Agreed:
            agreed = compare(*args)
            write_on(writer, 3, seed=33)
            return agreed

        monkeypatch.setattr(recover_module, "compare_with_log", compare_and_write)
        # Where the sparse indexes have to be filled from there, already the opening finds it.
        with (
            pytest.raises(DisturbedError),
            closing(open_data(config, Disk(), lambda *_: None, unclean=True).pipeline) as pipeline,
        ):
            pipeline.detector.check()
        monkeypatch.undo()
    check(config, tmp_path, unclean=True)


@pytest.mark.parametrize(
    ("damage", "back", "forced"),
    [(bytes(4), 0, False), (b"\xff" * 4, 0, True), (bytes(4), 0, True), (b"\xff" * 4, 1, False)],
)
def test_a_cut_behind_damage_and_before_what_was_noted_is_found(
    config: Config, tmp_path: Path, damage: bytes, back: int, forced: bool
) -> None:
    """What was noted behind the damage is left of the longer log: the cut lies between, or the damage far before it."""
    known = offsets(config)
    inside = [offset for offset in known if offset // SEGMENT_SIZE == known[-1] // SEGMENT_SIZE]
    rotten = inside[10] - back * SEGMENT_SIZE
    rotten = next(offset for offset in known if offset >= rotten)
    segment = rotten // SEGMENT_SIZE * SEGMENT_SIZE
    patch(tmp_path / "store" / "commitlog" / f"{segment:020d}", rotten - segment + 4, damage)
    with cut_at(tmp_path / "store", inside[15]) as writer:
        write_on(writer, 1, seed=99)
    assert reopen(config, unclean=True, forced=forced).resumed_at == inside[15]


def test_queues_are_filled_again_over_what_cannot_be_read(config: Config, tmp_path: Path) -> None:
    known = offsets(config)
    config = config_for(tmp_path / "store", tmp_path / "data", on_corrupt="skip")
    path = tmp_path / "store" / "commitlog" / f"{known[-1] // SEGMENT_SIZE * SEGMENT_SIZE:020d}"
    patch(path, known[-30] % SEGMENT_SIZE, bytes(known[-28] - known[-30]))
    shutil.rmtree(config.store.data / "consumequeue")
    for _ in range(2):
        came_to = reopen(config, unclean=True)
        assert came_to.recovered.dropped_entries == 0
        assert any(gap.begin <= known[-30] and known[-28] <= gap.end for gap in frontier_of(config).uncovered)
    with open_query(config.store.data) as data:
        assert not data.coverage().complete
        frames = naive_frames(tmp_path / "store" / "commitlog", SEGMENT_SIZE)
        last = [frame for frame in frames if frame.sys_flag & 0xC in (0x0, 0x8)][-1]
        hits = data.by_queue(last.topic, last.queue_id, last.cq_offset).hits
        assert [hit.unit.phy_offset for hit in hits][:1] == [last.phy_offset]


# --- all outputs: cut in the middle of a queue file, a pair or an index file, queue offsets as a broker counts them ---

_SEGMENT = 64 << 10
_QUEUE_FILE = 400
_UNITS = _QUEUE_FILE // 20
_INDEX_NUM = 701
_WORDS = flags(_SEGMENT, _QUEUE_FILE, "--index-num", _INDEX_NUM)
_SOON = {"INDEXD_CORRUPT_AFTER_MS": "200"}
_SEED = 20260716


def later(specs: list[FrameSpec]) -> list[FrameSpec]:
    """Of another time, so that none of them is one that was there before."""
    return [replace(one, store_timestamp=one.store_timestamp + 3_600_000) for one in specs]


def small_config(tmp_path: Path) -> Config:
    return config_for(
        tmp_path / "store",
        tmp_path / "data",
        segment_size=_SEGMENT,
        consume_queue_file_size=_QUEUE_FILE,
        index_num=_INDEX_NUM,
    )


def check_all(tmp_path: Path) -> None:
    """What a stopped daemon left is the log's, by the slow truth and by a build."""
    store, data = tmp_path / "store", tmp_path / "data"
    assert_beside(data, store, _SEGMENT, _QUEUE_FILE)
    assert_as_built(small_config(tmp_path), tmp_path)
    done = indexd_here("verify", "--deep", "--store", store, "--data", data, *_WORDS)
    assert done.returncode == 0, done.stdout + done.stderr


def cuts(known: list[NaiveMessage]) -> dict[str, int]:
    """Where it may be cut: the physical offset of the first message that goes."""
    segments = segments_of(known, _SEGMENT)
    of_one = [one for one in known if (one.topic, one.queue_id, one.sys_flag) == ("Topic0", 0, 0)]
    in_last_file = of_one[len(of_one) // _UNITS * _UNITS :]
    return {
        "in a queue file": in_last_file[len(in_last_file) // 2].phy_offset,
        "where a queue file begins": of_one[len(of_one) // _UNITS * _UNITS].phy_offset,
        "where the file before begins": of_one[(len(of_one) // _UNITS - 1) * _UNITS].phy_offset,
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


@pytest.mark.parametrize(
    ("where", "written"), [*((where, 2000) for where in CUTS), *((where, 1) for where in CUTS[::3])]
)
def test_cut_while_nobody_looks(tmp_path: Path, where: str, written: int) -> None:
    """Stopped or killed before, in turn."""
    store, unclean = tmp_path / "store", (CUTS.index(where) % 2 == 0) == (written == 1)
    write(store, over_queues(2000, 6), _SEGMENT)
    reopen(small_config(tmp_path))
    known = frames(store, _SEGMENT)
    cut = cuts(known)[where]
    end = write(store, later(over_queues(written, 7, seed=2, first=5000)), _SEGMENT, at=cut)
    came_to = reopen(small_config(tmp_path), unclean=unclean)
    assert (came_to.resumed_at, came_to.phy_offset) == (cut, end)
    assert came_to.resumed_messages == sum(message.phy_offset < cut for message in known)
    check_all(tmp_path)
    again = reopen(small_config(tmp_path), unclean=unclean)
    assert (again.resumed_at, again.recovered.dropped_entries) == (end, 0)
    check_all(tmp_path)


def wait_at(daemon: Daemon, end: int) -> None:
    """The log may have been longer before: right there, not behind it."""
    daemon.wait_state(lambda row: bool(row["phyOffset"] == end))


def test_cut_again_and_again_beside_the_running_daemon(tmp_path: Path) -> None:
    """By a little and by much, now and then with a kill; queues are gone for good and come back."""
    rand = random.Random(_SEED)
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(1500, 6, seed=_SEED), _SEGMENT)
    turn = 0
    while turn < 6:
        with Daemon(store, data, *_WORDS, env=_SOON) as daemon:
            wait_at(daemon, end)
            while turn < 6:
                turn += 1
                cut = rand.choice(frames(store, _SEGMENT)[1:]).phy_offset
                count = rand.choice([1, 100, 1500])
                fresh = over_queues(count, rand.choice([2, 40]), seed=turn, first=10_000 * turn)
                fresh = [replace(one, store_timestamp=one.store_timestamp + 3_600_000 * turn) for one in fresh]
                end = write(store, fresh, _SEGMENT, at=cut)
                if rand.random() < 0.4:
                    break
                wait_at(daemon, end)
    with Daemon(store, data, *_WORDS, env=_SOON) as daemon:
        wait_at(daemon, end)
        assert daemon.terminate() == 0
    check_all(tmp_path)


@pytest.mark.parametrize("more", [[], [1]], ids=["the log ends", "a key follows"])
def test_a_message_without_keys_gives_way_to_one_of_no_queue(tmp_path: Path, more: list[int]) -> None:
    """Nothing of the key index differs before what follows: the unit that is left over has to tell."""
    store = tmp_path / "store"
    write(store, over_queues(300, 6), _SEGMENT)
    cut = write(store, [], _SEGMENT)
    keyless = replace(spec(400, "Topic0", body=200), properties={})
    write(store, [keyless, *[spec(401 + number) for number in more]], _SEGMENT)
    reopen(small_config(tmp_path))
    shorter = prepared(replace(keyless, body=b"x" * 50, store_timestamp=keyless.store_timestamp + 1))
    end = write(store, [shorter, *later([spec(501 + number) for number in more])], _SEGMENT, at=cut)
    assert reopen(small_config(tmp_path)).phy_offset == end
    check_all(tmp_path)


def write_times(store: Path, times: list[int], *, start: int = 0, key: str = "k") -> list[int]:
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE, start_offset=start) as writer:
        return [
            writer.append(FrameSpec("T", b"x" * 50, {"KEYS": f"{key}{n:05d}"}, store_timestamp=BASE_TIME + at))
            for n, at in enumerate(times)
        ] + [writer.max_offset]


def cut_short(store: Path) -> list[int]:
    """200 messages, cut_short at the 106th, and a newer one of the same length written there."""
    offsets = write_times(store, list(range(200)))
    write_times(store, [5000], start=offsets[106], key="n")
    return offsets


def frontier_of(config: Config, data: Path | None = None) -> Frontier:
    found = read_frontier(Disk(), (data or config.store.data) / "frontier")
    assert found is not None
    return found


@pytest.fixture
def unbuilt(tmp_path: Path) -> Config:
    return config_for(tmp_path / "store", tmp_path / "data")


def test_what_nobody_can_prove_is_named_and_stays_so(unbuilt: Config, tmp_path: Path) -> None:
    offsets = cut_short(tmp_path / "store")
    gap = Uncovered(offsets[107], offsets[200], UNPROVEN)
    for _ in range(2):
        reopen(unbuilt)
        assert frontier_of(unbuilt).uncovered == (gap,)
    with open_query(unbuilt.store.data) as data:
        assert data.coverage().uncovered == (gap,)
    rebuild(unbuilt, Disk(), tmp_path / "out", lambda *_: None)
    built = frontier_of(unbuilt, tmp_path / "out")
    assert (built.uncovered, built.newest_timestamp) == ((gap,), frontier_of(unbuilt).newest_timestamp)


def test_a_rebuild_that_can_ask_the_broker_leaves_them_out(unbuilt: Config, tmp_path: Path) -> None:
    offsets = cut_short(tmp_path / "store")
    done = rebuild(unbuilt, Disk(), tmp_path / "out", lambda *_: None, Named(offsets[107]))
    assert (done.phy_offset, done.messages, done.unproven_bytes) == (offsets[107], 107, 0)


def test_the_broker_knows_them_at_the_next_start(unbuilt: Config, tmp_path: Path) -> None:
    offsets = write_times(tmp_path / "store", [*range(5000, 5100), *range(100)])
    reopen(unbuilt)
    assert frontier_of(unbuilt).unproven_from == offsets[100]
    assert reopen(unbuilt, log_limit=Named(offsets[200])).recovered.dropped_entries == 0
    assert frontier_of(unbuilt).uncovered == ()


def test_a_daemon_reads_times_that_fall_and_says_how_far_it_is(tmp_path: Path) -> None:
    offsets = write_times(tmp_path / "store", [-1000 * number for number in range(600)])
    with Daemon(tmp_path / "store", tmp_path / "data", *SIZES) as daemon:
        state = daemon.wait_state(lambda row: row["caughtUp"] and not row["dispatchBehindBytes"])
        assert (state["phyOffset"], state["messages"]) == (offsets[600], 600)
        assert state["uncovered"] == [[offsets[1], offsets[600], UNPROVEN]]
        write_times(tmp_path / "store", [1], start=offsets[600])
        daemon.wait_state(lambda row: row["messages"] == 601 and not row["uncovered"])
        assert daemon.terminate() == 0
    reopened = config_for(tmp_path / "store", tmp_path / "again")
    reopen(reopened)
    assert_same_index(tmp_path / "data", tmp_path / "again")


# --- what the broker said holds over a restart ---


def covered(unbuilt: Config) -> tuple[bool, list[int]]:
    """Whether the coverage is complete, and which of the messages with the keys k00000, ... are found."""
    with open_query(unbuilt.store.data) as data:
        found = [number for number in range(200) if data.by_key("T", f"k{number:05d}").hits]
        return data.coverage().complete, found


def test_what_the_broker_does_not_know_at_the_next_start_is_gone_and_stays_so(unbuilt: Config, tmp_path: Path) -> None:
    offsets = cut_short(tmp_path / "store")
    reopen(unbuilt)
    came_to = reopen(unbuilt, log_limit=Named(offsets[107]))
    assert (came_to.phy_offset, came_to.recovered.dropped_entries) == (offsets[107], 93)
    found = frontier_of(unbuilt)
    assert (found.messages, found.uncovered, found.store_timestamp) == (107, (), BASE_TIME + 5000)
    for unclean in (False, True, False):  # without it
        assert covered(unbuilt) == (True, list(range(106)))
        opened = reopen(unbuilt, unclean=unclean)
        assert (opened.resumed_at, opened.phy_offset) == (offsets[107], offsets[107])
    with open_query(unbuilt.store.data) as data:
        assert len(data.by_key("T", "n00000").hits) == 1
    # Until something is written there: what is behind it, nobody has asked about.
    write_times(tmp_path / "store", [6000], start=offsets[107], key="m")
    assert covered(unbuilt)[0] is False
    reopen(unbuilt)
    found = frontier_of(unbuilt)
    assert (found.uncovered, found.stale_head) == ((Uncovered(offsets[108], offsets[200], UNPROVEN),), None)


@pytest.mark.parametrize("at", [4, 60], ids=["no magic", "half a frame"])
def test_what_a_crash_left_behind_the_brokers_end_is_nothing(unbuilt: Config, tmp_path: Path, at: int) -> None:
    offsets = write_times(tmp_path / "store", list(range(200)))
    patch(tmp_path / "store" / "commitlog" / f"{0:020d}", offsets[106] + at, bytes(4 if at == 4 else 8000))
    reopen(unbuilt, log_limit=Named(offsets[106]))
    assert covered(unbuilt) == (True, list(range(106)))
    status = json.loads(indexd_here("status", "--data", unbuilt.store.data, "--json").stdout)
    assert (status["caughtUp"], status.get("corrupt")) == (True, None)
    reopen(unbuilt)
    assert covered(unbuilt) == (True, list(range(106)))


def test_a_daemon_beside_a_broker_that_was_killed_is_complete(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    offsets = write_times(store, list(range(200)))
    patch(store / "commitlog" / f"{0:020d}", offsets[106] + 60, b"\x7f" * 500)
    with FakeBroker(well(str(offsets[106]))) as broker:
        conf = tmp_path / "broker.conf"
        port = broker.address.rpartition(":")[2]
        conf.write_text(f"storePathRootDir={store}\nlistenPort={port}\nbrokerIP1=127.0.0.1\nmessageIndexEnable=false\n")
        flags = (*SIZES, "--broker-conf", str(conf))
        with Daemon(store, data, *flags, env={"INDEXD_CORRUPT_AFTER_MS": "100"}) as daemon:
            daemon.wait_state(lambda row: bool(row["staleHead"] and row["caughtUp"] and row["corrupt"] is None))
            daemon.wait_for(lambda: json.loads((data / "frontier").read_bytes())["staleHead"], "the frontier")
            for _ in range(2):
                with open_query(data) as opened:
                    assert opened.coverage().to_json() | {"daemonPid": None} == {
                        "begin": 0, "end": offsets[106], "logBegin": 0, "complete": True, "uncovered": [],
                        "daemonPid": None,
                    }  # fmt: skip
                daemon.kill()


# --- damage in the newest segment, which may become the log's end ---


def damage(store: Path) -> list[int]:
    """The magic of the 106th of 200 messages that are indexed is zeroed."""
    offsets = write_times(store, list(range(200)))
    reopen(config_for(store, store.with_name("data")))
    patch(store / "commitlog" / f"{0:020d}", offsets[106] + 4, bytes(4))
    return offsets


@pytest.mark.parametrize("knows", [True, False])
def test_messages_behind_damage_are_doubted_until_they_are_proven(unbuilt: Config, tmp_path: Path, knows: bool) -> None:
    offsets = damage(tmp_path / "store")
    others = [number for number in range(200) if number != 106]
    for _ in range(2):
        assert reopen(unbuilt, unclean=True).phy_offset == offsets[200]
        assert frontier_of(unbuilt).uncovered == (Uncovered(offsets[106], offsets[200], DOUBTED),)
        assert covered(unbuilt) == (False, others)
    if knows:
        assert reopen(unbuilt, log_limit=Named(offsets[200])).recovered.dropped_entries == 0
        assert covered(unbuilt) == (True, others)
    else:  # a later message proves them, too
        write_times(tmp_path / "store", [6000], start=offsets[200], key="n")
        reopen(unbuilt, unclean=True)
        assert frontier_of(unbuilt).uncovered == ()


def test_messages_behind_damage_that_the_broker_does_not_know_are_gone(unbuilt: Config, tmp_path: Path) -> None:
    offsets = damage(tmp_path / "store")
    reopen(unbuilt, unclean=True)
    assert reopen(unbuilt, log_limit=Named(offsets[106])).recovered.dropped_entries == 94
    assert covered(unbuilt) == (True, list(range(106)))


def test_a_frame_in_the_place_of_a_damaged_one_is_noticed_beside_the_daemon(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    offsets = write_times(store, list(range(200)))
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(offsets[200])
        patch(store / "commitlog" / f"{0:020d}", offsets[106] + 4, bytes(4))
        daemon.wait_state(lambda row: bool(row["uncovered"] == [[offsets[106], offsets[200], DOUBTED]]))
        write_times(store, [5000], start=offsets[106], key="n")
        daemon.wait_state(lambda row: bool(row["uncovered"] == [[offsets[107], offsets[200], UNPROVEN]]))
        with open_query(data) as opened:
            assert len(opened.by_key("T", "n00000").hits) == 1
            assert not opened.by_key("T", "k00106").hits
