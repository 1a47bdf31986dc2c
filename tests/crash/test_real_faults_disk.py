"""Real faults of the data directory's file system: full, read-only, without rights or descriptors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from indexd.index.format import IndexLayout
from support.beside_log import assert_beside, over_queues, spec, write
from support.commitlog_writer import FrameSpec
from support.daemon import Daemon, index_files, indexd
from support.faults import (
    DISK_FAILED,
    RETRY,
    OwnMounts,
    check_calm,
    check_whole,
    degraded,
    end_line,
    failing_calls,
    fill,
    mode,
    no_descriptors,
    run_again,
    under_permissions,
)
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, QUEUE_FILE_SIZE, SEGMENT_SIZE, SIZES, write_log

LAYOUT = IndexLayout(HASH_SLOT_NUM, INDEX_NUM)
FULL = "No space left on device"
#: Index files so small that the frontier, which names them all, takes two pages, and the checkpoint one.
MANY = ("--segment-size", str(SEGMENT_SIZE), "--hash-slot-num", "20", "--index-num", "200")


class Room:
    """A store, and a small file system of its own for the data."""

    def __init__(self, mounts: OwnMounts, tmp_path: Path, kind: str) -> None:
        self.store = tmp_path / "store"
        self.data = {"tmpfs": mounts.tmpfs, "ext4": mounts.ext4}[kind](tmp_path / "data", 8 << 20)
        self._words = mounts.words

    def daemon(self, *flags: str) -> Daemon:
        return Daemon(self.store, self.data, *(flags or SIZES), env=RETRY, tracer=self._words)

    def run_again(self, end: int) -> None:
        run_again(self.store, self.data, end, tracer=self._words)


@pytest.fixture
def room(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Room]:
    """On a tmpfs, or on what the test asks for."""
    with OwnMounts() as mounts:
        yield Room(mounts, tmp_path, getattr(request, "param", "tmpfs"))


ON_BOTH = pytest.mark.parametrize("room", ["tmpfs", "ext4"], indirect=True)
ON_EXT4 = pytest.mark.parametrize("room", ["ext4"], indirect=True)


def test_before_the_first_start(room: Room) -> None:
    end = write_log(room.store, 1000)
    filler = fill(room.data)
    with room.daemon() as daemon:
        assert daemon.wait() == DISK_FAILED
        assert FULL in end_line(daemon)
    filler.unlink()
    with room.daemon() as daemon:
        check_whole(daemon, end)


def test_before_a_start_that_has_to_recover(room: Room) -> None:
    end = write_log(room.store, 1000)
    with room.daemon() as daemon:
        daemon.wait_durable(end)
    # What a start removes or cuts would give a page back, and one is enough to open.
    for path in (*room.data.glob("*.tmp"), room.data / "state", room.data / "starts"):
        path.unlink(missing_ok=True)
    filler = fill(room.data)
    with room.daemon() as daemon:
        assert FULL in degraded(daemon, "cannot write", stage="open")
        check_calm(daemon)
        filler.unlink()
        daemon.wait_event("recovered")
        check_whole(daemon, end)


@pytest.mark.parametrize(("room", "leave_pages"), [("tmpfs", 0), ("ext4", 8)], indirect=["room"])
def test_no_room_for_the_next_index_file(room: Room, leave_pages: int) -> None:
    end = write_log(room.store, 1000)
    with room.daemon() as daemon:
        daemon.wait_durable(end)
        filler = fill(room.data, leave_pages)
        end = write_log(room.store, 3000, seed=4, start_offset=end)
        line = degraded(daemon, "allocate space for", "cannot create", stage="build")
        assert FULL in line
        assert "free space on that file system" in line
        if leave_pages:  # room for the state, not for an index file
            assert daemon.wait_state(lambda row: "build" in row["problems"])["problems"]["build"]
        check_calm(daemon)
        # Half a file would be taken for a whole one by whoever copies the directory now.
        assert all(path.stat().st_size in (0, LAYOUT.file_size) for path in index_files(room.data))
        filler.unlink()
        check_whole(daemon, end)


def test_no_room_for_checkpoint_frontier_and_state(room: Room) -> None:
    end = write_log(room.store, 1000)
    with room.daemon() as daemon:
        daemon.wait_durable(end)
        before = [(room.data / name).read_bytes() for name in ("checkpoint", "frontier")]
        filler = fill(room.data)
        # They fit into the index file that is open.
        end = write_log(room.store, 20, seed=4, start_offset=end)
        assert FULL in degraded(daemon, "checkpoint.tmp", "frontier.tmp", stage="flush")
        check_calm(daemon)
        assert len(daemon.events("state_not_written")) == 1
        assert [(room.data / name).read_bytes() for name in ("checkpoint", "frontier")] == before
        filler.unlink()
        check_whole(daemon, end)


@ON_BOTH
def test_room_for_the_checkpoint_and_none_for_the_frontier(room: Room) -> None:
    end = write_log(room.store, 3000)
    with room.daemon(*MANY) as daemon:
        daemon.wait_durable(end)
        frontier = (room.data / "frontier").read_bytes()
        assert len(frontier) > 4096
        filler = fill(room.data, 1)
        end = write_log(room.store, 5, seed=4, start_offset=end)
        assert FULL in degraded(daemon, "frontier.tmp", stage="flush")
        check_calm(daemon)
        assert (room.data / "frontier").read_bytes() == frontier
        filler.unlink()
        check_whole(daemon, end, *MANY)
        # The checkpoint that it wrote itself is not somebody else's.
        assert not daemon.events("restored")


@ON_EXT4
def test_at_the_last_flush_of_a_stop(room: Room) -> None:
    end = write_log(room.store, 1000)
    with room.daemon() as daemon:
        daemon.wait_durable(end)
        filler = fill(room.data)
        end = write_log(room.store, 20, seed=4, start_offset=end)
        degraded(daemon, FULL)
        assert daemon.terminate() == DISK_FAILED
        assert FULL in end_line(daemon)
    filler.unlink()
    room.run_again(end)


READ_ONLY = "Read-only file system"
DENIED = "Permission denied"
NO_DESCRIPTORS = "Too many open files"


def test_a_directory_that_becomes_read_only_and_writable_again(tmp_path: Path) -> None:
    store, inside = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with OwnMounts() as mounts:
        data = mounts.tmpfs(inside, 4 << 20)
        with Daemon(store, data, *SIZES, env=RETRY, tracer=mounts.words) as daemon:
            daemon.wait_durable(end)
            mounts.read_only(inside)
            end = write_log(store, 3000, seed=4, start_offset=end)
            line = degraded(daemon, "cannot create", "cannot open", stage="build")
            assert READ_ONLY in line
            assert "remount the file system read-write" in line
            check_calm(daemon)
            mounts.unmount(inside)
            check_whole(daemon, end)


def test_a_read_only_directory_at_the_start(tmp_path: Path) -> None:
    store, inside = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with OwnMounts() as mounts:
        data = mounts.read_only(inside)
        with Daemon(store, data, *SIZES, tracer=mounts.words) as daemon:
            assert daemon.wait() == DISK_FAILED
            assert READ_ONLY in end_line(daemon)
        mounts.unmount(inside)
        with Daemon(store, data, *SIZES, tracer=mounts.words) as daemon:
            check_whole(daemon, end)


def test_an_ext4_that_gives_up_after_an_error_of_its_own(tmp_path: Path) -> None:
    """``remount,abort`` is what errors=remount-ro does: nothing is written any more, not even what is open."""
    store, inside = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with OwnMounts() as mounts:
        data = mounts.ext4(inside, 8 << 20)
        with Daemon(store, data, *SIZES, env=RETRY, tracer=mounts.words) as daemon:
            daemon.wait_durable(end)
            mounts.run("mount", "-o", "remount,abort", inside)
            end = write_log(store, 3000, seed=4, start_offset=end)
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
        run_again(store, data, end, tracer=mounts.words)


@pytest.mark.parametrize(("name", "bits"), [(".", 0o500), ("index", 0o500), ("index", 0o000)])
def test_the_right_to_the_data_is_taken_and_given_back(tmp_path: Path, name: str, bits: int) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES, env=RETRY, tracer=under_permissions()) as daemon:
        daemon.wait_durable(end)
        with mode(data / name, bits):
            end = write_log(store, 3000, seed=4, start_offset=end)
            assert "give this user the permission" in degraded(daemon, DENIED)
            # Those who may look into it: the test may not when it is no root, and nothing is made there anyway.
            if bits:
                check_calm(daemon)
        check_whole(daemon, end)


def test_no_right_to_the_data_at_the_start(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    data.mkdir()
    with mode(data, 0o500), Daemon(store, data, *SIZES, tracer=under_permissions()) as daemon:
        assert daemon.wait() == DISK_FAILED
        assert DENIED in end_line(daemon)
    with Daemon(store, data, *SIZES, tracer=under_permissions()) as daemon:
        check_whole(daemon, end)


def test_the_right_to_the_log_is_taken_and_given_back(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES, env=RETRY, tracer=under_permissions()) as daemon:
        daemon.wait_durable(end)
        with mode(store / "commitlog", 0o000):
            assert DENIED in degraded(daemon, "commitlog")
            check_calm(daemon)
        end = write_log(store, 3000, seed=4, start_offset=end)
        check_whole(daemon, end)


def test_segments_that_may_not_be_read_for_a_while(tmp_path: Path) -> None:
    """The broker was started again under another user."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES, env=RETRY, tracer=under_permissions()) as daemon:
        daemon.wait_durable(end)
        # It must not have opened them before.
        os.kill(daemon.pid, signal.SIGSTOP)
        end = write_log(store, 3000, seed=4, start_offset=end)
        for path in (store / "commitlog").iterdir():
            path.chmod(0o000)
        os.kill(daemon.pid, signal.SIGCONT)
        assert DENIED in degraded(daemon, "commitlog", stage="read")
        check_calm(daemon)
        for path in (store / "commitlog").iterdir():
            path.chmod(0o644)
        check_whole(daemon, end)


