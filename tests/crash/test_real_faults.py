"""Real faults: file systems full, read-only, without rights or descriptors; EIO; processes stopped, clocks that jump.

Also what is done to a data directory between a stop and a start.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from indexd.index.format import IndexLayout
from support.beside_log import assert_beside, over_queues, spec
from support.commitlog_writer import FrameSpec
from support.daemon import Daemon, index_files, indexd
from support.faults import (
    DISK_FAILED,
    UNSAFE,
    OwnMounts,
    Place,
    all_files,
    check_calm,
    check_whole,
    degraded,
    end_line,
    failing_calls,
    fill,
    mode,
    no_descriptors,
    under_permissions,
)
from support.missing import installing, missing
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, QUEUE_FILE_SIZE, SEGMENT_SIZE, SIZES

LAYOUT = IndexLayout(HASH_SLOT_NUM, INDEX_NUM)
FULL, READ_ONLY, DENIED = "No space left on device", "Read-only file system", "Permission denied"
#: Index files so small that the frontier, which names them all, takes two pages, and the checkpoint one.
MANY = ("--segment-size", str(SEGMENT_SIZE), "--hash-slot-num", "20", "--index-num", "200")
MIB = 1 << 20
QUEUES = 6


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def denied(tmp_path: Path) -> Place:
    """Bits of files hold for its daemons, whoever runs them."""
    return Place(tmp_path, tracer=under_permissions())


@pytest.fixture
def mounts() -> Iterator[OwnMounts]:
    with OwnMounts() as made:
        yield made


@pytest.fixture
def room(mounts: OwnMounts, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """The data is on a small file system of its own: a tmpfs, or what the test asks for."""
    kind = {"tmpfs": mounts.tmpfs, "ext4": mounts.ext4}[getattr(request, "param", "tmpfs")]
    return Place(tmp_path, kind(tmp_path / "data", 8 * MIB), mounts.words)


ON_EXT4 = pytest.mark.parametrize("room", ["ext4"], indirect=True)


# --- no room ---


@pytest.mark.parametrize("is_built", [False, True])
def test_full_before_a_start(room: Place, is_built: bool) -> None:
    """The first one, or one that has to recover: a service manager tries again, which is no crash loop."""
    room.env = {"INDEXD_UNCLEAN_STARTS_MAX": "1"}
    if is_built:
        with room.running():
            pass
        # What a start removes or cuts would give a page back, and one is enough to open.
        for path in (*room.data.glob("*.tmp"), room.data / "state", room.data / "starts"):
            path.unlink(missing_ok=True)
    else:
        room.log(1000)
    filler = fill(room.data)
    for _ in range(2):
        room.fails(FULL)
    filler.unlink()
    room.starts_well()


NO_QUEUES = (*SIZES, "--consume-queue", "false")
#: Few enough for the index file that is open; some queue comes to a new file.
MORE_UNITS = over_queues(150, QUEUES, seed=2, first=5000)
#: The same of a topic that was never there.
MORE_QUEUES = [spec(5000 + number, "New", number) for number in range(40)]
#: Large ones, so that the index file that is open takes them all, and a new segment every two.
MORE_SEGMENTS = [spec(5000 + number, body=100_000) for number in range(40)]
OF_QUEUES = ("consumequeue", "/sparse/")  # whichever comes first


@pytest.mark.parametrize(
    ("room", "more", "leave_pages", "words", "flags"),
    [
        ("tmpfs", 3000, 0, ("allocate space for", "cannot create"), ()),
        ("ext4", 3000, 8, ("allocate space for", "cannot create"), ()),
        ("tmpfs", MORE_UNITS, 0, OF_QUEUES, ()),
        ("ext4", MORE_UNITS, 0, OF_QUEUES, ()),
        ("tmpfs", MORE_QUEUES, 0, OF_QUEUES, ()),
        # A segment begins; one of its two files has room, or none, or both.
        *(("tmpfs", MORE_SEGMENTS, pages, ("/sparse/",), NO_QUEUES) for pages in (0, 1, 5)),
    ],
    indirect=["room"],
)
def test_no_room_for_the_next_file(
    room: Place, more: int | list[FrameSpec], leave_pages: int, words: tuple[str, ...], flags: tuple[str, ...]
) -> None:
    """What was made and could not be filled is filled later; nobody takes it for an output's until then."""
    first = 1000 if more == 3000 else over_queues(200 if flags else 1000, QUEUES)
    with room.running(first, *flags) as daemon:
        filler = fill(room.data, leave_pages)
        room.log(more)
        line = degraded(daemon, *words, stage="build")
        assert FULL in line
        assert "free space on that file system" in line
        if leave_pages == 8:  # room for the state, not for an index file
            assert daemon.wait_state(lambda row: "build" in row["problems"])["problems"]["build"]
        check_calm(daemon)
        # Half a file would be taken for a whole one by whoever copies the directory now.
        assert all(path.stat().st_size in (0, LAYOUT.file_size) for path in index_files(room.data))
        done = indexd("verify", "--store", room.store, "--data", room.data)
        assert done.returncode == 0, done.stdout + done.stderr
        filler.unlink()
        check_whole(daemon, room.end, *flags)
    if not flags and more != 3000:
        assert_beside(room.data, room.store, SEGMENT_SIZE, QUEUE_FILE_SIZE)


