"""What is answered in the event loop's own thread: the same as by a worker, and nothing that has to be waited for."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from indexd.errors import CorruptDataError
from indexd.serve import queries as serve_queries
from indexd.serve.in_memory import InMemory, load_in_memory
from indexd.serve.queries import Queries
from indexd.serve.remoting.command import RemotingCommand
from indexd.serve.remoting.messages import query_message, view_message_by_id
from indexd.storage.disk import HastyDisk, WouldWaitError
from support.data_directory import T0, spec
from support.page_cache import forget
from support.remoting_asking import BY_KEY, NOT_FOUND, SUCCESS, asking, frame_of, six_messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from indexd.query import Data, QueryIndex
    from indexd.query.source import Memory
    from support.queue_store import QueueStore


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return six_messages(tmp_path)


def request(code: int = 12, **fields: str) -> RemotingCommand:
    return RemotingCommand(code, 77, ext_fields=BY_KEY | fields)


def in_memory(store: QueueStore) -> None:
    for path in (*(store.root / "commitlog").iterdir(), *(store.data / "index").iterdir()):
        path.read_bytes()


async def test_the_same_answers_once_a_worker_has_looked(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_LOOK_SECONDS", 60.0)
    monkeypatch.setattr(serve_queries, "_AT_ONCE_SECONDS", 60.0)
    with asking(store) as to:
        assert query_message.at_once(to.queries, request()) is None  # nothing is open yet
        patient = {key: await to.key(key=key) for key in ("k", "none")}
        unique = await to.key(key="u2", _UNIQUE_KEY_QUERY="true")
        in_memory(store)
        for key, answer in patient.items():
            assert query_message.at_once(to.queries, request(key=key)) == answer
        assert query_message.at_once(to.queries, request(key="u2", _UNIQUE_KEY_QUERY="true")) == unique
        assert (patient["k"].code, patient["none"].code, unique.code) == (SUCCESS, NOT_FOUND, SUCCESS)
        place = str(store.messages()[3].phy_offset)
        viewed = await to.ask(view_message_by_id, offset=place)
        assert view_message_by_id.at_once(to.queries, request(33, offset=place)) == viewed
        assert viewed.body == frame_of(store, 3)
        assert to.board.queries["found"] == 6
        assert to.board.queries["empty_covered"] == 2
        assert to.board.query_seconds.count == 8


async def test_from_the_second_query_on_by_the_compiled_way(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_LOOK_SECONDS", 60.0)
    monkeypatch.setattr(serve_queries, "_AT_ONCE_SECONDS", 60.0)
    loaded = threading.Event()

    def load() -> Callable[[QueryIndex], Memory] | None:
        try:
            return load_in_memory()
        finally:
            loaded.set()

    with asking(store) as to:
        queries = Queries(to.config, to.board, 2, load)
        try:
            first = await query_message(queries, request())
            assert await asyncio.to_thread(loaded.wait, 60)
            await asyncio.sleep(0.1)
            assert await query_message(queries, request()) == first
            in_memory(store)
            assert query_message.at_once(queries, request()) == first
            memories = await queries.ask(lambda data: data.index.memory)
            assert isinstance(memories, InMemory)
        finally:
            queries.stop()
            assert queries.close() == 0


async def test_what_is_wrong_with_a_request_is_said_by_the_patient_way(store: QueueStore) -> None:
    with asking(store) as to:
        await to.key()
        assert query_message.at_once(to.queries, request(maxNum="x")) is None
        assert query_message.at_once(to.queries, request(maxNum="-1")) is None
        assert "maxNum" in str((await to.key(maxNum="-1")).remark)


async def test_a_look_serves_for_a_moment_only(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(serve_queries, "_AT_ONCE_SECONDS", 60.0)
    with asking(store) as to:
        await to.key()
        in_memory(store)
        await to.key()
        assert query_message.at_once(to.queries, request()) is not None
        await asyncio.sleep(0.3)
        assert query_message.at_once(to.queries, request()) is None
        store.append(spec(T0 + 9000, KEYS="k"))
        store.build()
        answer = await to.key()
        assert answer.body.endswith(frame_of(store, 6))


async def test_what_takes_long_is_left_to_a_worker(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_AT_ONCE_SECONDS", 0.0)
    with asking(store) as to:
        await to.key()
        in_memory(store)
        assert query_message.at_once(to.queries, request()) is None
        assert (await to.key()).code == SUCCESS  # and what is open can still be used


async def test_not_while_it_recovers_nor_when_it_stops(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_LOOK_SECONDS", 60.0)
    monkeypatch.setattr(serve_queries, "_AT_ONCE_SECONDS", 60.0)
    with asking(store) as to:
        await to.key()
        in_memory(store)
        assert query_message.at_once(to.queries, request()) is not None
        to.board.recovering("replay", 0, 1)
        assert query_message.at_once(to.queries, request()) is None
        to.board.running(dict)
        assert query_message.at_once(to.queries, request()) is not None
        to.queries.stop()
        assert query_message.at_once(to.queries, request()) is None


async def test_an_error_is_met_again_by_who_may_wait(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_AT_ONCE_SECONDS", 60.0)

    def fail(_: Data) -> None:
        raise CorruptDataError("no such")

    with asking(store) as to:
        await to.key()
        with pytest.raises(WouldWaitError):
            to.queries.query_at_once(fail, str)
        assert to.board.queries["error"] == 0
        with pytest.raises(CorruptDataError):
            await to.queries.query(fail, str)
        assert to.board.queries["error"] == 1


async def test_a_disk_that_has_to_be_asked_is_not(disk_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_LOOK_SECONDS", 60.0)
    monkeypatch.setattr(serve_queries, "_AT_ONCE_SECONDS", 60.0)
    store = six_messages(disk_path)
    with asking(store) as to:
        await to.key()
        in_memory(store)
        assert query_message.at_once(to.queries, request()) is not None
        for path in (store.root / "commitlog").iterdir():
            forget(path)
        assert query_message.at_once(to.queries, request()) is None
        answer = await to.key()
        assert answer.body == frame_of(store, 4) + frame_of(store, 5)


def test_a_hurry_is_for_what_is_open_and_in_memory(disk_path: Path) -> None:
    path, other = disk_path / "file", disk_path / "other"
    path.write_bytes(bytes(range(256)) * 64)
    other.write_bytes(b"other")
    disk = HastyDisk()
    with disk.open_read(path) as file:
        assert file.pread(4, 256) == b"\0\1\2\3"
        disk.is_hasty = True
        assert file.pread(4, 258) == b"\2\3\4\5"
        with pytest.raises(WouldWaitError):
            file.pread(8, 256 * 64 - 4)  # beyond the end: it is not told apart from what is not in memory
        for call in (disk.open_read, disk.stamp, disk.exists, disk.stamps, disk.list_dir, disk.list_dirs, disk.read):
            with pytest.raises(WouldWaitError):
                call(disk_path if "list" in call.__name__ or call == disk.stamps else other)
        forget(path)
        with pytest.raises(WouldWaitError):
            file.pread(4, 8192)
        disk.is_hasty = False
        assert file.pread(8, 256 * 64 - 4) == b"\xfc\xfd\xfe\xff"
    assert disk.read(other) == b"other"
