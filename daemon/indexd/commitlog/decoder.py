"""Decodes one frame to a Message in plain Python: for queries, inspection and tests (spec rocketmq-store 2.7).

It is the twin of ``kernel.decode_frames``: the same rules in the same order, with the strings that the kernel leaves
out. Whatever the bytes are, the answer is a Message, EndOfFile, NotYetWritten or Corrupt; nothing is raised and nothing
is read outside ``data``. Text is read as Java reads it: UTF-8 with Java's replacement, String.hashCode, numbers and the
property text (spec 2.4, 3.3, 11); ``bytes_kernel`` is the compiled twin of that.
"""

from __future__ import annotations

import codecs
import ipaddress
import struct
import unicodedata
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from indexd.commitlog import format as frame
from indexd.commitlog.format import Corrupt, EndOfFile, NotYetWritten, Reason


def _replace_as_java(error: Any) -> tuple[str, int]:
    # Python replaces an encoded surrogate (ED A0..BF xx) by three characters, Java by one.
    data, start = error.object, error.start
    if data[start] == 0xED and start + 1 < len(data) and 0xA0 <= data[start + 1] <= 0xBF:
        whole = start + 2 < len(data) and 0x80 <= data[start + 2] <= 0xBF
        return "�", start + 3 if whole else start + 2
    return "�", error.end


codecs.register_error("indexd-java", _replace_as_java)


def decode_utf8(data: bytes) -> str:
    """What ``new String(data, UTF_8)`` gives; never raises."""
    return data.decode("utf-8", "indexd-java")


def java_hash(text: str) -> int:
    """``String.hashCode``, over UTF-16 units, two for a character beyond U+FFFF, as the signed 32-bit value."""
    data = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for unit in text.encode() if text.isascii() else struct.unpack(f">{len(data) // 2}H", data):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def key_hash(text: str) -> int:
    """The hash that an index entry stores: the absolute value, and 0 for -2^31 (spec 3.3)."""
    value = abs(java_hash(text))
    return 0 if value == 1 << 31 else value


def decode_properties(text: str) -> dict[str, str]:
    """The property text as a mapping; pairs without a name or a value are dropped, the last of two wins (spec 2.4)."""
    found: dict[str, str] = {}
    for pair in text.split("\x02"):
        name, separator, value = pair.partition("\x01")
        if separator and name and value:
            found[name] = value
    return found


def parse_java_number(text: str, bits: int) -> int | None:
    """``Long.parseLong`` (64) and its smaller sisters: one sign, digits of any script; None where Java throws.

    Java looks at UTF-16 units, so a digit beyond U+FFFF is none.
    """
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits.isdecimal() or max(digits) > "\uffff":
        return None
    value = 0
    for digit in digits:
        value = 10 * value + unicodedata.decimal(digit)
        if value >> bits:
            return None
    value = -value if text[0] == "-" else value
    return value if -(1 << bits - 1) <= value < 1 << bits - 1 else None


_CRC_MASK = 0x7FFFFFFF
_SIZE_AND_MAGIC = struct.Struct(">II").unpack_from
_PHY_OFFSET = struct.Struct(">Q").unpack_from
_TIMESTAMP = struct.Struct(">q").unpack_from
_INT = struct.Struct(">i").unpack_from
_UNSIGNED_INT = struct.Struct(">I").unpack_from
_SHORT = struct.Struct(">h").unpack_from
_PROPERTY_CRC_BEGIN = frame.PROPERTY_CRC_NAME + b"\x01"
_MAGICS = frozenset((frame.MAGIC_V1, frame.MAGIC_V2))


class FrameHead(NamedTuple):
    """What the fixed fields of a frame say: sizes and offsets in bytes, time in ms; nothing of it is checked."""

    size: int
    magic: int
    phy_offset: int
    store_timestamp: int


def read_head(data: bytes) -> FrameHead | None:
    """The head at the start of ``data``; None for fewer bytes than one may have."""
    if len(data) < frame.STAMPED_SIZE:
        return None
    size, magic = _SIZE_AND_MAGIC(data, 0)
    born, _ = _host_sizes(_UNSIGNED_INT(data, 36)[0])
    return FrameHead(size, magic, _PHY_OFFSET(data, 28)[0], _TIMESTAMP(data, 48 + born)[0])