@pytest.mark.parametrize(
    ("room", "pages", "flags"), [("tmpfs", 0, ()), ("tmpfs", 1, MANY), ("ext4", 1, MANY)], indirect=["room"]
)
def test_no_room_for_checkpoint_frontier_and_state(room: Place, pages: int, flags: tuple[str, ...]) -> None:
    """Or, with a page left, for the checkpoint and not for the frontier: what it wrote itself is nobody else's."""
    kept = ("frontier",) if pages else ("checkpoint", "frontier")
    with room.running(3000 if flags else 1000, *flags) as daemon:
        before = [(room.data / name).read_bytes() for name in kept]
        assert len(before[-1]) > 4096 or not pages
        filler = fill(room.data, pages)
        room.log(5)  # they fit into the index file that is open
        assert FULL in degraded(daemon, *(f"{name}.tmp" for name in kept), stage="flush")
        check_calm(daemon)
        assert pages or len(daemon.events("state_not_written")) == 1
        assert [(room.data / name).read_bytes() for name in kept] == before
        filler.unlink()
        check_whole(daemon, room.end, *flags)
        assert not daemon.events("restored")


@ON_EXT4
def test_no_room_at_the_last_flush_of_a_stop(room: Place) -> None:
    with room.running() as daemon:
        filler = fill(room.data)
        room.log(20)
        degraded(daemon, FULL)
        assert daemon.terminate() == DISK_FAILED
        assert FULL in end_line(daemon)
    filler.unlink()
    room.run_again()


# --- read-only ---


def test_a_directory_that_becomes_read_only_and_writable_again(mounts: OwnMounts, tmp_path: Path) -> None:
    place = Place(tmp_path, mounts.tmpfs(tmp_path / "data", 4 * MIB), mounts.words)
    with place.running() as daemon:
        mounts.read_only(tmp_path / "data")
        place.log()
        line = degraded(daemon, "cannot create", "cannot open", stage="build")
        assert READ_ONLY in line
        assert "remount the file system read-write" in line
        check_calm(daemon)
        mounts.unmount(tmp_path / "data")
        check_whole(daemon, place.end)


def test_a_read_only_directory_at_the_start(mounts: OwnMounts, tmp_path: Path) -> None:
    place = Place(tmp_path, mounts.read_only(tmp_path / "data"), mounts.words)
    place.log(1000)
    place.fails(READ_ONLY)
    mounts.unmount(tmp_path / "data")
    place.starts_well()


@ON_EXT4
def test_an_ext4_that_gives_up_after_an_error_of_its_own(room: Place, mounts: OwnMounts, tmp_path: Path) -> None:
    """``remount,abort`` is what errors=remount-ro does: nothing is written any more, not even what is open."""
    inside = tmp_path / "data"
    with room.running() as daemon:
        mounts.run("mount", "-o", "remount,abort", inside)
        room.log()
        degraded(daemon, READ_ONLY)
        # What was built before the disk gave up is flushed meanwhile, and a failed fsync ends the process. If there
        # was nothing, it waits; but only unmounting helps, so it has to be stopped first.
        code = daemon.ended_within(1.0)
        if code is None:
            check_calm(daemon)
            code = daemon.terminate()
        assert code == DISK_FAILED
        assert READ_ONLY in end_line(daemon)
    mounts.unmount(inside)
    mounts.mount_image(inside)
    room.run_again()


