"""Writes commitlog frames and segments as a broker does: for the demo and the tests, never into a live store.

A segment, as ``CommitLogWriter`` leaves it (store spec 1.2, 1.3, 2.3)::

    +--------+--------+-- ... --+----------------------------+--------------------------+
    | frame  | frame  |  frame  | i32 bytes left, i32 blank  | whatever was there: zero |
    +--------+--------+-- ... --+----------------------------+--------------------------+
    0                           a closed segment only                        segment_size

A crash leaves the last segment full-size with zeros behind the last frame, and a second, all-zero one ahead of
it. All integers are big-endian and signed.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from indexd.commitlog.format import (
    BLANK_SIZE,
    FLAG_BORN_HOST_V6,
    FLAG_STORE_HOST_V6,
    FLAG_TRANSACTION_MASK,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    PROPERTY_CRC_NAME,
    PROPERTY_CRC_SIZE,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
)

if TYPE_CHECKING:
    from types import TracebackType

# Total size, magic, body CRC, queue id, flag, queue offset, physical offset, sysFlag, born timestamp.
_HEAD = struct.Struct(">iIiiiqqiq")
_BLANK = struct.Struct(">iI")
_LOCAL_HOST = ("127.0.0.1", 10911)


@dataclasses.dataclass(frozen=True, slots=True)
class FrameSpec:
    """What a frame says, but for its place in the log.

    Times are Unix epoch milliseconds. Hosts are (address, port); an address with a colon is IPv6, and the two
    IPv6 bits of ``sys_flag`` follow the hosts, however they are set here. ``body`` is stored as it is given.
    """

    topic: str
    body: bytes = b""
    properties: dict[str, str] = dataclasses.field(default_factory=dict)
    queue_id: int = 0
    queue_offset: int = 0
    flag: int = 0
    sys_flag: int = 0
    born_timestamp: int = 0
    store_timestamp: int = 0
    born_host: tuple[str, int] = _LOCAL_HOST
    store_host: tuple[str, int] = _LOCAL_HOST
    reconsume_times: int = 0
    prepared_transaction_offset: int = 0


def encode_frame(
    spec: FrameSpec,
    phy_offset: int,
    *,
    prop_crc: bool = False,
    raw_properties: bytes | None = None,
    raw_topic: bytes | None = None,
) -> bytes:
    """The bytes of one frame (store spec 2.1), ``phy_offset`` being field 7.

    ``raw_properties`` and ``raw_topic`` stand in for the encoded ones, to write what no well-behaved producer
    sends; a raw topic may even wrap its signed length byte. With ``prop_crc`` the properties end with the 20-byte
    CRC property (2.5), which counts in their length; its ten digits are least significant first.
    """
    v2 = len(spec.topic.encode("utf-16-be", "surrogatepass")) // 2 > 127
    topic = _utf8(spec.topic) if raw_topic is None else raw_topic
    pairs = "".join(f"{name}\x01{value}\x02" for name, value in spec.properties.items())
    properties = _utf8(pairs) if raw_properties is None else raw_properties
    if prop_crc and properties and not properties.endswith(b"\x02"):
        properties += b"\x02"
    properties_length = len(properties) + (PROPERTY_CRC_SIZE if prop_crc else 0)
    born, born_v6 = _host(spec.born_host)
    store, store_v6 = _host(spec.store_host)
    sys_flag = spec.sys_flag & ~(FLAG_BORN_HOST_V6 | FLAG_STORE_HOST_V6)
    sys_flag |= (FLAG_BORN_HOST_V6 if born_v6 else 0) | (FLAG_STORE_HOST_V6 if store_v6 else 0)
    length = struct.pack(">H", len(topic)) if v2 else bytes([len(topic) & 0xFF])
    tail = b"".join((
        born, struct.pack(">q", spec.store_timestamp), store,
        struct.pack(">iq", spec.reconsume_times, spec.prepared_transaction_offset),
        struct.pack(">i", len(spec.body)), spec.body, length, topic,
        struct.pack(">h", properties_length), properties,
    ))  # fmt: skip
    size = _HEAD.size + len(tail) + (PROPERTY_CRC_SIZE if prop_crc else 0)
    head = _HEAD.pack(
        size, MAGIC_V2 if v2 else MAGIC_V1, zlib.crc32(spec.body) & 0x7FFFFFFF, spec.queue_id, spec.flag,
        spec.queue_offset, phy_offset, sys_flag, spec.born_timestamp,
    )  # fmt: skip
    frame = head + tail
    digits = f"{zlib.crc32(frame) & 0x7FFFFFFF:010d}"[::-1].encode()
    return frame + PROPERTY_CRC_NAME + b"\x01" + digits + b"\x02" if prop_crc else frame


def blank_record(bytes_left: int) -> bytes:
    """The 8 bytes that close a segment with ``bytes_left`` unused ones, these 8 included (store spec 2.3)."""
    return _BLANK.pack(bytes_left, MAGIC_BLANK)


def _utf8(text: str) -> bytes:
    """UTF-8 as Java writes it: joined surrogate pairs, and ``?`` for a lone surrogate (store spec 11.3)."""
    units = text.encode("utf-16-be", "surrogatepass")
    return units.decode("utf-16-be", "surrogatepass").encode("utf-8", "replace")


def _host(host: tuple[str, int]) -> tuple[bytes, bool]:
    """Address and port as stored, 8 or 20 bytes, and whether it is IPv6."""
    address, port = host
    v6 = ":" in address
    packed = socket.inet_pton(socket.AF_INET6 if v6 else socket.AF_INET, address)
    return packed + struct.pack(">i", port), v6


class CommitLogWriter:
    """Appends frames to a commitlog directory: full-size zero-filled segments, the next one made ahead.

    ``start_offset`` is the physical offset of the first frame and may lie inside a segment. Existing segments
    are written over from there and keep the bytes behind it, as the broker's do after a truncation (store spec
    1.3); ``queue_offsets`` maps (topic, queue id) to the next queue offset and may be set when a log is continued.
    Failed calls raise OSError. Not for use from several threads.
    """

    _fd = -1  # of the open segment

    def __init__(self, directory: Path, segment_size: int, *, start_offset: int = 0, prop_crc: bool = False) -> None:
        self.directory = Path(directory)
        self.segment_size = segment_size
        self.prop_crc = prop_crc
        self.max_offset = start_offset
        self.queue_offsets: dict[tuple[str, int], int] = {}
        # The segment that this writer made ahead and that holds nothing yet.
        self._ahead: Path | None = None
        self.directory.mkdir(parents=True, exist_ok=True)
        self._base = start_offset - start_offset % segment_size
        self._open_segment()

    def __enter__(self) -> CommitLogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(clean=kind is None)

    def __del__(self) -> None:
        # As a file object does it: who has forgotten to close has forgotten the descriptor, too.
        if self._fd >= 0:
            os.close(self._fd)

    def append(self, spec: FrameSpec, *, raw_properties: bytes | None = None, raw_topic: bytes | None = None) -> int:
        """Writes one frame and returns its physical offset; the queue's next offset replaces the one in ``spec``.

        Prepared and rollback frames get queue offset 0 and take none (store spec 2.1, field 6).
        """
        queue = (spec.topic, spec.queue_id)
        queued = spec.sys_flag & FLAG_TRANSACTION_MASK not in (TRANSACTION_PREPARED, TRANSACTION_ROLLBACK)
        queue_offset = self.queue_offsets.get(queue, 0) if queued else 0
        spec = dataclasses.replace(spec, queue_offset=queue_offset)

        def encode(phy_offset: int) -> bytes:
            return encode_frame(
                spec, phy_offset, prop_crc=self.prop_crc, raw_properties=raw_properties, raw_topic=raw_topic
            )

        frame = encode(self.max_offset)
        assert len(frame) + BLANK_SIZE <= self.segment_size
        bytes_left = self._base + self.segment_size - self.max_offset
        if len(frame) + BLANK_SIZE > bytes_left:
            self._roll(bytes_left)
            frame = encode(self.max_offset)
        phy_offset = self.max_offset
        self._write(frame, phy_offset)
        self.max_offset += len(frame)
        if queued:
            self.queue_offsets[queue] = queue_offset + 1
        return phy_offset

    def close(self, clean: bool = True) -> None:
        """Ends writing; a clean end removes the empty segment ahead, any other leaves all as it is."""
        if self._fd < 0:
            return
        if clean and self._ahead is not None:
            self._ahead.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def _roll(self, bytes_left: int) -> None:
        # Only a start offset near a segment's end can leave less room than a blank record takes.
        if bytes_left >= BLANK_SIZE:
            self._write(blank_record(bytes_left), self.max_offset)
        self.close(clean=False)
        self._base += self.segment_size
        self.max_offset = self._base
        self._open_segment()

    def _open_segment(self) -> None:
        """Opens the segment at the base for writing; it and the one after it are made, full-size and zero."""
        here, following = (self.directory / f"{base:020d}" for base in (self._base, self._base + self.segment_size))
        self._ahead = None if following.exists() else following
        for path in (here, following):
            if not path.exists():
                path.touch()
                os.truncate(path, self.segment_size)
        self._fd = os.open(here, os.O_RDWR)

    def _write(self, data: bytes, phy_offset: int) -> None:
        os.pwrite(self._fd, data, phy_offset - self._base)
