"""Places to split the log at: every one the start of a message, and the counts in between are true."""

from __future__ import annotations

from pathlib import Path

import pytest

from indexd.errors import UsageError
from indexd.query import open_data
from support.data_directory import T0, spec
from support.queue_store import QueueStore


@pytest.fixture
def store(tmp_path: Path) -> QueueStore:
    store = QueueStore(tmp_path)
    with store.writer as writer:
        for number in range(200):
            writer.append(spec(T0 + number, size=(number * 37) % 400))
    store.build()
    return store


@pytest.mark.parametrize("size", [1, 300, 1000, 4096, 1 << 30])
def test_stretches_begin_with_messages_and_count_them(store: QueueStore, size: int) -> None:
    with open_data(store.data, store=store.root) as data:
        splits = data.split_log(size)
    messages = store.messages()
    starts = {message.phy_offset for message in messages}
    for split in splits:
        assert split.begin in starts
        inside = [message for message in messages if split.begin <= message.phy_offset < split.end]
        assert split.messages == len(inside) > 0
        assert split.begin // store.segment == (split.end - 1) // store.segment
    assert [split.end for split in splits[:-1]] == [split.begin for split in splits[1:]]
    assert (splits[0].begin, splits[-1].end) == (0, store.frontier.phy_offset)
    assert sum(split.messages for split in splits) == len(messages)
    # About the size that was asked for: an interval and a message more at most.
    assert all(split.end - split.begin < size + 300 + 2 * 600 for split in splits)


def test_smaller_stretches_are_more(store: QueueStore) -> None:
    with open_data(store.data, store=store.root) as data:
        counts = [len(data.split_log(size)) for size in (1 << 30, 2000, 500)]
    assert counts == sorted(counts)
    assert counts[0] == len({message.phy_offset // store.segment for message in store.messages()})
    assert counts[2] > counts[1] > counts[0]


def test_refuses_what_cannot_be_split(store: QueueStore) -> None:
    with open_data(store.data, store=store.root) as data, pytest.raises(UsageError, match="stretches of 0 bytes"):
        data.split_log(0)
    store.change_frontier(sparse=None)
    with open_data(store.data, store=store.root) as data, pytest.raises(UsageError, match="no sparse indexes"):
        data.split_log(1000)


def test_an_index_that_has_expired_meanwhile_gives_its_segment_whole(store: QueueStore) -> None:
    (store.data / "sparse" / f"{0:020d}.index").unlink()
    with open_data(store.data, store=store.root) as data:
        first = data.split_log(500)[0]
    assert (first.begin, first.end) == (0, store.segment)
