"""Hypothesis strategies for messages: what producers send, what they should not send, and what only a test sends.

The pools are small on purpose, so that keys repeat, collide and meet in one slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from indexd.query import KeyQuery
from support.commitlog_writer import CommitLogWriter, FrameSpec, encode_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexd.index.format import IndexLayout

BASE_TIME = 1_700_000_000_000  # epoch ms
DELAY_TOPIC = "SCHEDULE_TOPIC_XXXX"
#: Topic and key whose joined text has the Java hash -2**31, so key hash 0.
ZERO_HASH = ("TopicA", "4E1C<E=")

_TOPICS = [
    *("T", "TopicA", "%RETRY%group", "订单主题", "é😀", "", "a b#c"),
    "L" + "x" * 199,  # v2: more than 127 UTF-16 units
    "x" * 127,  # the longest v1
    "长" * 130,  # v2, three bytes a unit
    "😀" * 64,  # v2 by units (128), though only 64 code points
]
# "Aa" and "BB" have one Java hash, so have all words made of them. "T#TagA" shares its text with the tag TagA.
_PIECES = ["Aa", "BB", "AaBB", "BBAa", ZERO_HASH[1], "T#TagA", "k", "order-1", "订单", "é", "😀", "a\tb", "\u3000", "#"]
_TAGS = ["TagA", "Aa", "BB", "标签", "a || b", " "]
_RAW_CHUNKS = [
    *(b"KEYS\x01Aa BB\x02", b"KEYS\x01 k  k \x02", b"UNIQ_KEY\x01u1\x02", b"TAGS\x01TagA\x02"),
    *(b"KEYS\x01unterminated", b"UNIQ_KEY\x01unterminated", b"KEYS", b"KEYS\x01", b"KEYS\x01\x02", b"\x01v\x02"),
    *(b"\x02", b"\x02\x02\x02", b"\x01", b"\x01\x01\x02", b"AB\x02", b"K\x01v=\x01w\x02", b"keys\x01no\x02"),
    # Encoded surrogates, alone and paired, cut short; overlong, too large, truncated, stray.
    *(b"KEYS\x01\xed\xa0\x80\x02", b"KEYS\x01\xed\xa0\xbd\xed\xb8\x80 k\x02", b"UNIQ_KEY\x01a\xed\xbf\x02"),
    *(b"TAGS\x01\xc0\x80\x02", b"KEYS\x01\xf4\x90\x80\x80 \xe2\x82\x02", b"KEYS\x01\x80\xff k\x02", b"\xed\xbf"),
]
_RAW_TOPICS = [b"\xed\xa0\x80", b"\xed\xa0\xbd\xed\xb8\x80", b"\xc0\x80T", b"T\xe2\x82", b"\xff"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One message to write; the raw parts, where given, stand in for the encoded ones."""

    spec: FrameSpec
    raw_properties: bytes | None = None
    raw_topic: bytes | None = None

    def append(self, writer: CommitLogWriter) -> int:
        return writer.append(self.spec, raw_properties=self.raw_properties, raw_topic=self.raw_topic)

    def encode(self, phy_offset: int = 0, *, prop_crc: bool = False) -> bytes:
        raw = {"raw_properties": self.raw_properties, "raw_topic": self.raw_topic}
        return encode_frame(self.spec, phy_offset, prop_crc=prop_crc, **raw)


def _text(max_size: int = 12) -> st.SearchStrategy[str]:
    """Text that a property can carry: no surrogates, neither separator."""
    return st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=max_size)


def topics() -> st.SearchStrategy[str]:
    """Short, long (v2) and foreign topics, empty too; never a v1 topic of more than 127 bytes."""
    return st.one_of(st.sampled_from(_TOPICS[:5]), st.sampled_from(_TOPICS), _text(30))


def pieces() -> st.SearchStrategy[str]:
    """One key, without a space: mostly from a small pool with collisions."""
    return st.one_of(st.sampled_from(_PIECES), _text().map(lambda text: text.replace(" ", "")).filter(bool))


@st.composite
def keys_strings(draw: st.DrawFn) -> str:
    """KEYS as producers write it: several keys, repeated ones, single, doubled, leading and trailing spaces, none."""
    words = draw(st.lists(pieces(), max_size=6))
    out = draw(st.sampled_from(["", "", " "]))
    for word in words:
        out += word + draw(st.sampled_from([" ", " ", "  ", "   "]))
    return out if draw(st.booleans()) else out.rstrip(" ")


@st.composite
def properties(draw: st.DrawFn, delayed: bool = False, keys: str | None = None) -> dict[str, str]:
    """A property map; ``delayed`` adds DELAY, ``keys`` fixes KEYS. Empty KEYS are written and vanish when read."""
    optional: dict[str, st.SearchStrategy[str]] = {
        "KEYS": keys_strings(),
        "UNIQ_KEY": st.one_of(st.sampled_from(["u1", "u2", "Aa", "BB", "two words"]), pieces()),
        "TAGS": st.one_of(st.sampled_from(_TAGS), _text()),
        "p": _text(),
    }
    found = draw(st.fixed_dictionaries({}, optional=optional))
    if keys is not None:
        found["KEYS"] = keys
    if delayed:
        found["DELAY"] = draw(st.sampled_from(["1", "3", "18", "19", "99", "0", "-1", "+2", "03", "٣"]))
    if draw(st.integers(0, 9)) == 0:
        batch = {"INNER_NUM": draw(st.integers(-5, 32767)), "INNER_BASE": draw(st.integers(-5, 2**63 - 1))}
        found |= {name: str(value) for name, value in batch.items() if draw(st.integers(0, 3))}
    return found


