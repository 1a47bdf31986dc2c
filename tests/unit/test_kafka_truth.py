"""LogTruth: its answers do not depend on how the batches come in, and are those of a slow search."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.kafka.check import LAST_OFFSET, POSITION, LogTruth
from indexd.kafka.records import LogWalk
from indexd.storage.disk import Disk
from support.kafka_records import Batch, batch, log_bytes, positions

BASE = 50


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("truth") / "log"


def told(log: Path, batches: list[Batch], buffer_size: int, asked: list[int], places: list[int]) -> LogTruth:
    """The truth about these questions, a buffer of batches at a time."""
    log.write_bytes(log_bytes(batches))
    offsets = np.array(asked, dtype=np.int64)
    truth = LogTruth(BASE, np.array(places, dtype=np.int64), offsets, offsets)
    with Disk().open_read(log) as file:
        for some in LogWalk(file, BASE, buffer_size=buffer_size):
            truth.put(some)
    return truth


def slow_answer(batches: list[Batch], offset: int) -> tuple[int, ...] | None:
    largest = (-1, 0)
    for one, position in zip(batches, positions(batches), strict=True):
        before = largest[0]
        last = one.last_offset - BASE
        if one.max_timestamp > before:
            largest = (one.max_timestamp, last)
        if last >= offset:
            return position, last, one.max_timestamp, before, *largest
    return None


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(-1, 30), st.integers(0, 90)), max_size=30),
    st.integers(61, 1000),
    st.lists(st.integers(-3, 99), max_size=12),
    st.lists(st.integers(-3, 3000), max_size=12),
)
def test_any_split_and_any_order_of_questions(
    log: Path, rows: list[tuple[int, int, int]], buffer_size: int, asked: list[int], places: list[int]
) -> None:
    batches: list[Batch] = []
    offset = BASE
    for count, timestamp, size in rows:
        batches.append(batch(offset, offset + count - 1, timestamp, bytes(size)))
        offset += count
    starts = positions(batches)
    places = [starts[place % len(starts)] if starts and place % 2 else place for place in places]
    truth = told(log, batches, buffer_size, asked, places)
    for slot, one in enumerate(asked):
        expected = slow_answer(batches, one)
        for questions in (truth.by_offset, truth.by_time_offset):
            assert bool(questions.is_reached[slot]) == (expected is not None)
            assert expected is None or tuple(questions.answers[slot].tolist()) == expected
    for slot, place in enumerate(places):
        found = int(truth.at_position.answers[slot, POSITION])
        assert (bool(truth.at_position.is_reached[slot]) and found == place) == (place in starts)
        if place in starts:
            assert truth.at_position.answers[slot, LAST_OFFSET] == batches[starts.index(place)].last_offset - BASE
    assert truth.max_timestamp == max((one.max_timestamp for one in batches), default=-1)


def test_offsets_that_fall_do_not_hide_what_was_reached(log: Path) -> None:
    batches = [batch(BASE + last, BASE + last, 1) for last in (0, 9, 1, 2, 3, 12)]
    for buffer_size in (61, 1000):
        truth = told(log, batches, buffer_size, [5, 10], [])
        assert truth.by_offset.answers[:, 0].tolist() == [61, 305]
