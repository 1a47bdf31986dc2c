"""The slow truth about the log: text, hashes, properties and frames, in plain Python, from the store spec alone.

Nothing here is shared with the daemon, nothing is fast, and every function names the section it restates. All
integers on disk are big-endian and signed; times are epoch milliseconds; a physical offset is a byte offset.
"""

from __future__ import annotations

import ipaddress
import re
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAGIC_V1, MAGIC_V2, MAGIC_BLANK = -626843481, -626843477, -875286124
_DELAYS = [1, 5, 10, 30, *(60 * m for m in range(1, 11)), 1200, 1800, 3600, 7200]  # seconds, level 1 first


def java_utf8(data: bytes) -> str:
    """Spec 11.3: an encoded surrogate, whole or cut short, is one U+FFFD; the rest is as in Python."""
    return re.sub(rb"\xed[\xa0-\xbf][\x80-\xbf]?", b"\xef\xbf\xbd", data).decode("utf-8", "replace")


def java_hash(text: str) -> int:
    """String.hashCode: signed 32 bits over UTF-16 units."""
    units = text.encode("utf-16-be", "surrogatepass")
    h = 0
    for i in range(0, len(units), 2):
        h = (31 * h + (units[i] << 8) + units[i + 1]) & 0xFFFFFFFF
    return h - (1 << 32) if h >> 31 else h


def key_hash(text: str) -> int:
    """The absolute value of the Java hash, 0 where that overflows."""
    h = abs(java_hash(text))
    return 0 if h == 1 << 31 else h


def decode_properties(text: str) -> dict[str, str]:
    """Spec 2.4: empty names and values vanish, the last duplicate wins, further U+0001 stay in the value."""
    found = {}
    for segment in text.split("\x02"):
        name, _, value = segment.partition("\x01")
        if name and value:
            found[name] = value
    return found


def split_keys(keys: str | None) -> list[str]:
    """The indexed pieces of KEYS, in order, repeated ones too (spec 4.2 step 5)."""
    return [piece for piece in (keys or "").split(" ") if piece]


def _java_int(text: str, bits: int) -> int:
    """Integer.parseInt and kin: one sign, decimal digits of any script, no blanks; ValueError otherwise."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits.isdecimal() or max(digits) > "\uffff":
        raise ValueError(text)
    value = -int(digits) if text[0] == "-" else int(digits)
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise ValueError(text)
    return value


def java_wrap(value: int, bits: int = 64) -> int:
    """Java's silent overflow."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


@dataclass(frozen=True)
class NaiveMessage:
    """Every field of a frame, and what the frame check makes of them (spec 2.7)."""

    phy_offset: int
    size: int
    topic: str
    queue_id: int
    cq_offset: int
    tags_code: int
    store_timestamp: int
    sys_flag: int
    prepared_transaction_offset: int
    keys: str | None
    uniq_key: str | None
    tags: str | None
    magic: int
    body_crc: int
    flag: int
    born_timestamp: int
    born_host: tuple[str, int]
    store_host: tuple[str, int]
    reconsume_times: int
    body: bytes
    raw_topic: bytes
    raw_properties: bytes
    properties: dict[str, str] | None
    batch_base: int
    batch_size: int

    def hit(self) -> dict[str, Any]:
        """The message as a hit of a query's JSON."""
        return {
            "phyOffset": self.phy_offset, "topic": self.topic, "queueId": self.queue_id, "queueOffset": self.cq_offset,
            "storeTimestamp": self.store_timestamp, "bornTimestamp": self.born_timestamp, "tags": self.tags,
            "keys": self.keys, "uniqKey": self.uniq_key, "size": self.size, "sysFlag": self.sys_flag,
            "bornHost": "{}:{}".format(*self.born_host), "storeHost": "{}:{}".format(*self.store_host),
        }  # fmt: skip

    def row(self) -> dict[str, Any]:
        """The message as a line of messages.jsonl."""
        return {
            "phyOffset": self.phy_offset, "size": self.size, "topic": self.topic, "queueId": self.queue_id,
            "cqOffset": self.cq_offset, "tagsCode": self.tags_code, "storeTimestamp": self.store_timestamp,
            "sysFlag": self.sys_flag, "preparedTransactionOffset": self.prepared_transaction_offset,
            "keys": self.keys, "uniqKey": self.uniq_key, "tags": self.tags,
        }  # fmt: skip


class _Cursor:
    """Reads fields off ``data``. Running out of it, or a piece longer than the frame, is a ValueError (2.7 step 4)."""

    def __init__(self, data: bytes, position: int, total: int) -> None:
        self.data, self.position, self.total = data, position, total

    def number(self, form: str) -> int:
        size = struct.calcsize(form)
        return int(struct.unpack(">" + form, self._take(size))[0])

    def piece(self, size: int) -> bytes:
        if not 0 <= size <= self.total:
            raise ValueError("no such piece")
        return self._take(size)

    def host(self, v6: bool) -> tuple[str, int]:
        return str(ipaddress.ip_address(self.piece(16 if v6 else 4))), self.number("i")

    def _take(self, size: int) -> bytes:
        self.position += size
        if self.position > len(self.data):
            raise ValueError("underflow")
        return self.data[self.position - size : self.position]


