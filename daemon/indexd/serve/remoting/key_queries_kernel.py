"""Compiled: answers to queries by key, from the bytes of the requests to the frames of the messages, in one call.

The compiled form of ``command``, ``processor.query_message``, ``query.by_key.query_offsets`` and ``LogView.frame`` for
what nearly all clients send and find: a JSON header as RocketMQ's Java clients write it, without escapes, alone in its
frame; index files and messages that are sound, of common size and in the page cache; at least one message found. It
stops at the first request that is anything else; that one and those behind it are answered by the plain code.

Nothing is waited for: reads are RWF_NOWAIT. The interpreter lock is held all the while: a call takes some microseconds,
and a thread that releases the lock at each read may wait milliseconds to get it back.
"""

from __future__ import annotations

import os
from typing import Any

import numba
import numpy as np
from numba import types

from indexd.commitlog import format as frame
from indexd.commitlog.bytes_kernel import CRC_TABLES, hash_utf8, key_hash, load_u32, load_u64, same_bytes, signed_32
from indexd.commitlog.kernel import check_crc, head, walk
from indexd.index.format import ENTRY_SIZE, HEADER_SIZE, SLOT_SIZE

#: Somebody else has to answer: it is not in memory, not sound, too much, or takes too long.
LEFT = -1
#: Columns of ``headers``: begin and end time, end offset, index count, and whether that is final.
BEGIN_TIME, END_TIME, END_PHY, COUNT, IS_FULL = range(5)
#: Members of ``sizes``: segment, slots and entries of an index file, largest frame.
SEGMENT, SLOTS, ENTRIES, FRAME_MAX = range(4)
#: The part of ``buffer`` before the frames, and what is read of a frame that is not known to be longer.
SCRATCH = 4096
_ENTRIES_PER_READ = 204
# Of all files: a call is ended within two milliseconds.
_READS_MAX = 1000
# Members of ``work``: memory for a struct iovec, and how many reads are left.
_ADDRESS, _SIZE, _READS = range(3)
_MESSAGE = int(frame.Outcome.MESSAGE)
_NOT_YET = int(frame.Outcome.NOT_YET_WRITTEN)
_NONE = int(frame.Reason.NONE)
_0 = np.uint64(0)
_1 = np.uint64(1)
_4 = np.uint64(4)

# By its name, so that what is compiled can be kept.
_preadv2: Any = types.ExternalFunction(
    "preadv2", types.intp(types.int32, types.uintp, types.int32, types.int64, types.int32)
)


@numba.njit
def _read(fd, buffer, at, size, position, work):  # type: ignore[no-untyped-def]  # numba infers the types
    # Whether all of it was there, and may still be read.
    if work[_READS] == _0:
        return False
    work[_READS] -= _1
    work[_ADDRESS] = np.uint64(buffer.ctypes.data) + np.uint64(at)
    work[_SIZE] = np.uint64(size)
    address = np.uintp(work.ctypes.data)
    count = _preadv2(np.int32(fd), address, np.int32(1), np.int64(position), np.int32(os.RWF_NOWAIT))
    return count == size


@numba.njit(inline="always")
def _int(buffer, at):  # type: ignore[no-untyped-def]
    return np.int64(signed_32(load_u32(buffer, np.uint64(at))))


@numba.njit(inline="always")
def _long(buffer, at):  # type: ignore[no-untyped-def]
    return np.int64(load_u64(buffer, np.uint64(at)))


