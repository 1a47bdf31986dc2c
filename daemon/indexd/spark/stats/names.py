"""From a fingerprint back to the text: the message in which it was first seen is read, and its texts are tried."""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from indexd.commitlog.decoder import DecoderOptions, Message, decode_utf8
from indexd.commitlog.evidence import MessageLookup
from indexd.commitlog.format import FLAG_BORN_HOST_V6, FLAG_STORE_HOST_V6, MAGIC_V1
from indexd.config import Config
from indexd.index.format import index_key_hash
from indexd.recovery.open import frame_size_max
from indexd.spark.stats.parts_kernel import OF_HOST, OF_KEY, OF_TAGS, OF_TOPIC, OF_UNIQ_KEY, fingerprint
from indexd.storage.disk import Disk

KEYS, UNIQ_KEY, TAGS, HOST = "KEYS", "UNIQ_KEY", "TAGS", "host"


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a message: one of its keys, its unique key, its tags, or the host it came from (without a topic)."""

    kind: str
    topic: str
    text: str

    @property
    def key_hash(self) -> int:
        """What an index entry stores for it."""
        return index_key_hash(self.topic, self.text, "T" if self.kind == TAGS else None)


class Names:
    """Reads single messages of the log; close it after use."""

    def __init__(self, disk: Disk, config: Config) -> None:
        self._disk = disk
        options = DecoderOptions(config.store.delay_levels_ms, frame_size_max(config), check_crc=False)
        self._lookup = MessageLookup(disk, config.store.commit_log_directories, config.store.segment_size, options)

    def close(self) -> None:
        """Close every file."""
        self._lookup.close()

    def at(self, phy_offset: int) -> dict[int, Text]:
        """Fingerprint -> text of all texts of the message there; empty if it is gone."""
        return dict(texts_of(self._frame(phy_offset)))

    def example(self, phy_offset: int, key_hash: int) -> Text | None:
        """The key of the message there that has this hash."""
        texts = (text for _, text in texts_of(self._frame(phy_offset)) if text.kind != HOST)
        return next((text for text in texts if text.key_hash == key_hash), None)

    def _frame(self, phy_offset: int) -> bytes:
        message, segment = self._lookup.at(phy_offset), self._lookup.log.at(phy_offset)
        if not isinstance(message, Message) or segment is None:
            return b""
        with self._disk.open_read(segment.path) as file:
            return file.pread(message.size, phy_offset - segment.base)


def texts_of(frame: bytes) -> Iterator[tuple[int, Text]]:
    """(fingerprint, text) of everything in a whole frame that is counted by name; nothing for no bytes."""
    if not frame:
        return
    flags = struct.unpack_from(">I", frame, 36)[0]
    born = 16 if flags & FLAG_BORN_HOST_V6 else 4
    address = frame[48 : 48 + born]
    yield _print(address, OF_HOST), Text(HOST, "", str(ipaddress.ip_address(address)))
    topic, properties = _topic_and_properties(frame, 68 + born + 4 + (20 if flags & FLAG_STORE_HOST_V6 else 8))
    of_topic = np.uint64(_print(topic, OF_TOPIC))
    found = {}
    for pair in properties.split(b"\x02"):
        name, _, value = pair.partition(b"\x01")
        if name and value:
            found[name] = value
    topic_name = decode_utf8(topic)
    for piece in found.get(b"KEYS", b"").split(b" "):
        if piece:
            yield _print(piece, of_topic ^ OF_KEY), Text(KEYS, topic_name, decode_utf8(piece))
    if b"UNIQ_KEY" in found:
        value = found[b"UNIQ_KEY"]
        yield _print(value, of_topic ^ OF_UNIQ_KEY), Text(UNIQ_KEY, topic_name, decode_utf8(value))
    if b"TAGS" in found:
        yield _print(found[b"TAGS"], of_topic ^ OF_TAGS), Text(TAGS, topic_name, decode_utf8(found[b"TAGS"]))


def _topic_and_properties(frame: bytes, at: int) -> tuple[bytes, bytes]:
    at += 4 + max(struct.unpack_from(">i", frame, at)[0], 0)
    width = 1 if struct.unpack_from(">I", frame, 4)[0] == MAGIC_V1 else 2
    end = at + width + int.from_bytes(frame[at : at + width], "big")
    return frame[at + width : end], frame[end + 2 :]


def _print(text: bytes, seed: np.uint64) -> int:
    # Through a bytearray: the kernels know writable arrays.
    data = np.frombuffer(bytearray(text), dtype=np.uint8)
    return int(fingerprint(data, np.uint64(0), np.uint64(len(text)), np.uint64(seed)))
