"""Queries from Python and from the command line: what is opened, answered and said, and what is refused."""

from __future__ import annotations

import base64
import doctest
import io
import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest

import indexd.query
from indexd.cli.main import main
from indexd.commitlog.decoder import DecoderOptions, Message, decode_frame
from indexd.errors import UsageError
from indexd.query import (
    TIME_MAX,
    Hit,
    KeyQuery,
    NotFound,
    OffsetQuery,
    open_data,
    open_log,
    query_exact,
    query_offset,
)
from indexd.query.message import BODY_SIZE_MAX, Body, find_by_id, find_by_offset, parse_message_id, unpack_body
from indexd.storage.disk import Disk
from support.commitlog_writer import FrameSpec, encode_frame
from support.data_directory import SEGMENT, T0, Store, built, config_of, spec
from support.queue_store import QueueStore
from support.reading import patch

if TYPE_CHECKING:
    from pathlib import Path

    from indexd.commitlog.lookup import LogView


CUT_OFF = zlib.compress(bytes(100_000), 9)[:-8]
TOO_MUCH = zlib.compress(bytes(BODY_SIZE_MAX + 1), 1)
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
            assert json.loads(json.dumps(row)) == row
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
    return built(empty, spec())[0]


def test_nothing_before_a_cursor(empty: QueueStore) -> None:
    _, (offset, _) = built(empty, spec(), spec())
    with empty.index() as index:
        assert query_exact(index, KeyQuery("T", "k", before=offset)).why == "absent before the cursor"
        assert query_exact(index, KeyQuery("T", "none")).why == "absent"
        (behind,) = empty.append(spec())
        # What is not indexed yet stands behind the cursor, unless the cursor is behind the index.
        assert query_exact(index, KeyQuery("T", "k", before=offset)).why == "absent before the cursor"
        assert query_exact(index, KeyQuery("T", "none", before=behind)).why == "absent before the cursor"
        assert str(query_exact(index, KeyQuery("T", "none", before=behind + 1)).why).startswith("not yet indexed")


def test_a_query_is_ended_by_its_check(empty: QueueStore) -> None:
    _, offsets = built(empty, *[spec() for _ in range(20)])
    with open_data(empty.data) as data:
        assert len(data.by_key("T", "k").hits) == 20
        data.set_check(Mock(side_effect=KeyError))
        for query in (
            lambda: data.by_key("T", "k"),
            lambda: data.by_key("T", "none"),
            lambda: data.by_queue("T", 0),
            lambda: data.at_time("T", 0, T0),
            lambda: data.message(offsets[0]),
        ):
            with pytest.raises(KeyError):
                query()


def test_queues_that_were_left_out_and_one_that_starts_late(empty: QueueStore) -> None:
    empty.writer.queue_offsets["T", 0] = 11
    built(empty, *[spec() for _ in range(3)])
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
    for call in (
        lambda: data.by_key("T", "k"),
        lambda: data.by_queue("T", 0),
        lambda: data.at_time("T", 0, T0),
        lambda: data.log_at_time(T0),
        lambda: data.message(0),
        data.coverage,
        data.__enter__,
    ):
        with pytest.raises(UsageError, match="is closed"):
            call()


def log_of(empty: QueueStore) -> LogView:
    return open_log(Disk(), config_of(empty.data, store=empty.root, segment_size=SEGMENT), None)


def test_messages_by_offset_and_id(empty: QueueStore) -> None:
    v6 = replace(spec(), store_host=("2001:db8::1", 10911))
    first, second, third = empty.append(spec(), v6, spec(size=20))
    log = log_of(empty)
    for offset, digits in ((first, 32), (second, 56)):
        found = find_by_offset(log, offset)
        assert (found.phy_offset, len(found.offset_msg_id)) == (offset, digits)
        assert find_by_id(log, found.offset_msg_id.lower()) == found
    assert "stored by [2001:db8::1]:10911" in find_by_id(log, f"7f00000100002a9f{second:016x}").reason
    for offset, said in (
        (empty.writer.max_offset, "nothing is written"),
        (10**12, "does not reach"),
        (-1, "not reach"),
    ):
        assert said in find_by_offset(log, offset).reason
    path = empty.root / "commitlog" / f"{0:020d}"
    patch(path, third + 92, b"\1")
    assert "CRC" in find_by_offset(log, third).reason
    empty.append(spec(size=3900))
    path.unlink()
    assert "has expired" in find_by_offset(log_of(empty), first).reason
    log.close()


@pytest.mark.parametrize("text", ["", "zz" * 16, "00" * 15, "00" * 17, " " + "00" * 16, "0x" + "00" * 15])
def test_what_is_no_message_id(text: str) -> None:
    with pytest.raises(UsageError, match="no offset message id"):
        parse_message_id(text)


