"""A data directory whose file system is full, on a tmpfs and on an ext4, in every phase of the daemon's life."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from indexd.index.format import IndexLayout
from support.daemon import Daemon, index_files
from support.faults import DISK_FAILED, RETRY, check_calm, check_whole, degraded, end_line, run_again
from support.own_mounts import OwnMounts, fill
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

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
