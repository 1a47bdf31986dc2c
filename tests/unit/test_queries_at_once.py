"""Compiled answers in the event loop's own thread: as by a worker, and nothing that has to be waited for."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from indexd.errors import CorruptDataError
from indexd.serve import queries as serve_queries
from indexd.serve.queries import Queries
from indexd.serve.remoting.key_queries import IndexTables, load_key_queries
from indexd.storage.disk import Disk, WouldWaitError
from support.data_directory import T0, spec
from support.key_queries_judge import both, request
from support.page_cache import forget
from support.remoting_asking import asking, frame_of, six_messages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from indexd.query import QueryIndex
    from support.queue_store import QueueStore


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_LOOK_SECONDS", 60.0)


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return six_messages(tmp_path)


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
        assert way.together(request())[0] == 0
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