def body_of(sys_flag: int, body: bytes, most: int | None = None) -> Body:
    data = encode_frame(FrameSpec("T", body, sys_flag=sys_flag), 0)
    message = decode_frame(data, 0, 0, 1 << 40, DecoderOptions())
    assert isinstance(message, Message)
    return unpack_body(message, most)


@pytest.mark.parametrize(
    ("sys_flag", "body", "compression", "unpacked", "shown"),
    [
        (0, b"text\n", None, False, "text\n"),
        (0, b"\xff\x00", None, False, "/wA="),
        (0, b"a\x1b[0m", None, False, "YRtbMG0="),
        (1, zlib.compress("é".encode()), "zlib", True, "é"),
        (0x301, zlib.compress(b"x"), "zlib", True, "x"),
        (1, b"not zlib", "zlib", False, "not zlib"),
        (1, CUT_OFF, "zlib", False, base64.b64encode(CUT_OFF).decode()),
        # More than is believed stays as it is stored.
        (1, TOO_MUCH, "zlib", False, base64.b64encode(TOO_MUCH).decode()),
        (0x101, b"lz4", "lz4", False, "lz4"),
        (0x201, b"zstd", "zstd", False, "zstd"),
        (0x701, b"?", "unknown (7)", False, "?"),
    ],
)
def test_bodies(sys_flag: int, body: bytes, compression: str, unpacked: bool, shown: str) -> None:
    found = body_of(sys_flag, body)
    assert (found.compression, found.is_unpacked, found.to_json()["body"]) == (compression, unpacked, shown)


@pytest.mark.parametrize("most", [0, 1, 1023, 1024])
def test_no_more_is_unpacked_than_is_wanted(most: int) -> None:
    body = bytes(range(256)) * 4
    assert body_of(1, zlib.compress(body), most) == Body(body[:most], "zlib", is_unpacked=True, is_cut=most < 1024)


# --- the commands ---


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main([str(word) for word in argv])
    out, err = capsys.readouterr()
    return int(stopped.value.code or 0), out, err


@pytest.fixture
def asked(tmp_path: Path) -> Store:
    specs = (
        spec(KEYS="k 订单", UNIQ_KEY="u", TAGS="t"),
        spec(T0 + 5000),
        spec(topic="L\x07", KEYS="a\x1b\tb"),
        spec(size=1),
    )
    return built(Store(tmp_path), *specs)[0]


@pytest.fixture
def queued(tmp_path: Path) -> QueueStore:
    specs = [spec(T0 + 10 * n, KEYS=f"k order-{n}", TAGS="标签\x1b") for n in range(20)]
    return built(QueueStore(tmp_path), *specs)[0]


def rows(capsys: pytest.CaptureFixture[str], plain: Store, *words: object) -> dict[str, Any]:
    """The one line that a command prints with --json."""
    code, out, _ = run(capsys, words[0], "--data", plain.data, *words[1:], "--json")
    assert (code, out.count("\n")) == (0, 1)
    row: dict[str, Any] = json.loads(out)
    return row


def test_query_key(asked: Store, capsys: pytest.CaptureFixture[str]) -> None:
    offsets = [message.phy_offset for message in asked.messages()]
    command = ("query-key", "-t", "T", "-k", "k")
    assert rows(capsys, asked, *command) == {
        "topic": "T",
        "key": "k",
        "phyOffsets": [offsets[3], offsets[1], offsets[0]],
        "storeTimestamps": [T0, T0 + 5000, T0],
        "hits": [asked.messages()[number].hit() for number in (3, 1, 0)],
        "truncated": False,
        "coverage": {
            "begin": 0, "end": asked.writer.max_offset, "logBegin": 0, "complete": True, "uncovered": [],
            "daemonPid": None,
        },
    }  # fmt: skip
    row = rows(capsys, asked, *command, "-m", 1, "--mode", "rocketmq")
    assert row["phyOffsets"] == [offsets[3]] == [hit["phyOffset"] for hit in row["hits"]]
    assert (row["indexLastUpdateTimestamp"], row["indexLastUpdatePhyoffset"]) == (T0, offsets[3])
    row = rows(capsys, asked, *command[:-1], "t", "--index-type", "T")
    assert (row["indexType"], row["phyOffsets"]) == ("T", offsets[:1])
    command = ("query-unique-key", "-t", "T", "-i", "u")
    row = rows(capsys, asked, *command)
    assert (row["key"], row["indexType"], row["phyOffsets"]) == ("u", "U", [0])
    assert row["hits"] == [asked.messages()[0].hit()]
    assert rows(capsys, asked, *command, "--mode", "rocketmq", "-m", 0)["phyOffsets"] == [0]
    row = rows(capsys, asked, *command[:-1], "k")
    assert (row["phyOffsets"], row["why"]) == ([], "absent")


