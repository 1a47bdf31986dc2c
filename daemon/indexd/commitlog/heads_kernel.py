"""The compiled pieces that look at heads alone: what stands at a position, the last head, the next one after damage."""

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog import format as frame
from indexd.commitlog.bytes_kernel import load_u32, load_u64

_0 = np.uint64(0)
_1 = np.uint64(1)
_4 = np.uint64(4)
_8 = np.uint64(8)
_MAGIC_V1 = np.uint64(frame.MAGIC_V1)
_MAGIC_V2 = np.uint64(frame.MAGIC_V2)
_MAGIC_BLANK = np.uint64(frame.MAGIC_BLANK)
_BORN_V6 = np.uint64(frame.FLAG_BORN_HOST_V6)
_TIMESTAMP_END = np.uint64(76)
_HEAD_SIZE = np.uint64(frame.HEAD_SIZE)
_FRAME_SIZE_MIN = np.uint64(frame.FRAME_SIZE_MIN)
_MESSAGE = int(frame.Outcome.MESSAGE)
_END_OF_FILE = int(frame.Outcome.END_OF_FILE)
_NOT_YET = int(frame.Outcome.NOT_YET_WRITTEN)
_CORRUPT = int(frame.Outcome.CORRUPT)
_NONE = int(frame.Reason.NONE)
_BAD_MAGIC = int(frame.Reason.BAD_MAGIC)
_BAD_TOTAL = int(frame.Reason.BAD_TOTAL_SIZE)
_WRONG_OFFSET = int(frame.Reason.WRONG_PHYSICAL_OFFSET)
_BAD_BLANK = int(frame.Reason.BAD_BLANK)
_DLEDGER = int(frame.Reason.DLEDGER)


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
