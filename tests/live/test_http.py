"""What is answered over HTTP is what the Python API answers, under RocketMQ's names, and as OpenAPI describes it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from indexd.cli.status import from_text64
from indexd.query import Data, NotFound, open_data
from indexd.query.questions import ByKey, ByQueueOffset, ByTime, ByUniqueKey, Question, make_question
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.daemon import Daemon, rebuild
from support.serving import Serving
from support.small_log import BASE_TIME, SEGMENT_SIZE, SIZES, write_log

_MESSAGES = 1500
_KEY = {"topic": "TopicTest", "key": "Aa", "max": 1000}
_ASKED: list[tuple[type[Question], dict[str, Any]]] = [
    (ByKey, _KEY),
    (ByKey, _KEY | {"key": "BB"}),
    (ByKey, _KEY | {"topic": "订单主题"}),
    (ByKey, {"topic": "OrderPaid", "key": "order-7"}),
    (ByKey, {"topic": "nobody", "key": "Aa"}),
    (ByKey, _KEY | {"begin": BASE_TIME + 5_000, "end": BASE_TIME + 9_000}),
    *((ByKey, _KEY | {"key": "TagA", "index_type": kind}) for kind in ("K", "U", "T")),
    (ByUniqueKey, {"topic": "TopicTest", "id": "none"}),
    (ByQueueOffset, {"topic": "TopicTest", "queue": 1, "offset": 3, "max": 4}),
    (ByTime, {"time": BASE_TIME + 7_010}),
    (ByTime, {"time": BASE_TIME * 2}),
    *(
        (ByTime, {"time": time, "topic": "TopicTest", "queue": 0, "boundary": boundary})
        for time in (BASE_TIME + 7_010, BASE_TIME * 2)
        for boundary in ("lower", "upper")
    ),
]
_BODIES = [
    b'{"n": 12345678901234567890, "f": 1.5}',
    "文字\n".encode(),
    b"\x00\xff\x80",
    b"NaN",
    b"",
    b'"\\ud800"',
    b"1e999",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(store, data) of a log that is indexed wholly."""
    root = tmp_path_factory.mktemp("http")
    end = write_log(root / "store", _MESSAGES)
    with CommitLogWriter(root / "store/commitlog", SEGMENT_SIZE, start_offset=end) as writer:
        for number, body in enumerate(_BODIES):
            writer.append(
                FrameSpec("Bodies", body, {"KEYS": f"body-{number} body"}, queue_id=0, store_timestamp=BASE_TIME)
            )
    rebuild(root / "store", root / "data", *SIZES)
    return root / "store", root / "data"


@pytest.fixture(scope="module")
def server(built: tuple[Path, Path]) -> Iterator[Serving]:
    """A server over it."""
    with Serving(built[1], built[0], http_body_max=1000) as serving:
        yield serving


@pytest.fixture(scope="module")
def data(built: tuple[Path, Path]) -> Iterator[Data]:
    """The same by the Python API."""
    with open_data(built[1]) as opened:
        yield opened


def _get(server: Serving, path: str, **parameters: Any) -> dict[str, Any]:
    answer = server.get(path, params=parameters)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json(parse_int=_number)


def _number(text: str) -> int:
    assert abs(int(text)) < 2**32, "larger ones are texts; magic and CRC are unsigned"
    return int(text)


@pytest.mark.parametrize(("model", "asked"), _ASKED)
def test_every_question_is_answered_as_by_the_python_api(
    server: Serving, data: Data, model: type[Question], asked: dict[str, Any]
) -> None:
    answer = make_question(model, asked).answer(data.index)
    wanted, row = answer.to_dict(), _get(server, f"/api/v1/messages/{model.path}", **asked)
    # Numbers of 64 bits are texts over HTTP, and null is said.
    for name in wanted.keys() & row.keys() - {"coverage", "messages"}:
        assert from_text64(row[name]) == from_text64(wanted[name]), name
    assert row["hits"] == row.get("messages", row["hits"]) or model is ByQueueOffset
    assert row["why"] == answer.why
    assert (row["result"] == "found") == bool(row["hits"])
    assert row["coverage"]["end"] == str(answer.coverage.end)


