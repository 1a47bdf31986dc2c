"""Single messages as a broker sends them: by physical offset, by queue offset; the bounds of queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.decoder import DecoderOptions, Message, check_frame, decode_frame
from indexd.commitlog.format import Corrupt
from indexd.errors import UsageError
from indexd.query import NotFound
from indexd.query.broker_message import earliest_time, pull_message, queue_bounds, view_message
from support.broker_frames import ANY_SIZE, damage, frames_at
from support.data_directory import SEGMENT, T0, Store, spec
from support.queue_store import QueueStore
from support.strategies import Sample, logs

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.query import QueryIndex
    from indexd.query.broker_message import PulledFrames


# --- one message ---


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


# --- queues ---


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
