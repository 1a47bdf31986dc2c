"""Decodes many frames to arrays: the one compiled loop that every message passes through.

``decode_frames`` walks frames in a buffer and fills the columns of a DispatchBatch, as RocketMQ's
checkMessageAndReturnSize followed by buildIndex's key splitting would (spec rocketmq-store 2.7, 4.2). Every read is
bounded by ``limit``, and inside a frame by the frame's end: a frame that lies about a length ends in an outcome.
``commitlog.decoder`` is the plain twin of this file; the same hostile inputs go through both.

Before it stand its parts (properties, checksums, the topic's id), and what looks at heads alone: what stands at a
position, the last head, the next one behind damage.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from indexd.commitlog import format as frame
from indexd.commitlog.bytes_kernel import (
    crc32,
    find_byte,
    hash_utf8,
    key_hash,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    parse_long,
    same_bytes,
    signed_32,
)

_0, _1, _4, _8, _TIMESTAMP_END = (np.uint64(number) for number in (0, 1, 4, 8, frame.STAMPED_SIZE))
_CRC_MASK, _LOW_32 = np.uint64(0x7FFFFFFF), np.uint64(0xFFFFFFFF)
_MAGIC_V1, _MAGIC_V2, _MAGIC_BLANK = (np.uint64(magic) for magic in (frame.MAGIC_V1, frame.MAGIC_V2, frame.MAGIC_BLANK))
_HEAD_SIZE, _FRAME_SIZE_MIN, _CRC_PROPERTY_SIZE = (
    np.uint64(size) for size in (frame.HEAD_SIZE, frame.FRAME_SIZE_MIN, frame.PROPERTY_CRC_SIZE)
)
_BORN_V6, _STORE_V6 = np.uint64(frame.FLAG_BORN_HOST_V6), np.uint64(frame.FLAG_STORE_HOST_V6)
_HOST_V4, _HOST_V6 = np.uint64(8), np.uint64(20)
# In the order of format.Outcome and format.Reason.
_MESSAGE, _END_OF_FILE, _NOT_YET, _CORRUPT, _FULL = (int(outcome) for outcome in frame.Outcome)
(
    _NONE, _BAD_MAGIC, _BAD_TOTAL, _WRONG_OFFSET, _LENGTHS, _BODY_CRC, _PROPERTY_CRC,
    _DELAY, _INNER, _, _DLEDGER, _, _BAD_BLANK, _, _,
) = (int(reason) for reason in frame.Reason)  # fmt: skip

# Where decode_properties leaves [start, end) of each value it looks for.
KEYS, TAGS, UNIQ_KEY, DELAY, INNER_NUM, INNER_BASE = (np.uint64(2 * i) for i in range(6))
NO_SPAN = np.uint64(12)
_WORD_KEYS, _WORD_TAGS, _WORD_UNIQ_KEY = (
    np.uint64(int.from_bytes(name, "big")) for name in (b"KEYS", b"TAGS", b"UNIQ_KEY")
)
_NAME_DELAY, _NAME_INNER_NUM, _NAME_INNER_BASE, _NAME_CRC, _TOPIC_DELAY = (
    np.frombuffer(name, dtype=np.uint8)
    for name in (b"DELAY", b"INNER_NUM", b"INNER_BASE", frame.PROPERTY_CRC_NAME, frame.DELAY_TOPIC.encode())
)
_NAME_END, _PAIR_END, _SPACE, _HASH, _UPPER_T = (np.uint64(ord(mark)) for mark in "\x01\x02 #T")


@numba.njit(nogil=True, forceinline=True)
def equals(buffer, start, end, text):  # type: ignore[no-untyped-def]
    """Whether ``buffer[start:end]`` is ``text`` (uint8)."""
    return end - start == np.uint64(len(text)) and same_bytes(buffer, start, text, _0, end - start)


@numba.njit(nogil=True, forceinline=True)
def _span_of_name(buffer, start, end):  # type: ignore[no-untyped-def]
    # Which of the wanted properties a name is, by whole words; its length decides almost always.
    size = end - start
    if size == np.uint64(4):
        word = load_u32(buffer, start)
        if word == _WORD_KEYS:
            return KEYS
        if word == _WORD_TAGS:
            return TAGS
    if size == np.uint64(8) and load_u64(buffer, start) == _WORD_UNIQ_KEY:
        return UNIQ_KEY
    if equals(buffer, start, end, _NAME_DELAY):
        return DELAY
    if equals(buffer, start, end, _NAME_INNER_NUM):
        return INNER_NUM
    if equals(buffer, start, end, _NAME_INNER_BASE):
        return INNER_BASE
    return NO_SPAN


@numba.njit(nogil=True, forceinline=True)
def decode_properties(buffer, start, end, spans):  # type: ignore[no-untyped-def]
    """Find the values of the six properties an index needs (spec 2.4); an end of 0 means absent.

    Pairs without a name or a value are dropped and the last of two with one name wins, as RocketMQ does it.
    """
    spans[KEYS + _1] = spans[TAGS + _1] = spans[UNIQ_KEY + _1] = _0
    spans[DELAY + _1] = spans[INNER_NUM + _1] = spans[INNER_BASE + _1] = _0
    i = start
    while i < end:
        pair_end = find_byte(buffer, i, end, _PAIR_END)
        name_end = find_byte(buffer, i, pair_end, _NAME_END)
        if name_end > i and name_end + _1 < pair_end:
            span = _span_of_name(buffer, i, name_end)
            if span < NO_SPAN:
                spans[span] = name_end + _1
                spans[span + _1] = pair_end
        i = pair_end + _1


@numba.njit(nogil=True)
def check_crc(buffer, pos, end, body, body_end, properties, tables):  # type: ignore[no-untyped-def]
    """The reason why body CRC or property CRC deny the frame at ``pos``, or NONE (spec 2.5)."""
    if body_end > body:
        stored = load_u32(buffer, pos + _8)
        if np.uint64(crc32(buffer, body, body_end, tables)) & _CRC_MASK != stored:
            return _BODY_CRC
    if end - properties < _CRC_PROPERTY_SIZE:
        return _NONE
    mark = end - _CRC_PROPERTY_SIZE
    name_end = mark + np.uint64(len(_NAME_CRC))
    if not equals(buffer, mark, name_end, _NAME_CRC) or load_u8(buffer, name_end) != _NAME_END:
        return _NONE
    if load_u8(buffer, end - _1) != _PAIR_END:
        return _PROPERTY_CRC
    # Ten digits, the least significant first (spec 2.5).
    stored = _0
    i = end - np.uint64(2)
    while i > name_end:
        digit = load_u8(buffer, i)
        if digit < np.uint64(0x30) or digit > np.uint64(0x39):
            return _PROPERTY_CRC
        stored = stored * np.uint64(10) + (digit - np.uint64(0x30))
        i -= _1
    if np.uint64(crc32(buffer, pos, mark, tables)) & _CRC_MASK != stored:
        return _PROPERTY_CRC
    return _NONE


@numba.njit(nogil=True, forceinline=True)
def find_topic_id(buffer, start, end, java_hash, table, starts, data, known):  # type: ignore[no-untyped-def]
    """The id of a topic, entering it when it is new; -1 when the arrays have no room for it."""
    mask = np.uint64(len(table) - 1)
    slot = (java_hash ^ java_hash >> np.uint64(15)) & mask
    while table[slot] != 0:
        topic = np.uint64(table[slot] - 1)
        first = np.uint64(starts[topic])
        size = np.uint64(starts[topic + _1]) - first
        if size == end - start and same_bytes(buffer, start, data, first, size):
            return np.int64(topic)
        slot = (slot + _1) & mask
    return _enter_topic(buffer, start, end, slot, table, starts, data, known)


@numba.njit(nogil=True)
def _enter_topic(buffer, start, end, slot, table, starts, data, known):  # type: ignore[no-untyped-def]
    count = np.uint64(known[0])
    first = np.uint64(starts[count])
    if (count + _1) * np.uint64(2) > np.uint64(len(table) - 1) or first + (end - start) > np.uint64(len(data)):
        return np.int64(-1)
    data[first : first + (end - start)] = buffer[start:end]
    starts[count + _1] = np.int64(first + (end - start))
    known[0] = np.int64(count + _1)
    table[slot] = np.int32(count + _1)
    return np.int64(count)


@numba.njit(nogil=True, forceinline=True)
def head(buffer, pos, limit, base, segment_end, frame_size_max):  # type: ignore[no-untyped-def]
    """(outcome, reason, total size): what the fixed fields say, before anything behind them is looked at."""
    left = limit - pos
    if left < _8:
        return _NOT_YET, _NONE, _0
    total = load_u32(buffer, pos)
    magic = load_u32(buffer, pos + _4)
    if magic == _MAGIC_BLANK:
        if base + pos + total != segment_end:
            return _CORRUPT, _BAD_BLANK, _0
        return _END_OF_FILE, _NONE, total
    if magic == _0:
        return _NOT_YET, _NONE, _0
    if magic != _MAGIC_V1 and magic != _MAGIC_V2:
        if total == _1 and left >= np.uint64(56):
            inner = load_u32(buffer, pos + np.uint64(52))
            if inner == _MAGIC_V1 or inner == _MAGIC_V2:
                return _CORRUPT, _DLEDGER, _0
        return _CORRUPT, _BAD_MAGIC, _0
    if total < _FRAME_SIZE_MIN or total > frame_size_max or base + pos + total > segment_end:
        return _CORRUPT, _BAD_TOTAL, _0
    if left < _HEAD_SIZE:
        return _NOT_YET, _NONE, total
    if load_u64(buffer, pos + np.uint64(28)) != base + pos:
        return _CORRUPT, _WRONG_OFFSET, total
    if left < total:
        return _NOT_YET, _NONE, total
    return _MESSAGE, _NONE, total


@numba.njit(nogil=True, cache=True, forceinline=True)
def store_timestamp_at(buffer, pos):  # type: ignore[no-untyped-def]
    """The store timestamp of the frame at ``pos``, of which at least 76 bytes are there."""
    born = np.uint64(20) if load_u32(buffer, pos + np.uint64(36)) & _BORN_V6 else np.uint64(8)
    return np.int64(load_u64(buffer, pos + np.uint64(48) + born))


@numba.njit(nogil=True, cache=True)
def last_head(buffer, start, limit, base, segment_end, frame_size_max):  # type: ignore[no-untyped-def]
    """The position of the last frame head that is reached from ``start`` by total sizes, times never falling.

    Only heads are looked at. A head there proves that the writer is done with every frame before it: bytes of those
    frames that are read AFTER this walk are final (architecture, decision 3). What an earlier, longer log left behind
    is older than the frame before it, and proves nothing.
    """
    pos = start
    last = start
    newest = np.int64(-(1 << 63))
    while True:
        outcome, _, total = head(buffer, pos, limit, base, segment_end, frame_size_max)
        begun = outcome == _NOT_YET and total > _0 and limit - pos >= _TIMESTAMP_END
        if outcome != _MESSAGE and not begun:
            return last
        timestamp = store_timestamp_at(buffer, pos)
        if timestamp < newest:
            return last
        newest = timestamp
        last = pos
        if begun:
            return last
        pos += total


@numba.njit(nogil=True, cache=True)
def find_frame(buffer, start, limit, base):  # type: ignore[no-untyped-def]
    """The first position in ``[start, limit)`` with a message's magic and its own physical offset; else ``limit``."""
    pos = start
    while pos + _HEAD_SIZE <= limit:
        magic = load_u32(buffer, pos + _4)
        if (magic == _MAGIC_V1 or magic == _MAGIC_V2) and load_u64(buffer, pos + np.uint64(28)) == base + pos:
            return pos
        pos += _1
    return limit


