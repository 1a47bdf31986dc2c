"""``indexd verify`` of ConsumeQueues and sparse indexes, alone and beside the log: each damage is found, no more."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.consumequeue.format import UNIT_SIZE, QueueMark
from indexd.errors import CorruptDataError
from indexd.findings import KEPT_MAX, Findings
from indexd.flush.frontier import StoreCheckpoint
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles, segment_name
from indexd.verify import whole
from indexd.verify.whole import look
from support.beside_log import over_queues, spec, write
from support.commitlog_writer import CommitLogWriter
from support.daemon import indexd_here
from support.data_directory import SEGMENT, T0
from support.outputs import MESSAGES, UNITS, Built, build, copied, found, live_bytes
from support.queues import tree
from support.reopened import config_for, named_for, reopen, undisturbed
from support.small_log import QUEUE_FILE_SIZE, SEGMENT_SIZE, messages
from support.verifying import change, check, kinds


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("outputs"))


@pytest.fixture
def built(base: Built, tmp_path: Path) -> Built:
    return copied(base, tmp_path)


def test_nothing_is_wrong_and_nothing_is_changed(built: Built) -> None:
    before = tree(built.data)
    report = check(built.data)
    assert (kinds(report), report.notes) == ({}, [])
    assert tree(built.data) == before
    row = report.to_json()
    assert row["consumeQueues"] == len(built.marks) == 16
    assert row["consumeQueueUnits"] == sum(mark.max_offset for mark in built.marks)
    assert row["sparseSegments"] == len(built.sparse.segments) >= 3


@pytest.mark.parametrize(
    ("outputs", "there"),
    [
        ({"consume_queue": "false"}, {"sparse"}),
        ({"sparse": "false"}, {"consumequeue"}),
        ({"consume_queue": "false", "sparse": "false"}, set()),
        ({"sparse_interval": 0}, {"consumequeue", "sparse"}),
    ],
)
def test_outputs_that_are_not_built_are_not_asked_for(
    base: Built, tmp_path: Path, outputs: dict[str, object], there: set[str]
) -> None:
    data = undisturbed(config_for(base.store, tmp_path / "data", **outputs), tmp_path / "data")
    assert {path.name for path in data.iterdir()} & {"consumequeue", "sparse"} == there
    for deep in (False, True):
        report = check(data, deep=deep)
        assert (kinds(report), report.notes) == ({}, [])
        assert (bool(report.queues), bool(report.segments)) == ("consumequeue" in there, "sparse" in there)


def test_files_of_an_output_that_is_not_built_are_nobodys(built: Built) -> None:
    files = [path for name in ("consumequeue", "sparse") for path in (built.data / name).rglob("*") if path.is_file()]
    built.change_frontier(queues=None, sparse=None)
    (built.data / "checkpoint").unlink()
    report = check(built.data)
    assert kinds(report) == {"file-unnamed": len(files), "checkpoint": 1}
    assert {finding.file for finding in report.findings.kept} == {"checkpoint", *(built.name(path) for path in files)}


def queue(built: Built) -> QueueMark:
    """One with several files, the last of them with room behind its units."""
    return next(mark for mark in built.marks if mark.max_offset > 2 * UNITS and mark.max_offset % UNITS)


def test_queue_files_that_are_missing_cut_or_written_behind_their_end(built: Built) -> None:
    mark = queue(built)
    first, second, last = (built.queue_file(mark, unit) for unit in (0, UNITS, mark.max_offset))
    first.unlink()
    os.truncate(second, 100)
    end = mark.max_offset % UNITS * UNIT_SIZE
    change(last, end + 1, b"\1")
    (last.parent / "00000000000009999600").write_bytes(b"")
    (last.parent.parent / "99").mkdir()
    (last.parent.parent / "99" / "00000000000000000000").write_bytes(b"")
    (last.parent / "notes").write_text("mine")
    assert sorted(found(check(built.data))) == sorted(
        [
            (built.name(first), 0, "file-missing"),
            (built.name(second), 100, "file-size"),
            (built.name(last), end + 1, "behind-last-unit"),
            (built.name(last.parent / "00000000000009999600"), 0, "file-unnamed"),
            (built.name(last.parent.parent / "99" / "00000000000000000000"), 0, "file-unnamed"),
        ]
    )


SEALED, GROWING = 1, -1


def plus(row: Any, at: int, by: int) -> Any:
    return type(row)(*row[:at], row[at] + by, *row[at + 1 :])


@pytest.mark.parametrize("segment", [SEALED, GROWING])
@pytest.mark.parametrize(
    ("width", "member", "value", "kinds_of"),
    [
        (8, 0, lambda own, before: -1, {"entry-offset"}),
        (8, 0, lambda own, before: 1 << 30, {"entry-offset", "entry-order"}),
        (8, 0, lambda own, before: before, {"entry-order"}),
        (8, 1, lambda own, before: -1, {"entry-position"}),
        (8, 1, lambda own, before: SEGMENT_SIZE, {"entry-position", "entry-distance"}),
        (8, 1, lambda own, before: before + 1000, {"entry-distance"}),
        (12, 0, lambda own, before: before, {"entry-order"}),
        (12, 1, lambda own, before: -1, {"entry-offset"}),
        (12, 1, lambda own, before: before, {"entry-order"}),
    ],
)
def test_an_entry_that_cannot_be(
    built: Built, segment: int, width: int, member: int, value: Callable[[int, int], int], kinds_of: set[str]
) -> None:
    path = built.pair(segment)[width == 12]
    numbers = list(struct.iter_unpack(">ii" if width == 8 else ">qi", path.read_bytes()))
    at, code = 5 * width + (width - 4 if member else 0), ">q" if (width, member) == (12, 0) else ">i"
    change(path, at, struct.pack(code, value(numbers[5][member], numbers[4][member])))
    report = check(built.data)
    assert {(file, kind) for file, _, kind in found(report)} == {(built.name(path), kind) for kind in kinds_of}
    assert found(report)[0][1] == at
    assert len(report.findings) <= 2
    assert "entry 5: " in report.findings.kept[0].text


def test_sparse_files_that_are_missing_cut_too_long_or_not_named(built: Built) -> None:
    (missing, long), (cut, _) = built.pair(0), built.pair(1)
    missing.unlink()
    wanted = long.stat().st_size
    os.truncate(long, wanted + 5)
    os.truncate(cut, 20)
    extra = missing.with_name(f"{SEGMENT_SIZE * 77:020d}.index")
    extra.write_bytes(b"")
    missing.with_name("notes").write_text("mine")
    missing.with_name(missing.name + ".deleted").write_text("another's")
    assert sorted(found(check(built.data))) == sorted(
        [
            (built.name(missing), 0, "file-missing"),
            (built.name(long), wanted, "file-size"),
            (built.name(cut), 20, "file-size"),
            (built.name(extra), 0, "file-unnamed"),
        ]
    )


def test_what_stands_behind_the_entries_of_the_growing_pair(built: Built) -> None:
    *_, mark = built.sparse.segments
    offsets, times = built.pair(GROWING)
    change(offsets, mark.offset_entries * 8 + 3, b"\7")
    change(times, times.stat().st_size - 1, b"\7")
    wanted = [
        (built.name(offsets), mark.offset_entries * 8 + 3, "behind-last-entry"),
        (built.name(times), times.stat().st_size - 1, "behind-last-entry"),
    ]
    assert found(check(built.data)) == wanted
    (built.data / "abort").write_bytes(b"1")
    assert found(check(built.data)) == []


@pytest.mark.parametrize("size", [-20, 0, 1, 1190, 1 << 40])
def test_queue_files_of_no_possible_size(built: Built, size: int) -> None:
    built.change_frontier(queue_file_size=size)
    with pytest.raises(CorruptDataError, match="is no frontier"):
        check(built.data, deep=True)


@pytest.mark.parametrize("field", [1, 2, 3])
def test_counts_that_no_index_can_hold(built: Built, field: int) -> None:
    sparse = built.sparse
    first, second, *others = sparse.segments
    built.change_frontier(sparse=sparse._replace(segments=(first, plus(second, field, 1 << 40), *others)))
    with pytest.raises(CorruptDataError, match="is no frontier"):
        check(built.data)


def test_a_growing_pair_that_the_frontier_calls_sealed_and_the_opposite(built: Built) -> None:
    sparse = built.sparse
    built.change_frontier(sparse=sparse._replace(active=None))
    assert kinds(check(built.data)) == {"file-size": 2}
    built.change_frontier(sparse=sparse._replace(segments=sparse.segments[:-1]))
    assert "segment-end" in kinds(check(built.data))


def test_wrong_all_over_is_counted_and_cut_off(built: Built) -> None:
    for path in (built.data / "consumequeue").rglob("0" * 10 + "*"):
        path.write_bytes(b"\xff" * QUEUE_FILE_SIZE)
    for path in (built.data / "sparse").iterdir():
        path.write_bytes(b"\x81" * path.stat().st_size)
    report = check(built.data)
    assert kinds(report)["unit-phy-offset"] == sum(mark.max_offset for mark in built.marks)
    assert len(report.findings) > 4000
    assert len(report.findings.kept) <= 2 * KEPT_MAX
    assert len(indexd_here("verify", "--data", built.data).stdout.splitlines()) < 200


def test_a_file_as_long_as_a_disk_takes_no_memory(built: Built) -> None:
    for path in (built.queue_file(queue(built), 0), built.pair(0)[0], built.pair(-1)[1]):
        os.truncate(path, 1 << 40)
    assert kinds(check(built.data)) == {"file-size": 2}


def test_the_command(built: Built) -> None:
    done = indexd_here("verify", "--data", built.data)
    units = f"{sum(mark.max_offset for mark in built.marks):,} units of 16 queues"
    assert (done.returncode, units in done.stdout, "sparse indexes of 4 segments" in done.stdout) == (0, True, True)
    assert "not compared with the log (--deep)" in done.stdout
    assert done.stdout.endswith(" s: no findings\n")
    path = built.queue_file(queue(built), 0)
    change(path, 48, bytes(4))
    done = indexd_here("verify", "--data", built.data)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{built.name(path)} byte 48: unit 2: the size 0 is not more than 0\n")
    assert done.stdout.endswith(" s: 1 finding\n")
    done = indexd_here("verify", "--data", built.data, "--json")
    finding, summary = (json.loads(line) for line in done.stdout.splitlines())
    assert (finding["kind"], finding["file"], finding["position"], finding["what"]) == (
        *("finding", built.name(path), 48, "unit-size"),
    )
    assert (summary["kind"], summary["findings"], summary["counts"]) == ("summary", 1, {"unit-size": 1})
    assert (done.returncode, summary["deep"]) == (1, False)


@pytest.mark.parametrize("block", [bytes(4000), bytes(range(200)) * 20, b"\xff" * 4000])
def test_a_damaged_block_of_the_key_index(built: Built, block: bytes) -> None:
    path = sorted((built.data / "index").iterdir())[1]
    change(path, built.frontier.layout.entry_position(300), block)
    report = check(built.data, deep=True)
    counts = report.findings.counts
    assert counts["key-without-entry"] == 200
    assert counts["entry-without-message"] + counts["entry-twice"] + counts["entry-without-key"] == 200
    assert report.compared is not None
    assert report.compared.messages == MESSAGES


def test_every_byte_is_held_against_the_log(built: Built) -> None:
    rand, rows = random.Random(6), live_bytes(built)
    for path, size in [rows[0], rows[-1], rows[-2], *rand.choices(rows, k=40)]:
        position = rand.randrange(size)
        data = path.read_bytes()
        change(path, position, bytes([data[position] ^ 1 << rand.randrange(8)]))
        report = check(built.data, deep=True)
        width = UNIT_SIZE if "consumequeue" in path.parts else 8 if path.suffix == ".index" else 12
        wanted = (built.name(path), position // width * width, "unit-log" if width == UNIT_SIZE else "entry-log")
        assert wanted in found(report), (path, position)
        assert len(report.findings) <= 4
        assert {finding.file for finding in report.findings.kept} == {built.name(path)}
        path.write_bytes(data)
    assert kinds(check(built.data, deep=True)) == {}


@pytest.mark.parametrize(("field", "by"), [(3, 1), (4, -1), (4, 1), (5, -1), (5, 1)])
def test_each_number_of_a_queue(built: Built, field: int, by: int) -> None:
    marks = built.marks
    built.change_frontier(queues=(*marks[:3], plus(marks[3], field, by), *marks[4:]))
    assert kinds(check(built.data, deep=True))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("by", [-1, 1])
def test_each_number_of_a_segment_and_of_the_growing_one(built: Built, number: int, by: int) -> None:
    sparse = built.sparse
    for at in (1, -1) if number else ():
        segments = list(sparse.segments)
        segments[at] = plus(segments[at], number, by)
        built.change_frontier(sparse=sparse._replace(segments=tuple(segments)))
        assert kinds(check(built.data, deep=True))
    built.change_frontier(sparse=sparse._replace(active=plus(sparse.active, number, by)))
    assert kinds(check(built.data, deep=True))


def test_units_called_expired_that_the_log_still_has(built: Built) -> None:
    marks = list(built.marks)
    marks[2] = marks[2]._replace(min_offset=5)
    built.change_frontier(queues=tuple(marks))
    report = check(built.data, deep=True)
    assert found(report) == [(built.name(built.queue_file(marks[2], 0)), 0, "queue-min")]
    assert "is in the log, and called expired" in report.findings.kept[0].text


def test_queues_and_segments_that_the_frontier_leaves_out(built: Built) -> None:
    sparse = built.sparse
    mark, segment = built.marks[0], sparse.segments[1]
    (built.data / "abort").write_bytes(b"1")
    segments = tuple(one for one in sparse.segments if one != segment)
    built.change_frontier(queues=built.marks[1:], sparse=sparse._replace(segments=segments))
    report = check(built.data, deep=True)
    assert found(report) == [
        (built.name(built.queue_file(mark, 0)), 0, "unit-log"),
        (built.name(built.pair_of(segment.base)[0]), 0, "entry-log"),
    ]
    assert "the unit is none" in report.findings.kept[0].text
    assert "the frontier says nothing of the segment" in report.findings.kept[1].text


def test_after_an_unclean_stop_what_is_behind_the_marks_is_nobodys(built: Built) -> None:
    (built.data / "abort").write_bytes(b"1")
    mark = next(mark for mark in built.marks if mark.max_offset % UNITS)
    change(built.queue_file(mark, mark.max_offset), mark.max_offset % UNITS * UNIT_SIZE, b"\x07" * UNIT_SIZE)
    change(built.pair(-1)[0], built.sparse.segments[-1].offset_entries * 8, b"\x07" * 8)
    for name in ("Topic/0", "TopicTest/77"):
        (built.data / "consumequeue" / name).mkdir(parents=True)
        (built.data / "consumequeue" / name / f"{0:020d}").write_bytes(b"half")
    (built.data / "sparse" / f"{SEGMENT_SIZE * 50:020d}.timeindex").write_bytes(b"")
    assert kinds(check(built.data, deep=True)) == {}


def expire(built: Built, segments: int, store: Path) -> None:
    """The same log without its first segments, and a data directory that still knows all of it."""
    shutil.copytree(built.store, store)
    for number in range(segments):
        (store / "commitlog" / segment_name(number * SEGMENT_SIZE)).unlink()
    built.change_frontier(commit_log_paths=(str(store / "commitlog"),))


@pytest.mark.parametrize("segments", [1, 3])
def test_messages_that_have_expired(built: Built, segments: int) -> None:
    expire(built, segments, built.root / "expired")
    report = check(built.data, deep=True)
    assert kinds(report) == {}
    assert "which have expired" in " ".join(report.notes)
    # Damage to units of messages that the log still has is found, to others it is not, but to their order.
    last = built.queue_file(built.marks[0], built.marks[0].max_offset - 1)
    change(last, (built.marks[0].max_offset - 1) % UNITS * UNIT_SIZE + 15, b"\x09")
    change(built.queue_file(built.marks[1], 0), 15, b"\x09")
    assert [(file, what) for file, _, what in found(check(built.data, deep=True))] == [(built.name(last), "unit-log")]


@pytest.mark.parametrize("segments", [1, 3])
def test_files_that_went_with_them(built: Built, segments: int) -> None:
    store = built.root / "expired"
    expire(built, segments, store)
    named_for(store, built.data)
    write(store, over_queues(5, 2), SEGMENT_SIZE)
    reopen(config_for(store, built.data, sparse_interval=1000))
    assert built.sparse.segments[0].base == segments * SEGMENT_SIZE
    report = check(built.data, deep=True)
    assert kinds(report) == {}
    if segments > 1:
        assert max(mark.first_offset for mark in built.marks) > 0


def test_an_output_that_was_asked_for_later(built: Built) -> None:
    config = config_for(built.store, built.data, sparse_interval=1000, consume_queue="false")
    reopen(config)
    assert built.frontier.queues is None
    assert kinds(check(built.data, deep=True)) == {}
    reopen(config_for(built.store, built.data, sparse_interval=1000))
    report = check(built.data, deep=True)
    assert (kinds(report), report.notes) == ({}, [])
    assert report.queues == 16


def test_verified_while_other_outputs_are_asked_for(built: Built, base: Built) -> None:
    for flags in (("--consume-queue", "false", "--sparse", "false"), ("--sparse", "false")):
        done = indexd_here("verify", "--deep", "--data", built.data, *flags)
        assert (done.returncode, "units of 16 queues" in done.stdout) == (0, True), done.stdout


def test_a_refill_that_was_broken_off(built: Built) -> None:
    built.change_frontier(refill_offset=SEGMENT_SIZE)
    frontier = built.frontier
    full = [mark for mark in frontier.index if mark.full]
    times = (frontier.store_timestamp, 0, full[-1].header.end_timestamp)
    (built.data / "checkpoint").write_bytes(StoreCheckpoint(*times, 0, frontier.phy_offset).pack())
    (built.data / "abort").write_bytes(b"1")
    change(built.queue_file(built.marks[0], 0), 15, b"\x09")
    report = check(built.data, deep=True)
    assert kinds(report) == {}
    assert f"they are filled up to {SEGMENT_SIZE} only" in " ".join(report.notes)


def test_ranges_that_are_not_covered(tmp_path: Path) -> None:
    store, data = tmp_path / "store", tmp_path / "data"
    with CommitLogWriter(store / "commitlog", SEGMENT_SIZE) as writer:
        offsets = [writer.append(message) for message in islice(messages(3), 2000)]
    segment = store / "commitlog" / segment_name(0)
    whole = segment.read_bytes()
    change(segment, offsets[300] + 20, bytes(offsets[310] - offsets[300]))
    config = config_for(store, data, on_corrupt="skip", sparse_interval=1000)
    undisturbed(config, data)
    built = Built(store, data)
    assert len(built.frontier.uncovered) == 1
    report = check(data, deep=True)
    assert (kinds(report), "not covered" in report.notes[0]) == ({}, True)
    # Nor is what stands there held against them once it can be read again.
    segment.write_bytes(whole)
    assert kinds(check(data, deep=True)) == {}
    # But what is behind it is compared.
    path, size = live_bytes(built)[0]
    change(path, size - 3, b"\x55")
    assert (built.name(path), size - UNIT_SIZE, "unit-log") in found(check(data, deep=True))


@pytest.mark.parametrize(
    ("which", "text"),
    [
        ("index", "which is gone or too short"),
        ("queue", "1 queues were not compared to their ends"),
        ("sparse", "2 files of sparse indexes"),
    ],
)
def test_files_that_expire_while_they_are_compared(built: Built, which: str, text: str) -> None:
    owner, findings, told = look(Disk(), DataFiles(built.data)), Findings(), list[int]()
    gone = {"index": [min((built.data / "index").iterdir())], "queue": [built.queue_file(built.marks[0], 0)]}
    for path in gone.get(which, built.pair(0)):
        path.unlink()
    compared = whole.DeepComparison(config_for(built.store, built.data), Disk(), owner, findings).run(told.append)
    assert (len(findings), text in " ".join(compared.left_out)) == (0, True)
    # Messages of index files that are gone are not those that have no entries.
    assert compared.left_out_entries + compared.entries == sum(mark.header.entries for mark in owner.frontier.index)
    assert sum(told) == owner.frontier.phy_offset


def test_another_interval_of_broken_bytes_ends_the_comparison(built: Built) -> None:
    store = built.root / "torn"
    shutil.copytree(built.store, store)
    change(store / "commitlog" / segment_name(SEGMENT_SIZE), 5000, bytes(3000))
    built.change_frontier(commit_log_paths=(str(store / "commitlog"),))
    report = check(built.data, deep=True)
    assert kinds(report) == {}
    assert "queues and sparse indexes were not compared from there on" in " ".join(report.notes)
    # What came before it was.
    change(built.queue_file(built.marks[0], 0), 15, b"\x09")
    assert kinds(check(built.data, deep=True)) == {"unit-log": 1}


@settings(max_examples=25)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(-3, 9), st.integers(0, 900), st.integers(-50, 50)), max_size=60
    ),
    begins=st.lists(st.sampled_from([0, 0, 1, 3, 4, 8, 1000]), min_size=4, max_size=4),
    interval=st.sampled_from([0, 1, 300, 4096]),
    upto=st.integers(0, 3),
)
def test_whatever_a_broker_writes_nothing_is_wrong(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[int, int, int, int]],
    begins: list[int],
    interval: int,
    upto: int,
) -> None:
    """Queues that start late, queue offsets that repeat or jump, clocks that go back, segments that expire."""
    root = tmp_path_factory.mktemp("any")
    store, data = root / "store", root / "data"
    with CommitLogWriter(store / "commitlog", SEGMENT) as writer:
        for number, (queue, step, body, time) in enumerate(rows):
            key = ("T", queue)
            known = writer.queue_offsets.get(key, begins[queue])
            writer.queue_offsets[key] = max(known + (step if step in (-1, 2) else 0), 0)
            writer.append(spec(number, "T", queue, time=T0 + time, body=body))
    config = config_for(store, data, segment_size=SEGMENT, consume_queue_file_size=80, sparse_interval=interval)
    undisturbed(config, data)
    for segment in sorted((store / "commitlog").iterdir())[:-1][:upto]:
        segment.unlink()
    for deep_too in (False, True):
        report = check(data, deep=deep_too)
        assert kinds(report) == {}