def raw_properties() -> st.SearchStrategy[bytes]:
    """Property bytes that no encoder writes: separators missing, doubled, alone; invalid UTF-8; encoded surrogates."""
    return st.lists(st.one_of(st.sampled_from(_RAW_CHUNKS), st.binary(max_size=6)), max_size=6).map(b"".join)


def hosts() -> st.SearchStrategy[tuple[str, int]]:
    """(address, port), IPv4 or IPv6; the port is a four-byte integer on disk."""
    addresses = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
    return st.tuples(addresses, st.sampled_from([0, 10911, 65535, 2**31 - 1]))


def store_timestamps() -> st.SearchStrategy[int]:
    """Times around one moment, in any order, and now and then zero, negative or more than 2**31 s away."""
    odd = [0, -1, -999, -BASE_TIME, 1, BASE_TIME + 2**31 * 1000, BASE_TIME + 2**33 * 1000]
    near = st.integers(BASE_TIME - 3_000, BASE_TIME + 30_000)
    return st.one_of(near, near, near, st.sampled_from(odd))


def sys_flags() -> st.SearchStrategy[int]:
    """Transaction kinds, most often none, with compression, multi-tag and batch bits beside them."""
    transaction = st.sampled_from([0, 0, 0, 0x4, 0x8, 0xC])
    return st.builds(int.__or__, transaction, st.sampled_from([0, 0, 0, 0x1, 0x2, 0x40, 0x80, 0x101, 0x203]))


@st.composite
def messages(draw: st.DrawFn, malformed: bool = True) -> Sample:
    """Any message that a frame can carry and the broker's own check accepts.

    ``malformed`` allows property and topic bytes that no encoder writes.
    """
    kind = draw(st.sampled_from(["any", "any", "any", "delayed", "zero hash", "raw"]))
    topic, keys = draw(topics()), None
    if kind == "delayed":
        topic = DELAY_TOPIC
    elif kind == "zero hash":
        topic, keys = ZERO_HASH[0], f"{ZERO_HASH[1]} {draw(keys_strings())}"
    spec = FrameSpec(
        topic=topic,
        body=draw(st.one_of(st.binary(max_size=40), st.integers(0, 300).map(bytes))),
        properties=draw(properties(delayed=kind == "delayed", keys=keys)),
        queue_id=draw(st.integers(0, 3)),
        flag=draw(st.integers(-(2**31), 2**31 - 1)),
        sys_flag=draw(sys_flags()),
        born_timestamp=draw(store_timestamps()),
        store_timestamp=draw(store_timestamps()),
        born_host=draw(hosts()),
        store_host=draw(hosts()),
        reconsume_times=draw(st.integers(0, 16)),
        prepared_transaction_offset=draw(st.integers(0, 2**40)),
    )
    if not malformed or kind != "raw":
        return Sample(spec)
    raw_topic = draw(st.sampled_from(_RAW_TOPICS)) if draw(st.booleans()) and len(topic) < 30 else None
    return Sample(spec, draw(raw_properties()), raw_topic)


def logs(max_size: int = 40, malformed: bool = True) -> st.SearchStrategy[list[Sample]]:
    """The messages of one commitlog, in order; store times may go backwards."""
    return st.lists(messages(malformed), max_size=max_size)


@st.composite
def queries(draw: st.DrawFn, samples: Sequence[Sample]) -> KeyQuery:
    """A query that mostly meets what ``samples`` hold: their topics, keys and times; from 0 and to the end of time."""
    sample = draw(st.sampled_from(samples)) if samples else Sample(FrameSpec("T"))
    held = sample.spec.properties
    keys = [*held.get("KEYS", "").split(" "), held.get("UNIQ_KEY", "u1"), held.get("TAGS", "TagA")]
    times = sorted(draw(st.tuples(store_timestamps(), store_timestamps())))
    if draw(st.booleans()):
        times = [0, 2**63 - 1]
    return KeyQuery(
        topic=sample.spec.topic if draw(st.integers(0, 5)) else draw(topics()),
        key=draw(st.one_of(st.sampled_from(keys), pieces())),
        max_num=draw(st.sampled_from([0, 1, 2, 64, 200])),
        begin=times[0],
        end=times[1],
        index_type=draw(st.sampled_from([None, None, "K", "U", "T"])),
    )


@st.composite
def damages(draw: st.DrawFn, layout: IndexLayout, files: int, most: int) -> list[tuple[int, int, bytes]]:
    """Up to ``most`` of (file number, position, bytes) for ``files`` index files: single bits, numbers, zeros."""
    found = []
    for _ in range(draw(st.integers(0, most))):
        position = draw(st.integers(0, layout.file_size - 1))
        data = draw(
            st.one_of(
                st.binary(min_size=1, max_size=4),
                st.integers(0, 45).map(lambda number: number.to_bytes(4, "big")),
                st.integers(1, 200).map(bytes),
            )
        )
        found.append((draw(st.integers(0, files - 1)), position, data[: layout.file_size - position]))
    return found
