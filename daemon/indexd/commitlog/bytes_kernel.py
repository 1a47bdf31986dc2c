"""The smallest compiled pieces: big-endian loads, Java's string hash and number parsing over UTF-8 bytes, CRC-32.

Every position is uint64: a signed index adds a wrap-around test to each access. Integers of two types are never mixed:
the result would silently become float64 or int64. Callers vouch for the bounds; no function here reads outside the
range it is given.

CRC-32 takes eight bytes a step by eight tables, for any reflected polynomial, zlib's among them: a compiled loop cannot
call zlib, and a call per message from Python would cost more than the sum itself.
"""

from __future__ import annotations

import sys
import unicodedata

import numba
import numpy as np
from numpy.typing import NDArray

if sys.byteorder != "little":  # the swap below assumes it, and every machine that runs RocketMQ has it
    raise ImportError("indexd runs on little-endian machines only")

_1, _2, _3, _4, _8, _TEN = (np.uint64(number) for number in (1, 2, 3, 4, 8, 10))
_31, _31_2, _31_4, _31_8 = (np.uint64(31**power % (1 << 64)) for power in (1, 2, 4, 8))
_EACH_1, _EACH_80 = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_EVEN_BYTES, _EVEN_PAIRS = np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
_LOW_32, _SIGN_32, _TWO_32 = np.uint64(0xFFFFFFFF), np.uint64(0x80000000), np.uint64(1 << 32)
_LONG_MAX = np.uint64((1 << 63) - 1)
_ASCII_END, _REPLACEMENT = np.uint64(0x80), np.uint64(0xFFFD)
# The zeros of every other script whose digits fit a UTF-16 unit; nine digits follow each.
_ZEROS = np.array([c for c in range(0x80, 0x10000) if unicodedata.decimal(chr(c), -1) == 0], dtype=np.uint64)


@numba.njit(inline="always")
def load_u8(buffer, i):  # type: ignore[no-untyped-def]
    """One byte as uint64."""
    return np.uint64(buffer[i])


@numba.njit(inline="always")
def load_u16(buffer, i):  # type: ignore[no-untyped-def]
    """Two bytes, big-endian, as uint64."""
    return np.uint64(buffer[i]) << np.uint64(8) | np.uint64(buffer[i + _1])


@numba.njit(inline="always")
def load_u32(buffer, i):  # type: ignore[no-untyped-def]
    """Four bytes, big-endian, as uint64."""
    return (
        np.uint64(buffer[i]) << np.uint64(24)
        | np.uint64(buffer[i + _1]) << np.uint64(16)
        | np.uint64(buffer[i + _2]) << np.uint64(8)
        | np.uint64(buffer[i + _3])
    )


@numba.njit(inline="always")
def load_u64(buffer, i):  # type: ignore[no-untyped-def]
    """Eight bytes, big-endian, as uint64."""
    return load_u32(buffer, i) << np.uint64(32) | load_u32(buffer, i + _4)


@numba.njit(inline="always")
def load_word(buffer, i):  # type: ignore[no-untyped-def]
    """Eight bytes, the first one lowest, as uint64: what the byte tricks work on. One load once compiled."""
    return (
        np.uint64(buffer[i])
        | np.uint64(buffer[i + _1]) << np.uint64(8)
        | np.uint64(buffer[i + _2]) << np.uint64(16)
        | np.uint64(buffer[i + _3]) << np.uint64(24)
        | np.uint64(buffer[i + _4]) << np.uint64(32)
        | np.uint64(buffer[i + np.uint64(5)]) << np.uint64(40)
        | np.uint64(buffer[i + np.uint64(6)]) << np.uint64(48)
        | np.uint64(buffer[i + np.uint64(7)]) << np.uint64(56)
    )


@numba.njit(nogil=True, forceinline=True)
def find_byte(buffer, start, end, value):  # type: ignore[no-untyped-def]
    """The first position in ``[start, end)`` that holds ``value`` (uint64), else ``end``; eight bytes a step."""
    i = start
    pattern = value * _EACH_1
    while i + _8 <= end:
        word = load_word(buffer, i) ^ pattern
        # The high bit of the first byte that equals value is set; bytes behind it may be marked wrongly.
        marks = (word - _EACH_1) & ~word & _EACH_80
        if marks != np.uint64(0):
            ones = (marks ^ (marks - _1)) & _EACH_1
            return i + ((ones * _EACH_1) >> np.uint64(56)) - _1
        i += _8
    while i < end and np.uint64(buffer[i]) != value:
        i += _1
    return i