def test_the_answers_are_not_empty_where_there_is_something(server: Serving, data: Data) -> None:
    unique = next(hit for hit in data.by_key("TopicTest", "Aa") if hit.uniq_key)
    row = _get(server, "/api/v1/messages/by-unique-key", topic="TopicTest", id=unique.uniq_key, body="text")
    assert [hit["phyOffset"] for hit in row["hits"]] == [str(unique.phy_offset)]
    assert row["messages"][0].items() > row["hits"][0].items()
    whole = data.by_queue("TopicTest", 1, 0, max_num=1000)
    offsets, offset = [], 0
    while offset < whole.max_offset:
        row = _get(server, "/api/v1/messages/by-queue-offset", topic="TopicTest", queue=1, offset=offset, max=13)
        offsets += [(int(hit["queueOffset"]), hit["tagsCode"]) for hit in row["messages"]]
        offset = int(row["nextOffset"])
    assert offsets == [(hit.queue_offset, str(hit.unit.tags_code)) for hit in whole.hits]
    none = _get(server, "/api/v1/messages/by-queue-offset", topic="TopicTest", queue=77)
    assert (none["status"], none["result"]) == ("NO_MATCHED_LOGIC_QUEUE", "empty_covered")
    behind = _get(server, "/api/v1/messages/by-queue-offset", topic="TopicTest", queue=1, offset=whole.max_offset)
    assert (behind["why"], behind["result"]) == ("behind the last message", "empty_covered")


def test_one_message_by_offset_and_by_id(server: Serving, data: Data) -> None:
    hit = data.by_key("订单主题", "Aa").hits[0]
    found = data.message(hit.phy_offset)
    assert not isinstance(found, NotFound)
    row = _get(server, f"/api/v1/messages/{hit.phy_offset}", body="base64")
    assert base64.b64decode(row["body"]) == found.body
    assert row["properties"] == found.properties
    assert (row["topic"], row["queueOffset"], row["storeTimestamp"]) == (
        "订单主题", str(found.queue_offset), str(found.store_timestamp),
    )  # fmt: skip
    assert _get(server, f"/api/v1/messages/{found.offset_msg_id}", body="base64") == row
    for where, words in (
        (hit.phy_offset + 1, "magic"),
        (2**62, "does not reach"),
    ):
        answer = server.get(f"/api/v1/messages/{where}")
        assert answer.status_code == 404
        assert words in answer.json()["detail"]
        assert answer.json()["result"] == "empty_covered"


def test_bodies_in_the_form_that_was_asked_for(server: Serving) -> None:
    def shown(form: str) -> list[tuple[Any, str]]:
        answer = server.get("/api/v1/messages/by-key", params={"topic": "Bodies", "key": "body", "body": form})
        row = json.loads(answer.content, parse_constant=pytest.fail)
        return [(hit["body"], hit["bodyEncoding"]) for hit in reversed(row["messages"])]

    assert shown("hex") == [(body.hex(), "hex") for body in _BODIES]
    assert shown("base64") == [(base64.b64encode(body).decode(), "base64") for body in _BODIES]
    assert shown("text") == [
        (_BODIES[0].decode(), "utf-8"), ("文字\n", "utf-8"), ("AP+A", "base64"), ("NaN", "utf-8"), ("", "utf-8"),
        ('"\\ud800"', "utf-8"), ("1e999", "utf-8"),
    ]  # fmt: skip
    assert shown("json") == [
        ({"n": 12345678901234567890, "f": 1.5}, "json"), ("文字\n", "utf-8"), ("AP+A", "base64"), ("NaN", "utf-8"),
        ("", "utf-8"), ('"\\ud800"', "utf-8"), ("1e999", "utf-8"),
    ]  # fmt: skip


