"""``indexd --recover`` and a plain start after a kill, on data directories that were damaged in every way."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from indexd.index.format import IndexHeader, IndexLayout
from support.daemon import Daemon, assert_same_index, compile_kernels, index_files, indexd, indexd_here, rebuild
from support.reopened import named_for
from support.small_log import HASH_SLOT_NUM, INDEX_NUM, SEGMENT_SIZE, SIZES, write_log

LAYOUT = IndexLayout(HASH_SLOT_NUM, INDEX_NUM)
MESSAGES = 6000
#: The file that is damaged, not the first and not the last, and the entry in its middle.
FILE = 2
ENTRY = INDEX_NUM // 2
ENTRY_SIZE = 20
ENTRY_BYTES = struct.Struct(">iqii")
HASH, PHY, TIME, PREV = range(4)


@dataclass(frozen=True)
class Base:
    """A store and what an undisturbed build makes of it; tests work on copies."""

    store: Path
    whole: Path
    end: int

    @property
    def headers(self) -> list[IndexHeader]:
        return [IndexHeader.unpack(path.read_bytes()[:40]) for path in index_files(self.whole)]

    @property
    def entries(self) -> int:
        return sum(header.entries for header in self.headers)

    def entries_before(self, file: int) -> int:
        return sum(header.entries for header in self.headers[:file])


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


def recover(store: Path, data: Path, command: Callable[..., Any] = indexd) -> dict[str, Any]:
    done = command("--recover", "--json", "--store", store, "--data", data, *SIZES)
    assert done.returncode == 0, done.stderr
    assert not (data / "abort").exists()
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def change(path: Path, position: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        assert file.read(len(data)) != data
        file.seek(position)
        file.write(data)


def entry_of(path: Path, number: int) -> list[int]:
    return list(ENTRY_BYTES.unpack_from(path.read_bytes(), LAYOUT.entry_position(number)))


def change_entry(path: Path, number: int, member: int, by: int) -> None:
    """Add to one of an entry's four members."""
    values = entry_of(path, number)
    values[member] += by
    change(path, LAYOUT.entry_position(number), ENTRY_BYTES.pack(*values))


def check_all_is_as_it_should_be(base: Base, data: Path, report: dict[str, Any]) -> None:
    """The index is that of the log, the report adds up, and a second recovery finds nothing left to do."""
    assert_same_index(data, base.whole)
    assert (data / "checkpoint").read_bytes() == (base.whole / "checkpoint").read_bytes()
    assert report["keptEntries"] + report["rebuiltEntries"] == base.entries
    assert (report["beginOffset"], report["phyOffset"]) == (0, base.end)
    check_nothing_to_do(base.store, data, base.entries)
    assert_same_index(data, base.whole)


def check_nothing_to_do(store: Path, data: Path, entries: int) -> None:
    report = recover(store, data, indexd_here)
    assert report["keptEntries"] == entries
    done = [report[name] for name in ("droppedEntries", "rebuiltEntries", "deletedFiles", "rewrittenFiles")]
    assert done == [0, 0, [], []]
    assert report["reasons"][-1] == "every entry agrees with the log"


def test_a_clean_directory_is_left_as_it_is(base: Base, data: Path) -> None:
    full = {path.name: path.stat().st_mtime_ns for path in index_files(data)[:-1]}
    assert recover(base.store, data)["droppedEntries"] == 0
    check_nothing_to_do(base.store, data, base.entries)
    assert {path.name: path.stat().st_mtime_ns for path in index_files(data)[:-1]} == full
    assert_same_index(data, base.whole)
    with Daemon(base.store, data, *SIZES) as daemon:
        assert daemon.wait_event("opened")["kept_entries"] == base.entries
        daemon.wait_caught_up(base.end)
        assert daemon.terminate() == 0
    assert_same_index(data, base.whole)


SLOTS_AND_HEADER: list[tuple[str, Callable[[Path], None]]] = [
    ("slots scribbled", lambda path: change(path, 40, random.Random(1).randbytes(4 * HASH_SLOT_NUM))),
    ("begin timestamp", lambda path: change(path, 0, b"\1")),
    ("index count", lambda path: change(path, 36, struct.pack(">i", 5))),
    ("header zeroed", lambda path: change(path, 0, bytes(40))),
]


@pytest.mark.parametrize("damage", [do for _, do in SLOTS_AND_HEADER], ids=[name for name, _ in SLOTS_AND_HEADER])
def test_slots_and_header_are_written_again(base: Base, data: Path, damage: Callable[[Path], None]) -> None:
    for path in (index_files(data)[FILE], index_files(data)[-1]):
        damage(path)
    report = recover(base.store, data)
    assert (report["keptEntries"], report["droppedEntries"]) == (base.entries, 0)
    assert report["rewrittenFiles"] == [index_files(data)[FILE].name, index_files(data)[-1].name]
    check_all_is_as_it_should_be(base, data, report)


@pytest.mark.parametrize(
    ("file", "member", "by"),
    [
        *((FILE, HASH, HASH_SLOT_NUM), (FILE, HASH, 1), (FILE, PHY, 1), (FILE, PHY, -1), (FILE, TIME, 1)),
        *((FILE, PREV, -1), (-1, HASH, HASH_SLOT_NUM), (-1, PHY, 1)),
    ],
)
def test_a_changed_entry_ends_what_is_kept(base: Base, data: Path, file: int, member: int, by: int) -> None:
    number = ENTRY if file == FILE else base.headers[-1].index_count // 2
    change_entry(index_files(data)[file], number, member, by)
    report = recover(base.store, data)
    assert len(report["deletedFiles"]) == (len(base.headers) - FILE - 1 if file == FILE else 0)
    sound = base.entries_before(file) + number - 1
    # Some entries of the same message may stand before it; what is left of them is built again.
    assert sound - 10 <= report["keptEntries"] <= sound
    assert report["keptEntries"] + report["droppedEntries"] == base.entries
    check_all_is_as_it_should_be(base, data, report)


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])], ids=["removed", "cut"]
)
def test_a_lost_file_ends_what_is_kept(base: Base, data: Path, damage: Callable[[Path], object]) -> None:
    damage(index_files(data)[FILE])
    report = recover(base.store, data)
    kept = base.entries_before(FILE)
    assert kept - 10 <= report["keptEntries"] <= kept
    check_all_is_as_it_should_be(base, data, report)