@numba.njit
def _walk_chain(fd, entries_at, entries_max, header, number, key_hash, begin, end, places, found, most, buffer, work):  # type: ignore[no-untyped-def]
    # IndexFileReader.select_phy_offset: how many are found by now, or LEFT.
    count, base = header[COUNT], header[BEGIN_TIME]
    if number <= 0 or number > count or count <= 1:
        return found
    first, last, wanted = 0, -1, 1
    while found < most:
        if number < first or number > last:
            if number >= entries_max:
                return LEFT
            first, last = max(number - wanted + 1, 0), number
            if not _read(fd, buffer, 0, (last - first + 1) * ENTRY_SIZE, entries_at + first * ENTRY_SIZE, work):
                return LEFT
        at = (number - first) * ENTRY_SIZE
        time_diff, previous = _int(buffer, at + 12), _int(buffer, at + 16)
        if time_diff < 0:
            break
        time = base + time_diff * 1000  # wraps, as a Java long
        if _int(buffer, at) == key_hash and begin <= time <= end:
            if found >= len(places):
                return LEFT
            places[found] = _long(buffer, at + 4)
            found += 1
        if previous <= 0 or previous > count or previous == number or time < begin:
            break
        if previous > number:  # no chain that was written so: whoever counts its steps has to end it
            return LEFT
        wanted = _ENTRIES_PER_READ if number - _ENTRIES_PER_READ < previous < number else 1
        number = previous
    return found


@numba.njit
def _find_offsets(files, headers, sizes, key_hash, most, begin, end, places, buffer, work):  # type: ignore[no-untyped-def]
    # query.by_key.query_offsets, ascending: how many there are in ``places``, or LEFT.
    slot_at = HEADER_SIZE + SLOT_SIZE * (key_hash % sizes[SLOTS])
    entries_at = HEADER_SIZE + SLOT_SIZE * sizes[SLOTS]
    found = 0
    for i in range(len(files)):
        fd, header = files[i], headers[i]
        if not _read(fd, buffer, 0, SLOT_SIZE, slot_at, work):
            return LEFT
        number = _int(buffer, 0)
        if not header[IS_FULL]:  # it grows: the header is read behind the slot
            if not _read(fd, buffer, 0, HEADER_SIZE, 0, work):
                return LEFT
            header[BEGIN_TIME], header[END_TIME] = _long(buffer, 0), _long(buffer, 8)
            header[END_PHY], header[COUNT] = _long(buffer, 24), max(_int(buffer, 36), 1)
        first, last = header[BEGIN_TIME], header[END_TIME]
        if (begin < first and end > last) or first <= begin <= last or first <= end <= last:
            found = _walk_chain(
                fd,
                entries_at,
                sizes[ENTRIES],
                header,
                number,
                key_hash,
                begin,
                end,
                places,
                found,
                most,
                buffer,
                work,
            )
            if found == LEFT:
                return LEFT
        if first < begin or found >= most:
            break
    places[:found].sort()
    return found


@numba.njit
def _read_frame(segments, sizes, phy_offset, at, size_max, buffer, work):  # type: ignore[no-untyped-def]
    # LogView.frame into ``buffer`` from ``at`` on: its size, or LEFT.
    size = sizes[SEGMENT]
    position = phy_offset % size
    fd = LEFT
    for i in range(len(segments)):
        if segments[i, 0] == phy_offset - position:
            fd = segments[i, 1]
    if fd == LEFT:
        return LEFT
    want = min(SCRATCH, size - position)
    pos, base = np.uint64(at), np.uint64(phy_offset) - np.uint64(at)
    segment_end, frame_max = np.uint64(phy_offset - position + size), np.uint64(sizes[FRAME_MAX])
    outcome, total = _NOT_YET, np.uint64(want)
    for _ in range(2):
        want = np.int64(total)
        if at + want > len(buffer) or not _read(fd, buffer, at, want, position, work):
            return LEFT
        outcome, _, total = head(buffer, pos, pos + np.uint64(want), base, segment_end, frame_max)
        if outcome != _NOT_YET or total <= np.uint64(want) or total > np.uint64(size_max):
            break
    if outcome != _MESSAGE or total > np.uint64(size_max):
        return LEFT
    flags, magic = load_u32(buffer, pos + np.uint64(36)), load_u32(buffer, pos + _4)
    agree, body, body_end, _, _, properties = walk(buffer, pos, pos + total, magic, flags)
    if not agree or check_crc(buffer, pos, pos + total, body, body_end, properties, CRC_TABLES) != _NONE:
        return LEFT
    return np.int64(total)


