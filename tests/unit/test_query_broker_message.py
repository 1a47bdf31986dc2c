"""What is sent over RocketMQ's own protocol: frames by key, by id and by queue, and the bounds of a queue."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd.commitlog.decoder import DecoderOptions, Message, check_frame, decode_frame
from indexd.commitlog.format import Corrupt
from indexd.errors import UsageError
from indexd.index.format import IndexLayout
from indexd.query import TIME_MAX, KeyQuery, NotFound, open_index
from indexd.query.broker_message import (
    earliest_time,
    pull_message,
    query_message,
    query_message_exact,
    queue_bounds,
    view_message,
)
from indexd.storage.disk import Disk
from support.data_directory import SEGMENT, T0, Store, config_of, make_golden_data, spec
from support.goldens import unpack
from support.naive import exact_oracle
from support.queue_store import QueueStore
from support.remoting_asking import ANY_SIZE, COMPILED, Judge, damage, frames_at, raw
from support.strategies import Sample, logs, queries

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.query import QueryIndex
    from indexd.query.broker_message import FoundFrames, PulledFrames


LARGE = IndexLayout(101, 1000)


def ask(store: Store, key: str = "k", max_num: int = 64, *, size_max: int = ANY_SIZE, **more: int) -> FoundFrames:
    request = KeyQuery("T", key, max_num, more.get("begin", 0), more.get("end", TIME_MAX), "K")
    with store.index() as index:
        judge = Judge(index)
        judge.ask(request, size_max)  # from then on its segments are open for the compiled way
        found = judge.ask(request, size_max)
    assert not isinstance(found, str)
    return found


@pytest.mark.parametrize("name", ["rocketmq-5.3-clean", "rocketmq-5.4-clean", "rocketmq-5.4-propcrc"])
def test_every_golden_answer_as_frames_in_ascending_order(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    make_golden_data(tmp_path / "data", golden)
    index = open_index(Disk(), config_of(tmp_path / "data"))
    judge, found_any, left = Judge(index), 0, 0
    for row in golden.answers():
        request = KeyQuery(row["topic"], row["key"], max(row["max"], 0), row["begin"], row["end"], row.get("indexType"))
        before = judge.answered["left"]
        found = judge.ask(request)
        assert not isinstance(found, str)
        if (request.topic + request.key).isascii() and request.index_type != "T":  # others are the plain way's
            left += judge.answered["left"] - before
        offsets = sorted(row["phyOffsets"])
        assert found.frames == tuple(raw(golden.root / "commitlog", golden.segment_size, one) for one in offsets)
        if offsets:
            found_any += 1
            assert found.last_update.timestamp == row["indexLastUpdateTimestamp"]
            assert found.last_update.phy_offset == row["indexLastUpdatePhyoffset"]
            assert found.remark is None
        else:
            assert (found.last_update.timestamp, found.last_update.phy_offset) == (0, 0)
            assert found.remark == "the index names no such message"
        assert found.is_covered
    assert found_any > 50
    assert judge.answered[COMPILED] > 20 * left
    index.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), logs(max_size=25), st.sampled_from(["3.x", "4.0", "4.7", "5.4"]))
def test_both_answers_on_any_log(data: st.DataObject, samples: list[Sample], flavour: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = Store(Path(directory), flavour=flavour, segment=8192)
        with store.writer as writer:
            for sample in samples:
                sample.append(writer)
        messages = store.messages()
        service = store.build()
        rows = [message.row() for message in messages]
        with store.index() as index:
            judge = Judge(index)
            for _ in range(6):
                query, unique = data.draw(queries(samples)), data.draw(st.booleans())
                kind, max_num = ("U", 32) if unique else (query.index_type, query.max_num)
                times = (query.begin, query.end)
                request = KeyQuery(query.topic, query.key, max_num, *times, kind)
                named, timestamp, phy_offset = service.query_offset(query.topic, query.key, max_num, *times, kind)
                judge.ask(request, data.draw(st.sampled_from([300, 91])))
                found = judge.ask(request)
                assert not isinstance(found, str)
                assert found.frames == frames_at(store, sorted(named))
                last = (found.last_update.timestamp, found.last_update.phy_offset)
                assert last == ((timestamp, phy_offset) if named else (0, 0))
                expected = sorted(exact_oracle(rows, query.topic, query.key, *times, kind, flavour))
                exact = query_message_exact(index, request, ANY_SIZE)
                assert exact.frames == frames_at(store, expected[len(expected) - min(max_num, len(expected)) :])
                if flavour == "5.4" and max_num > 0:
                    assert (exact.remark is None) == bool(exact.frames)


def test_collisions_and_repeats_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE)
    first, second = store.append(spec(KEYS="Aa Aa"), spec(KEYS="BB"))
    store.build()
    assert ask(store, "Aa").frames == frames_at(store, [first, first, second])
    with store.index() as index:
        exact = query_message_exact(index, KeyQuery("T", "Aa", 64, 0, TIME_MAX), ANY_SIZE)
    assert exact.frames == frames_at(store, [first])


def test_it_asks_further_back_while_nothing_can_be_read(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE, segment=1 << 16)
    offsets = store.append(*[spec(T0 + 5000 * number, size=50) for number in range(12)])
    store.build()
    for offset in offsets[3:]:
        damage(store, offset)
    # Three rounds of three: [9, 10, 11], then up to the time of 9, then up to that of 7.
    assert ask(store, max_num=3).frames == ()
    assert ask(store, max_num=4).frames == frames_at(store, offsets[2:3])
    assert ask(store, max_num=5).frames == frames_at(store, offsets[:3])
    assert ask(store, max_num=12).frames == frames_at(store, offsets[:3])


def test_a_damaged_frame_is_not_sent_and_said(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE)
    offsets = store.append(*[spec(T0 + number, size=50) for number in range(3)])
    store.build()
    damage(store, offsets[1])
    found = ask(store)
    assert found.frames == frames_at(store, [offsets[0], offsets[2]])
    assert found.remark == "of 3 messages that the index names: 1 unreadable"
    assert not found.is_covered
    damage(store, offsets[0], 4)
    damage(store, offsets[2], 28)
    found = ask(store)
    assert (found.frames, found.remark) == ((), "of 3 messages that the index names: 3 unreadable")


def test_expired_messages_are_counted(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE)
    offsets = store.append(*[spec(T0 + number, size=1000) for number in range(6)])
    store.build()
    (store.root / "commitlog" / f"{0:020d}").unlink()
    gone = sum(offset < SEGMENT for offset in offsets)
    found = ask(store)
    assert found.frames == frames_at(store, offsets[gone:])
    assert found.remark == f"of 6 messages that the index names: {gone} expired"


def test_an_answer_has_so_many_bytes(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE, segment=1 << 16)
    offsets = store.append(spec(size=100), spec(size=9000), spec(size=200), spec(size=5000))
    store.build()
    sizes = [len(frame) for frame in frames_at(store, offsets)]
    found = ask(store, size_max=sizes[0] + sizes[2])
    assert found.frames == frames_at(store, [offsets[0], offsets[2]])
    assert found.remark is not None
    assert "2 too long for an answer of" in found.remark
    assert ask(store, size_max=sum(sizes)).frames == frames_at(store, offsets)
    assert len(ask(store, size_max=sum(sizes) - 1).frames) == 3
    assert ask(store, size_max=91).frames == ()


def test_what_more_than_one_round_names_counts_once(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE)
    (offset,) = store.append(spec(T0 + 123, size=50))
    store.build()
    damage(store, offset, 28)  # its properties: its time can still be read
    found = ask(store)
    assert (found.frames, found.remark) == ((), "of 1 messages that the index names: 1 unreadable")


def test_what_has_expired_is_said_where_nothing_is_found(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE)
    store.append(*[spec(T0 + number, size=1000) for number in range(6)])
    (store.root / "commitlog" / f"{0:020d}").unlink()
    store.build()
    expired = f"the log begins at physical offset {SEGMENT}: what was before has expired"
    found = ask(store, "none")
    assert (found.remark, found.is_covered) == (f"the index names no such message; {expired}", True)
    with store.index() as index:
        exact = query_message_exact(index, KeyQuery("T", "none", 9, 0, TIME_MAX, "K"), ANY_SIZE)
    assert (exact.remark, exact.is_covered) == (f"absent; {expired}", True)


def test_why_there_is_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path, LARGE)
    store.append(spec(KEYS="a"))
    store.build()
    found = ask(store, "b")
    assert (found.remark, found.is_covered) == ("the index names no such message", True)
    end = store.writer.max_offset
    store.append(spec(KEYS="b"))
    found = ask(store, "b")
    assert found.remark == f"the index names no such message; not yet indexed: the log from physical offset {end} on"
    assert not found.is_covered
    with store.index() as index:
        exact = query_message_exact(index, KeyQuery("T", "b", 9, 0, TIME_MAX, "K"), ANY_SIZE)
        assert exact.remark is not None
        assert exact.remark.startswith("not yet indexed")
        assert not exact.is_covered
        assert query_message_exact(index, KeyQuery("T", "a", 0, 0, TIME_MAX), ANY_SIZE).remark


def test_a_walk_along_a_long_chain_can_be_ended(tmp_path: Path) -> None:
    store = Store(tmp_path, IndexLayout(1, 3000), segment=1 << 20)
    store.append(*[spec(T0 + number, KEYS=f"key-{number}") for number in range(2000)])
    store.build()
    steps = 0

    def check() -> None:
        nonlocal steps
        steps += 1
        if steps == 8:
            raise TimeoutError

    with store.index() as index:
        index.log.check = check
        with pytest.raises(TimeoutError):
            query_message(index, KeyQuery("T", "absent", 64, 0, TIME_MAX), ANY_SIZE)


def test_view_message_gives_whole_frames_alone(tmp_path: Path) -> None:
    store = Store(tmp_path, segment=1 << 16)
    offsets = store.append(spec(size=10), spec(size=9000), spec(topic="x" * 200))
    store.build()
    with store.index() as index:
        assert [view_message(index, offset, ANY_SIZE) for offset in offsets] == list(frames_at(store, offsets))
        reasons = {
            offsets[0] + 1: "there stands neither a message's",
            store.writer.max_offset: "nothing is written there yet",
            1 << 40: "the log does not reach there",
            -1: "the log does not reach there",
            -(1 << 63): "the log does not reach there",
        }
        for offset, reason in reasons.items():
            found = view_message(index, offset, ANY_SIZE)
            assert isinstance(found, NotFound)
            assert f"physical offset {offset}: {reason}" in found.reason
        found = view_message(index, offsets[1], 9000)
        assert isinstance(found, NotFound)
        assert "and an answer 9000 at most" in found.reason
        damage(store, offsets[0])
        found = view_message(index, offsets[0], ANY_SIZE)
        assert isinstance(found, NotFound)
        assert "a body that its CRC denies" in found.reason


@settings(max_examples=150, deadline=None)
@given(logs(max_size=1), st.booleans(), st.lists(st.tuples(st.integers(0, 600), st.integers(1, 255)), max_size=3))
def test_a_frame_is_sent_when_it_decodes(samples: list[Sample], prop_crc: bool, flips: list[tuple[int, int]]) -> None:
    for sample in samples:
        data = bytearray(sample.encode(0, prop_crc=prop_crc))
        for at, mask in flips:
            data[at % len(data)] ^= mask
        whole = bytes(data)
        written = whole + bytes(100)
        checked = check_frame(written, 0, 1 << 20, DecoderOptions())
        decoded = decode_frame(written, 0, 0, 1 << 20, DecoderOptions())
        if isinstance(decoded, Message):
            assert checked == whole[: decoded.size]
        elif isinstance(decoded, Corrupt) and ("DELAY" in decoded.reason or "INNER" in decoded.reason):
            assert isinstance(checked, bytes)  # what properties mean is for those who decode it
        else:
            assert checked == decoded


def pull(
    store: QueueStore, offset: int, max_num: int = 32, size_max: int = ANY_SIZE, queue_id: int = 0
) -> PulledFrames:
    with store.index() as index:
        return pull_message(index, "T", queue_id, offset, max_num, size_max)


def test_a_pull_says_what_a_broker_says(tmp_path: Path) -> None:
    store = QueueStore(tmp_path)
    store.append(spec(topic="other"))
    store.writer.queue_offsets["T", 0] = 5
    offsets = store.append(*[spec(T0 + number, size=number * 30) for number in range(10)])
    store.build()
    found = pull(store, 5, 4)
    assert (found.status, found.next_begin_offset, found.min_offset, found.max_offset) == ("FOUND", 9, 5, 15)
    assert found.frames == frames_at(store, offsets[:4])
    assert found.is_covered
    assert pull(store, 14).frames == frames_at(store, offsets[-1:])
    assert len(pull(store, 5, 0).frames) == len(pull(store, 5, -9).frames) == 1
    for offset, status, next_offset in (
        (4, "OFFSET_TOO_SMALL", 5),
        (-1, "OFFSET_TOO_SMALL", 5),
        (15, "OFFSET_OVERFLOW_ONE", 15),
        (16, "OFFSET_OVERFLOW_BADLY", 15),
        (1 << 62, "OFFSET_OVERFLOW_BADLY", 15),
    ):
        found = pull(store, offset)
        assert (found.status, found.frames, found.next_begin_offset) == (status, (), next_offset)
    for queue_id in (1, -1, 1 << 30):
        found = pull(store, 3, queue_id=queue_id)
        assert (found.status, found.next_begin_offset, found.max_offset) == ("NO_MATCHED_LOGIC_QUEUE", 0, 0)


def test_a_pull_is_bounded_and_goes_on(tmp_path: Path) -> None:
    store = QueueStore(tmp_path, segment=1 << 17)
    offsets = store.append(*[spec(T0 + number, size=100) for number in range(40)])
    store.build()
    size = len(frames_at(store, offsets)[0])
    assert len(pull(store, 0, 1000).frames) == 32
    got: list[bytes] = []
    next_offset = 0
    while next_offset < 40:
        found = pull(store, next_offset, 7, 3 * size + 1)
        assert 0 < len(found.frames) <= 3
        got += found.frames
        next_offset = found.next_begin_offset
    assert tuple(got) == frames_at(store, offsets)
    damage(store, offsets[1])
    found = pull(store, 0, 3)
    assert (found.frames, found.next_begin_offset) == (frames_at(store, [offsets[0], offsets[2]]), 3)
    found = pull(store, 1, 1)
    assert (found.status, found.frames, found.next_begin_offset) == ("NO_MATCHED_MESSAGE", (), 2)
    # One that no answer can hold keeps nobody from those behind it.
    found = pull(store, 2, 1, size - 1)
    assert (found.status, found.frames, found.next_begin_offset) == ("NO_MATCHED_MESSAGE", (), 3)


def test_bounds_and_earliest_time_follow_the_log(tmp_path: Path) -> None:
    store = QueueStore(tmp_path)
    offsets = store.append(*[spec(T0 + number, size=900) for number in range(12)])
    store.build()
    with store.index() as index:
        assert (queue_bounds(index, "T", 0), earliest_time(index, "T", 0)) == ((0, 12), T0)
        assert (queue_bounds(index, "T", 9), earliest_time(index, "T", 9)) == ((0, 0), -1)
        assert (queue_bounds(index, "../x", 0), earliest_time(index, "no", 0)) == ((0, 0), -1)
        (store.root / "commitlog" / f"{0:020d}").unlink()
        gone = sum(offset < SEGMENT for offset in offsets)
        assert (queue_bounds(index, "T", 0), earliest_time(index, "T", 0)) == ((gone, 12), T0 + gone)
        assert pull_message(index, "T", 0, gone, 1, ANY_SIZE).frames == frames_at(store, offsets[gone : gone + 1])
        for path in (store.root / "commitlog").iterdir():
            if int(path.name) < offsets[-1] // SEGMENT * SEGMENT:
                path.unlink()
        _check_all_but_last_gone(index, store, offsets)


def _check_all_but_last_gone(index: QueryIndex, store: QueueStore, offsets: list[int]) -> None:
    left = [offset for offset in offsets if offset >= offsets[-1] // SEGMENT * SEGMENT]
    assert queue_bounds(index, "T", 0) == (12 - len(left), 12)
    assert pull_message(index, "T", 0, 0, 9, ANY_SIZE).status == "OFFSET_TOO_SMALL"
    assert pull_message(index, "T", 0, 12 - len(left), 9, ANY_SIZE).frames == frames_at(store, left)


def test_without_queues_it_is_said(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(spec())
    store.build()
    with store.index() as index:
        for question in (queue_bounds, earliest_time):
            with pytest.raises(UsageError, match="holds no ConsumeQueues"):
                question(index, "T", 0)
