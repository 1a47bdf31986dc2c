"""Bytes that are no frame, or lie: kernel and plain decoder end alike, and what lies outside is never looked at."""

from __future__ import annotations

import os
import random
import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from indexd.commitlog.decoder import DecoderOptions, decode_frame
from indexd.commitlog.format import FRAME_SIZE_MIN, Corrupt, Outcome, Reason
from support.commitlog_writer import FrameSpec, blank_record, encode_frame
from support.strategies import DELAY_TOPIC, Sample, logs
from support.twins import DELAYS, FRAME_SIZE_MAX, Decoding, Stretch, by_decoder, by_kernel, encode

IS_FULL = settings.default.max_examples >= 50
JIT = os.environ.get("NUMBA_DISABLE_JIT") != "1"
# Room for whatever is put in front of a stretch.
BASE = 1 << 20

FULL = FrameSpec(
    "TopicA",
    body=b"hello, world",
    properties={"KEYS": "a  b é😀", "UNIQ_KEY": "u1", "TAGS": "TagA"},
    queue_id=3,
    born_host=("::1", 1),
    store_timestamp=1_700_000_000_000,
)
LONG = FrameSpec("L" + "x" * 199, body=b"b", properties={"KEYS": "k"}, store_host=("2001:db8::1", 65535))
DELAYED = FrameSpec(DELAY_TOPIC, properties={"DELAY": "3", "INNER_NUM": "5", "INNER_BASE": "77"})
SPECS = {"full": FULL, "long topic": LONG, "delayed": DELAYED}


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def surroundings(data: bytes) -> list[tuple[bytes, bytes]]:
    """What may stand before and behind a stretch: noise, more text and digits, and the frame itself once more."""
    noise = random.Random(len(data)).randbytes(512)
    text = b"KEYS\x01a b\x02__CRC32#\x010123456789\x02" * 8
    return [(b"", b""), (noise[:256], noise[256:]), (text, text), (data[:512], data[:512]), (b"\xff", b"\xff" * 64)]


def decoded(data: bytes, segment_end: int = 1 << 50) -> Decoding:
    """What both make of ``data`` at BASE: the same, with CRCs and without, whatever surrounds it."""
    stretch = Stretch.of(data, BASE, segment_end)
    for check_crc in (False, True):
        plain = by_decoder(stretch, check_crc=check_crc)
        for before, after in surroundings(data):
            assert by_kernel(stretch.within(before, after), check_crc=check_crc) == plain
    return plain