@numba.njit(nogil=True, cache=True)
def is_enclosed(buffer, limit, base, segment_end, offset):  # type: ignore[no-untyped-def]
    """Whether anything in ``buffer[:limit]``, all of it before ``offset``, claims to reach beyond ``offset``.

    That is a message with its own physical offset and such a total size, or a blank record, which reaches to the end of
    its segment. Every byte is looked at: what stands inside a body may look like a frame, too.
    """
    pos = _0
    while pos + _8 <= limit:
        magic = load_u32(buffer, pos + _4)
        if magic == _MAGIC_BLANK and base + pos + load_u32(buffer, pos) == segment_end:
            return True
        if (
            (magic == _MAGIC_V1 or magic == _MAGIC_V2)
            and base + pos + load_u32(buffer, pos) > offset
            and (pos + _HEAD_SIZE > limit or load_u64(buffer, pos + np.uint64(28)) == base + pos)
        ):
            return True
        pos += _1
    return False


@numba.njit(nogil=True, cache=True)
def walk_heads(buffer, limit, base, segment_end, frame_size_max, offset):  # type: ignore[no-untyped-def]
    """(position, whether it goes on): along heads from position 0 until one stands at or behind ``offset``.

    It does not go on where no message's head follows; otherwise the position is a head's, or lies behind ``limit``.
    """
    pos = _0
    while base + pos < offset:
        if pos + _HEAD_SIZE > limit:
            return pos, True
        outcome, _, total = head(buffer, pos, limit, base, segment_end, frame_size_max)
        if total == _0 or outcome == _CORRUPT or outcome == _END_OF_FILE:
            return pos, False
        pos += total
    return pos, True


