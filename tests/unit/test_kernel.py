"""Frames, and the pieces of them, through the kernel, the plain decoder and the naive check: one answer.

On the goldens it is RocketMQ's own.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexd.commitlog.bytes_kernel import CRC_TABLES, crc32, find_byte, hash_utf8, key_hash, parse_long, signed_32
from indexd.commitlog.decoder import (
    DecoderOptions,
    Message,
    decode_frame,
    decode_utf8,
    java_hash,
    parse_java_number,
)
from indexd.commitlog.decoder import key_hash as plain_key_hash
from indexd.commitlog.format import HEAD_SIZE, Outcome
from indexd.commitlog.kernel import find_frame, last_head
from indexd.index.format import FLAVOURS
from support import naive
from support.commitlog_writer import CommitLogWriter, FrameSpec, blank_record, encode_frame
from support.goldens import GOLDENS, Golden, unpack
from support.naive import _java_int, naive_frames, split_keys
from support.strategies import DELAY_TOPIC, ZERO_HASH, Sample, logs
from support.twins import (
    DELAYS,
    FRAME_SIZE_MAX,
    DispatchRequest,
    Stretch,
    by_decoder,
    by_kernel,
    by_naive,
    encode,
    hashes,
    naive_request,
    request_of,
)

JIT = os.environ.get("NUMBA_DISABLE_JIT") != "1"
VECTOR = bytes.fromhex(
    "000000a1daa320a73610a686000000030000000000000000000000070000000000000000000000000000018bcfe568007f00000100002a9f"
    "0000018bcfe568007f00000100002a9f0000000000000000000000000000000568656c6c6f025431003f4b455953016b31206b3202554e49"
    "515f4b45590137463030303030314142434430303030303030303030303030303030303030310254414753017461674102"
)


@pytest.fixture(scope="module", params=GOLDENS)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return unpack(request.param, tmp_path_factory.mktemp("golden"))


def decode(data: bytes, phy_offset: int = 0, base: int | None = None) -> Message:
    """The message at ``phy_offset``; ``data`` begins there, or at ``base``."""
    position = 0 if base is None else phy_offset - base
    found = decode_frame(data, position, phy_offset, 1 << 50, DecoderOptions(DELAYS, FRAME_SIZE_MAX))
    assert isinstance(found, Message), found
    return found


# --- what RocketMQ wrote ---


def expected(row: dict[str, Any], flavour: str) -> DispatchRequest:
    """A line of messages.jsonl as a row of a batch; no golden holds an inner batch."""
    return DispatchRequest(
        row["topic"],
        row["queueId"],
        row["phyOffset"],
        row["size"],
        row["tagsCode"],
        row["storeTimestamp"],
        row["cqOffset"],
        1,
        row["sysFlag"],
        hashes(row["topic"], row["uniqKey"], split_keys(row["keys"]), row["tags"], FLAVOURS[flavour]),
    )


def test_golden_frames_one_by_one(golden: Golden) -> None:
    segments = {int(path.name): path.read_bytes() for path in golden.segments()}
    for row in golden.messages()[:: 1 if JIT else 100]:
        base = row["phyOffset"] // golden.segment_size * golden.segment_size
        message = decode(segments[base], row["phyOffset"], base)
        assert request_of(message, FLAVOURS["5.4"]) == expected(row, "5.4")
        assert message.prepared_transaction_offset == row["preparedTransactionOffset"]
        texts = (message.uniq_key, message.tags, message.properties.get("KEYS"))
        assert texts == (row["uniqKey"], row["tags"], row["keys"] or None)


@pytest.mark.parametrize("flavour", FLAVOURS if JIT else ["5.4"])
def test_golden_segments_as_rocketmq_reads_them(golden: Golden, flavour: str) -> None:
    read: list[DispatchRequest] = []
    for path in golden.segments() if JIT else golden.segments()[:1]:
        data, base = path.read_bytes() if JIT else path.read_bytes()[:20_000], int(path.name)
        found = by_kernel(Stretch.of(data, base, base + golden.segment_size), flavour, rows_max=1000)
        assert found.outcome in (Outcome.END_OF_FILE, Outcome.NOT_YET_WRITTEN)
        read += found.requests
    rows = golden.messages()
    assert read == [expected(row, flavour) for row in (rows if JIT else rows[: len(read)])]


# --- what anyone could write ---


@given(st.data(), st.booleans(), st.sampled_from(list(FLAVOURS)))
def test_kernel_decoder_and_naive_check_agree(data: st.DataObject, prop_crc: bool, flavour: str) -> None:
    samples = data.draw(logs(max_size=15 if JIT else 4))
    with tempfile.TemporaryDirectory() as directory:
        with CommitLogWriter(Path(directory), 1 << 15, prop_crc=prop_crc) as writer:
            for sample in samples:
                sample.append(writer)
        naive = list(naive_frames(Path(directory), 1 << 15))
        read: list[DispatchRequest] = []
        for path in sorted(Path(directory).iterdir()):
            base = int(path.name)
            stretch = Stretch.of(path.read_bytes(), base, base + (1 << 15))
            found = by_kernel(stretch, flavour, rows_max=data.draw(st.integers(1, 20)))
            assert found == by_decoder(stretch, flavour)
            read += found.requests
    assert len(read) == len(samples)
    assert read == [naive_request(message, FLAVOURS[flavour]) for message in naive]


@given(logs(max_size=3), st.booleans())
def test_the_plain_decoder_reads_every_field(samples: list[Sample], prop_crc: bool) -> None:
    for sample in samples:
        message = decode(sample.encode(1 << 33, prop_crc=prop_crc), 1 << 33)
        naive = by_naive(sample.encode(1 << 33, prop_crc=prop_crc))
        assert naive == (request_of(message, FLAVOURS["5.4"]),)
        spec = sample.spec
        assert (message.body, message.flag, message.queue_id) == (spec.body, spec.flag, spec.queue_id)
        assert (message.born_timestamp, message.store_timestamp) == (spec.born_timestamp, spec.store_timestamp)
        assert (message.born_host, message.store_host) == (spec.born_host, spec.store_host)
        assert message.reconsume_times == spec.reconsume_times
        assert message.prepared_transaction_offset == spec.prepared_transaction_offset


def agreed(spec: FrameSpec) -> DispatchRequest:
    """The one message of a frame, on which all three agree."""
    data = encode_frame(spec, 0)
    found = by_kernel(Stretch.of(data))
    assert found == by_decoder(Stretch.of(data))
    assert found.requests == by_naive(data)
    return found.requests[0]


DELAYED = {"3": 10_007, "18": 7_200_007, "99": 7_200_007, "+2": 5_007, "0003": 10_007, "٣": 10_007, "３": 10_007,
           "2147483647": 7_200_007, "0" * 4000 + "3": 10_007, "0": 97, "-1": 97, "-2147483648": 97}  # fmt: skip


@pytest.mark.parametrize("level", DELAYED, ids=lambda level: level[-12:])
def test_a_delayed_message_has_its_delivery_time_for_tags_code(level: str) -> None:
    """A level below one is no delay, and zeros before a number do not count, however many."""
    spec = FrameSpec(DELAY_TOPIC, store_timestamp=7, properties={"DELAY": level, "TAGS": "a"})
    assert agreed(spec).tags_code == DELAYED[level]
    assert agreed(replace(spec, topic="T")).tags_code == 97


def test_a_delivery_time_wraps_as_a_java_long() -> None:
    spec = FrameSpec(DELAY_TOPIC, store_timestamp=2**63 - 1, properties={"DELAY": "1"})
    assert agreed(spec).tags_code == -(2**63) + 999


@pytest.mark.parametrize(("number", "base"), [("5", "77"), ("-5", "9223372036854775807"), ("0", "-1"), ("٣", "٤")])
def test_an_inner_batch_counts_from_its_base(number: str, base: str) -> None:
    found = agreed(FrameSpec("T", queue_offset=3, properties={"INNER_NUM": number, "INNER_BASE": base}))
    assert (found.batch_size, found.consume_queue_offset) == (int(number), int(base))
    assert agreed(FrameSpec("T", queue_offset=3, properties={"INNER_NUM": number})).consume_queue_offset == 3


_LEVELS = ["x", "2147483648", "-2147483649", "", "+", "-", "1 ", "9" * 30, "𝟛", "1٣x"]
_BATCHES = [("32768", "1"), ("1", "9223372036854775808"), ("x", "1"), ("1", "1.0")]


@pytest.mark.parametrize(
    "properties",
    [{"DELAY": level} for level in _LEVELS] + [{"INNER_NUM": size, "INNER_BASE": base} for size, base in _BATCHES],
    ids=str,
)
def test_a_number_that_java_cannot_read_makes_the_frame_corrupt(properties: dict[str, str]) -> None:
    data = encode_frame(FrameSpec(DELAY_TOPIC, properties=properties), 0)
    found = by_kernel(Stretch.of(data))
    assert found == by_decoder(Stretch.of(data))
    # An empty value is no value at all.
    assert found.outcome == (Outcome.CORRUPT if all(properties.values()) else Outcome.NOT_YET_WRITTEN)
    assert by_naive(data) == found.requests


# --- vectors: spec 12, 3.3 ---


def test_the_frame_vector() -> None:
    found = by_kernel(Stretch.of(VECTOR))
    assert found == by_decoder(Stretch.of(VECTOR))
    keys = hashes("T1", "7F000001ABCD00000000000000000001", ["k1", "k2"], "tagA", FLAVOURS["5.4"])
    assert found.requests == (DispatchRequest("T1", 3, 0, 161, 3552231, 1700000000000, 7, 1, 0, keys),)
    message = decode(VECTOR)
    assert (message.body_crc, message.body) == (907060870, b"hello")
    assert message.offset_msg_id == "7F00000100002A9F0000000000000000"


def test_a_key_whose_hash_is_the_smallest_int_is_stored_as_zero() -> None:
    data = encode_frame(FrameSpec(ZERO_HASH[0], properties={"KEYS": ZERO_HASH[1]}), 0)
    for flavour in FLAVOURS:
        assert by_kernel(Stretch.of(data), flavour).requests[0].key_hashes == (0,)


def test_keys_are_split_at_single_spaces_in_order() -> None:
    request = agreed(FrameSpec("T", properties={"KEYS": " a  b a ", "UNIQ_KEY": "a", "TAGS": "a"}))
    assert request.key_hashes == (81906, 81906, 81907, 81906, hashes("T", None, ["T#a"], None, FLAVOURS["5.4"])[0])


# --- heads ---


def uint64s(*numbers: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(number) for number in numbers)


THREE = [Sample(FrameSpec("T", body=bytes(size), properties={"KEYS": "k"})) for size in (10, 50, 0)]
OLDER = [Sample(replace(one.spec, store_timestamp=at)) for one, at in zip(THREE, (5, 5, 4), strict=True)]
HEADS = encode(THREE, 4096)
JUNK = bytes(range(7)) + HEADS[:60]
AT_1 = len(THREE[0].encode())
AT_2 = AT_1 + len(THREE[1].encode())


@pytest.mark.parametrize(
    ("data", "limit", "base", "segment_end", "last"),
    [
        (HEADS, None, 4096, 1 << 40, AT_2),
        (HEADS + bytes(100), None, 4096, 1 << 40, AT_2),
        # A blank record has no time: an older, longer log may have left it behind.
        (HEADS + blank_record(100), None, 4096, 1 << 40, AT_2),
        # A head counts once it is there up to its store timestamp, whatever is behind it.
        (HEADS, AT_2 + 76, 4096, 1 << 40, AT_2),
        (HEADS, AT_2 + 75, 4096, 1 << 40, AT_1),
        (HEADS, AT_1 + 76, 4096, 1 << 40, AT_1),
        (HEADS, 76, 4096, 1 << 40, 0),
        # A frame that is older than the one before it was left behind by an older log.
        (encode(OLDER, 4096), None, 4096, 1 << 40, AT_1),
        # A head that was written for another place proves nothing, nor does one that leaves the segment.
        (HEADS, None, 0, 1 << 40, 0),
        (HEADS, None, 4096, 4096 + AT_2, AT_1),
        (HEADS[:AT_2] + b"\1" + HEADS[AT_2 + 1 :], None, 4096, 1 << 40, AT_1),
    ],
)
def test_the_last_head_proves_the_frames_before_it(
    data: bytes, limit: int | None, base: int, segment_end: int, last: int
) -> None:
    numbers = uint64s(0, len(data) if limit is None else limit, base, segment_end, FRAME_SIZE_MAX)
    assert int(last_head(np.frombuffer(data, dtype=np.uint8), *numbers)) == last


@pytest.mark.parametrize(
    ("data", "start", "limit", "base", "found"),
    [
        (HEADS, 0, len(HEADS), 4096, 0),
        (HEADS, 1, len(HEADS), 4096, AT_1),
        # The copy in the junk stands at another offset than it says.
        (JUNK + HEADS, 0, len(JUNK + HEADS), 4096 - len(JUNK), len(JUNK)),
        (HEADS, 1, AT_1 + HEAD_SIZE, 4096, AT_1),
        (HEADS, 1, AT_1 + HEAD_SIZE - 1, 4096, AT_1 + HEAD_SIZE - 1),
        (b"", 0, 0, 0, 0),
        (bytes(500), 0, 500, 0, 500),
    ],
)
def test_a_frame_is_found_by_its_magic_and_its_own_offset(
    data: bytes, start: int, limit: int, base: int, found: int
) -> None:
    assert int(find_frame(np.frombuffer(data, dtype=np.uint8), *uint64s(start, limit, base))) == found


# --- the small compiled pieces against their plain twins: Java's string hash and numbers, CRC-32, byte search ---

U64 = np.uint64
# What surrounds a text in the buffer, so that a read beyond it changes the answer.
PADS = [(b"", b""), (b"\xf0\x9f", b"\x98\x80" * 8), (b"9", b"9" * 9), (b"\xed\xa0", b"\x80" * 9), (b"\xff", b"A" * 8)]


def hashed(data: bytes) -> int:
    """The Java hash by the kernel, the same whatever stands around ``data``."""
    found = set()
    for before, after in PADS:
        buffer = np.frombuffer(before + data + after, dtype=np.uint8)
        value = U64(hash_utf8(buffer, U64(len(before)), U64(len(before) + len(data)), U64(0)))
        assert int(key_hash(value)) == plain_key_hash(decode_utf8(data))
        found.add(int(signed_32(value)))
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize(
    ("text", "value"),
    [("T#a", 81906), ("\U0001f600", 1772899), ("tagA", 3552231), ("#".join(ZERO_HASH), -(2**31)), ("", 0)],
)
def test_java_hash_vectors(text: str, value: int) -> None:
    assert hashed(text.encode()) == value == java_hash(text) == naive.java_hash(text)


@pytest.mark.parametrize(
    ("data", "count"), [("EDA080", 1), ("EDA0BDEDB880", 2), ("C080", 2), ("E282", 1), ("F4908080", 4), ("EDBF", 1)]
)
def test_malformed_utf8_is_replaced_as_java_does_it(data: str, count: int) -> None:
    assert decode_utf8(bytes.fromhex(data)) == "�" * count
    assert hashed(bytes.fromhex(data)) == java_hash("�" * count)


_PIECES = [
    *(b"\x80", b"\xbf", b"\xc0", b"\xc2", b"\xdf", b"\xe0\xa0", b"\xe0\x9f", b"\xed\xa0\x80", b"\xed\x9f\xbf", b"\xef"),
    *(b"\xf0\x90\x80", b"\xf0\x8f", b"\xf4\x8f\xbf\xbf", b"\xf4\x90", b"\xf5", b"\xf8", b"\xff", "é".encode()),
    *("订".encode(), "😀".encode(), b"a", b"abcdefgh", b"\x7f", b"\x00", b" "),
]


@given(st.one_of(st.binary(max_size=24), st.lists(st.sampled_from(_PIECES), max_size=8).map(b"".join)))
def test_any_bytes_hash_as_their_java_string(data: bytes) -> None:
    assert hashed(data) == java_hash(decode_utf8(data)) == naive.java_hash(naive.java_utf8(data))


# --- numbers ---

_NUMBERS = ["0", "-0", "+0", "", "-", "+", "+-1", "1-", " 1", "1 ", "1_0", "1\0", "0" * 50 + "7"]
_NUMBERS += [str(value) for value in (2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 10**20 - 1)]
_NUMBERS += ["٣", "-٣٤", "𝟛", "３１", "1٣", "²", "Ⅷ", "一", "१२३"]


def number(data: bytes) -> int | None:
    found = set()
    for before, after in PADS:
        buffer = np.frombuffer(before + data + after, dtype=np.uint8)
        valid, value = parse_long(buffer, U64(len(before)), U64(len(before) + len(data)))
        found.add(int(value) if valid else None)
    assert len(found) == 1
    return found.pop()


def java_number(text: str, bits: int) -> int | None:
    try:
        return _java_int(text, bits) if text else None
    except (ValueError, IndexError):
        return None


@pytest.mark.parametrize("text", _NUMBERS)
def test_numbers_as_java_reads_them(text: str) -> None:
    assert number(text.encode()) == parse_java_number(text, 64) == java_number(text, 64)


@given(
    st.one_of(
        st.integers(-(2**66), 2**66).map(str),
        st.text("0123456789+- ٣９x", max_size=22),
        st.text(max_size=4),
    )
)
@example("")
def test_any_text_is_the_same_number_to_all(text: str) -> None:
    assert number(text.encode()) == parse_java_number(text, 64) == java_number(text, 64)


@given(st.binary(max_size=12))
def test_any_bytes_are_the_same_number_to_both(data: bytes) -> None:
    assert number(data) == parse_java_number(decode_utf8(data), 64)


@given(st.sampled_from([16, 32, 64]), st.integers(-(2**65), 2**65))
def test_narrow_numbers_end_where_java_throws(bits: int, value: int) -> None:
    value >>= 64 - bits
    assert parse_java_number(str(value), bits) == java_number(str(value), bits)
    assert parse_java_number(str(value), bits) == (value if -(1 << bits - 1) <= value < 1 << bits - 1 else None)


# --- checksums and searches ---


@given(st.binary(max_size=200), st.integers(0, 200), st.integers(0, 200))
def test_crc32_is_zlibs(data: bytes, start: int, end: int) -> None:
    start, end = sorted((min(start, len(data)), min(end, len(data))))
    buffer = np.frombuffer(data, dtype=np.uint8)
    assert int(crc32(buffer, U64(start), U64(end), CRC_TABLES)) == zlib.crc32(data[start:end])


@given(st.lists(st.sampled_from([0, 1, 2, 3, 0x20, 0x7F, 0x80, 0x81, 0x82, 0xA0, 0xFF]), max_size=40), st.data())
def test_find_byte_is_bytes_find(values: list[int], data: st.DataObject) -> None:
    raw = bytes(values)
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(raw)), st.integers(0, len(raw)))))
    wanted = data.draw(st.sampled_from([1, 2, 0x20, 0x80, 0]))
    found = raw.find(bytes([wanted]), start, end)
    buffer = np.frombuffer(raw, dtype=np.uint8)
    assert int(find_byte(buffer, U64(start), U64(end), U64(wanted))) == (end if found < 0 else found)


if os.environ.get("NUMBA_BOUNDSCHECK") == "1":  # without it, such a read is what it says: outside the array

    def test_bounds_are_checked() -> None:
        with pytest.raises(IndexError):
            find_byte(np.zeros(8, dtype=np.uint8), U64(0), U64(20), U64(1))


# --- topics ---


def colliding(count: int) -> list[str]:
    """Topics that all have one Java hash."""
    words = ["Aa", "BB"]
    while len(words) < count:
        words = [word + pair for word in words for pair in ("Aa", "BB")]
    return words[:count]


@pytest.mark.parametrize("kind", ["many", "long", "colliding", "mixed"])
def test_topics_are_told_apart(kind: str) -> None:
    count = 3000 if JIT else 20
    long = [f"{number}" + "x" * 5000 for number in range(count // 30 + 2)]
    topics = {
        "many": [f"topic-{number % (count - 7)}" for number in range(count)],
        "long": long,
        "colliding": colliding(512 if JIT else 32),
        "mixed": ["", "a", *long[:3], *colliding(64), "", "长" * 130, *(f"t{number}" for number in range(count // 2))],
    }[kind]
    data = encode([Sample(FrameSpec(topic)) for topic in topics])
    found = by_kernel(Stretch.of(data), rows_max=500)
    assert found == by_decoder(Stretch.of(data))
    assert [request.topic for request in found.requests] == topics
