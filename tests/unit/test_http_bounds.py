"""What a query may cost, and how it ends when the daemon does: bodies that unpack to much, queries that do not end."""

from __future__ import annotations

import threading
import time
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from indexd.commitlog.writer import CommitLogWriter, FrameSpec
from indexd.query import message as query_message
from indexd.serve import queries as serve_queries
from indexd.serve.http.answers import Bodies
from support.daemon import rebuild
from support.serving import Serving
from support.small_log import BASE_TIME, SEGMENT_SIZE, SIZES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_BOMBS = 20
_ZEROS = 20 << 20
_BY_KEY = "/api/v1/messages/by-key?topic=T&key=k&body=text"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(data, store) of messages whose bodies unpack to a thousand times what they are."""
    root = tmp_path_factory.mktemp("bounds")
    body = zlib.compress(bytes(_ZEROS), 9)
    spec = FrameSpec("T", body, {"KEYS": "k"}, queue_id=0, store_timestamp=BASE_TIME)
    with CommitLogWriter(root / "store/commitlog", SEGMENT_SIZE) as writer:
        for _ in range(_BOMBS):
            writer.append(replace(spec, sys_flag=1))
    rebuild(root / "store", root / "data", *SIZES)
    return root / "data", root / "store"


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each body came to."""
    sizes: list[int] = []

    class Counting:
        def __init__(self) -> None:
            self._inner = zlib.decompressobj()

        def decompress(self, data: bytes, most: int) -> bytes:
            found = self._inner.decompress(data, most)
            sizes.append(len(found))
            return found

        @property
        def eof(self) -> bool:
            return self._inner.eof

    class Zlib:
        decompressobj = Counting
        error = zlib.error

    monkeypatch.setattr(query_message, "zlib", Zlib)
    return sizes


def test_bodies_cost_no_more_than_they_may_be_long(place: tuple[Path, Path], unpacked: list[int]) -> None:
    with Serving(*place, http_body_max=10_000) as server:
        row = server.get(_BY_KEY).json()
    shown = [hit["body"] for hit in row["messages"]]
    assert len(shown) == _BOMBS
    assert row["messages"][0]["bodyTruncated"]
    assert row["messages"][0]["bodyUnpacked"]
    assert row["messages"][0]["bodySize"] is None
    assert shown[1:] == [None] * (_BOMBS - 1)
    assert sum(unpacked) <= 10_000 + 1


class _Slow:
    """A query that is held up at each of its messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wait: Callable[[], object]) -> None:
        self.begun = threading.Semaphore(0)
        original = Bodies._of_hit

        def slow(*args: Any) -> dict[str, Any]:
            self.begun.release()
            wait()
            return original(*args)

        monkeypatch.setattr(Bodies, "_of_hit", slow)


def _asking(server: Serving, answers: list[httpx.Response], count: int) -> list[threading.Thread]:
    def ask() -> None:
        answers.append(httpx.get(f"{server.url}{_BY_KEY}", timeout=60, trust_env=False))

    threads = [threading.Thread(target=ask) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_a_query_has_so_long(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "QUERY_SECONDS", 0.5)
    _Slow(monkeypatch, lambda: time.sleep(0.2))
    with Serving(*place) as server:
        began = time.monotonic()
        answer = server.get(_BY_KEY)
        assert time.monotonic() - began < 3
        assert (answer.status_code, answer.json()["type"].rpartition(":")[2]) == (503, "too-long")
        assert answer.json()["hint"]
        assert answer.headers["retry-after"]
        assert server.board.queries["error"] == 1
        assert server.get(_BY_KEY.replace("body=text", "body=none")).status_code == 200


def test_queries_end_at_a_stop(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    slow = _Slow(monkeypatch, lambda: time.sleep(0.3))
    with Serving(*place, http_queries_max=2) as server:
        answers: list[httpx.Response] = []
        threads = _asking(server, answers, 8)
        for _ in range(2):
            assert slow.begun.acquire(timeout=20)
        time.sleep(0.2)
        began = time.monotonic()
        server.stop()
        for thread in threads:
            thread.join(20)
        assert time.monotonic() - began < 3  # each of the 8 would take 6 s
        _check_refused(answers, 8)
        assert server.board.queries["error"] == 0


def test_a_query_that_nothing_ends_is_left_behind(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    slow = _Slow(monkeypatch, lambda: gate.wait(60))
    with Serving(*place) as server:
        answers: list[httpx.Response] = []
        threads = _asking(server, answers, 1)
        assert slow.begun.acquire(timeout=20)
        began = time.monotonic()
        server.stop()
        for thread in threads:
            thread.join(20)
        while not server.has_ended():
            time.sleep(0.05)
            assert time.monotonic() - began < 5  # what serve.server gives it
        _check_refused(answers, 1)
        said = [event for level, event, _ in server.log.lines if level == "warning"]
        assert said == ["http_cut_off", "queries_left_behind"]
        server.log.lines.clear()
    gate.set()


def _check_refused(answers: list[httpx.Response], count: int) -> None:
    assert [answer.status_code for answer in answers] == [503] * count
    for answer in answers:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["type"].endswith(":stopping")
        assert answer.headers["retry-after"]
        assert answer.headers["connection"] == "close"
