"""The built-in writer against the spec's frame, its rules for segments, and every golden commitlog."""

from __future__ import annotations

import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.commitlog.writer import (
    CommitLogWriter,
    FrameSpec,
    blank_record,
    encode_frame,
    encode_properties,
)
from support.goldens import GOLDENS, unpack
from support.naive import NaiveMessage, decode_properties, java_utf8, naive_check, naive_frames
from support.strategies import Sample, logs, messages

VECTOR = bytes.fromhex(
    "000000a1daa320a73610a686000000030000000000000000000000070000000000000000000000000000018bcfe568007f00000100002a9f"
    "0000018bcfe568007f00000100002a9f0000000000000000000000000000000568656c6c6f025431003f4b455953016b31206b3202554e49"
    "515f4b45590137463030303030314142434430303030303030303030303030303030303030310254414753017461674102"
)


def spec_of(message: NaiveMessage) -> FrameSpec:
    """The spec that encodes to the message again; its properties are given raw."""
    return FrameSpec(
        topic=message.topic,
        body=message.body,
        queue_id=message.queue_id,
        queue_offset=message.cq_offset,
        flag=message.flag,
        sys_flag=message.sys_flag,
        born_timestamp=message.born_timestamp,
        store_timestamp=message.store_timestamp,
        born_host=message.born_host,
        store_host=message.store_host,
        reconsume_times=message.reconsume_times,
        prepared_transaction_offset=message.prepared_transaction_offset,
    )


def frame_of(length: int) -> FrameSpec:
    """A spec whose frame takes ``length`` bytes: 91 and the topic's one letter without a body."""
    return FrameSpec("T", bytes(length - 92))


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


def test_properties_are_always_terminated_and_keep_their_order() -> None:
    assert encode_properties({"B": "1", "A": "", "K": "v\x01w"}) == b"B\x011\x02A\x01\x02K\x01v\x01w\x02"
    assert encode_properties({"K": "\ud800 \ud83d\ude00"}) == b"K\x01? \xf0\x9f\x98\x80\x02"


@pytest.mark.parametrize(
    ("topic", "magic", "length"),
    [
        ("x" * 127, "daa320a7", b"\x7f"),
        ("x" * 128, "daa320ab", b"\x00\x80"),
        ("😀" * 64, "daa320ab", b"\x01\x00"),
    ],
)
def test_a_topic_of_more_than_127_units_makes_version_2(topic: str, magic: str, length: bytes) -> None:
    frame = encode_frame(FrameSpec(topic), 0)
    assert frame[4:8].hex() == magic
    assert frame[88 : 88 + len(length)] == length
    assert naive_check(frame)[:2] == (True, len(frame))


def test_a_topic_that_its_length_byte_cannot_count_is_refused_unless_raw() -> None:
    with pytest.raises(ValueError, match="topic of 150 bytes"):
        encode_frame(FrameSpec("长" * 50), 0)
    frame = encode_frame(FrameSpec("长" * 50), 0, raw_topic=b"x" * 150)
    assert frame[88] == 150
    assert naive_check(frame) == (False, -1, None)


def test_properties_over_the_limit_are_refused_and_the_crc_counts() -> None:
    encode_frame(FrameSpec("T"), 0, raw_properties=bytes(32767))
    with pytest.raises(ValueError, match="32768 bytes"):
        encode_frame(FrameSpec("T"), 0, raw_properties=b"\x02" * 32748, prop_crc=True)


def test_ipv6_hosts_set_their_bits_and_only_theirs() -> None:
    v4, v6 = ("10.0.0.1", 10911), ("fd00::1", 10911)
    for born, store, flag in [(v6, v4, 0x10), (v4, v6, 0x20), (v6, v6, 0x30), (v4, v4, 0)]:
        spec = FrameSpec("T", sys_flag=0x38, born_host=born, store_host=store)
        ok, _, message = naive_check(encode_frame(spec, 0))
        assert ok
        assert message is not None
        assert message.sys_flag == 0x8 | flag


