"""The naive index file, service and oracle against the spec's vectors and rules (spec 3, 4, 12)."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.commitlog_writer import CommitLogWriter, FrameSpec, encode_frame
from support.naive import (
    NaiveIndexFile,
    NaiveIndexService,
    NaiveMessage,
    exact_oracle,
    key_hash,
    naive_check,
    naive_frames,
    split_keys,
)
from support.strategies import Sample, logs, queries

FOREVER = (0, 2**63 - 1)


# --- the index file: spec 3, 12 ---


def vector_file() -> NaiveIndexFile:
    file = NaiveIndexFile(4, 5)
    puts = [("T#a", 1000, 1000000500), ("T#a", 1100, 1000003499), ("T#b", 1200, 999000000), ("T#c", 1300, 1000009000)]
    assert all(file.put_key(*put) for put in puts)
    assert not file.put_key("T#d", 1400, 1000009000)
    return file


def test_the_index_file_vector() -> None:
    entries = [(0, 0, 0, 0), (81906, 1000, 0, 0), (81906, 1100, 2, 1), (81907, 1200, 0, 0), (81908, 1300, 8, 0)]
    expected = struct.pack(">qqqqii4i", 1000000500, 1000009000, 1000, 1300, 3, 5, 4, 0, 2, 3)
    expected += b"".join(struct.pack(">iqii", *entry) for entry in entries)
    assert vector_file().to_bytes() == expected
    assert NaiveIndexFile.from_bytes(expected, 4, 5).to_bytes() == expected


@pytest.mark.parametrize(
    ("begin", "end", "found"), [(*FOREVER, [1100, 1000]), (1000003499, 2**63 - 1, []), (0, 1000002500, [1100, 1000])]
)
def test_select_on_the_vector(begin: int, end: int, found: list[int]) -> None:
    out: list[int] = []
    vector_file().select_phy_offset(out, "T#a", 64, begin, end)
    assert out == found


def test_the_successor_vector() -> None:
    file = NaiveIndexFile(4, 5, 1300, 1000009000)
    head = struct.pack(">qqqqi", 1000009000, 1000009000, 1300, 1300, 0)
    assert file.to_bytes() == head + bytes(4 + 16 + 100)
    assert file.to_bytes(flushed=True) == head + struct.pack(">i", 1) + bytes(16 + 100)
    file.put_key("T#z", 5000, 1000019000)
    data = file.to_bytes()
    assert data[:40] == struct.pack(">qqqqii", 1000019000, 1000019000, 5000, 5000, 1, 2)
    assert data[76:96] == struct.pack(">iqii", 81931, 5000, 10, 0)


def test_a_first_file_is_all_zero_until_the_first_put() -> None:
    assert NaiveIndexFile(4, 5).to_bytes() == bytes(156)
    assert NaiveIndexFile(4, 5).to_bytes(flushed=True) == bytes(36) + b"\0\0\0\1" + bytes(116)


def test_a_slot_that_names_the_next_entry_links_it_to_itself() -> None:
    file = NaiveIndexFile(1, 5)
    file.put_key("a", 100, 1000)
    file.slots[0] = 2  # a crash between slot and count
    file.put_key("a", 200, 1000)
    assert file.entries[2][3] == 2
    out: list[int] = []
    file.select_phy_offset(out, "a", 64, *FOREVER)
    assert out == [200]


def test_time_differences_are_clamped() -> None:
    file = NaiveIndexFile(4, 9)
    for time in (0, 5_000, -1, 2**31 * 1000 + 7):
        file.put_key("k", 1, time)
    assert [entry[2] for entry in file.entries[1:]] == [0, 0, 0, 0]  # begin 0 counts as unset
    file = NaiveIndexFile(4, 9)
    for time in (1, 1000, 1001, 2**31 * 1000 + 1, 0):
        file.put_key("k", 1, time)
    assert [entry[2] for entry in file.entries[1:]] == [0, 0, 1, 2**31 - 1, 0]


# --- the index service: spec 4 ---


def message(phy_offset: int, sys_flag: int = 0, **properties: str) -> NaiveMessage:
    ok, _, found = naive_check(encode_frame(FrameSpec("T", sys_flag=sys_flag, properties=properties), phy_offset))
    assert ok
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("flavour", "hashed", "slots"),
    [
        ("3.x", ["T#a", "T#a"], 2),
        ("4.0", ["T#u", "T#a", "T#a"], 3),
        ("4.7", ["T#u", "T#a", "T#a"], 2),
        ("5.4", ["T#u", "T#a", "T#a", "T#T#g"], 3),
    ],
)
def test_what_a_flavour_indexes(flavour: str, hashed: list[str], slots: int) -> None:
    service = NaiveIndexService(1000, 100, flavour)
    service.build_index(message(0, KEYS=" a  a ", UNIQ_KEY="u", TAGS="g"))
    (file,) = service.files
    assert [entry[0] for entry in file.entries[1:]] == [key_hash(text) for text in hashed]
    assert file.hash_slot_count == slots


@pytest.mark.parametrize(
    ("flavour", "kinds"), [("3.x", {0, 0x8}), ("4.0", {0, 4, 8}), ("4.7", {0, 4, 8}), ("5.4", {0, 4, 8})]
)
def test_which_transaction_kinds_a_flavour_indexes(flavour: str, kinds: set[int]) -> None:
    for kind in (0, 0x4, 0x8, 0xC):
        service = NaiveIndexService(10, 100, flavour)
        service.build_index(message(0, kind, KEYS="a"))
        assert (service.files[0].index_count > 1) == (kind in kinds)


def test_the_skip_rule_is_strict_and_a_message_straddles_files() -> None:
    service = NaiveIndexService(10, 4, "4.7")
    service.build_index(message(100, KEYS="a b"))
    service.build_index(message(100, KEYS="c"))  # equal: indexed again
    service.build_index(message(99, KEYS="d"))  # the full file gets a successor, that knows it has seen 100
    assert [file.index_count for file in service.files] == [4, 1]
    service.build_index(message(300, KEYS="e f g h"))
    assert [file.index_count for file in service.files] == [4, 4, 2]
    assert (service.files[1].begin_phy_offset, service.files[2].begin_phy_offset) == (300, 300)
    assert service.query_offset("T", "h", 64, *FOREVER)[0] == [300]


def test_a_query_is_capped() -> None:
    service = NaiveIndexService(10, 1000, "5.4")
    for phy_offset in range(100, 200):
        service.build_index(message(phy_offset, KEYS="a"))
    assert service.query_offset("T", "a", 200, *FOREVER) == (list(range(199, 135, -1)), 0, 199)
    assert service.query_offset("T", "a", 0, *FOREVER)[0] == []


# --- the oracle ---


@settings(max_examples=60)
@given(st.data(), logs(max_size=25))
def test_the_oracle_finds_all_that_an_unlimited_walk_finds_of_the_same_name(
    data: st.DataObject, samples: list[Sample]
) -> None:
    """Over all times and without a cap, the index finds the exact hits and nothing else but hash collisions."""
    with tempfile.TemporaryDirectory() as directory:
        with CommitLogWriter(Path(directory), 4096) as writer:
            for sample in samples:
                sample.append(writer)
        messages = list(naive_frames(Path(directory), 4096))
    query = data.draw(queries(samples))
    service = NaiveIndexService(7, 10, "5.4", max_msgs_num_batch=10**6)
    for found in messages:
        service.build_index(found)
    everywhere = (-(2**62), 2**62)
    kind = query.index_type
    answer = service.query_offset(query.topic, query.key, 10**6, *everywhere, index_type=kind)[0]
    hits = exact_oracle([m.row() for m in messages], query.topic, query.key, *everywhere, index_type=kind)
    assert hits <= set(answer)
    text = f"{query.topic}#T#{query.key}" if kind == "T" else f"{query.topic}#{query.key}"
    by_offset = {m.phy_offset: m for m in messages}
    for phy_offset in answer:
        m = by_offset[phy_offset]
        names = [m.uniq_key or "", *split_keys(m.keys), f"T#{m.tags}"]
        assert key_hash(text) in {key_hash(f"{m.topic}#{name}") for name in names}
