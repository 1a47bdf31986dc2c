"""Queries by key that one compiled call answers: the same as the plain way, byte for byte, and no wait for a disk."""

from __future__ import annotations

import asyncio
import random
import struct
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd.errors import CorruptDataError
from indexd.index.format import IndexLayout
from indexd.query import TIME_MAX, QueryIndex
from indexd.query.broker_message import query_message
from indexd.serve.queries import Queries
from indexd.serve.remoting.command import HEADER_MAX, Form, FrameError, RemotingCommand, encode_command
from indexd.serve.remoting.key_queries import TOGETHER_MAX, IndexTables, load_key_queries
from indexd.storage.disk import Disk, WouldWaitError
from support.data_directory import SEGMENT, T0, Store, built, spec
from support.page_cache import forget
from support.remoting_asking import (
    ANY_SIZE,
    COMPILED,
    FIELDS,
    FRAME_MAX,
    Asking,
    Both,
    Judge,
    both,
    by_key,
    damage,
    frame_of,
    framed,
    frames,
    header,
    request,
    six_messages,
    written,
)


def fifty_messages(root: Path) -> Store:
    """Some messages in several files and segments; k is a key of all, ``k-3`` of one, u3 its unique key."""
    specs = [spec(T0 + 700 * n, KEYS=f"k k-{n}", UNIQ_KEY=f"u{n}", size=n * 37 % 900) for n in range(50)]
    return built(Store(root, IndexLayout(7, 40), segment=1 << 14), *specs)[0]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return fifty_messages(tmp_path_factory.mktemp("fifty"))


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
            {"version": 0},
        ):
            assert way.together(framed(written(header(**members))))[0] == 1, members


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


NEEDED = ("topic", "key", "maxNum", "beginTimestamp", "endTimestamp")
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
        *[framed(written(header(**{name: None}))) for name in header() if name != "code"],
        framed(written(header(remark="a remark"))),
        framed(written({"code": 12} | dict(reversed(header().items())))),
        *[framed(written(header({one: FIELDS[one] for one in FIELDS if one != left}))) for left in NEEDED],
        *[framed(GOOD.replace(one, other, 1)) for one, other in TURNED],
        *[request(**{"key": "k"} | fields) for fields in ASKED],
    ]
    async with both(store) as way:
        for frame in others:
            assert way.together(request() + frame + request())[0] == 1, frame
        for more in (-5, -4):
            assert way.together(request(), frame_max=len(request()) + more)[0] == 5 + more
        for size in (HEADER_MAX, HEADER_MAX + 1):
            filling = (size - len(GOOD) - len(',"filling":""')) * "x"
            assert way.together(request(filling=filling))[0] == HEADER_MAX + 1 - size


UNIQUE = {"key": "u", "_UNIQUE_KEY_QUERY": "true", "maxNum": "64"}


@pytest.mark.parametrize(
    ("keys", "fields", "wanted"),
    [
        ({"max_msgs_num_batch": 9}, {}, 9), ({"max_msgs_num_batch": 9}, {"maxNum": "5"}, 5),
        ({"max_msgs_num_batch": 9}, UNIQUE, 9), ({}, UNIQUE, 32), ({"default_query_max_num": 5}, UNIQUE, 5),
        ({"default_query_max_num": 40}, UNIQUE, 40),
    ],
)  # fmt: skip
async def test_as_many_as_the_configuration_has(
    tmp_path: Path, keys: dict[str, int], fields: dict[str, str], wanted: int
) -> None:
    store, _ = built(
        Store(tmp_path, IndexLayout(7, 400), flavour="5.4", segment=1 << 16),
        *[spec(T0 + number, KEYS="k", TAGS="tag", UNIQ_KEY="u") for number in range(60)],
    )
    async with both(store, **keys) as way:
        answered, answers = way.together(request(**fields))
        assert (answered, answers.count(struct.pack(">I", 0xDAA320A7))) == (1, wanted)
        assert way.together(request("tag", indexType="T"))[0] == 0


async def test_answers_that_fill_what_there_is(tmp_path: Path) -> None:
    store, _ = built(
        Store(tmp_path, IndexLayout(7, 400), segment=1 << 20),
        *[spec(T0 + number, size=3000) for number in range(30)],
        spec(T0 + 99, KEYS="large", size=300_000),
    )
    async with both(store) as way:
        answered, answers = way.together(10 * request())  # 90 KiB each
        assert answered == 2
        assert len(answers) > 180_000
        assert way.together(request("large"))[0] == 0
    async with both(store, remoting_frame_max=64 << 10) as way:
        assert way.together(request())[0] == 0
        assert way.together(request(maxNum="9"))[0] == 1


async def test_without_a_memory_or_while_it_recovers_nothing(store: Store) -> None:
    with Asking(store) as to:
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
    store: Store, fields: dict[str, Any], members: dict[str, Any], turned: list[tuple[int, int]], is_cut: bool
) -> None:
    """No answer that the plain way would not give, and no read outside of what came."""
    data = bytearray(request() + framed(written(header(FIELDS | fields, **members))) + request("k-3"))
    for place, byte in turned:
        data[place % len(data)] = byte
    if is_cut and turned:
        del data[turned[0][0] % len(data) :]

    async def ask() -> None:
        async with both(store) as way:
            try:
                way.together(bytes(data))
            except FrameError as error:  # of the plain way: it may not refuse what was answered
                pytest.fail(str(error))

    asyncio.run(ask())


