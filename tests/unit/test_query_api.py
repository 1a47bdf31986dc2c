"""The Python API: its example, what it opens, messages, empty answers, wrong arguments."""

from __future__ import annotations

import doctest
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import indexd.query
from indexd.commitlog.decoder import Message
from indexd.errors import UsageError
from indexd.flush.frontier import Uncovered
from indexd.query import (
    Coverage,
    Data,
    Hit,
    KeyQuery,
    NotFound,
    OffsetQuery,
    open_data,
    open_log,
    query_exact,
    query_offset,
)
from indexd.query.coverage import Behind
from indexd.query.message import find_by_id, find_by_offset, parse_message_id, unpack_body
from indexd.storage.disk import Disk
from support.commitlog_writer import FrameSpec
from support.data_directory import SEGMENT, T0, config_of, spec
from support.queue_store import QueueStore

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.commitlog.lookup import LogView


_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    store = QueueStore(tmp_path, segment=1 << 16)
    for number, word in enumerate(_WORDS):
        keys = {"KEYS": "order-7"} if number < 7 else {"KEYS": "order-8"}
        store.append(FrameSpec("TopicTest", word.encode(), keys, store_timestamp=T0 + 10 * number))
    store.build()
    return store


def test_the_example_in_the_docstring(store: QueueStore) -> None:
    (example,) = [
        found
        for found in doctest.DocTestFinder(recurse=False).find(indexd.query, extraglobs={"DATA": store.data})
        if found.examples
    ]
    results = doctest.DocTestRunner().run(example)
    assert results.attempted >= 2
    assert results.failed == 0


def test_an_answer_is_the_sequence_of_its_hits(store: QueueStore) -> None:
    with open_data(store.data) as data:
        answers = (
            (data.by_key("TopicTest", "order-7", max_num=3), 3),
            (data.by_key("TopicTest", "none"), 0),
            (data.by_queue("TopicTest", 0, 2, max_num=4), 4),
            (data.at_time("TopicTest", 0, T0 + 45), 1),
            (data.at_time("TopicTest", 7, T0), 0),
            (data.log_at_time(T0 + 45), 1),
        )
        for answer, count in answers:
            assert (len(answer), tuple(answer)) == (count, answer.hits)
            row = answer.to_dict()
            assert json.loads(json.dumps(row)) == row == answer.to_json()
            assert [hit["topic"] for hit in row["hits"]] == ["TopicTest"] * count
        message = data.message(answers[0][0].hits[0].phy_offset)
        assert isinstance(message, Message)
        assert answers[0][0].to_dict()["hits"][0] == Hit.of(message).to_dict()


