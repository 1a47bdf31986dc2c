"""The bounds of a query, hostile index files, and directories that are not what they should be."""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING

import pytest

from indexd.errors import CorruptDataError, UnsafeStoreError, UsageError
from indexd.flush.frontier import Frontier, read_frontier
from indexd.index.format import FileMark, IndexHeader, IndexLayout
from indexd.query import KeyQuery, open_index, query_exact, query_rocketmq
from indexd.query.answer import LastUpdate
from indexd.query.log import LogView
from indexd.storage.disk import Disk
from support.data_directory import LAYOUT, SEGMENT, T0, Store, config_of, spec, write_data
from support.naive import NaiveIndexFile, NaiveIndexService, key_hash

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


# --- bounds ---


def test_max_and_what_it_cuts_off(store: Store) -> None:
    offsets = store.append(*[spec(KEYS="k k", UNIQ_KEY="k") for _ in range(5)])[::-1]
    store.build()
    with store.index(query_max_num=9) as index:
        for count in (0, 1, 4):
            answer = query_exact(index, KeyQuery("T", "k", count))
            assert [hit.phy_offset for hit in answer.hits] == offsets[:count]
            assert answer.to_json()["truncatedBy"] == f"max {count}"
        assert not query_exact(index, KeyQuery("T", "k", 5)).to_json()["truncated"]
        assert query_exact(index, KeyQuery("T", "k", -1)).hits == ()
        assert query_rocketmq(index, KeyQuery("T", "k", -1)).hits == ()
        with pytest.raises(UsageError, match="9 messages"):
            query_exact(index, KeyQuery("T", "k", 10))


def test_a_walk_is_bounded(store: Store) -> None:
    store.append(*[spec() for _ in range(9)])
    store.build()
    with store.index(query_walk_max=4) as index:
        answer = query_exact(index, KeyQuery("T", "k", end=T0 - 1))
        assert (answer.truncated, answer.why) == ("walk 4", "cut off")
        assert len(query_exact(index, KeyQuery("T", "k")).hits) == 4


def test_a_hot_key_and_a_narrow_range_read_few_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, IndexLayout(100, 200_000), segment=1 << 16)
    (offset,) = store.append(spec(time=T0 + 50_000_500))
    store.build()
    file = NaiveIndexFile(100, 200_000)
    for number in range(100_000):
        file.put_key("T#k", offset if number == 50_000 else 10**9 + number, T0 + 1000 * number + 500)
    service = NaiveIndexService(100, 200_000)
    service.files = [file]
    write_data(store.data, store.frontier, service)
    reads = []
    at = LogView.at
    monkeypatch.setattr(LogView, "at", lambda self, offset: reads.append(offset) or at(self, offset))
    assert store.exact(begin=T0 + 50_000_000, end=T0 + 50_001_000) == [offset]
    assert len(reads) < 10


# --- hostile files ---


def entry_position(number: int) -> int:
    return LAYOUT.entry_position(number)


@pytest.fixture
def hostile(store: Store) -> Store:
    store.append(*[spec() for _ in range(5)])
    store.build()
    return store


def poke(store: Store, position: int, data: bytes) -> None:
    path = store.data / "index" / store.frontier.index[0].name
    content = bytearray(path.read_bytes())
    content[position : position + len(data)] = data
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("previous", [3, 4, 9, 10, 2**31 - 1])
def test_a_chain_that_loops_or_goes_up(hostile: Store, previous: int) -> None:
    poke(hostile, entry_position(3) + 16, struct.pack(">i", previous))
    with pytest.raises(CorruptDataError, match="goes up from entry 3"):
        hostile.exact()
    with hostile.index() as index:
        assert len(query_rocketmq(index, KeyQuery("T", "k")).hits) >= 3


def test_a_slot_that_names_no_entry(hostile: Store) -> None:
    slot = LAYOUT.slot_position(LAYOUT.slot_of(key_hash("T#k")))
    poke(hostile, slot, struct.pack(">i", -5))
    assert hostile.exact() == []
    poke(hostile, slot, struct.pack(">i", 10))
    with pytest.raises(CorruptDataError, match="goes up"):
        hostile.exact()
    poke(hostile, 36, struct.pack(">i", 2**31 - 1))
    with hostile.index() as index, pytest.raises(CorruptDataError):
        query_rocketmq(index, KeyQuery("T", "k"))


def test_entries_that_point_at_no_message(hostile: Store) -> None:
    offsets = [message.phy_offset for message in hostile.messages()]
    for number, wrong in ((1, -1), (2, offsets[1] + 1), (3, 2**63 - 1), (4, 3000)):
        poke(hostile, entry_position(number) + 4, struct.pack(">q", wrong))
    with hostile.index() as index:
        answer = query_exact(index, KeyQuery("T", "k"))
        assert [hit.phy_offset for hit in answer.hits] == offsets[4:]
        assert (answer.unreadable, answer.expired) == (4, 0)
        row = query_rocketmq(index, KeyQuery("T", "k")).to_json()
        assert row["phyOffsets"] == [offsets[4], 3000, 2**63 - 1, offsets[1] + 1, -1]
        assert row["storeTimestamps"] == [T0, None, None, None, None]
    poke(hostile, entry_position(5) + 4, struct.pack(">q", 1))
    assert hostile.why() == "unreadable"


def test_an_index_file_of_another_size(hostile: Store) -> None:
    path = hostile.data / "index" / hostile.frontier.index[0].name
    os.truncate(path, 100)
    with pytest.raises(CorruptDataError, match="100 bytes"):
        hostile.exact()


# --- what is opened ---


def test_a_directory_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no index yet"):
        open_index(Disk(), config_of(tmp_path))


def test_settings_that_contradict_the_index(store: Store) -> None:
    store.append(spec())
    store.build()
    for key, value in (("hash_slot_num", 8), ("index_num", 11), ("flavour", "4.7")):
        with (
            pytest.raises(UsageError, match=f"was built with {getattr(LAYOUT, key, '5.4')}"),
            store.index(**{key: value}),
        ):
            pass
    with store.index(hash_slot_num=7, index_num=10, flavour="5.4", store=store.root, segment_size=SEGMENT) as index:
        assert len(query_exact(index, KeyQuery("T", "k")).hits) == 1
    with pytest.raises(UnsafeStoreError, match="segment_size"), store.index(segment_size=8192):
        pass
    moved = store.root.rename(store.root.with_name("moved"))
    with pytest.raises(UnsafeStoreError, match="no commitlog"):
        store.exact()
    with store.index(commit_log_paths=moved / "commitlog") as index:
        assert len(query_exact(index, KeyQuery("T", "k")).hits) == 1


def test_a_frontier_of_an_unknown_flavour(store: Store) -> None:
    store.append(spec())
    store.build()
    store.change_frontier(flavour="9.9")
    with pytest.raises(CorruptDataError, match=r"9\.9"):
        store.exact()
    assert isinstance(read_frontier(Disk(), store.data / "frontier"), Frontier)


def test_an_index_without_files_or_log(store: Store) -> None:
    store.build()
    with store.index() as index:
        answer = query_rocketmq(index, KeyQuery("T", "k"))
        assert (answer.hits, answer.last_update) == ((), LastUpdate())
        assert query_exact(index, KeyQuery("T", "k")).why == "absent"
    assert store.frontier.index == ()
    assert FileMark("x", IndexHeader(), full=False).header.entries == 0
