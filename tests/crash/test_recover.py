"""``indexd --recover``, a plain start after a kill, and scrubs, on index files that were damaged in every way."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from indexd.index.format import IndexHeader, IndexLayout
from support.daemon import Daemon, assert_same_index, compile_kernels, index_files, indexd_here, rebuild
from support.faults import check_directory
from support.reopened import config_for, named_for, reopen
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, SIZES, write_log
from support.verifying import ENTRY, HASH, PHY, PREV, TIME, change, change_entry

LAYOUT = IndexLayout(HASH_SLOT_NUM, INDEX_NUM)
MESSAGES = 6000
#: The file that is damaged, not the first and not the last, and the entry in its middle.
FILE = 2
MIDDLE = INDEX_NUM // 2
ENTRY_SIZE = 20


@dataclass(frozen=True)
class Base:
    """A store and what an undisturbed build makes of it; tests work on copies."""

    store: Path
    whole: Path
    end: int

    @property
    def headers(self) -> list[IndexHeader]:
        return [IndexHeader.unpack(path.read_bytes()[:40]) for path in index_files(self.whole)]

    def entries(self, files: int | None = None) -> int:
        """Of so many files, or of all."""
        return sum(header.entries for header in self.headers[:files])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    compile_kernels()
    root = tmp_path_factory.mktemp("recover")
    end = write_log(root / "store", MESSAGES, seed=7)
    rebuild(root / "store", root / "whole", *SIZES)
    found = Base(root / "store", root / "whole", end)
    assert len(found.headers) > FILE + 2
    return found


@pytest.fixture
def data(base: Base, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base.whole, tmp_path / "data"))


def recover(store: Path, data: Path) -> Any:
    done = indexd_here("--recover", "--json", "--store", store, "--data", data, *SIZES)
    assert done.returncode == 0, done.stderr
    assert not (data / "abort").exists()
    return json.loads(done.stdout)


def entry_of(path: Path, number: int) -> tuple[int, ...]:
    return ENTRY.unpack_from(path.read_bytes(), LAYOUT.entry_position(number))


def add_to_entry(path: Path, number: int, member: int, by: int) -> None:
    """To one of an entry's four members."""
    change_entry(path, number, member, entry_of(path, number)[member] + by, LAYOUT)


def check_nothing_to_do(store: Path, data: Path, entries: int) -> None:
    report = recover(store, data)
    names = ("keptEntries", "droppedEntries", "rebuiltEntries", "deletedFiles", "rewrittenFiles")
    assert [report[name] for name in names] == [entries, 0, 0, [], []]
    assert report["reasons"][-1] == "every entry agrees with the log"


def recovered(base: Base, data: Path) -> dict[str, Any]:
    """The index is that of the log, the report adds up, and a second recovery finds nothing left to do."""
    report = recover(base.store, data)
    assert_same_index(data, base.whole)
    assert (data / "checkpoint").read_bytes() == (base.whole / "checkpoint").read_bytes()
    assert report["keptEntries"] + report["rebuiltEntries"] == base.entries()
    assert (report["beginOffset"], report["phyOffset"]) == (0, base.end)
    check_nothing_to_do(base.store, data, base.entries())
    assert_same_index(data, base.whole)
    return report


def started(base: Base, data: Path, event: str) -> dict[str, Any]:
    """Start plainly, catch up and stop; the index must be whole then. What the opening says."""
    with Daemon(base.store, data, *SIZES) as daemon:
        opened = daemon.wait_event(event)
        daemon.wait_caught_up(base.end)
        assert daemon.terminate() == 0
    assert_same_index(data, base.whole)
    return opened