def test_an_unknown_index_file_is_removed_and_any_other_file_is_left(base: Base, data: Path) -> None:
    unknown, foreign = data / "index" / "20200101000000000", data / "index" / "notes.txt"
    unknown.write_bytes(index_files(data)[0].read_bytes())
    foreign.write_text("mine")
    report = recover(base.store, data)
    assert report["deletedFiles"] == [unknown.name]
    assert (report["keptEntries"], report["droppedEntries"]) == (base.entries, 0)
    check_all_is_as_it_should_be(base, data, report)
    assert foreign.read_text() == "mine"


def test_without_a_frontier_everything_is_built_again(base: Base, data: Path) -> None:
    (data / "frontier").unlink()
    names = [path.name for path in index_files(data)]
    report = recover(base.store, data)
    assert report["keptEntries"] == 0
    assert report["deletedFiles"] == names
    assert report["rebuiltMessages"] == MESSAGES
    check_all_is_as_it_should_be(base, data, report)


def test_the_checkpoint_is_written_again(base: Base, data: Path) -> None:
    (data / "checkpoint").unlink()
    report = recover(base.store, data)
    assert (report["keptEntries"], report["droppedEntries"]) == (base.entries, 0)
    check_all_is_as_it_should_be(base, data, report)


@pytest.fixture
def expired(base: Base, tmp_path: Path) -> Path:
    """The store without its first segments: the begin of the log lies inside an index file."""
    store = Path(shutil.copytree(base.store, tmp_path / "store"))
    for number in range(3):
        (store / "commitlog" / f"{number * SEGMENT_SIZE:020d}").unlink()
    begins = [header.begin_phy_offset for header in base.headers]
    assert begins[1] < 3 * SEGMENT_SIZE
    return store


def test_entries_of_expired_messages_are_kept(base: Base, data: Path, expired: Path) -> None:
    named_for(expired, data)
    check_nothing_to_do(expired, data, base.entries)
    assert_same_index(data, base.whole, log_begin=3 * SEGMENT_SIZE)


def test_what_the_log_still_holds_is_mended_beside_entries_of_expired_messages(
    base: Base, data: Path, expired: Path
) -> None:
    named_for(expired, data)
    begin = 3 * SEGMENT_SIZE
    file = next(number for number, header in enumerate(base.headers) if header.begin_phy_offset > begin)
    change_entry(index_files(data)[file], ENTRY, 0, HASH_SLOT_NUM)
    report = recover(expired, data)
    assert 0 < report["keptEntries"] < base.entries
    assert report["keptEntries"] + report["rebuiltEntries"] == base.entries
    assert_same_index(data, base.whole, log_begin=3 * SEGMENT_SIZE)
    check_nothing_to_do(expired, data, base.entries)


def test_a_plain_start_after_a_kill_brings_the_open_file_back(base: Base, tmp_path: Path) -> None:
    data = tmp_path / "data"
    name, count = kill_when_durable(base, data)
    path, rand = data / "index" / name, random.Random(2)
    change(path, 0, rand.randbytes(40))
    change(path, LAYOUT.slot_position(0), rand.randbytes(4 * HASH_SLOT_NUM))
    change(path, LAYOUT.entry_position(count), rand.randbytes(ENTRY_SIZE * (INDEX_NUM - count)))
    recovered = start_plainly(base, data)
    assert (recovered["kept_entries"], recovered["dropped_entries"]) == (base.entries, 0)
    assert recovered["rewritten_files"] == 1


@pytest.mark.parametrize("member", [HASH, PHY, PREV])
def test_a_plain_start_after_a_kill_does_not_keep_what_its_chain_denies(
    base: Base, tmp_path: Path, member: int
) -> None:
    data = tmp_path / "data"
    name, count = kill_when_durable(base, data)
    path = data / "index" / name
    # One whose message has another one behind it: the chain says nothing about the phy offset of the last.
    number = next(n for n in range(count // 2, count) if entry_of(path, n)[PHY] == entry_of(path, n + 1)[PHY])
    change_entry(path, number, member, 1)
    recovered = start_plainly(base, data)
    sound = base.entries_before(-1) + number - 1
    assert sound - 10 <= recovered["kept_entries"] <= sound


def kill_when_durable(base: Base, data: Path) -> tuple[str, int]:
    """Build all, and kill; name and index count of the open file."""
    with Daemon(base.store, data, *SIZES) as daemon:
        daemon.wait_durable(base.end)
    mark = json.loads((data / "frontier").read_bytes())["index"][-1]
    assert not mark["full"]
    return mark["name"], mark["header"][-1]


def start_plainly(base: Base, data: Path) -> dict[str, Any]:
    """Start, catch up and stop; the index must be whole then. What the recovery says."""
    with Daemon(base.store, data, *SIZES) as daemon:
        recovered = daemon.wait_event("recovered")
        daemon.wait_caught_up(base.end)
        assert daemon.terminate() == 0
    assert_same_index(data, base.whole)
    return recovered