@pytest.mark.parametrize("raw", [b"", b"A\x01b\x02", b"A\x01b"])
def test_the_property_crc(raw: bytes) -> None:
    frame = encode_frame(FrameSpec("T", b"body"), 4711, raw_properties=raw, prop_crc=True)
    assert frame[-20:-11] == b"__CRC32#\x01"
    assert int(frame[-11:-1][::-1]) == zlib.crc32(frame[:-20]) & 0x7FFFFFFF
    separated = raw + b"\x02" if raw and not raw.endswith(b"\x02") else raw
    assert frame[-22 - len(separated) : -20] == (len(separated) + 20).to_bytes(2, "big") + separated
    assert naive_check(frame)[:2] == (True, len(frame))


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


def test_a_frame_must_leave_room_for_the_blank_record(tmp_path: Path) -> None:
    writer = CommitLogWriter(tmp_path, 1024)
    assert writer.append(frame_of(500)) == 0
    assert writer.append(frame_of(516)) == 500  # exactly 8 bytes left
    assert writer.append(frame_of(517)) == 1024
    assert writer.append(frame_of(500)) == 2048  # 507 left: 8 too few
    writer.close()
    assert (tmp_path / f"{0:020d}").read_bytes()[1016:] == blank_record(8) == bytes.fromhex("00000008cbd43194")
    assert (tmp_path / f"{1024:020d}").read_bytes()[517:] == blank_record(507) + bytes(499)
    with CommitLogWriter(tmp_path / "small", 1024) as writer, pytest.raises(ValueError, match="never fits"):
        writer.append(frame_of(1017))


def test_segments_are_full_size_and_one_ahead(tmp_path: Path) -> None:
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    for directory in (clean, killed):
        with CommitLogWriter(directory, 1024) as writer:
            for _ in range(3):
                writer.append(frame_of(600))
            writer.flush()
            assert sorted(file.name for file in directory.iterdir()) == [f"{1024 * i:020d}" for i in range(4)]
            assert {file.stat().st_size for file in directory.iterdir()} == {1024}
            if directory == killed:
                writer.close(clean=False)
    assert len(list(clean.iterdir())) == 3
    assert len(list(killed.iterdir())) == 4


def test_a_log_can_start_anywhere_and_be_written_over(tmp_path: Path) -> None:
    with CommitLogWriter(tmp_path, 1024, start_offset=5 * 1024 + 100) as writer:
        assert [writer.append(frame_of(300)) for _ in range(2)] == [5220, 5520]
    before = (tmp_path / f"{5120:020d}").read_bytes()
    assert before[:100] == bytes(100)
    with CommitLogWriter(tmp_path, 1024, start_offset=5220) as writer:
        assert writer.append(frame_of(200)) == 5220
    after = (tmp_path / f"{5120:020d}").read_bytes()
    assert after[300:] == before[300:]
    assert [m.size for m in naive_frames([tmp_path], 1024, start=5220)] == [200]


def test_queue_offsets_are_counted_per_queue_and_only_for_queued_messages(tmp_path: Path) -> None:
    with CommitLogWriter(tmp_path, 4096) as writer:
        for queue_id, sys_flag in [(0, 0), (0, 0x4), (0, 0x8), (0, 0xC), (0, 0), (1, 0)]:
            writer.append(FrameSpec("T", queue_id=queue_id, sys_flag=sys_flag, queue_offset=99))
        writer.append(FrameSpec("U"))
    assert [m.cq_offset for m in naive_frames(tmp_path, 4096)] == [0, 0, 1, 0, 2, 0, 0]


@settings(max_examples=50)
@given(logs(), st.booleans())
def test_whatever_is_written_is_read_back_in_order(samples: list[Sample], prop_crc: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        with CommitLogWriter(Path(directory), 2048, prop_crc=prop_crc) as writer:
            offsets = [sample.append(writer) for sample in samples]
        read = list(naive_frames(Path(directory), 2048))
    assert [m.phy_offset for m in read] == offsets
    assert [m.body for m in read] == [s.spec.body for s in samples]


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
