"""One message, whole: by physical offset or by the offset message id that a broker gives out (spec 2.2, 9.7)."""

from __future__ import annotations

import base64
import ipaddress
import re
import struct
import zlib
from dataclasses import dataclass
from typing import Any

from indexd.commitlog.decoder import Message
from indexd.commitlog.format import Corrupt, EndOfFile, NotYetWritten
from indexd.errors import UsageError
from indexd.query.log import LogView

BODY_SIZE_MAX = 64 << 20
_FLAG_COMPRESSED = 0x1
_COMPRESSION = {0: "zlib", 1: "lz4", 2: "zstd", 3: "zlib"}
_OFFSET_ID = re.compile(r"(?:[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56})")


@dataclass(frozen=True, slots=True)
class MessageId:
    """What an offset message id says: the store host that gave it out and the physical offset."""

    host: tuple[str, int]
    phy_offset: int


@dataclass(frozen=True, slots=True)
class NotFound:
    """No message stands there; ``reason`` is one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class Body:
    """A body as it can be shown: unpacked, or as stored. ``compression`` is how it is stored, None for plain.

    ``is_cut``: there is more of it than ``data``, and how much more is not known.
    """

    data: bytes
    compression: str | None
    is_unpacked: bool
    is_cut: bool = False

    def text(self) -> str | None:
        """The body as text, or None if it is no printable UTF-8."""
        try:
            text = self.data.decode("utf-8")
        except UnicodeDecodeError:
            return None
        return text if all(c.isprintable() or c in "\t\n\r" for c in text) else None

    def to_json(self) -> dict[str, Any]:
        """body, bodyEncoding, bodySize (as stored or unpacked), compression, bodyUnpacked."""
        text = self.text()
        return {
            "body": base64.b64encode(self.data).decode("ascii") if text is None else text,
            "bodyEncoding": "base64" if text is None else "utf-8",
            "bodySize": len(self.data),
            "compression": self.compression,
            "bodyUnpacked": self.is_unpacked,
        }


def parse_message_id(text: str) -> MessageId:
    """Read 32 (IPv4) or 56 (IPv6) hex digits; UsageError for anything else."""
    if not _OFFSET_ID.fullmatch(text):
        raise UsageError(
            f"{text!r} is no offset message id: 32 or 56 hex digits",
            "give a physical offset with -o, or ask for a unique key with query-unique-key",
        )
    data = bytes.fromhex(text)
    port, phy_offset = struct.unpack(">iq", data[-12:])
    return MessageId((str(ipaddress.ip_address(data[:-12])), port), phy_offset)


def find_by_offset(log: LogView, phy_offset: int) -> Message | NotFound:
    """The message at ``phy_offset``, checked by its CRCs if ``log`` does so."""
    found = log.at(phy_offset)
    return found if isinstance(found, Message) else not_found(log, phy_offset, found)


def not_found(log: LogView, phy_offset: int, found: EndOfFile | NotYetWritten | Corrupt | None) -> NotFound:
    """Why ``found``, which stands at ``phy_offset``, is no message."""
    where = f"no message at physical offset {phy_offset}"
    if found is None:
        if log.has_expired(phy_offset):
            return NotFound(f"{where}: it has expired, the log begins at {log.begin}")
        if log.is_inside(phy_offset):
            return NotFound(f"{where}: its segment is missing from the middle of the log")
        return NotFound(f"{where}: the log does not reach there")
    if isinstance(found, Corrupt):
        return NotFound(f"{where}: there stands {found.reason}")
    if isinstance(found, EndOfFile):
        return NotFound(f"{where}: its segment ends there")
    return NotFound(f"{where}: nothing is written there yet")


def find_by_id(log: LogView, message_id: MessageId) -> Message | NotFound:
    """The message that the id was given to; another host's message at the same offset is not it."""
    found = find_by_offset(log, message_id.phy_offset)
    if isinstance(found, NotFound) or found.store_host == message_id.host:
        return found
    return NotFound(
        f"the message at physical offset {message_id.phy_offset} was stored by {show_host(found.store_host)}, "
        f"not by {show_host(message_id.host)} as the id says"
    )


def unpack_body(message: Message, most: int | None = None) -> Body:
    """The body, decompressed where that is zlib, works, and comes to BODY_SIZE_MAX at most; otherwise as stored.

    With ``most`` no more bytes than that are unpacked, and what there is behind them is cut off unseen.
    """
    size_max = BODY_SIZE_MAX if most is None else min(most, BODY_SIZE_MAX)
    if not message.sys_flag & _FLAG_COMPRESSED:
        return Body(message.body, None, is_unpacked=False)
    kind = message.sys_flag >> 8 & 7
    compression = _COMPRESSION.get(kind, f"unknown ({kind})")
    if compression == "zlib":
        unpacker = zlib.decompressobj()
        try:
            data = unpacker.decompress(message.body, size_max + 1)
        except zlib.error:
            return Body(message.body, compression, is_unpacked=False)
        if len(data) > size_max and size_max < BODY_SIZE_MAX:
            return Body(data[:size_max], compression, is_unpacked=True, is_cut=True)
        if unpacker.eof and len(data) <= size_max:
            return Body(data, compression, is_unpacked=True)
    return Body(message.body, compression, is_unpacked=False)


def message_fields(message: Message) -> dict[str, Any]:
    """Every field but the body, under RocketMQ's names; 64-bit numbers stay numbers."""
    return {
        "phyOffset": message.phy_offset,
        "size": message.size,
        "offsetMsgId": message.offset_msg_id,
        "topic": message.topic,
        "queueId": message.queue_id,
        "queueOffset": message.queue_offset,
        "storeTimestamp": message.store_timestamp,
        "bornTimestamp": message.born_timestamp,
        "storeHost": show_host(message.store_host),
        "bornHost": show_host(message.born_host),
        "keys": message.keys,
        "uniqKey": message.uniq_key,
        "tags": message.tags,
        "tagsCode": message.tags_code,
        "flag": message.flag,
        "sysFlag": message.sys_flag,
        "reconsumeTimes": message.reconsume_times,
        "preparedTransactionOffset": message.prepared_transaction_offset,
        "magic": message.magic,
        "bodyCrc": message.body_crc,
        "properties": message.properties,
    }


def show_host(host: tuple[str, int]) -> str:
    """``address:port``, an IPv6 address in brackets."""
    address, port = host
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
