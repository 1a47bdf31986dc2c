"""kafka check on segments at random: entries of sets, damage entry by entry, bytes that mean nothing."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.kafka.check import CheckReport, check
from indexd.storage.disk import Disk
from support.kafka_records import (
    Batch,
    batch,
    name,
    old_record,
    positions,
    true_offset_entry,
    true_time_entry,
    write_segment,
)

INDEX, TIMES = name(0, ".index"), name(0, ".timeindex")
# A segment that follows, so that the first one is sealed.
NEXT = name(5000, ".log")


def notes(report: CheckReport) -> set[str]:
    return {note.what for note in report.notes}


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