ALL = "covered: log bytes 0 to {end}, all of the log; no daemon runs"
HEADS = "STORE TIME PHY OFFSET QUEUE OFFSET SIZE TAGS KEYS UNIQ_KEY"
QUEUE = "-t T -i 0"


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        ("asked", "query-key -t T -k k", ["k 订单", ALL]),
        ("asked", "query-key -t T -k none", ["no message: absent\n"]),
        ("asked", "query-key -t L\x07 -k a\x1b~b -m 1", [r"a\x1b\tb"]),
        ("asked", "message -i {id} --body", ["KEYS = k 订单"]),
        (
            "queued",
            f"query-offset {QUEUE} -o 3 -m 2",
            [HEADS, "order-4", "nextOffset 5", "minOffset 0, maxOffset 20", ALL],
        ),
        ("queued", f"query-offset {QUEUE} -o 99", ["no message: behind the last message"]),
        ("queued", "query-offset -t none -i 0 -o 0", ["no message: no such queue"]),
        ("queued", f"query-time {QUEUE} -s {T0 + 55} --boundary lower", ["order-6", "queueOffset 6,"]),
        ("queued", f"query-time {QUEUE} -s {T0 + 55} --boundary upper", ["order-5", "queueOffset 5,"]),
        ("queued", f"query-time {QUEUE} -s {T0 + 60} --boundary upper", ["order-6", "queueOffset 6,"]),
        ("queued", f"query-time {QUEUE} -s {T0 + 55}", ["queueOffset 6, "]),
        ("queued", f"query-time {QUEUE} -s {T0 + 999}", ["no message: behind the last message"]),
        ("queued", "query-time -t T -i 5 -s 1", ["no message: no such queue"]),
        ("queued", f"query-time --log -s {T0 + 65}", ["order-7"]),
        ("queued", f"query-time --log -s {T0 + 999}", ["no message: absent\n"]),
    ],
)
def test_what_is_said(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], kind: str, words: str, said: list[str]
) -> None:
    plain: Store = request.getfixturevalue(kind)
    given = [word.replace("~", "\t").format(id="7F00000100002A9F" + "0" * 16) for word in words.split(" ")]
    code, out, _ = run(capsys, given[0], "--data", plain.data, *given[1:])
    assert code == 0
    assert "\x1b" not in out
    assert "PROBLEM" not in out
    shown = out + " ".join(out.splitlines()[0].split())
    assert [text for text in said if text.format(end=plain.writer.max_offset) not in shown] == []