def test_a_clean_directory_is_left_as_it_is(base: Base, data: Path) -> None:
    full = {path.name: path.stat().st_mtime_ns for path in index_files(data)[:-1]}
    assert recover(base.store, data)["droppedEntries"] == 0
    check_nothing_to_do(base.store, data, base.entries())
    assert {path.name: path.stat().st_mtime_ns for path in index_files(data)[:-1]} == full
    assert started(base, data, "opened")["kept_entries"] == base.entries()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: change(path, 40, random.Random(1).randbytes(4 * HASH_SLOT_NUM)),
        lambda path: change(path, 0, b"\1"),
        lambda path: change(path, 36, struct.pack(">i", 5)),
        lambda path: change(path, 0, bytes(40)),
    ],
    ids=["slots scribbled", "begin timestamp", "index count", "header zeroed"],
)
def test_slots_and_header_are_written_again(base: Base, data: Path, damage: Callable[[Path], None]) -> None:
    damaged = index_files(data)[FILE], index_files(data)[-1]
    for path in damaged:
        damage(path)
    report = recovered(base, data)
    assert (report["keptEntries"], report["droppedEntries"]) == (base.entries(), 0)
    assert report["rewrittenFiles"] == [path.name for path in damaged]


@pytest.mark.parametrize(
    ("file", "member", "by"),
    [
        *((FILE, HASH, HASH_SLOT_NUM), (FILE, PHY, 1), (FILE, PHY, -1), (FILE, TIME, 1), (FILE, PREV, -1)),
        (-1, HASH, HASH_SLOT_NUM),
    ],
)
def test_a_changed_entry_ends_what_is_kept(base: Base, data: Path, file: int, member: int, by: int) -> None:
    number = MIDDLE if file == FILE else base.headers[-1].index_count // 2
    add_to_entry(index_files(data)[file], number, member, by)
    report = recovered(base, data)
    assert len(report["deletedFiles"]) == (len(base.headers) - FILE - 1 if file == FILE else 0)
    sound = base.entries(file) + number - 1
    # Some entries of the same message may stand before it; what is left of them is built again.
    assert sound - 10 <= report["keptEntries"] <= sound
    assert report["keptEntries"] + report["droppedEntries"] == base.entries()


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])], ids=["removed", "cut"]
)
def test_a_lost_file_ends_what_is_kept(base: Base, data: Path, damage: Callable[[Path], object]) -> None:
    damage(index_files(data)[FILE])
    kept = base.entries(FILE)
    assert kept - 10 <= recovered(base, data)["keptEntries"] <= kept


def test_an_unknown_index_file_is_removed_and_any_other_file_is_left(base: Base, data: Path) -> None:
    unknown, foreign = data / "index" / "20200101000000000", data / "index" / "notes.txt"
    unknown.write_bytes(index_files(data)[0].read_bytes())
    foreign.write_text("mine")
    (data / "checkpoint").unlink()  # is written again
    report = recovered(base, data)
    assert report["deletedFiles"] == [unknown.name]
    assert (report["keptEntries"], report["droppedEntries"]) == (base.entries(), 0)
    assert foreign.read_text() == "mine"


def test_without_a_frontier_everything_is_built_again(base: Base, data: Path) -> None:
    (data / "frontier").unlink()
    names = [path.name for path in index_files(data)]
    report = recovered(base, data)
    assert (report["keptEntries"], report["deletedFiles"], report["rebuiltMessages"]) == (0, names, MESSAGES)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_beside_entries_of_expired_messages(base: Base, data: Path, tmp_path: Path, is_damaged: bool) -> None:
    """They are kept, and what the log still holds is mended; its begin lies inside an index file."""
    store, begin = Path(shutil.copytree(base.store, tmp_path / "store")), 3 * SEGMENT_SIZE
    for number in range(3):
        (store / "commitlog" / f"{number * SEGMENT_SIZE:020d}").unlink()
    assert base.headers[1].begin_phy_offset < begin
    named_for(store, data)
    if is_damaged:
        file = next(number for number, header in enumerate(base.headers) if header.begin_phy_offset > begin)
        add_to_entry(index_files(data)[file], MIDDLE, HASH, HASH_SLOT_NUM)
        report = recover(store, data)
        assert 0 < report["keptEntries"] < base.entries()
        assert report["keptEntries"] + report["rebuiltEntries"] == base.entries()
    check_nothing_to_do(store, data, base.entries())
    assert_same_index(data, base.whole, log_begin=begin)