@dataclass(frozen=True, slots=True)
class Message:
    """A whole frame. Times in ms; hosts as (address, port); ``body`` as stored, compressed or not."""

    phy_offset: int
    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    sys_flag: int
    born_timestamp: int
    born_host: tuple[str, int]
    store_timestamp: int
    store_host: tuple[str, int]
    reconsume_times: int
    prepared_transaction_offset: int
    body: bytes
    topic: str
    properties: dict[str, str]
    tags_code: int

    @property
    def keys(self) -> list[str]:
        """The pieces of KEYS that are indexed, in order, repeats kept: split at single spaces, empty ones left out."""
        return [piece for piece in self.properties.get("KEYS", "").split(" ") if piece]

    @property
    def uniq_key(self) -> str | None:
        """UNIQ_KEY."""
        return self.properties.get("UNIQ_KEY")

    @property
    def tags(self) -> str | None:
        """The whole TAGS."""
        return self.properties.get("TAGS")

    @property
    def offset_msg_id(self) -> str:
        """Hex of store host, port and physical offset: what ``viewMessage`` takes (spec 9.7)."""
        host = ipaddress.ip_address(self.store_host[0]).packed
        return (host + struct.pack(">iq", self.store_host[1], self.phy_offset)).hex().upper()


#: (position behind the hosts, body, topic, properties) of a whole frame.
Parts = tuple[int, bytes, bytes, bytes]
Decoded = Message | EndOfFile | NotYetWritten | Corrupt
#: The same, a frame as its bytes.
Framed = bytes | EndOfFile | NotYetWritten | Corrupt


@dataclass(frozen=True, slots=True)
class DecoderOptions:
    """``delay_levels_ms[0]`` is level 1's delay; ``frame_size_max`` the largest total size that is believed."""

    delay_levels_ms: tuple[int, ...] = ()
    frame_size_max: int = 64 << 20
    check_crc: bool = True


def decode_frame(data: bytes, position: int, phy_offset: int, segment_end: int, options: DecoderOptions) -> Decoded:
    """What stands at ``data[position]``: physical offset ``phy_offset`` of a segment that ends at ``segment_end``."""
    found = _frame_at(data, position, phy_offset, segment_end, options)
    return _decode_whole(*found, phy_offset, options) if isinstance(found, tuple) else found


def check_frame(data: bytes, phy_offset: int, segment_end: int, options: DecoderOptions) -> Framed:
    """The bytes of the frame at the start of ``data``, by the same rules, none of it decoded.

    Only what the properties mean is not looked at: whoever decodes the frame judges that.
    """
    found = _frame_at(data, 0, phy_offset, segment_end, options)
    return found[0] if isinstance(found, tuple) else found


def _frame_at(
    data: bytes, position: int, phy_offset: int, segment_end: int, options: DecoderOptions
) -> tuple[bytes, Parts] | EndOfFile | NotYetWritten | Corrupt:
    left = len(data) - position
    if left < frame.BLANK_SIZE:
        return NotYetWritten(phy_offset)
    total, magic = _SIZE_AND_MAGIC(data, position)
    if magic == frame.MAGIC_BLANK and phy_offset + total == segment_end:
        return EndOfFile(phy_offset)
    if magic == 0:
        return NotYetWritten(phy_offset)
    reason, parts = Reason.NONE, None
    if magic not in _MAGICS:
        inner = int.from_bytes(data[position + 52 : position + 56], "big")
        is_dledger = inner in _MAGICS and total == frame.MAGIC_DLEDGER
        other = Reason.DLEDGER if is_dledger else Reason.BAD_MAGIC
        reason = Reason.BAD_BLANK if magic == frame.MAGIC_BLANK else other
    elif not frame.FRAME_SIZE_MIN <= total <= options.frame_size_max or phy_offset + total > segment_end:
        reason = Reason.BAD_TOTAL_SIZE
    elif left < frame.HEAD_SIZE:
        return NotYetWritten(phy_offset, total)
    elif _PHY_OFFSET(data, position + 28)[0] != phy_offset:
        reason = Reason.WRONG_PHYSICAL_OFFSET
    elif left < total:
        return NotYetWritten(phy_offset, total)
    else:
        whole = data[position : position + total]
        parts = walk_frame(whole, magic)
        if parts is None:
            reason = Reason.LENGTHS_DISAGREE
        elif options.check_crc:
            reason = _check_crc(whole, parts[1], parts[3])
    return Corrupt(phy_offset, reason.text) if reason or parts is None else (whole, parts)


