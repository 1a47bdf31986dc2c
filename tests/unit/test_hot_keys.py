"""A key with very many messages: what is outside the range is passed over, what is cut off says so and is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from indexd.commitlog.lookup import TimeUpError
from indexd.index.format import IndexLayout
from indexd.query import KeyQuery, QueryIndex, query_exact
from support.data_directory import T0, Store, spec, write_data
from support.naive import NaiveIndexFile, NaiveIndexService
from support.serving import Serving

if TYPE_CHECKING:
    from pathlib import Path

_ENTRIES, _OLD = 150_000, 64


@pytest.fixture
def hot(tmp_path: Path) -> Store:
    """A key of 150,000 entries, a second each: the messages of the oldest 64 are there."""
    store = Store(tmp_path, IndexLayout(100, 200_000), segment=1 << 16)
    offsets = store.append(*[spec(time=T0 + 1000 * number) for number in range(_OLD)])
    store.build()
    file = NaiveIndexFile(100, 200_000)
    for number in range(_ENTRIES):
        file.put_key("T#k", offsets[number] if number < _OLD else 10**9 + number, T0 + 1000 * number)
    service = NaiveIndexService(100, 200_000)
    service.files = [file]
    write_data(store.data, store.frontier, service)
    return store


def test_old_messages_of_a_hot_key_are_found_over_http(hot: Store) -> None:
    with Serving(hot.data, hot.root) as server:
        asked = {"topic": "T", "key": "k", "begin": T0, "end": T0 + 1000 * _OLD}
        row = server.get("/api/v1/messages/by-key", params=asked).json()
        assert len(row["messages"]) == _OLD
        assert (row["truncated"], row["coverage"]["complete"]) == (False, True)
    # As many entries as a walk may take are too few for a key alone, and enough for the range.
    with hot.index(query_walk_max=300) as index:
        assert len(query_exact(index, KeyQuery("T", "k", 100, T0, T0 + 1000 * _OLD)).hits) == _OLD


def test_an_answer_whose_walk_was_cut_off_is_not_complete(hot: Store) -> None:
    with hot.index(query_walk_max=10) as index:
        answer = query_exact(index, KeyQuery("T", "k", end=T0 - 1))
    assert (answer.truncated, answer.why) == ("walk 10", "cut off")
    assert answer.to_json()["coverage"]["complete"] is False
    with Serving(hot.data, hot.root, query_walk_max=10) as server:
        row = server.get("/api/v1/messages/by-key", params={"topic": "T", "key": "k", "end": T0 - 1}).json()
    assert (row["result"], row["coverage"]["complete"], row["coverage"]["why"]) == ("empty_uncovered", False, "cut off")
    assert row["cursor"] is not None


def _allow(index: QueryIndex, checks: int) -> None:
    left = checks

    def check() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise TimeUpError

    index.log.check = check


def test_what_was_found_when_the_time_was_up_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    offsets = store.append(*[spec(KEYS="k x k", UNIQ_KEY="k") for _ in range(12)])[::-1]
    store.build()
    pages = set()
    with store.index() as index:
        for checks in range(1, 120):
            _allow(index, checks)
            try:
                first = query_exact(index, KeyQuery("T", "k"))
            except TimeUpError:  # before the walk had begun
                continue
            index.log.check = lambda: None
            found = [hit.phy_offset for hit in first.hits]
            if first.truncated is not None:
                assert first.truncated == "time"
                assert not first.coverage.complete
                pages.add(len(found))
                rest = query_exact(index, KeyQuery("T", "k", before=first.cursor))
                found += [hit.phy_offset for hit in rest.hits]
            assert found == offsets, checks
    assert pages == set(range(13))
