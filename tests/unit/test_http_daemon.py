"""HTTP of a real daemon while its log grows, and what it leaves behind; files are not kept open for nobody."""

from __future__ import annotations

import os
import socket
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING

import httpx
import pytest

from indexd.serve import queries as serve_queries
from support.daemon import Daemon, rebuild
from support.serving import Serving
from support.small_log import SIZES, Growing, messages, write_log

if TYPE_CHECKING:
    from pathlib import Path

_SEED = 5
_ENV = {"INDEXD_HTTP": "127.0.0.1:0", "INDEXD_RECHECK_BYTES": "0"}


def test_what_was_just_written_is_found(tmp_path: Path) -> None:
    specs = list(islice(messages(_SEED), 400_000))
    with (
        Growing(tmp_path / "store", _SEED) as growing,
        Daemon(tmp_path / "store", tmp_path / "data", *SIZES, env=_ENV) as daemon,
    ):
        url = f"http://{daemon.wait_event('listening')['http']}"
        daemon.wait_event("running")
        with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
            seen = 0
            for _ in range(15):
                row = client.get("/api/v1/status").json()
                count = int(row.get("messages", 0))
                number = next((n for n in range(count - 1, -1, -1) if _is_indexed(specs[n])), None)
                if number is None:
                    time.sleep(0.2)
                    continue
                spec = specs[number]
                asked = {"topic": spec.topic, "id": spec.properties["UNIQ_KEY"]}
                found = client.get("/api/v1/messages/by-unique-key", params=asked).json()
                assert found["result"] == "found", (number, found)
                where = found["messages"][0]["phyOffset"]
                shown = client.get(f"/api/v1/messages/{where}", params={"body": "hex"}).json()
                assert shown["body"] == spec.body.hex()
                seen += 1
                time.sleep(0.2)
            assert seen > 5
            end = growing.stop()
            daemon.wait_caught_up(end)
            assert client.get("/readyz?lag_bytes=0").status_code == 200
            assert client.get("/api/v1/coverage").json()["coverage"]["end"] == str(end)
        _check_stop(daemon, url)


def _is_indexed(spec: object) -> bool:
    properties, sys_flag = spec.properties, spec.sys_flag  # type: ignore[attr-defined]  # a FrameSpec
    return "UNIQ_KEY" in properties and sys_flag in (0, 0x8)


def _check_stop(daemon: Daemon, url: str) -> None:
    # Streams that are open and requests that never end do not hold it.
    host, _, port = url.removeprefix("http://").partition(":")
    lines: list[str] = []

    def read() -> None:
        with httpx.stream("GET", f"{url}/api/v1/live", timeout=60, trust_env=False) as stream:
            lines.extend(stream.iter_lines())

    reader = threading.Thread(target=read)
    reader.start()
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"GET /liv")
        time.sleep(1)
        began = time.monotonic()
        assert daemon.terminate() == 0
        assert time.monotonic() - began < 15
    reader.join(20)
    assert any(line.startswith("data: ") for line in lines)
    assert not [line for line in daemon.events() if line["level"] in ("error", "critical")]


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