@pytest.mark.parametrize("what", ["store/commitlog", "data/index"])
def test_no_right_to_what_is_opened_at_the_start(tmp_path: Path, what: str) -> None:
    """A service manager tries again and again; as soon as the cause is gone it starts, crash loop or not."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    (data / "index").mkdir(parents=True)
    env = {"INDEXD_UNCLEAN_STARTS_MAX": "1"}
    with mode(tmp_path / what, 0o000):
        for _ in range(2):
            with Daemon(store, data, *SIZES, env=env, tracer=under_permissions()) as daemon:
                assert daemon.wait() == DISK_FAILED
                assert DENIED in end_line(daemon)
    with Daemon(store, data, *SIZES, env=env, tracer=under_permissions()) as daemon:
        check_whole(daemon, end)


def test_expired_files_that_may_not_be_removed(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 6000)
    with Daemon(store, data, *SIZES, env=RETRY, tracer=under_permissions()) as daemon:
        daemon.wait_durable(end)
        with mode(data / "index", 0o500):
            for path in sorted((store / "commitlog").iterdir())[:5]:
                path.unlink()
            # The next segment begins with these: then the daemon looks for what is gone. No new index file yet.
            write_log(store, 100, seed=4, start_offset=end)
            daemon.wait_event("expired_files")
            assert DENIED in degraded(daemon, "cannot remove")
            check_calm(daemon)
        daemon.wait_event("healed")
        assert daemon.terminate() == 0
    # No file is left that nobody names, and what is left holds.
    done = indexd("verify", "--deep", "--data", data)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("spare", [0, 1])
def test_too_few_descriptors(tmp_path: Path, spare: int) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 1000)
    with Daemon(store, data, *SIZES, env=RETRY) as daemon:
        daemon.wait_durable(end)
        with no_descriptors(daemon.pid, spare):
            end = write_log(store, 3000, seed=4, start_offset=end)
            assert "LimitNOFILE" in degraded(daemon, NO_DESCRIPTORS)
            check_calm(daemon)
        check_whole(daemon, end)


QUEUES = 6
MIB = 1 << 20


def before() -> list[FrameSpec]:
    return over_queues(1000, QUEUES)


def more_units() -> list[FrameSpec]:
    """Few enough for the index file that is open; some queue comes to a new file."""
    return over_queues(150, QUEUES, seed=2, first=5000)


def more_queues() -> list[FrameSpec]:
    """The same of a topic that was never there."""
    return [spec(5000 + number, "New", number) for number in range(40)]


def check(daemon: Daemon, end: int, *flags: str) -> None:
    check_whole(daemon, end, *flags)
    assert_beside(daemon.data, daemon.store, SEGMENT_SIZE, QUEUE_FILE_SIZE)


@pytest.mark.parametrize("more", [more_units, more_queues], ids=["units", "queues"])
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_no_room_for_queue_files(tmp_path: Path, kind: str, more: type[list[FrameSpec]]) -> None:
    """What was made and could not be filled is filled later; nobody takes it for a queue's until then."""
    store = tmp_path / "store"
    end = write(store, before(), SEGMENT_SIZE)
    with OwnMounts() as mounts:
        data = {"tmpfs": mounts.tmpfs, "ext4": mounts.ext4}[kind](tmp_path / "data", 8 * MIB)
        with Daemon(store, data, *SIZES, env=RETRY, tracer=mounts.words) as daemon:
            daemon.wait_durable(end)
            filler = fill(data)
            end = write(store, more(), SEGMENT_SIZE)
            line = degraded(daemon, "consumequeue", "/sparse/", stage="build")  # whichever comes first
            assert FULL in line
            check_calm(daemon)
            done = indexd("verify", "--store", store, "--data", data)
            assert done.returncode == 0, done.stdout + done.stderr
            filler.unlink()
            check(daemon, end)


