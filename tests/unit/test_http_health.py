"""Health, figures and streams: what an operator, a probe and a page are told, and when they are told to wait."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from indexd.serve.http.endpoints import LIVE_MAX
from support.serving import Serving

if TYPE_CHECKING:
    from collections.abc import Iterator
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


def test_before_there_is_an_index(server: Serving) -> None:
    answer = server.get("/api/v1/messages/by-key?topic=T&key=k")
    assert "holds no index yet" in _problem(answer, 503, "not-open-yet")["detail"]
    assert server.board.queries["error"] == 1


def test_status_has_whole_numbers_as_text(server: Serving) -> None:
    row = server.get("/api/v1/status").json()
    assert row["dispatchBehindBytes"] == str(2**40)
    assert row["pid"] == server.board.row()["pid"]
    assert row["caughtUp"] is False


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


def test_the_head_of_a_stream_ends(server: Serving) -> None:
    for _ in range(LIVE_MAX + 2):
        head = server.client.head("/api/v1/live")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"].startswith("text/event-stream")


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


def test_streams_are_bounded_and_end_at_a_stop(server: Serving) -> None:
    def read(_: int) -> int:
        with server.client.stream("GET", "/api/v1/live") as stream:
            if stream.status_code == 200:
                for _line in stream.iter_lines():
                    pass
            return stream.status_code

    with ThreadPoolExecutor(LIVE_MAX + 3) as pool:
        futures = [pool.submit(read, number) for number in range(LIVE_MAX + 3)]
        deadline = time.monotonic() + 20
        while sum(future.done() for future in futures) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        began = time.monotonic()
        server.stop()
        codes = sorted(future.result(20) for future in futures)
    assert codes == [200] * LIVE_MAX + [503] * 3
    assert time.monotonic() - began < 5


def test_metrics_in_both_formats(server: Serving) -> None:
    plain = server.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain")
    assert b"# TYPE indexd_" in plain.content
    other = server.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert other.headers["content-type"].startswith("application/openmetrics-text")
    assert other.content.endswith(b"# EOF\n")
