"""The naive reader and the tests' writer against the spec's vectors and the golden stores; and the demo's log."""

from __future__ import annotations

import struct
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexd.demo import DemoWriter
from support.commitlog_writer import CommitLogWriter, FrameSpec, encode_frame, encode_properties
from support.goldens import GOLDENS, Golden, unpack
from support.naive import (
    NaiveIndexService,
    NaiveMessage,
    decode_properties,
    java_hash,
    java_utf8,
    key_hash,
    naive_check,
    naive_frames,
    split_keys,
)
from support.strategies import ZERO_HASH, Sample, messages


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


# --- the writer ---

VECTOR = bytes.fromhex(
    "000000a1daa320a73610a686000000030000000000000000000000070000000000000000000000000000018bcfe568007f00000100002a9f"
    "0000018bcfe568007f00000100002a9f0000000000000000000000000000000568656c6c6f025431003f4b455953016b31206b3202554e49"
    "515f4b45590137463030303030314142434430303030303030303030303030303030303030310254414753017461674102"
)


def spec_of(message: NaiveMessage) -> FrameSpec:
    """The spec that encodes to the message again; its properties are given raw."""
    names = {field.name for field in fields(FrameSpec)} - {"properties", "queue_offset"}
    return FrameSpec(queue_offset=message.cq_offset, **{name: getattr(message, name) for name in names})


def test_the_spec_vector() -> None:
    properties = {"KEYS": "k1 k2", "UNIQ_KEY": "7F000001ABCD00000000000000000001", "TAGS": "tagA"}
    spec = FrameSpec("T1", b"hello", properties, queue_id=3, queue_offset=7)
    spec = replace(spec, born_timestamp=1700000000000, store_timestamp=1700000000000)
    assert encode_frame(spec, 0) == VECTOR
    ok, size, message = naive_check(VECTOR)
    assert (ok, size) == (True, 161)
    assert message is not None
    assert (message.body_crc, len(message.raw_properties), message.tags_code) == (907060870, 63, 3552231)
    assert replace(spec_of(message), properties=properties) == spec


@given(messages(), st.booleans(), st.integers(0, 2**62))
def test_what_is_encoded_is_what_is_read(sample: Sample, prop_crc: bool, phy_offset: int) -> None:
    frame = sample.encode(phy_offset, prop_crc=prop_crc)
    ok, size, message = naive_check(frame)
    assert (ok, size) == (True, len(frame))
    assert message is not None
    spec = sample.spec
    encoded = encode_properties(spec.properties) if sample.raw_properties is None else sample.raw_properties
    properties = decode_properties(java_utf8(encoded))
    assert {k: v for k, v in (message.properties or {}).items() if k != "__CRC32#"} == properties
    assert (message.properties is None) == (not encoded and not prop_crc)
    again = replace(spec_of(message), properties=spec.properties, topic=spec.topic)
    assert again == replace(spec, sys_flag=again.sys_flag)
    assert again.sys_flag & ~0x30 == spec.sys_flag
    assert message.phy_offset == phy_offset


@pytest.mark.parametrize("name", GOLDENS)
def test_a_golden_commitlog_written_again_is_the_same_directory(name: str, tmp_path: Path) -> None:
    golden = unpack(name, tmp_path)
    writer = CommitLogWriter(tmp_path / "again", golden.segment_size, prop_crc=golden.prop_crc)
    for message in naive_frames(golden.segments(), golden.segment_size):
        raw = message.raw_properties[:-20] if golden.prop_crc else message.raw_properties
        assert writer.append(spec_of(message), raw_properties=raw) == message.phy_offset
    writer.close(clean=not golden.killed)
    written = {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert written == {file.name: file.read_bytes() for file in golden.segments()}


def test_what_the_demo_writes_is_a_broker_s_log(tmp_path: Path) -> None:
    writer = DemoWriter(tmp_path, 1 << 22)
    while writer.count < 500:
        time.sleep(0.01)
    writer.stop()
    read = list(naive_frames(tmp_path / "commitlog", 1 << 22))
    assert len(read) == writer.count
    assert read[-1].phy_offset == writer.last[3]
    assert {path.stat().st_size for path in (tmp_path / "commitlog").iterdir()} == {1 << 22}
    queues: dict[str, int] = {}
    for message in read:
        assert message.cq_offset == queues.setdefault(message.topic, 0)
        queues[message.topic] += 1
