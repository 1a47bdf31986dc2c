"""Kafka's logs walked, their indexes checked against them entry by entry, and rebuilt: beside slow twins of each."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.errors import UsageError
from indexd.kafka.format import KafkaReport
from indexd.kafka.indexes import check, rebuild, recover_entries
from indexd.kafka.records import LogWalk
from indexd.storage.disk import Disk
from support.kafka_records import (
    Batch,
    batch,
    log_bytes,
    name,
    old_record,
    positions,
    recovered,
    segments,
    true_offset_entry,
    true_time_entry,
    write_segment,
)

BASE, LAST = 1000, 1120
LOG, INDEX, TIMES = (name(BASE, suffix) for suffix in (".log", ".index", ".timeindex"))
LAST_LOG, LAST_INDEX, LAST_TIMES = (name(LAST, suffix) for suffix in (".log", ".index", ".timeindex"))


def whats(report: KafkaReport) -> list[tuple[str, int, str]]:
    return [(finding.file, finding.position, finding.what) for finding in report.findings.kept]


def notes(report: KafkaReport) -> list[tuple[str, str]]:
    return [(note.file, note.what) for note in report.notes]


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.is_file()}


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
    write_segment(path, LAST, some_batches(base=LAST), 300)
    return path


#: File, position, bytes to be written there, None to end the file there; without a position: at its end, or remove it.
Edit = tuple[str, int | None, bytes | None]


def apply(partition: Path, edits: list[Edit]) -> None:
    for file, position, data in edits:
        path = partition / file
        path.touch()
        before = path.read_bytes()
        at = len(before) if position is None else position
        if data is not None:
            path.write_bytes(before[:at] + data + before[at + len(data) :])
        elif position is None:
            path.unlink()
        else:
            os.truncate(path, at % len(before) if at < 0 else at)


NOT_JUDGED = [(INDEX, "not_judged"), (TIMES, "not_judged")]
#: Of the batch at position 2000.
NO_ENTRIES = [(INDEX, 32, "offset_mismatch"), (TIMES, 48, "time_offset_not_last")]


def offset_entry(offset: int, position: int, what: str, slot: int = 4) -> Any:
    edits = [(INDEX, 8 * slot, struct.pack(">ii", offset, position))]
    return pytest.param(edits, [(INDEX, 8 * slot, what)], [], id=f"offset entry {slot} {offset} {position}")


def time_entry(timestamp: int, offset: int, what: str) -> Any:
    edits = [(TIMES, 48, struct.pack(">qi", timestamp, offset))]
    return pytest.param(edits, [(TIMES, 48, what)], [], id=f"time entry {timestamp} {offset}")


@pytest.mark.parametrize(
    ("edits", "found", "noted"),
    [
        ([], [], []),
        (
            [
                (INDEX, None, None),
                (LAST_TIMES, None, None),
                (name(5, ".index"), 0, b""),
                (name(7, ".timeindex"), 0, b"?"),
            ],
            [
                (INDEX, 0, "index_missing"),
                (LAST_TIMES, 0, "time_index_missing"),
                (name(5, ".index"), 0, "orphan"),
                (name(7, ".timeindex"), 0, "orphan"),
            ],
            [],
        ),
        ([(name(5000, ".log"), 0, b"")], [], []),  # an empty segment needs no indexes
        (
            [
                (file, 0, b"?")
                for file in (
                    "leader-epoch-checkpoint",
                    "partition.metadata",
                    name(BASE, ".snapshot"),
                    name(BASE, ".txnindex"),
                    name(3, ".index.deleted"),
                    name(3, ".log.swap"),
                )
            ],
            [],
            [(name(3, ".index.deleted"), "left_alone"), (name(3, ".log.swap"), "left_alone")],
        ),
        offset_entry(3 * 20 + 1, 2000, "offset_mismatch"),  # not the last of the batch
        offset_entry(3 * 19 + 2, 1800, "offset_mismatch"),  # lookups would be right, but no set was written so
        offset_entry(3 * 20 + 2, 2100, "offset_mismatch"),  # the batch behind: lookups would skip it
        offset_entry(3 * 20 + 2, 2001, "position_not_at_batch"),
        offset_entry(3 * 20 + 2, 4000, "position_behind_log"),
        offset_entry(3 * 20 + 2, 1 << 30, "position_behind_log"),
        offset_entry(-1, 2000, "offset_out_of_range"),
        offset_entry(3 * 20 + 2, -8, "offset_out_of_range"),
        offset_entry(0, 0, "offset_mismatch"),  # zeros in the middle
        offset_entry(0, 0, "offset_mismatch", 0),
        offset_entry(1 << 30, 3600, "offset_mismatch", 8),
        # True, but it belongs further to the front.
        ([(INDEX, 32, struct.pack(">ii", 14, 400))], [(INDEX, 32, "offset_not_rising")], []),
        time_entry(1_700_000_000_101, 3 * 20 + 2, "time_mismatch"),
        time_entry(1_700_000_000_100, 3 * 20 + 1, "time_offset_not_last"),
        time_entry(1_700_000_000_087, 3 * 19 + 2, "time_not_first"),  # a falling one: a larger was before
        time_entry(1_700_000_000_100, 3 * 400, "time_offset_behind_log"),
        time_entry(1_700_000_000_100, -1, "time_out_of_range"),
        time_entry(-1, 3 * 20 + 2, "time_out_of_range"),
        time_entry(0, 0, "time_offset_not_last"),
        time_entry(1_700_000_000_010, 3 * 2 + 2, "time_not_rising"),
        ([(LOG, 2135, b"\x70")], [(LOG, 2100, "batch_crc")], []),  # its time is not believed
        (
            [(file, None, bytes(1200)) for file in (INDEX, TIMES, LAST_INDEX, LAST_TIMES)],
            [(INDEX, 72, "zero_tail"), (TIMES, 120, "zero_tail")],
            [(LAST_INDEX, "not_closed"), (LAST_TIMES, "not_closed")],
        ),
        (
            [("../.kafka_cleanshutdown", 0, b""), (LAST_INDEX, None, bytes(800)), (LAST_TIMES, None, bytes(1200))],
            [(LAST_INDEX, 72, "zero_tail"), (LAST_TIMES, 120, "zero_tail")],
            [],
        ),
        # A broker that was killed: the newest lacks its final entry.
        ([(TIMES, -12, None)], [(TIMES, 96, "time_last_not_largest")], []),
        ([(LAST_TIMES, -12, None)], [], [(LAST_TIMES, "not_closed")]),
        ([(TIMES, 0, None)], [(TIMES, 0, "time_last_not_largest")], []),
        ([(TIMES, 0, bytes(120))], [(TIMES, 0, "zero_tail")], []),
        (
            [(INDEX, None, bytes(3)), (LAST_TIMES, None, b"\0")],
            [(INDEX, 72, "ragged_length"), (LAST_TIMES, 120, "ragged_length")],
            [],
        ),
        ([(LOG, 2050, b"\x77")], [(LOG, 2000, "batch_crc")], []),
        ([(LOG, 2008, b"\x7f")], [(LOG, 2000, "log_half_batch")], NOT_JUDGED),
        ([(LOG, -30, None)], [(LOG, 3900, "log_half_batch")], []),
        ([(LOG, None, b"\xff" * 40)], [(LOG, 4000, "log_corrupt")], []),
        ([(LOG, None, bytes(5000))], [(LOG, 4000, "log_zeros")], []),
        ([(LOG, 2016, b"\x09")], [(LOG, 2000, "batch_magic")], NOT_JUDGED),
        ([(LOG, 2007, b"\x03")], [(LOG, 2000, "offset_not_rising"), *NO_ENTRIES], []),
        (
            [(LOG, 2004, b"\x03")],
            [
                (LOG, 2100, "offset_not_rising"),
                *NO_ENTRIES,
                *((TIMES, position, "time_offset_not_last") for position in range(60, 120, 12)),
            ],
            [],
        ),
        ([(LOG, 2000, b"\xff")], [(LOG, 2000, "offset_foreign"), *NO_ENTRIES], []),
        ([(LAST_LOG, None, bytes(10_000))], [], [(LAST_LOG, "not_closed")]),  # preallocated
        # Behind an unreadable place entries are not judged.
        ([(LOG, 2008, b"\xff")], [(LOG, 2000, "log_corrupt")], NOT_JUDGED),
        ([(INDEX, 1 << 28, None)], [(INDEX, 72, "zero_tail")], []),  # costs nothing
    ],
)  # fmt: skip
def test_what_does_not_hold_is_found(
    partition: Path, edits: list[Edit], found: list[tuple[str, int, str]], noted: list[tuple[str, str]]
) -> None:
    apply(partition, edits)
    report = check(partition, Disk())
    assert (whats(report), notes(report)) == (found, noted)


def test_whole_segments_are_counted_and_nothing_is_written(partition: Path) -> None:
    before = Disk().stamps(partition)
    report = check(partition, Disk(), interval=300)
    assert Disk().stamps(partition) == before
    assert (whats(report), report.notes, report.partitions) == ([], [], 1)
    assert report.figures == {"segments": 2, "batches": 80, "entries": 2 * (9 + 10), "bytes": 8000}


def test_a_whole_log_directory(partition: Path) -> None:
    write_segment(partition.parent / "other-3", 0, some_batches(base=0))
    write_segment(partition.parent / "gone-1.0123-delete", 0, [])
    (partition.parent / "empty-0").mkdir()
    (partition.parent / "other-3" / name(0, ".index")).unlink()
    report = check(partition.parent, Disk())
    assert (report.partitions, report.figures["segments"]) == (2, 3)
    assert [finding.file for finding in report.findings.kept] == [f"other-3/{name(0, '.index')}"]


@pytest.mark.parametrize(
    ("batches", "file", "data", "found"),
    [
        # A later batch with the same time.
        ([batch(i, i, 1000) for i in range(4)], ".timeindex", struct.pack(">qi", 1000, 1), (0, "time_not_first")),
        # Sets that overlap.
        (
            [batch(i, i, -1, bytes(39)) for i in range(9)],
            ".index",
            struct.pack(">6i", 4, 200, 6, 500, 8, 600),
            (16, "offset_not_rising"),
        ),
    ],
)
def test_entries_that_another_segment_would_have(
    tmp_path: Path, batches: list[Batch], file: str, data: bytes, found: tuple[int, str]
) -> None:
    write_segment(tmp_path, 0, batches)
    (tmp_path / name(9, ".log")).write_bytes(b"")
    (tmp_path / name(0, file)).write_bytes(data)
    assert whats(check(tmp_path, Disk())) == [(name(0, file), *found)]


def test_sparser_and_denser_indexes_are_right(partition: Path) -> None:
    entries, more = recovered(BASE, some_batches(), 50)
    (partition / INDEX).write_bytes(entries[:80] + entries[120:])
    (partition / TIMES).write_bytes(more)
    report = check(partition, Disk(), interval=300)
    assert (whats(report), notes(report)) == ([], [(INDEX, "differs"), (TIMES, "differs")])


def test_segments_that_overlap(partition: Path) -> None:
    write_segment(partition, BASE + 240, some_batches(base=BASE + 240)[:1])
    (partition / name(BASE + 241, ".log")).write_bytes(b"")
    assert [what for _, _, what in whats(check(partition, Disk()))] == ["segments_overlap"]


def test_a_file_that_is_wrong_all_over_is_counted(partition: Path) -> None:
    (partition / INDEX).write_bytes(struct.pack(">ii", 7, 7) * 5000)
    report = check(partition, Disk())
    assert report.findings.counts["position_not_at_batch"] == 5000
    assert len(report.findings.kept) <= 1000


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
    assert (len(report.findings), report.notes, report.figures["batches"]) == (0, [], 6)


# An entry of time 0 at offset 0 is all zeros, as an unused one is.
@given(
    segments(old=False).filter(lambda found: found and found[0].max_timestamp != 0),
    st.integers(0, 400),
    st.lists(st.tuples(st.integers(0, 40), st.integers(-2, 60), st.integers(-5, 3000))),
)
def test_each_wrong_entry_is_found(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Batch], interval: int, damage: list[tuple[int, int, int]]
) -> None:
    path, index, times = tmp_path_factory.mktemp("damaged"), name(0, ".index"), name(0, ".timeindex")
    write_segment(path, 0, batches, interval)
    (path / name(5000, ".log")).write_bytes(b"")
    starts = positions(batches)
    for slot, offset, position in damage:
        near = starts[position % len(starts)] if position % 2 else position
        put_if_there(path / index, slot, struct.pack(">ii", offset, near))
        put_if_there(path / times, slot, struct.pack(">qi", position % 70, offset))
    report = check(path, Disk())
    found = {(finding.file, finding.position) for finding in report.findings.kept}
    for file, layout, is_true in ((index, ">ii", true_offset_entry), (times, ">qi", true_time_entry)):
        rows = list(struct.iter_unpack(layout, (path / file).read_bytes()))
        for slot, row in enumerate(rows):
            is_tail = not any(map(any, rows[slot:]))  # nothing but zeros follows: one finding says so for all of them
            assert is_true(batches, *row) or is_tail or (file, struct.calcsize(layout) * slot) in found
        keys = [row[0] for row in rows]
        assert keys == sorted(set(keys)) or report.findings
    assert damage or not found
    shutil.rmtree(path)


def put_if_there(path: Path, slot: int, entry: bytes) -> None:
    data, start = path.read_bytes(), slot * len(entry)
    if start + len(entry) <= len(data):
        path.write_bytes(data[:start] + entry + data[start + len(entry) :])


# --- rebuilt ---


@given(segments(500, step=1 << 20), st.integers(0, 1500), st.integers(61, 2000))
def test_as_the_slow_twin_makes_them(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Batch], interval: int, buffer_size: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "twin.log"
    path.write_bytes(log_bytes(batches))
    with Disk().open_read(path) as file:
        made = recover_entries(LogWalk(file, 500, buffer_size=buffer_size), 500, interval, 1 << 20)
    assert (made.index, made.time_index) == recovered(500, batches, interval)
    assert (made.end, made.batches) == (path.stat().st_size, len(batches))


@given(segments(500, step=1 << 20), st.integers(0, 500), st.data())
def test_up_to_the_first_batch_that_does_not_hold(
    tmp_path_factory: pytest.TempPathFactory, batches: list[Batch], interval: int, data: st.DataObject
) -> None:
    log = bytearray(log_bytes(batches))
    path = tmp_path_factory.mktemp("cut")
    sound = data.draw(st.integers(0, len(batches)))
    start = sum(one.size for one in batches[:sound])
    if sound < len(batches):
        one = batches[sound]
        first = 21 if one.data[16] == 2 else 17
        log[start + data.draw(st.integers(first, one.size - 1))] ^= 1
    write_segment(path, 500, batches)
    (path / name(500, ".log")).write_bytes(bytes(log))
    report = rebuild(path, Disk(), interval=interval)
    assert bool(report.findings) == (sound < len(batches))
    index, times = recovered(500, batches[:sound], interval)
    assert contents(path) == {
        name(500, ".index"): index,
        name(500, ".log"): bytes(log),
        name(500, ".timeindex"): times,
    }
    shutil.rmtree(path)


def test_nothing_is_written_where_nothing_is_wrong(partition: Path) -> None:
    before = Disk().stamps(partition)
    report = rebuild(partition, Disk(), interval=300)
    assert (len(report.findings), [row["changed"] for row in report.rows]) == (0, [False, False])
    assert Disk().stamps(partition) == before


def test_in_place_with_the_logs_owner_and_mode(partition: Path) -> None:
    whole = contents(partition)
    log, index, times = (partition / file for file in (LOG, INDEX, TIMES))
    log.chmod(0o640)
    if os.getuid() == 0:
        os.chown(log, 1234, 1235)
    (partition / (INDEX + ".tmp")).write_bytes(b"left behind by a crash")
    apply(partition, [(INDEX, None, None), (TIMES, None, bytes(120))])
    report = rebuild(partition, Disk(), interval=300)
    assert [row["changed"] for row in report.rows] == [True, False]
    assert contents(partition) == whole
    for path in (index, times):
        ours, theirs = path.stat(), log.stat()
        assert (ours.st_mode, ours.st_uid, ours.st_gid) == (theirs.st_mode, theirs.st_uid, theirs.st_gid)
    assert not check(partition, Disk()).findings


def test_elsewhere(partition: Path, tmp_path: Path) -> None:
    write_segment(tmp_path / "other-1", 7, [batch(7, 9, 5)])
    whole = contents(partition)
    (partition / INDEX).write_bytes(b"wrong")
    damaged = contents(partition)
    rebuild(partition, Disk(), out=tmp_path / "a" / "b", interval=300)
    assert contents(tmp_path / "a" / "b") == {key: data for key, data in whole.items() if key.endswith("index")}
    assert rebuild(partition.parent, Disk(), out=tmp_path / "c", interval=300).partitions == 2
    assert contents(tmp_path / "c" / "topic-0") == contents(tmp_path / "a" / "b")
    assert contents(partition) == damaged
    for same in (partition, partition / ".." / "topic-0"):
        with pytest.raises(UsageError, match="where the segments are"):
            rebuild(partition, Disk(), out=same)


def test_indexes_longer_than_the_broker_would_make_them_are_refused(partition: Path) -> None:
    with pytest.raises(UsageError, match="longer indexes"):
        rebuild(partition, Disk(), interval=0, max_index_size=8 * 38)
    assert not rebuild(partition, Disk(), interval=0, max_index_size=8 * 39).findings


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([batch(10, 10, 1), batch(12, 12, 2), batch(11, 11, 3)], "do not rise"),
        ([batch(10, 10, 1), batch(20, 20, 9), batch(12, 12, 9), batch(12, 12, 8)], "do not rise"),
        ([batch(10, 10, 1), batch(12, 12, 2), batch(12, 12, 3)], "do not rise"),
        ([batch(10, 10, 1), batch(9, 9, 2)], "relative to the segment's base"),
        ([batch(10, 10, 1), batch(11, 11 + (1 << 31) - 1, 2)], "relative to the segment's base"),
    ],
)
def test_what_recovery_itself_fails_at(partition: Path, batches: list[Batch], words: str) -> None:
    (partition / LOG).unlink()
    (partition / name(10, ".log")).write_bytes(log_bytes(batches))
    (partition / name(10, ".index")).write_bytes(b"as it was")
    report = rebuild(partition, Disk(), interval=0)
    assert [(problem.file, problem.what) for problem in report.findings.kept] == [(name(10, ".log"), "refused")]
    assert words in report.findings.kept[0].text
    assert (partition / name(10, ".index")).read_bytes() == b"as it was"
    assert [row["file"] for row in report.rows] == [LAST_LOG]


def test_zeros_of_a_preallocated_newest_log(partition: Path) -> None:
    for file, problems in ((LAST_LOG, 0), (LOG, 1)):
        apply(partition, [(file, None, bytes(3000))])
        report = rebuild(partition, Disk(), interval=300)
        assert len(report.findings) == problems
        assert notes(report) == [(LAST_LOG, "not_closed")]
