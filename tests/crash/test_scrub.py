"""A bit that the disk turned over: nobody wrote, so only whoever reads everything again finds it, and mends it."""

from __future__ import annotations

import json
import os
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from indexd.index.format import IndexLayout
from support.daemon import Daemon, index_files, rebuild
from support.queues import tree
from support.reopened import config_for, reopen
from support.same_index import assert_same_index
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LAYOUT = IndexLayout(HASH_SLOT_NUM, INDEX_NUM)
# A start compares none of so short a log with the index.
FAR = ("--recheck-bytes", "0")
SOON = (*FAR, "--scrub-interval", "0.5")
NEVER = ("--scrub-interval", "0")
# The fields of an entry: where they begin, and the last byte of each.
HASH, TIME_DIFF, PREVIOUS = 3, 15, 19


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def built(store: Path, data: Path) -> int:
    """A data directory after a clean stop; where its log ends."""
    end = write_log(store, 3000)
    reopen(config_for(store, data, scrub_interval=0))
    assert len(index_files(data)) > 2
    return end


def turn_over(path: Path, position: int, bit: int = 0) -> None:
    """One bit, and nothing that says so."""
    stamp = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def used_slot(path: Path) -> int:
    """The position of the last byte of a slot that leads to an entry."""
    content = path.read_bytes()
    slots = (LAYOUT.slot_position(number) for number in range(100, HASH_SLOT_NUM))
    return next(at + 3 for at in slots if content[at : at + 4] != bytes(4))


def check_that_it_is_mended(daemon: Daemon, store: Path, end: int, words: str) -> dict[str, Any]:
    """It says so once, in an event, in its row, and builds what an undisturbed build makes."""
    disturbed = daemon.wait_event("disturbed")
    assert words in disturbed["problem"]
    daemon.wait_event("scrubbed")
    row = daemon.wait_state(lambda row: bool(row["phase"] == "running" and row["scrub"]["brokenOff"] == 0))
    assert (row["scrub"]["damaged"], row["recoveries"]) == (1, 2)
    daemon.wait_durable(end)
    assert daemon.terminate() == 0
    assert [event["problem"] for event in daemon.events("disturbed")] == [disturbed["problem"]]
    whole = daemon.data.with_name("undisturbed")
    rebuild(store, whole, *SIZES)
    assert_same_index(daemon.data, whole)
    for name in ("consumequeue", "sparse"):
        assert tree(daemon.data / name) == tree(whole / name)
    return row


@pytest.mark.parametrize(
    ("which", "where", "what"),
    [
        (1, used_slot, "slots"),
        (0, lambda _: LAYOUT.slot_position(HASH_SLOT_NUM) - 1, "slots"),
        (0, lambda _: LAYOUT.entry_position(70) + HASH, "entries"),
        (1, lambda _: LAYOUT.entry_position(73) + PREVIOUS, "entries"),
    ],
    ids=["slot", "last slot", "hash", "previous"],
)
def test_a_bit_of_a_full_index_file(
    tmp_path: Path, store: Path, which: int, where: Callable[[Path], int], what: str
) -> None:
    end = built(store, tmp_path / "data")
    path = index_files(tmp_path / "data")[which]
    turn_over(path, where(path))
    with Daemon(store, tmp_path / "data", *SIZES, *SOON) as daemon:
        check_that_it_is_mended(daemon, store, end, f"{path}: its {what} are not what their checksum says")


def test_a_bit_of_the_entries_of_the_file_that_grows(tmp_path: Path, store: Path) -> None:
    end = built(store, tmp_path / "data")
    path = index_files(tmp_path / "data")[-1]
    turn_over(path, LAYOUT.entry_position(5) + TIME_DIFF)
    with Daemon(store, tmp_path / "data", *SIZES, *SOON) as daemon:
        check_that_it_is_mended(daemon, store, end, f"{path}: its entries are not what their checksum says")


