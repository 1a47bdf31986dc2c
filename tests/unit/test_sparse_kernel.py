"""The kernels of sparse indexes against plain twins: entries of a segment, many lookups, many appends."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.errors import IndexdError
from indexd.sparse.format import OFFSET_ENTRY, TIME_ENTRY
from indexd.sparse.kernel import final_time_entry, message_entries, new_state, segment_entries
from indexd.sparse.offset_index import OffsetIndex
from indexd.sparse.table import OffsetTable, TimeTable, append_offsets, append_times, load_kernels
from indexd.sparse.time_index import TimeIndex
from indexd.storage.disk import Disk
from support.kafka_model import Entries
from support.sparse_log import SEGMENT_SIZE, Row, batch_of, log_rows

INT64S = st.one_of(st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1))
INT32S = st.one_of(st.integers(-3, 40), st.integers(-(2**31), 2**31 - 1))
BASES = st.sampled_from([0, 1, 20, 1 << 40, 2**63 - 1, 2**63 - 2**31, -5])
BATCHES = st.lists(st.tuples(st.integers(1, 500), st.integers(1, 3), st.one_of(INT64S, st.integers(0, 9))), max_size=40)


def columns(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]


# --- the segment's rule ---


@given(BATCHES, st.sampled_from([0, 1, 100, 499, 500, 4096]), st.integers(1, 7), st.integers(1, 5))
def test_batches_of_a_segment(batches: list[tuple[int, int, int]], interval: int, split: int, room: int) -> None:
    rows, position, offset = [], 0, -1
    twin = Entries(interval)
    for size, count, timestamp in batches:
        offset += count
        rows.append((position, size, offset, timestamp))
        twin.put(position, size, offset, timestamp)
        position += size
    state = new_state()
    offsets: list[tuple[int, ...]] = []
    times: list[tuple[int, ...]] = []
    at = 0
    while at < len(rows):
        offset_entries, time_entries = np.empty((room, 2), np.int64), np.empty((room, 2), np.int64)
        end = min(at + split, len(rows))
        at, offset_count, time_count = segment_entries(
            *columns(rows), at, end, interval, state, offset_entries, time_entries
        )
        offsets += map(tuple, offset_entries[:offset_count].tolist())
        times += map(tuple, time_entries[:time_count].tolist())
    assert (offsets, times) == (twin.offsets, twin.times)
    last = final_time_entry(state)
    twin.roll()
    assert times + ([] if last is None else [last]) == twin.times
    assert final_time_entry(state) is None
    assert state[4] == len(rows)


@given(log_rows(), st.sampled_from([0, 91, 1000]), st.integers(1, 4))
def test_messages_of_a_segment_and_no_other(rows: list[Row], interval: int, room: int) -> None:
    base = rows[0][0] // SEGMENT_SIZE * SEGMENT_SIZE
    twin = Entries(interval)
    own = [row for row in rows if row[0] < base + SEGMENT_SIZE]
    for ordinal, (phy_offset, size, timestamp) in enumerate(own):
        twin.put(phy_offset - base, size, ordinal, timestamp)
    batch, state, at = batch_of(rows).columns, new_state(), 0
    offsets: list[tuple[int, ...]] = []
    times: list[tuple[int, ...]] = []
    while True:
        windows = np.empty((room, 2), np.int64), np.empty((room, 2), np.int64)
        taken, offset_count, time_count = message_entries(
            batch,
            at,
            len(rows),
            base,
            base + SEGMENT_SIZE,
            interval,
            state,
            *windows,
        )
        offsets += map(tuple, windows[0][:offset_count].tolist())
        times += map(tuple, windows[1][:time_count].tolist())
        if taken == at:
            break
        at = int(taken)
    assert at == len(own) == state[4]
    assert (offsets, times) == (twin.offsets, twin.times)


# --- lookups ---


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@given(st.lists(st.tuples(INT32S, INT32S), max_size=60), BASES, st.booleans(), st.lists(INT64S, max_size=40))
def test_offset_lookups_are_the_classes_own(
    entries: list[tuple[int, int]], base: int, is_sorted: bool, targets: list[int]
) -> None:
    entries = sorted(dict(entries).items()) if is_sorted else entries
    data = b"".join(OFFSET_ENTRY.pack(*entry) for entry in entries)
    near = [(base + entry[0] + step + 2**63) % 2**64 - 2**63 for entry in entries[:20] for step in (-1, 0, 1)]
    targets += near
    offsets, positions = OffsetTable(data, base).lookup(np.array(targets, dtype=np.int64))
    with (
        tempfile.TemporaryDirectory() as name,
        OffsetIndex.open(Disk(), written(Path(name, "x"), data), base, writable=False) as index,
    ):
        expected = [tuple(index.lookup(target)) for target in targets]
    assert list(zip(offsets.tolist(), positions.tolist(), strict=True)) == expected


@given(st.lists(st.tuples(INT64S, INT32S), max_size=60), BASES, st.booleans(), st.lists(INT64S, max_size=40))
def test_time_lookups_are_the_classes_own(
    entries: list[tuple[int, int]], base: int, is_sorted: bool, targets: list[int]
) -> None:
    entries = sorted(dict(entries).items()) if is_sorted else entries
    data = b"".join(TIME_ENTRY.pack(*entry) for entry in entries)
    targets += [entry[0] for entry in entries]
    timestamps, offsets = TimeTable(data, base).lookup(np.array(targets, dtype=np.int64))
    with (
        tempfile.TemporaryDirectory() as name,
        TimeIndex.open(Disk(), written(Path(name, "x"), data), base, writable=False) as index,
    ):
        expected = [tuple(index.lookup(target)) for target in targets]
    assert list(zip(timestamps.tolist(), offsets.tolist(), strict=True)) == expected


@pytest.mark.parametrize("used", [0, 1, 1023, 1024, 1025, 1026, 1500, 3000])
@pytest.mark.parametrize("unused", [0, 1, 1300])
def test_lookups_around_the_warm_part_and_into_unused_slots(used: int, unused: int, tmp_path: Path) -> None:
    data = b"".join(OFFSET_ENTRY.pack(3 * number + 3, number) for number in range(used)) + bytes(8 * unused)
    targets = np.arange(-2, 3 * used + 5, 1 + used // 500, dtype=np.int64)
    offsets, positions = OffsetTable(data, 0).lookup(targets)
    with OffsetIndex.open(Disk(), written(tmp_path / "x", data), 0, writable=False) as index:
        expected = [tuple(index.lookup(target)) for target in targets.tolist()]
    assert list(zip(offsets.tolist(), positions.tolist(), strict=True)) == expected


# --- appends ---


@given(st.lists(st.tuples(INT64S, INT64S), max_size=30), st.integers(0, 3), st.sampled_from([0, 5, 2**63 - 10, -5]))
def test_many_offsets_are_appended_as_one_by_one(rows: list[tuple[int, int]], sorts: int, base: int) -> None:
    rows = sorted(rows) if sorts else rows
    offsets, positions = columns(rows) if rows else (np.empty(0, np.int64), np.empty(0, np.int64))
    with tempfile.TemporaryDirectory() as name:
        one = OffsetIndex.open(Disk(), Path(name, "one"), base, 8 * 20)
        many = OffsetIndex.open(Disk(), Path(name, "many"), base, 8 * 20)
        errors = []
        for append in (
            lambda: [one.append(*row) for row in rows],
            lambda: append_offsets(many, offsets, positions),
        ):
            try:
                append()
                errors.append(None)
            except IndexdError as error:
                errors.append((type(error), str(error).replace("/one", "/many")))
        assert errors[0] == errors[1]
        assert (one.entries, one.last_entry) == (many.entries, many.last_entry)
        assert Path(name, "one").read_bytes() == Path(name, "many").read_bytes()
        one.close()
        many.close()


@given(st.lists(st.tuples(INT64S, INT64S), max_size=30), st.integers(0, 3), st.sampled_from([0, 5, 2**63 - 10, -5]))
def test_many_times_are_appended_as_one_by_one(rows: list[tuple[int, int]], sorts: int, base: int) -> None:
    if sorts:
        rows = list(zip(sorted(row[0] for row in rows), sorted(row[1] for row in rows), strict=True))
    timestamps, offsets = columns(rows) if rows else (np.empty(0, np.int64), np.empty(0, np.int64))
    with tempfile.TemporaryDirectory() as name:
        one = TimeIndex.open(Disk(), Path(name, "one"), base, 12 * 20)
        many = TimeIndex.open(Disk(), Path(name, "many"), base, 12 * 20)
        errors = []
        for append in (
            lambda: [one.maybe_append(*row) for row in rows],
            lambda: append_times(many, timestamps, offsets),
        ):
            try:
                append()
                errors.append(None)
            except IndexdError as error:
                errors.append((type(error), str(error).replace("/one", "/many")))
        assert errors[0] == errors[1]
        assert (one.entries, one.last_entry) == (many.entries, many.last_entry)
        assert Path(name, "one").read_bytes() == Path(name, "many").read_bytes()
        one.close()
        many.close()


def test_load_kernels_writes_what_it_should() -> None:
    load_kernels()
    out = np.empty((1, 2), np.uint32)
    from indexd.sparse.lookup_kernel import encode_offsets

    one = np.array([7], np.int64)
    assert encode_offsets(one, np.array([-2], np.int64), np.int64(0), False, np.int64(0), out) == 1
    assert out.tobytes() == struct.pack(">ii", 7, -2)
