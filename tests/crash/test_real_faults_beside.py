"""The same faults where only the files of queues and of sparse indexes meet them: a full disk, rights, EIO."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.beside_log import assert_beside, over_queues, spec, write
from support.daemon import Daemon, indexd
from support.faults import (
    DISK_FAILED,
    RETRY,
    check_calm,
    check_whole,
    degraded,
    end_line,
    failing_calls,
    mode,
    run_again,
    under_permissions,
)
from support.own_mounts import OwnMounts, fill
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE, SIZES

if TYPE_CHECKING:
    from pathlib import Path

    from support.commitlog_writer import FrameSpec

FULL = "No space left on device"
DENIED = "Permission denied"
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
            line = degraded(daemon, "consumequeue", stage="build")
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
def test_expired_files_that_may_not_be_removed(tmp_path: Path, name: str) -> None:
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
