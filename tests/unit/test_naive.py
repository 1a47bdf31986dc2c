"""The naive reader against the spec's vectors; reader and index against the golden stores, byte for byte."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from support.commitlog_writer import FrameSpec, encode_frame
from support.goldens import GOLDENS, Golden, unpack
from support.naive import (
    NaiveIndexService,
    NaiveMessage,
    decode_properties,
    exact_oracle,
    java_hash,
    java_utf8,
    key_hash,
    naive_check,
    naive_frames,
    split_keys,
)
from support.strategies import ZERO_HASH


@pytest.fixture(scope="module", params=GOLDENS)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return unpack(request.param, tmp_path_factory.mktemp("golden"))


def build(golden: Golden) -> NaiveIndexService:
    service = NaiveIndexService(golden.hash_slot_num, golden.index_num, golden.flavour)
    for message in naive_frames(golden.segments(), golden.segment_size):
        service.build_index(message)
    return service


def check(spec: FrameSpec, **raw: Any) -> NaiveMessage:
    ok, size, message = naive_check(encode_frame(spec, 0, **raw))
    assert ok
    assert message is not None
    assert message.size == size
    return message


# --- text, hashes, properties: spec 3.3, 11.3, 12 ---


def test_hashes() -> None:
    assert java_hash("T#a") == 81906
    assert java_hash("\U0001f600") == 1772899
    assert java_hash("tagA") == 3552231
    assert java_hash("#".join(ZERO_HASH)) == -(2**31)
    assert key_hash("#".join(ZERO_HASH)) == 0
    assert key_hash("polygenelubricants") == 0
    assert key_hash("T#Aa") == key_hash("T#BB")
    assert (java_hash("Hello World"), key_hash("Hello World")) == (-862545276, 862545276)


@pytest.mark.parametrize(
    ("data", "count"), [("EDA080", 1), ("EDA0BDEDB880", 2), ("C080", 2), ("E282", 1), ("F4908080", 4), ("EDBF", 1)]
)
def test_utf8_replacement(data: str, count: int) -> None:
    assert java_utf8(bytes.fromhex(data)) == "�" * count


@pytest.mark.parametrize(
    ("text", "properties"),
    [
        ("A=b", {"A": "b"}),
        ("A=|B=c|", {"B": "c"}),
        ("=x|K=v=w|", {"K": "v\x01w"}),
        ("KEYS=a|KEYS=z|", {"KEYS": "z"}),
        ("AB|KEYS=q|", {"KEYS": "q"}),
        ("", {}),
    ],
)
def test_properties(text: str, properties: dict[str, str]) -> None:
    assert decode_properties(text.replace("=", "\x01").replace("|", "\x02")) == properties


def test_keys_split() -> None:
    assert split_keys(" a  b a ") == ["a", "b", "a"]
    assert split_keys("a\tb\u3000c") == ["a\tb\u3000c"]
    assert split_keys("") == split_keys(None) == split_keys("   ") == []


# --- the frame check: spec 2.7, 12 ---


def test_outcomes_of_the_frame_check() -> None:
    frame = encode_frame(FrameSpec("T", b"body"), 0)
    assert naive_check(frame + bytes(9))[:2] == (True, len(frame))
    assert naive_check(frame[:-1]) == (False, -1, None)
    assert naive_check(b"") == naive_check(bytes(100)) == naive_check(b"\xff" * 100) == (False, -1, None)
    assert naive_check(bytes.fromhex("00000184cbd43194") + bytes(380)) == (True, 0, None)
    longer = struct.pack(">i", len(frame) + 3) + frame[4:]
    assert naive_check(longer + bytes(3)) == (False, len(frame) + 3, None)
    torn = bytearray(frame)
    torn[frame.index(b"body")] ^= 1
    assert naive_check(bytes(torn)) == (False, -1, None)
    assert naive_check(bytes(torn), check_crc=False)[0]


def test_no_properties_is_not_the_same_as_no_keys() -> None:
    message = check(FrameSpec("T"))
    assert (message.keys, message.uniq_key, message.tags_code, message.properties) == ("", None, 0, None)
    message = check(FrameSpec("T", properties={"a": "b"}))
    assert (message.keys, message.uniq_key, message.tags_code) == (None, None, 0)


@pytest.mark.parametrize(
    ("level", "delay"), [("1", 1000), ("3", 10_000), ("18", 7_200_000), ("99", 7_200_000), ("+2", 5000), ("٣", 10_000)]
)
def test_delay_levels(level: str, delay: int) -> None:
    properties = {"DELAY": level, "TAGS": "tagA"}
    assert check(FrameSpec("SCHEDULE_TOPIC_XXXX", properties=properties, store_timestamp=500)).tags_code == 500 + delay
    assert check(FrameSpec("SCHEDULE_TOPIC_XXXY", properties=properties)).tags_code == 3552231


def test_delay_levels_that_are_none() -> None:
    topic = "SCHEDULE_TOPIC_XXXX"
    for level in ("0", "-3"):
        assert check(FrameSpec(topic, properties={"DELAY": level, "TAGS": "tagA"})).tags_code == 3552231
    for level in ("x", "1_0", " 1", "3.0", "+", "2147483648"):
        assert naive_check(encode_frame(FrameSpec(topic, properties={"DELAY": level}), 0)) == (False, -1, None)


def test_inner_batches() -> None:
    message = check(FrameSpec("T", properties={"INNER_NUM": "7", "INNER_BASE": "123"}, queue_offset=9))
    assert (message.batch_base, message.batch_size) == (123, 7)
    message = check(FrameSpec("T", properties={"INNER_NUM": "x"}, queue_offset=9))
    assert (message.batch_base, message.batch_size) == (9, 1)
    bad = FrameSpec("T", properties={"INNER_NUM": "32768", "INNER_BASE": "1"})
    assert naive_check(encode_frame(bad, 0)) == (False, -1, None)


# --- the golden stores ---


def test_golden_frames_are_what_the_broker_reads(golden: Golden) -> None:
    assert [m.row() for m in naive_frames(golden.root / "commitlog", golden.segment_size)] == golden.messages()


def test_golden_index_files_byte_for_byte(golden: Golden) -> None:
    service = build(golden)
    assert [file.to_bytes() for file in service.files] == [file.read_bytes() for file in golden.index_files()]


def test_golden_checkpoint_holds_the_end_of_the_last_full_file(golden: Golden) -> None:
    (stored,) = struct.unpack_from(">q", (golden.root / "checkpoint").read_bytes(), 16)
    assert build(golden).index_msg_timestamp == stored


def test_golden_answers(golden: Golden) -> None:
    service = build(golden)
    for answer in golden.answers():
        query = (answer["topic"], answer["key"], answer["max"], answer["begin"], answer["end"], answer.get("indexType"))
        expected = answer["phyOffsets"], answer["indexLastUpdateTimestamp"], answer["indexLastUpdatePhyoffset"]
        assert service.query_offset(*query) == expected, query


def test_the_brokers_answers_miss_true_hits(tmp_path: Path) -> None:
    """Counted over the queries whose true hits max and the cap of 64 leave room for: the rest is cut off by both."""
    missed = {}
    for name in GOLDENS[:3]:
        golden = unpack(name, tmp_path)
        rows, counts = golden.messages(), [0, 0]
        for answer in golden.answers():
            query = (answer["topic"], answer["key"], answer["begin"], answer["end"], answer.get("indexType"))
            hits = exact_oracle(rows, *query, flavour=golden.flavour)
            if len(hits) <= min(answer["max"], 64):
                counts[0] += len(hits - set(answer["phyOffsets"]))
                counts[1] += len(hits)
        missed[name] = tuple(counts)
    assert missed == {
        "rocketmq-5.3-clean": (76, 578),
        "rocketmq-5.4-clean": (84, 579),
        "rocketmq-5.4-propcrc": (121, 575),
    }
