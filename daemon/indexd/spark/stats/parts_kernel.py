"""Where the parts of a frame lie, which bucket a size falls into, and what tells two texts apart; compiled.

Frames come here as bytes that were read a second time: each length is tested against the frame's end again.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog import format as frame
from indexd.commitlog.bytes_kernel import find_byte, load_u8, load_u16, load_u32, load_word, signed_32
from indexd.commitlog.kernel import KEYS, TAGS, UNIQ_KEY

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_4 = np.uint64(4)
_8 = np.uint64(8)
_SPACE = np.uint64(0x20)
_MAGIC_V1 = np.uint64(frame.MAGIC_V1)
_MAGIC_V2 = np.uint64(frame.MAGIC_V2)
_BORN_V6 = np.uint64(frame.FLAG_BORN_HOST_V6)
_STORE_V6 = np.uint64(frame.FLAG_STORE_HOST_V6)

# What a fingerprint is of; two texts of different kinds never count as one.
OF_TOPIC = np.uint64(0x9E3779B97F4A7C15)
OF_KEY = np.uint64(0xD1B54A32D192ED03)
OF_UNIQ_KEY = np.uint64(0x8CB92BA72F3D8DD7)
OF_TAGS = np.uint64(0xABC98388FB8FAC03)
OF_HOST = np.uint64(0x589965CC75374CC3)

_MULTIPLY = np.uint64(0xFF51AFD7ED558CCD)
_FINISH = np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(32)
_PROPERTIES_MAX = np.uint64(32767)

#: Buckets of ``bucket_of``: four to a power of two, up to 2^32.
BUCKETS = 124


@numba.njit(nogil=True, cache=True, forceinline=True)
def mix(value):  # type: ignore[no-untyped-def]
    """A number spread over 64 bits: every bit of it counts in every bit of the result."""
    value = (value ^ value >> _SHIFT) * _MULTIPLY
    value = (value ^ value >> _SHIFT) * _FINISH
    return value ^ value >> _SHIFT


@numba.njit(nogil=True, cache=True)
def fingerprint(buffer, start, end, seed):  # type: ignore[no-untyped-def]
    """64 bits that stand for ``buffer[start:end]``, never 0; ``seed``: what it is of, or a topic's print with that."""
    value = mix(seed + (end - start))
    i = start
    while i + _8 <= end:
        value = mix(value ^ load_word(buffer, i))
        i += _8
    word, shift = _0, _0
    while i < end:
        word |= load_u8(buffer, i) << shift
        shift += _8
        i += _1
    value = mix(mix(value ^ word) + seed)
    return value if value != _0 else _1


@numba.njit(nogil=True, cache=True, forceinline=True)
def bucket_of(value):  # type: ignore[no-untyped-def]
    """The bucket of a number (uint64 below 2^32): each of 0 to 3, then four steps for each power of two."""
    if value < _4:
        return value
    power = _2
    while value >> (power + _1) != _0:
        power += _1
    return (power - _1) * _4 + ((value >> (power - _2)) & np.uint64(3))


@numba.njit(nogil=True, forceinline=True)
def frame_parts(buffer, pos, size, limit):  # type: ignore[no-untyped-def]
    """(is a frame, body size, topic, topic end, properties) of the frame of ``size`` bytes at ``pos``."""
    end = pos + size
    if size < np.uint64(frame.FRAME_SIZE_MIN) or end > limit or load_u32(buffer, pos) != size:
        return False, _0, _0, _0, _0
    magic = load_u32(buffer, pos + _4)
    if magic != _MAGIC_V1 and magic != _MAGIC_V2:
        return False, _0, _0, _0, _0
    flags = load_u32(buffer, pos + np.uint64(36))
    at = pos + np.uint64(84)
    if flags & _BORN_V6:
        at += np.uint64(12)
    if flags & _STORE_V6:
        at += np.uint64(12)
    if at + _4 > end:
        return False, _0, _0, _0, _0
    found = signed_32(load_u32(buffer, at))
    body_size = np.uint64(found) if found > np.int64(0) else _0
    at += _4
    if body_size > end - at or end - at - body_size < np.uint64(3):
        return False, _0, _0, _0, _0
    at += body_size
    if magic == _MAGIC_V1:
        topic_size = load_u8(buffer, at)
        topic = at + _1
    else:
        topic_size = load_u16(buffer, at)
        topic = at + _2
    # Longer properties than a frame can have would bring more keys than the tables have room for.
    if topic_size + _2 > end - topic or end - topic - topic_size - _2 > _PROPERTIES_MAX:
        return False, _0, _0, _0, _0
    return True, body_size, topic, topic + topic_size, topic + topic_size + _2


@numba.njit(nogil=True, forceinline=True)
def entry_fingerprints(buffer, spans, topic_print, want_uniq_key, want_tags, prints):  # type: ignore[no-untyped-def]
    """The fingerprints of a row's index entries, in the order of its key hashes; how many there are.

    A unique key and a key of one text are the same key: the broker's index does not tell them apart.
    """
    count = _0
    room = np.uint64(len(prints))
    if want_uniq_key and spans[UNIQ_KEY + _1] > _0:
        prints[count] = fingerprint(buffer, spans[UNIQ_KEY], spans[UNIQ_KEY + _1], topic_print ^ OF_KEY)
        count += _1
    i = spans[KEYS]
    end = spans[KEYS + _1]  # 0 without KEYS
    while i < end and count + _1 < room:
        piece = i
        i = find_byte(buffer, i, end, _SPACE)
        if i > piece:
            prints[count] = fingerprint(buffer, piece, i, topic_print ^ OF_KEY)
            count += _1
        i += _1
    if want_tags and spans[TAGS + _1] > _0:
        prints[count] = fingerprint(buffer, spans[TAGS], spans[TAGS + _1], topic_print ^ OF_TAGS)
        count += _1
    return count