def test_batch(
    asked: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines = f"T\tk\t64\t0\t{TIME_MAX}\nT\tt\t1\t0\t{T0}\tT\nT\t订单\t2\t0\t{T0}\t\nT\tnone\t64\t0\t5"
    (tmp_path / "batch").write_text(lines)
    command = ("query-key", "--data", asked.data, "--batch")
    code, out, _ = run(capsys, *command, tmp_path / "batch")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [len(row["phyOffsets"]) for row in rows] == [3, 1, 1, 0]
    assert [row.get("indexType") for row in rows] == [None, "T", None, None]
    assert [row["key"] for row in rows] == ["k", "t", "订单", "none"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    assert run(capsys, *command, "-", "--mode", "rocketmq")[1].count("indexLastUpdateTimestamp") == 4


@pytest.mark.parametrize(
    "line",
    [b"", b"T\tk", b"T\tk\t1\t2\t3\tK\tx", b"T\tk\tone\t0\t5", b"T\tk\t1\t0\t9223372036854775808", b"T\tk\t1\t0\t5\tX",
     b"T\t\t1\t0\t5", b"\tk\t1\t0\t5", b"T\tk\t1\t-5\t5", b"T\tk\t1\t0\t-5", b"T\tk\t1\t6\t5",
     b"T\t\xff\t1\t0\t5", b"T\tk\t10001\t0\t5", b"T\tk\t1_0\t0\t5", b"T\tk\t1\r\t0\t5"],
)  # fmt: skip
def test_a_malformed_line(asked: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: bytes) -> None:
    (tmp_path / "batch").write_bytes(b"T\tk\t1\t0\t5\n" + line + b"\n")
    code, out, err = run(capsys, "query-key", "--data", asked.data, "--batch", tmp_path / "batch")
    assert (code, out.count("\n")) == (2, 1)
    assert "line 2" in err


def test_message(asked: Store, capsys: pytest.CaptureFixture[str]) -> None:
    row = rows(capsys, asked, "message", "-o", 0)
    assert [row[name] for name in ("topic", "keys", "uniqKey", "body")] == ["T", ["k", "订单"], "u", ""]
    code, out, err = run(capsys, "message", "--data", asked.data, "-o", 1)
    assert (code, out, err.count("\n")) == (1, "", 1)


def test_queues_and_times(queued: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    hits = [message.hit() for message in queued.messages()]
    row = rows(capsys, queued, "query-offset", "-t", "T", "-i", 0, "-o", 3, "-m", 2)
    assert ([m["queueOffset"] for m in row["messages"]], row["nextOffset"], row["truncated"]) == ([3, 4], 5, True)
    assert row["hits"] == hits[3:5]
    row = rows(capsys, queued, "query-offset", "-t", "T", "-i", 0)
    assert (row["queueOffset"], len(row["messages"])) == (0, 20)
    row = rows(capsys, queued, "query-time", "-t", "T", "-i", 0, "-s", T0 + 55, "--boundary", "upper")
    assert (row["queueOffset"], row["storeTimestamp"], row["hits"]) == (5, T0 + 50, hits[5:6])
    row = rows(capsys, queued, "query-time", "--log", "-s", T0 + 65)
    found = (row["phyOffset"], row["storeTimestamp"], row["segment"], row["hits"])
    assert found == (queued.messages()[7].phy_offset, T0 + 70, 0, hits[7:8])
    for where in (("-t", "T", "-i", 0), ("--log",)):
        assert rows(capsys, queued, "query-time", *where, "-s", T0 + 999)["hits"] == []


@pytest.mark.parametrize(
    "words",
    [
        "query-time -s 1", "query-time -t T -s 1", "query-time -i 0 -s 1", "query-time --log", "query-time -t T -i 0",
        "query-time --log -t T -s 1", "query-time --log -i 0 -s 1", "query-time --log -s 1 --boundary lower",
        "query-time -t T -i 0 -s x", "query-time -t T -i 0 -s 1 --boundary middle", "query-time -t T -i q -s 1",
        "query-offset -t T -o 0", "query-offset -i 0 -o 0",
        "query-offset -t T -i 0 -o 0 -m 0",
        "query-offset -t T -i 0 -o 0 -m 10001", "query-offset -t T -i 0 -o 0.5", "query-offset -t T -i -1 -o 0",
        "query-offset -t T -i 2147483648 -o 0", "query-offset -t T -i 0 -o -1", "query-offset -t= -i 0 -o 0",
        "query-time -t T -i 0 -s -1", "query-time -t T -i -1 -s 1", "query-time --log -s -1",
        "query-time -t= -i 0 -s 1",
        "query-key -t T -k=", "query-key -t= -k k", "query-key -t T -k k -b -1", "query-key -t T -k k -e -1",
        "query-key -t T -k k -b 2 -e 1", "query-key -t T -k k --cursor -1", "query-unique-key -t T -i=",
        "query-unique-key -t= -i u", "query-unique-key -t T -i u -b -1", "message -o -1", "message -i=",
        "stats -b -1", "stats -e -1", "stats -t=", "export --to x -b -1", "export --to x -e -1",
        "query-key -t T -k k --cursor x", "query-key -t T -k k --cursor 5 --mode rocketmq",
        "query-key --batch - --cursor 5", "query-key --batch - -m 5", "query-key --batch - -b 5",
        "query-key --batch - -e 5", "query-key --batch - --index-type K", "inspect --frames -1 .", "query-key -t T",
        "query-key -k k", "query-key -t T -k \udc80", "query-key -t T -k k --batch -", "query-key --batch /no",
        "query-key -t T -k k -m 10001", "query-key -t T -k k -b x", "query-key -t T -k k --mode x", "message",
    ],
)  # fmt: skip
def test_wrong_words_of_any_query(queued: QueueStore, capsys: pytest.CaptureFixture[str], words: str) -> None:
    code, out, err = run(capsys, *words.split(), "--data", queued.data)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_pages_of_a_key(queued: QueueStore, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["query-key", "--data", queued.data, "-t", "T", "-k", "k", "-m", 6]
    got, row = [], {"cursor": None}
    while "cursor" in row:
        words = ["--cursor", row["cursor"]] if got else []
        row = json.loads(run(capsys, *command, *words, "--json")[1])
        got += row["phyOffsets"]
        assert ("cursor" in row) == row["truncated"]
        assert (f"cursor {row.get('cursor')}" in run(capsys, *command, *words)[1]) == row["truncated"]
    assert got == [message.phy_offset for message in queued.messages()][::-1]