#: Members of ``limits``: bytes of messages in an answer; messages in an answer, and in one to a query for a unique key.
BODY, MOST, MOST_UNIQUE = range(3)

# What does not change of a header: before the ext fields, and before the two numbers behind them.
_BEGIN = np.frombuffer(b'{"code":12,"extFields":{', dtype=np.uint8)
_BEFORE_OPAQUE = np.frombuffer(b'},"flag":0,"language":"JAVA","opaque":', dtype=np.uint8)
_BEFORE_VERSION = np.frombuffer(b',"serializeTypeCurrentRPC":"JSON","version":', dtype=np.uint8)
# The ext fields that count, numbers first and then texts. Each has a row of ``request`` by its place here, of a number
# (value, 0), of a text (begin, end); behind them two for the header's own numbers.
_NAMES = ("maxNum", "beginTimestamp", "endTimestamp", "topic", "key", "_UNIQUE_KEY_QUERY", "indexType")
_MAX_NUM, _BEGIN_TIME, _END_TIME, _TOPIC, _KEY, _IS_UNIQUE, _INDEX_TYPE, _OPAQUE, _VERSION = range(9)
_NEEDED = (1 << _IS_UNIQUE) - 1
#: The shape of ``request``.
REQUEST_SHAPE = (9, 2)

_HEADS_SIZE = 8
_DIGITS_MAX = 19
_INT_END, _LONG_END = np.uint64(1 << 31), np.uint64(1 << 63)
_QUOTE, _BACKSLASH, _COMMA, _COLON, _CLOSE = b'"\\,:}'
_BLANK, _DELETE, _ZERO, _NINE = b" \x7f09"
_HASH, _31, _10 = np.uint64(ord("#")), np.uint64(31), np.uint64(10)


def _pack(*texts: str) -> tuple[Any, Any]:
    # Texts in a row, uint8, and (n + 1) positions: where each begins and the last one ends.
    ends = np.cumsum([0, *map(len, texts)]).astype(np.int64)
    return np.frombuffer("".join(texts).encode("ascii"), dtype=np.uint8).copy(), ends


_NAME_TEXT, _NAME_ENDS = _pack(*_NAMES)
_WORDS, _WORD_ENDS = _pack("true", "K", "U")
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
def _behind(data, at, end, text):  # type: ignore[no-untyped-def]
    # Where this text ends, if it stands at ``at``, which may be LEFT; or LEFT.
    behind = at + len(text)
    is_there = at != LEFT and behind <= end and same_bytes(data, np.uint64(at), text, _0, np.uint64(len(text)))
    return behind if is_there else LEFT


@numba.njit
def _number_behind(data, at, end, text, into):  # type: ignore[no-untyped-def]
    at = _behind(data, at, end, text)
    return at if at == LEFT else _digits_end(data, at, end, into)


@numba.njit
def _read_request(data, at, end, request):  # type: ignore[no-untyped-def]
    # Whether ``data[at:end]`` is the header of a query by key that is read here.
    request[:, :] = 0
    seen, at = 0, _behind(data, at, end, _BEGIN)
    while at != LEFT:
        name_end = _text_end(data, at, end)
        begin = name_end + 2
        if name_end == LEFT or begin >= end or data[begin - 1] != _COLON:
            return False
        text_end = _text_end(data, begin, end)
        if text_end == LEFT:
            return False
        row = _which(data, at + 1, name_end, _NAME_TEXT, _NAME_ENDS)
        if row != LEFT:
            if seen & 1 << row:
                return False
            seen |= 1 << row
            request[row, 0], request[row, 1] = begin + 1, text_end
        if LEFT < row < _TOPIC and _digits_end(data, begin + 1, text_end, request[row]) != text_end:
            return False
        at = text_end + 1
        if at >= end or data[at] != _COMMA:
            break
        at += 1
    at = _number_behind(data, at, end, _BEFORE_OPAQUE, request[_OPAQUE])
    at = _number_behind(data, at, end, _BEFORE_VERSION, request[_VERSION])
    is_whole = at != LEFT and at + 1 == end and data[at] == _CLOSE and seen & _NEEDED == _NEEDED
    return is_whole and np.uint64(max(request[_OPAQUE, 0], request[_VERSION, 0])) < _INT_END


