"""Many frames to arrays: the one loop that every message passes through.

``decode_frames`` walks frames in a buffer and fills the columns of a DispatchBatch, as RocketMQ's
checkMessageAndReturnSize followed by buildIndex's key splitting would (spec rocketmq-store 2.7, 4.2). Every read is
bounded by ``limit``, and inside a frame by the frame's end: a frame that lies about a length ends in an outcome.
``commitlog.decoder`` is the plain twin of this file; the same hostile inputs go through both.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from indexd.commitlog import format as frame
from indexd.commitlog.bytes_kernel import (
    find_byte,
    hash_utf8,
    key_hash,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    parse_long,
    signed_32,
)
from indexd.commitlog.fields_kernel import (
    DELAY,
    INNER_BASE,
    INNER_NUM,
    KEYS,
    TAGS,
    UNIQ_KEY,
    check_crc,
    decode_properties,
    equals,
    find_topic_id,
)
from indexd.commitlog.heads_kernel import head, store_timestamp_at


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


_0 = np.uint64(0)
_1 = np.uint64(1)
_4 = np.uint64(4)
_HOST_V4 = np.uint64(8)
_HOST_V6 = np.uint64(20)
_MAGIC_V1 = np.uint64(frame.MAGIC_V1)
_BORN_V6 = np.uint64(frame.FLAG_BORN_HOST_V6)
_STORE_V6 = np.uint64(frame.FLAG_STORE_HOST_V6)

_MESSAGE = int(frame.Outcome.MESSAGE)
_CORRUPT = int(frame.Outcome.CORRUPT)
_FULL = int(frame.Outcome.BATCH_FULL)

_NONE = int(frame.Reason.NONE)
_LENGTHS = int(frame.Reason.LENGTHS_DISAGREE)
_DELAY = int(frame.Reason.DELAY_LEVEL)
_INNER = int(frame.Reason.INNER_BATCH)

_TOPIC_DELAY = np.frombuffer(frame.DELAY_TOPIC.encode(), dtype=np.uint8)
_LOW_32 = np.uint64(0xFFFFFFFF)
_HASH = np.uint64(0x23)
_UPPER_T = np.uint64(0x54)
_SPACE = np.uint64(0x20)


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
    p = pos + np.uint64(68) + born + stored
    if p + _4 > end:
        return False, _0, _0, _0, _0, _0
    body_size = signed_32(load_u32(buffer, p))
    body = p + _4
    if body_size > np.int64(0):
        if np.uint64(body_size) > end - body:
            return False, _0, _0, _0, _0, _0
        p = body + np.uint64(body_size)
    else:
        p = body
    body_end = p
    if magic == _MAGIC_V1:
        if p + _1 > end:
            return False, _0, _0, _0, _0, _0
        topic_size = load_u8(buffer, p)
        topic = p + _1
        negative = topic_size >= np.uint64(0x80)
    else:
        if p + np.uint64(2) > end:
            return False, _0, _0, _0, _0, _0
        topic_size = load_u16(buffer, p)
        topic = p + np.uint64(2)
        negative = topic_size >= np.uint64(0x8000)
    if negative or topic_size + np.uint64(2) > end - topic:
        return False, _0, _0, _0, _0, _0
    topic_end = topic + topic_size
    size = load_u16(buffer, topic_end)
    properties = topic_end + np.uint64(2)
    if size < np.uint64(0x8000):
        return properties + size == end, body, body_end, topic, topic_end, properties
    return properties == end, body, body_end, topic, topic_end, properties


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