async def test_from_the_next_query_on(store: Store) -> None:
    may_load = threading.Event()

    def load() -> Callable[[QueryIndex], IndexTables] | None:
        load_key_queries()
        may_load.wait(60)
        return IndexTables

    with Asking(store) as to:
        queries = Queries(to.config, to.board, 2, load)
        try:
            for _ in range(2):  # nothing is open, and then nothing compiled
                assert queries.ask_compiled(str) is None
                await queries.ask(lambda data: data.index.look())
            (compiling,) = [thread for thread in threading.enumerate() if thread.name == "query-compile"]
            may_load.set()
            compiling.join(60)
            await queries.ask(lambda data: data.index.look())
            queries.look_seconds = 60.0
            assert queries.ask_compiled(lambda compiled: compiled.prepare() or compiled)
        finally:
            queries.stop()
            assert queries.close() == 0


async def test_a_look_serves_for_a_moment_only(tmp_path: Path) -> None:
    store = fifty_messages(tmp_path)
    async with both(store) as way:
        assert way.together(request())[0] == 1
        way.to.queries.look_seconds = 0.0
        assert way.together(request())[0] == 0
        built(store, spec(T0 + 99_000, KEYS="k"))
        assert (await way.to.key()).body.endswith(frame_of(store, 50))


async def test_a_disk_that_has_to_be_asked_is_not(disk_path: Path) -> None:
    store = six_messages(disk_path)
    async with both(store) as way:
        for folder in (store.root / "commitlog", store.data / "index"):
            assert way.together(request())[0] == 1
            for path in folder.iterdir():
                forget(path)
            assert way.compiled.answer(request(), FRAME_MAX) is None
            assert (await way.to.key()).body == frame_of(store, 4) + frame_of(store, 5)


async def test_an_error_is_met_again_by_who_may_wait(store: Store) -> None:
    def fail(_: object) -> None:
        raise CorruptDataError("no such")

    async with both(store) as way:
        queries, board = way.to.queries, way.to.board
        assert queries.ask_compiled(fail) is None
        assert board.queries["error"] == 0
        with pytest.raises(CorruptDataError):
            await queries.query(fail, str)
        assert board.queries["error"] == 1


def test_a_hurry_is_for_what_is_open_and_in_memory(disk_path: Path) -> None:
    path, disk = disk_path / "file", Disk()
    path.write_bytes(bytes(range(256)) * 64)
    with disk.open_read(path) as file:
        assert file.pread(4, 256) == b"\0\1\2\3"
        disk.nonblocking = True
        assert file.pread(4, 258) == b"\2\3\4\5"
        for call in (
            lambda: file.pread(8, 256 * 64 - 4),  # beyond the end: it is not told apart from what is not in memory
            *(partial(call, path) for call in (disk.open_read, disk.stamp, disk.exists, disk.read)),
            *(partial(call, disk_path) for call in (disk.stamps, disk.list_dir, disk.list_dirs)),
            lambda: forget(path) or file.pread(4, 8192),
        ):
            with pytest.raises(WouldWaitError):
                call()
        disk.nonblocking = False
        assert file.pread(8, 256 * 64 - 4) == b"\xfc\xfd\xfe\xff"


LARGE = IndexLayout(101, 1000)


def test_a_hot_key_in_many_files_and_segments(tmp_path: Path) -> None:
    store, _ = built(
        Store(tmp_path, IndexLayout(7, 40), segment=1 << 16),
        *[spec(T0 + 500 * number, KEYS=f"k other-{number}", size=number * 37 % 7000) for number in range(120)],
    )
    with store.index() as index:
        judge = Judge(index)
        judge.ask(by_key())
        for request in (
            by_key(),
            by_key(max_num=0),
            by_key(max_num=1),
            by_key(max_num=1 << 30),
            by_key(begin=T0 + 10_000, end=T0 + 30_500),
            by_key(end=T0),
            by_key(begin=T0 + 59_500),
            *[by_key(f"other-{number}") for number in range(120)],
            by_key("absent"),
        ):
            judge.ask(request)
        assert frames(judge.ask(by_key())) == 64
        assert judge.answered[COMPILED] > 60
        for size_max in (100, 10_000, 100_000, 200_000):
            judge.ask(by_key(), size_max)


def test_more_files_than_are_kept_open(tmp_path: Path) -> None:
    store = Store(tmp_path, IndexLayout(3, 5), segment=1 << 16)
    sent, compiled = 0, []
    for count in (200, 100):
        store.append(*[spec(T0 + 500 * number, KEYS=f"k-{number}") for number in range(sent, sent + count)])
        sent += count
        store.build()
        with store.index() as index:
            judge = Judge(index)
            for number in range(0, sent, 7):
                assert frames(judge.ask(by_key(f"k-{number}"))) == 1
            compiled.append(judge.answered[COMPILED])
            assert len(index.look().files) == (50 if count == 200 else 75)
    assert compiled[0] > 20
    assert compiled[1] == 0


