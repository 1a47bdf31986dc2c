"""The serving thread, and HTTP beside a daemon: health, figures and streams, what a query may cost, how all ends."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from indexd.config import Config
from indexd.errors import CorruptDataError, DiskError, UnsafeStoreError, UsageError
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.http.answers import Bodies
from indexd.serve.http.guard import problem_of
from indexd.serve.queries import CrowdedError, Queries, StoppingError
from indexd.serve.server import ServeThread, listen
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.daemon import rebuild
from support.inside import config_of
from support.remoting import RemotingClient
from support.serving import Log, Serving, problem, wait_for
from support.sim_daemon import SilentLog
from support.small_log import BASE_TIME, SEGMENT_SIZE, SIZES, write_log

_WAIT_SECONDS = 30.0


def config_in(root: Path, **given: str) -> Config:
    return config_of(root / "store", root / "data", **given)


def serve_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "serve"]


@pytest.mark.parametrize("name", ["http", "remoting"])
def test_a_port_that_is_taken_is_tried_again(tmp_path: Path, name: str) -> None:
    log = SilentLog()
    with listen("localhost:0") as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        config = config_in(tmp_path, **{name: address})
        board = DaemonStatus(config)
        with ServeThread(config, board, log):
            with pytest.raises(UsageError, match=f"cannot listen on {address}: Address already in use") as caught:
                listen(address, name)
            assert f"--{name} off" in caught.value.line()
            wait_for(lambda: "outlet_failed" in log.events)
            assert getattr(board, name) is None
            taken.close()
            wait_for(lambda: getattr(board, name) is not None)
            assert str(getattr(board, name)).endswith(address.removeprefix("localhost"))


def test_both_ports_answer_and_none_where_they_are_off(tmp_path: Path) -> None:
    with ServeThread(config_in(tmp_path), DaemonStatus(config_in(tmp_path)), SilentLog()):
        assert serve_threads() == []
    config = config_in(tmp_path, http="127.0.0.1:0", remoting="127.0.0.1:0")
    board, log = DaemonStatus(config), SilentLog()
    with ServeThread(config, board, log):
        wait_for(lambda: board.http and board.remoting)
        assert board.row()["remoting"]["address"] == board.remoting != board.http
        with RemotingClient(str(board.remoting)) as client:
            answer = client.ask(12, {"topic": "T", "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1})
            assert (answer.code, answer.remark) == (2, "the index is opening")
            assert b"indexd_remoting_open_connections{" in httpx.get(f"http://{board.http}/metrics").content
    assert serve_threads() == []
    assert log.events.count("listening") == 2
    assert "outlet_failed" not in log.events


@pytest.mark.parametrize("problem", [RuntimeError("a defect"), SystemExit(3), OSError(24, "too many files")])
def test_an_outlet_that_fails_is_started_again_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: BaseException
) -> None:
    starts: list[float] = []

    async def serve_http(*rest: Any) -> None:
        starts.append(time.monotonic())
        if len(starts) < 3:
            raise problem
        await rest[-1].wait()

    monkeypatch.setattr("indexd.serve.http.server.serve_http", serve_http)
    config = config_in(tmp_path, http="127.0.0.1:0", remoting="127.0.0.1:0")
    board, log = DaemonStatus(config), Log()
    with ServeThread(config, board, log):
        wait_for(lambda: starts and board.remoting)
        with RemotingClient(str(board.remoting)) as client:
            wait_for(lambda: client.ask(310).code == 3 and len(starts) == 3)
    waits = [fields["retry_seconds"] for _, event, fields in log.lines if event == "outlet_failed"]
    assert waits == [1.0, 2.0], "not at once, and later each time"
    # A timer of the loop counts from the begin of its round: it may be early by what came before it there.
    assert starts[-1] - starts[0] > sum(waits) / 2


@pytest.mark.parametrize("ignores", ["stop", "everything"])
def test_a_stop_does_not_wait_for_an_outlet_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ignores: str
) -> None:
    release, hangs, log = threading.Event(), threading.Event(), SilentLog()

    async def serve_http(*_: object) -> None:
        hangs.set()
        if ignores == "everything":
            release.wait(_WAIT_SECONDS)  # the loop hangs
        await asyncio.sleep(60)

    monkeypatch.setattr("indexd.serve.http.server.serve_http", serve_http)
    config = config_in(tmp_path, http="127.0.0.1:0")
    with ServeThread(config, DaemonStatus(config), log):
        assert hangs.wait(_WAIT_SECONDS)
        began = time.monotonic()
    assert time.monotonic() - began < 15
    assert ("outlets_left_behind" in log.events) == (ignores == "everything")
    release.set()
    wait_for(lambda: not serve_threads())


@pytest.mark.parametrize("sent", ["", "GET /livez HTTP/1.1\r\nHost:", "GET /api/v1/live HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_it_answers_before_anything_is_opened_and_clients_that_hang_do_not_keep_it(tmp_path: Path, sent: str) -> None:
    config = config_in(tmp_path, http="127.0.0.1:0")
    board = DaemonStatus(config)
    with ExitStack() as clients:
        with ServeThread(config, board, SilentLog()):
            wait_for(lambda: board.http)
            assert httpx.get(f"http://{board.http}/livez", timeout=_WAIT_SECONDS).status_code == 200
            host, port = str(board.http).rsplit(":", 1)
            client = clients.enter_context(socket.create_connection((host, int(port)), timeout=_WAIT_SECONDS))
            client.sendall(sent.encode())
            assert "live " not in sent or client.recv(12)
            began = time.monotonic()
        assert time.monotonic() - began < 15
    assert serve_threads() == []
    listen(f"{host}:{port}").close()


# --- HTTP

_LAGGING = {"dispatchBehindBytes": 2**40, "dispatchBehindMilliseconds": 2500, "caughtUp": False}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """A server of a daemon that says it runs, over a directory without an index."""
    (tmp_path / "store/commitlog").mkdir(parents=True)
    with Serving(tmp_path / "data", tmp_path / "store", row=_LAGGING) as running:
        yield running


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
def test_ready_within_thresholds(serving: Serving, parameters: str, words: str | None) -> None:
    answer = serving.get(f"/readyz?{parameters}")
    if words is None:
        assert answer.status_code == 200
        row = answer.json()
    else:
        row = problem(answer, 503, "not-ready")
        assert row["detail"] == words
        assert int(answer.headers["retry-after"]) > 0
    assert (row["dispatchBehindBytes"], row["dispatchBehindMilliseconds"]) == (str(2**40), "2500")


def test_a_threshold_without_a_number_is_not_met(serving: Serving) -> None:
    serving.row = {}
    assert "unknown" in problem(serving.get("/readyz"), 503, "not-ready")["detail"]


def test_alive_unless_a_stage_stands_still(serving: Serving) -> None:
    assert serving.get("/livez").json() == {"status": "ok", "phase": "running"}
    serving.row = {"stalled": {"read": 61.5}, "problems": {}}
    assert "read for 6" in problem(serving.get("/livez"), 503, "stalled")["detail"]
    serving.row = {"stalled": {}, "problems": {"build": "No space left on device"}}
    assert serving.get("/livez").status_code == 200


def test_while_it_recovers(serving: Serving) -> None:
    serving.board.recovering("replay", 1, 4)
    assert serving.get("/livez").json()["phase"] == "recovering"
    assert problem(serving.get("/readyz"), 503, "not-ready")["detail"] == "it is recovering"
    for path in ("messages/by-key?topic=T&key=k", "messages/0", "coverage", "index-files"):
        answer = serving.get(f"/api/v1/{path}")
        assert problem(answer, 503, "not-open-yet")["recovering"]["done"] == 1
        assert int(answer.headers["retry-after"]) > 0
    row = serving.get("/api/v1/status").json()
    assert (row["phase"], row["recovering"]["step"], row["recovering"]["total"]) == ("recovering", "replay", "4")
    metrics = serving.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert metrics.headers["content-type"].startswith("application/openmetrics-text")
    assert b"indexd_" in metrics.content


def test_events_behind_a_number(serving: Serving) -> None:
    for number in range(5):
        serving.board.events.tell("rolled", {"phy_offset": 2**60 + number})
    row = serving.get("/api/v1/events?since=3").json()
    assert [event["number"] for event in row["events"]] == [4, 5]
    assert row["events"][0]["fields"]["phy_offset"] == str(2**60 + 3)
    assert (row["last"], row["bootId"]) == (5, serving.board.boot_id)
    assert serving.get("/api/v1/events?since=5").json()["events"] == []


def test_live_tells_status_and_events(serving: Serving) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []
    with serving.client.stream("GET", "/api/v1/live") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        kind = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            if line.startswith("data: "):
                seen.append((kind, json.loads(line.removeprefix("data: "))))
                if len(seen) == 1:
                    serving.board.events.tell("rolled", {"files": 1})
            if len(seen) == 3:
                break
    head = serving.client.head("/api/v1/live")  # it opens none
    assert (head.status_code, head.content, "content-length" in head.headers) == (200, b"", False)
    assert [kind for kind, _ in seen] == ["status", "event", "status"]
    assert seen[0][1]["dispatchBehindMilliseconds"] == "2500"
    assert seen[1][1]["name"] == "rolled"


@pytest.mark.parametrize(
    ("error", "status", "slug", "more"),
    [
        (CrowdedError("all are busy"), 503, "busy", {"retry-after": "1"}),
        (StoppingError(), 503, "stopping", {"retry-after": "5", "connection": "close"}),
        (UsageError("no such"), 422, "parameters", {}),
        (UnsafeStoreError("two brokers"), 503, "not-now", {"retry-after": "1"}),
        (CorruptDataError("torn"), 500, "corrupt-data", {}),
        (DiskError("fsync", "a file", OSError(5, "Input/output error")), 500, "internal", {}),
        (KeyError("a defect"), 500, "internal", {"connection": "close"}),
    ],
)
def test_what_an_error_means_for_who_asked(error: Exception, status: int, slug: str, more: dict[str, str]) -> None:
    response = problem_of(error).response("/x")
    row = json.loads(bytes(response.body))
    assert (response.status_code, row["status"], row["type"].rpartition(":")[2]) == (status, status, slug)
    names = ("retry-after", "connection")
    assert {name: response.headers[name] for name in names if name in response.headers} == more


_BOMBS, _ZEROS = 20, 20 << 20
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


def test_bodies_cost_no_more_than_they_may_be_long(place: tuple[Path, Path]) -> None:
    with Serving(*place, http_body_max=10_000) as serving:
        found = serving.get(_BY_KEY).json()["messages"]
    assert len(found) == _BOMBS
    # How long the whole is, nobody has found out.
    assert (found[0]["bodyTruncated"], found[0]["bodyUnpacked"], found[0]["bodySize"]) == (True, True, None)
    assert [hit["body"] for hit in found[1:]] == [None] * (_BOMBS - 1)


def test_a_query_has_so_long(place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    original = Bodies._of_hit

    def slow(*args: Any) -> dict[str, Any]:
        time.sleep(0.2)
        return original(*args)

    monkeypatch.setattr(Queries, "query_seconds", 0.5)
    monkeypatch.setattr(Bodies, "_of_hit", slow)
    with Serving(*place) as serving:
        answer = serving.get(_BY_KEY)
        assert problem(answer, 503, "too-long")["hint"]
        assert answer.headers["retry-after"]
        assert serving.board.queries["error"] == 1
        assert serving.get(_BY_KEY.replace("body=text", "body=none")).status_code == 200


def test_a_query_that_nothing_ends_is_left_behind_at_a_stop(
    place: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), threading.Event()

    def held(*_: Any) -> dict[str, Any]:
        begun.set()
        gate.wait(60)
        return {}

    monkeypatch.setattr(Bodies, "_of_hit", held)
    with Serving(*place) as serving, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(httpx.get, f"{serving.url}{_BY_KEY}", timeout=60, trust_env=False)
        assert begun.wait(20)
        serving.stop_soon()
        answer = asked.result(20)
        problem(answer, 503, "stopping")
        assert answer.headers["connection"] == "close"
        wait_for(serving.has_ended, 5)  # what serve.server gives it
        said = [event for level, event, _ in serving.log.lines if level == "warning"]
        assert said == ["queries_left_behind"]
        assert serving.board.queries["error"] == 0
        serving.log.lines.clear()
    gate.set()


def test_files_are_closed_when_nobody_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queries, "kept_seconds", 0.5)
    write_log(tmp_path / "store", 1500)
    rebuild(tmp_path / "store", tmp_path / "data", *SIZES)

    def is_open() -> bool:
        links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        return any(link.startswith(str(tmp_path)) for link in links)

    with Serving(tmp_path / "data", tmp_path / "store") as serving:
        for _ in range(2):
            assert serving.get("/api/v1/messages/by-key?topic=TopicTest&key=Aa").json()["messages"]
            assert is_open()
            wait_for(lambda: not is_open())