def test_a_bit_of_the_slots_of_the_file_that_grows_is_found_by_the_start(tmp_path: Path, store: Path) -> None:
    """Slots are taken into memory there, and a scrub would hold them against what was read then."""
    end = built(store, tmp_path / "data")
    path = index_files(tmp_path / "data")[-1]
    turn_over(path, used_slot(path))
    with Daemon(store, tmp_path / "data", *SIZES, *NEVER) as daemon:
        opened = daemon.wait_event("opened")
        assert opened["reasons"] == [f"index file {path.name} is not what its checksums say"]
        assert opened["rewritten_files"] == 1
        daemon.wait_durable(end)
        assert daemon.terminate() == 0
    rebuild(store, tmp_path / "undisturbed", *SIZES)
    assert_same_index(tmp_path / "data", tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("pattern", "position"),
    [("consumequeue/*/*/0*", 20 * 7 + 4), ("sparse/00000000000000000000.timeindex", 12 * 3)],
    ids=["queue", "sparse"],
)
def test_a_bit_of_the_files_beside(tmp_path: Path, store: Path, pattern: str, position: int) -> None:
    """Found as far as their own checks go: the order of offsets and times."""
    end = built(store, tmp_path / "data")
    path = min((tmp_path / "data").glob(pattern))
    turn_over(path, position, bit=6)
    with Daemon(store, tmp_path / "data", *SIZES, *SOON) as daemon:
        check_that_it_is_mended(daemon, store, end, str(path))


def frontier(data: Path) -> dict[str, Any]:
    row: dict[str, Any] = json.loads((data / "frontier").read_bytes())
    return row


def forget_checksums(data: Path) -> None:
    """As the version before left it."""
    row = frontier(data)
    del row["crc32"], row["scrubbedAt"]
    for mark in row["index"]:
        del mark["crc"]
    (data / "frontier").write_bytes(json.dumps(row | {"crc32": zlib.crc32(json.dumps(row).encode())}).encode())


def test_a_directory_of_the_version_before_gets_its_checksums(tmp_path: Path, store: Path) -> None:
    data = tmp_path / "data"
    end = built(store, data)
    known = {mark["name"]: mark["crc"] for mark in frontier(data)["index"] if mark["full"]}
    assert all(None not in checksums for checksums in known.values())
    forget_checksums(data)
    with Daemon(store, data, *SIZES) as daemon:  # due at once: nobody knows of one before
        assert daemon.wait_event("scrubbed")["checksums"] == len(known)
        daemon.wait_for(lambda: frontier(data).get("scrubbedAt"), "written down")
        daemon.wait_durable(end)
        daemon.kill()
    assert {mark["name"]: mark["crc"] for mark in frontier(data)["index"] if mark["full"]} == known
    # What it says now holds at the next start, and a day has not passed.
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        assert daemon.terminate() == 0
        assert not daemon.events("scrubbed")
        assert not daemon.events("disturbed")


def test_a_bit_in_a_directory_of_the_version_before(tmp_path: Path, store: Path) -> None:
    end = built(store, tmp_path / "data")
    forget_checksums(tmp_path / "data")
    path = index_files(tmp_path / "data")[0]
    turn_over(path, used_slot(path))
    with Daemon(store, tmp_path / "data", *SIZES, *SOON) as daemon:
        check_that_it_is_mended(daemon, store, end, f"{path}: its slots are not what its entries say")


def test_what_was_checked_goes_on_to_hold_while_the_log_grows_and_files_become_full(
    tmp_path: Path, store: Path
) -> None:
    end = write_log(store, 3000)
    with Daemon(store, tmp_path / "data", *SIZES, "--scrub-interval", "0.01") as daemon:
        daemon.wait_durable(end)
        before = len(daemon.events("scrubbed"))
        end = write_log(store, 12_000)
        daemon.wait_durable(end)
        daemon.wait_for(lambda: len(daemon.events("scrubbed")) > before + 5 or None, "scrubs")
        assert daemon.terminate() == 0
        assert not daemon.events("disturbed")