@pytest.fixture
def killed(base: Base, tmp_path: Path) -> tuple[Path, int]:
    """All is built, and killed; the open file and its index count."""
    with Daemon(base.store, tmp_path / "data", *SIZES) as daemon:
        daemon.wait_durable(base.end)
    mark = json.loads((tmp_path / "data" / "frontier").read_bytes())["index"][-1]
    assert not mark["full"]
    return tmp_path / "data" / "index" / mark["name"], mark["header"][-1]


def test_a_plain_start_after_a_kill_brings_the_open_file_back(base: Base, killed: tuple[Path, int]) -> None:
    (path, count), rand = killed, random.Random(2)
    change(path, 0, rand.randbytes(40))
    change(path, LAYOUT.slot_position(0), rand.randbytes(4 * HASH_SLOT_NUM))
    change(path, LAYOUT.entry_position(count), rand.randbytes(ENTRY_SIZE * (INDEX_NUM - count)))
    opened = started(base, path.parents[1], "recovered")
    assert (opened["kept_entries"], opened["dropped_entries"]) == (base.entries(), 0)
    assert opened["rewritten_files"] == 1


@pytest.mark.parametrize("member", [HASH, PHY, PREV])
def test_a_plain_start_after_a_kill_does_not_keep_what_its_chain_denies(
    base: Base, killed: tuple[Path, int], member: int
) -> None:
    path, count = killed
    # One whose message has another one behind it: the chain says nothing about the phy offset of the last.
    offsets = [entry_of(path, number)[PHY] for number in range(count)]
    number = next(number for number in range(count // 2, count) if offsets[number] == offsets[number + 1])
    add_to_entry(path, number, member, 1)
    sound = base.entries(-1) + number - 1
    assert sound - 10 <= started(base, path.parents[1], "recovered")["kept_entries"] <= sound


# --- a bit that the disk turned over: nobody wrote, so only whoever reads everything again finds it, and mends it ---

# A start compares none of so short a log with the index.
FAR = (*SIZES, "--recheck-bytes", "0")
SOON = (*FAR, "--scrub-interval", "0.5")


@pytest.fixture
def stopped(tmp_path: Path) -> tuple[Path, Path, int]:
    """A store, a data directory after a clean stop, and where its log ends."""
    store, data = tmp_path / "store", tmp_path / "data"
    end = write_log(store, 3000)
    reopen(config_for(store, data, scrub_interval=0))
    assert len(index_files(data)) > 2
    return store, data, end


def turn_over(path: Path, position: int, bit: int = 0) -> None:
    """One bit, and nothing that says so."""
    stamp = path.stat()
    change(path, position, bytes([path.read_bytes()[position] ^ 1 << bit]))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def used_slot(path: Path) -> int:
    """The position of the last byte of a slot that leads to an entry."""
    content = path.read_bytes()
    slots = (LAYOUT.slot_position(number) for number in range(100, HASH_SLOT_NUM))
    return next(at + 3 for at in slots if content[at : at + 4] != bytes(4))


def check_stopped_whole(daemon: Daemon, end: int) -> None:
    """It builds what an undisturbed build makes."""
    daemon.wait_durable(end)
    assert daemon.terminate() == 0
    check_directory(daemon.store, daemon.data)


#: By the file, and where in it: what is said. Queues and sparse indexes: as far as the order of offsets and times goes.
BITS: dict[str, tuple[str, int, Callable[[Path], int], int, str]] = {
    "slot": ("index/*", 1, used_slot, 0, ": its slots are not what their checksum says"),
    "hash": ("index/*", 0, lambda _: LAYOUT.entry_position(70) + 3, 0, ": its entries are not what their checksum"),
    "growing": ("index/*", -1, lambda _: LAYOUT.entry_position(5) + 15, 0, ": its entries are not what their checksum"),
    "version before": ("index/*", 0, used_slot, 0, ": its slots are not what its entries say"),
    "queue": ("consumequeue/*/*/0*", 0, lambda _: 20 * 7 + 4, 6, ""),
    "sparse": ("sparse/00000000000000000000.timeindex", 0, lambda _: 12 * 3, 6, ""),
}


@pytest.mark.parametrize("what", BITS)
def test_a_bit_is_found_by_a_scrub(stopped: tuple[Path, Path, int], what: str) -> None:
    """It says so once, in an event, in its row, and mends it."""
    (store, data, end), (pattern, number, where, bit, says) = stopped, BITS[what]
    if what == "version before":
        forget_checksums(data)
    path = sorted(data.glob(pattern))[number]
    turn_over(path, where(path), bit)
    with Daemon(store, data, *SOON) as daemon:
        problem = daemon.wait_event("disturbed")["problem"]
        assert f"{path}{says}" in problem
        daemon.wait_event("scrubbed")
        row = daemon.wait_state(lambda row: bool(row["phase"] == "running" and row["scrub"]["brokenOff"] == 0))
        assert (row["scrub"]["damaged"], row["recoveries"]) == (1, 2)
        check_stopped_whole(daemon, end)
    assert [event["problem"] for event in daemon.events("disturbed")] == [problem]


def test_a_bit_of_the_slots_of_the_file_that_grows_is_found_by_the_start(stopped: tuple[Path, Path, int]) -> None:
    """Slots are taken into memory there, and a scrub would hold them against what was read then."""
    store, data, end = stopped
    path = index_files(data)[-1]
    turn_over(path, used_slot(path))
    with Daemon(store, data, *FAR, "--scrub-interval", "0") as daemon:
        opened = daemon.wait_event("opened")
        assert opened["reasons"] == [f"index file {path.name} is not what its checksums say"]
        assert opened["rewritten_files"] == 1
        check_stopped_whole(daemon, end)


def frontier(data: Path) -> Any:
    return json.loads((data / "frontier").read_bytes())


def checksums(data: Path) -> dict[str, Any]:
    """Of the files that are full."""
    return {mark["name"]: mark["crc"] for mark in frontier(data)["index"] if mark["full"]}


def forget_checksums(data: Path) -> None:
    """As the version before left it."""
    row = frontier(data)
    del row["crc32"], row["scrubbedAt"]
    for mark in row["index"]:
        del mark["crc"]
    (data / "frontier").write_bytes(json.dumps(row | {"crc32": zlib.crc32(json.dumps(row).encode())}).encode())


def test_a_directory_of_the_version_before_gets_its_checksums(stopped: tuple[Path, Path, int]) -> None:
    store, data, end = stopped
    known = checksums(data)
    assert all(None not in found for found in known.values())
    forget_checksums(data)
    with Daemon(store, data, *SIZES) as daemon:  # due at once: nobody knows of one before
        assert daemon.wait_event("scrubbed")["checksums"] == len(known)
        daemon.wait_for(lambda: frontier(data).get("scrubbedAt"), "written down")
        daemon.wait_durable(end)
    assert checksums(data) == known
    # What it says now holds at the next start, and a day has not passed.
    with Daemon(store, data, *SIZES) as daemon:
        daemon.wait_durable(end)
        assert daemon.terminate() == 0
        assert not daemon.events("scrubbed")
        assert not daemon.events("disturbed")


def test_what_was_checked_goes_on_to_hold_while_the_log_grows_and_files_become_full(tmp_path: Path) -> None:
    store = tmp_path / "store"
    end = write_log(store, 3000)
    with Daemon(store, tmp_path / "data", *SIZES, "--scrub-interval", "0.01") as daemon:
        daemon.wait_durable(end)
        before = len(daemon.events("scrubbed"))
        end = write_log(store, 12_000)
        daemon.wait_durable(end)
        daemon.wait_for(lambda: len(daemon.events("scrubbed")) > before + 5 or None, "scrubs")
        assert daemon.terminate() == 0
        assert not daemon.events("disturbed")
