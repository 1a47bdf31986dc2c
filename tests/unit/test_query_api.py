"""The public Python API: the example in its docstring, and what it opens."""

from __future__ import annotations

import doctest
from typing import TYPE_CHECKING

import pytest

import indexd.query
from indexd.commitlog.writer import FrameSpec
from indexd.errors import UsageError
from indexd.query import NotFound, open_data
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