def every(count: int) -> range:
    """All numbers below ``count`` with the full profile, some of them with a smaller one."""
    examples = settings.default.max_examples
    return range(0, count, 1 if examples >= 50 else max(count // (5 * examples), 1))


@given(st.binary(max_size=300), st.sampled_from([0xDAA320A7, 0xDAA320AB]), st.integers(0, 400), st.integers(0, 0x3F))
@example(b"\0" * 300, 0xDAA320A7, FRAME_SIZE_MIN, 0)
def test_random_bytes_behind_a_sound_head(tail: bytes, magic: int, total: int, sys_flag: int) -> None:
    data = struct.pack(">IIiiiqqi", total, magic, 0, 0, 0, 0, BASE, sys_flag) + tail
    decoded(data)


@pytest.mark.parametrize("prop_crc", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_a_frame_that_is_cut_off_is_not_yet_written(name: str, prop_crc: bool) -> None:
    data = encode_frame(SPECS[name], BASE, prop_crc=prop_crc)
    for size in every(len(data)):
        found = decoded(data[:size])
        assert (found.outcome, found.position, found.requests) == (Outcome.NOT_YET_WRITTEN, BASE, ())
        assert found.needed == (0 if size < 8 else len(data))
    assert len(decoded(data).requests) == 1


@pytest.mark.parametrize("name", SPECS)
def test_bytes_that_are_still_zero(name: str) -> None:
    data = encode_frame(SPECS[name], BASE)
    for size in every(len(data)):
        decoded(data[:size] + bytes(len(data) - size))
        decoded(bytes(size) + data[size:])


@pytest.mark.parametrize("name", SPECS)
def test_every_bit_flipped(name: str) -> None:
    data = encode_frame(SPECS[name], BASE, prop_crc=True)
    for bit in every(8 * len(data)):
        flipped = patched(data, bit // 8, bytes([data[bit // 8] ^ 0x80 >> bit % 8]))
        found = decoded(flipped + bytes(16))
        # A rule or the property CRC notices every bit but those of the property's own name and separator: a frame
        # without that property is as good.
        unmarked = len(data) - 20 <= bit // 8 <= len(data) - 12
        assert len(found.requests) == (1 if unmarked else 0)


@given(st.data(), logs(max_size=4))
def test_junk_written_over_a_log(data: st.DataObject, samples: list[Sample]) -> None:
    log = bytearray(encode(samples, BASE) + data.draw(st.sampled_from([b"", bytes(40), blank_record(40)])))
    end = BASE + len(log)
    if log:
        at = data.draw(st.integers(0, len(log) - 1))
        junk = data.draw(st.one_of(st.binary(min_size=1, max_size=12), st.just(bytes(30))))
        log[at : at + len(junk)] = junk[: len(log) - at]
    decoded(bytes(log[: data.draw(st.integers(0, len(log)))]), end)


# --- lengths that lie ---

_LIES_32 = [0, 1, 90, 91, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFF0, FRAME_SIZE_MAX, FRAME_SIZE_MAX + 1]


def places(spec: FrameSpec) -> dict[str, tuple[int, str]]:
    """Where each length of a frame stands, and its form."""
    born = 20 if ":" in spec.born_host[0] else 8
    stored = 20 if ":" in spec.store_host[0] else 8
    body = 68 + born + stored
    v2 = len(spec.topic) > 127
    topic = body + 4 + len(spec.body)
    properties = topic + (2 if v2 else 1) + len(spec.topic.encode())
    forms = {"topic": (topic, ">H" if v2 else ">B"), "props": (properties, ">H")}
    return {"total": (0, ">I"), "body": (body, ">I")} | forms


@pytest.mark.parametrize("field", ["total", "body", "topic", "props"])
@pytest.mark.parametrize("name", SPECS)
def test_a_length_that_lies(name: str, field: str) -> None:
    data = encode_frame(SPECS[name], BASE)
    at, form = places(SPECS[name])[field]
    (true,) = struct.unpack_from(form, data, at)
    top = 1 << 8 * struct.calcsize(form)
    near = {true + step for step in range(-40, 41)}
    lies = near | {top - 1, top // 2, top // 2 - 1, len(data), len(data) - at} | set(_LIES_32 if top > 1 << 16 else [])
    for number, lie in enumerate(sorted(lie for lie in lies if 0 <= lie < top and lie != true)[:: 1 if JIT else 5]):
        tails = (b"", bytes(64), data)
        for tail in tails if IS_FULL else tails[number % 3 :][:1]:
            found = decoded(patched(data, at, struct.pack(form, lie)) + tail)
            # A negative length of body or properties is one of 0, so only where that is true it changes nothing.
            if true or lie < top // 2 or field == "topic":
                assert found.position == BASE
                assert found.outcome in (Outcome.CORRUPT, Outcome.NOT_YET_WRITTEN)


@pytest.mark.parametrize("field", ["body", "props"])
def test_a_negative_length_is_none(field: str) -> None:
    spec = FrameSpec("T")
    at, form = places(spec)[field]
    for lie in (0x8000, 0xFFFF) if form == ">H" else (0x80000000, 0xFFFFFFFF):
        assert len(decoded(patched(encode_frame(spec, BASE), at, struct.pack(form, lie))).requests) == 1


# --- every reason ---


def one(data: bytes, segment_end: int = 1 << 50, frame_size_max: int = FRAME_SIZE_MAX) -> str:
    found = decode_frame(data, 0, BASE, segment_end, DecoderOptions(DELAYS, frame_size_max))
    assert isinstance(found, Corrupt)
    assert decoded(data, segment_end).reason == found.reason or frame_size_max != FRAME_SIZE_MAX
    return found.reason


_DATA = encode_frame(FULL, BASE, prop_crc=True)
_BODY = places(FULL)["body"][0] + 4
_INNER = encode_frame(FULL, BASE + 48)
_ENTRY = struct.pack(">iiqqqiiii", 1, 48 + len(_INNER), 0, 0, BASE, 0, 0, 0, len(_INNER)) + _INNER
_DELAYED = encode_frame(DELAYED, BASE)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (patched(_DATA, 4, b"\1"), Reason.BAD_MAGIC),
        (patched(_DATA, 3, b"\5"), Reason.BAD_TOTAL_SIZE),
        (patched(_DATA, 0, b"\5"), Reason.BAD_TOTAL_SIZE),
        (patched(_DATA, 35, b"\1"), Reason.WRONG_PHYSICAL_OFFSET),
        (patched(_DATA, _BODY - 1, b"\1"), Reason.LENGTHS_DISAGREE),
        (patched(_DATA, _BODY, b"\1"), Reason.BODY_CRC),
        (patched(_DATA, 20, b"\1"), Reason.PROPERTY_CRC),
        (patched(_DATA, len(_DATA) - 1, b"\1"), Reason.PROPERTY_CRC),
        (patched(_DATA, len(_DATA) - 2, b"x"), Reason.PROPERTY_CRC),
        (_DELAYED.replace(b"DELAY\x013", b"DELAY\x01x"), Reason.DELAY_LEVEL),
        (_DELAYED.replace(b"BASE\x0177", b"BASE\x017x"), Reason.INNER_BATCH),
        (_ENTRY, Reason.DLEDGER),
        (_ENTRY[:56], Reason.DLEDGER),
        (_ENTRY[:55], Reason.BAD_MAGIC),
        (patched(_ENTRY, 3, b"\2"), Reason.BAD_MAGIC),
        # A topic of 128 bytes is no v1 topic.
        (encode_frame(FrameSpec("T"), BASE, raw_topic=b"x" * 128), Reason.LENGTHS_DISAGREE),
    ],
)
def test_each_rule_has_its_reason(data: bytes, reason: Reason) -> None:
    assert one(data) == reason.text


def test_a_size_that_leaves_the_segment_or_is_larger_than_believed() -> None:
    assert one(_DATA, segment_end=BASE + len(_DATA) - 1) == Reason.BAD_TOTAL_SIZE.text
    assert one(_DATA, frame_size_max=len(_DATA) - 1) == Reason.BAD_TOTAL_SIZE.text


@pytest.mark.parametrize("size", [0, 1, 4, 7, 8, 9])
def test_nothing_there_yet(size: int) -> None:
    assert decoded(bytes(size)) == Decoding((), Outcome.NOT_YET_WRITTEN, "", BASE, 0)


@pytest.mark.parametrize("wrong", [-40, -39, -1, 1, 8, 0x7FFFFF00, -41 - 0x7FFFFF00])
def test_a_blank_record_that_does_not_end_with_its_segment_is_damage(wrong: int) -> None:
    frame = encode_frame(FULL, BASE)
    end = BASE + len(frame) + 40
    sound = decoded(frame + blank_record(40), segment_end=end)
    assert sound.outcome is Outcome.END_OF_FILE
    found = decoded(frame + blank_record(40 + wrong), segment_end=end)
    assert (found.outcome, found.reason) == (Outcome.CORRUPT, Reason.BAD_BLANK.text)
    assert len(sound.requests) == len(found.requests) == 1
