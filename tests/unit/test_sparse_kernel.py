"""The kernels of sparse indexes against plain twins: entries of a segment, many lookups, many appends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexd.sparse.kernel import final_time_entry, message_entries, new_state, segment_entries
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