@pytest.mark.parametrize("leave_pages", [0, 1, 5])
def test_no_room_for_a_pair(tmp_path: Path, leave_pages: int) -> None:
    """A segment begins; one of its two files has room, or none, or both."""
    store = tmp_path / "store"
    words = (*SIZES, "--consume-queue", "false")
    end = write(store, before()[:200], SEGMENT_SIZE)
    with OwnMounts() as mounts:
        data = mounts.tmpfs(tmp_path / "data", 8 * MIB)
        with Daemon(store, data, *words, env=RETRY, tracer=mounts.words) as daemon:
            daemon.wait_durable(end)
            filler = fill(data, leave_pages)
            # Large ones, so that the index file that is open takes them all, and a new segment every two.
            large = [spec(5000 + number, body=100_000) for number in range(40)]
            end = write(store, large, SEGMENT_SIZE)
            assert FULL in degraded(daemon, "/sparse/", stage="build")
            check_calm(daemon)
            filler.unlink()
            check_whole(daemon, end, *words)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("consumequeue", 0o500),
        ("consumequeue", 0o000),
        ("consumequeue/Topic0", 0o500),
        ("consumequeue/Topic0/1", 0o500),
        ("consumequeue/Topic0/1", 0o000),
        ("sparse", 0o500),
        ("sparse", 0o000),
    ],
)
def test_the_right_to_a_folder_is_taken_and_given_back(tmp_path: Path, name: str, bits: int) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, before(), SEGMENT_SIZE)
    with Daemon(store, data, *SIZES, env=RETRY, tracer=under_permissions()) as daemon:
        daemon.wait_durable(end)
        with mode(data / name, bits):
            # New topics, new queues of the old ones, new files of old queues, new segments.
            end = write(store, [*over_queues(3000, 2 * QUEUES, seed=2, first=5000), *more_queues()], SEGMENT_SIZE)
            assert "give this user the permission" in degraded(daemon, DENIED)
            if bits:
                check_calm(daemon)
        check(daemon, end)


