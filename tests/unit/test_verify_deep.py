"""``indexd verify --deep``: entries and log, each against the other; and on what daemons leave behind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from indexd.findings import Findings
from indexd.flush.frontier import Uncovered
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles, segment_name
from indexd.verify import whole
from indexd.verify.whole import look
from support.daemon import Daemon, compile_kernels, index_files, indexd, indexd_here, rebuild
from support.data_directory import T0, Store, config_of, make_data, spec
from support.goldens import GOLDENS, unpack
from support.small_log import SIZES, Growing, write_log
from support.verifying import (
    HASH,
    LAYOUT,
    PHY,
    TIME,
    build,
    change,
    change_entry,
    check,
    entry_of,
    files_of,
    kinds,
    small_store,
)

FLAVOURS = ["3.x", "4.0", "4.7", "5.4"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return small_store(tmp_path)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("messages", [0, 1, 10, 11])
def test_nothing_is_wrong(tmp_path: Path, flavour: str, messages: int) -> None:
    store = small_store(tmp_path, flavour, messages)
    report = check(store.data, deep=True)
    assert kinds(report) == {}
    assert report.compared is not None
    assert (report.compared.messages, report.compared.entries) == (messages, report.entries)
    assert report.compared.left_out == []


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


def test_a_wrong_hash(store: Store) -> None:
    path = files_of(store)[1]
    change_entry(path, 5, HASH, entry_of(path, 5).key_hash + 7)
    report = check(store.data, deep=True)
    assert kinds(report) == {"entry-hash": 1}
    assert report.findings.kept[0].position == LAYOUT.entry_position(5)


def test_a_wrong_time_difference(store: Store) -> None:
    path = files_of(store)[1]
    change_entry(path, 5, TIME, entry_of(path, 5).time_diff + 1)
    report = check(store.data, deep=True)
    assert kinds(report) == {"entry-time-difference": 1}
    assert report.findings.kept[0].position == LAYOUT.entry_position(5) + 12


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
    size = segment.stat().st_size
    assert end < size
    change(segment, end, bytes(size - end))
    found = kinds(check(store.data, deep=True))
    assert found == {"log-end": 1, "entry-behind-log": 1}


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
    assert kinds(report) == {}
    assert report.compared is not None
    assert report.compared.messages == 58
    assert "it was corrupt" in report.notes[0]
    segments[0].unlink()
    report = check(store.data, deep=True)
    assert kinds(report) == {}
    assert report.compared is not None
    assert report.compared.entries + report.compared.expired_entries == report.entries
    assert report.compared.expired_entries > 0
    # What cannot be read any more is not held against the index either.
    change(segments[1], 30, b"\x55" * 40)
    report = check(store.data, deep=True)
    assert kinds(report) == {}
    assert "were not compared" in " ".join(report.notes)
    for segment in segments[1:]:
        segment.unlink()
    report = check(store.data, deep=True)
    assert report.compared is not None
    assert (report.compared.entries, report.compared.expired_entries) == (0, report.entries)


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
    assert report.compared is not None
    assert (report.compared.entries, report.compared.messages) == (31, 31)


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
    assert report.compared is not None
    assert report.compared.messages == 10
    assert {finding.file for finding in report.findings.kept} == {f"index/{path.name}"}


def test_a_damaged_block_in_a_long_file(tmp_path: Path) -> None:
    end = write_log(tmp_path / "store", 6000, seed=7)
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
        assert report.compared is not None
        assert report.compared.messages == 6000
        path.write_bytes(data)
    assert end
    assert kinds(check(tmp_path / "data", deep=True)) == {}


# --- what RocketMQ and daemons leave ---


@pytest.mark.parametrize("name", GOLDENS)
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_goldens_rebuilt_in_each_flavour(tmp_path: Path, name: str, flavour: str) -> None:
    golden = unpack(name, tmp_path)
    flags = ("--segment-size", golden.segment_size, "--hash-slot-num", golden.hash_slot_num)
    out = tmp_path / "out"
    words = ("rebuild", "--store", golden.root, "--data", tmp_path / "d", "--out", out, *flags)
    done = indexd_here(*words, "--index-num", golden.index_num, "--flavour", flavour)
    assert done.returncode == 0, done.stderr
    done = indexd_here("verify", "--deep", "--json", "--data", out)
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["findings"], summary["notes"]) == (0, 0, []), done.stdout
    assert (summary["comparedMessages"], summary["comparedEntries"]) == (len(golden.messages()), summary["entries"])


def test_beside_a_daemon_and_after_a_kill(tmp_path: Path) -> None:
    compile_kernels()
    store, data = tmp_path / "store", tmp_path / "data"
    with Growing(store, 5) as growing, Daemon(store, data, *SIZES) as daemon:
        daemon.wait_state(lambda row: row["indexFiles"] >= 3 and row["durableOffset"] > 0)
        for deep_too in (False, True, False, True):
            done = indexd_here("verify", "--json", "--data", data, *(["--deep"] if deep_too else []))
            assert done.returncode == 0, done.stdout
            summary = json.loads(done.stdout)
            assert f"pid {daemon.pid}, is at work" in summary["notes"][0]
            assert summary["entries"] > 0
        daemon.kill()
        done = indexd_here("verify", "--json", "--deep", "--data", data)
        assert done.returncode == 0, done.stdout
        assert "the last stop was unclean" in json.loads(done.stdout)["notes"][0]
        end = growing.stop()
    done = indexd("--recover", "--store", store, "--data", data, *SIZES)
    assert done.returncode == 0, done.stderr
    done = indexd_here("verify", "--json", "--deep", "--data", data)
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["findings"], summary["notes"]) == (0, 0, [])
    assert summary["comparedEntries"] == summary["entries"]
    assert json.loads((data / "frontier").read_bytes())["phyOffset"] == end
