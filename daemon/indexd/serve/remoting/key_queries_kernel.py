"""Queries by key from the bytes of their requests to the bytes of their answers, all that came together in one call.

The twin of ``command``, ``messages.query_message`` and ``query.broker_message`` for what nearly all clients send: a
JSON header without blanks and escapes, alone in its frame, of members that are known here; and for answers that have
messages. It ends at the first request that is anything else: that one, and those behind it, are theirs.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from indexd.commitlog.bytes_kernel import hash_utf8, key_hash, load_u32, same_bytes
from indexd.serve.in_memory_kernel import END_PHY, END_TIME, LEFT, SCRATCH, find_offsets, read_frames, refill
from indexd.serve.remoting.command import RequestCode

#: Members of ``limits``: requests of one call; the largest frame of a request; bytes of messages in an answer; messages
#: in an answer, and in one to a query for a unique key.
TOGETHER, FRAME, BODY, MOST, MOST_UNIQUE = range(5)
#: Members of ``said``: where the first request begins that is not answered, and where the answers end.
TAKEN, END = range(2)

# The members of a header and their kinds, of those that count first; then the ext fields, likewise.
_NUMBER, _TEXT, _OBJECT = range(3)
_CODE, _FLAG, _OPAQUE, _EXT_FIELDS = range(4)
_TOPIC, _KEY, _MAX_NUM, _BEGIN_TIME, _END_TIME, _IS_UNIQUE, _INDEX_TYPE = range(7)
_MEMBERS = ("code", "flag", "opaque", "extFields", "version", "language", "remark", "serializeTypeCurrentRPC")
_KINDS = np.array([_NUMBER, _NUMBER, _NUMBER, _OBJECT, _NUMBER, _TEXT, _TEXT, _TEXT])
_FIELDS = ("topic", "key", "maxNum", "beginTimestamp", "endTimestamp", "_UNIQUE_KEY_QUERY", "indexType")
_FIELDS_NEEDED = (1 << _INDEX_TYPE + 1) - 1 - (1 << _IS_UNIQUE) - (1 << _INDEX_TYPE)
# Rows of ``request`` for the ext fields, behind those of the members: (value, 0), or of a text (begin, end).
_OF_FIELDS = len(_MEMBERS)
#: Its shape.
REQUEST_SHAPE = (_OF_FIELDS + len(_FIELDS), 2)

_QUERY_MESSAGE = int(RequestCode.QUERY_MESSAGE)
# Of an answer without its messages, numbers and all; much more than it has.
_HEADER_MAX = 1024
_HEADS_SIZE = 8
_DIGITS_MAX = 19
_INT_END, _LONG_END = np.uint64(1 << 31), np.uint64(1 << 63)
_QUOTE, _BACKSLASH, _COMMA, _COLON, _OPEN, _CLOSE = b'"\\,:{}'
_BLANK, _DELETE, _ZERO, _NINE = b" \x7f09"
_HASH, _31, _0, _10 = np.uint64(ord("#")), np.uint64(31), np.uint64(0), np.uint64(10)


def pack(*texts: str) -> tuple[Any, Any]:
    """Texts in a row, uint8, and (n + 1) positions: where each begins and the last one ends."""
    ends = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    return np.frombuffer("".join(texts).encode("ascii"), dtype=np.uint8).copy(), ends


_MEMBER_NAMES, _MEMBER_ENDS = pack(*_MEMBERS)
_FIELD_NAMES, _FIELD_ENDS = pack(*_FIELDS)
_WORDS, _WORD_ENDS = pack("true", "K", "U")
_TRUE, _K, _U = range(3)


@numba.njit
def _text_end(data, at, end):  # type: ignore[no-untyped-def]
    # Of a text that begins with a quote at ``at``: where the other one is; LEFT if it is not plain ASCII.
    if at >= end or data[at] != _QUOTE:
        return LEFT
    for i in range(at + 1, end):
        byte = data[i]
        if byte == _QUOTE:
            return i
        if byte < _BLANK or byte >= _DELETE or byte == _BACKSLASH:
            return LEFT
    return LEFT


@numba.njit
def _digits_end(data, at, end, into):  # type: ignore[no-untyped-def]
    # Behind a whole number below 2^63, which goes into ``into[0]``; LEFT.
    value, i = _0, at
    while i < end and i - at < _DIGITS_MAX and _ZERO <= data[i] <= _NINE:
        value = value * _10 + (np.uint64(data[i]) - np.uint64(_ZERO))
        i += 1
    if i == at or value >= _LONG_END or (data[at] == _ZERO and i > at + 1):
        return LEFT
    into[0] = np.int64(value)
    return i


@numba.njit
def _which(data, begin, end, names, ends):  # type: ignore[no-untyped-def]
    for i in range(len(ends) - 1):
        size = end - begin
        if ends[i + 1] - ends[i] == size and same_bytes(
            data, np.uint64(begin), names, np.uint64(ends[i]), np.uint64(size)
        ):
            return i
    return LEFT


@numba.njit
def _read_fields(data, at, end, request):  # type: ignore[no-untyped-def]
    # Behind the object of texts that begins at ``at``; LEFT.
    if at >= end or data[at] != _OPEN:
        return LEFT
    seen, i = 0, at
    while data[i] != _CLOSE:
        name_end = _text_end(data, i + 1, end)
        if name_end == LEFT or name_end + 1 >= end or data[name_end + 1] != _COLON:
            return LEFT
        begin = name_end + 2
        value_end = _text_end(data, begin, end)
        if value_end == LEFT:
            return LEFT
        field = _which(data, i + 2, name_end, _FIELD_NAMES, _FIELD_ENDS)
        if field != LEFT:
            if seen & 1 << field:
                return LEFT
            seen |= 1 << field
            row = request[_OF_FIELDS + field]
            row[0], row[1] = begin + 1, value_end
            if _MAX_NUM <= field <= _END_TIME and _digits_end(data, begin + 1, value_end, row) != value_end:
                return LEFT
        i = value_end + 1
        if i >= end or (data[i] != _COMMA and data[i] != _CLOSE):
            return LEFT
    return i + 1 if seen & _FIELDS_NEEDED == _FIELDS_NEEDED else LEFT


@numba.njit
def _read_request(data, at, end, request):  # type: ignore[no-untyped-def]
    # Whether ``data[at:end]`` is the header of a query by key that is read here.
    if data[at] != _OPEN:
        return False
    request[:, :] = 0
    seen, i = 0, at
    while data[i] != _CLOSE:
        name_end = _text_end(data, i + 1, end)
        if name_end == LEFT or name_end + 1 >= end or data[name_end + 1] != _COLON:
            return False
        member = _which(data, i + 2, name_end, _MEMBER_NAMES, _MEMBER_ENDS)
        if member == LEFT or seen & 1 << member:
            return False
        seen |= 1 << member
        begin = name_end + 2
        if _KINDS[member] == _NUMBER:
            i = _digits_end(data, begin, end, request[member])
            if i == LEFT or np.uint64(request[member, 0]) >= _INT_END:
                return False
        elif _KINDS[member] == _TEXT:
            i = _text_end(data, begin, end) + 1
            if i == LEFT + 1:
                return False
        else:
            i = _read_fields(data, begin, end, request)
            if i == LEFT:
                return False
        if i >= end or (data[i] != _COMMA and data[i] != _CLOSE):
            return False
    if i + 1 != end or seen & 1 << _EXT_FIELDS == 0 or seen & 1 << _OPAQUE == 0:
        return False
    return request[_CODE, 0] == _QUERY_MESSAGE and request[_FLAG, 0] == 0


@numba.njit
def _copy(pieces, ends, number, buffer, at):  # type: ignore[no-untyped-def]
    size = ends[number + 1] - ends[number]
    buffer[at : at + size] = pieces[ends[number] : ends[number + 1]]
    return at + size


@numba.njit
def _write_number(value, buffer, at):  # type: ignore[no-untyped-def]
    # In digits; ``value`` is not negative.
    count, rest = 1, value
    while rest >= 10:
        count += 1
        rest //= 10
    for i in range(at + count - 1, at - 1, -1):
        buffer[i] = _ZERO + value % 10
        value //= 10
    return at + count


@numba.njit
def _write_word(value, buffer, at):  # type: ignore[no-untyped-def]
    for i in range(4):
        buffer[at + i] = value >> 24 - 8 * i & 0xFF


@numba.njit
def _find(data, request, limits, files, headers, sizes, places, buffer, work):  # type: ignore[no-untyped-def]
    # find_offsets for what is asked.
    fields = request[_OF_FIELDS:]
    is_unique = _which(data, fields[_IS_UNIQUE, 0], fields[_IS_UNIQUE, 1], _WORDS, _WORD_ENDS) == _TRUE
    if fields[_INDEX_TYPE, 0] != 0 and not is_unique:
        # Tags are hashed otherwise, and what is none of these is not for here.
        word = _which(data, fields[_INDEX_TYPE, 0], fields[_INDEX_TYPE, 1], _WORDS, _WORD_ENDS)
        if word not in (_K, _U):
            return LEFT
    if np.uint64(fields[_MAX_NUM, 0]) >= _INT_END:
        return LEFT
    most = limits[MOST_UNIQUE] if is_unique else min(fields[_MAX_NUM, 0], limits[MOST])
    topic_hash = hash_utf8(data, np.uint64(fields[_TOPIC, 0]), np.uint64(fields[_TOPIC, 1]), _0)
    java_hash = hash_utf8(data, np.uint64(fields[_KEY, 0]), np.uint64(fields[_KEY, 1]), topic_hash * _31 + _HASH)
    times = fields[_BEGIN_TIME, 0], fields[_END_TIME, 0]
    return find_offsets(files, headers, sizes, np.int64(key_hash(java_hash)), most, *times, places, buffer, work)


@numba.njit
def _write_header(last_update, opaque, pieces, ends, buffer, at):  # type: ignore[no-untyped-def]
    # Behind it; its lengths come before it.
    at = _copy(pieces, ends, 0, buffer, at + _HEADS_SIZE)
    at = _copy(pieces, ends, 1, buffer, _write_number(last_update[END_TIME], buffer, at))
    at = _copy(pieces, ends, 2, buffer, _write_number(last_update[END_PHY], buffer, at))
    return _copy(pieces, ends, 3, buffer, _write_number(opaque, buffer, at))


@numba.njit(cache=True)
def answer_together(  # type: ignore[no-untyped-def]
    data, limits, files, headers, segments, sizes, places, buffer, work, request, pieces, piece_ends, said
):
    """How many requests, from the first on, are answered; ``said`` has where they and the answers end.

    ``data`` uint8, what came; ``limits`` and ``said`` int64; ``request`` int64 of REQUEST_SHAPE, to work with;
    ``pieces`` and ``piece_ends``: what ``pack`` makes of the text of an answer's header around its three numbers: time
    and offset of the last update, opaque. The answers are in ``buffer`` from SCRATCH on; the rest as ``answer`` has it.
    """
    refill(work)
    at, out, count = np.int64(0), np.int64(SCRATCH), 0
    while count < limits[TOGETHER] and len(data) - at > _HEADS_SIZE and len(buffer) - out > _HEADER_MAX:
        size = np.int64(load_u32(data, np.uint64(at)))
        header_size = np.int64(load_u32(data, np.uint64(at + 4)))  # above it the form, 0
        behind = at + 4 + size
        if size > limits[FRAME] or behind > len(data) or header_size != size - 4 or header_size < 2:
            break
        if not _read_request(data, at + _HEADS_SIZE, behind, request):
            break
        found = _find(data, request, limits, files, headers, sizes, places, buffer, work)
        if found <= 0 or headers[0, END_TIME] < 0 or headers[0, END_PHY] < 0:
            break
        body = _write_header(headers[0], request[_OPAQUE, 0], pieces, piece_ends, buffer, out)
        end = read_frames(segments, sizes, places, found, body, limits[BODY], buffer, work)
        if end == LEFT:
            break
        _write_word(end - out - 4, buffer, out)
        _write_word(body - out - _HEADS_SIZE, buffer, out + 4)
        at, out, count = behind, end, count + 1
    said[TAKEN], said[END] = at, out
    return count
