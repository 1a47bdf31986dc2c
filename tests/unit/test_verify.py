"""``indexd verify`` of the key index, alone and beside the log: each kind of damage is its own finding."""

from __future__ import annotations

import json
import os
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from indexd.errors import CorruptDataError, UsageError
from indexd.findings import KEPT_MAX, RESERVED
from indexd.flush.frontier import Uncovered
from indexd.index.format import IndexLayout
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import segment_name
from indexd.verify import VerifyReport, verify
from indexd.verify.whole import ComparedTotals
from support.daemon import indexd_here
from support.data_directory import T0, Store, config_of, make_data, spec
from support.goldens import GOLDENS, unpack
from support.queues import tree
from support.verifying import (
    HASH,
    LAYOUT,
    PHY,
    PREV,
    TIME,
    Damage,
    build,
    chain,
    change,
    change_entry,
    check,
    entry,
    entry_of,
    files_of,
    header,
    kinds,
    set_slot,
    slot,
    small_store,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return small_store(tmp_path)


@pytest.mark.parametrize("flavour", ["3.x", "4.0", "4.7", "5.4"])
@pytest.mark.parametrize("messages", [0, 1, 10, 11])
def test_nothing_is_wrong_and_nothing_is_changed(tmp_path: Path, flavour: str, messages: int) -> None:
    store = small_store(tmp_path, flavour, messages)
    before, marks = tree(tmp_path), store.frontier.index
    for deep in (False, True):
        report = check(store.data, deep=deep)
        assert (kinds(report), report.notes) == ({}, [])
        assert (report.files, report.entries) == (len(marks), sum(mark.header.entries for mark in marks))
        assert report.bytes == sum(path.stat().st_size for path in files_of(store))
    compared = compared_in(report)
    assert (compared.messages, compared.entries, compared.left_out) == (messages, report.entries, [])
    assert tree(tmp_path) == before


def compared_in(report: VerifyReport) -> ComparedTotals:
    assert report.compared is not None
    return report.compared


#: Of the first file.
DAMAGES: dict[str, Damage] = {
    "chain-loop": chain(lambda number, _: number),
    "chain-forward": chain(lambda number, _: number + 1),
    "chain-range": chain(10),
    "chain-previous": chain(0),
    "entry-key-hash": entry(5, HASH, -5),
    "entry-phy-offset": entry(5, PHY, -1),
    "entry-phy-offset-range": entry(5, PHY, 1 << 40),
    "entry-time-difference": entry(5, TIME, -1),
    "slot-wiped": slot(9, 0),
    "slot-range": slot(9, -3),
    "slot-old": slot(9, lambda there: there.prev_index),
    "header-begin-timestamp": header(0, ">q", 1 << 40),
    "header-end-timestamp": header(8, ">q", 1 << 40),
    "header-begin-phy-offset": header(16, ">q", 1 << 40),
    "header-end-phy-offset": header(24, ">q", 1 << 40),
    "header-used-slot-count": header(32, ">i", 1 << 20),
    "header-index-count": header(36, ">i", 1 << 20),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_each_damage_is_its_own_finding(store: Store, kind: str) -> None:
    path = files_of(store)[0]
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


def test_what_stands_where_nothing_is_written(store: Store) -> None:
    first, *_, path = files_of(store)
    change(first, LAYOUT.entry_position(0), b"\x01")
    count = store.frontier.index[-1].header.index_count
    assert count < LAYOUT.index_num
    change(path, LAYOUT.entry_position(count) + 3, b"\x01\x02")
    slot = next(at for at in range(7) if not path.read_bytes()[LAYOUT.slot_position(at) + 3])
    set_slot(path, slot, count)
    assert kinds(check(store.data)) == {"entry-0": 1, "behind-last-entry": 1, "slot-behind-last": 1}


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


def test_many_findings_are_counted_and_cut_off(tmp_path: Path) -> None:
    layout = IndexLayout(5000, 10)
    store = small_store(tmp_path, messages=2)
    make_data(store.data, store.root, store.messages(), layout, "5.4", store.segment)
    path = files_of(store)[0]
    change(path, 40, b"\x7f" * 4 * 5000)
    change(path, 0, b"\x01")
    (store.data / "checkpoint").unlink()
    report, more = check(store.data), {"slot-range": KEPT_MAX, "slot": 5000 - KEPT_MAX}
    assert kinds(report) == more | {"header-begin-timestamp": 1, "checkpoint": 1}
    assert len(report.findings.kept) == KEPT_MAX - RESERVED + 2
    lines = indexd_here("verify", "--data", store.data).stdout.splitlines()
    assert sum(": slot " in line for line in lines) == 20
    assert {f"and {KEPT_MAX - 20:,} more of the kind slot-range", f"and {5000 - KEPT_MAX:,} more of the kind slot"} < {
        *lines
    }


def test_what_cannot_be_verified(store: Store, tmp_path: Path) -> None:
    assert indexd_here("verify", "--data", tmp_path / "none").returncode == 2
    with pytest.raises(UsageError):
        check(store.data, config=config_of(store.data, index_num=11))
    (store.data / "frontier").write_bytes(b"{")
    with pytest.raises(CorruptDataError):
        check(store.data)
    assert indexd_here("verify", "--data", store.data).returncode == 4


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


def test_beside_a_daemon_the_open_file_may_know_more(store: Store, request: pytest.FixtureRequest) -> None:
    lock = DirectoryLock(store.data / "lock")
    lock.acquire()
    request.addfinalizer(lock.release)
    (store.data / "state").write_text(json.dumps({"pid": os.getpid(), "phyOffset": 0}))
    path, header = files_of(store)[-1], store.frontier.index[-1].header
    # One more entry, of a slot of its own, published but not flushed.
    count, end = header.index_count, header.end_phy_offset + 10
    free = next(slot for slot in range(7) if not any(path.read_bytes()[LAYOUT.slot_position(slot) :][:4]))
    change(path, LAYOUT.entry_position(count), struct.pack(">iqii", free or 7, end, 0, 0))
    set_slot(path, free, count)
    more = replace(header, used_slot_count=header.used_slot_count + 1, index_count=count + 1, end_phy_offset=end)
    change(path, 0, more.pack())
    (store.data / "index" / "20990101000000000").write_bytes(b"")
    report = check(store.data)
    assert (kinds(report), f"pid {os.getpid()}, is at work" in report.notes[0]) == ({}, True)
    # An entry that the header does not count is none.
    set_slot(path, free, count + 1)
    assert kinds(check(store.data)) == {"slot-behind-last": 1}
    change(path, 36, struct.pack(">i", count - 1))
    assert kinds(check(store.data)) == {"header-index-count": 1, "slot-behind-last": 1}
    # While it still opens, its slots say nothing.
    (store.data / "state").unlink()
    report = check(store.data)
    assert (kinds(report), "is opening the directory" in report.notes[0]) == ({}, True)


class Expiring(Disk):
    """The first file that is asked for expires just then: the frontier goes on without it, and it is removed."""

    def __init__(self, store: Store) -> None:
        self.store, self.path = store, files_of(store)[0]

    def open_read(self, path: Path) -> DiskFile:
        if path == self.path and path.exists():
            self.store.change_frontier(index=self.store.frontier.index[1:])
            path.unlink()
        return super().open_read(path)


def test_what_is_found_while_a_daemon_flushes_is_looked_at_again(store: Store) -> None:
    files = len(store.frontier.index)
    report = verify(config_of(store.data), Expiring(store), deep=False, on_progress=lambda *_: None)
    assert (kinds(report), report.files) == ({}, files - 1)


@pytest.mark.parametrize("number", [0, 2, 3])
def test_what_no_check_of_the_file_alone_finds_the_log_does(store: Store, number: int) -> None:
    # The bytes that test_index_kernel.py proves to be harmless without the log.
    path = files_of(store)[number]
    data = path.read_bytes()
    missed = set[str]()
    for position in range(
        LAYOUT.entry_position(1), LAYOUT.entry_position(store.frontier.index[number].header.index_count)
    ):
        for bits in (0x01, 0x80):
            path.write_bytes(data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :])
            if len(check(store.data).findings):
                continue
            report = check(store.data, deep=True)
            missed |= kinds(report).keys()
            assert 1 <= len(report.findings) <= 3, (position, bits)
            at = LAYOUT.entry_position((position - LAYOUT.entry_position(0)) // 20)
            assert any(at <= finding.position < at + 20 for finding in report.findings.kept)
    assert "entry-time-difference" in missed
    # A hash of the same slot is wrong by the log alone, too.
    path.write_bytes(data)
    change_entry(path, 1, HASH, entry_of(path, 1).key_hash + LAYOUT.hash_slot_num)
    assert kinds(check(store.data, deep=True)) == {"entry-hash": 1}


# --- one damage, one kind ---


def test_a_message_without_entries_and_entries_without_message(tmp_path: Path) -> None:
    # The index of a log in which one message was another one.
    store = small_store(tmp_path / "a")
    other = Store(tmp_path / "b", LAYOUT)
    for number in range(10):
        keys = {"KEYS": f"a{number} b{number % 3}"} | ({"UNIQ_KEY": f"u{number}", "TAGS": "t"} if number % 2 else {})
        if number == 4:
            keys["KEYS"] = "xx yy"
        if number == 6:
            keys = {"KEY_": "a6 b0"}
        other.append(spec(T0 + 1700 * number, size=60, **keys))
    assert other.writer.max_offset == store.writer.max_offset
    store.change_frontier(commit_log_paths=(str(other.root / "commitlog"),))
    assert kinds(check(store.data, deep=True)) == {"entry-hash": 2, "entry-without-key": 2}
    build(other)
    other.change_frontier(commit_log_paths=(str(store.root / "commitlog"),))
    assert kinds(check(other.data, deep=True)) == {"entry-hash": 2, "key-without-entry": 2}


def test_a_message_indexed_twice(store: Store) -> None:
    # A message indexed again, as after a recovery that went back too far: sound in itself.
    messages = store.messages()
    make_data(store.data, store.root, [*messages[:5], messages[4], *messages[5:]], LAYOUT, "5.4", store.segment)
    assert check(store.data, deep=True).findings.counts["entry-twice"] == 2


def test_entries_behind_the_end_of_the_log(store: Store) -> None:
    end = store.messages()[7].phy_offset
    segment = store.root / "commitlog" / segment_name(0)
    assert end < segment.stat().st_size
    change(segment, end, bytes(segment.stat().st_size - end))
    assert kinds(check(store.data, deep=True)) == {"log-end": 1}


def test_expired_messages_are_no_findings(tmp_path: Path) -> None:
    store = small_store(tmp_path, messages=60)
    first, second, *others = sorted((store.root / "commitlog").iterdir())
    assert len(others) > 1
    first.unlink()
    report = check(store.data, deep=True)
    compared = compared_in(report)
    assert (kinds(report), compared.expired_entries > 0) == ({}, True)
    assert compared.entries + compared.expired_entries == report.entries
    # What cannot be read any more is not held against the index either.
    change(second, 30, b"\x55" * 40)
    report = check(store.data, deep=True)
    assert (kinds(report), "were not compared" in " ".join(report.notes)) == ({}, True)
    shutil.rmtree(store.root / "commitlog")
    (store.root / "commitlog").mkdir()
    compared = compared_in(check(store.data, deep=True))
    assert (compared.entries, compared.expired_entries) == (0, report.entries)


def test_a_log_that_begins_exactly_where_a_file_does(tmp_path: Path) -> None:
    # The file before has expired with its messages, and entry 1 counts from its end, which nobody knows any more.
    store = Store(tmp_path, LAYOUT)
    store.append(*(spec(T0 + 1700 * number, size=340, KEYS=f"a{number}") for number in range(40)))
    build(store)
    first, second, *rest = store.frontier.index
    assert (first.header.end_phy_offset, second.header.begin_phy_offset) == (3520, store.segment)
    files_of(store)[0].unlink()
    (store.root / "commitlog" / segment_name(0)).unlink()
    store.change_frontier(index=(second, *rest))
    assert entry_of(files_of(store)[0], 1).time_diff == 1
    report = check(store.data, deep=True)
    assert (kinds(report), report.notes) == ({}, [])
    assert (compared_in(report).entries, compared_in(report).messages) == (31, 31)


# --- what RocketMQ and daemons leave ---


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("flavour", ["3.x", "5.4"])
def test_goldens_rebuilt_in_each_flavour(tmp_path: Path, name: str, flavour: str) -> None:
    golden = unpack(name, tmp_path)
    flags = ("--segment-size", golden.segment_size, "--hash-slot-num", golden.hash_slot_num)
    sizes = ("--index-num", golden.index_num, "--consume-queue-file-size", 6000, "--sparse-interval", 500)
    out = tmp_path / "out"
    words = ("rebuild", "--store", golden.root, "--data", tmp_path / "d", "--out", out, "--flavour", flavour)
    done = indexd_here(*words, *flags, *sizes)
    assert done.returncode == 0, done.stderr
    done = indexd_here("verify", "--deep", "--json", "--data", out)
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["findings"], summary["notes"]) == (0, 0, []), done.stdout
    assert (summary["comparedMessages"], summary["comparedEntries"]) == (len(golden.messages()), summary["entries"])
    assert min(summary["consumeQueueUnits"], summary["sparseSegments"]) > 0