@numba.njit
def _find(data, request, limits, files, headers, sizes, places, buffer, work):  # type: ignore[no-untyped-def]
    # find_offsets for what is asked.
    is_unique = _which(data, request[_IS_UNIQUE, 0], request[_IS_UNIQUE, 1], _WORDS, _WORD_ENDS) == _TRUE
    if request[_INDEX_TYPE, 0] != 0 and not is_unique:
        # Tags are hashed otherwise, and what is none of these is not for here.
        word = _which(data, request[_INDEX_TYPE, 0], request[_INDEX_TYPE, 1], _WORDS, _WORD_ENDS)
        if word not in (_K, _U):
            return LEFT
    if np.uint64(request[_MAX_NUM, 0]) >= _INT_END:
        return LEFT
    most = limits[MOST_UNIQUE] if is_unique else min(request[_MAX_NUM, 0], limits[MOST])
    topic_hash = hash_utf8(data, np.uint64(request[_TOPIC, 0]), np.uint64(request[_TOPIC, 1]), _0)
    java_hash = hash_utf8(data, np.uint64(request[_KEY, 0]), np.uint64(request[_KEY, 1]), topic_hash * _31 + _HASH)
    times = request[_BEGIN_TIME, 0], request[_END_TIME, 0]
    return _find_offsets(files, headers, sizes, np.int64(key_hash(java_hash)), most, *times, places, buffer, work)


@numba.njit(cache=True)
def answer_together(data, frame_max, limits, files, headers, segments, sizes, buffer, places, work, request, rows):  # type: ignore[no-untyped-def]
    """How many requests, from the first on, are answered, and where the first one begins that is not.

    ``data`` uint8, what came, of which a frame has ``frame_max`` bytes at most; ``limits`` int64. ``files`` int64,
    descriptors of the index files, newest first, with ``headers``, (n, 5) int64, of which those of files that grow are
    written here; ``segments`` (n, 2) int64, base and descriptor of those that are open. ``buffer`` uint8, with the
    messages from SCRATCH on; ``places`` int64, for offsets, ``work`` three uint64 and ``request`` int64 of
    REQUEST_SHAPE, to work with. ``rows`` (n, 5) int64, one for each request that may be answered: its opaque, time and
    offset of the last update, and where its messages begin and end in ``buffer``.
    """
    work[_READS] = np.uint64(_READS_MAX)
    at, out, count = np.int64(0), np.int64(SCRATCH), 0
    while count < len(rows) and len(data) - at > _HEADS_SIZE:
        size = np.int64(load_u32(data, np.uint64(at)))
        header_size = np.int64(load_u32(data, np.uint64(at + 4)))  # above it the form, 0
        behind = at + 4 + size
        if size > frame_max or behind > len(data) or header_size != size - 4 or header_size < 2:
            break
        if not _read_request(data, at + _HEADS_SIZE, behind, request):
            break
        found = _find(data, request, limits, files, headers, sizes, places, buffer, work)
        if found <= 0:
            break
        end = out
        for i in range(found):
            frame_size = _read_frame(segments, sizes, places[i], end, limits[BODY] - (end - out), buffer, work)
            if frame_size == LEFT:
                return count, at
            end += frame_size
        rows[count, 0], rows[count, 1], rows[count, 2] = request[_OPAQUE, 0], headers[0, END_TIME], headers[0, END_PHY]
        rows[count, 3], rows[count, 4] = out, end
        at, out, count = behind, end, count + 1
    return count, at
