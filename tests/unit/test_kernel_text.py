"""The small compiled pieces against their plain twins: Java's string hash and numbers, CRC-32, byte search, topics."""

from __future__ import annotations

import os
import zlib

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexd.commitlog.batcher import TopicTable
from indexd.commitlog.bytes_kernel import CRC_TABLES, crc32, find_byte, hash_utf8, key_hash, parse_long, signed_32
from indexd.commitlog.decoder import decode_utf8, java_hash, parse_java_number
from indexd.commitlog.decoder import key_hash as plain_key_hash
from indexd.commitlog.kernel import find_topic_id
from support import naive
from support.commitlog_writer import FrameSpec
from support.naive_log import _java_int
from support.strategies import ZERO_HASH, Sample
from support.twins import Stretch, by_decoder, by_kernel, encode

JIT = os.environ.get("NUMBA_DISABLE_JIT") != "1"
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


@pytest.mark.skipif(not JIT, reason="65,536 pairs take too long interpreted")
def test_all_pairs_and_many_triples_of_bytes() -> None:
    starts = range(0xC0, 0x100)
    for data in (bytes([a, b]) for a in range(256) for b in range(256)):
        buffer = np.frombuffer(data, dtype=np.uint8)
        assert int(signed_32(U64(hash_utf8(buffer, U64(0), U64(2), U64(0))))) == java_hash(decode_utf8(data))
    edges = (0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xFF)
    for data in (bytes([a, b, c, d]) for a in starts for b in edges for c in edges for d in edges):
        buffer = np.frombuffer(data, dtype=np.uint8)
        assert int(signed_32(U64(hash_utf8(buffer, U64(0), U64(4), U64(0))))) == java_hash(decode_utf8(data))


@given(st.text(max_size=20), st.text(max_size=20))
def test_a_hash_goes_on_from_another(first: str, second: str) -> None:
    data = first.encode() + second.encode()
    buffer = np.frombuffer(data, dtype=np.uint8)
    middle = len(first.encode())
    value = U64(hash_utf8(buffer, U64(0), U64(middle), U64(0)))
    assert int(signed_32(U64(hash_utf8(buffer, U64(middle), U64(len(data)), value)))) == java_hash(first + second)


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


def test_crc32_vectors() -> None:
    for data, value in ((b"", 0), (b"123456789", 0xCBF43926), (b"hello", 907060870)):
        assert int(crc32(np.frombuffer(data, dtype=np.uint8), U64(0), U64(len(data)), CRC_TABLES)) == value


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


def read_back(topics: list[str]) -> None:
    data = encode([Sample(FrameSpec(topic)) for topic in topics])
    found = by_kernel(Stretch.of(data), rows_max=500, topics_max=16)
    assert found == by_decoder(Stretch.of(data))
    assert [request.topic for request in found.requests] == topics


@pytest.mark.parametrize("kind", ["many", "long", "colliding", "mixed"])
def test_the_topic_table_grows_as_needed(kind: str) -> None:
    count = 3000 if JIT else 20
    long = [f"{number}" + "x" * 5000 for number in range(count // 30 + 2)]
    topics = {
        "many": [f"topic-{number % (count - 7)}" for number in range(count)],
        "long": long,
        "colliding": colliding(512 if JIT else 32),
        "mixed": ["", "a", *long[:3], *colliding(64), "", "长" * 130, *(f"t{number}" for number in range(count // 2))],
    }[kind]
    read_back(topics)


def test_a_table_keeps_its_ids_when_it_grows() -> None:
    table = TopicTable(4, 64)
    names = [f"topic-{number}".encode() for number in range(200)] + [b"x" * 4000, b"", b"\xed\xa0\x80"]
    ids = {}
    for name in names:
        buffer = np.frombuffer(name, dtype=np.uint8)
        value = U64(hash_utf8(buffer, U64(0), U64(len(name)), U64(0))) & U64(0xFFFFFFFF)
        while True:
            arrays = table.arrays
            at = find_topic_id(buffer, U64(0), U64(len(name)), value, *arrays)
            if at >= 0:
                break
            table = table.grown()
        ids[name] = int(at)
        assert {known: table.raw_name(topic_id) for known, topic_id in ids.items()} == {known: known for known in ids}
    assert sorted(ids.values()) == list(range(len(names))) == list(range(len(table)))