def test_the_right_to_files_is_taken_and_given_back(tmp_path: Path) -> None:
    """Files that are open stay so: those of a queue that was not written for long are not, and are opened again."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, [spec(0, "Seldom"), *over_queues(2000, 200, first=1)], SEGMENT_SIZE)
    with Daemon(store, data, *SIZES, env=RETRY, tracer=under_permissions()) as daemon:
        daemon.wait_durable(end)
        with mode(data / "consumequeue" / "Seldom" / "0" / f"{0:020d}", 0o400):
            end = write(store, [spec(5000 + number, "Seldom") for number in range(30)], SEGMENT_SIZE)
            assert "Seldom" in degraded(daemon, DENIED)
            check_calm(daemon)
        check(daemon, end)


@pytest.mark.parametrize("name", ["consumequeue", "sparse"])
def test_no_right_at_the_start(tmp_path: Path, name: str) -> None:
    """As for the key index: it ends, and being started again and again is no crash loop."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, before(), SEGMENT_SIZE)
    env = {"INDEXD_UNCLEAN_STARTS_MAX": "1"}
    with Daemon(store, data, *SIZES, env=env, tracer=under_permissions()) as daemon:
        daemon.wait_durable(end)
    with mode(data / name, 0o000):
        for _ in range(2):
            with Daemon(store, data, *SIZES, env=env, tracer=under_permissions()) as daemon:
                assert daemon.wait() == DISK_FAILED
                assert DENIED in end_line(daemon)
    with Daemon(store, data, *SIZES, env=env, tracer=under_permissions()) as daemon:
        check(daemon, end)