class Columns(NamedTuple):
    """The arrays of a batch: one row a message; ``key_hash[key_start[r]:key_start[r + 1]]`` are row r's keys."""

    phy_offset: NDArray[np.int64]
    size: NDArray[np.int32]
    store_timestamp: NDArray[np.int64]
    queue_offset: NDArray[np.int64]
    batch_size: NDArray[np.int32]
    queue_id: NDArray[np.int32]
    topic_id: NDArray[np.int32]
    tags_code: NDArray[np.int64]
    sys_flag: NDArray[np.int32]
    key_start: NDArray[np.int64]
    key_hash: NDArray[np.uint32]


class TopicArrays(NamedTuple):
    """The topics met so far: an open hash table of ids (0 = empty, else id + 1) over their UTF-8 bytes."""

    table: NDArray[np.int32]
    start: NDArray[np.int64]
    data: NDArray[np.uint8]
    known: NDArray[np.int64]


class Rules(NamedTuple):
    """What a decode takes besides the bytes."""

    check_crc: bool
    want_uniq_key: bool
    want_tags: bool
    #: Fill the columns that a consume queue needs; the key index does without them.
    want_queue: bool
    frame_size_max: np.uint64
    delay_ms: NDArray[np.int64]
    crc_tables: NDArray[np.uint32]


