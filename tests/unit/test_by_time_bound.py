"""The lower bound that the sparse indexes give a query by key: it ends walks early and loses nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from indexd.commitlog.writer import FrameSpec
from indexd.query import KeyQuery, query_exact
from indexd.query.by_time import TimeBound, scan_start
from support.data_directory import T0, spec
from support.queue_store import QueueStore

if TYPE_CHECKING:
    pass

TIMES = st.lists(
    st.one_of(st.integers(T0 - 30, T0 + 30), st.integers(T0 - 3, T0 + 3), st.sampled_from([-5, -1, 0, 1, 2**40])),
    min_size=1,
    max_size=120,
)


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    return QueueStore(tmp_path)


def sized(number: int, time: int) -> FrameSpec:
    return spec(time, size=(number * 37) % 400)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TIMES, st.data())
def test_a_bounded_walk_finds_what_an_unbounded_one_does(times: list[int], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("indexd.query.by_key._BOUND_AFTER", data.draw(st.sampled_from([0, 1, 7])))
        store = QueueStore(Path(directory))
        with store.writer as writer:
            for number, time in enumerate(times):
                writer.append(sized(number, time))
        messages = store.messages()
        kept = data.draw(st.integers(0, len(messages) - 1))
        store.build()
        marks = store.frontier
        store.build(upto=messages[kept].phy_offset)  # the sparse indexes know less than the key index
        store.write(marks.with_outputs(sparse=store.frontier.sparse))
        with store.index() as index:
            for begin in {*times, *(time + 1 for time in times), T0 - 100}:
                answer = query_exact(index, KeyQuery("T", "k", 500, begin))
                wanted = [m.phy_offset for m in messages if m.store_timestamp >= begin]
                assert [hit.phy_offset for hit in answer.hits] == wanted[::-1]
                assert answer.truncated is None
                look = index.look()
                first = wanted[0] if wanted else messages[-1].phy_offset + 1
                assert scan_start(index, look, begin, 0) <= first


def test_a_bound_ends_the_walk(store: QueueStore, monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = store.append(*[spec(T0 + number) for number in range(600)])
    store.build()
    with store.index(query_walk_max=100) as index:
        answer = query_exact(index, KeyQuery("T", "k", begin=T0 + 580))
        assert [hit.phy_offset for hit in answer.hits] == offsets[:579:-1]
        assert answer.truncated is None
        monkeypatch.setattr(TimeBound, "is_before", lambda *_: False)
        assert query_exact(index, KeyQuery("T", "k", begin=T0 + 580)).truncated == "walk 100"
