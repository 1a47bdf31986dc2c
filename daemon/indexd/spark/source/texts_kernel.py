"""What stands in the properties of many messages: every pair, the pieces of KEYS, UNIQ_KEY and TAGS, as positions.

The rules of spec rocketmq-store 2.4. What is rare is left to the plain decoder, and the row is marked as slow:
properties that are no UTF-8, that hold a name twice, or very many names or keys.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog.bytes_kernel import find_byte, load_u8, load_u32, load_u64, load_word, same_bytes
from indexd.spark.source.rows_kernel import LOCATED, NO_ROOM

#: A message with more properties, or with more keys, is a slow row.
PAIRS_MAX = 64
#: What ``locate_texts`` has to have room for before it takes another row: one more than counts tells that there are.
ROOM = PAIRS_MAX + 1

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_4 = np.uint64(4)
_5 = np.uint64(5)
_8 = np.uint64(8)
_BYTE = np.uint64(0xFF)
_EACH_1 = np.uint64(0x0101010101010101)
_EACH_7D = np.uint64(0x7D7D7D7D7D7D7D7D)
_EACH_7F = np.uint64(0x7F7F7F7F7F7F7F7F)
_EACH_80 = np.uint64(0x8080808080808080)
_WORD_KEYS = np.uint64(int.from_bytes(b"KEYS", "big"))
_WORD_TAGS = np.uint64(int.from_bytes(b"TAGS", "big"))
_WORD_UNIQ_KEY = np.uint64(int.from_bytes(b"UNIQ_KEY", "big"))
_SPACE = np.uint64(0x20)
_PAIRS_MAX = np.uint64(PAIRS_MAX)
_ROOM = np.uint64(ROOM)


@numba.njit(nogil=True)
def is_utf8(buffer, start, end):  # type: ignore[no-untyped-def]
    """Whether ``buffer[start:end]`` is UTF-8 of which nothing has to be replaced: no surrogates, nothing overlong."""
    i = start
    while i < end:
        b1 = load_u8(buffer, i)
        if b1 < np.uint64(0x80):
            i += _1
            continue
        # How many bytes follow, and between which two the first of them must be.
        low, high = np.uint64(0x80), np.uint64(0xBF)
        if b1 >= np.uint64(0xC2) and b1 <= np.uint64(0xDF):
            more = _1
        elif b1 >= np.uint64(0xE0) and b1 <= np.uint64(0xEF):
            more = _2
            if b1 == np.uint64(0xE0):
                low = np.uint64(0xA0)
            elif b1 == np.uint64(0xED):
                high = np.uint64(0x9F)
        elif b1 >= np.uint64(0xF0) and b1 <= np.uint64(0xF4):
            more = _3
            if b1 == np.uint64(0xF0):
                low = np.uint64(0x90)
            elif b1 == np.uint64(0xF4):
                high = np.uint64(0x8F)
        else:
            return False
        if end - i <= more:
            return False
        b2 = load_u8(buffer, i + _1)
        if b2 < low or b2 > high:
            return False
        k = _2
        while k <= more:
            if load_u8(buffer, i + k) & np.uint64(0xC0) != np.uint64(0x80):
                return False
            k += _1
        i += more + _1
    return True


@numba.njit(nogil=True)
def _last_word(buffer, i, end):  # type: ignore[no-untyped-def]
    # Fewer than eight bytes, from ``i`` on, and zeros: where the buffer ends too soon for a whole load.
    word = _0
    k = end
    while k > i:
        k -= _1
        word = word << _8 | np.uint64(buffer[k])
    return word


@numba.njit(inline="always")
def _put_pairs(buffer, start, end, names, name_ends, values, value_ends, first):  # type: ignore[no-untyped-def]
    # (pairs, whether they are all and ASCII): the properties that count (spec 2.4), in one pass of eight bytes a step.
    # Inlined as source: an array that a function takes in a loop like this costs two reference counts a step.
    pairs, bytes_seen = first, _0
    name, name_end = start, _0  # no first U+0001 yet
    i = start
    while i <= end:
        if i + _8 <= end:
            word = load_word(buffer, i)
        elif i + _8 <= np.uint64(len(buffer)):
            word = load_word(buffer, i) & ((_1 << ((end - i) << _3)) - _1)
        else:
            word = _last_word(buffer, i, end)
        bytes_seen |= word
        if i + _8 > end:
            # The last pair ends here, whether a U+0002 says so or not.
            word |= _2 << ((end - i) << _3)
        # The high bit of each byte below 3.
        marks = ~(((word & _EACH_7F) + _EACH_7D) | word) & _EACH_80
        while marks != _0:
            at = i + ((((marks ^ (marks - _1)) & _EACH_1) * _EACH_1) >> np.uint64(56)) - _1
            byte = (word >> ((at - i) << _3)) & _BYTE
            marks = marks & (marks - _1) if at < end else _0
            if byte == _1 and name_end == _0:
                name_end = at
            elif byte == _2:
                if name_end > name and name_end + _1 < at and pairs - first <= _PAIRS_MAX:
                    names[pairs], name_ends[pairs] = np.uint32(name), np.uint32(name_end)
                    values[pairs], value_ends[pairs] = np.uint32(name_end + _1), np.uint32(at)
                    pairs += _1
                name, name_end = at + _1, _0
        i += _8
    return pairs, pairs - first <= _PAIRS_MAX and bytes_seen & _EACH_80 == _0


@numba.njit(inline="always")
def _note_texts(buffer, names, name_ends, values, value_ends, first, pairs, found):  # type: ignore[no-untyped-def]
    # Whether no name of the pairs [first, pairs) occurs twice; and where the three values with a column stand.
    seen, is_once = _0, True
    pair = first
    while pair < pairs:
        name = np.uint64(names[pair])
        size = np.uint64(name_ends[pair]) - name
        if size == _4:
            word = load_u32(buffer, name)
            if word == _WORD_KEYS:
                found[_0], found[_1] = values[pair], value_ends[pair]
            elif word == _WORD_TAGS:
                found[_2], found[_3] = values[pair], value_ends[pair]
        elif size == _8 and load_u64(buffer, name) == _WORD_UNIQ_KEY:
            found[_4], found[_5] = values[pair], value_ends[pair]
        # A bit for what two names of one row rarely have in common.
        bit = _1 << ((size + load_u8(buffer, name) * np.uint64(7)) & np.uint64(63))
        if seen & bit != _0 and _is_named_before(buffer, name, size, names, name_ends, first, pair):
            is_once = False
        seen |= bit
        pair += _1
    return is_once


@numba.njit(nogil=True)
def _is_named_before(buffer, start, size, names, name_ends, first, last):  # type: ignore[no-untyped-def]
    # Whether one of the pairs [first, last) has the name buffer[start:start + size].
    pair = first
    while pair < last:
        name = np.uint64(names[pair])
        if np.uint64(name_ends[pair]) - name == size and same_bytes(buffer, start, buffer, name, size):
            return True
        pair += _1
    return False


@numba.njit(nogil=True, forceinline=True)
def _put_keys(buffer, start, end, pieces, piece_ends, first):  # type: ignore[no-untyped-def]
    # (all taken, keys): the pieces of KEYS between single spaces, empty ones left out.
    keys = first
    i = start
    while i < end:
        piece = i
        i = find_byte(buffer, i, end, _SPACE)
        if i > piece:
            if keys - first >= _PAIRS_MAX:
                return False, first
            pieces[keys] = np.uint32(piece)
            piece_ends[keys] = np.uint32(i)
            keys += _1
        i += _1
    return True, keys


@numba.njit(nogil=True, cache=True)
def locate_texts(frames, rows, want_texts, want_properties, spans):  # type: ignore[no-untyped-def]
    """What the properties of so many rows hold, which ``locate`` has found, into ``spans``.

    Returns (LOCATED or NO_ROOM for another row's pairs or pieces, pairs, pieces of KEYS).
    """
    all_properties, properties_ends, is_slow = spans.properties, spans.properties_end, spans.is_slow
    names, name_ends, values, value_ends = spans.name, spans.name_end, spans.value, spans.value_end
    uniq_keys, uniq_key_ends, all_tags, tags_ends = spans.uniq_key, spans.uniq_key_end, spans.tags, spans.tags_end
    pair_start, key_start, pieces, piece_ends = spans.pair_start, spans.key_start, spans.key, spans.key_end
    pairs_max, keys_max = np.uint64(len(names)), np.uint64(len(pieces))
    found = np.zeros(6, dtype=np.uint32)
    row, pairs, keys = _0, _0, _0
    pair_start[0] = key_start[0] = 0
    while row < rows:
        if pairs + _ROOM > pairs_max or keys + _ROOM > keys_max:
            return NO_ROOM, pairs, keys
        start, end = np.uint64(all_properties[row]), np.uint64(properties_ends[row])
        first = pairs
        pairs, is_plain = _put_pairs(frames, start, end, names, name_ends, values, value_ends, first)
        if not is_plain:
            is_plain = pairs - first <= _PAIRS_MAX and is_utf8(frames, start, end)
        found[:] = np.uint32(0)
        if not _note_texts(frames, names, name_ends, values, value_ends, first, pairs, found):
            is_plain = not want_properties and is_plain
        if want_texts:
            if is_plain:
                is_plain, keys = _put_keys(frames, np.uint64(found[_0]), np.uint64(found[_1]), pieces, piece_ends, keys)
            all_tags[row], tags_ends[row] = found[_2], found[_3]
            uniq_keys[row], uniq_key_ends[row] = found[_4], found[_5]
        if not want_properties or not is_plain:
            pairs = first
        is_slow[row] = np.uint8(0) if is_plain else np.uint8(1)
        row += _1
        pair_start[row], key_start[row] = np.int32(pairs), np.int32(keys)
    return LOCATED, pairs, keys
