"""One message, whole: by physical offset or by the offset message id that a broker gives out (spec 2.2, 9.7).

Messages as a broker sends them: whole frames, as they stand in the log, found by its rules (spec 5.5, 9.3-9.5, 9.8).

Every frame is checked before it is given out: magic, own physical offset, lengths, CRCs. A broker checks none.
"""

from __future__ import annotations

import base64
import ipaddress
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from indexd.commitlog.decoder import Message
from indexd.commitlog.format import Corrupt, EndOfFile, NotYetWritten
from indexd.consumequeue.reader import ConsumeQueueReader
from indexd.errors import CorruptDataError, DiskError, UsageError
from indexd.query.answer import KeyQuery, LastUpdate
from indexd.query.by_key import hash_of, query_exact, query_offsets
from indexd.query.by_queue import FOUND, OffsetAnswer, OffsetQuery, query_offset
from indexd.query.coverage import ABSENT, Coverage, expired_in_words, gaps_in_words
from indexd.query.log import LogView
from indexd.query.source import QueryIndex, open_queue

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


T = TypeVar("T")
NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
MESSAGE_WAS_REMOVING = "MESSAGE_WAS_REMOVING"
# maxTransferCountOnMessageInMemory: what a broker hands out in one pull.
_PULL_MAX_NUM = 32
_ROUNDS = 3
# Why a message that the index names is not in an answer.
_EXPIRED, _UNREADABLE, _TOO_LONG = "expired", "unreadable", "too long for an answer"
# A queue's oldest file may be removed between two calls; a second look knows it.
_LOOKS_MAX = 2


class KeyRequest(NamedTuple):
    """QUERY_MESSAGE as it was sent: times in ms, both inclusive; ``index_type`` K, U, T or None."""

    topic: str
    key: str
    max_num: int
    begin: int
    end: int
    is_unique: bool = False
    index_type: str | None = None

    def to_query(self, default_query_max_num: int) -> KeyQuery:
        """What a broker asks its index: for a unique key as many as it says, whatever was sent. UsageError."""
        if self.is_unique:
            return KeyQuery(self.topic, self.key, default_query_max_num, self.begin, self.end, "U")
        if self.max_num < 0:
            raise UsageError(f"maxNum has to be at least 0, not {self.max_num}", "")
        return KeyQuery(self.topic, self.key, self.max_num, self.begin, self.end, self.index_type or "K")


class FoundFrames(NamedTuple):
    """``frames`` ascending. ``remark``: why there are none, or what was left out of them; None when that is all.

    ``last_update``: zeros when the index named nothing. ``is_covered``: the index speaks for the whole log, and
    everything that it named could be read.
    """

    frames: tuple[bytes, ...]
    last_update: LastUpdate
    is_covered: bool
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class PulledFrames:
    """``status`` is RocketMQ's GetMessageStatus; without FOUND there are no frames. Offsets count messages."""

    status: str
    frames: tuple[bytes, ...]
    next_begin_offset: int
    min_offset: int
    max_offset: int
    is_covered: bool


def query_message(index: QueryIndex, request: KeyRequest, size_max: int) -> FoundFrames:
    """The broker's own answer, collisions, repeats and misses included, of at most ``size_max`` bytes (spec 9.5).

    As it does, it asks again with an earlier end, twice at most, while nothing that the index names can be read.
    """
    query = request.to_query(index.config.query.default_query_max_num)
    look = index.look()
    max_num = min(query.max_num, index.config.query.max_msgs_num_batch)
    if index.memory is not None:
        key_hash = hash_of(look, query)
        in_memory = index.memory.find(look, key_hash, max_num, query.begin, query.end, size_max)
        if in_memory is not None:
            remark = None if in_memory[0] else _why_nothing(look.coverage)
            return FoundFrames(*in_memory, look.coverage.complete, remark)
    last_update, end = LastUpdate(), query.end
    frames = _Frames(index.log, size_max)
    for _ in range(_ROUNDS):
        offsets, found_update = query_offsets(index, look, query, max_num, end)
        if not offsets:
            break
        last_update = found_update
        frames.add(sorted(offsets))
        if frames.found:
            break
        oldest = index.log.at(min(offsets))
        if not isinstance(oldest, Message) or oldest.store_timestamp == end:
            break  # the same would be asked once more
        end = oldest.store_timestamp
        if end < query.begin:
            break
    remark = frames.left_out() if frames.named else _why_nothing(look.coverage)
    return FoundFrames(tuple(frames.found), last_update, look.coverage.complete and not frames.unknown, remark)


def query_message_exact(index: QueryIndex, request: KeyRequest, size_max: int) -> FoundFrames:
    """Every message that matches, none that does not, each once; of more than may be asked for, the newest."""
    query = request.to_query(index.config.query.default_query_max_num)
    if not request.is_unique and request.index_type is None:
        query = query._replace(index_type=None)
    answer = query_exact(index, query._replace(max_num=min(query.max_num, index.config.query.query_max_num)))
    frames = _Frames(index.log, size_max)
    frames.add(sorted(hit.phy_offset for hit in answer.hits))
    remark, last_update = frames.left_out(), LastUpdate()
    if answer.hits:
        last_update = _last_update(index)
    else:
        why = answer.why or f"no answer: cut off by {answer.truncated}"
        remark = "; ".join(filter(None, (why, expired_in_words(answer.coverage))))
    is_covered = answer.why == ABSENT and not frames.unknown
    return FoundFrames(tuple(frames.found), last_update, is_covered, remark)


