"""Requests that the index answers over RocketMQ's own protocol, and frames that are sent: by key, by id, by queue."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd import __version__
from indexd.commitlog.decoder import DecoderOptions, Message, check_frame, decode_frame
from indexd.commitlog.format import Corrupt
from indexd.errors import UsageError
from indexd.index.format import IndexLayout
from indexd.query import TIME_MAX, KeyQuery, open_index
from indexd.query.broker_message import (
    FoundFrames,
    earliest_time,
    pull_message,
    query_message_exact,
    queue_bounds,
)
from indexd.serve.remoting import processor
from indexd.serve.remoting.command import Form
from indexd.storage.disk import Disk
from support.data_directory import SEGMENT, T0, Store, built, config_of, make_golden_data, spec
from support.goldens import unpack
from support.naive import exact_oracle
from support.queue_store import QueueStore
from support.remoting_asking import (
    ANY_SIZE,
    BUSY,
    BY_KEY,
    COMPILED,
    ERROR,
    NOT_FOUND,
    NOT_SERVED,
    PULL,
    SUCCESS,
    Asking,
    Judge,
    by_key,
    damage,
    frame_of,
    frames_at,
    raw,
    six_messages,
)
from support.strategies import Sample, logs, queries

LARGE = IndexLayout(101, 1000)


def ask(store: Store, key: str = "k", max_num: int = 64, *, size_max: int = ANY_SIZE) -> FoundFrames:
    with store.index() as index:
        judge = Judge(index)
        judge.ask(by_key(key, max_num), size_max)  # from then on its segments are open for the compiled way
        found = judge.ask(by_key(key, max_num), size_max)
    assert not isinstance(found, str)
    return found


@pytest.mark.parametrize("name", ["rocketmq-5.3-clean", "rocketmq-5.4-clean", "rocketmq-5.4-propcrc"])
def test_every_golden_answer_as_frames_in_ascending_order(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    make_golden_data(tmp_path / "data", golden)
    with closing(open_index(Disk(), config_of(tmp_path / "data"))) as index:
        judge, found_any, plain = Judge(index), 0, 0
        for row in golden.answers():
            times = (row["begin"], row["end"])
            found = judge.ask(KeyQuery(row["topic"], row["key"], max(row["max"], 0), *times, row.get("indexType")))
            offsets = sorted(row["phyOffsets"])
            last = (row["indexLastUpdateTimestamp"], row["indexLastUpdatePhyoffset"]) if offsets else (0, 0)
            frames = tuple(raw(golden.root / "commitlog", golden.segment_size, one) for one in offsets)
            remark = None if offsets else "the index names no such message"
            assert found == FoundFrames(frames, last, True, remark)
            found_any += bool(offsets)
            plain += bool(offsets) and (row.get("indexType") == "T" or not (row["topic"] + row["key"]).isascii())
    assert found_any > 50
    assert judge.answered[COMPILED] > 0.95 * (found_any - plain)


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


def test_it_asks_further_back_while_nothing_can_be_read(tmp_path: Path) -> None:
    store, offsets = built(
        Store(tmp_path, LARGE, segment=1 << 16), *[spec(T0 + 5000 * number, size=50) for number in range(12)]
    )
    for offset in offsets[3:]:
        damage(store, offset)
    # Three rounds of three: [9, 10, 11], then up to the time of 9, then up to that of 7.
    assert ask(store, max_num=3).frames == ()
    assert ask(store, max_num=4).frames == frames_at(store, offsets[2:3])
    assert ask(store, max_num=5).frames == frames_at(store, offsets[:3])
    assert ask(store, max_num=12).frames == frames_at(store, offsets[:3])


def test_a_damaged_frame_is_not_sent_and_said(tmp_path: Path) -> None:
    store, offsets = built(Store(tmp_path, LARGE), *[spec(T0 + number, size=50) for number in range(3)])
    damage(store, offsets[1])
    found = ask(store)
    assert found.frames == frames_at(store, [offsets[0], offsets[2]])
    assert found.remark == "of 3 messages that the index names: 1 unreadable"
    assert not found.is_covered
    damage(store, offsets[0], 4)
    damage(store, offsets[2], 28)
    found = ask(store)
    assert (found.frames, found.remark) == ((), "of 3 messages that the index names: 3 unreadable")


def test_an_answer_has_so_many_bytes(tmp_path: Path) -> None:
    store, offsets = built(
        Store(tmp_path, LARGE, segment=1 << 16), spec(size=100), spec(size=9000), spec(size=200), spec(size=5000)
    )
    sizes = [len(frame) for frame in frames_at(store, offsets)]
    found = ask(store, size_max=sizes[0] + sizes[2])
    assert found.frames == frames_at(store, [offsets[0], offsets[2]])
    assert found.remark is not None
    assert "2 too long for an answer of" in found.remark
    assert ask(store, size_max=sum(sizes)).frames == frames_at(store, offsets)
    assert len(ask(store, size_max=sum(sizes) - 1).frames) == 3
    assert ask(store, size_max=91).frames == ()


def test_what_has_expired_is_counted_and_said_where_nothing_is_found(tmp_path: Path) -> None:
    store, offsets = built(Store(tmp_path, LARGE), *[spec(T0 + number, size=1000) for number in range(6)])
    (store.root / "commitlog" / f"{0:020d}").unlink()
    gone = sum(offset < SEGMENT for offset in offsets)
    found = ask(store)
    assert found.frames == frames_at(store, offsets[gone:])
    assert found.remark == f"of 6 messages that the index names: {gone} expired"
    expired = f"the log begins at physical offset {SEGMENT}: what was before has expired"
    assert ask(store, "none")[2:] == (True, f"the index names no such message; {expired}")
    with store.index() as index:
        exact = query_message_exact(index, KeyQuery("T", "none", 9, 0, TIME_MAX, "K"), ANY_SIZE)
    assert exact[2:] == (True, f"absent; {expired}")


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


def test_a_pull_is_bounded_and_goes_on(tmp_path: Path) -> None:
    store, offsets = built(
        QueueStore(tmp_path, segment=1 << 17), *[spec(T0 + number, size=100) for number in range(40)]
    )
    frames, got, next_offset = frames_at(store, offsets), list[bytes](), 0
    size = len(frames[0])
    with store.index() as index:
        pull = partial(pull_message, index, "T", 0)
        assert len(pull(0, 1000, ANY_SIZE).frames) == 32
        while next_offset < 40:
            found = pull(next_offset, 7, 3 * size + 1)
            assert 0 < len(found.frames) <= 3
            got += found.frames
            next_offset = found.next_begin_offset
        assert tuple(got) == frames
    damage(store, offsets[1])
    with store.index() as index:
        for offset, max_num, size_max, wanted in (
            (0, 3, ANY_SIZE, ("FOUND", (frames[0], frames[2]), 3)),
            (1, 1, ANY_SIZE, ("NO_MATCHED_MESSAGE", (), 2)),
            (2, 1, size - 1, ("NO_MATCHED_MESSAGE", (), 3)),  # what no answer can hold keeps nobody from the next
        ):
            found = pull_message(index, "T", 0, offset, max_num, size_max)
            assert (found.status, found.frames, found.next_begin_offset) == wanted


def test_bounds_and_earliest_time_follow_the_log(tmp_path: Path) -> None:
    store, offsets = built(QueueStore(tmp_path), *[spec(T0 + number, size=900) for number in range(12)])
    with store.index() as index:
        for topic, queue_id in (("T", 9), ("../x", 0), ("no", 0)):
            assert (queue_bounds(index, topic, queue_id), earliest_time(index, topic, queue_id)) == ((0, 0), -1)
        for begin in (0, SEGMENT, offsets[-1] // SEGMENT * SEGMENT):
            for path in (store.root / "commitlog").iterdir():
                if int(path.name) < begin:
                    path.unlink()
            gone = sum(offset < begin for offset in offsets)
            assert (queue_bounds(index, "T", 0), earliest_time(index, "T", 0)) == ((gone, 12), T0 + gone)
            assert pull_message(index, "T", 0, gone, 9, ANY_SIZE).frames == frames_at(store, offsets[gone : gone + 9])
        assert pull_message(index, "T", 0, 0, 9, ANY_SIZE).status == "OFFSET_TOO_SMALL"
    (tmp_path / "none").mkdir()
    with built(Store(tmp_path / "none"), spec())[0].index() as index:
        for question in (queue_bounds, earliest_time):
            with pytest.raises(UsageError, match="holds no ConsumeQueues"):
                question(index, "T", 0)


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return six_messages(tmp_path)


async def test_messages_by_key(store: QueueStore) -> None:
    with Asking(store) as to:
        answer = await to.key()
        assert (answer.code, answer.remark) == (SUCCESS, None)
        assert answer.body == frame_of(store, 4) + frame_of(store, 5)
        last = store.messages()[5]
        assert answer.ext_fields == {
            "indexLastUpdateTimestamp": str(last.store_timestamp),
            "indexLastUpdatePhyoffset": str(last.phy_offset),
        }
        assert (await to.key(maxNum="1")).body == frame_of(store, 5)
        assert (await to.key(key="u2", _UNIQUE_KEY_QUERY="true", maxNum="1")).body == frame_of(store, 2)
        assert (await to.key(key="Tag", indexType="T")).body == answer.body
        assert (await to.key(key="Tag", indexType="K")).code == NOT_FOUND
        for index_type in ("", "K", "U", "anything"):
            assert (await to.key(indexType=index_type)).body == answer.body
        assert (await to.key(_UNIQUE_KEY_QUERY="true", key="u3", maxNum="-1")).code == SUCCESS
        assert to.board.queries["found"] == 9
        assert to.board.query_seconds.count == 10


@pytest.mark.parametrize(("mode", "nothing"), [("rocketmq", "the index names no such message"), ("exact", "absent")])
async def test_no_messages_by_key(store: QueueStore, mode: str, nothing: str) -> None:
    with Asking(store, remoting_mode=mode) as to:
        answer = await to.key(key="none")
        assert (answer.code, answer.body, answer.remark) == (NOT_FOUND, b"", nothing)
        assert answer.ext_fields == {"indexLastUpdateTimestamp": "0", "indexLastUpdatePhyoffset": "0"}
        assert to.board.queries == {"found": 0, "empty_covered": 1, "empty_uncovered": 0, "error": 0}
        assert (await to.key(maxNum="0")).remark
        end, counted = store.writer.max_offset, to.board.queries["empty_uncovered"]
        store.append(spec(T0 + 9000, KEYS="none"))
        remark = str((await to.key(key="none")).remark)
        assert f"not yet indexed: the log from physical offset {end} on" in remark
        assert remark.startswith(nothing) == (mode == "rocketmq")
        assert to.board.queries["empty_uncovered"] == counted + 1


async def test_one_message(tmp_path: Path) -> None:
    store, offsets = built(QueueStore(tmp_path, segment=1 << 17), spec(size=10), spec(size=9000), spec(size=70_000))
    with Asking(store, remoting_frame_max=65_536) as to:
        for number in range(2):
            answer = await to.ask(33, Form.ROCKETMQ, offset=str(offsets[number]), topic="T")
            assert (answer.code, answer.body, answer.remark) == (SUCCESS, frame_of(store, number), None)
        damage(store, offsets[0])
        for offset, reason in (
            (offsets[0], "a body that its CRC denies"),
            (offsets[0] + 1, "there stands neither a message's"),
            (offsets[2], "and an answer 61440 at most"),
            (store.writer.max_offset, "nothing is written there yet"),
            *((one, "the log does not reach there") for one in (1 << 40, -1, -(1 << 63), (1 << 63) - 1)),
        ):
            answer = await to.ask(33, offset=str(offset))
            assert (answer.code, answer.body) == (ERROR, b"")
            assert f"physical offset {offset}" in str(answer.remark)
            assert reason in str(answer.remark)
        assert to.board.queries == {"found": 2, "empty_covered": 8, "empty_uncovered": 0, "error": 0}


async def test_a_pull_of_a_tool(tmp_path: Path) -> None:
    store = QueueStore(tmp_path)
    store.append(spec(topic="other"))
    store.writer.queue_offsets["T", 0] = 5
    _, offsets = built(store, *[spec(T0 + number, size=number * 30) for number in range(10)])
    frames = frames_at(store, offsets)
    with Asking(store) as to:
        for queue_id, offset, max_num, wanted in (
            (0, 5, 4, (SUCCESS, "FOUND", frames[:4], "9", "5", "15")),
            (0, 14, 32, (SUCCESS, "FOUND", frames[9:], "15", "5", "15")),
            (0, 5, 0, (SUCCESS, "FOUND", frames[:1], "6", "5", "15")),
            (0, 5, -9, (SUCCESS, "FOUND", frames[:1], "6", "5", "15")),
            (0, 4, 32, (21, "OFFSET_TOO_SMALL", (), "5", "5", "15")),
            (0, -1, 32, (21, "OFFSET_TOO_SMALL", (), "5", "5", "15")),
            (0, 15, 32, (19, "OFFSET_OVERFLOW_ONE", (), "15", "5", "15")),
            (0, 16, 32, (21, "OFFSET_OVERFLOW_BADLY", (), "15", "5", "15")),
            (0, 1 << 62, 32, (21, "OFFSET_OVERFLOW_BADLY", (), "15", "5", "15")),
            (1, 0, 32, (19, "NO_MATCHED_LOGIC_QUEUE", (), "0", "0", "0")),
            (-1, 5, 32, (21, "NO_MATCHED_LOGIC_QUEUE", (), "0", "0", "0")),
            (1 << 30, 5, 32, (21, "NO_MATCHED_LOGIC_QUEUE", (), "0", "0", "0")),
        ):
            fields = {"queueId": str(queue_id), "queueOffset": str(offset), "maxMsgNums": str(max_num)}
            answer = await to.ask(11, **PULL | fields)
            code, status, found, *bounds = wanted
            assert (answer.code, answer.remark, answer.body) == (code, status, b"".join(found)), fields
            assert list(answer.ext_fields.values()) == ["0", *bounds]
        for fields in (PULL | {"consumerGroup": "orders"}, {}):  # nobody consumes here
            answer = await to.ask(11, **fields)
            assert (answer.code, answer.remark) == (
                NOT_SERVED,
                "indexd answers queries: consume from the broker itself",
            )


async def test_exact_mode_is_a_setting(tmp_path: Path) -> None:
    store, _ = built(QueueStore(tmp_path), spec(KEYS="Aa Aa"), spec(KEYS="BB"))
    first, second = frame_of(store, 0), frame_of(store, 1)
    for mode, body in (("rocketmq", first + first + second), ("exact", first)):
        with Asking(store, remoting_mode=mode) as to:
            answer = await to.key(key="Aa")
            assert answer.body == body
            assert answer.ext_fields["indexLastUpdatePhyoffset"] == str(store.messages()[1].phy_offset)


async def test_a_field_of_no_use_is_named_and_odd_texts_are_only_absent(store: QueueStore) -> None:
    with Asking(store) as to:
        for name, value in (
            *(("maxNum", text) for text in ("2147483648", "", " 1", "1_0", "0x1", "9" * 100_000)),
            ("beginTimestamp", "9223372036854775808"),
            ("endTimestamp", "x" * 100_000),
        ):
            answer = await to.key(**{name: value})
            assert answer.code == ERROR
            assert str(answer.remark).startswith(f"ext field {name} is no whole number")
            assert len(str(answer.remark)) < 200
        assert (await to.key(maxNum="-1")).remark == "maxNum has to be at least 0, not -1"
        for text in ("", "\ud800", "\x00", "../..", "k" * 100_000, "😀", "a b"):
            assert (await to.key(key=text)).code == (await to.key(topic=text)).code == NOT_FOUND
            assert (await to.ask(11, **PULL | {"topic": text})).code == 19
        assert to.board.queries["error"] == 0


async def test_offsets(store: QueueStore) -> None:
    queue, search = {"topic": "T", "queueId": "0"}, {"timestamp": str(T0 + 1500)}
    with Asking(store) as to:
        for code, fields, wanted, without in (
            (29, search, {"offset": "2"}, {"offset": "0"}),
            (29, search | {"boundaryType": "LOWER"}, {"offset": "2"}, {"offset": "0"}),
            (29, search | {"boundaryType": "upper"}, {"offset": "1"}, {"offset": "0"}),
            (29, search | {"boundaryType": "UPPER"}, {"offset": "1"}, {"offset": "0"}),
            (29, search | {"boundaryType": "sideways"}, {"offset": "2"}, {"offset": "0"}),
            (29, {"timestamp": str(TIME_MAX)}, {"offset": "6"}, {"offset": "0"}),
            (30, {}, {"offset": "6"}, {"offset": "0"}),
            (31, {}, {"offset": "0"}, {"offset": "0"}),
            (32, {}, {"timestamp": str(T0)}, {"timestamp": "-1"}),
        ):
            answer = await to.ask(code, **queue | fields)
            assert (answer.code, answer.ext_fields) == (SUCCESS, wanted), (code, fields)
            assert (await to.ask(code, **queue | fields | {"queueId": "7"})).ext_fields == without
        assert sum(to.board.queries.values()) == 0  # as many as consumers ask: no queries for messages


async def test_the_index_shows_itself_as_a_broker_does(store: QueueStore) -> None:
    row = {
        "commitLogMinOffset": 0, "commitLogMaxOffset": 4096, "dispatchBehindBytes": 17, "caughtUp": True,
        "corrupt": None, "problems": {"reput": "disk; full"}, "outputs": [{"output": "key"}], "half": "\ud800",
    }  # fmt: skip
    with Asking(store, row) as to:
        answer = await to.ask(28)
        table, started = json.loads(answer.body)["table"], str(to.board.row()["startedAt"])
        wanted = {
            "brokerVersionDesc": f"indexd {__version__}", "commitLogMaxOffset": "4096", "dispatchBehindBytes": "17",
            "indexdCommitLogMaxOffset": "4096", "bootTimestamp": started, "indexdStartedAt": started,
            "putTps": "0.0 0.0 0.0", "indexdMode": "shadow", "indexdCaughtUp": "true", "indexdQueriesFound": "0",
            "indexdQueriesEmptyCovered": "0", "pageCacheLockTimeMills": "0", "indexdProblemsReput": "disk; full",
            "sendThreadPoolQueueSize": "0", "pullThreadPoolQueueHeadWaitTimeMills": "0",
        }  # fmt: skip
        assert table | wanted == table
        assert all(isinstance(value, str) for value in table.values())
        assert not any("_" in name for name in table)
        assert not {"indexdCorrupt", "indexdOutputs"} & set(table)
        assert {name for name in table if name.startswith("indexd")} == set(processor.indexd_figures(to.board))
        to.board.recovering("replay", 1, 3)
        table = json.loads((await to.ask(28)).body)["table"]
        assert (table["indexdPhase"], table["indexdRecoveringStep"]) == ("recovering", "replay")
        assert "commitLogMaxOffset" not in table


async def test_while_it_recovers_and_stops_it_is_busy(store: QueueStore) -> None:
    with Asking(store) as to:
        to.board.recovering("log", 1, 3)
        for code in (12, 33, 11):
            answer = await to.ask(code, **BY_KEY | PULL | {"offset": "0"})
            assert (answer.code, answer.remark) == (BUSY, "the index is recovering")
        to.board.running(dict)
        assert (await to.key()).code == SUCCESS
        to.queries.stop()
        answer = await to.key()
        assert (answer.code, answer.remark) == (BUSY, "the daemon stops: ask again when it is back")
        assert to.board.queries["error"] == 3


async def test_an_error_is_its_line_and_what_takes_too_long_is_ended(store: QueueStore) -> None:
    with Asking(store) as to:
        (store.data / "frontier").write_bytes(b"damaged")
        answer = await to.key()
        assert answer.code == ERROR
        assert str(answer.remark).startswith(f"{store.data / 'frontier'} ")
        store.build()
        to.queries.query_seconds = -1.0
        answer = await to.key()
        assert (answer.code, answer.remark) == (ERROR, "the query took longer than -1 s, and was ended")
        assert to.board.queries["error"] == 2
