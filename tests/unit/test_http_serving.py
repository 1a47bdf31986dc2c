"""HTTP beside a daemon: health, figures and streams, what a query may cost, and how all ends."""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from indexd.query import message as query_message
from indexd.serve import queries as serve_queries
from indexd.serve.http.answers import Bodies
from indexd.serve.http.endpoints import LIVE_MAX
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.daemon import rebuild
from support.serving import Serving
from support.small_log import BASE_TIME, SEGMENT_SIZE, SIZES, write_log

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_LAGGING = {"dispatchBehindBytes": 2**40, "dispatchBehindMilliseconds": 2500, "caughtUp": False}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    """A server of a daemon that says it runs, over a directory without an index."""
    (tmp_path / "store/commitlog").mkdir(parents=True)
    with Serving(tmp_path / "data", tmp_path / "store", row=_LAGGING) as serving:
        yield serving


def _problem(answer: Any, status: int, slug: str) -> dict[str, Any]:
    assert answer.status_code == status
    assert answer.headers["content-type"] == "application/problem+json"
    row: dict[str, Any] = answer.json()
    assert row["type"] == f"urn:rocketmq-indexd:problem:{slug}"
    assert row["status"] == status
    assert row["title"]
    assert row["detail"]
    assert row["instance"].startswith("/")
    return row


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("", None),
        ("lag_ms=2500", None),
        ("lag_ms=2499", "it is 2500 ms behind"),
        (f"lag_bytes={2**40}&lag_ms=3000", None),
        ("lag_bytes=0&lag_ms=0", f"it is {2**40} bytes behind; it is 2500 ms behind"),
    ],
)
def test_ready_within_thresholds(server: Serving, parameters: str, words: str | None) -> None:
    answer = server.get(f"/readyz?{parameters}")
    if words is None:
        assert answer.status_code == 200
        row = answer.json()
    else:
        row = _problem(answer, 503, "not-ready")
        assert row["detail"] == words
        assert int(answer.headers["retry-after"]) > 0
    assert (row["dispatchBehindBytes"], row["dispatchBehindMilliseconds"]) == (str(2**40), "2500")


def test_a_threshold_without_a_number_is_not_met(server: Serving) -> None:
    server.row = {}
    assert "unknown" in _problem(server.get("/readyz"), 503, "not-ready")["detail"]
    assert "unknown" in _problem(server.get("/readyz?lag_ms=1"), 503, "not-ready")["detail"]


def test_alive_unless_a_stage_stands_still(server: Serving) -> None:
    assert server.get("/livez").json() == {"status": "ok", "phase": "running"}
    server.row = {"stalled": {"read": 61.5}, "problems": {}}
    assert "read for 6" in _problem(server.get("/livez"), 503, "stalled")["detail"]
    server.row = {"stalled": {}, "problems": {"build": "No space left on device"}}
    assert server.get("/livez").status_code == 200


def test_while_it_recovers(server: Serving) -> None:
    server.board.recovering("replay", 1, 4)
    assert server.get("/livez").json()["phase"] == "recovering"
    assert _problem(server.get("/readyz"), 503, "not-ready")["detail"] == "it is recovering"
    for path in ("messages/by-key?topic=T&key=k", "messages/0", "coverage", "index-files", "frontier"):
        answer = server.get(f"/api/v1/{path}")
        assert _problem(answer, 503, "not-open-yet")["recovering"]["done"] == 1
        assert int(answer.headers["retry-after"]) > 0
    row = server.get("/api/v1/recovery").json()
    assert (row["phase"], row["recovering"]["step"], row["recovering"]["total"]) == ("recovering", "replay", "4")
    assert server.get("/api/v1/status").json()["phase"] == "recovering"
    assert b"indexd_" in server.get("/metrics").content
    server.board.leaving("opening")
    assert server.get("/api/v1/recovery").json()["recovering"] is None


def test_events_behind_a_number(server: Serving) -> None:
    for number in range(5):
        server.board.events.tell("rolled", {"phy_offset": 2**60 + number})
    row = server.get("/api/v1/events?since=3").json()
    assert [event["number"] for event in row["events"]] == [4, 5]
    assert row["events"][0]["fields"]["phy_offset"] == str(2**60 + 3)
    assert (row["last"], row["bootId"]) == (5, server.board.boot_id)
    assert server.get("/api/v1/events?since=5").json()["events"] == []


