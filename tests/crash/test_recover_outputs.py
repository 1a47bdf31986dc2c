"""``indexd --recover``, and plain starts, on damaged ConsumeQueues and sparse indexes, and what they say."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.beside_log import over_queues, write
from support.daemon import Daemon, assert_same_index, compile_kernels, indexd, indexd_here
from support.outputs import INTERVAL, UNITS, Built, build, copied
from support.reopened import Reopened, config_for, named_for, reopen, undisturbed
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE, SIZES
from support.verifying import change, check, kinds

FLAGS = (*SIZES, "--sparse-interval", str(INTERVAL))


def recover(built: Built, *flags: str) -> Any:
    """What it says with --json; it must end well."""
    done = indexd_here("--recover", "--json", "--store", built.store, "--data", built.data, *FLAGS, *flags)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def start(built: Built, *, unclean: bool = False, **keys: object) -> Reopened:
    """Open it, catch up and stop, in this process."""
    return reopen(config_for(built.store, built.data, **{"sparse_interval": INTERVAL} | keys), unclean=unclean)


def check_whole(built: Built, base: Built) -> None:
    """What lies there is what an undisturbed build makes, and the frontier says so."""
    assert sorted(path.name for path in built.data.iterdir()) == sorted(
        {path.name for path in base.data.iterdir()} | {"lock"} & {path.name for path in built.data.iterdir()}
    )
    assert_same_index(built.data, base.data)
    ours, wanted = built.frontier, base.frontier
    assert sorted(ours.queues or ()) == sorted(wanted.queues or ())
    assert (ours.sparse, ours.refill_offset, ours.messages) == (wanted.sparse, None, wanted.messages)
    report = check(built.data, deep=True)
    assert (kinds(report), report.notes) == ({}, [])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Built:
    compile_kernels()
    return build(tmp_path_factory.mktemp("outputs"))


@pytest.fixture
def built(base: Built, tmp_path: Path) -> Built:
    return copied(base, tmp_path)


def middle(built: Built) -> tuple[Path, Path, Path]:
    """The first, the second and the last file of a queue with three of them."""
    mark = next(mark for mark in built.marks if mark.max_offset > 2 * UNITS and mark.max_offset % UNITS)
    return built.queue_file(mark, 0), built.queue_file(mark, UNITS), built.queue_file(mark, mark.max_offset)


def cut_and_write_on(built: Built) -> None:
    """As a daemon would that has not noticed the cut yet."""
    mark = max(built.marks, key=lambda mark: mark.max_offset % UNITS)
    path, end = built.queue_file(mark, mark.max_offset), mark.max_offset % UNITS * 20
    last = path.read_bytes()[end - 20 : end]
    assert end >= 60
    os.truncate(path, 20)
    with path.open("r+b") as file:
        file.seek(end - 20)
        file.write(last)


# What a look at the files tells, so that every start mends it.
LOST: dict[str, Callable[[Built], object]] = {
    "first queue file": lambda built: middle(built)[0].unlink(),
    "queue file between": lambda built: middle(built)[1].unlink(),
    "last queue file": lambda built: middle(built)[2].unlink(),
    "first queue file cut": lambda built: os.truncate(middle(built)[0], 100),
    "queue file between cut to nothing": lambda built: os.truncate(middle(built)[1], 0),
    "last queue file cut inside a unit": lambda built: os.truncate(middle(built)[2], 5),
    "last queue file cut and written on": cut_and_write_on,
    "queue file too long": lambda built: os.truncate(middle(built)[0], QUEUE_FILE_SIZE + 1),
    "a queue": lambda built: shutil.rmtree(middle(built)[0].parent),
    "a topic": lambda built: shutil.rmtree(middle(built)[0].parent.parent),
    "all queues": lambda built: shutil.rmtree(built.data / "consumequeue"),
    "offset index": lambda built: built.pair(1)[0].unlink(),
    "time index": lambda built: built.pair(0)[1].unlink(),
    "growing pair": lambda built: [path.unlink() for path in built.pair(-1)],
    "offset index cut": lambda built: os.truncate(built.pair(0)[0], 24),
    "time index too long": lambda built: os.truncate(built.pair(1)[1], built.pair(1)[1].stat().st_size + 12),
    "growing time index cut": lambda built: os.truncate(built.pair(-1)[1], 24),
    "all sparse indexes": lambda built: shutil.rmtree(built.data / "sparse"),
    "both outputs": lambda built: [shutil.rmtree(built.data / name) for name in ("consumequeue", "sparse")],
}


WAYS = ("start", "unclean start", "--recover")
IN_EACH_WAY = ("queue file between", "last queue file cut inside a unit", "both outputs")


@pytest.mark.parametrize(
    ("damage", "how"),
    [
        (damage, how)
        for number, damage in enumerate(LOST)
        for way, how in enumerate(WAYS)
        if damage in IN_EACH_WAY or number % len(WAYS) == way
    ],
)
def test_what_is_lost_is_built_again(built: Built, base: Built, damage: str, how: str) -> None:
    LOST[damage](built)
    if how == "--recover":
        assert recover(built)["droppedEntries"] == 0
    else:
        assert start(built, unclean=how == "unclean start").recovered.dropped_entries == 0
    check_whole(built, base)


def swap(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def strew(built: Built) -> None:
    for name in ("consumequeue/Other/0", "consumequeue/TopicTest/9"):
        (built.data / name).mkdir(parents=True)
        (built.data / name / f"{0:020d}").write_bytes(b"x")
    (built.data / "sparse" / f"{SEGMENT_SIZE * 99:020d}.index").write_bytes(b"x")


# What only a comparison with the log tells.
CHANGED: dict[str, Callable[[Built], object]] = {
    "unit": lambda built: change(middle(built)[0], 3 * 20 + 7, b"\x55"),
    "tags code of the last unit": lambda built: change(middle(built)[2], 19, b"\x55"),
    "units wiped": lambda built: change(middle(built)[1], 0, bytes(400)),
    "all of a queue": lambda built: [path.write_bytes(random.Random(1).randbytes(1200)) for path in middle(built)],
    "offset entry": lambda built: change(built.pair(0)[0], 7, b"\x55"),
    "time entry": lambda built: change(built.pair(-1)[1], 2, b"\x55"),
    "entries wiped": lambda built: change(built.pair(1)[0], 16, bytes(80)),
    "behind the last unit": lambda built: change(middle(built)[2], QUEUE_FILE_SIZE - 1, b"\x55"),
    "behind the last entry": lambda built: change(built.pair(-1)[0], built.pair(-1)[0].stat().st_size - 1, b"\x55"),
    "queue files swapped": lambda built: swap(middle(built)[0], middle(built)[1]),
    "pairs swapped": lambda built: [swap(*both) for both in zip(built.pair(0), built.pair(1), strict=True)],
    "nobody's files": strew,
}


@pytest.mark.parametrize("damage", CHANGED)
def test_recover_holds_every_unit_and_entry_against_the_log(built: Built, base: Built, damage: str) -> None:
    CHANGED[damage](built)
    assert recover(built)["droppedEntries"] == 0
    check_whole(built, base)
    assert recover(built)["reasons"][-1] == "every entry agrees with the log"
    check_whole(built, base)


@pytest.mark.parametrize("damage", ["behind the last unit", "behind the last entry", "nobody's files"])
def test_an_unclean_start_takes_away_what_no_mark_names(built: Built, base: Built, damage: str) -> None:
    CHANGED[damage](built)
    start(built, unclean=True)
    check_whole(built, base)


def test_files_of_others_stay(built: Built) -> None:
    others = [built.data / name for name in ("consumequeue/notes", "consumequeue/TopicTest/0/notes", "sparse/a.index")]
    for path in others:
        path.write_text("mine")
    recover(built)
    assert [path.read_text() for path in others] == ["mine"] * 3


# --- beside expired messages ---


def expired(built: Built, segments: int) -> Path:
    """The store without its first segments, five messages longer; the data directory has seen them go."""
    store = built.root / "expired"
    shutil.copytree(built.store, store)
    for number in range(segments):
        (store / "commitlog" / f"{number * SEGMENT_SIZE:020d}").unlink()
    named_for(store, built.data)
    built.store = store
    write(store, over_queues(5, 2), SEGMENT_SIZE)
    start(built)
    return store


@pytest.mark.parametrize(
    ("damage", "segments"), [(damage, 1 + number % 4 // 2) for number, damage in enumerate(LOST) if number % 2]
)
def test_what_is_lost_beside_expired_messages(built: Built, damage: str, segments: int) -> None:
    expired(built, segments)
    before = {path: path.read_bytes() for path in built.data.rglob("*") if path.is_file()}
    try:
        LOST[damage](built)
    except FileNotFoundError:
        return  # it has expired
    start(built, unclean=True)
    assert kinds(check(built.data, deep=True)) == {}
    # Units of expired messages cannot be built again; all others are there again, byte for byte.
    begin = segments * SEGMENT_SIZE
    for path, data in before.items():
        if "sparse" in path.parts:
            assert path.read_bytes() == data
        elif "consumequeue" in path.parts:
            now = path.read_bytes() if path.exists() else bytes(len(data))
            for at in range(0, len(data), 20):
                if int.from_bytes(data[at : at + 8], "big") >= begin:
                    assert now[at : at + 20] == data[at : at + 20], path
    # And --recover changes nothing more.
    after = {path: path.read_bytes() for path in built.data.rglob("*") if path.is_file() and "index" not in path.parts}
    recover(built)
    for path, data in after.items():
        if path.parent.name != "data":
            assert path.read_bytes() == data, path


def test_a_recovery_that_is_broken_off_again_and_again(built: Built, base: Built) -> None:
    rand = random.Random(4)
    for damage in ("queue file between", "first queue file cut", "time index", "growing time index cut"):
        LOST[damage](built)
    for _ in range(6):
        with Daemon(built.store, built.data, *FLAGS) as daemon:
            daemon.wait_event("starting")
            time.sleep(rand.random() / 4)
    assert indexd("--recover", "--store", built.store, "--data", built.data, *FLAGS).returncode == 0
    check_whole(built, base)


def change_json(built: Built, edit: Callable[[dict[str, Any]], object]) -> None:
    row = json.loads((built.data / "frontier").read_bytes())
    del row["crc32"]
    edit(row)
    (built.data / "frontier").write_text(json.dumps(row))


def as_before(row: dict[str, Any]) -> None:
    """As it was written before there were these outputs."""
    for name in ("consumeQueue", "sparse", "refillOffset"):
        row.pop(name, None)


@pytest.mark.parametrize(("how", "files"), [("start", "left"), ("--recover", "none")])
def test_a_directory_of_an_older_version_gets_the_outputs(built: Built, base: Built, how: str, files: str) -> None:
    change_json(built, as_before)
    if files == "none":
        shutil.rmtree(built.data / "consumequeue")
        shutil.rmtree(built.data / "sparse")
    (start if how == "start" else recover)(built)
    check_whole(built, base)


@pytest.mark.parametrize(
    "edit",
    [
        lambda row: row["consumeQueue"]["queues"].pop(3),
        lambda row: row["consumeQueue"]["queues"].clear(),
        lambda row: row["consumeQueue"]["queues"].append(["Other", 0, 0, 0, 5, 500, 0]),
        lambda row: row["consumeQueue"]["queues"][2].__setitem__(4, 5),
        lambda row: row["consumeQueue"]["queues"][2].__setitem__(3, 5),
        lambda row: row["consumeQueue"]["queues"][2].__setitem__(5, 1),
        lambda row: row["consumeQueue"]["queues"][2].__setitem__(2, 60),
        lambda row: row["sparse"]["segments"].pop(1),
        lambda row: row["sparse"]["segments"][1].__setitem__(1, 3),
        lambda row: row["sparse"]["segments"][0].__setitem__(2, 3),
        lambda row: row["sparse"]["active"].__setitem__(0, 0),
        lambda row: row["sparse"]["active"].__setitem__(3, 5),
        lambda row: row["sparse"].__setitem__("active", None),
    ],
)
def test_recover_believes_no_mark_that_the_log_denies(
    built: Built, base: Built, edit: Callable[[dict[str, Any]], Any]
) -> None:
    change_json(built, edit)
    recover(built)
    check_whole(built, base)


def test_turned_off_and_on_again(built: Built, base: Built) -> None:
    start(built, consume_queue="false")
    assert built.frontier.queues is None
    assert not list((built.data / "consumequeue").rglob("0" * 10 + "*"))
    assert built.frontier.sparse == base.frontier.sparse
    start(built, sparse="false")
    assert built.frontier.sparse is None
    assert sorted(built.marks) == sorted(base.marks)
    assert not list((built.data / "sparse").iterdir())
    assert kinds(check(built.data, deep=True)) == {}
    start(built)
    check_whole(built, base)


def test_an_output_that_is_off_may_be_asked_for_otherwise(built: Built) -> None:
    start(built, sparse="false", consume_queue="false")
    start(built, sparse_interval=300, consume_queue_file_size=400)
    config = config_for(built.store, built.data, sparse_interval=300, consume_queue_file_size=400)
    assert_same_index(built.data, undisturbed(config, built.root / "whole"))
    assert kinds(check(built.data, deep=True)) == {}


@pytest.mark.parametrize("unclean", [False, True])
def test_queues_that_were_left_out_are_filled_when_there_is_room(built: Built, base: Built, unclean: bool) -> None:
    shutil.rmtree(built.data)
    start(built, queues_max=3)
    assert (built.frontier.queues_mark.limit, len(built.frontier.queues or ())) == (3, 3)
    assert kinds(check(built.data, deep=True)) == {}  # what is there is right, whatever the limit of whoever looks
    # The same limit, or a lower one: nothing is read again.
    for most in (3, 2):
        done = start(built, unclean=unclean, queues_max=most)
        assert (done.recovered.dropped_entries, done.recovered.compared.queues_until) == (0, None)
        assert (built.frontier.queues_mark.limit, len(built.frontier.queues or ())) == (3, 3)
    assert start(built, unclean=unclean).recovered.dropped_entries == 0
    assert built.frontier.queues_mark.limit is None
    assert_same_index(built.data, base.data)
    assert {mark[:6] for mark in built.frontier.queues or ()} == {mark[:6] for mark in base.frontier.queues or ()}


def test_rebuild_says_what_has_no_place_in_a_queue(built: Built, tmp_path: Path) -> None:
    words = ("rebuild", "--store", built.store, "--data", tmp_path / "d", *FLAGS)
    done = indexd_here(*words, "--out", tmp_path / "all", "--json")
    assert json.loads(done.stdout)["leftOutMessages"] == 0
    done = indexd_here(*words, "--out", tmp_path / "few", "--queues-max", 1)
    assert done.returncode == 0
    assert "messages have no place in a ConsumeQueue" in done.stdout


@pytest.mark.parametrize("unclean", [False, True])
@pytest.mark.parametrize("at", ["unit", "last tags code"])
def test_a_damaged_queue_is_not_taken_for_another_log(built: Built, base: Built, at: str, unclean: bool) -> None:
    mark = max(built.frontier.queues or (), key=lambda mark: mark.max_offset)
    number = mark.max_offset // 2 if at == "unit" else mark.max_offset - 1
    path = built.queue_file(mark, number)
    data = bytearray(path.read_bytes())
    data[number * 20 % len(data) + (5 if at == "unit" else 19)] ^= 0x55
    path.write_bytes(data)
    done = start(built, unclean=unclean)
    assert done.recovered.dropped_entries == 0
    assert any("ConsumeQueue" in reason for reason in done.recovered.reasons), done.recovered.reasons
    check_whole(built, base)
