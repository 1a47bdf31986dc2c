"""Queries by processes and sockets: what starting one loads, and what each says where an index ends at damage.

At bytes that are no frame: not known behind there, never complete.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from indexd.query import open_data
from support.commitlog_writer import CommitLogWriter
from support.daemon import Daemon, indexd_here
from support.data_directory import T0, spec
from support.queue_store import QueueStore
from support.reading import patch
from support.serving import Serving
from support.small_log import SIZES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.commitlog_writer import FrameSpec

_SEGMENT, FIRST = 256 << 10, f"commitlog/{0:020d}"
_DAMAGED, _MESSAGES = 100, 300
_ENV = {"INDEXD_HTTP": "127.0.0.1:0", "INDEXD_CORRUPT_AFTER_MS": "100", "INDEXD_ON_CORRUPT": "stop"}


def _spec(number: int) -> FrameSpec:
    return spec(T0 + 10 * number, "T", 200, KEYS=f"order-{number}", UNIQ_KEY=f"unique-{number}", TAGS="t")


# Magic overwritten, magic and size; a frame, a block and a page of zeros; the body alone.
_DAMAGES = {
    "magic": (4, b"\xde\xad\xbe\xef"),
    "zero magic": (4, bytes(4)),
    "size": (0, b"\x7f"),
    "a zero frame": (0, bytes(91)),
    "a zero block": (0, bytes(512)),
    "a zero page": (0, bytes(4096)),
    "body": (100, b"x"),
}


@pytest.fixture(params=_DAMAGES)
def damaged(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[QueueStore, int]:
    """A store whose index ends at a damaged frame behind which the log goes on, and where that is."""
    store = QueueStore(tmp_path, segment=_SEGMENT)
    store.append(*[_spec(number) for number in range(_DAMAGED)])
    store.build()
    offsets = store.append(*[_spec(number) for number in range(_DAMAGED, _MESSAGES)])
    at, data = _DAMAGES[request.param]
    patch(store.root / FIRST, offsets[0] + at, data)
    return store, offsets[0]


def _check(row: dict[str, Any], damage: int) -> None:
    said = f"not known behind offset {damage}: "
    assert not row["coverage"]["complete"], row
    assert row["coverage"]["why"].startswith(said)
    assert row["why"].startswith(said), row


def _check_http(get: Callable[[str], Any], damage: int) -> None:
    for path in (
        "messages/by-key?topic=T&key=order-200",
        "messages/by-unique-key?topic=T&id=unique-200",
        "messages/by-queue-offset?topic=T&queue=0&offset=200",
        f"messages/by-time?time={T0 + 10 * 200}&topic=T&queue=0",
        f"messages/by-time?time={T0 + 10 * 200}",
    ):
        row = get(f"/api/v1/{path}").json()
        assert row["result"] == "empty_uncovered", path
        _check(row, damage)
    coverage = get("/api/v1/coverage").json()["coverage"]
    assert (coverage["complete"], f"not known behind offset {damage}: " in coverage["why"]) == (False, True)


def test_nothing_that_answers_calls_it_complete(damaged: tuple[QueueStore, int]) -> None:
    store, damage = damaged
    with open_data(store.data) as data:
        assert not data.coverage().complete
        assert not data.by_key("T", "order-5").coverage.complete
        for answer in (data.by_key("T", "unique-200", index_type="U"), data.by_queue("none", 0, 0)):
            row = answer.to_dict()
            assert (row["coverage"]["complete"], f"not known behind offset {damage}: " in row["why"]) == (False, True)
    given = ("--data", store.data)
    for words in (
        ("query-key", "-t", "T", "-k", "order-200"),
        ("query-unique-key", "-t", "T", "-i", "unique-200"),
        ("query-offset", "-t", "T", "-i", "0", "-o", "200"),
        ("query-time", "-t", "T", "-i", "0", "-s", T0 + 10 * 200),
        ("query-time", "--log", "-s", T0 + 10 * 200),
    ):
        _check(json.loads(indexd_here(*words, *given, "--json").stdout), damage)
        said = indexd_here(*words, *given).stdout
        assert f"not known behind offset {damage}: " in said
        assert "all of the log" not in said
    status = json.loads(indexd_here("status", *given, "--json").stdout)
    assert (status["corrupt"]["offset"], status["caughtUp"]) == (damage, False)
    with Serving(store.data, store.root) as server:
        _check_http(server.get, damage)
        page = server.get("/?by=key&topic=T&q=order-200").text
        assert f"Not known behind offset {damage}: " in page
        assert "all there is" not in page


def test_zeros_that_the_broker_has_made_ahead_are_the_end_of_the_log(tmp_path: Path) -> None:
    store = QueueStore(tmp_path, segment=_SEGMENT)
    store.append(*[_spec(number) for number in range(9)])
    store.build()
    (store.root / "commitlog" / f"{_SEGMENT:020d}").write_bytes(bytes(_SEGMENT))
    with open_data(store.data) as data:
        assert data.coverage().complete
        assert data.by_key("T", "none").why == "absent"


def test_a_segment_that_ends_in_zeros_before_one_that_is_used(tmp_path: Path) -> None:
    store = QueueStore(tmp_path, segment=4096)
    offsets = store.append(*[_spec(number) for number in range(30)])
    last = max(offset for offset in offsets if offset < 4096)
    store.build(upto=last)
    patch(store.root / FIRST, last, bytes(4096 - last))
    with open_data(store.data) as data:
        why = data.by_key("T", "none").why
    assert why == f"not known behind offset {last}: zeros before the end of a segment that is closed"


def test_a_running_daemon_says_that_it_stands_and_is_not_ready(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with CommitLogWriter(store / "commitlog", _SEGMENT) as writer:
        offsets = [writer.append(_spec(number)) for number in range(150)]
        damage = offsets[_DAMAGED]
        patch(store / FIRST, damage + 4, b"\xde\xad\xbe\xef")
        with Daemon(store, tmp_path / "data", *SIZES, env=_ENV) as daemon:
            url = f"http://{daemon.wait_event('listening')['http']}"
            daemon.wait_state(lambda row: row["corrupt"] is not None and row["phyOffset"] == damage)
            for number in range(150, _MESSAGES):
                writer.append(_spec(number))
            daemon.wait_state(lambda row: row["dispatchBehindBytes"] > 0)
            with httpx.Client(base_url=url, timeout=30, trust_env=False) as client:
                _check_http(client.get, damage)
                ready = client.get("/readyz")
            assert ready.status_code == 503
            assert f"it stands at bytes that are no frame, at {damage}: " in ready.json()["detail"]
            words = ("query-key", "--data", daemon.data, "-t", "T", "-k", "order-200")
            assert f"no message: not known behind offset {damage}: " in indexd_here(*words).stdout
            assert daemon.terminate() == 0
            assert f"no message: not known behind offset {damage}: " in indexd_here(*words).stdout


def test_neither_the_package_nor_a_query_loads_numpy_or_the_compiler(tmp_path: Path) -> None:
    store = QueueStore(tmp_path)
    store.append(_spec(0))
    store.build()
    names = "{'numpy', 'numba', 'llvmlite', 'asyncio', 'structlog', 'rich', 'ssl', 'http.client'}"
    package = (
        "import sys, indexd\n"
        "assert not [name for name in sys.modules if name.startswith('indexd.')]\n"
        "from indexd import open_data\n"
        "import indexd.query\n"
        "assert indexd.open_data is open_data is indexd.query.open_data\n"
        f"assert not {names} & set(sys.modules)\n"
        "assert not hasattr(indexd, 'open_store')\n"
    )
    query = (
        "import sys; from indexd.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as stopped: assert not stopped.code, stopped.code\n"
        f"loaded = {names} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    given = f"--data {store.data}"
    for code, words in (
        (package, ""),
        (query, f"query-key {given} -t T -k order-0"),
        (query, f"query-offset {given} -t T -i 0 -o 0"),
        (query, f"query-time {given} --log -s 5"),
        (query, f"message {given} -o 0"),
        (query, f"inspect {store.data}"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
