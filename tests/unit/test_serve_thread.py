"""The serving thread: it fails, hangs and starts again without the daemon ever waiting for it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.request
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from indexd.errors import UsageError
from indexd.serve import server
from indexd.serve.daemon_status import DaemonStatus
from indexd.serve.server import ServeThread, listen
from support.inside import config_of
from support.remoting import RemotingClient
from support.serving import Log
from support.sim_daemon import SilentLog

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from indexd.config import Config

_WAIT_SECONDS = 30.0


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of seconds become short."""
    monkeypatch.setattr(server, "_RESTART_SECONDS", (0.05, 0.3))
    monkeypatch.setattr(server, "_LEAVE_SECONDS", 0.3)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return config_of(tmp_path / "store", tmp_path / "data", http="127.0.0.1:0")


def wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def serve_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "serve"]


def test_off_is_no_thread_and_no_port(tmp_path: Path) -> None:
    board = DaemonStatus(config_of(tmp_path, tmp_path / "data"))
    with ServeThread(config_of(tmp_path, tmp_path / "data"), board, SilentLog()):
        assert serve_threads() == []
        assert board.http is None


@pytest.mark.parametrize("name", ["http", "remoting"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_is_taken_is_tried_again(tmp_path: Path, quick: None, host: str, name: str) -> None:
    log = SilentLog()
    with listen(f"{host}:0") as taken:
        address = f"{host}:{taken.getsockname()[1]}"
        config = config_of(tmp_path, tmp_path / "data", **{name: address})
        board = DaemonStatus(config)
        thread = ServeThread(config, board, log)
        with thread:
            with pytest.raises(UsageError, match=f"cannot listen on {address}: Address already in use") as caught:
                listen(address, name)
            assert f"--{name} off" in caught.value.line()
            wait_for(lambda: "outlet_failed" in log.events)
            assert getattr(board, name) is None
            taken.close()
            wait_for(lambda: getattr(board, name) is not None)
            port = address.rpartition(":")[2]
            assert str(getattr(board, name)).endswith(f":{port}")
    wait_for(lambda: serve_threads() == [])  # it may be loading the outlet still


def test_both_ports_answer(tmp_path: Path) -> None:
    config = config_of(tmp_path, tmp_path / "data", http="127.0.0.1:0", remoting="127.0.0.1:0")
    board, log = DaemonStatus(config), SilentLog()
    with ServeThread(config, board, log):
        wait_for(lambda: board.http and board.remoting)
        assert board.row()["remoting"]["address"] == board.remoting != board.http
        with RemotingClient(str(board.remoting)) as client:
            assert client.ask(34).code == 0
            answer = client.ask(12, {"topic": "T", "key": "k", "maxNum": 1, "beginTimestamp": 0, "endTimestamp": 1})
            assert (answer.code, answer.remark) == (2, "the index is opening")
            assert client.ask(310).code == 3
            wait_for(lambda: "connections" in board.row()["remoting"])
            with urllib.request.urlopen(f"http://{board.http}/metrics", timeout=10) as metrics:
                assert b"indexd_remoting_open_connections{" in metrics.read()
    assert serve_threads() == []
    assert log.events.count("listening") == 2
    assert "outlet_failed" not in log.events


@pytest.mark.parametrize("problem", [RuntimeError("a defect"), SystemExit(3), OSError(24, "too many files")])
def test_an_outlet_that_fails_is_started_again_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, problem: BaseException
) -> None:
    starts: list[float] = []
    ticks = 0

    async def serve_http(*rest: Any) -> None:
        starts.append(time.monotonic())
        if len(starts) < 6:
            raise problem
        await rest[-1].wait()

    async def publish(config: object, board: object, log: object, stop: asyncio.Event) -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            await asyncio.sleep(0.01)

    monkeypatch.setattr(server, "serve_http", serve_http)
    monkeypatch.setattr(server, "publish", publish)
    config = config_of(tmp_path, tmp_path / "data", http="127.0.0.1:0", mqtt_host="localhost")
    log = Log()
    with ServeThread(config, DaemonStatus(config), log):
        wait_for(lambda: len(starts) == 6)
        before = ticks
        wait_for(lambda: ticks > before)
    waits = [fields["retry_seconds"] for _, event, fields in log.lines if event == "outlet_failed"]
    assert waits == [0.05, 0.1, 0.2, 0.3, 0.3], "not at once, and later each time"
    # A timer of the loop counts from the begin of its round: it may be early by what came before it there.
    assert starts[-1] - starts[0] > sum(waits) / 2


@pytest.mark.parametrize("ignores", ["stop", "cancel", "everything"])
def test_a_stop_does_not_wait_for_an_outlet_that_does_not_end(
    config: Config, monkeypatch: pytest.MonkeyPatch, quick: None, ignores: str
) -> None:
    release, hangs, log = threading.Event(), threading.Event(), SilentLog()

    async def serve_http(*_: object) -> None:
        hangs.set()
        if ignores == "everything":
            release.wait(_WAIT_SECONDS)  # the loop hangs
        while not release.is_set():
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if ignores == "stop":
                    raise

    monkeypatch.setattr(server, "serve_http", serve_http)
    with ServeThread(config, DaemonStatus(config), log):
        assert hangs.wait(_WAIT_SECONDS)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert ("outlets_left_behind" in log.events) == (ignores == "everything")
    release.set()
    wait_for(lambda: not serve_threads())


@pytest.mark.parametrize(
    "sent", [None, "", "GET /livez HTTP/1.1\r\nHost:", "GET /api/v1/live HTTP/1.1\r\nHost: a\r\n\r\n"]
)
def test_it_answers_before_anything_is_opened_and_clients_that_hang_do_not_keep_it(
    config: Config, sent: str | None
) -> None:
    board = DaemonStatus(config)
    with ExitStack() as clients:
        with ServeThread(config, board, SilentLog()):
            wait_for(lambda: board.http)
            host, port = str(board.http).rsplit(":", 1)
            with urllib.request.urlopen(f"http://{board.http}/livez", timeout=_WAIT_SECONDS) as answer:
                assert answer.status == 200
            if sent is not None:
                client = clients.enter_context(socket.create_connection((host, int(port)), timeout=_WAIT_SECONDS))
                client.sendall(sent.encode())
                assert "live " not in sent or client.recv(12)
            began = time.monotonic()
        assert time.monotonic() - began < 15
    assert serve_threads() == []
    listen(f"{host}:{port}").close()