def test_live_tells_status_and_events(server: Serving) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    with server.client.stream("GET", "/api/v1/live") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        kind = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            if line.startswith("data: "):
                seen.append((kind, json.loads(line.removeprefix("data: "))))
                if len(seen) == 1:
                    server.board.events.tell("rolled", {"files": 1})
            if len(seen) == 3:
                break
    assert [kind for kind, _ in seen] == ["status", "event", "status"]
    assert seen[0][1]["dispatchBehindMilliseconds"] == "2500"
    assert seen[1][1]["name"] == "rolled"


def test_a_burst_of_streams_and_no_connection_for_the_refused(server: Serving) -> None:
    peers = [server.connect() for _ in range(LIVE_MAX + 48)]
    try:
        for peer in peers:
            peer.sendall(b"GET /api/v1/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
        heads = [peer.recv(65_536) for peer in peers]
        refused = [number for number, head in enumerate(heads) if head.startswith(b"HTTP/1.1 503 ")]
        assert sum(head.startswith(b"HTTP/1.1 200 ") for head in heads) == LIVE_MAX
        assert len(refused) == 48
        for number in refused:
            assert b"\r\nconnection: close\r\n" in heads[number]
            while peers[number].recv(65_536):
                pass  # it is closed
        head = server.client.head("/api/v1/live")  # it opens none
        assert (head.status_code, head.content, "content-length" in head.headers) == (200, b"", False)
    finally:
        for peer in peers:
            peer.close()


def test_metrics_in_both_formats(server: Serving) -> None:
    plain = server.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert b"# TYPE indexd_" in plain.content
    other = server.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert other.headers["content-type"].startswith("application/openmetrics-text")
    assert other.content.endswith(b"# EOF\n")


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
        server.stop_soon()
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
        server.stop_soon()
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


def test_files_are_closed_when_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_KEPT_SECONDS", 0.5)
    write_log(tmp_path / "store", 1500)
    rebuild(tmp_path / "store", tmp_path / "data", *SIZES)
    with Serving(tmp_path / "data", tmp_path / "store") as server:
        assert server.get("/api/v1/messages/by-key?topic=TopicTest&key=Aa").json()["messages"]
        assert _open_below(tmp_path)
        deadline = time.monotonic() + 20
        while _open_below(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert server.get("/api/v1/messages/by-key?topic=TopicTest&key=Aa").json()["messages"]


def _open_below(root: Path) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names alone
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115 - no path of a file
        except FileNotFoundError:
            continue
        if target.startswith(str(root)):
            found.append(target)
    return found


def test_as_many_queries_at_once_as_may_and_the_rest_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_queries, "_WAITING_PER_THREAD", 2)
    write_log(tmp_path / "store", 300)
    rebuild(tmp_path / "store", tmp_path / "data", *SIZES)
    gate = threading.Event()
    original = serve_queries.open_index

    def slow_open(*args: object) -> object:
        gate.wait(20)
        return original(*args)  # type: ignore[arg-type]  # what it was given

    monkeypatch.setattr(serve_queries, "open_index", slow_open)
    with Serving(tmp_path / "data", tmp_path / "store", http_queries_max=2) as server:
        codes: list[int] = []

        def ask() -> None:
            answer = httpx.get(f"{server.url}/api/v1/messages/by-key?topic=T&key=k", timeout=30, trust_env=False)
            codes.append(answer.status_code)
            if answer.status_code == 503:
                assert answer.json()["type"].endswith(":busy")
                assert answer.headers["retry-after"]

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 10
        while len(codes) < 6 and time.monotonic() < deadline:
            began = time.monotonic()
            assert server.get("/livez").status_code == 200
            assert time.monotonic() - began < 2
            time.sleep(0.05)
        gate.set()
        for thread in threads:
            thread.join(30)
        assert set(codes) == {200, 503}
        assert codes.count(200) <= 6
        assert server.board.queries["error"] == 0  # nothing failed: an alert stands on that