@numba.njit(nogil=True, forceinline=True)
def same_bytes(one, i, other, j, size):  # type: ignore[no-untyped-def]
    """Whether ``one[i:i + size]`` equals ``other[j:j + size]``; eight bytes a step."""
    k = np.uint64(0)
    while k + _8 <= size:
        if load_word(one, i + k) != load_word(other, j + k):
            return False
        k += _8
    while k < size:
        if one[i + k] != other[j + k]:
            return False
        k += _1
    return True


@numba.njit(inline="always")
def swap(x):  # type: ignore[no-untyped-def]
    """A big-endian uint32 of a file as a number, or back."""
    # Compiled, a shifted uint32 is a uint64 with more bits than it should have: cut it back.
    return np.uint32(
        (x >> np.uint32(24))
        | ((x >> np.uint32(8)) & np.uint32(0xFF00))
        | ((x << np.uint32(8)) & np.uint32(0xFF0000))
        | (x << np.uint32(24))
    )


@numba.njit(inline="always")
def signed_32(value):  # type: ignore[no-untyped-def]
    """The int64 that the low 32 bits mean as an int32."""
    low = np.int64(value & _LOW_32)
    return low - np.int64(1 << 32) if low >= np.int64(1 << 31) else low


@numba.njit(inline="always")
def key_hash(java_hash):  # type: ignore[no-untyped-def]
    """Its absolute value as an int32, with -2^31 becoming 0 (spec 3.3), as uint32."""
    low = java_hash & _LOW_32
    if low > _SIGN_32:
        low = _TWO_32 - low
    elif low == _SIGN_32:
        low = np.uint64(0)
    return np.uint32(low)


@numba.njit(nogil=True)
def _decode_one(buffer, i, end):  # type: ignore[no-untyped-def]
    # (code point, bytes taken) at a byte >= 0x80. Java's replacement stands for the longest beginning of a sequence
    # that could have been one, an encoded surrogate being one whole.
    lead = load_u8(buffer, i)
    if lead < np.uint64(0xC2) or lead > np.uint64(0xF4):
        return _REPLACEMENT, _1
    size = _2
    if lead >= np.uint64(0xE0):
        size = _3 if lead < np.uint64(0xF0) else _4
    low, high = np.uint64(0x80), np.uint64(0xBF)
    if lead == np.uint64(0xE0):
        low = np.uint64(0xA0)
    elif lead == np.uint64(0xF0):
        low = np.uint64(0x90)
    elif lead == np.uint64(0xF4):
        high = np.uint64(0x8F)
    point = lead & (np.uint64(0x7F) >> size)
    taken = _1
    while taken < size:
        if i + taken >= end or load_u8(buffer, i + taken) < low or load_u8(buffer, i + taken) > high:
            return _REPLACEMENT, taken
        point = point << np.uint64(6) | (load_u8(buffer, i + taken) & np.uint64(0x3F))
        low, high = np.uint64(0x80), np.uint64(0xBF)
        taken += _1
    if point >= np.uint64(0xD800) and point <= np.uint64(0xDFFF):
        return _REPLACEMENT, taken
    return point, taken


@numba.njit(nogil=True, forceinline=True)
def hash_utf8(buffer, start, end, java_hash):  # type: ignore[no-untyped-def]
    """Go on with Java's ``String.hashCode`` over the UTF-16 units of ``buffer[start:end]``, from ``java_hash``.

    The value is right modulo 2^32 only (uint64 wraps above that); ``signed_32`` and ``key_hash`` take it so.
    """
    h = java_hash
    i = start
    while i < end:
        if i + _8 <= end:
            word = load_word(buffer, i)
            if word & _EACH_80 == np.uint64(0):
                # Eight ASCII bytes by three multiplications: bytes to pairs, pairs to quads, quads to one.
                pairs = (word & _EVEN_BYTES) * _31 + ((word >> np.uint64(8)) & _EVEN_BYTES)
                quads = (pairs & _EVEN_PAIRS) * _31_2 + ((pairs >> np.uint64(16)) & _EVEN_PAIRS)
                h = h * _31_8 + ((quads & _LOW_32) * _31_4 + (quads >> np.uint64(32)))
                i += _8
                continue
        b0 = load_u8(buffer, i)
        if b0 < _ASCII_END:
            h = h * _31 + b0
            i += _1
            continue
        point, taken = _decode_one(buffer, i, end)
        if point >= np.uint64(0x10000):
            point -= np.uint64(0x10000)
            h = h * _31 + (np.uint64(0xD800) | point >> np.uint64(10))
            h = h * _31 + (np.uint64(0xDC00) | point & np.uint64(0x3FF))
        else:
            h = h * _31 + point
        i += taken
    return h