@numba.njit(nogil=True, forceinline=True)
def _put_keys(buffer, spans, topic_hash, want_uniq_key, want_tags, key_hashes, key):  # type: ignore[no-untyped-def]
    # The row's key hashes in the order RocketMQ indexes them: UNIQ_KEY, the pieces of KEYS, TAGS (spec 4.2, 4.3).
    prefix = topic_hash * np.uint64(31) + _HASH
    if want_uniq_key and spans[UNIQ_KEY + _1] > _0:
        key_hashes[key] = key_hash(hash_utf8(buffer, spans[UNIQ_KEY], spans[UNIQ_KEY + _1], prefix))
        key += _1
    i = spans[KEYS]
    end = spans[KEYS + _1]  # 0 without KEYS
    while i < end:
        piece = i
        i = find_byte(buffer, i, end, _SPACE)
        if i > piece:
            key_hashes[key] = key_hash(hash_utf8(buffer, piece, i, prefix))
            key += _1
        i += _1
    if want_tags and spans[TAGS + _1] > _0:
        prefix = (prefix * np.uint64(31) + _UPPER_T) * np.uint64(31) + _HASH
        key_hashes[key] = key_hash(hash_utf8(buffer, spans[TAGS], spans[TAGS + _1], prefix))
        key += _1
    return key


