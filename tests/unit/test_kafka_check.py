"""Kafka's indexes checked against their logs: what holds, and each kind of damage; LogTruth beside a slow search."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.errors import UsageError
from indexd.kafka.check import CheckReport, check
from indexd.storage.disk import Disk
from support.kafka_records import (
    Batch,
    batch,
    name,
    old_record,
    positions,
    recovered,
    true_offset_entry,
    true_time_entry,
    write_segment,
)

BASE = 1000


def whats(report: CheckReport) -> set[str]:
    return {finding.what for finding in report.findings.kept}


def notes(report: CheckReport) -> set[str]:
    return {note.what for note in report.notes}


def some_batches(count: int = 40, base: int = BASE) -> list[Batch]:
    """Three offsets each, 100 bytes; times that rise by 5 with every other one falling back."""
    return [
        batch(base + 3 * i, base + 3 * i + 2, 1_700_000_000_000 + 5 * i - 8 * (i % 2), bytes(39)) for i in range(count)
    ]


@pytest.fixture
def partition(tmp_path: Path) -> Path:
    """Two segments of 40 batches, an entry each 400 bytes; nothing says how the broker was stopped."""
    path = tmp_path / "topic-0"
    write_segment(path, BASE, some_batches(), 300)
    write_segment(path, BASE + 120, some_batches(base=BASE + 120), 300)
    return path


def index(partition: Path, base: int = BASE) -> Path:
    return partition / name(base, ".index")


def times(partition: Path, base: int = BASE) -> Path:
    return partition / name(base, ".timeindex")


def log(partition: Path, base: int = BASE) -> Path:
    return partition / name(base, ".log")


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def put(path: Path, slot: int, entry: bytes) -> None:
    edit(path, lambda data: data[: slot * len(entry)] + entry + data[(slot + 1) * len(entry) :])


def test_whole_segments(partition: Path) -> None:
    report = check(partition, Disk(), interval=300)
    assert (whats(report), report.notes) == (set(), [])
    assert (report.partitions, report.segments, report.batches) == (1, 2, 80)
    assert report.entries == 2 * (9 + 10)


def test_a_whole_log_directory(partition: Path) -> None:
    write_segment(partition.parent / "other-3", 0, some_batches(base=0))
    write_segment(partition.parent / "gone-1.0123-delete", 0, [])
    (partition.parent / "empty-0").mkdir()
    (index(partition.parent / "other-3", 0)).unlink()
    report = check(partition.parent, Disk())
    assert (report.partitions, report.segments) == (2, 3)
    assert [finding.file for finding in report.findings.kept] == [f"other-3/{name(0, '.index')}"]


def test_missing_and_orphaned_files(partition: Path) -> None:
    index(partition).unlink()
    times(partition, BASE + 120).unlink()
    index(partition, 5).write_bytes(b"")
    times(partition, 7).write_bytes(bytes(12))
    report = check(partition, Disk())
    assert [(finding.file, finding.what) for finding in report.findings.kept] == [
        (name(BASE, ".index"), "index_missing"),
        (name(BASE + 120, ".timeindex"), "time_index_missing"),
        (name(5, ".index"), "orphan"),
        (name(7, ".timeindex"), "orphan"),
    ]


def test_an_empty_segment_needs_no_indexes(partition: Path) -> None:
    log(partition, 5000).write_bytes(b"")
    assert not check(partition, Disk()).findings


def test_files_that_are_left_alone(partition: Path) -> None:
    for other in ("leader-epoch-checkpoint", "partition.metadata", name(BASE, ".snapshot"), name(BASE, ".txnindex")):
        (partition / other).write_bytes(b"?")
    (partition / name(3, ".index.deleted")).write_bytes(b"?")
    (partition / name(3, ".log.swap")).write_bytes(b"?")
    report = check(partition, Disk())
    assert not report.findings
    assert [note.what for note in report.notes] == ["left_alone", "left_alone"]


@pytest.mark.parametrize(
    ("slot", "offset", "position", "what"),
    [
        (4, 14, 400, "offset_not_rising"),  # true, but it belongs further to the front
        (4, 3 * 20 + 1, 2000, "offset_mismatch"),  # not the last of the batch
        (4, 3 * 19 + 2, 1800, "offset_mismatch"),  # lookups would be right, but no set was written so
        (4, 3 * 20 + 2, 2100, "offset_mismatch"),  # the batch behind: lookups would skip it
        (4, 3 * 20 + 2, 2001, "position_not_at_batch"),
        (4, 3 * 20 + 2, 4000, "position_behind_log"),
        (4, 3 * 20 + 2, 1 << 30, "position_behind_log"),
        (4, -1, 2000, "offset_out_of_range"),
        (4, 3 * 20 + 2, -8, "offset_out_of_range"),
        (4, 0, 0, "offset_mismatch"),  # zeros in the middle
        (0, 0, 0, "offset_mismatch"),
        (8, 1 << 30, 3600, "offset_mismatch"),
    ],
)
def test_a_wrong_offset_entry(partition: Path, slot: int, offset: int, position: int, what: str) -> None:
    put(index(partition), slot, struct.pack(">ii", offset, position))
    report = check(partition, Disk())
    found = [(finding.file, finding.position, finding.what) for finding in report.findings.kept]
    if what == "offset_not_rising":
        assert (name(BASE, ".index"), 8 * slot, what) in found
    else:
        assert found == [(name(BASE, ".index"), 8 * slot, what)]


@pytest.mark.parametrize(
    ("slot", "timestamp", "offset", "what"),
    [
        (4, 1_700_000_000_101, 3 * 20 + 2, "time_mismatch"),
        (4, 1_700_000_000_100, 3 * 20 + 1, "time_offset_not_last"),
        (4, 1_700_000_000_087, 3 * 19 + 2, "time_not_first"),  # a falling one: a larger was before
        (4, 1_700_000_000_100, 3 * 400, "time_offset_behind_log"),
        (4, 1_700_000_000_100, -1, "time_out_of_range"),
        (4, -1, 3 * 20 + 2, "time_out_of_range"),
        (4, 0, 0, "time_offset_not_last"),
        (4, 1_700_000_000_010, 3 * 2 + 2, "time_not_rising"),
    ],
)
def test_a_wrong_time_entry(partition: Path, slot: int, timestamp: int, offset: int, what: str) -> None:
    put(times(partition), slot, struct.pack(">qi", timestamp, offset))
    report = check(partition, Disk())
    assert [(finding.file, finding.position, finding.what) for finding in report.findings.kept] == [
        (name(BASE, ".timeindex"), 12 * slot, what)
    ]


def test_a_time_entry_that_names_a_later_batch_with_the_same_time(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, [batch(i, i, 1000) for i in range(4)])
    log(tmp_path, 9).write_bytes(b"")
    times(tmp_path, 0).write_bytes(struct.pack(">qi", 1000, 1))
    assert whats(check(tmp_path, Disk())) == {"time_not_first"}


def test_sets_that_overlap(tmp_path: Path) -> None:
    write_segment(tmp_path, 0, [batch(i, i, -1, bytes(39)) for i in range(9)])
    log(tmp_path, 9).write_bytes(b"")
    index(tmp_path, 0).write_bytes(struct.pack(">6i", 4, 200, 6, 500, 8, 600))
    report = check(tmp_path, Disk())
    assert [(finding.position, finding.what) for finding in report.findings.kept] == [(16, "offset_not_rising")]


def test_the_time_of_a_damaged_batch_is_not_believed(partition: Path) -> None:
    edit(log(partition), lambda data: data[:2135] + b"\x70" + data[2136:])
    report = check(partition, Disk())
    assert [(finding.position, finding.what) for finding in report.findings.kept] == [(2100, "batch_crc")]


def test_sparser_and_denser_indexes_are_right(partition: Path) -> None:
    entries, more = recovered(BASE, some_batches(), 50)
    index(partition).write_bytes(entries)
    times(partition).write_bytes(more)
    assert not check(partition, Disk()).findings
    edit(index(partition), lambda data: data[:80] + data[120:])
    report = check(partition, Disk(), interval=300)
    assert not report.findings
    assert [(note.file, note.what) for note in report.notes] == [
        (name(BASE, ".index"), "differs"),
        (name(BASE, ".timeindex"), "differs"),
    ]
    with pytest.raises(UsageError):
        check(partition, Disk(), interval=-1)


def test_zeros_behind_the_entries(partition: Path) -> None:
    for base in (BASE, BASE + 120):
        edit(index(partition, base), lambda data: data + bytes(800))
        edit(times(partition, base), lambda data: data + bytes(1200))
    report = check(partition, Disk())
    assert [(finding.file, finding.position, finding.what) for finding in report.findings.kept] == [
        (name(BASE, ".index"), 72, "zero_tail"),
        (name(BASE, ".timeindex"), 120, "zero_tail"),
    ]
    assert [(note.file, note.what) for note in report.notes] == [
        (name(BASE + 120, ".index"), "not_closed"),
        (name(BASE + 120, ".timeindex"), "not_closed"),
    ]
    (partition.parent / ".kafka_cleanshutdown").write_bytes(b"")
    report = check(partition, Disk())
    assert (report.findings.counts["zero_tail"], report.notes) == (4, [])


@pytest.mark.parametrize("is_last", [False, True])
def test_the_newest_of_a_killed_broker_lacks_its_final_entry(partition: Path, is_last: bool) -> None:
    base = BASE + 120 if is_last else BASE
    edit(times(partition, base), lambda data: data[:-12])
    report = check(partition, Disk())
    assert whats(report) == (set() if is_last else {"time_last_not_largest"})
    assert notes(report) == ({"not_closed"} if is_last else set())


def test_an_emptied_time_index(partition: Path) -> None:
    for empty in (b"", bytes(12), bytes(120)):
        times(partition).write_bytes(empty)
        report = check(partition, Disk())
        assert whats(report) == ({"time_last_not_largest"} if not empty else {"zero_tail"})


def test_ragged_lengths(partition: Path) -> None:
    edit(index(partition), lambda data: data + b"\0\0\0")
    edit(times(partition, BASE + 120), lambda data: data + b"\0")
    report = check(partition, Disk())
    assert [(finding.position, finding.what) for finding in report.findings.kept] == [
        (72, "ragged_length"),
        (120, "ragged_length"),
    ]


def test_what_does_not_hold_in_a_log(partition: Path) -> None:
    data = log(partition).read_bytes()
    edit(log(partition), lambda data: data[:2050] + b"\x77" + data[2051:])
    report = check(partition, Disk())
    assert [(finding.file, finding.position, finding.what) for finding in report.findings.kept] == [
        (name(BASE, ".log"), 2000, "batch_crc")
    ]
    for change, what in (
        (data[:2008] + b"\x7f" + data[2009:], "log_half_batch"),
        (data[:-30], "log_half_batch"),
        (data + b"\xff" * 40, "log_corrupt"),
        (data + bytes(5000), "log_zeros"),
        (data[:2016] + b"\x09" + data[2017:], "batch_magic"),
        (data[:2007] + b"\x03" + data[2008:], "offset_not_rising"),
        (data[:2004] + b"\x03" + data[2005:], "offset_not_rising"),
        (data[:2000] + b"\xff" + data[2001:], "offset_foreign"),
    ):
        log(partition).write_bytes(change)
        assert what in whats(check(partition, Disk())), what


def test_a_preallocated_newest_log_is_normal(partition: Path) -> None:
    edit(log(partition, BASE + 120), lambda data: data + bytes(10_000))
    report = check(partition, Disk())
    assert (whats(report), notes(report)) == (set(), {"not_closed"})


def test_entries_behind_an_unreadable_place_are_not_judged(partition: Path) -> None:
    edit(log(partition), lambda data: data[:2008] + b"\xff" + data[2009:])
    report = check(partition, Disk())
    assert whats(report) == {"log_corrupt"}
    assert notes(report) == {"not_judged"}


def test_segments_that_overlap(partition: Path) -> None:
    write_segment(partition, BASE + 240, some_batches(base=BASE + 240)[:1])
    log(partition, BASE + 241).write_bytes(b"")
    assert whats(check(partition, Disk())) == {"segments_overlap"}


def test_a_long_tail_of_zeros_costs_nothing(partition: Path) -> None:
    with index(partition).open("r+b") as file:
        file.truncate(1 << 28)
    report = check(partition, Disk())
    assert [(finding.position, finding.what) for finding in report.findings.kept] == [(72, "zero_tail")]


def test_a_file_that_is_wrong_all_over_is_counted(partition: Path) -> None:
    index(partition).write_bytes(struct.pack(">ii", 7, 7) * 5000)
    report = check(partition, Disk())
    assert report.findings.counts["position_not_at_batch"] == 5000
    assert len(report.findings.kept) <= 1000


INDEX, TIMES = name(0, ".index"), name(0, ".timeindex")
# A segment that follows, so that the first one is sealed.
NEXT = name(5000, ".log")


def test_compacted_and_old_logs(tmp_path: Path) -> None:
    batches = [
        old_record(12, -1, bytes(50), magic=0),
        old_record(15, 700, bytes(80)),
        old_record(19, 600, bytes(90), attributes=1),
        batch(25, 40, 900, bytes(30)),
        batch(60, 90, 800, count=0),
        batch(95, 95, 1000, attributes=0x20),
    ]
    write_segment(tmp_path / "t-0", 10, batches, 0)
    write_segment(tmp_path / "t-0", 96, [])
    report = check(tmp_path / "t-0", Disk(), interval=0)
    assert (len(report.findings), report.notes, report.batches) == (0, [], 6)


def sets_of(batches: list[Batch], sizes: list[int]) -> list[list[Batch]]:
    """The batches in sets of these sizes, as calls of append carried them."""
    calls, taken = [], 0
    for size in sizes:
        calls.append(batches[taken : taken + size])
        taken += size
    return [call for call in (*calls, batches[taken:]) if call]


@given(st.lists(st.integers(1, 6), max_size=12), st.lists(st.integers(-40, 40), min_size=40, max_size=40))
def test_entries_of_sets_are_known_for_what_they_are(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], jitter: list[int]
) -> None:
    batches = [batch(3 * i, 3 * i + 2, 1000 + 5 * i + jitter[i], bytes(39)) for i in range(40)]
    entries, more = b"", b""
    since = position = 0
    largest, last_time, not_exact = (-1, 0), -1, 0
    for call in sets_of(batches, sizes):
        for one in call:
            if one.max_timestamp > largest[0]:
                largest = (one.max_timestamp, one.last_offset)
        if since > 300:
            entries += struct.pack(">ii", call[-1].last_offset, position)
            not_exact += len(call) > 1
            if largest[0] > last_time:
                more += struct.pack(">qi", *largest)
                last_time = largest[0]
            since = 0
        size = sum(one.size for one in call)
        since, position = since + size, position + size
    if largest[0] > last_time:
        more += struct.pack(">qi", *largest)
    path = tmp_path_factory.mktemp("sets")
    write_segment(path, 0, batches)
    (path / INDEX).write_bytes(entries)
    (path / TIMES).write_bytes(more)
    (path / NEXT).write_bytes(b"")
    report = check(path, Disk())
    assert not report.findings
    assert notes(report) == ({"entries_of_sets"} if not_exact else set())


@st.composite
def logs(draw: st.DrawFn) -> list[Batch]:
    batches: list[Batch] = []
    offset = draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 25))):
        last = offset + draw(st.integers(0, 3))
        batches.append(batch(offset, last, draw(st.integers(1, 60) | st.just(-1)), bytes(draw(st.integers(0, 60)))))
        offset = last + draw(st.integers(1, 3))
    return batches


@given(logs(), st.integers(0, 400), st.lists(st.tuples(st.integers(0, 40), st.integers(-2, 60), st.integers(-5, 3000))))
def test_each_wrong_entry_is_found(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Batch], interval: int, damage: list[tuple[int, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("damaged")
    write_segment(path, 0, batches, interval)
    (path / NEXT).write_bytes(b"")
    starts = positions(batches)
    for slot, offset, position in damage:
        near = starts[position % len(starts)] if position % 2 else position
        put_if_there(path / INDEX, slot, struct.pack(">ii", offset, near))
        put_if_there(path / TIMES, slot, struct.pack(">qi", position % 70, offset))
    report = check(path, Disk())
    found = {(finding.file, finding.position) for finding in report.findings.kept}
    entries = list(struct.iter_unpack(">ii", (path / INDEX).read_bytes()))
    for slot, (offset, position) in enumerate(entries):
        wrong = not true_offset_entry(0, batches, offset, position) and not of_a_set(batches, offset, position)
        assert not wrong or tail_from(entries, slot) or (INDEX, 8 * slot) in found
    pairs = list(struct.iter_unpack(">qi", (path / TIMES).read_bytes()))
    for slot, (timestamp, offset) in enumerate(pairs):
        wrong = not true_time_entry(batches, timestamp, offset)
        assert not wrong or tail_from(pairs, slot) or (TIMES, 12 * slot) in found
    for rows in (entries, pairs):
        keys = [row[0] for row in rows]
        assert keys == sorted(set(keys)) or report.findings
    if not damage:
        assert not found
    shutil.rmtree(path)


def of_a_set(batches: list[Batch], offset: int, position: int) -> bool:
    """Whether lookups from such an entry are right: a batch that ends with the offset, at or behind another's begin."""
    starts = positions(batches)
    ends = {one.last_offset: start for one, start in zip(batches, starts, strict=True)}
    return position in starts and ends.get(offset, -1) > position


def put_if_there(path: Path, slot: int, entry: bytes) -> None:
    data, start = path.read_bytes(), slot * len(entry)
    if start + len(entry) <= len(data):
        path.write_bytes(data[:start] + entry + data[start + len(entry) :])


def tail_from(rows: list[tuple[int, ...]], slot: int) -> bool:
    """Whether nothing but zeros follows: one finding says so for all of them."""
    return not any(any(row) for row in rows[slot:])


@given(st.binary(max_size=400), st.binary(max_size=60), st.binary(max_size=60))
def test_bytes_at_random(tmp_path_factory: pytest.TempPathFactory, one: bytes, other: bytes, third: bytes) -> None:
    path = tmp_path_factory.mktemp("random")
    for base in (0, 77):
        for suffix, data in ((".log", one), (".index", other), (".timeindex", third)):
            (path / name(base, suffix)).write_bytes(data)
    check(path, Disk(), interval=0)
    shutil.rmtree(path)
