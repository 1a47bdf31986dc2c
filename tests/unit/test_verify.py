"""``indexd verify`` of the key index, alone and beside the log: each kind of damage is its own finding."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from indexd.errors import CorruptDataError, UsageError
from indexd.findings import KEPT_MAX, RESERVED, Findings
from indexd.flush.frontier import Uncovered, write_frontier
from indexd.index.file import IndexService
from indexd.index.format import FLAVOURS, IndexLayout
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles, segment_name
from indexd.verify import VerifyReport, whole
from indexd.verify.whole import ComparedTotals, look
from indexd.verify.whole import look as whole_look
from support.daemon import compile_kernels, index_files, indexd_here, rebuild
from support.data_directory import T0, Store, config_of, make_data, spec
from support.goldens import GOLDENS, unpack
from support.small_log import SIZES, write_log
from support.verifying import (
    HASH,
    LAYOUT,
    PHY,
    PREV,
    TIME,
    build,
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
    before, marks = contents(tmp_path), store.frontier.index
    for deep in (False, True):
        report = check(store.data, deep=deep)
        assert (kinds(report), report.notes) == ({}, [])
        assert (report.files, report.entries) == (len(marks), sum(mark.header.entries for mark in marks))
        assert report.bytes == sum(path.stat().st_size for path in files_of(store))
    compared = compared_in(report)
    assert (compared.messages, compared.entries, compared.left_out) == (messages, report.entries, [])
    assert contents(tmp_path) == before


def compared_in(report: VerifyReport) -> ComparedTotals:
    assert report.compared is not None
    return report.compared


def slot_of(path: Path, number: int) -> int:
    return LAYOUT.slot_of(entry_of(path, number).key_hash)


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
        return broken_entry(number, PREV, value(number, other), 16)(path)

    return damage


def broken_entry(number: int, member: int, value: int, at: int) -> Callable[[Path], int]:
    def damage(path: Path) -> int:
        change_entry(path, number, member, value)
        return LAYOUT.entry_position(number) + at

    return damage


def broken_slot(value: Callable[[Path, int], int]) -> Callable[[Path], int]:
    def damage(path: Path) -> int:
        slot = slot_of(path, chained(path)[0])
        return set_slot(path, slot, value(path, slot))

    return damage


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
    "slot-old": broken_slot(lambda path, slot: min(n for n in range(1, 10) if slot_of(path, n) == slot)),
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
    report, more = check(store.data), {"slot-range": KEPT_MAX, "slot": 5000 - KEPT_MAX}
    assert kinds(report) == more | {"header-begin-timestamp": 1, "checkpoint": 1}
    assert len(report.findings.kept) == KEPT_MAX - RESERVED + 2
    lines = indexd_here("verify", "--data", store.data).stdout.splitlines()
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
    change(path, 36, struct.pack(">i", count - 1))
    assert kinds(check(store.data)) == {"header-index-count": 1}
    # While it still opens, its slots say nothing.
    (store.data / "state").unlink()
    report = check(store.data)
    assert kinds(report) == {}
    assert "is opening the directory" in report.notes[0]
    lock.release()


def test_what_is_found_while_a_daemon_flushes_is_looked_at_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, looks = store.frontier, []

    def look(disk: Disk, files: DataFiles) -> whole.DataOwner:
        # The first file expires behind the first look: the frontier goes on without it, then it is removed.
        looks.append(whole_look(disk, files))
        if len(looks) == 1:
            write_frontier(disk, store.data / "frontier", saved.with_outputs(index=saved.index[1:]), "0")
            files_of(store)[0].unlink()
        return looks[-1]

    monkeypatch.setattr(whole, "look", look)
    report = check(store.data)
    assert (kinds(report), report.files, len(looks)) == ({}, len(saved.index) - 1, 2)


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
    change(files_of(store)[-1], 36, struct.pack(">i", 0))
    assert kinds(check(store.data)) == {}
    change(files_of(store)[-1], 7, b"\x01")
    assert kinds(check(store.data)) == {"header-begin-timestamp": 1}


@pytest.mark.parametrize("number", [0, 2, 3])
def test_what_no_check_of_the_file_alone_finds_the_log_does(store: Store, number: int) -> None:
    # The bytes that test_index_kernel.py proves to be harmless without the log.
    path = files_of(store)[number]
    data = path.read_bytes()
    missed = 0
    for position in range(
        LAYOUT.entry_position(1), LAYOUT.entry_position(store.frontier.index[number].header.index_count)
    ):
        for bits in (0x01, 0x07, 0x80):
            path.write_bytes(data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :])
            if len(check(store.data).findings):
                continue
            missed += 1
            report = check(store.data, deep=True)
            assert 1 <= len(report.findings) <= 3, (position, bits)
            at = LAYOUT.entry_position((position - LAYOUT.entry_position(0)) // 20)
            assert any(at <= finding.position < at + 20 for finding in report.findings.kept)
    assert missed


# --- one damage, one kind ---


@pytest.mark.parametrize(
    ("member", "more", "kind", "at"), [(HASH, 7, "entry-hash", 0), (TIME, 1, "entry-time-difference", 12)]
)
def test_a_wrong_number(store: Store, member: int, more: int, kind: str, at: int) -> None:
    path = files_of(store)[1]
    there = entry_of(path, 5)
    change_entry(path, 5, member, {HASH: there.key_hash, TIME: there.time_diff}[member] + more)
    report = check(store.data, deep=True)
    assert kinds(report) == {kind: 1}
    assert report.findings.kept[0].position == LAYOUT.entry_position(5) + at


@pytest.mark.parametrize("offset", [1, 0, -5, 1 << 40, 3])
def test_a_wrong_phy_offset(store: Store, offset: int) -> None:
    path = files_of(store)[1]
    was = entry_of(path, 5).phy_offset
    change_entry(path, 5, PHY, was + 1 if offset == 1 else was - 1 if offset == 3 else offset)
    found = kinds(check(store.data, deep=True))
    assert sum(found.get(kind, 0) for kind in ("entry-phy-offset", "entry-without-message", "entry-without-key")) >= 1
    assert sum(found.values()) <= 4


def test_header_times_to_the_millisecond(store: Store) -> None:
    for number, field, text in ((1, "begin_timestamp", "begin"), (2, "end_timestamp", "end")):
        marks = list(store.frontier.index)
        mark = marks[number]
        value = getattr(mark.header, field)
        # The same second, in the frontier and the file alike.
        other = value + (1 if (value - mark.header.begin_timestamp) % 1000 < 999 else -1)
        marks[number] = replace(mark, header=replace(mark.header, **{field: other}))
        change(files_of(store)[number], 0, marks[number].header.pack())
        store.change_frontier(index=tuple(marks))
        assert f"header-{text}-timestamp" in kinds(check(store.data, deep=True))


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


def test_messages_indexed_twice_or_not_at_all(store: Store) -> None:
    # A message indexed again, as after a recovery that went back too far: sound in itself.
    messages = store.messages()
    make_data(store.data, store.root, [*messages[:5], messages[4], *messages[5:]], LAYOUT, "5.4", store.segment)
    report = check(store.data, deep=True)
    assert report.findings.counts["entry-twice"] == 2
    store.frontier, _ = make_data(store.data, store.root, messages[:-1], LAYOUT, "5.4", store.segment)
    store.change_frontier(phy_offset=messages[-1].phy_offset + messages[-1].size)
    assert check(store.data, deep=True).findings.counts["key-without-entry"] == 4


def test_entries_behind_the_end_of_the_log(store: Store) -> None:
    end = store.messages()[7].phy_offset
    segment = store.root / "commitlog" / segment_name(0)
    assert end < segment.stat().st_size
    change(segment, end, bytes(segment.stat().st_size - end))
    assert kinds(check(store.data, deep=True)) == {"log-end": 1, "entry-behind-log": 1}


def test_expired_and_uncovered_messages_are_no_findings(tmp_path: Path) -> None:
    store = small_store(tmp_path, messages=60)
    segments = sorted((store.root / "commitlog").iterdir())
    assert len(segments) > 3
    messages = store.messages()
    gap = Uncovered(messages[40].phy_offset, messages[42].phy_offset, "it was corrupt")
    kept = [*messages[:40], *messages[42:]]
    frontier, _ = make_data(store.data, store.root, kept, LAYOUT, "5.4", store.segment)
    store.frontier = frontier
    store.change_frontier(uncovered=(gap,))
    report = check(store.data, deep=True)
    assert (kinds(report), compared_in(report).messages) == ({}, 58)
    assert "it was corrupt" in report.notes[0]
    segments[0].unlink()
    report = check(store.data, deep=True)
    compared = compared_in(report)
    assert (kinds(report), compared.expired_entries > 0) == ({}, True)
    assert compared.entries + compared.expired_entries == report.entries
    # What cannot be read any more is not held against the index either.
    change(segments[1], 30, b"\x55" * 40)
    report = check(store.data, deep=True)
    assert (kinds(report), "were not compared" in " ".join(report.notes)) == ({}, True)
    for segment in segments[1:]:
        segment.unlink()
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


@pytest.mark.parametrize("number", [0, 1, 3])
def test_files_that_expire_while_they_are_compared(store: Store, number: int) -> None:
    ground = look(Disk(), DataFiles(store.data))
    files_of(store)[number].unlink()
    frontier, findings, told = store.frontier, Findings(), []
    config = config_of(store.data, settle_ms=1, commit_log_paths=store.root / "commitlog", segment_size=store.segment)
    compared = whole.DeepComparison(config, Disk(), ground, findings).run(told.append)
    assert "which is gone or too short" in " ".join(compared.left_out)
    assert compared.left_out_entries + compared.entries == sum(mark.header.entries for mark in frontier.index)
    assert sum(told) == frontier.phy_offset
    # Its messages were still read: they are not those that have no entries.
    assert (len(findings), 0 < compared.messages < 10) == (0, True)


def test_a_totally_wrong_file_is_compared_to_its_end(store: Store) -> None:
    path = files_of(store)[1]
    change(path, LAYOUT.entry_position(1), bytes(range(180)))
    report = check(store.data, deep=True)
    assert compared_in(report).messages == 10
    assert {finding.file for finding in report.findings.kept} == {f"index/{path.name}"}


def test_a_damaged_block_in_a_long_file(tmp_path: Path) -> None:
    write_log(tmp_path / "store", 6000, seed=7)
    compile_kernels()
    rebuild(tmp_path / "store", tmp_path / "data", *SIZES)
    path = index_files(tmp_path / "data")[2]
    position = 40 + 4 * 500 + 20 * 2000
    for block in (bytes(4000), bytes(range(200)) * 20, b"\xff" * 4000):
        data = path.read_bytes()
        change(path, position, block)
        report = check(tmp_path / "data", deep=True)
        counts = report.findings.counts
        assert counts["key-without-entry"] == 200
        assert counts["entry-without-message"] + counts["entry-twice"] + counts["entry-without-key"] == 200
        assert compared_in(report).messages == 6000
        path.write_bytes(data)
    assert kinds(check(tmp_path / "data", deep=True)) == {}


# --- what RocketMQ and daemons leave ---


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("flavour", ["3.x", "4.0", "4.7", "5.4"])
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
