"""One message as answers show it: ``Hit``, its fields and its body; and finding one by where it stands (spec 2.2, 9.7).

By physical offset, or by the offset message id that a broker gives out. Times in ms since the epoch, offsets in bytes.
"""

from __future__ import annotations

import base64
import ipaddress
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from indexd.commitlog.decoder import Message
from indexd.commitlog.format import Corrupt, EndOfFile, NotYetWritten
from indexd.commitlog.lookup import LogView
from indexd.errors import UsageError

H = TypeVar("H")
TIME_MIN = -(1 << 63)
TIME_MAX = 2**63 - 1
BODY_SIZE_MAX = 64 << 20
_FLAG_COMPRESSED = 0x1
_COMPRESSION = {0: "zlib", 1: "lz4", 2: "zstd", 3: "zlib"}
_OFFSET_ID = re.compile(r"(?:[0-9A-Fa-f]{32}|[0-9A-Fa-f]{56})")


class HasHits(Generic[H]):
    """An answer as the sequence of its hits: ``len(answer)``, ``for hit in answer``.

    ``to_dict`` of each has only what JSON has, each hit whole in ``hits``; members that do not apply are left out.
    """

    __slots__ = ()
    hits: Sequence[H]

    def __len__(self) -> int:
        return len(self.hits)

    def __iter__(self) -> Iterator[H]:
        return iter(self.hits)

    def to_dict(self) -> dict[str, Any]:
        """See the class."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The same as ``to_dict``."""
        return self.to_dict()


@dataclass(frozen=True, slots=True)
class Hit:
    """One message of an answer without its body; None where it could not be read, which only rocketmq mode answers."""

    phy_offset: int
    store_timestamp: int | None = None
    queue_id: int | None = None
    queue_offset: int | None = None
    size: int | None = None
    keys: str | None = None
    uniq_key: str | None = None
    tags: str | None = None
    topic: str | None = None
    born_timestamp: int | None = None
    sys_flag: int | None = None
    born_host: tuple[str, int] | None = None
    store_host: tuple[str, int] | None = None

    @classmethod
    def of(cls, message: Message) -> Hit:
        """The hit that stands for ``message``; ``keys`` is the property KEYS as the producer wrote it."""
        same = {field.name: getattr(message, field.name) for field in fields(cls) if field.name != "keys"}
        return cls(keys=message.properties.get("KEYS"), **same)

    def to_dict(self) -> dict[str, Any]:
        """Under RocketMQ's names, as every outlet shows it."""
        return {
            "phyOffset": self.phy_offset,
            "topic": self.topic,
            "queueId": self.queue_id,
            "queueOffset": self.queue_offset,
            "storeTimestamp": self.store_timestamp,
            "bornTimestamp": self.born_timestamp,
            "tags": self.tags,
            "keys": self.keys,
            "uniqKey": self.uniq_key,
            "size": self.size,
            "sysFlag": self.sys_flag,
            "bornHost": None if self.born_host is None else show_host(self.born_host),
            "storeHost": None if self.store_host is None else show_host(self.store_host),
        }


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


def find_by_offset(log: LogView, phy_offset: int) -> Message | NotFound:
    """The message at ``phy_offset``, checked by its CRCs."""
    framed = log.frame(phy_offset, log.options.frame_size_max)
    found = log.at(phy_offset) if isinstance(framed, bytes) else framed
    return found if isinstance(found, Message) else not_found(log, phy_offset, found)


def not_found(log: LogView, phy_offset: int, found: EndOfFile | NotYetWritten | Corrupt | None) -> NotFound:
    """Why ``found``, which stands at ``phy_offset``, is no message."""
    if isinstance(found, Corrupt):
        why = f"there stands {found.reason}"
    elif found is not None:
        why = "its segment ends there" if isinstance(found, EndOfFile) else "nothing is written there yet"
    elif log.has_expired(phy_offset):
        why = f"it has expired, the log begins at {log.begin}"
    else:
        is_inside = log.is_inside(phy_offset)
        why = "its segment is missing from the middle of the log" if is_inside else "the log does not reach there"
    return NotFound(f"no message at physical offset {phy_offset}: {why}")


def parse_message_id(text: str) -> tuple[tuple[str, int], int]:
    """The store host that gave the id out and the physical offset; UsageError for what is no such id.

    32 (IPv4) or 56 (IPv6) hex digits.
    """
    if not _OFFSET_ID.fullmatch(text):
        raise UsageError(
            f"{text!r} is no offset message id: 32 or 56 hex digits",
            "give a physical offset with -o, or ask for a unique key with query-unique-key",
        )
    data = bytes.fromhex(text)
    port, phy_offset = struct.unpack(">iq", data[-12:])
    return (str(ipaddress.ip_address(data[:-12])), port), phy_offset


def find_by_id(log: LogView, message_id: str) -> Message | NotFound:
    """The message that the id was given to; another host's message at the same offset is not it."""
    host, phy_offset = parse_message_id(message_id)
    found = find_by_offset(log, phy_offset)
    if isinstance(found, NotFound) or found.store_host == host:
        return found
    return NotFound(
        f"the message at physical offset {phy_offset} was stored by {show_host(found.store_host)}, "
        f"not by {show_host(host)} as the id says"
    )


def unpack_body(message: Message, most: int | None = None) -> Body:
    """The body, decompressed where that is zlib, works, and comes to BODY_SIZE_MAX at most; otherwise as stored.

    With ``most`` no more bytes than that are unpacked, and what there is behind them is cut off unseen.
    """
    if not message.sys_flag & _FLAG_COMPRESSED:
        return Body(message.body, None, is_unpacked=False)
    kind = message.sys_flag >> 8 & 7
    compression = _COMPRESSION.get(kind, f"unknown ({kind})")
    if compression == "zlib":
        unpacker, size_max = zlib.decompressobj(), BODY_SIZE_MAX if most is None else most
        with suppress(zlib.error):
            data = unpacker.decompress(message.body, size_max + 1)
            is_cut = len(data) > size_max
            is_wanted = most is not None if is_cut else unpacker.eof
            if is_wanted:
                return Body(data[:size_max], compression, is_unpacked=True, is_cut=is_cut)
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