def test_what_is_opened(store: QueueStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXD_DATA", "/nowhere")
    moved = store.root.rename(tmp_path / "moved")
    with open_data(str(store.data), store=moved) as data:
        assert len(data.by_key("TopicTest", "order-7").hits) == 7
        assert data.coverage().complete
        found = data.message(0)
        assert not isinstance(found, NotFound)
        assert data.message(found.offset_msg_id) == found
        assert "nothing is written" in data.message(data.coverage().end).reason
    with open_data(store.data, commit_log_paths=[moved / "commitlog"]) as data:
        assert data.by_queue("TopicTest", 0, max_num=1).hits[0].hit.keys == "order-7"
    with pytest.raises(UsageError, match="holds no index yet"):
        open_data(tmp_path / "empty")


@pytest.fixture
def empty(tmp_path: Path) -> QueueStore:
    return QueueStore(tmp_path)


@pytest.fixture
def one(empty: QueueStore) -> QueueStore:
    """With one message."""
    empty.append(spec())
    empty.build()
    return empty


def test_nothing_before_a_cursor(empty: QueueStore) -> None:
    (offset, _) = empty.append(spec(), spec())
    empty.build()
    with empty.index() as index:
        assert query_exact(index, KeyQuery("T", "k", before=offset)).why == "absent before the cursor"
        assert query_exact(index, KeyQuery("T", "none")).why == "absent"
        (behind,) = empty.append(spec())
        # What is not indexed yet stands behind the cursor, unless the cursor is behind the index.
        assert query_exact(index, KeyQuery("T", "k", before=offset)).why == "absent before the cursor"
        assert query_exact(index, KeyQuery("T", "none", before=behind)).why == "absent before the cursor"
        assert str(query_exact(index, KeyQuery("T", "none", before=behind + 1)).why).startswith("not yet indexed")


def test_what_a_cursor_leaves_open() -> None:
    gap = Uncovered(300, 400, "lost")
    whole = Coverage(200, 500, 100, Behind(500), (gap,))
    assert whole.up_to(501).behind is not None
    assert whole.up_to(500).behind is None
    assert whole.up_to(301).uncovered == (gap,)
    assert whole.up_to(300).uncovered == ()
    assert whole.up_to(101).starts_late
    assert not whole.up_to(101).complete
    assert whole.up_to(100).complete  # the log begins there
    assert not Coverage(200, 500, None, Behind(500)).complete
    assert Coverage(200, 500, None, Behind(500)).up_to(0).complete


def test_a_query_is_ended_by_its_check(empty: QueueStore) -> None:
    empty.append(*[spec() for _ in range(20)])
    empty.build()
    with open_data(empty.data) as data:
        assert len(data.by_key("T", "k").hits) == 20
        where = data.by_key("T", "k").hits[0].phy_offset
        queries = (
            lambda: data.by_key("T", "k"),
            lambda: data.by_key("T", "none"),
            lambda: data.by_queue("T", 0),
            lambda: data.at_time("T", 0, T0),
            lambda: data.message(where),
        )
        for query in queries:
            query()

        def stop() -> None:
            raise KeyError

        data.set_check(stop)
        for query in queries:
            with pytest.raises(KeyError):
                query()


def test_queues_that_were_left_out_and_one_that_starts_late(empty: QueueStore) -> None:
    empty.writer.queue_offsets["T", 0] = 11
    empty.append(*[spec() for _ in range(3)])
    empty.build()
    empty.change_frontier(
        queues_limit=1,
        queues=tuple(mark._replace(begin_offset=mark.min_offset) for mark in empty.frontier.queues or ()),
    )
    with empty.index() as index:
        assert query_offset(index, OffsetQuery("T", 1, 0)).why == (
            "no such queue; queues were left out when there were 1 (queues_max)"
        )
        answer = query_offset(index, OffsetQuery("T", 0, 2))
        assert (answer.status, answer.min_offset, answer.begin_offset) == ("OFFSET_TOO_SMALL", 11, 11)
        assert query_offset(index, OffsetQuery("T", 0, 14)).why == "behind the last message"
    empty.change_frontier(queues=tuple(mark._replace(begin_offset=3) for mark in empty.frontier.queues or ()))
    with empty.index() as index:
        assert query_offset(index, OffsetQuery("T", 0, 2)).begin_offset == 3


@pytest.mark.parametrize(
    "asked",
    [
        lambda data: data.at_time("T", 0, T0, "middle"),
        lambda data: data.at_time("T", 0, T0, None),
        lambda data: data.at_time("T", 0, "now"),
        lambda data: data.at_time("T", 0.0, T0),
        lambda data: data.by_queue("T", 0, 0, max_num=0),
        lambda data: data.by_queue("T", True, 0),
        lambda data: data.by_queue("T", "0"),
        lambda data: data.by_queue(b"T", 0),
        lambda data: data.by_queue("T", 0, 1.5),
        lambda data: data.by_key("T", "k", max_num=0),
        lambda data: data.by_key("T", "k", max_num=True),
        lambda data: data.by_key("T", 7),
        lambda data: data.by_key("T", "k", index_type="X"),
        lambda data: data.by_key("T", "k", index_type=["K"]),
        lambda data: data.by_key("T", "k", before="5"),
        lambda data: data.log_at_time(1.0),
        lambda data: data.log_at_time(-1),
        lambda data: data.at_time("T", 0, -1),
        lambda data: data.at_time("T", -1, T0),
        lambda data: data.at_time("", 0, T0),
        lambda data: data.by_queue("T", -1),
        lambda data: data.by_queue("T", 0, -1),
        lambda data: data.by_queue("", 0),
        lambda data: data.by_key("T", ""),
        lambda data: data.by_key("", "k"),
        lambda data: data.by_key("T", "k", begin=-1),
        lambda data: data.by_key("T", "k", end=-1),
        lambda data: data.by_key("T", "k", before=-1),
        lambda data: data.message(-1),
        lambda data: data.message(""),
        lambda data: data.message(None),
    ],
)
def test_wrong_arguments(one: QueueStore, asked: Any) -> None:
    with open_data(one.data) as data, pytest.raises(UsageError):
        asked(data)


def test_what_is_a_number_elsewhere_is_one_here(one: QueueStore) -> None:
    with open_data(one.data) as data:
        assert len(data.by_queue("T", np.int32(0), np.int64(0), max_num=np.uint8(1)).hits) == 1


def test_a_closed_data(one: QueueStore) -> None:
    data = open_data(one.data)
    data.close()
    data.close()
    calls: list[Any] = [
        lambda: data.by_key("T", "k"),
        lambda: data.by_queue("T", 0),
        lambda: data.at_time("T", 0, T0),
        lambda: data.log_at_time(T0),
        lambda: data.message(0),
        data.coverage,
        data.__enter__,
    ]
    for call in calls:
        with pytest.raises(UsageError, match="is closed"):
            call()
    assert isinstance(data, Data)


def log_of(empty: QueueStore) -> LogView:
    return open_log(Disk(), config_of(empty.data, store=empty.root, segment_size=SEGMENT), None)


def test_messages_by_offset_and_id(empty: QueueStore) -> None:
    v6 = replace(spec(), store_host=("2001:db8::1", 10911))
    first, second, third = empty.append(spec(), v6, spec(size=20))
    log = log_of(empty)
    for offset, digits in ((first, 32), (second, 56)):
        found = find_by_offset(log, offset)
        assert found.phy_offset == offset
        text = found.offset_msg_id
        assert len(text) == digits
        assert find_by_id(log, text.lower()) == found
    assert "stored by [2001:db8::1]:10911" in find_by_id(log, f"7f00000100002a9f{second:016x}").reason
    assert "nothing is written" in find_by_offset(log, empty.writer.max_offset).reason
    assert "does not reach" in find_by_offset(log, 10**12).reason
    assert "does not reach" in find_by_offset(log, -1).reason
    path = empty.root / "commitlog" / f"{0:020d}"
    content = bytearray(path.read_bytes())
    content[third + 92] ^= 1
    path.write_bytes(bytes(content))
    assert "CRC" in find_by_offset(log, third).reason
    empty.append(spec(size=3900))
    log.refresh()
    path.unlink()
    assert "has expired" in find_by_offset(log_of(empty), first).reason
    log.close()


@pytest.mark.parametrize("text", ["", "zz" * 16, "00" * 15, "00" * 17, " " + "00" * 16, "0x" + "00" * 15])
def test_what_is_no_message_id(text: str) -> None:
    with pytest.raises(UsageError, match="no offset message id"):
        parse_message_id(text)


@pytest.mark.parametrize(
    ("sys_flag", "body", "compression", "unpacked", "shown"),
    [
        (0, b"text\n", None, False, "text\n"),
        (0, b"\xff\x00", None, False, "/wA="),
        (0, b"a\x1b[0m", None, False, "YRtbMG0="),
        (1, zlib.compress("é".encode()), "zlib", True, "é"),
        (0x301, zlib.compress(b"x"), "zlib", True, "x"),
        (1, b"not zlib", "zlib", False, "not zlib"),
        (1, zlib.compress(bytes(100_000), 9)[:-8], "zlib", False, None),
        (0x101, b"lz4", "lz4", False, "lz4"),
        (0x201, b"zstd", "zstd", False, "zstd"),
        (0x701, b"?", "unknown (7)", False, "?"),
    ],
)
def test_bodies(
    empty: QueueStore, sys_flag: int, body: bytes, compression: str, unpacked: bool, shown: str | None
) -> None:
    (offset,) = empty.append(replace(spec(), sys_flag=sys_flag, body=body))
    found = unpack_body(find_by_offset(log_of(empty), offset))
    assert (found.compression, found.is_unpacked) == (compression, unpacked)
    if shown is not None:
        assert found.to_json()["body"] == shown


def test_a_body_that_unpacks_to_too_much_stays_as_stored(empty: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexd.query.message.BODY_SIZE_MAX", 1000)
    (offset,) = empty.append(replace(spec(), sys_flag=1, body=zlib.compress(bytes(1001))))
    assert not unpack_body(find_by_offset(log_of(empty), offset)).is_unpacked


def test_no_more_is_unpacked_than_is_wanted(empty: QueueStore) -> None:
    body = bytes(range(256)) * 4
    (offset,) = empty.append(replace(spec(), sys_flag=1, body=zlib.compress(body)))
    message = find_by_offset(log_of(empty), offset)
    for most in (0, 1, 1023):
        found = unpack_body(message, most)
        assert (found.data, found.is_unpacked, found.is_cut) == (body[:most], True, True)
    found = unpack_body(message, 1024)
    assert (found.data, found.is_cut) == (body, False)