@pytest.mark.parametrize("name", ["consumequeue/Topic0/0", "sparse"])
def test_expired_queue_files_that_may_not_be_removed(tmp_path: Path, name: str) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(6000, QUEUES), SEGMENT_SIZE)
    with Daemon(store, data, *SIZES, env=RETRY, tracer=under_permissions()) as daemon:
        daemon.wait_durable(end)
        with mode(data / name, 0o500):
            for path in sorted((store / "commitlog").iterdir())[:3]:
                path.unlink()
            daemon.wait_event("expired_files")
            line = degraded(daemon, "cannot remove")
            assert DENIED in line
            assert str(data / name) in line
            check_calm(daemon)
        daemon.wait_event("healed")
        assert daemon.terminate() == 0
    # No file is left that nobody names, and what is left holds.
    done = indexd("verify", "--deep", "--data", data)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("calls", ["fsync", "pwrite64"])
@pytest.mark.parametrize("name", ["consumequeue/Topic0/0/00000000000000001200", "sparse/00000000000000000000.index"])
def test_a_disk_that_answers_with_an_error_for_one_file(tmp_path: Path, name: str, calls: str) -> None:
    """The key index is whole, and is not made durable either: nothing is written down that does not hold for all."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write(store, over_queues(500, QUEUES), SEGMENT_SIZE)
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        assert (data / name).exists()
        kept = (data / "frontier").read_bytes()
        with failing_calls(daemon.pid, calls, path=data / name):
            end = write(store, over_queues(60, QUEUES, seed=2, first=5000), SEGMENT_SIZE)
            assert daemon.wait() == DISK_FAILED
        assert "Input/output error" in end_line(daemon)
        assert name in end_line(daemon)
        assert (data / "frontier").read_bytes() == kept
    run_again(store, data, end)
    assert_beside(data, store, SEGMENT_SIZE, QUEUE_FILE_SIZE)