def test_a_long_walk(tmp_path: Path) -> None:
    store = Store(tmp_path, IndexLayout(1, 12_000), segment=1 << 20)
    keys = [" ".join(f"k-{number}-{piece}" for piece in range(10)) for number in range(1100)]
    built(store, *[spec(T0 + number, KEYS=text) for number, text in enumerate(keys)])
    with store.index() as index:
        judge = Judge(index)
        judge.ask(by_key("k-1099-0"))
        judge.answered.clear()
        assert frames(judge.ask(by_key("k-110-0", 1))) == 1  # behind 9,900 others
        assert judge.answered == {COMPILED: 1}


def write_word(store: Store, position: int, value: int) -> None:
    """Into the only index file."""
    (path,) = (store.data / "index").iterdir()
    with path.open("r+b") as file:
        file.seek(position)
        file.write(value.to_bytes(4, "big"))


def test_a_chain_in_a_circle_can_be_ended(tmp_path: Path) -> None:
    layout = IndexLayout(1, 3000)
    store, _ = built(
        Store(tmp_path, layout, segment=1 << 20), *[spec(T0 + number, KEYS=f"k-{number}") for number in range(2000)]
    )
    write_word(store, 36, 2**31 - 1)
    # From 10 back to 11, and so on: all of it comes with one read.
    write_word(store, layout.entry_position(10) + 16, 11)
    with store.index() as index:
        judge = Judge(index)
        index.log.check = check = Mock(side_effect=[None] * 999 + [TimeoutError])
        assert judge.compiled(by_key()) is None
        assert check.call_count < 100
        with pytest.raises(TimeoutError):
            query_message(index, by_key("absent"), ANY_SIZE)


def test_a_chain_that_goes_up_is_counted_by_the_plain_way(tmp_path: Path) -> None:
    layout = IndexLayout(1, 40)
    store, _ = built(Store(tmp_path, layout, segment=1 << 16), *[spec(T0 + 1000 * number) for number in range(4)])
    write_word(store, layout.entry_position(2) + 16, 3)
    with store.index() as index:
        judge = Judge(index)
        for _ in range(2):
            assert frames(judge.ask(by_key())) > 4
        assert judge.answered[COMPILED] == 0


def test_a_segment_beyond_all_offsets(tmp_path: Path) -> None:
    store, _ = built(Store(tmp_path, LARGE), *[spec(T0 + number) for number in range(3)])
    store.writer.close()
    (path,) = (store.root / "commitlog").iterdir()
    path.rename(path.with_name(f"{1 << 63:020d}"))
    with store.index() as index:
        judge = Judge(index)
        for _ in range(3):
            assert frames(judge.ask(by_key())) == 0


def test_a_log_that_grows(tmp_path: Path) -> None:
    store, _ = built(Store(tmp_path, LARGE, segment=1 << 16), *[spec(T0 + number, size=1000) for number in range(6)])
    with store.index() as index:
        judge = Judge(index)
        for number in range(6, 20):
            assert frames(judge.ask(by_key())) == number
            built(store, spec(T0 + number, size=1000))
        assert judge.answered[COMPILED] > 5


def test_what_has_expired_is_said_by_the_plain_way(tmp_path: Path) -> None:
    store, _ = built(Store(tmp_path, LARGE), *[spec(T0 + number, size=1000) for number in range(12)])
    with store.index() as index:
        judge = Judge(index)
        judge.ask(by_key())
        (store.root / "commitlog" / f"{0:020d}").unlink()
        assert str(getattr(judge.ask(by_key()), "remark", None)).endswith(" expired")
        damage(store, SEGMENT * 2)
        judge.ask(by_key())


def test_hostile_index_files(tmp_path: Path) -> None:
    """Any bytes: the same answer, the same complaint, and no read beyond a buffer."""
    store, _ = built(
        Store(tmp_path, IndexLayout(11, 60)),
        *[spec(T0 + 700 * number, KEYS=f"k other-{number % 9}") for number in range(50)],
    )
    files = sorted((store.data / "index").iterdir())
    good, rand, answered = [path.read_bytes() for path in files], random.Random(5), Counter[str]()
    for _ in range(150):
        for path, content in zip(files, good, strict=True):
            bad = bytearray(content)
            for _ in range(rand.choice([1, 3, 30])):
                # The header is 40 bytes, the slots 44, the entries 1200.
                at = rand.choice([rand.randrange(40), 40 + rand.randrange(44), 84 + rand.randrange(1200)])
                bad[at] = rand.choice([0, 1, 0x7F, 0x80, 0xFF, rand.randrange(256)])
            path.write_bytes(bad)
        with store.index() as index:
            judge = Judge(index)
            for key in ("k", "other-1", "absent"):
                judge.ask(by_key(key, rand.choice([1, 3, 64]), rand.choice([0, T0 + 9000]), TIME_MAX))
            answered += judge.answered
    assert answered[COMPILED] > 20
