"""Rights that are taken away under the running daemon and given back: a read-only mount, modes, descriptors."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from support.daemon import Daemon, indexd
from support.faults import (
    DISK_FAILED,
    RETRY,
    check_calm,
    check_whole,
    degraded,
    end_line,
    mode,
    no_descriptors,
    run_again,
    under_permissions,
)
from support.own_mounts import OwnMounts
from support.small_log import SIZES, write_log

if TYPE_CHECKING:
    from pathlib import Path

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
            assert READ_ONLY in degraded(daemon, "cannot create", stage="build")
            assert "remount the file system read-write" in degraded(daemon, READ_ONLY, stage="flush")
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
