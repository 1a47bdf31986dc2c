"""Key queries answered by one compiled call in the event loop's own thread: nobody can tell, none waits for a disk."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, BinaryIO

import pytest

from indexd.errors import CorruptDataError
from indexd.serve import queries as serve_queries
from indexd.serve.queries import Queries
from indexd.serve.remoting.command import RemotingCommand, decode_command, encode_command
from indexd.serve.remoting.key_queries import IndexTables, KeyQueries, load_key_queries
from indexd.storage.disk import Disk, WouldWaitError
from support.data_directory import T0, spec
from support.page_cache import forget
from support.queue_store import QueueStore
from support.remoting import signed
from support.remoting_asking import ALL_TIME, FRAME_MAX, asking, both, frame_of, request, six_messages
from support.remoting_serving import Outlet, is_closed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from indexd.query import QueryIndex
    from indexd.serve.remoting.key_queries import Answered


_QUERY = {"topic": "T", "key": "k", "maxNum": "32"} | ALL_TIME
_KEYS = ("rocketmq", "12345678")


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return six_messages(tmp_path)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many were answered by each call that answered any."""
    done: list[int] = []
    answer = KeyQueries.answer

    def watched(self: KeyQueries, data: bytes, frame_max: int) -> Answered | None:
        found = answer(self, data, frame_max)
        done.extend([] if found is None else [found.requests])
        return found

    monkeypatch.setattr(KeyQueries, "answer", watched)
    return done


def query_frame(opaque: int, code: int = 12, fields: Mapping[str, str] = _QUERY) -> bytes:
    return encode_command(RemotingCommand(code, opaque, language="JAVA", version=493, ext_fields=dict(fields)))


def read_frame(stream: BinaryIO) -> bytes:
    """One without its length."""
    return stream.read(int.from_bytes(stream.read(4), "big"))


def wait_until_compiled(outlet: Outlet, together: list[int]) -> None:
    """Until requests are answered so."""
    with outlet.connect() as client, client.makefile("rb") as stream:

        def ask() -> bool:
            client.sendall(query_frame(1) + query_frame(2))
            return {decode_command(read_frame(stream)).opaque for _ in range(2)} == {1, 2} and bool(together)

        outlet.wait_for(ask)


def test_each_gets_its_own_answer(store: QueueStore, tmp_path: Path, together: list[int]) -> None:
    at = str(store.messages()[2].phy_offset)
    found, other, *_ = kinds = [
        _QUERY,
        _QUERY | {"key": "u1"},
        _QUERY | {"key": "absent"},
        _QUERY | {"maxNum": "x"},
        _QUERY | {"key": "k\n"},
        _QUERY | {"endTimestamp": str(T0)},
    ]
    asked = [*[(12, fields) for fields in kinds], (33, {"offset": at}), (310, {}), (34, {})]
    rand = random.Random(3)
    with Outlet(tmp_path) as outlet, outlet.connect() as client, client.makefile("rb") as stream:
        wait_until_compiled(outlet, together)
        wanted = []
        for code, fields in asked:
            client.sendall(query_frame(7, code, fields))
            wanted.append(decode_command(read_frame(stream)))
        assert [answer.code for answer in wanted] == [0, 0, 22, 1, 22, 22, 0, 3, 0]
        together.clear()
        time.sleep(0.2)  # the board is told fifty times a second
        before = outlet.row()["requests"]["QUERY_MESSAGE"]["ok"]
        sent = [rand.randrange(len(asked) if number % 100 > 40 else 2) for number in range(1000)]
        answers = {}
        for first in range(0, len(sent), 20):
            numbers = range(first, first + 20)
            data = b"".join(query_frame(number, *asked[sent[number]]) for number in numbers)
            for begin in range(0, len(data), 1777):
                client.sendall(data[begin : begin + 1777])
            for _ in numbers:
                answer = decode_command(read_frame(stream))
                answers[answer.opaque] = answer
        for number, kind in enumerate(sent):
            assert replace(answers[number], opaque=7) == wanted[kind]
        assert sum(together) > 200
        assert max(together) > 1
        ok = sum(asked[kind][1] in (found, other) for kind in sent)
        outlet.wait_for(lambda: outlet.row()["requests"]["QUERY_MESSAGE"]["ok"] == before + ok)