def view_message(index: QueryIndex, phy_offset: int, size_max: int) -> bytes | NotFound:
    """The frame at a physical offset. A broker sends whatever stands there."""
    index.look()
    found = index.log.frame(phy_offset, size_max)
    if isinstance(found, bytes):
        return found
    if isinstance(found, NotYetWritten) and found.needed > size_max:
        return NotFound(
            f"the message at physical offset {phy_offset} has {found.needed} bytes, and an answer {size_max} at most"
        )
    return not_found(index.log, phy_offset, found)


def pull_message(
    index: QueryIndex, topic: str, queue_id: int, queue_offset: int, max_num: int, size_max: int
) -> PulledFrames:
    """Messages of a queue from ``queue_offset`` on, one at least if there is one, and never waited for."""
    limit = min(max(max_num, 1), _PULL_MAX_NUM, index.config.query.query_max_num)
    answer = query_offset(index, OffsetQuery(topic, queue_id, queue_offset, limit))
    bounds = answer.min_offset, answer.max_offset
    is_covered = answer.coverage.complete
    if answer.status != FOUND:
        # Where a broker sends whoever asks outside of a queue.
        next_offset = min(max(queue_offset, answer.min_offset), answer.max_offset)
        return PulledFrames(answer.status, (), next_offset, *bounds, is_covered)
    frames, next_offset = _Frames(index.log, size_max), answer.next_offset
    for hit in answer.hits:
        if hit.problem is None:
            frames.add([hit.unit.phy_offset])
        if frames.found and frames.is_too_long(hit.unit.phy_offset):
            next_offset = hit.queue_offset
            break
    status = FOUND if frames.found else _removed(answer)
    return PulledFrames(status, tuple(frames.found), next_offset, *bounds, is_covered)


def queue_bounds(index: QueryIndex, topic: str, queue_id: int) -> tuple[int, int]:
    """The first message of a queue that is still in the log, and behind the last one; 0 and 0 without such a queue.

    UsageError if no ConsumeQueues are built.
    """
    return _of_queue(index, topic, queue_id, (0, 0), lambda queue: (queue.min_offset, queue.max_offset))


def earliest_time(index: QueryIndex, topic: str, queue_id: int) -> int:
    """The store time of the first message that is still in the log, in ms; -1 where there is none."""

    def ask(queue: ConsumeQueueReader) -> int:
        if queue.min_offset >= queue.max_offset:
            return -1
        unit = queue.unit(queue.min_offset)
        return index.log.store_timestamp(unit.phy_offset, unit.size)

    return _of_queue(index, topic, queue_id, -1, ask)


class _Frames:
    """Frames that are being gathered, and what was left out of them."""

    def __init__(self, log: LogView, size_max: int) -> None:
        self._log, self._size_max, self._left = log, size_max, size_max
        self.found: list[bytes] = []
        # Their offsets: a broker's rounds name the same message more than once.
        self.named: set[int] = set()
        # Of those that are not found: why.
        self._missed: dict[int, str] = {}

    @property
    def unknown(self) -> int:
        """How many were named and are no message: whether they were asked for nobody can tell."""
        return sum(why is not _TOO_LONG for why in self._missed.values())

    def is_too_long(self, offset: int) -> bool:
        """Whether a message is there that did not fit in any more."""
        return self._missed.get(offset) is _TOO_LONG

    def add(self, offsets: Sequence[int]) -> None:
        """The frames at these physical offsets, each as often as it is named."""
        found, read = self.found, self._log.frame
        self.named.update(offsets)
        for offset in offsets:
            frame = read(offset, self._left)
            if isinstance(frame, bytes):
                found.append(frame)
                self._left -= len(frame)
            elif isinstance(frame, NotYetWritten) and frame.needed > self._left:
                self._missed[offset] = _TOO_LONG
            else:
                has_expired = frame is None and self._log.has_expired(offset)
                self._missed[offset] = _EXPIRED if has_expired else _UNREADABLE

    def left_out(self) -> str | None:
        """Which of the messages that were named are not among those found; None if all are."""
        if not self._missed:
            return None
        counts = Counter(self._missed.values())
        left = [f"{counts[why]} {why}" for why in (_EXPIRED, _UNREADABLE) if why in counts]
        if _TOO_LONG in counts:
            left.append(f"{counts[_TOO_LONG]} {_TOO_LONG} of {self._size_max} bytes")
        return f"of {len(self.named)} messages that the index names: {', '.join(left)}"


def _removed(answer: OffsetAnswer) -> str:
    return MESSAGE_WAS_REMOVING if answer.expired else NO_MATCHED_MESSAGE


def _why_nothing(coverage: Coverage) -> str:
    # In a few words: how far behind the index is would have to be measured.
    words = ["the index names no such message", *gaps_in_words(coverage, None)]
    expired = expired_in_words(coverage)
    return "; ".join(words if expired is None else [*words, expired])


def _last_update(index: QueryIndex) -> LastUpdate:
    for reader, _ in index.newest_first(index.look()):
        header = reader.header()
        return LastUpdate(header.end_timestamp, header.end_phy_offset)
    return LastUpdate()


def _of_queue(
    index: QueryIndex, topic: str, queue_id: int, without: T, question: Callable[[ConsumeQueueReader], T]
) -> T:
    for left in reversed(range(_LOOKS_MAX)):
        try:
            queue = open_queue(index, index.look(), topic, queue_id)
            if queue is None:
                return without
            with queue:
                return question(queue)
        except DiskError as error:
            if not error.is_missing:
                raise
            if left == 0:
                raise CorruptDataError(f"queue file {error.path} is missing") from error
    raise AssertionError("unreachable")
