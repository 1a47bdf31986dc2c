"""``indexd verify`` of the key index: each kind of damage is its own finding; beside daemons, and after kills."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from indexd.errors import CorruptDataError, UsageError
from indexd.findings import KEPT_MAX, RESERVED
from indexd.flush.frontier import Uncovered, write_frontier
from indexd.index.file import IndexService
from indexd.index.format import FLAVOURS, IndexLayout
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.verify import whole
from indexd.verify.whole import look as whole_look
from support.daemon import indexd_here
from support.data_directory import Store, config_of, make_data
from support.verifying import (
    HASH,
    LAYOUT,
    PHY,
    PREV,
    TIME,
    change,
    change_entry,
    check,
    entry_of,
    files_of,
    kinds,
    set_slot,
    small_store,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return small_store(tmp_path)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("flavour", ["3.x", "4.0", "4.7", "5.4"])
@pytest.mark.parametrize("messages", [0, 1, 10, 11])
def test_nothing_is_wrong_and_nothing_is_changed(tmp_path: Path, flavour: str, messages: int) -> None:
    store = small_store(tmp_path, flavour, messages)
    before = contents(tmp_path)
    report = check(store.data)
    assert (kinds(report), report.notes) == ({}, [])
    marks = store.frontier.index
    assert (report.files, report.entries) == (len(marks), sum(mark.header.entries for mark in marks))
    assert report.bytes == sum(path.stat().st_size for path in files_of(store))
    assert contents(tmp_path) == before


def slot_of(path: Path, number: int) -> int:
    return LAYOUT.slot_of(entry_of(path, number).key_hash)


def entries_of_slot(path: Path, slot: int) -> list[int]:
    return [number for number in range(1, 10) if slot_of(path, number) == slot]


def chained(path: Path) -> tuple[int, int]:
    """An entry with a previous one, and an entry of another slot before it."""
    for number in range(8, 1, -1):
        others = [at for at in range(1, number) if slot_of(path, at) != slot_of(path, number)]
        if entry_of(path, number).prev_index and others:
            return number, others[-1]
    raise AssertionError("no chain")


def broken_chain(value: Callable[[int, int], int]) -> Callable[[Path], int]:
    def damage(path: Path) -> int:
        number, other = chained(path)
        change_entry(path, number, PREV, value(number, other))
        return LAYOUT.entry_position(number) + 16

    return damage


def broken_entry(number: int, member: int, value: int, at: int) -> Callable[[Path], int]:
    def damage(path: Path) -> int:
        change_entry(path, number, member, value)
        return LAYOUT.entry_position(number) + at

    return damage


def broken_slot(value: Callable[[Path, int], int], *, used: bool = True) -> Callable[[Path], int]:
    def damage(path: Path) -> int:
        slot = chained_slot(path) if used else next(at for at in range(7) if not entries_of_slot(path, at))
        return set_slot(path, slot, value(path, slot))

    return damage


def chained_slot(path: Path) -> int:
    return slot_of(path, chained(path)[0])


def overwrite(position: int, data: bytes) -> Callable[[Path], int]:
    def damage(path: Path) -> int:
        change(path, position, data)
        return position

    return damage


DAMAGES: dict[str, Callable[[Path], int]] = {
    "chain-loop": broken_chain(lambda number, _: number),
    "chain-forward": broken_chain(lambda number, _: number + 1),
    "chain-range": broken_chain(lambda *_: 10),
    "chain-previous": broken_chain(lambda _, other: other),
    "entry-key-hash": broken_entry(5, HASH, -5, 0),
    "entry-phy-offset": broken_entry(5, PHY, -1, 4),
    "entry-phy-offset-range": broken_entry(5, PHY, 1 << 40, 4),
    "entry-time-difference": broken_entry(5, TIME, -1, 12),
    "slot-wiped": broken_slot(lambda *_: 0),
    "slot-range": broken_slot(lambda *_: -3),
    "slot-old": broken_slot(lambda path, slot: entries_of_slot(path, slot)[0]),
    "header-begin-timestamp": overwrite(0, b"\x01"),
    "header-end-timestamp": overwrite(8, b"\x01"),
    "header-begin-phy-offset": overwrite(16, b"\x01"),
    "header-end-phy-offset": overwrite(24, b"\x01"),
    "header-used-slot-count": overwrite(32, b"\x01"),
    "header-index-count": overwrite(36, b"\x01"),
    "entry-0": overwrite(LAYOUT.entry_position(0), b"\x01"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_is_its_own_finding(store: Store, kind: str) -> None:
    path = files_of(store)[1]
    position = DAMAGES[kind](path)
    report = check(store.data)
    found = [finding for finding in report.findings.kept if finding.what == kind]
    assert [(finding.file, finding.position) for finding in found] == [(f"index/{path.name}", position)]
    # A wrong hash or offset is also seen from its neighbours; from there on all is well again.
    assert len(report.findings) <= 5


def test_entries_out_of_order(store: Store) -> None:
    path = files_of(store)[1]
    change_entry(path, 5, PHY, entry_of(path, 1).phy_offset)
    assert kinds(check(store.data)) == {"entry-order": 1}


def test_what_stands_behind_the_last_entry(store: Store) -> None:
    path = files_of(store)[-1]
    count = store.frontier.index[-1].header.index_count
    assert count < LAYOUT.index_num
    change(path, LAYOUT.entry_position(count) + 3, b"\x01\x02")
    slot = next(at for at in range(7) if not path.read_bytes()[LAYOUT.slot_position(at) + 3])
    set_slot(path, slot, count)
    assert kinds(check(store.data)) == {"behind-last-entry": 1, "slot-behind-last": 1}


def test_files_that_are_missing_short_or_not_named(store: Store) -> None:
    first, second, *_ = files_of(store)
    first.unlink()
    os.truncate(second, 100)
    (store.data / "index" / "20990101000000000").write_bytes(b"")
    (store.data / "index" / "notes").write_bytes(b"mine")
    assert kinds(check(store.data)) == {"file-missing": 1, "file-size": 1, "file-unnamed": 1}


def test_a_missing_file_that_has_expired_is_none(store: Store) -> None:
    files_of(store)[0].unlink()
    store.change_frontier(commit_log_paths=(str(store.root / "later"),))
    (store.root / "later").mkdir()
    (store.root / "later" / f"{1 << 20:020d}").write_bytes(bytes(store.segment))
    report = check(store.data)
    assert kinds(report) == {}
    assert "have expired" in report.notes[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"begin_offset": 1 << 30},
        {"segment_size": 0},
        {"uncovered": (Uncovered(5, 5, "x"),)},
        {"uncovered": (Uncovered(0, 1 << 40, "x"),)},
    ],
)
def test_a_frontier_that_contradicts_itself(store: Store, changes: dict[str, object]) -> None:
    store.change_frontier(**changes)
    report = check(store.data, deep=True)
    assert kinds(report)["frontier"] >= 1
    assert report.compared is None
    assert "contradicts itself" in report.notes[-1]


@pytest.mark.parametrize("data", [None, b"", bytes(4096), bytes(4095), b"last"])
def test_the_checkpoint(store: Store, data: bytes | None) -> None:
    path = store.data / "checkpoint"
    if data is None:
        path.unlink()
    elif data == b"last":
        change(path, 4095, b"\x01")
    else:
        path.write_bytes(data)
    assert kinds(check(store.data)) == {"checkpoint": 1}


# --- the command ---


def test_the_command_in_words_and_lines(store: Store) -> None:
    done = indexd_here("verify", "--data", store.data)
    assert done.returncode == 0, done.stderr
    assert "not compared with the log (--deep)" in done.stdout
    assert done.stdout.endswith(" s: no findings\n")
    path = files_of(store)[1]
    position = DAMAGES["chain-loop"](path)
    done = indexd_here("verify", "--data", store.data)
    assert done.returncode == 1
    assert done.stdout.startswith(f"index/{path.name} byte {position}: entry ")
    assert done.stdout.endswith(" s: 1 finding\n")
    done = indexd_here("verify", "--data", store.data, "--json")
    finding, summary = (json.loads(line) for line in done.stdout.splitlines())
    assert (finding["kind"], finding["file"], finding["position"], finding["what"]) == (
        "finding",
        f"index/{path.name}",
        position,
        "chain-loop",
    )
    assert (summary["kind"], summary["findings"], summary["counts"]) == ("summary", 1, {"chain-loop": 1})
    assert (done.returncode, summary["deep"], summary["files"]) == (1, False, len(files_of(store)))


def test_many_findings_are_counted_and_cut_off(tmp_path: Path) -> None:
    layout = IndexLayout(5000, 10)
    store = small_store(tmp_path, messages=2)
    make_data(store.data, store.root, store.messages(), layout, "5.4", store.segment)
    path = files_of(store)[0]
    change(path, 40, b"\x7f" * 4 * 5000)
    change(path, 0, b"\x01")
    (store.data / "checkpoint").unlink()
    report = check(store.data)
    listed = KEPT_MAX - RESERVED
    assert kinds(report) == {
        "slot-range": KEPT_MAX,
        "slot": 5000 - KEPT_MAX,
        "header-begin-timestamp": 1,
        "checkpoint": 1,
    }
    assert len(report.findings.kept) == listed + 2
    done = indexd_here("verify", "--data", store.data)
    lines = done.stdout.splitlines()
    assert sum(": slot " in line for line in lines) == 20
    assert f"and {KEPT_MAX - 20:,} more of the kind slot-range" in lines
    assert f"and {5000 - KEPT_MAX:,} more of the kind slot" in lines
    assert "5,002 findings" in lines[-1]


def test_what_cannot_be_verified(store: Store, tmp_path: Path) -> None:
    assert indexd_here("verify", "--data", tmp_path / "none").returncode == 2
    with pytest.raises(UsageError):
        check(store.data, config=config_of(store.data, index_num=11))
    (store.data / "frontier").write_bytes(b"{")
    with pytest.raises(CorruptDataError):
        check(store.data)
    assert indexd_here("verify", "--data", store.data).returncode == 4


SLOT = struct.Struct(">i")


def test_after_an_unclean_stop_only_durable_entries_count(store: Store) -> None:
    (store.data / "abort").write_bytes(b"1")
    path = files_of(store)[-1]
    count = store.frontier.index[-1].header.index_count
    change(path, 0, bytes(LAYOUT.entry_position(0)))
    change(path, LAYOUT.entry_position(count), b"\x05" * 20)
    (store.data / "index" / "20990101000000000").write_bytes(b"")
    report = check(store.data)
    assert kinds(report) == {}
    assert "the last stop was unclean: indexd --recover or the next start mends it" in report.notes[0]
    change_entry(path, 1, PREV, 3)
    assert kinds(check(store.data)) == {"chain-forward": 1}
    # A full file was durable to its end.
    set_slot(files_of(store)[0], 0, 77)
    assert kinds(check(store.data)) == {"chain-forward": 1, "slot-range": 1}


def test_beside_a_daemon_the_open_file_may_know_more(store: Store, tmp_path: Path) -> None:
    lock = DirectoryLock(store.data / "lock")
    lock.acquire()
    (store.data / "state").write_text(json.dumps({"pid": os.getpid(), "phyOffset": 0}))
    path, mark = files_of(store)[-1], store.frontier.index[-1]
    # One more entry, of a slot of its own, published but not flushed.
    count, header = mark.header.index_count, mark.header
    free = next(slot for slot in range(7) if not any(path.read_bytes()[LAYOUT.slot_position(slot) :][:4]))
    change_entry(path, count, HASH, free or 7)
    change_entry(path, count, PHY, header.end_phy_offset + 10)
    set_slot(path, free, count)
    more = replace(header, used_slot_count=header.used_slot_count + 1, index_count=count + 1)
    change(path, 0, replace(more, end_phy_offset=header.end_phy_offset + 10).pack())
    (store.data / "index" / "20990101000000000").write_bytes(b"")
    report = check(store.data)
    assert kinds(report) == {}
    assert f"pid {os.getpid()}, is at work" in report.notes[0]
    # An entry that the header does not count is none.
    set_slot(path, free, count + 1)
    assert kinds(check(store.data)) == {"slot-behind-last": 1}
    change(path, 0, header.pack())
    set_slot(path, free, 0)
    assert kinds(check(store.data)) == {}
    change(path, 36, SLOT.pack(count - 1))
    assert kinds(check(store.data)) == {"header-index-count": 1}
    # While it still opens, its slots say nothing.
    (store.data / "state").unlink()
    report = check(store.data)
    assert kinds(report) == {}
    assert "is opening the directory" in report.notes[0]
    lock.release()


def test_what_is_found_while_a_daemon_flushes_is_looked_at_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = files_of(store)[0]
    saved = store.frontier
    looks = []

    def look(disk: Disk, files: object) -> whole.StoreState:
        # The first file expires behind the first look: the frontier goes on without it, then it is removed.
        ground = whole_look(disk, files)  # type: ignore[arg-type]
        looks.append(ground)
        if len(looks) == 1:
            write_frontier(disk, store.data / "frontier", saved.with_outputs(index=saved.index[1:]), "0")
            first.unlink()
        return ground

    monkeypatch.setattr(whole, "look", look)
    report = check(store.data)
    assert kinds(report) == {}
    assert report.files == len(saved.index) - 1
    assert len(looks) == 2


def test_an_empty_open_file(store: Store, tmp_path: Path) -> None:
    full = [mark for mark in store.frontier.index if mark.full]
    files_of(store)[-1].unlink()
    service = IndexService(Disk(), store.data / "index", LAYOUT, FLAVOURS["5.4"])
    service.load(tuple(full))
    service._open = service._create_file()
    mark = service.mark()
    service.flush()
    service.close()
    store.change_frontier(index=mark.held)
    assert kinds(check(store.data)) == {}
    change(files_of(store)[-1], 36, SLOT.pack(0))
    assert kinds(check(store.data)) == {}
    change(files_of(store)[-1], 7, b"\x01")
    assert kinds(check(store.data)) == {"header-begin-timestamp": 1}