@numba.njit(nogil=True, forceinline=True)
def walk(buffer, pos, end, magic, flags):  # type: ignore[no-untyped-def]
    """(lengths agree, body, body end, topic, topic end, properties): the variable part, each step inside the frame."""
    born = _HOST_V6 if flags & _BORN_V6 else _HOST_V4
    stored = _HOST_V6 if flags & _STORE_V6 else _HOST_V4
    body = pos + np.uint64(72) + born + stored
    if body > end:
        return False, _0, _0, _0, _0, _0
    body_size = np.uint64(max(signed_32(load_u32(buffer, body - _4)), np.int64(0)))
    width = _1 if magic == _MAGIC_V1 else np.uint64(2)
    if body_size + width > end - body:
        return False, _0, _0, _0, _0, _0
    body_end = body + body_size
    topic = body_end + width
    topic_size = load_u8(buffer, body_end) if width == _1 else load_u16(buffer, body_end)
    negative = topic_size >> (_8 * width - _1) != _0
    if negative or topic_size + np.uint64(2) > end - topic:
        return False, _0, _0, _0, _0, _0
    topic_end = topic + topic_size
    size = load_u16(buffer, topic_end)
    properties = topic_end + np.uint64(2)
    size = size if size < np.uint64(0x8000) else _0
    return properties + size == end, body, body_end, topic, topic_end, properties


@numba.njit(nogil=True, forceinline=True)
def _tags_code(buffer, spans, topic, topic_end, store_timestamp, delay_ms, want_hash):  # type: ignore[no-untyped-def]
    # (is valid, tags code): the tag's hash, or the deliver time of a delayed message (spec 2.7, step 7).
    code = np.int64(0)
    if want_hash and spans[TAGS + _1] > _0:
        code = signed_32(hash_utf8(buffer, spans[TAGS], spans[TAGS + _1], _0))
    if spans[DELAY + _1] > _0 and equals(buffer, topic, topic_end, _TOPIC_DELAY):
        valid, level = parse_long(buffer, spans[DELAY], spans[DELAY + _1])
        if not valid or level > np.int64(0x7FFFFFFF) or level < np.int64(-0x80000000):
            return False, code
        if level > np.int64(len(delay_ms)):
            level = np.int64(len(delay_ms))
        if level > np.int64(0):
            # Unsigned, because it wraps as Java's does; compiled, an overflow of signed numbers means anything.
            code = np.int64(np.uint64(store_timestamp) + np.uint64(delay_ms[np.uint64(level) - _1]))
    return True, code


@numba.njit(nogil=True, forceinline=True)
def _queue_place(buffer, pos, spans):  # type: ignore[no-untyped-def]
    # (is valid, queue offset, batch size): an inner batch brings its own in its properties (spec 2.7, step 9).
    queue_offset = np.int64(load_u64(buffer, pos + np.uint64(20)))
    batch_size = np.int64(1)
    if spans[INNER_NUM + _1] > _0 and spans[INNER_BASE + _1] > _0:
        is_base, queue_offset = parse_long(buffer, spans[INNER_BASE], spans[INNER_BASE + _1])
        is_size, batch_size = parse_long(buffer, spans[INNER_NUM], spans[INNER_NUM + _1])
        if not (is_base and is_size) or batch_size > np.int64(32767) or batch_size < np.int64(-32768):
            return False, queue_offset, batch_size
    return True, queue_offset, batch_size


@numba.njit(nogil=True, forceinline=True)
def _open_frame(buffer, pos, end, flags, check, crc_tables):  # type: ignore[no-untyped-def]
    # (reason, topic, topic end, properties) of the frame at [pos, end), its checksums tested if asked.
    magic = load_u32(buffer, pos + _4)
    agree, body, body_end, topic, topic_end, properties = walk(buffer, pos, end, magic, flags)
    if not agree:
        return _LENGTHS, _0, _0, _0
    reason = _NONE
    if check:
        reason = check_crc(buffer, pos, end, body, body_end, properties, crc_tables)
    return reason, topic, topic_end, properties