def naive_check(data: bytes, position: int = 0, check_crc: bool = True) -> tuple[bool, int, NaiveMessage | None]:
    """Spec 2.7: (True, size, message), (True, 0) for blank, (False, -1) for no frame, (False, size) for bad lengths.

    ``data`` ends where the readable bytes end; ``position`` is where in it the frame starts.
    """
    if len(data) - position < 8:
        return False, -1, None
    total, magic = struct.unpack_from(">ii", data, position)
    if len(data) - position < total:
        return False, -1, None
    if magic == MAGIC_BLANK:
        return True, 0, None
    if magic not in (MAGIC_V1, MAGIC_V2):
        return False, -1, None
    try:
        message, length = _walk(_Cursor(data, position + 8, total), total, magic, check_crc)
        if length != total:
            return False, total, None
        base, size = (message.properties or {}).get("INNER_BASE"), (message.properties or {}).get("INNER_NUM")
        if base is not None and size is not None:
            message = replace(message, batch_base=_java_int(base, 64), batch_size=_java_int(size, 16))
        return True, total, message
    except ValueError:
        return False, -1, None


def _walk(cursor: _Cursor, total: int, magic: int, check_crc: bool) -> tuple[NaiveMessage, int]:
    """The fields in their order (spec 2.1) and the length they add up to."""
    body_crc, queue_id, flag = cursor.number("i"), cursor.number("i"), cursor.number("i")
    cq_offset, phy_offset, sys_flag = cursor.number("q"), cursor.number("q"), cursor.number("i")
    born_timestamp, born_host = cursor.number("q"), cursor.host(bool(sys_flag & 0x10))
    store_timestamp, store_host = cursor.number("q"), cursor.host(bool(sys_flag & 0x20))
    reconsume_times, prepared = cursor.number("i"), cursor.number("q")
    body = cursor.piece(max(cursor.number("i"), 0))
    if check_crc and body and zlib.crc32(body) & 0x7FFFFFFF != body_crc:
        raise ValueError("body CRC")
    raw_topic = cursor.piece(cursor.number("b" if magic == MAGIC_V1 else "h"))
    raw_properties = cursor.piece(max(cursor.number("h"), 0))
    topic = java_utf8(raw_topic)
    properties = decode_properties(java_utf8(raw_properties)) if raw_properties else None
    hosts = (16 if sys_flag & 0x10 else 4) + (16 if sys_flag & 0x20 else 4) + 8
    pieces = len(body) + len(raw_topic) + len(raw_properties)
    message = NaiveMessage(
        phy_offset, total, topic, queue_id, cq_offset, _tags_code(topic, properties, store_timestamp),
        store_timestamp, sys_flag, prepared, "" if properties is None else properties.get("KEYS"),
        (properties or {}).get("UNIQ_KEY"), (properties or {}).get("TAGS"), magic, body_crc, flag, born_timestamp,
        born_host, store_host, reconsume_times, body, raw_topic, raw_properties, properties, cq_offset, 1,
    )  # fmt: skip
    return message, 74 + hosts + (1 if magic == MAGIC_V1 else 2) + pieces


def _tags_code(topic: str, properties: dict[str, str] | None, store_timestamp: int) -> int:
    """Spec 2.7 steps 6 and 7: the hash of TAGS, or when a delayed message is due."""
    properties = properties or {}
    if topic == "SCHEDULE_TOPIC_XXXX" and "DELAY" in properties:
        level = min(_java_int(properties["DELAY"], 32), len(_DELAYS))
        if level > 0:
            return java_wrap(store_timestamp + 1000 * _DELAYS[level - 1])
    return java_hash(properties.get("TAGS", ""))


def naive_frames(paths: Path | Iterable[Path], segment_size: int, start: int | None = None) -> Iterator[NaiveMessage]:
    """Every message of the segments in ``paths`` (files, directories or one directory), as recovery scans (spec 7.4).

    Starts at physical offset ``start`` (the first segment's own if None), ends at the first thing that is no frame.
    """
    paths = [paths] if isinstance(paths, Path) else paths
    files = sorted(path for given in paths for path in (given.iterdir() if given.is_dir() else [given]))
    for file in files:
        base = int(file.name)
        if start is not None and base + segment_size <= start:
            continue
        data = file.read_bytes()[:segment_size]
        position = max(start - base, 0) if start is not None else 0
        while True:
            ok, size, message = naive_check(data, position)
            if not ok:
                return
            if message is None:
                break
            yield message
            position += size