# --- rights and descriptors ---


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        (".", 0o500),
        *((name, bits) for name in ("index", "sparse") for bits in (0o500, 0)),
        *(("consumequeue", 0o500), ("consumequeue/Topic0", 0o500), ("consumequeue/Topic0/1", 0)),
    ],
)
def test_the_right_to_a_folder_is_taken_and_given_back(denied: Place, name: str, bits: int) -> None:
    with denied.running(over_queues(1000, QUEUES)) as daemon:
        with mode(denied.data / name, bits):
            # New topics, new queues of the old ones, new files of old queues, new segments and index files.
            denied.log([*over_queues(3000, 2 * QUEUES, seed=2, first=5000), *MORE_QUEUES])
            assert "give this user the permission" in degraded(daemon, DENIED)
            # Those who may look into it: the test may not when it is no root, and nothing is made there anyway.
            if bits:
                check_calm(daemon)
        denied.mended(daemon)


def test_the_right_to_files_is_taken_and_given_back(denied: Place) -> None:
    """Files that are open stay so: those of a queue that was not written for long are not, and are opened again."""
    with denied.running([spec(0, "Seldom"), *over_queues(2000, 200, first=1)]) as daemon:
        with mode(denied.data / "consumequeue" / "Seldom" / "0" / f"{0:020d}", 0o400):
            denied.log([spec(5000 + number, "Seldom") for number in range(30)])
            assert "Seldom" in degraded(daemon, DENIED)
            check_calm(daemon)
        denied.mended(daemon)


@pytest.mark.parametrize("names", ["commitlog", "commitlog/*"])
def test_the_right_to_the_log_is_taken_and_given_back(denied: Place, names: str) -> None:
    """Or to its segments: the broker was started again under another user."""
    with denied.running() as daemon:
        os.kill(daemon.pid, signal.SIGSTOP)  # it must not have opened them before
        denied.log()
        with ExitStack() as taken:
            for path in denied.store.glob(names):
                taken.enter_context(mode(path, 0o000))
            os.kill(daemon.pid, signal.SIGCONT)
            assert DENIED in degraded(daemon, "commitlog", stage="read")
            check_calm(daemon)
        check_whole(daemon, denied.end)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("data", 0o500), ("store/commitlog", 0), ("data/index", 0), ("data/consumequeue", 0), ("data/sparse", 0)],
)
def test_no_right_at_the_start(denied: Place, tmp_path: Path, name: str, bits: int) -> None:
    """A service manager tries again and again; as soon as the cause is gone it starts, crash loop or not."""
    denied.env = {"INDEXD_UNCLEAN_STARTS_MAX": "1"}
    if name.startswith("data/"):
        with denied.running():
            pass
    else:
        denied.log(1000)
        denied.data.mkdir()
    with mode(tmp_path / name, bits):
        for _ in range(2):
            denied.fails(DENIED)
    denied.starts_well()


@pytest.mark.parametrize("name", ["index", "consumequeue/Topic0/0", "sparse"])
def test_expired_files_that_may_not_be_removed(denied: Place, name: str) -> None:
    with denied.running(over_queues(4000, QUEUES)) as daemon:
        with mode(denied.data / name, 0o500):
            for path in sorted((denied.store / "commitlog").iterdir())[:2]:
                path.unlink()
            # The next segment begins with these: then the daemon looks for what is gone. No new index file yet.
            denied.log(over_queues(100, QUEUES, first=4000))
            daemon.wait_event("expired_files")
            line = degraded(daemon, "cannot remove")
            assert DENIED in line
            assert str(denied.data / name) in line
            check_calm(daemon)
        daemon.wait_event("healed")
        assert daemon.terminate() == 0
    # No file is left that nobody names, and what is left holds.
    done = indexd("verify", "--deep", "--data", denied.data)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("spare", [0, 1])
def test_too_few_descriptors(place: Place, spare: int) -> None:
    with place.running() as daemon:
        with no_descriptors(daemon.pid, spare):
            place.log()
            assert "LimitNOFILE" in degraded(daemon, "Too many open files")
            check_calm(daemon)
        check_whole(daemon, place.end)


# --- EIO ---