def test_bodies_of_an_answer_are_bounded_together(server: Serving) -> None:
    row = _get(server, "/api/v1/messages/by-queue-offset", topic="TopicTest", queue=0, max=100, body="hex")
    sizes = [len(hit["body"] or "") // 2 for hit in row["messages"]]
    assert sum(sizes) == 1000
    cut = [hit for hit in row["messages"] if hit["bodyTruncated"]]
    assert row["messages"][-len(cut) :] == cut
    assert [hit["body"] for hit in cut[1:]] == [None] * (len(cut) - 1)


def test_what_is_not_indexed_yet_is_no_absence(built: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(built[0], tmp_path / "store")
    with open_data(built[1]) as opened:
        end = opened.coverage().end
    with CommitLogWriter(tmp_path / "store/commitlog", SEGMENT_SIZE, start_offset=end) as writer:
        writer.append(FrameSpec("TopicTest", b"x", {"KEYS": "just now"}, queue_id=0, store_timestamp=BASE_TIME))
    with Serving(built[1], tmp_path / "store") as server:
        row = _get(server, "/api/v1/messages/by-key", topic="TopicTest", key="never")
        assert (row["result"], row["coverage"]["complete"]) == ("empty_uncovered", False)
        assert row["why"].startswith("not yet indexed: ")
        assert server.board.queries == {"found": 0, "empty_covered": 0, "empty_uncovered": 1, "error": 0}
        row = _get(server, "/api/v1/messages/by-key", topic="TopicTest", key="never", before=end)
        assert (row["result"], row["why"]) == ("empty_covered", "absent before the cursor")
        row = _get(server, "/api/v1/messages/by-key", topic="TopicTest", key="never", before=end + 1)
        assert row["result"] == "empty_uncovered"
        row = _get(server, "/api/v1/messages/by-queue-offset", topic="a/b", queue=0)
        assert row["result"] == "empty_covered"


def test_what_has_expired_is_said_on_the_page(built: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copytree(built[0], tmp_path / "store")
    min((tmp_path / "store/commitlog").iterdir()).unlink()
    with Serving(built[1], tmp_path / "store") as server:
        shown = server.get(f"/?topic=TopicTest&q=Aa&from={BASE_TIME + 1_000}&to={BASE_TIME + 10_000}").text
    assert "Expired: the index knew entries" in shown
    assert f"The log begins at {SEGMENT_SIZE:,}" in shown


def test_topics_complete_what_is_typed(server: Serving, built: tuple[Path, Path]) -> None:
    names = sorted(path.name for path in (built[1] / "consumequeue").iterdir())
    assert _get(server, "/api/v1/topics") == {"topics": names, "total": len(names)}
    typed = names[0][:3].swapcase()
    fitting = [name for name in names if name[:3].lower() == typed.lower()]
    assert _get(server, "/api/v1/topics", begin=typed, max=1) == {"topics": fitting[:1], "total": len(fitting)}
    assert _get(server, "/api/v1/topics", begin="no such")["topics"] == []


def test_index_files_and_coverage(server: Serving, built: tuple[Path, Path]) -> None:
    listed = _get(server, "/api/v1/index-files")["indexFiles"]
    names = sorted(path.name for path in (built[1] / "index").iterdir())
    assert [row["name"] for row in listed] == names
    assert [row["full"] for row in listed] == [True] * (len(names) - 1) + [False]
    frontier = json.loads((built[1] / "frontier").read_bytes())
    row = _get(server, "/api/v1/coverage")
    assert row["durableOffset"] == row["coverage"]["end"] == str(frontier["phyOffset"])
    assert [part["begin"] for part in row["segments"]] == [
        str(number * SEGMENT_SIZE) for number in range(len(row["segments"]))
    ]


@pytest.mark.parametrize(
    ("search", "status", "words"),
    [
        ("topic=TopicTest&q=Aa&max=3", 200, "The newest 3 messages"),
        ("topic=TopicTest&q=Aa&max=3&before=300000", 200, "Older ones: 3 messages"),
        ("topic=TopicTest&q=Aa&mode=rocketmq", 200, "This is what the broker would answer"),
        ("topic=TopicTest&q=nope&from=-1h", 200, "Covered and absent: the index covers the log"),
        ("by=queue&topic=TopicTest&q=0/5&max=3", 200, "3 messages of queue 0"),
        ("by=queue&topic=TopicTest&q=0/99999", 200, "Behind the last message"),
        ("by=offset&q=0", 200, "Message at"),
        ("by=offset&q=7", 200, "No message at physical offset 7"),
        ("by=time&q=1970-01-01", 200, "The first message of the log that was stored then or later."),
        ("by=time&q=now", 200, "No message"),
        ("by=id&q=zz", 422, "is no offset message id"),
        ("by=key&q=k", 422, "Which topic?"),
        ("topic=TopicTest&q=nope&from=2001-02-03&to=2001-02-03+04:05", 200, "in this range of time"),
        ("by=tags&topic=TopicTest&q=TagA", 200, "messages"),
        ("by=unique&topic=TopicTest&q=nope", 200, "no message of this topic has this unique key"),
        ("topic=TopicTest&q=Aa&from=yesterday", 422, "&#39;yesterday&#39; is no time"),
        ("topic=TopicTest&q=Aa&max=1000000000", 422, "query may ask for"),
        ("by=queue&topic=TopicTest&q=7", 422, "Write them as 0/123"),
    ],
)
def test_searches_of_the_page(server: Serving, search: str, status: int, words: str) -> None:
    answer = server.get(f"/?{search}")
    assert answer.status_code == status
    assert words in answer.text
    assert "script-src 'self'" in answer.headers["content-security-policy"]


#: For each route.
_EXAMPLES = 4
_SECONDS = 300
#: A stream that never ends.
_LIVE = "/api/v1/live"
_TOKEN = "0123456789abcdef"
# With the token, so that it knows when it leaves it out.
_SETTINGS = f"""\
[checks.negative_data_rejection]
expected-statuses = [400, 401, 404, 405, 409, 413, 422]
[auth.openapi.token]
bearer = "{_TOKEN}"
"""
_ROUTES = {
    *("/livez", "/readyz", "/metrics", _LIVE, "/api/v1/status", "/api/v1/events", "/api/v1/coverage"),
    *("/api/v1/index-files", "/api/v1/topics"),
    *(f"/api/v1/messages/{rest}" for rest in ("by-key", "by-unique-key", "by-queue-offset", "by-time", "{where}")),
}


def test_every_route_does_what_its_openapi_says(tmp_path: Path) -> None:
    end = write_log(tmp_path / "store", 1500)
    (tmp_path / "token").write_text(f"{_TOKEN}\n")
    env = {"INDEXD_HTTP": "127.0.0.1:0", "INDEXD_HTTP_TOKEN_FILE": str(tmp_path / "token")}
    with Daemon(tmp_path / "store", tmp_path / "data", *SIZES, env=env) as daemon:
        daemon.wait_caught_up(end)
        url = f"http://{daemon.wait_event('listening')['http']}"
        schema = httpx.get(f"{url}/openapi.json", headers={"authorization": f"Bearer {_TOKEN}"}).json()
        assert set(schema["paths"]) == _ROUTES
        for path, methods in schema["paths"].items():
            assert set(methods) == {"get"}, path
            assert methods["get"]["summary"], path
            assert all(parameter["description"] for parameter in methods["get"]["parameters"]), path
        said = _fuzz(schema, url, tmp_path)
        assert httpx.get(f"{url}/livez").status_code == 200
        assert daemon.terminate() == 0
        assert not [line for line in daemon.events() if line["level"] in ("warning", "error", "critical")], said


def _fuzz(schema: object, url: str, work: Path) -> str:
    (work / "openapi.json").write_text(json.dumps(schema))
    (work / "schemathesis.toml").write_text(_SETTINGS)
    words = ["run", "openapi.json", "--url", url, "--checks", "all", "--max-examples", str(_EXAMPLES)]
    words += ["--exclude-path", _LIVE, "--no-color", "--generation-database", "none"]
    done = subprocess.run(
        [Path(sys.executable).with_name("schemathesis"), *words],
        cwd=work,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout
