"""The tests' writer against the spec's frame and every golden commitlog, and the demo's against the naive reader."""

from __future__ import annotations

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexd.demo import DemoWriter
from support.commitlog_writer import CommitLogWriter, FrameSpec, encode_frame, encode_properties
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


def test_what_the_demo_writes_is_a_broker_s_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("indexd.demo._SEGMENT_SIZE", 1 << 14)
    writer = DemoWriter(tmp_path)
    while writer.count < 500:
        time.sleep(0.01)
    writer.stop()
    read = list(naive_frames(tmp_path / "commitlog", 1 << 14))
    assert len(read) == writer.count
    assert read[-1].phy_offset == writer.last[3]
    assert {path.stat().st_size for path in (tmp_path / "commitlog").iterdir()} == {1 << 14}
    queues: dict[str, int] = {}
    for message in read:
        assert message.cq_offset == queues.setdefault(message.topic, 0)
        queues[message.topic] += 1