@pytest.mark.parametrize("calls", ["fsync", "pwrite64"])
@pytest.mark.parametrize(
    "name", ["", "consumequeue/Topic0/0/00000000000000001200", "sparse/00000000000000000000.index"]
)
def test_a_disk_that_answers_with_an_error(place: Place, name: str, calls: str) -> None:
    """Of all files or of one: nothing is known of what was written, and nothing is written down that does not hold for
    all outputs; the process ends, and the next one recovers."""
    with place.running(over_queues(500, QUEUES)) as daemon:
        kept = (place.data / "frontier").read_bytes()
        with failing_calls(daemon.pid, calls, path=place.data / name if name else None):
            place.log(over_queues(60 if name else 3000, QUEUES, seed=2, first=5000))
            assert daemon.wait() == DISK_FAILED
        assert "Input/output error" in end_line(daemon)
        assert name in end_line(daemon)
        assert (place.data / "frontier").read_bytes() == kept
    place.run_again()
    assert_beside(place.data, place.store, SEGMENT_SIZE, QUEUE_FILE_SIZE)


def test_a_log_that_cannot_be_read_for_a_while(place: Place) -> None:
    """EIO on the broker's disk harms nothing of ours: it waits."""
    with place.running() as daemon:
        with failing_calls(daemon.pid, "preadv,pread64"):
            place.log()
            assert "Input/output error" in daemon.wait_event("degraded")["problem"]
            check_calm(daemon)
        check_whole(daemon, place.end)


# --- time ---

DAY = 24 * 3600
# Longer than a beat of the daemon may be late.
STOPPED_SECONDS = 7