@numba.njit(nogil=True, forceinline=True)
def _digit(point):  # type: ignore[no-untyped-def]
    # What a code point counts as a decimal digit, as Java's Character.digit has it; 10 if it is none.
    if point < _ASCII_END:
        return point - np.uint64(0x30) if point >= np.uint64(0x30) and point <= np.uint64(0x39) else _TEN
    i = np.uint64(0)
    while i < np.uint64(len(_ZEROS)):
        if point >= _ZEROS[i] and point - _ZEROS[i] < _TEN:
            return point - _ZEROS[i]
        i += _1
    return _TEN


@numba.njit(nogil=True)
def parse_long(buffer, start, end):  # type: ignore[no-untyped-def]
    """(is a number, int64 value) as Java's ``Long.parseLong`` reads it: one optional sign, digits of any script."""
    i = start
    if i >= end:
        return False, np.int64(0)
    first = load_u8(buffer, i)
    negative = first == np.uint64(0x2D)
    if negative or first == np.uint64(0x2B):
        i += _1
        if i >= end:
            return False, np.int64(0)
    limit = _LONG_MAX + _1 if negative else _LONG_MAX
    value = np.uint64(0)
    while i < end:
        point = load_u8(buffer, i)
        taken = _1
        if point >= _ASCII_END:
            point, taken = _decode_one(buffer, i, end)
        digit = _digit(point)
        if digit >= _TEN or value > (limit - digit) // _TEN:
            return False, np.int64(0)
        value = value * _TEN + digit
        i += taken
    if negative:
        return True, -np.int64(value - _1) - np.int64(1) if value > np.uint64(0) else np.int64(0)
    return True, np.int64(value)


_BYTE, _ONES = np.uint32(0xFF), np.uint32(0xFFFFFFFF)


def crc_tables(polynomial: int) -> NDArray[np.uint32]:
    """The eight tables, shape (8, 256), of a polynomial, its lowest bit first."""
    rows = np.zeros((8, 256), dtype=np.uint32)
    rows[0] = np.arange(256)
    for _ in range(8):
        rows[0] = np.where(rows[0] & 1, rows[0] >> 1 ^ np.uint32(polynomial), rows[0] >> 1)
    for step in range(1, 8):
        previous = rows[step - 1]
        rows[step] = rows[0][previous & 0xFF] ^ (previous >> 8)
    return rows


#: Those of zlib.crc32.
CRC_TABLES = crc_tables(0xEDB88320)


@numba.njit(nogil=True, cache=True)
def crc_go_on(buffer, start, end, register, tables):  # type: ignore[no-untyped-def]  # numba infers the types
    """The register of a CRC after ``buffer[start:end]``, from ``register`` before; uint32.

    A sum begins with 2^32-1, and its value is the last register xor that: so one sum can go over several buffers.
    """
    crc = np.uint32(register)  # what Python calls with is an int64
    i = np.uint64(start)
    stop = np.uint64(end)
    while i + _8 <= stop:
        low = crc ^ (
            np.uint32(buffer[i])
            | np.uint32(buffer[i + _1]) << np.uint32(8)
            | np.uint32(buffer[i + np.uint64(2)]) << np.uint32(16)
            | np.uint32(buffer[i + np.uint64(3)]) << np.uint32(24)
        )
        crc = (
            tables[7, low & _BYTE]
            ^ tables[6, (low >> np.uint32(8)) & _BYTE]
            ^ tables[5, (low >> np.uint32(16)) & _BYTE]
            ^ tables[4, low >> np.uint32(24)]
            ^ tables[3, buffer[i + np.uint64(4)]]
            ^ tables[2, buffer[i + np.uint64(5)]]
            ^ tables[1, buffer[i + np.uint64(6)]]
            ^ tables[0, buffer[i + np.uint64(7)]]
        )
        i += _8
    while i < stop:
        crc = tables[0, (crc ^ np.uint32(buffer[i])) & _BYTE] ^ (crc >> np.uint32(8))
        i += _1
    return crc


@numba.njit(nogil=True, cache=True)
def crc32(buffer, start, end, tables):  # type: ignore[no-untyped-def]  # numba infers the types
    """CRC-32 of ``buffer[start:end]`` (uint8 array, uint64 positions, ``tables`` = CRC_TABLES) as uint32."""
    return crc_go_on(buffer, start, end, _ONES, tables) ^ _ONES
