"""Sorting rows by bucket and finding the first row of each queue, against their plain twins."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from indexd.consumequeue.format import OFFSET_MAX
from indexd.spark.rebuild.run_format import bucket_of, topic_hash
from indexd.spark.rebuild.runs_kernel import BUCKETS, first_rows, sort_rows

TOPICS = [b"T", b"Other", "订单".encode(), b"T\xff"]
ROWS = st.lists(
    st.tuples(
        st.integers(0, len(TOPICS) - 1),
        st.sampled_from([0, 1, 2, -1, 7, 2**31 - 1, -(2**31)]),
        st.sampled_from([0x0, 0x4, 0x8, 0xC, 0x80, 0x84, -1, -(2**31)]),
        st.sampled_from([0, 5, -1, OFFSET_MAX, OFFSET_MAX + 1, -(2**63), 2**63 - 1]),
    ),
    max_size=60,
)
Row = tuple[int, int, int, int]


def enters(row: Row) -> bool:
    return row[2] & 0xC in (0x0, 0x8)


def begins(row: Row) -> bool:
    return enters(row) and not row[2] & 0x80 and 0 <= row[3] <= OFFSET_MAX


def columns(rows: list[Row]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    kinds = (np.int32, np.int32, np.int32, np.int64)
    return tuple(np.array([row[at] for row in rows], dtype=kind) for at, kind in enumerate(kinds))  # type: ignore[return-value]


@given(ROWS)
def test_rows_by_bucket_in_log_order(rows: list[Row]) -> None:
    topic_ids, queue_ids, flags, _ = columns(rows)
    hashes = np.array([topic_hash(topic) for topic in TOPICS], dtype=np.uint32)
    buckets = np.empty(len(rows), dtype=np.uint8)
    starts, order = np.zeros(BUCKETS + 1, dtype=np.uint32), np.full(len(rows), 0xFFFFFFFF, dtype=np.uint32)
    sort_rows(topic_ids, queue_ids, flags, hashes, buckets, starts, order)
    wanted: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        if enters(row):
            wanted.setdefault(bucket_of(TOPICS[row[0]], row[1]), []).append(number)
    for bucket in range(BUCKETS):
        assert order[starts[bucket] : starts[bucket + 1]].tolist() == wanted.get(bucket, [])
    assert int(starts[-1]) == sum(map(enters, rows))


@given(ROWS, st.integers(1, 4), st.sampled_from([2, 4, 64, 256]))
def test_the_first_row_of_each_queue(rows: list[Row], room: int, size: int) -> None:
    topic_ids, queue_ids, flags, offsets = columns(rows)
    table, known, found = np.zeros(size, dtype=np.uint64), np.zeros(1, dtype=np.int64), np.empty(room, dtype=np.uint32)
    firsts: list[int] = []
    row = 0
    while row < len(rows):
        row, count = map(int, first_rows(topic_ids, queue_ids, flags, offsets, row, table, known, found))
        firsts += found[:count].tolist()
        if row < len(rows) and count < room:
            break  # the table is half full
    wanted: dict[tuple[int, int], int] = {}
    for number, one in enumerate(rows):
        if begins(one):
            wanted.setdefault(one[:2], number)
    assert firsts == sorted(wanted.values())[: len(firsts)]
    assert known[0] == len(firsts)
    assert row == len(rows) or len(firsts) * 2 >= size
    assert row < len(rows) or len(firsts) == len(wanted)
