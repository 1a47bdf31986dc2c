"""The public Python API: the example in its docstring, and what it opens."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import indexd.query
from indexd.commitlog.decoder import Message
from indexd.commitlog.writer import FrameSpec
from indexd.errors import UsageError
from indexd.query import Hit, NotFound, open_data
from support.data_directory import T0
from support.queue_store import QueueStore

if TYPE_CHECKING:
    from pathlib import Path

_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    store = QueueStore(tmp_path, segment=1 << 16)
    for number, word in enumerate(_WORDS):
        keys = {"KEYS": "order-7"} if number < 7 else {"KEYS": "order-8"}
        store.append(FrameSpec("TopicTest", word.encode(), keys, store_timestamp=T0 + 10 * number))
    store.build()
    return store


def test_the_example_in_the_docstring(store: QueueStore) -> None:
    (example,) = [
        found
        for found in doctest.DocTestFinder(recurse=False).find(indexd.query, extraglobs={"DATA": store.data})
        if found.examples
    ]
    results = doctest.DocTestRunner().run(example)
    assert results.attempted >= 2
    assert results.failed == 0


def test_everything_that_is_public_has_words_of_its_own() -> None:
    for name in indexd.query.__all__:
        assert getattr(indexd.query, name).__doc__ or isinstance(getattr(indexd.query, name), int) or name == "Boundary"


def test_an_answer_is_the_sequence_of_its_hits(store: QueueStore) -> None:
    with open_data(store.data) as data:
        answers = (
            (data.by_key("TopicTest", "order-7", max_num=3), 3),
            (data.by_key("TopicTest", "none"), 0),
            (data.by_queue("TopicTest", 0, 2, max_num=4), 4),
            (data.at_time("TopicTest", 0, T0 + 45), 1),
            (data.at_time("TopicTest", 7, T0), 0),
            (data.log_at_time(T0 + 45), 1),
        )
        for answer, count in answers:
            assert (len(answer), tuple(answer)) == (count, answer.hits)
            row = answer.to_dict()
            assert json.loads(json.dumps(row)) == row == answer.to_json()
            assert [hit["topic"] for hit in row["hits"]] == ["TopicTest"] * count
        message = data.message(answers[0][0].hits[0].phy_offset)
        assert isinstance(message, Message)
        assert answers[0][0].to_dict()["hits"][0] == Hit.of(message).to_dict()


def test_the_package_gives_open_data_and_is_cheap() -> None:
    code = (
        "import sys, indexd\n"
        "assert not [name for name in sys.modules if name.startswith('indexd.')]\n"
        "from indexd import open_data\n"
        "import indexd.query\n"
        "assert indexd.open_data is open_data is indexd.query.open_data\n"
        "assert not {'numpy', 'numba', 'asyncio', 'structlog'} & set(sys.modules)\n"
        "assert not hasattr(indexd, 'open_store')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_opened(store: QueueStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXD_DATA", "/nowhere")
    moved = store.root.rename(tmp_path / "moved")
    with open_data(str(store.data), store=moved) as data:
        assert len(data.by_key("TopicTest", "order-7").hits) == 7
        assert data.coverage().complete
        found = data.message(0)
        assert not isinstance(found, NotFound)
        assert data.message(found.offset_msg_id) == found
        assert "nothing is written" in data.message(data.coverage().end).reason
    with open_data(store.data, commit_log_paths=[moved / "commitlog"]) as data:
        assert data.by_queue("TopicTest", 0, max_num=1).hits[0].hit.keys == "order-7"
        assert repr(data).startswith("Data(QueryIndex(")
    with pytest.raises(UsageError, match="holds no index yet"):
        open_data(tmp_path / "empty")
