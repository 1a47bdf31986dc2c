"""The kernel of sparse indexes against its plain twin: the entries of a segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexd.sparse.kernel import final_time_entry, new_state, segment_entries
from support.kafka_model import Entries

BATCHES = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 3), st.integers(-3, 40) | st.integers(-(2**63), 2**63 - 1)),
    max_size=40,
)


def columns(rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    return [np.array(column, dtype=np.int64) for column in zip(*rows, strict=True)]


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