@pytest.mark.parametrize("way", ["signed", "exact"])
def test_not_where_more_is_asked_for(store: QueueStore, tmp_path: Path, together: list[int], way: str) -> None:
    settings: dict[str, Any] = {"remoting_mode": "exact"}
    fields = _QUERY
    if way == "signed":
        (tmp_path / "secret").write_text(_KEYS[1])
        settings = {"remoting_access_key": _KEYS[0], "remoting_secret_key_file": tmp_path / "secret"}
        fields = signed(_QUERY, b"", _KEYS)
    with Outlet(tmp_path, **settings) as outlet, outlet.client() as client:
        for _ in range(30):
            assert client.ask(12, fields).code == 0
        for _ in range(30):
            assert client.ask(12, _QUERY).code == (16 if way == "signed" else 0)
    assert not together


def test_a_frame_that_is_none_behind_those_that_are_answered(
    store: QueueStore, tmp_path: Path, together: list[int]
) -> None:
    with Outlet(tmp_path) as outlet:
        wait_until_compiled(outlet, together)
        with outlet.connect() as client, client.makefile("rb") as stream:
            client.sendall(query_frame(70) + query_frame(71) + b"\xff\xff\xff\xff" + query_frame(72))
            assert [decode_command(read_frame(stream)).opaque for _ in range(2)] == [70, 71]
            assert is_closed(client)
        outlet.wait_for(lambda: outlet.row()["closed"]["bytes"] == 1)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_LOOK_SECONDS", 60.0)


async def test_from_the_second_query_on(store: QueueStore) -> None:
    loaded = threading.Event()

    def load() -> Callable[[QueryIndex], IndexTables] | None:
        load_key_queries()
        loaded.set()
        return IndexTables

    with asking(store) as to:
        queries = Queries(to.config, to.board, 2, load)
        try:
            with pytest.raises(WouldWaitError):
                queries.ask_compiled(str)  # nothing is open
            await queries.ask(lambda data: data.index.look())
            assert await asyncio.to_thread(loaded.wait, 60)
            await asyncio.sleep(0.1)
            await queries.ask(lambda data: data.index.look())
            assert queries.ask_compiled(lambda compiled: compiled.prepare()) is not None
        finally:
            queries.stop()
            assert queries.close() == 0


async def test_a_look_serves_for_a_moment_only(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async with both(store) as way:
        assert way.together(request())[0] == 1
        monkeypatch.setattr(serve_queries, "_LOOK_SECONDS", 0.0)
        assert way.together(request())[0] == 0
        store.append(spec(T0 + 9000, KEYS="k"))
        store.build()
        answer = await way.to.key()
        assert answer.body.endswith(frame_of(store, 6))


async def test_an_error_is_met_again_by_who_may_wait(store: QueueStore) -> None:
    def fail(_: object) -> None:
        raise CorruptDataError("no such")

    async with both(store) as way:
        queries, board = way.to.queries, way.to.board
        with pytest.raises(WouldWaitError):
            queries.ask_compiled(fail)
        assert board.queries["error"] == 0
        with pytest.raises(CorruptDataError):
            await queries.query(fail, str)
        assert board.queries["error"] == 1


async def test_a_disk_that_has_to_be_asked_is_not(disk_path: Path) -> None:
    store = six_messages(disk_path)
    async with both(store) as way:
        assert way.together(request())[0] == 1
        for path in (store.root / "commitlog").iterdir():
            forget(path)
        assert way.compiled.answer(request(), FRAME_MAX) is None
        answer = await way.to.key()
        assert answer.body == frame_of(store, 4) + frame_of(store, 5)


def test_a_hurry_is_for_what_is_open_and_in_memory(disk_path: Path) -> None:
    path, other = disk_path / "file", disk_path / "other"
    path.write_bytes(bytes(range(256)) * 64)
    other.write_bytes(b"other")
    disk = Disk()
    with disk.open_read(path) as file:
        assert file.pread(4, 256) == b"\0\1\2\3"
        disk.nonblocking = True
        assert file.pread(4, 258) == b"\2\3\4\5"
        with pytest.raises(WouldWaitError):
            file.pread(8, 256 * 64 - 4)  # beyond the end: it is not told apart from what is not in memory
        for call in (disk.open_read, disk.stamp, disk.exists, disk.stamps, disk.list_dir, disk.list_dirs, disk.read):
            with pytest.raises(WouldWaitError):
                call(disk_path if "list" in call.__name__ or call == disk.stamps else other)
        forget(path)
        with pytest.raises(WouldWaitError):
            file.pread(4, 8192)
        disk.nonblocking = False
        assert file.pread(8, 256 * 64 - 4) == b"\xfc\xfd\xfe\xff"
    assert disk.read(other) == b"other"
