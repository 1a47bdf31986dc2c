"""Finds where the parts of messages stand in frames, and copies many parts one behind the other.

``locate`` looks into frames that a decoder has accepted, read a second time: so it trusts none of them, and says when
one is another now. Every position is uint64, as in ``commitlog.bytes_kernel``.
"""

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog import format as frame
from indexd.commitlog.bytes_kernel import find_byte, load_u32, load_u64, load_word
from indexd.commitlog.kernel import store_timestamp_at, walk

#: What ``gather`` may write too much.
SLACK = 8

_0, _1, _2, _4, _8, _28, _36, _56 = (np.uint64(number) for number in (0, 1, 2, 4, 8, 28, 36, 56))
_HOST_V6 = np.uint64(20)
_MAGIC_V1, _MAGIC_V2 = np.uint64(frame.MAGIC_V1), np.uint64(frame.MAGIC_V2)
_BORN_V6, _STORE_V6 = np.uint64(frame.FLAG_BORN_HOST_V6), np.uint64(frame.FLAG_STORE_HOST_V6)
_FRAME_SIZE_MIN = np.uint64(frame.FRAME_SIZE_MIN)


@numba.njit(nogil=True, cache=True)
def locate(frames, base, phy_offsets, sizes, store_timestamps, places):  # type: ignore[no-untyped-def]
    """Where the parts of the messages at ``phy_offsets`` of ``frames`` (uint8) stand, into ``places``, int64.

    ``frames[0]`` stands at physical offset ``base`` (uint64); offsets int64, sizes int32 and times int64 are those that
    were decoded. A column of places is where the born host, the store host and the body end, and the body and the
    properties begin. Returns how many rows there are before the first whose frame is another one now.
    """
    total = np.uint64(len(frames))
    for row in range(len(phy_offsets)):
        pos, size = np.uint64(phy_offsets[row]) - base, np.uint64(sizes[row])
        if pos > total or size < _FRAME_SIZE_MIN or size > total - pos:
            return row
        magic, flags = load_u32(frames, pos + _4), load_u32(frames, pos + _36)
        if magic != _MAGIC_V1 and magic != _MAGIC_V2:
            return row
        agree, body, body_end, _, _, properties = walk(frames, pos, pos + size, magic, flags)
        is_same = load_u32(frames, pos) == size and load_u64(frames, pos + _28) == base + pos
        if not agree or not is_same or store_timestamp_at(frames, pos) != store_timestamps[row]:
            return row
        born_end = pos + _56 + (_HOST_V6 - _8 if flags & _BORN_V6 else _0)
        places[0, row], places[1, row] = born_end, born_end + _8 + (_HOST_V6 if flags & _STORE_V6 else _8)
        places[2, row], places[3, row], places[4, row] = body, body_end, properties
    return len(phy_offsets)


@numba.njit(nogil=True, cache=True)
def locate_pairs(frames, starts, ends, places, row_starts):  # type: ignore[no-untyped-def]
    """The properties that count (spec rocketmq-store 2.4) of rows, which stand in ``frames[starts[r]:ends[r]]``.

    A column of ``places`` is where a name begins and ends, and where its value ends, int64; it has room for one in each
    four bytes and one a row. Row r has those from ``row_starts[r]`` (int64) on.
    """
    found = row_starts[0] = 0
    for row in range(len(starts)):
        name, end = np.uint64(starts[row]), np.uint64(ends[row])
        while name < end:
            value_end = find_byte(frames, name, end, _2)
            name_end = find_byte(frames, name, value_end, _1)
            if name < name_end and name_end + _1 < value_end:
                places[0, found], places[1, found], places[2, found] = name, name_end, value_end
                found += 1
            name = value_end + _1
        row_starts[row + 1] = found


@numba.njit(nogil=True, cache=True)
def gather(frames, starts, ends, data):  # type: ignore[no-untyped-def]
    """``frames[starts[i]:ends[i]]`` one behind the other into ``data`` (uint8), which has room for SLACK more."""
    at, last = _0, np.uint64(len(frames))
    for i in range(len(starts)):
        start, end = np.uint64(starts[i]), np.uint64(ends[i])
        if end + _8 <= last:
            # Whole words; what is copied too much is overwritten next.
            for k in range(_0, end - start, _8):
                _store_word(data, at + k, load_word(frames, start + k))
        else:
            for k in range(_0, end - start):
                data[at + k] = frames[start + k]
        at += end - start


@numba.njit(nogil=True, forceinline=True)
def _store_word(data, i, word):  # type: ignore[no-untyped-def]
    # Eight bytes, the lowest first: one store once compiled.
    for byte in range(_0, _8):
        data[i + byte] = np.uint8(word >> (byte * _8) & np.uint64(0xFF))
