"""Queries by key that came together: what one compiled call answers is what the plain way answers, byte for byte."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd.index.format import IndexLayout
from indexd.query import TIME_MAX
from indexd.serve import queries as serve_queries
from indexd.serve.remoting import key_queries_kernel as kernel
from indexd.serve.remoting.command import HEADER_MAX, Form, FrameError, RemotingCommand, encode_command
from indexd.serve.remoting.key_queries import TOGETHER_MAX
from support.data_directory import T0, Store, spec
from support.remoting_asking import FIELDS, Both, asking, both, framed, header, request, written

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in memory takes as long as a busy machine takes."""
    monkeypatch.setattr(serve_queries, "_LOOK_SECONDS", 600.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Some messages in several files and segments; k is a key of all, ``k-3`` of one, u3 its unique key."""
    store = Store(tmp_path, IndexLayout(7, 40), segment=1 << 14)
    for number in range(50):
        store.append(spec(T0 + 700 * number, KEYS=f"k k-{number}", UNIQ_KEY=f"u{number}", size=number * 37 % 900))
    store.build()
    return store


async def test_each_answer_is_the_plain_one(store: Store) -> None:
    async with both(store) as way:
        for number in range(50):
            for key in (f"k-{number}", f"u{number}"):
                assert way.together(request(key))[0] == 1
        for fields in (
            {},
            {"maxNum": "1"},
            {"maxNum": "2147483647"},
            {"_UNIQUE_KEY_QUERY": "true", "maxNum": "0"},
            {"_UNIQUE_KEY_QUERY": "TRUE"},
            {"indexType": "K"},
            {"indexType": "U"},
            {"indexType": "T", "_UNIQUE_KEY_QUERY": "true"},
            {"beginTimestamp": str(T0 + 9000), "endTimestamp": str(T0 + 20_000)},
            {"beginTimestamp": str(T0 + 30_000)},
            {"unknown": "", "lo": "x", "": "y"},
        ):
            assert way.together(request(**fields))[0] == 1, fields
        for members in (
            {"opaque": 0},
            {"opaque": 2**31 - 1},
            {"version": None, "language": None, "flag": None, "serializeTypeCurrentRPC": None},
            {"remark": "a remark {\"'"[:10]},
            {"version": 0},
        ):
            assert way.together(framed(written(header(**members))))[0] == 1, members
        turned = {name: value for name, value in reversed(header().items()) if name != "code"}
        assert way.together(framed(written({"code": 12} | turned)))[0] == 1


async def test_many_answers_in_the_order_of_their_requests(store: Store) -> None:
    keys = [f"k-{number * 7 % 50}" for number in range(20)]
    data = b"".join(request(key, opaque) for opaque, key in enumerate(keys))
    async with both(store) as way:
        board = way.to.board
        found, seconds = board.queries["found"], board.query_seconds.count
        assert way.together(data)[0] == 20
        assert board.queries["found"] - found == 20
        assert board.query_seconds.count - seconds == 20
        assert 0 < way.together(100 * request())[0] < TOGETHER_MAX, "as far as it may read"
        assert way.together(400 * request("k-49", maxNum="1"))[0] == TOGETHER_MAX
        assert way.together(data[:-1])[0] == 19
        assert way.together(data + b"\0\0")[0] == 20
        for stranger in (request("absent"), framed("{}"), b"\xff" * 50, struct.pack(">ii", -1, 5) + bytes(20)):
            assert way.together(data + stranger + data)[0] == 20
            assert way.together(stranger + data)[0] == 0


GOOD, GOOD_FIELDS = written(header()), written(FIELDS)
#: What may be written otherwise.
TURNED = [
    (",", ", "), ('"JAVA"', '"J\\u0041VA"'), ('"JAVA"', '"J\x01"'), ('"JAVA"', '"J\x7f"'), ('"JAVA"', '"JÄVA"'),
    ('"JAVA"', "null"), ('"JAVA"', "7"), ('"k"', '"\\u006b"'), ('"32"', "32"), (":77", ":077"), (":77", ":-77"),
    (":77", ":7.7"), (":77", ":2147483648"), (":77", ":77777777777777777777"), (":77", ":"), (GOOD_FIELDS, "{}"),
    (GOOD_FIELDS, f"[{GOOD_FIELDS}]"), (GOOD_FIELDS, GOOD_FIELDS[:-1]), (GOOD_FIELDS, GOOD_FIELDS[:-1] + ',"key":"k"}'),
    ('"flag":0', '"flag":1'), ('"flag":0', '"flag":2'), ('"flag":0', '"flag":0,"flag":0'), ('"flag":0', '"other":0'),
    ('"flag":0', f'"extFields":{GOOD_FIELDS}'), ('"code":12', '"code":13'), ('"code":12', '"code":120'),
    ('"code":12', '"code":-12'), ('"code":12', '"code":"12"'), ('"code":12', '"code":12.0'),
]  # fmt: skip
#: What may be asked otherwise.
ASKED = [
    *[{name: text} for name in ("maxNum", "endTimestamp") for text in ("", "-1", "+1", "x", "1 ", "9" * 19)],
    {"maxNum": "2147483648"}, {"maxNum": "0"}, {"endTimestamp": str(TIME_MAX + 1)}, {"endTimestamp": str(T0 - 1)},
    {"key": "absent"}, {"key": "schlüssel"}, {"topic": "Other"}, {"indexType": "T"},
    {"indexType": "t"}, {"indexType": ""},
]  # fmt: skip


async def test_what_is_not_plain_is_left_to_the_plain_way(store: Store) -> None:
    others = [
        framed(GOOD, b"a body"),
        framed(GOOD, form=1),
        framed(GOOD[:-1]),
        framed(GOOD + " "),
        encode_command(RemotingCommand(12, 77, ext_fields=FIELDS, form=Form.ROCKETMQ)),
        *[framed(written(header(**{name: None}))) for name in ("opaque", "extFields")],
        *[framed(GOOD.replace(one, other, 1)) for one, other in TURNED],
        *[request(**{"key": "k"} | fields) for fields in ASKED],
    ]
    async with both(store) as way:
        for frame in others:
            assert way.together(request() + frame + request())[0] == 1, frame
        for more in (-5, -4):
            assert way.together(request(), frame_max=len(request()) + more)[0] == 5 + more
        for size in (HEADER_MAX, HEADER_MAX + 1):
            large = request(filling=(size - len(GOOD) - len(',"filling":""')) * "x")
            assert way.together(large)[0] == HEADER_MAX + 1 - size


@pytest.mark.parametrize("left", ["topic", "key", "maxNum", "beginTimestamp", "endTimestamp"])
async def test_a_field_that_is_missing(store: Store, left: str) -> None:
    frame = framed(written(header({name: value for name, value in FIELDS.items() if name != left})))
    async with both(store) as way:
        assert way.together(frame) == (0, b"")


async def test_tags_and_batches_as_the_configuration_has_them(tmp_path: Path) -> None:
    store = Store(tmp_path, IndexLayout(7, 400), flavour="5.4", segment=1 << 16)
    store.append(*[spec(T0 + number, KEYS="k", TAGS="tag", UNIQ_KEY="u") for number in range(60)])
    store.build()
    async with both(store, max_msgs_num_batch=9) as way:
        for fields in ({}, {"maxNum": "5"}, {"_UNIQUE_KEY_QUERY": "true", "key": "u"}):
            answered, answers = way.together(request(**fields))
            assert answered == 1
            assert answers.count(struct.pack(">I", 0xDAA320A7)) == (5 if fields.get("maxNum") == "5" else 9)
        assert way.together(request("tag", indexType="T"))[0] == 0


async def test_for_a_unique_key_as_many_as_the_broker_says(tmp_path: Path) -> None:
    store = Store(tmp_path, IndexLayout(7, 400), segment=1 << 16)
    store.append(*[spec(T0 + number, UNIQ_KEY="u") for number in range(60)])
    store.build()
    magic, unique = struct.pack(">I", 0xDAA320A7), {"key": "u", "_UNIQUE_KEY_QUERY": "true", "maxNum": "64"}
    for keys, wanted in (({}, 32), ({"default_query_max_num": 5}, 5), ({"default_query_max_num": 40}, 40)):
        async with both(store, **keys) as way:
            answered, answers = way.together(request(**unique))
            assert (answered, answers.count(magic)) == (1, wanted)


async def test_a_defect_is_said_and_the_plain_way_answers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    async with both(store) as way:
        monkeypatch.setattr(kernel, "answer_together", fail)
        for _ in range(3):
            assert way.together(request()) == (0, b"")
        assert (await way.to.key()).code == 0
        wanted = ("warning", "remoting_failed", {"code": 12, "problem": "ZeroDivisionError('a defect')"})
        assert way.to.log.lines == [wanted] * 3


async def test_answers_that_fill_what_there_is(tmp_path: Path) -> None:
    store = Store(tmp_path, IndexLayout(7, 400), segment=1 << 20)
    store.append(*[spec(T0 + number, size=3000) for number in range(30)], spec(T0 + 99, KEYS="large", size=300_000))
    store.build()
    async with both(store) as way:
        answered, answers = way.together(10 * request())  # 90 KiB each
        assert answered == 2
        assert len(answers) > 180_000
        assert way.together(request("large"))[0] == 0
    async with both(store, remoting_frame_max=64 << 10) as way:
        assert way.together(request())[0] == 0
        assert way.together(request(maxNum="9"))[0] == 1


async def test_a_log_and_an_index_that_grow(store: Store) -> None:
    async with both(store) as way:
        await asyncio.sleep(0)
        for number in range(50, 60):
            store.append(spec(T0 + 700 * number, KEYS=f"k-{number}"))
            store.build()
            serve_queries._LOOK_SECONDS = 0.0
            await way.to.key()
            serve_queries._LOOK_SECONDS = 600.0
            assert way.together(request(f"k-{number}"))[0] == 1


async def test_without_a_memory_or_while_it_recovers_nothing(store: Store) -> None:
    with asking(store) as to:
        way = Both(to, store)
        assert way.together(request()) == (0, b"")  # nothing is open
        await to.key()
        assert way.together(request()) == (0, b"")  # nothing is compiled
    async with both(store) as way:
        way.to.board.recovering("replay", 0, 1)
        assert way.together(request()) == (0, b"")
        way.to.board.running(dict)
        assert way.together(request())[0] == 1
        way.to.queries.stop()
        assert way.together(request()) == (0, b"")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """For many examples."""
    store = Store(tmp_path_factory.mktemp("large"), IndexLayout(7, 40), segment=1 << 14)
    store.append(*[spec(T0 + 700 * number, KEYS=f"k k-{number}", UNIQ_KEY=f"u{number}") for number in range(50)])
    store.build()
    return store


TEXTS = st.sampled_from(
    ["k", "k-1", "u2", "T", "true", "K", "0", "7", str(TIME_MAX), '"', "\\", "\n", "é", "", "x" * 99]
)
VALUES = st.one_of(TEXTS, st.integers(-3, 2**33), st.none(), st.booleans(), st.floats(0, 9), st.just([]), st.just({}))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(
    st.dictionaries(st.sampled_from([*FIELDS, "indexType", "other"]), VALUES, max_size=2),
    st.dictionaries(st.sampled_from(["flag", "opaque", "version", "language", "remark", "more"]), VALUES, max_size=1),
    st.lists(st.tuples(st.integers(0, 700), st.integers(0, 255)), max_size=2),
    st.booleans(),
)
def test_any_bytes(
    large: Store, fields: dict[str, Any], members: dict[str, Any], turned: list[tuple[int, int]], is_cut: bool
) -> None:
    """No answer that the plain way would not give, and no read outside of what came."""
    data = bytearray(request() + framed(written(header(FIELDS | fields, **members))) + request("k-3"))
    for place, byte in turned:
        data[place % len(data)] = byte
    if is_cut and turned:
        del data[turned[0][0] % len(data) :]

    async def ask() -> None:
        async with both(large) as way:
            try:
                way.together(bytes(data))
            except FrameError as error:  # of the plain way: it may not refuse what was answered
                pytest.fail(str(error))

    asyncio.run(ask())