@numba.njit(nogil=True, cache=True)
def decode_frames(buffer, start, limit, base, segment_end, rules, columns, topics):  # type: ignore[no-untyped-def]
    """Frames of ``buffer[start:limit]`` into ``columns`` until something other than a message stands there.

    ``buffer`` uint8 with its byte 0 at physical offset ``base``; ``start``, ``limit``, ``base`` and ``segment_end``
    (the physical offset behind the segment) uint64. Returns (outcome, reason, position of the first frame that was
    not taken, its total size or 0, rows, keys). BATCH_FULL: call again with fresh columns, or bigger topic arrays.
    """
    # Taken out of their tuples once: a field of a tuple costs two reference counts at every access.
    phy_offsets, sizes, store_timestamps = columns.phy_offset, columns.size, columns.store_timestamp
    queue_offsets, batch_sizes, queue_ids = columns.queue_offset, columns.batch_size, columns.queue_id
    topic_ids, tags_codes, sys_flags = columns.topic_id, columns.tags_code, columns.sys_flag
    key_starts, key_hashes = columns.key_start, columns.key_hash
    topic_table, topic_starts, topic_data, topics_known = topics.table, topics.start, topics.data, topics.known
    check, want_uniq_key, want_tags = rules.check_crc, rules.want_uniq_key, rules.want_tags
    want_queue = rules.want_queue
    delay_ms, crc_tables, frame_size_max = rules.delay_ms, rules.crc_tables, rules.frame_size_max
    rows, keys, pos = _0, _0, start
    rows_max, keys_max = np.uint64(len(phy_offsets)), np.uint64(len(key_hashes))
    spans = np.zeros(12, dtype=np.uint64)
    key_starts[0] = 0
    while True:
        outcome, reason, total = head(buffer, pos, limit, base, segment_end, frame_size_max)
        if outcome != _MESSAGE:
            return outcome, reason, pos, total, rows, keys
        end = pos + total
        flags = load_u32(buffer, pos + np.uint64(36))
        reason, topic, topic_end, properties = _open_frame(buffer, pos, end, flags, check, crc_tables)
        if reason != _NONE:
            return _CORRUPT, reason, pos, total, rows, keys
        # A key takes at least two bytes of KEYS, and UNIQ_KEY and TAGS one entry each.
        if rows >= rows_max or keys + (end - properties) // np.uint64(2) + np.uint64(3) > keys_max:
            return _FULL, _NONE, pos, total, rows, keys
        decode_properties(buffer, properties, end, spans)
        store_timestamp = store_timestamp_at(buffer, pos)
        valid, code = _tags_code(buffer, spans, topic, topic_end, store_timestamp, delay_ms, want_queue)
        if not valid:
            return _CORRUPT, _DELAY, pos, total, rows, keys
        valid, queue_offset, batch_size = _queue_place(buffer, pos, spans)
        if not valid:
            return _CORRUPT, _INNER, pos, total, rows, keys
        topic_hash = hash_utf8(buffer, topic, topic_end, _0)
        if want_queue:
            topic_id = find_topic_id(
                buffer, topic, topic_end, topic_hash & _LOW_32, topic_table, topic_starts, topic_data, topics_known
            )
            if topic_id < np.int64(0):
                return _FULL, _NONE, pos, total, rows, keys
            sizes[rows] = np.int32(total)
            queue_offsets[rows] = queue_offset
            batch_sizes[rows] = np.int32(batch_size)
            queue_ids[rows] = np.int32(signed_32(load_u32(buffer, pos + np.uint64(12))))
            topic_ids[rows] = np.int32(topic_id)
            tags_codes[rows] = code
        phy_offsets[rows] = np.int64(base + pos)
        store_timestamps[rows] = store_timestamp
        sys_flags[rows] = np.int32(signed_32(flags))
        keys = _put_keys(buffer, spans, topic_hash, want_uniq_key, want_tags, key_hashes, keys)
        rows += _1
        key_starts[rows] = np.int64(keys)
        pos = end