class Clock:
    """The time of day as one daemon sees it; times of files and the monotonic clock stay true, as in a real jump."""

    def __init__(self, path: Path) -> None:
        library = next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)
        if library is None:
            missing(f"there is no libfaketime; {installing('faketime')}")
        self._path = path
        self.shift(0)
        self.env = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(path),
            "FAKETIME_CACHE_DURATION": "1",
            "DONT_FAKE_MONOTONIC": "1",
            # Its cure for a defect of old C libraries makes timed waits return at once.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
            "NO_FAKE_STAT": "1",
        }

    def shift(self, days: int) -> None:
        """So many days away from the true time, from now on."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(f"{days * DAY:+d}\n")
        fresh.replace(self._path)


@pytest.fixture
def clock(tmp_path: Path) -> Clock:
    return Clock(tmp_path / "clock")


def tells(state: dict[str, Any], days: int) -> bool:
    """Whether the daemon has seen the jump."""
    return bool(abs(state["writtenAt"] / 1000 - time.time() - days * DAY) < 60)


def names(daemon: Daemon) -> list[str]:
    return [path.name for path in index_files(daemon.data)]


def test_a_clock_that_jumps_a_year_ahead_and_two_back(place: Place, clock: Clock) -> None:
    place.env = clock.env
    with place.running(1500) as daemon:
        seen = names(daemon)
        for days in (365, -365):
            clock.shift(days)
            daemon.wait_state(partial(tells, days=days))
            place.log()
            daemon.wait_durable(place.end)
            # What was there keeps its place, what is new comes behind it, whatever the clock says.
            assert names(daemon)[: len(seen)] == seen
            assert len(names(daemon)) > len(seen)
            seen = names(daemon)
        assert int(seen[-1][:4]) == int(time.strftime("%Y", time.localtime(time.time() + 365 * DAY)))
        check_calm(daemon)
        check_whole(daemon, place.end)
        assert not daemon.events("restored")


def test_a_clock_that_was_set_back_between_two_unclean_starts(place: Place, clock: Clock) -> None:
    """Unclean starts of what is now the future do not keep it from starting, and recovery does not mind."""
    place.env = clock.env | {"INDEXD_UNCLEAN_STARTS_MAX": "1"}
    place.log(1500)
    for days in (0, 365):
        clock.shift(days)
        with place.daemon() as daemon:
            daemon.wait_event("starting")
    clock.shift(-365)
    place.starts_well()


def test_nothing_is_blamed_after_a_stop(place: Place) -> None:
    with place.running() as daemon:
        os.kill(daemon.pid, signal.SIGSTOP)
        place.log(8000)
        time.sleep(STOPPED_SECONDS)
        assert daemon.state()["phyOffset"] < place.end
        os.kill(daemon.pid, signal.SIGCONT)
        daemon.wait_caught_up(place.end)
        beats = int(daemon.state()["writtenAt"])
        daemon.wait_state(lambda row: bool(row["writtenAt"] > beats + 3000))  # one look around and one beat, at least
        assert not daemon.state()["stalled"]
        assert not [row for row in daemon.events() if row["level"] != "info"]
        check_whole(daemon, place.end)


def test_stopped_and_then_ended_as_a_watchdog_does(place: Place) -> None:
    """systemd sends ABRT to a service that does not answer; that is no way to write anything down."""
    with place.running() as daemon:
        os.kill(daemon.pid, signal.SIGSTOP)
        place.log()
        os.kill(daemon.pid, signal.SIGABRT)
        os.kill(daemon.pid, signal.SIGCONT)
        assert daemon.wait() == -signal.SIGABRT
    place.run_again()


# --- between a stop and a start ---


@pytest.fixture
def built(place: Place) -> Place:
    """A log and its index, after a clean stop."""
    place.log(2000)
    place.recover()
    return place


def refused(place: Place, *flags: str) -> str:
    """What a start with these flags is refused with; it changes nothing but who asked last."""
    mine = {"lock", "abort", "starts"}
    before = {name: (place.data / name).read_bytes() for name in all_files(place.data) if name not in mine}
    done = indexd("--store", place.store, "--data", place.data, *flags, env=place.env)
    assert done.returncode == UNSAFE
    assert before == {name: (place.data / name).read_bytes() for name in all_files(place.data) if name not in mine}
    return done.stderr.splitlines()[-1]


def asked(segment_size: int = SEGMENT_SIZE, slots: int = HASH_SLOT_NUM, entries: int = INDEX_NUM) -> tuple[str, ...]:
    return ("--segment-size", str(segment_size), "--hash-slot-num", str(slots), "--index-num", str(entries))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (asked(slots=501), ["hash_slot_num 500", "501", "another --data"]),
        (asked(entries=4001), ["index_num 4000", "4001", "another --data"]),
        # The log itself does not fit, which is seen first.
        (asked(segment_size=2 * SEGMENT_SIZE), ["has 262144 bytes", "524288", "give the broker's own --segment-size"]),
        ((*SIZES, "--flavour", "4.7"), ["flavour 5.4", "4.7", "another --data"]),
        ((*SIZES, "--sparse-interval", "1001"), ["was built with sparse_interval 4096, and now 1001 is asked for"]),
        ((*SIZES[:-1], "1220"), ["was built with consume_queue_file_size 1200, and now 1220 is asked for"]),
    ],
    ids=["slots", "entries", "segments", "flavour", "sparse", "queues"],
)
def test_a_directory_that_was_built_otherwise(built: Place, flags: tuple[str, ...], says: list[str]) -> None:
    """A service manager tries a wrong configuration many times; the right one must start at once."""
    built.env = {"INDEXD_UNCLEAN_STARTS_MAX": "1"}
    for _ in range(3 if says[0] == "hash_slot_num 500" else 1):
        line = refused(built, *flags)
        assert all(word in line for word in says), line
    built.starts_well()


def test_a_frontier_that_does_not_hold(built: Place) -> None:
    """A bit has changed; that it is empty, or cut, is seen as easily."""
    text = bytearray((built.data / "frontier").read_bytes())
    text[300] ^= 1
    (built.data / "frontier").write_bytes(text)
    with built.daemon() as daemon:
        assert str(built.data / "frontier") in daemon.wait_event("frontier_unreadable")["problem"]
        check_whole(daemon, built.end)


@pytest.mark.parametrize("unclean", [False, True], ids=["their-names", "our-names-after-a-kill"])
def test_index_files_of_another_store(built: Place, tmp_path: Path, unclean: bool) -> None:
    other = Place(tmp_path / "other")
    other.log(over_queues(3000, QUEUES))
    other.recover()
    ours = index_files(built.data)
    if unclean:
        (built.data / "abort").write_text("1")
    else:
        shutil.rmtree(built.data / "index")
        (built.data / "index").mkdir()
    for number, path in enumerate(index_files(other.data)):
        shutil.copy2(path, built.data / "index" / (ours[number].name if unclean and number < len(ours) else path.name))
    built.starts_well()
