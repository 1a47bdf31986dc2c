"""Finds where the parts of messages stand in frames, and copies many parts one behind the other into Arrow's buffers.

``locate`` looks into frames that a decoder has accepted, read a second time: so it trusts none of them, and says when
one is another now. It copies nothing but numbers; ``gather`` then copies one column after the other into buffers of
the exact size. ``locate_texts`` finds what stands in the properties: every pair, the pieces of KEYS, UNIQ_KEY and TAGS
(spec rocketmq-store 2.4). What is rare is left to the plain decoder, and the row is marked as slow.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog import format as frame
from indexd.commitlog.bytes_kernel import (
    find_byte,
    load_u8,
    load_u32,
    load_u64,
    load_word,
    same_bytes,
    signed_32,
)
from indexd.commitlog.kernel import store_timestamp_at, walk

#: NO_ROOM: the pairs and keys have none for another row; CHANGED: the frame at the row is not the one that was decoded.
LOCATED, NO_ROOM, CHANGED = range(3)


#: What ``locate`` fills, a row of an int64 array each: numbers, and first bytes, with the byte behind the last one in
#: the row that follows; what is absent is empty. IS_SLOW is 0 for a plain row, or 1, or NOT_ASCII.
BORN_TIMESTAMP, RECONSUME_TIMES, PREPARED_OFFSET = range(3)
BORN_HOST, STORE_HOST, BODY, PROPERTIES, UNIQ_KEY, TAGS = range(3, 15, 2)
IS_SLOW = 15
FIELDS = 16
#: Not known to be plain before its properties are known to be UTF-8.
NOT_ASCII = 2
#: A message with more properties, or with more keys, is a slow row.
PAIRS_MAX = 64
#: What ``locate_texts`` has to have room for before it takes another row: one more than counts tells that there are.
ROOM = PAIRS_MAX + 1
#: What ``gather`` may write too much.
SLACK = 8

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_4 = np.uint64(4)
_8 = np.uint64(8)
_BYTE = np.uint64(0xFF)
_MAGIC_V1 = np.uint64(frame.MAGIC_V1)
_MAGIC_V2 = np.uint64(frame.MAGIC_V2)
_BORN_V6 = np.uint64(frame.FLAG_BORN_HOST_V6)
_STORE_V6 = np.uint64(frame.FLAG_STORE_HOST_V6)
_HOST_V6 = np.uint64(20)
_FRAME_SIZE_MIN = np.uint64(frame.FRAME_SIZE_MIN)


@numba.njit(nogil=True, forceinline=True)
def _open_frame(frames, base, pos, size, store_timestamp):  # type: ignore[no-untyped-def]
    # (the frame that was decoded still stands at ``pos``, its flags, body, body end, properties).
    total = np.uint64(len(frames))
    if pos > total or size < _FRAME_SIZE_MIN or size > total - pos:
        return False, _0, _0, _0, _0
    magic, flags = load_u32(frames, pos + _4), load_u32(frames, pos + np.uint64(36))
    if load_u32(frames, pos) != size or load_u64(frames, pos + np.uint64(28)) != base + pos:
        return False, _0, _0, _0, _0
    if magic != _MAGIC_V1 and magic != _MAGIC_V2:
        return False, _0, _0, _0, _0
    agree, body, body_end, _, _, properties = walk(frames, pos, pos + size, magic, flags)
    is_same = agree and store_timestamp_at(frames, pos) == store_timestamp
    return is_same, flags, body, body_end, properties


@numba.njit(nogil=True, cache=True)
def locate(frames, base, phy_offsets, sizes, store_timestamps, found):  # type: ignore[no-untyped-def]
    """Fixed fields, hosts, body and properties of the messages at ``phy_offsets`` of ``frames`` (uint8) into ``found``.

    ``frames[0]`` stands at physical offset ``base`` (uint64); offsets int64, sizes int32 and times int64 are those that
    were decoded. Returns (LOCATED or CHANGED, rows done).
    """
    born_timestamps, reconsume_times, prepared = found[BORN_TIMESTAMP], found[RECONSUME_TIMES], found[PREPARED_OFFSET]
    born_hosts, born_ends = found[BORN_HOST], found[BORN_HOST + 1]
    store_hosts, store_ends, bodies, body_ends = found[STORE_HOST], found[STORE_HOST + 1], found[BODY], found[BODY + 1]
    all_properties, properties_ends = found[PROPERTIES], found[PROPERTIES + 1]
    row, rows = _0, np.uint64(len(phy_offsets))
    while row < rows:
        pos, size = np.uint64(phy_offsets[row]) - base, np.uint64(sizes[row])
        is_same, flags, body, body_end, properties = _open_frame(frames, base, pos, size, store_timestamps[row])
        if not is_same:
            return CHANGED, row
        born = pos + np.uint64(48)
        born_end = born + (_HOST_V6 if flags & _BORN_V6 else _8)
        stored = born_end + _8
        behind = stored + (_HOST_V6 if flags & _STORE_V6 else _8)
        born_hosts[row], born_ends[row] = np.int64(born), np.int64(born_end)
        store_hosts[row], store_ends[row] = np.int64(stored), np.int64(behind)
        born_timestamps[row] = np.int64(load_u64(frames, pos + np.uint64(40)))
        reconsume_times[row] = np.int64(np.int32(signed_32(load_u32(frames, behind))))
        prepared[row] = np.int64(load_u64(frames, behind + _4))
        bodies[row], body_ends[row] = np.int64(body), np.int64(body_end)
        all_properties[row], properties_ends[row] = np.int64(properties), np.int64(pos + size)
        row += _1
    return LOCATED, row


@numba.njit(nogil=True, cache=True)
def gather(buffer, starts, ends, data):  # type: ignore[no-untyped-def]
    """``buffer[starts[i]:ends[i]]`` one behind the other into ``data`` (uint8), which has room for 8 bytes more."""
    size_of_buffer = np.uint64(len(buffer))
    at = _0
    i, count = _0, np.uint64(len(starts))
    while i < count:
        start = np.uint64(starts[i])
        size = np.uint64(ends[i]) - start
        k = _0
        if start + size + _8 <= size_of_buffer:
            # Whole words; what is copied too much is overwritten next.
            while k < size:
                _store_word(data, at + k, load_word(buffer, start + k))
                k += _8
        else:
            while k < size:
                data[at + k] = buffer[start + k]
                k += _1
        at += size
        i += _1
    return at


@numba.njit(inline="always")
def _store_word(data, i, word):  # type: ignore[no-untyped-def]
    # Eight bytes, the lowest first: one store once compiled.
    data[i] = np.uint8(word & _BYTE)
    data[i + _1] = np.uint8((word >> np.uint64(8)) & _BYTE)
    data[i + _2] = np.uint8((word >> np.uint64(16)) & _BYTE)
    data[i + _3] = np.uint8((word >> np.uint64(24)) & _BYTE)
    data[i + _4] = np.uint8((word >> np.uint64(32)) & _BYTE)
    data[i + np.uint64(5)] = np.uint8((word >> np.uint64(40)) & _BYTE)
    data[i + np.uint64(6)] = np.uint8((word >> np.uint64(48)) & _BYTE)
    data[i + np.uint64(7)] = np.uint8((word >> np.uint64(56)) & _BYTE)


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
    # (pairs, whether all of it is ASCII): the properties that count (spec 2.4), in one pass of eight bytes a step.
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
                    names[pairs], name_ends[pairs] = np.int64(name), np.int64(name_end)
                    values[pairs], value_ends[pairs] = np.int64(name_end + _1), np.int64(at)
                    pairs += _1
                name, name_end = at + _1, _0
        i += _8
    return pairs, bytes_seen & _EACH_80 == _0


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
                found[0], found[1] = values[pair], value_ends[pair]
            elif word == _WORD_TAGS:
                found[2], found[3] = values[pair], value_ends[pair]
        elif size == _8 and load_u64(buffer, name) == _WORD_UNIQ_KEY:
            found[4], found[5] = values[pair], value_ends[pair]
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
            pieces[keys], piece_ends[keys] = np.int64(piece), np.int64(i)
            keys += _1
        i += _1
    return True, keys


@numba.njit(nogil=True, cache=True)
def locate_texts(frames, rows, want_texts, want_properties, found, all_pairs, all_keys, all_starts):  # type: ignore[no-untyped-def]
    """What the properties of so many rows hold, which ``locate`` has found, into ``found`` and the other three.

    Row r has the pairs ``all_starts[0, r]`` to ``all_starts[0, r + 1]``, each a name and a value with their ends, and
    by ``all_starts[1]`` its pieces of KEYS. Returns (LOCATED or NO_ROOM for another row's pairs or pieces, pairs,
    pieces). A slow row may have any of them.
    """
    all_properties, properties_ends, is_slow = found[PROPERTIES], found[PROPERTIES + 1], found[IS_SLOW]
    uniq_keys, uniq_key_ends, all_tags, tags_ends = found[UNIQ_KEY], found[UNIQ_KEY + 1], found[TAGS], found[TAGS + 1]
    names, name_ends, values, value_ends = all_pairs[0], all_pairs[1], all_pairs[2], all_pairs[3]
    pieces, piece_ends, pair_start, key_start = all_keys[0], all_keys[1], all_starts[0], all_starts[1]
    pairs_max, keys_max = np.uint64(len(names)), np.uint64(len(pieces))
    texts = np.zeros(6, dtype=np.int64)
    row, pairs, keys = _0, _0, _0
    pair_start[0] = key_start[0] = 0
    while row < rows:
        if pairs + _ROOM > pairs_max or keys + _ROOM > keys_max:
            return NO_ROOM, pairs, keys
        start, end = np.uint64(all_properties[row]), np.uint64(properties_ends[row])
        first = pairs
        pairs, is_ascii = _put_pairs(frames, start, end, names, name_ends, values, value_ends, first)
        is_plain = pairs - first <= _PAIRS_MAX
        texts[:] = 0
        if not _note_texts(frames, names, name_ends, values, value_ends, first, pairs, texts):
            is_plain = not want_properties and is_plain
        if want_texts:
            if is_plain:
                is_plain, keys = _put_keys(frames, np.uint64(texts[0]), np.uint64(texts[1]), pieces, piece_ends, keys)
            all_tags[row], tags_ends[row] = texts[2], texts[3]
            uniq_keys[row], uniq_key_ends[row] = texts[4], texts[5]
        if not want_properties or not is_plain:
            pairs = first
        is_slow[row] = 0 if is_plain and is_ascii else NOT_ASCII if is_plain else 1
        row += _1
        pair_start[row], key_start[row] = np.int32(pairs), np.int32(keys)
    return LOCATED, pairs, keys
