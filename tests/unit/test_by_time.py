"""Queue offsets by time as the broker finds them, the first message of a time, and the bound that it gives a walk."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd.consumequeue.format import Unit
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.errors import UsageError
from indexd.flush.frontier import Uncovered
from indexd.query import query_log_time, query_time
from indexd.query.by_time import offset_by_time
from support.commitlog_writer import FrameSpec
from support.data_directory import SEGMENT, T0, spec
from support.queue_store import QueueStore
from support.reading import patch

TIMES = st.lists(
    st.one_of(st.integers(T0 - 30, T0 + 30), st.integers(T0 - 3, T0 + 3), st.sampled_from([-5, -1, 0, 1, 2**40])),
    min_size=1,
    max_size=120,
)


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return QueueStore(tmp_path)


def sized(number: int, time: int) -> FrameSpec:
    return spec(time, size=(number * 37) % 400)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TIMES, st.data())
def test_the_first_message_of_a_time_or_later_however_the_clock_falls(times: list[int], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = QueueStore(Path(directory))
        with store.writer as writer:
            for number, time in enumerate(times):
                writer.append(sized(number, time))
        messages = store.messages()
        kept = data.draw(st.integers(0, len(messages)), label="messages that the marks know")
        store.build(upto=messages[kept].phy_offset if kept < len(messages) else None)
        store.write_state()
        is_running = data.draw(st.booleans(), label="a daemon runs")
        covered = messages if is_running else messages[:kept]
        with store.running() if is_running else nullcontext(), store.index() as index:
            for asked in {*times, *(time + 1 for time in times), T0 - 100, 2**62}:
                answer = query_log_time(index, asked)
                wanted = next((m for m in covered if m.store_timestamp >= asked), None)
                found = (answer.phy_offset, answer.store_timestamp, answer.segment)
                assert (answer.why is None) == (wanted is not None)
                if wanted is None:
                    assert found == (None, None, None)
                else:
                    assert found == (wanted.phy_offset, wanted.store_timestamp, wanted.phy_offset // SEGMENT * SEGMENT)


def test_at_most_about_an_interval_is_scanned(store: QueueStore) -> None:
    # The clock falls by an hour for thousands of messages: a scan from the last larger time on would be long.
    times = [T0 + number for number in range(100)] + [T0 - 3_600_000 + number for number in range(3000)] + [T0 + 500]
    offsets = store.append(*[spec(time) for time in times])
    store.build()
    with store.index() as index:
        for asked, wanted in ((T0 + 100, offsets[-1]), (T0 + 50, offsets[50]), (T0 - 5, offsets[0]), (1, offsets[0])):
            answer = query_log_time(index, asked)
            assert answer.phy_offset == wanted
            assert answer.scanned < 10
        answer = query_log_time(index, T0 + 501)
        assert (answer.phy_offset, answer.why) == (None, "absent")
        assert answer.scanned < 10


def test_a_segment_without_sparse_indexes_is_scanned_whole(store: QueueStore) -> None:
    offsets = store.append(*[spec(T0 + number, size=500) for number in range(40)])
    store.build()
    sparse = store.frontier.sparse
    assert sparse is not None
    store.change_frontier(sparse=sparse._replace(segments=sparse.segments[:1] + sparse.segments[2:]))
    with store.index() as index:
        assert [query_log_time(index, T0 + number).phy_offset for number in range(40)] == offsets


def test_a_running_daemon_has_sealed_a_segment_without_any_time(store: QueueStore, tmp_path: Path) -> None:
    offsets = store.append(*[spec(-5, size=400) for _ in range(12)], spec(T0))
    store.build(upto=offsets[3])
    store.write_state()
    with store.running(), store.index() as index:
        found = [query_log_time(index, time).phy_offset for time in (1, -5, -4)]
    assert found == [offsets[-1], 0, offsets[-1]]


def test_uncovered_and_damaged_stretches_are_passed_over(store: QueueStore) -> None:
    offsets = store.append(*[spec(T0 + number, size=500) for number in range(20)])
    store.build()
    patch(store.root / "commitlog" / f"{0:020d}", offsets[1] + 4, b"\xff\xff\xff\xff")
    behind = next(offset for offset in offsets if offset >= SEGMENT)
    with store.index() as index:
        answer = query_log_time(index, T0 + 1)
        assert (answer.phy_offset, answer.unreadable) == (behind, 1)
    store.change_frontier(uncovered=(Uncovered(offsets[1], offsets[2], "corrupt"),))
    with store.index() as index:
        answer = query_log_time(index, T0 + 1)
        assert (answer.phy_offset, answer.unreadable) == (offsets[2], 0)


def test_why_there_is_no_message_of_a_time(store: QueueStore) -> None:
    store.append(*[spec(T0 + number) for number in range(20)])
    store.build()
    (late,) = store.append(spec(T0 + 100))
    with store.index() as index:
        answer = query_log_time(index, T0 + 100)
        assert answer.to_json()["why"] == f"not yet indexed: the log from physical offset {late} on"
    store.change_frontier(refill_offset=store.messages()[5].phy_offset)
    with store.index() as index:
        answer = query_log_time(index, T0 + 10)
        assert answer.phy_offset is None
        assert str(answer.why).startswith("not yet indexed")
        assert answer.coverage.end == store.messages()[5].phy_offset
    store.change_frontier(sparse=None, queues=None)
    with store.index() as index:
        with pytest.raises(UsageError, match="no sparse indexes"):
            query_log_time(index, T0)
        with pytest.raises(UsageError, match="no ConsumeQueues"):
            query_time(index, "T", 0, T0)


class Units(ConsumeQueueReader):
    """A queue in memory: (physical offset, size) by unit; the log tells the times."""

    def __init__(self, units: list[int], file_units: int, first: int, low: int) -> None:
        self.file_units, self.first_offset = file_units, first
        self.min_offset, self.max_offset = low, first + len(units)
        self.units = [Unit(offset, 100, 0) for offset in units]

    def unit(self, offset: int) -> Unit:
        assert self.first_offset <= offset < self.max_offset
        return self.units[offset - self.first_offset]


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(1, 9), st.integers(0, 3), st.integers(-1, 22))
def test_a_queue_of_rising_times(times: list[int], file_units: int, files_gone: int, asked: int) -> None:
    times.sort()
    first = files_gone * file_units
    queue = Units([100 * i for i in range(len(times))], file_units, first, first)
    lower, upper = (
        offset_by_time(queue, lambda offset, size: times[offset // 100], asked, boundary, 0)
        for boundary in ("lower", "upper")
    )
    assert lower == first + sum(t < asked for t in times)
    at_most = [i for i, t in enumerate(times) if t <= asked]
    assert upper == (first + at_most[-1] if at_most else first)


@pytest.mark.parametrize(
    ("times", "file_units", "low", "min_phy", "asked", "lower", "upper"),
    [
        # before the first message the lower answer is the file's start, which the minimum then corrects
        ([5, 6, 7, 8], 4, 1, 100, 1, 1, 1),
        # nothing but unreadable messages: behind the last one, and the last one
        ([-1, -1, -1], 4, 0, 0, 5, 3, 2),
        # an unreadable message in the middle ends the search at 0
        ([1, -1, 9], 4, 0, 0, 5, 0, 0),
        # one that expired is passed to the right
        ([-1, 3, 9], 4, 1, 100, 5, 2, 1),
        # equal times over the end of a file: each file is searched on its own
        ([1, 5, 5, 5, 5, 9], 3, 0, 0, 5, 1, 4),
        # a clock that fell: what the halving meets
        ([1, 9, 2, 3, 10], 8, 0, 0, 3, 3, 3),
        # all of it gone
        ([-1, -1], 2, 2, 999, 5, 2, 2),
    ],
)
def test_odd_queues(
    times: list[int], file_units: int, low: int, min_phy: int, asked: int, lower: int, upper: int
) -> None:
    queue = Units([100 * i for i in range(len(times))], file_units, 0, low)
    found = [
        offset_by_time(queue, lambda offset, size: times[offset // 100], asked, boundary, min_phy)
        for boundary in ("lower", "upper")
    ]
    assert found == [lower, upper]


def test_the_answer_names_the_message(store: QueueStore) -> None:
    offsets = store.append(*[spec(T0 + 10 * number) for number in range(30)])
    store.build()
    with store.index() as index:
        answer = query_time(index, "T", 0, T0 + 95, "lower")
        assert (answer.queue_offset, answer.phy_offset, answer.store_timestamp) == (10, offsets[10], T0 + 100)
        assert query_time(index, "T", 0, T0 + 95, "upper").queue_offset == 9
        answer = query_time(index, "T", 0, T0 + 1000, "lower")
        assert (answer.queue_offset, answer.phy_offset, answer.why) == (30, None, "behind the last message")
        answer = query_time(index, "T", 1, T0)
        assert (answer.queue_offset, answer.why) == (None, "no such queue")


def test_a_search_that_meets_an_unreadable_message_is_not_complete(store: QueueStore) -> None:
    offsets = store.append(*[spec(T0 + 10 * number) for number in range(30)])
    store.build()
    patch(store.root / "commitlog" / f"{0:020d}", offsets[14] + 4, bytes(4))
    with store.index() as index:
        answer = query_time(index, "T", 0, T0 + 140)
    assert not answer.coverage.complete
    assert "cut off" in str(answer.coverage.to_json()["why"])
