"""Messages by queue offset and by time: queues as the broker reads them, the log however its clock fell."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd.commitlog.lookup import LogView
from indexd.consumequeue.format import BLANK_UNIT, UNIT, UNIT_SIZE, QueueMark, Unit, queue_directory
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.errors import CorruptDataError, UsageError
from indexd.query import Hit, OffsetQuery, query_log_time, query_offset, query_time
from indexd.query.by_queue_and_time import offset_by_time
from indexd.query.source import MOVED
from support.data_directory import SEGMENT, T0, built, spec
from support.queue_store import FILE_UNITS, QueueStore, build_queues, write_queue
from support.reading import patch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexd.query import Boundary, LogTimeAnswer, OffsetAnswer, QueueTimeAnswer


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return QueueStore(tmp_path)


def ask(store: QueueStore, offset: int, max_num: int = 100, *, topic: str = "T", queue_id: int = 0) -> OffsetAnswer:
    with store.index() as index:
        return query_offset(index, OffsetQuery(topic, queue_id, offset, max_num))


def first_at(store: QueueStore, time: int) -> LogTimeAnswer:
    with store.index() as index:
        return query_log_time(index, time)


def at_time(store: QueueStore, time: int, boundary: Boundary = "lower") -> QueueTimeAnswer:
    with store.index() as index:
        return query_time(index, "T", 0, time, boundary)


def found(answer: OffsetAnswer) -> list[int]:
    assert [hit.unit.phy_offset for hit in answer.hits] == [hit.hit.phy_offset for hit in answer.hits if hit.hit]
    return [hit.unit.phy_offset for hit in answer.hits]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 40), st.integers(0, 25), st.integers(1, 9), st.integers(0, 70))
def test_pages_are_the_whole_and_hold_nothing_twice(begin: int, count: int, page: int, asked: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = QueueStore(Path(directory))
        store.append(spec(topic="other"))
        store.writer.queue_offsets["T", 0] = begin
        offsets = store.append(*[spec(T0 + number, size=number * 30) for number in range(count)])
        store.build()
        with store.index() as index:
            answer = query_offset(index, OffsetQuery("T", 0, 0, page))
            got = found(answer)
            while answer.truncated:
                answer = query_offset(index, OffsetQuery("T", 0, answer.next_offset, page))
                got += found(answer)
            assert got == offsets
            if not count:
                assert answer.status == "NO_MATCHED_LOGIC_QUEUE"
                return
            answer = query_offset(index, OffsetQuery("T", 0, asked, page))
            low, high = begin, begin + count
            assert (answer.min_offset, answer.max_offset) == (low, high)
            first = min(max(asked, low), high) - low
            assert found(answer) == offsets[first : first + page]
            assert answer.next_offset == low + min(first + page, count)
            wanted = "OFFSET_TOO_SMALL" if asked < low else "FOUND" if asked < high else "OFFSET_OVERFLOW_"
            assert answer.status.startswith(wanted)
            assert (answer.why is not None) == (asked >= high)


def test_what_an_answer_says(store: QueueStore) -> None:
    built(store, spec(KEYS="a b", TAGS="t", UNIQ_KEY="u"), spec(T0 + 5))
    row = ask(store, 0, 1).to_dict()
    assert row.pop("coverage")["complete"]
    assert row == {
        "topic": "T", "queueId": 0, "queueOffset": 0, "status": "FOUND", "minOffset": 0, "maxOffset": 2,
        "nextOffset": 1, "truncated": True,
        "messages": [
            {"queueOffset": 0, "phyOffset": 0, "size": store.messages()[0].size, "tagsCode": 116,
             "storeTimestamp": T0, "keys": "a b", "uniqKey": "u", "tags": "t"},
        ],
        "hits": [store.messages()[0].hit()],
    }  # fmt: skip
    answer = ask(store, 7)
    assert (answer.status, answer.next_offset, answer.why) == ("OFFSET_OVERFLOW_BADLY", 2, "behind the last message")
    assert ask(store, 2).status == "OFFSET_OVERFLOW_ONE"
    assert ask(store, 0, 0).why is None
    with pytest.raises(UsageError, match="may ask for"), store.index(query_max_num=5) as index:
        query_offset(index, OffsetQuery("T", 0, 0, 6))


def test_why_there_is_nothing(store: QueueStore) -> None:
    built(store, spec())
    for topic, queue_id in (("none", 0), ("T", 1), ("T", -1), ("..", 0), ("a/b", 0), ("\udc80", 0), ("", 0)):
        answer = ask(store, 0, topic=topic, queue_id=queue_id)
        is_name = topic in ("none", "T")
        why = "no such queue" if is_name else "a topic of that name has no ConsumeQueue: no folder can be named so"
        assert (answer.status, answer.why) == ("NO_MATCHED_LOGIC_QUEUE", why)
    (store.root / "batchconsumequeue" / "B").mkdir(parents=True)
    assert "BatchConsumeQueue" in str(ask(store, 0, topic="B").why)
    (late,) = store.append(spec())
    behind = f"not yet indexed: the log from physical offset {late} on"
    assert ask(store, 1).why == behind
    assert ask(store, 0, topic="none").why == f"no such queue; {behind}"


def test_what_has_expired_is_passed_over(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    _, offsets = built(store, *[spec(T0 + number, size=1500) for number in range(12)])
    segments = sorted((store.root / "commitlog").iterdir())
    with store.index() as index:
        segments[0].unlink()
        segments[1].unlink()
        left = [offset for offset in offsets if offset >= 2 * SEGMENT]
        with monkeypatch.context() as patch:
            patch.setattr(LogView, "begin_query", lambda self: None)  # as if they had gone just after
            answer = query_offset(index, OffsetQuery("T", 0, 0, 100))
        assert (found(answer), answer.expired, answer.next_offset) == (left, 12 - len(left), 12)
        answer = query_offset(index, OffsetQuery("T", 0, 0, 100))
        assert (found(answer), answer.status, answer.min_offset) == (left, "OFFSET_TOO_SMALL", 12 - len(left))
        assert query_time(index, "T", 0, T0).queue_offset == 12 - len(left)
    for path in segments[2:]:
        path.unlink()
    store.writer.close(clean=False)
    (store.root / "commitlog" / f"{len(segments) * SEGMENT:020d}").write_bytes(bytes(SEGMENT))
    answer = ask(store, 0)
    assert (answer.hits, answer.status, answer.min_offset) == ((), "OFFSET_TOO_SMALL", 12)
    assert str(answer.why).startswith("expired")
    time = at_time(store, T0 + 5)
    assert (time.queue_offset, time.phy_offset) == (12, None)
    assert str(time.why).startswith("expired")


def test_a_unit_that_names_another_message_is_shown_with_what_is_wrong(store: QueueStore) -> None:
    first, second, other, *_ = store.append(spec(), spec(), spec(topic="U"), spec(), replace(spec(), queue_id=1))
    store.build()
    sizes = [message.size for message in store.messages()]
    units = ((first, sizes[0]), (other, sizes[2]), (first, sizes[0]), (second, 1), (second + 1, 9))
    content = b"".join(UNIT.pack(phy_offset, size, 0) for phy_offset, size in units)
    write_queue(queue_directory(store.data / "consumequeue", "T", 0), 0, content)
    store.change_frontier(queues=(QueueMark("T", 0, 0, 0, 5, 10**6),))
    answer = ask(store, 0)
    assert [hit.problem for hit in answer.hits] == [
        None,
        "the message there has topic U",
        "the message there has queue offset 0",
        "the message there has queue offset 1",
        "no message stands there",
    ]
    row = answer.to_dict()
    assert row["problems"] == 4
    # Of the message that was meant nothing is known but its place: what the log has there is another one.
    known = Hit(other, None, 0, 1, sizes[2], topic="T").to_dict()
    assert row["hits"][1] == known | {"problem": "the message there has topic U"}


def test_units_that_must_be_there(store: QueueStore) -> None:
    built(store, *[spec() for _ in range(20)])
    directory = queue_directory(store.data / "consumequeue", "T", 0)
    (directory / f"{16 * UNIT_SIZE:020d}").unlink()
    for question in (lambda: ask(store, 0), lambda: at_time(store, T0, "upper")):
        with pytest.raises(CorruptDataError, match="is missing"):
            question()
    (directory / f"{16 * UNIT_SIZE:020d}").write_bytes(b"short")
    with pytest.raises(CorruptDataError, match="no unit 16"):
        ask(store, 0)


@pytest.fixture
def running(store: QueueStore) -> Iterator[None]:
    """A daemon of this process; ``store.write_state`` is what it says."""
    with store.running():
        yield


@pytest.mark.usefixtures("running")
def test_a_running_daemon_has_more_units_than_the_marks(store: QueueStore) -> None:
    offsets = store.append(*[spec(T0 + number) for number in range(45)])
    new = store.append(*[spec(topic="new") for _ in range(9)])
    late = store.append(spec(topic="later"))
    end = store.writer.max_offset
    for marked in (0, 1, 8, 9, 44):
        store.build(upto=offsets[marked])
        answer = ask(store, 0)
        assert (found(answer), answer.max_offset) == (offsets[:marked], marked), marked
        for published in (30, 40, 45):
            upto = (offsets + new)[published]
            store.write_state(phyOffset=upto)
            answer = ask(store, 0)
            assert found(answer) == offsets[: max(published, marked)], (marked, published)
            assert not answer.coverage.complete
            assert ask(store, 0, topic="new").status == "NO_MATCHED_LOGIC_QUEUE"
        store.write_state(phyOffset=end)
        assert found(ask(store, 0, topic="new")) == new
        assert found(ask(store, 0, topic="later")) == late
        assert ask(store, 0).coverage.complete
        store.write_state(phyOffset=end, filledOffset=new[0])
        assert ask(store, 0, topic="new").hits == ()
        (store.data / "state").unlink()


@pytest.mark.usefixtures("running")
def test_a_late_queue_that_a_running_daemon_has_made(store: QueueStore) -> None:
    store.append(spec())
    end = store.writer.max_offset
    store.writer.queue_offsets["late", 0] = 2 * FILE_UNITS + 3
    offsets = store.append(*[spec(topic="late") for _ in range(20)])
    store.build(upto=end)
    store.write_state()
    answer = ask(store, 0, topic="late")
    assert (answer.min_offset, answer.max_offset) == (2 * FILE_UNITS + 3, 2 * FILE_UNITS + 23)
    assert found(answer) == offsets
    write_queue(queue_directory(store.data / "consumequeue", "blank", 0), 0, BLANK_UNIT * 3)
    assert ask(store, 0, topic="blank").status == "NO_MATCHED_LOGIC_QUEUE"


@pytest.mark.usefixtures("running")
def test_half_a_unit_is_no_unit(store: QueueStore) -> None:
    offsets = store.append(*[spec() for _ in range(4)])
    store.build(upto=offsets[1])
    store.write_state(phyOffset=offsets[3])
    for written in reversed(range(UNIT_SIZE)):
        patch(queue_directory(store.data / "consumequeue", "T", 0) / f"{0:020d}", 3 * UNIT_SIZE + written, b"\0")
        assert found(ask(store, 0)) == offsets[:3]


def test_a_queue_that_lacks_a_message_does_not_say_that_the_last_one_was_never_stored(store: QueueStore) -> None:
    """As a broker does it, the units behind a message that could not be read stand one place too early."""
    store.append(*[spec(T0 + number) for number in range(6)])
    messages = store.messages()
    store.build()
    queues = build_queues(store.data, messages[:2] + messages[3:], messages[:2] + messages[3:])
    store.change_frontier(queues=tuple(mark._replace(moved_from=messages[3].phy_offset) for mark in queues))
    answer = ask(store, 5)
    assert (answer.hits, answer.status, answer.coverage.complete) == ((), "OFFSET_OVERFLOW_ONE", False)
    assert [(gap.begin, gap.reason) for gap in answer.coverage.uncovered] == [(messages[3].phy_offset, MOVED)]
    assert MOVED in (answer.why or "")
    assert not at_time(store, T0 + 5).coverage.complete
    assert ask(store, 2).problems == 3


TIMES = st.lists(
    st.one_of(st.integers(T0 - 30, T0 + 30), st.integers(T0 - 3, T0 + 3), st.sampled_from([-5, -1, 0, 1, 2**40])),
    min_size=1,
    max_size=120,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TIMES, st.data())
def test_the_first_message_of_a_time_or_later_however_the_clock_falls(times: list[int], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = QueueStore(Path(directory))
        store.append(*[spec(time, size=number * 37 % 400) for number, time in enumerate(times)])
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
                assert (answer.why is None) == (wanted is not None)
                place = (answer.phy_offset, answer.store_timestamp, answer.segment)
                known = wanted and (wanted.phy_offset, wanted.store_timestamp, wanted.phy_offset // SEGMENT * SEGMENT)
                assert place == (known or (None, None, None))


def test_at_most_about_an_interval_is_scanned(store: QueueStore) -> None:
    # The clock falls by an hour for thousands of messages: a scan from the last larger time on would be long.
    times = [T0 + number for number in range(100)] + [T0 - 3_600_000 + number for number in range(3000)] + [T0 + 500]
    _, offsets = built(store, *[spec(time) for time in times])
    with store.index() as index:
        for asked, wanted in ((T0 + 100, offsets[-1]), (T0 + 50, offsets[50]), (T0 - 5, offsets[0]), (1, offsets[0])):
            answer = query_log_time(index, asked)
            assert answer.phy_offset == wanted
            assert answer.scanned < 10
        answer = query_log_time(index, T0 + 501)
        assert (answer.phy_offset, answer.why) == (None, "absent")
        assert answer.scanned < 10


def test_a_segment_without_sparse_indexes_is_scanned_whole(store: QueueStore) -> None:
    _, offsets = built(store, *[spec(T0 + number, size=500) for number in range(40)])
    sparse = store.frontier.outputs["sparse"]
    store.change_frontier(sparse=sparse._replace(segments=sparse.segments[:1] + sparse.segments[2:]))
    assert [first_at(store, T0 + number).phy_offset for number in range(40)] == offsets


def test_a_running_daemon_has_sealed_a_segment_without_any_time(store: QueueStore, tmp_path: Path) -> None:
    offsets = store.append(*[spec(-5, size=400) for _ in range(12)], spec(T0))
    store.build(upto=offsets[3])
    store.write_state()
    with store.running():
        assert [first_at(store, time).phy_offset for time in (1, -5, -4)] == [offsets[-1], 0, offsets[-1]]


def test_why_there_is_no_message_of_a_time(store: QueueStore) -> None:
    built(store, *[spec(T0 + number) for number in range(20)])
    (late,) = store.append(spec(T0 + 100))
    assert first_at(store, T0 + 100).why == f"not yet indexed: the log from physical offset {late} on"
    store.change_frontier(refill_offset=store.messages()[5].phy_offset)
    answer = first_at(store, T0 + 10)
    assert (answer.phy_offset, answer.coverage.end) == (None, store.messages()[5].phy_offset)
    assert str(answer.why).startswith("not yet indexed")
    store.change_frontier(sparse=None, queues=None)
    with pytest.raises(UsageError, match="no sparse indexes"):
        first_at(store, T0)
    with pytest.raises(UsageError, match="no ConsumeQueues"):
        at_time(store, T0)


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
        offset_by_time(queue, lambda offset: times[offset // 100], asked, boundary, 0)
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
        offset_by_time(queue, lambda offset: times[offset // 100], asked, boundary, min_phy)
        for boundary in ("lower", "upper")
    ]
    assert found == [lower, upper]


def test_a_search_that_meets_an_unreadable_message_is_not_complete(store: QueueStore) -> None:
    _, offsets = built(store, *[spec(T0 + 10 * number) for number in range(30)])
    patch(store.root / "commitlog" / f"{0:020d}", offsets[14] + 4, bytes(4))
    answer = at_time(store, T0 + 140)
    assert not answer.coverage.complete
    assert "cut off" in str(answer.coverage.to_json()["why"])
