"""The compiled pieces that look inside a frame: properties, checksums, the topic's id.

``commitlog.kernel`` calls them once a message; each stays inside the range it is given.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog import format as frame
from indexd.commitlog.bytes_kernel import find_byte, load_u8, load_u32, load_u64, same_bytes
from indexd.commitlog.crc import crc32

_0 = np.uint64(0)
_1 = np.uint64(1)
_8 = np.uint64(8)
_CRC_MASK = np.uint64(0x7FFFFFFF)
_CRC_PROPERTY_SIZE = np.uint64(frame.PROPERTY_CRC_SIZE)
_NONE = int(frame.Reason.NONE)
_BODY_CRC = int(frame.Reason.BODY_CRC)
_PROPERTY_CRC = int(frame.Reason.PROPERTY_CRC)

# Where decode_properties leaves [start, end) of each value it looks for.
KEYS, TAGS, UNIQ_KEY, DELAY, INNER_NUM, INNER_BASE = (np.uint64(2 * i) for i in range(6))
NO_SPAN = np.uint64(12)
_WORD_KEYS = np.uint64(int.from_bytes(b"KEYS", "big"))
_WORD_TAGS = np.uint64(int.from_bytes(b"TAGS", "big"))
_WORD_UNIQ_KEY = np.uint64(int.from_bytes(b"UNIQ_KEY", "big"))
_NAME_DELAY = np.frombuffer(b"DELAY", dtype=np.uint8)
_NAME_INNER_NUM = np.frombuffer(b"INNER_NUM", dtype=np.uint8)
_NAME_INNER_BASE = np.frombuffer(b"INNER_BASE", dtype=np.uint8)
_NAME_CRC = np.frombuffer(frame.PROPERTY_CRC_NAME, dtype=np.uint8)
_NAME_END = np.uint64(0x01)
_PAIR_END = np.uint64(0x02)


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
    elif size == np.uint64(8):
        if load_u64(buffer, start) == _WORD_UNIQ_KEY:
            return UNIQ_KEY
    elif size == np.uint64(5):
        if equals(buffer, start, end, _NAME_DELAY):
            return DELAY
    elif size == np.uint64(9):
        if equals(buffer, start, end, _NAME_INNER_NUM):
            return INNER_NUM
    elif size == np.uint64(10) and equals(buffer, start, end, _NAME_INNER_BASE):
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
    i = _0
    while start + i < end:
        data[first + i] = buffer[start + i]
        i += _1
    starts[count + _1] = np.int64(first + i)
    known[0] = np.int64(count + _1)
    table[slot] = np.int32(count + _1)
    return np.int64(count)