def _decode_whole(data: bytes, parts: Parts, phy_offset: int, options: DecoderOptions) -> Message | Corrupt:
    after_hosts, body, topic, raw_properties = parts
    body_crc, queue_id, flag, queue_offset, _, sys_flag, born_timestamp = struct.unpack_from(">IiiqqIq", data, 8)
    born, stored = _host_sizes(sys_flag)
    store_timestamp = _TIMESTAMP(data, 48 + born)[0]
    reconsume_times, prepared_offset = struct.unpack_from(">iq", data, after_hosts)
    properties = decode_properties(decode_utf8(raw_properties))
    topic_name = decode_utf8(topic)
    tags_code = _tags_code(properties, topic_name, store_timestamp, options.delay_levels_ms)
    if tags_code is None:
        return Corrupt(phy_offset, Reason.DELAY_LEVEL.text)
    if "INNER_NUM" in properties and "INNER_BASE" in properties:
        base = parse_java_number(properties["INNER_BASE"], 64)
        if base is None or parse_java_number(properties["INNER_NUM"], 16) is None:
            return Corrupt(phy_offset, Reason.INNER_BATCH.text)
        queue_offset = base
    return Message(
        phy_offset=phy_offset,
        size=len(data),
        magic=_SIZE_AND_MAGIC(data, 0)[1],
        body_crc=body_crc,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        sys_flag=sys_flag - (1 << 32) if sys_flag >= 1 << 31 else sys_flag,
        born_timestamp=born_timestamp,
        born_host=_host(data, 48, born),
        store_timestamp=store_timestamp,
        store_host=_host(data, 56 + born, stored),
        reconsume_times=reconsume_times,
        prepared_transaction_offset=prepared_offset,
        body=body,
        topic=topic_name,
        properties=properties,
        tags_code=tags_code,
    )


def walk_frame(data: bytes, magic: int) -> Parts | None:
    """The parts of a frame, or None when the lengths do not add up."""
    born, stored = _host_sizes(_UNSIGNED_INT(data, 36)[0])
    after_hosts, size = 56 + born + stored, len(data)
    at = after_hosts + 12
    if at + 4 > size:
        return None
    body_size = max(_INT(data, at)[0], 0)
    at += 4
    body = data[at : at + body_size]
    at += body_size
    width = 1 if magic == frame.MAGIC_V1 else 2
    if at + width > size:
        return None
    topic_size = int.from_bytes(data[at : at + width], "big", signed=True)
    at += width
    if topic_size < 0 or at + topic_size + 2 > size:
        return None
    topic = data[at : at + topic_size]
    at += topic_size
    properties_size = max(_SHORT(data, at)[0], 0)
    at += 2
    if at + properties_size != size:
        return None
    return after_hosts, body, topic, data[at:]


def _check_crc(data: bytes, body: bytes, properties: bytes) -> Reason:
    if body and zlib.crc32(body) & _CRC_MASK != _UNSIGNED_INT(data, 8)[0]:
        return Reason.BODY_CRC
    tail = properties[-frame.PROPERTY_CRC_SIZE :]
    if len(tail) < frame.PROPERTY_CRC_SIZE or not tail.startswith(_PROPERTY_CRC_BEGIN):
        return Reason.NONE
    digits = tail[9:19]
    if tail[19] != 2 or not (digits.isascii() and digits.isdigit()):
        return Reason.PROPERTY_CRC
    stored = int(digits[::-1])
    found = zlib.crc32(data[: -frame.PROPERTY_CRC_SIZE]) & _CRC_MASK
    return Reason.NONE if stored == found else Reason.PROPERTY_CRC


def _tags_code(
    properties: dict[str, str], topic: str, store_timestamp: int, delay_levels_ms: tuple[int, ...]
) -> int | None:
    code = java_hash(properties.get("TAGS", ""))
    if topic == frame.DELAY_TOPIC and "DELAY" in properties:
        level = parse_java_number(properties["DELAY"], 32)
        if level is None:
            return None
        level = min(level, len(delay_levels_ms))
        if level > 0:
            # A Java long wraps.
            code = (store_timestamp + delay_levels_ms[level - 1] + (1 << 63)) % (1 << 64) - (1 << 63)
    return code


def _host_sizes(sys_flag: int) -> tuple[int, int]:
    return (
        20 if sys_flag & frame.FLAG_BORN_HOST_V6 else 8,
        20 if sys_flag & frame.FLAG_STORE_HOST_V6 else 8,
    )


def _host(data: bytes, at: int, size: int) -> tuple[str, int]:
    address = ipaddress.ip_address(data[at : at + size - 4])
    return str(address), struct.unpack_from(">i", data, at + size - 4)[0]
