"""The broker's answer out of what is in memory, in one compiled call: index files, then frames (spec 3.6, 3.7, 9.5).

The twin of ``query.rocketmq.query_offsets`` and of ``LogView.frame`` for what is sound and of common size; whatever is
not ends in LEFT, and is theirs. Nothing is waited for: reads are RWF_NOWAIT. The interpreter is held all the while: it
is some microseconds, and who hands it over at each read may wait milliseconds to have it back.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numba
import numpy as np
from numba import types

from indexd.commitlog import format as frame
from indexd.commitlog.bytes_kernel import CRC_TABLES, load_u32, load_u64, signed_32
from indexd.commitlog.kernel import check_crc, head, walk
from indexd.index.format import ENTRY_SIZE, HEADER_SIZE, SLOT_SIZE

#: Somebody else has to answer: it is not in memory, not sound, too much, or takes too long.
LEFT = -1
#: Columns of ``headers``: begin and end time, end offset, index count, and whether that is final.
BEGIN_TIME, END_TIME, END_PHY, COUNT, IS_FULL = range(5)
#: Members of ``sizes``: first segment's base, segment, slots and entries of an index file, largest frame.
FIRST_BASE, SEGMENT, SLOTS, ENTRIES, FRAME_MAX = range(5)
#: The part of ``buffer`` before the frames, and what is read of a frame that is not known to be longer.
SCRATCH = 4096
_ENTRIES_PER_READ = 204
# Of all files, and entries of all chains: a call is ended within a millisecond.
_READS_MAX, _STEPS_MAX = 1000, 10_000
# Members of ``work``: memory for a struct iovec, and how many reads and steps are left.
_ADDRESS, _SIZE, _READS, _STEPS = range(4)
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)
_MESSAGE = int(frame.Outcome.MESSAGE)
_NOT_YET = int(frame.Outcome.NOT_YET_WRITTEN)
_NONE = int(frame.Reason.NONE)
_0 = np.uint64(0)
_1 = np.uint64(1)
_4 = np.uint64(4)

# By its name, so that what is compiled can be kept; not compiled, by the same one.
_preadv2: Any = types.ExternalFunction(
    "preadv2", types.intp(types.int32, types.uintp, types.int32, types.int64, types.int32)
)
if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # set by the environment
    _interpreted = ctypes.CDLL(None).preadv2
    _interpreted.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_int)
    _interpreted.restype = ctypes.c_ssize_t

    def _preadv2(*numbers: int) -> int:
        return int(_interpreted(*map(int, numbers)))


@numba.njit
def _read(fd, buffer, at, size, position, work):  # type: ignore[no-untyped-def]  # numba infers the types
    # Whether all of it was there, and may still be read.
    if work[_READS] == _0:
        return False
    work[_READS] -= _1
    work[_ADDRESS] = np.uint64(buffer.ctypes.data) + np.uint64(at)
    work[_SIZE] = np.uint64(size)
    address = np.uintp(work.ctypes.data)
    count = _preadv2(np.int32(fd), address, np.int32(1), np.int64(position), np.int32(_NOWAIT))
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
        if work[_STEPS] == _0:
            return LEFT
        work[_STEPS] -= _1
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
def find_offsets(files, headers, sizes, key_hash, most, begin, end, places, buffer, work):  # type: ignore[no-untyped-def]
    """``query_offsets``, ascending: how many there are now in ``places``, or LEFT."""
    slot_at = HEADER_SIZE + SLOT_SIZE * (key_hash % sizes[SLOTS])
    entries_at = HEADER_SIZE + SLOT_SIZE * sizes[SLOTS]
    found = 0
    for i in range(len(files)):
        fd, header = files[i], headers[i]
        number = np.int64(0)
        if not header[IS_FULL]:  # it grows: the header is read behind the slot
            if not _read(fd, buffer, 0, SLOT_SIZE, slot_at, work):
                return LEFT
            number = _int(buffer, 0)
            if not _read(fd, buffer, 0, HEADER_SIZE, 0, work):
                return LEFT
            header[BEGIN_TIME], header[END_TIME] = _long(buffer, 0), _long(buffer, 8)
            header[END_PHY], header[COUNT] = _long(buffer, 24), max(_int(buffer, 36), 1)
        first, last = header[BEGIN_TIME], header[END_TIME]
        if (begin < first and end > last) or first <= begin <= last or first <= end <= last:
            if header[IS_FULL]:
                if not _read(fd, buffer, 0, SLOT_SIZE, slot_at, work):
                    return LEFT
                number = _int(buffer, 0)
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
    _sort(places, found)
    return found


@numba.njit
def _sort(places, count):  # type: ignore[no-untyped-def]
    # They come newest first, so that turned round they are nearly ascending.
    for i in range(count // 2):
        places[i], places[count - 1 - i] = places[count - 1 - i], places[i]
    for i in range(1, count):
        place, j = places[i], i
        while j > 0 and places[j - 1] > place:
            places[j] = places[j - 1]
            j -= 1
        places[j] = place


@numba.njit
def _read_frame(segments, sizes, phy_offset, at, size_max, buffer, work):  # type: ignore[no-untyped-def]
    # LogView.frame into ``buffer`` from ``at`` on: its size, or LEFT.
    size = sizes[SEGMENT]
    number = (phy_offset - sizes[FIRST_BASE]) // size
    if phy_offset < sizes[FIRST_BASE] or number >= len(segments) or segments[number] < 0:
        return LEFT
    position = phy_offset % size
    want = min(SCRATCH, size - position)
    pos, base = np.uint64(at), np.uint64(phy_offset) - np.uint64(at)
    segment_end, frame_max = np.uint64(phy_offset - position + size), np.uint64(sizes[FRAME_MAX])
    outcome, total = _NOT_YET, np.uint64(want)
    for _ in range(2):
        want = np.int64(total)
        if at + want > len(buffer) or not _read(segments[number], buffer, at, want, position, work):
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


@numba.njit
def read_frames(segments, sizes, places, count, at, size_max, buffer, work):  # type: ignore[no-untyped-def]
    """The frames at ``count`` places, of ``size_max`` bytes at most, into ``buffer`` from ``at`` on; LEFT if not all.

    Behind the last one, which ``places`` then says of each.
    """
    end = np.int64(at)
    for i in range(count):
        size = _read_frame(segments, sizes, places[i], end, size_max - (end - at), buffer, work)
        if size == LEFT:
            return np.int64(LEFT)
        end += size
        places[i] = end
    return end


@numba.njit
def refill(work):  # type: ignore[no-untyped-def]
    """What one call may read and walk, from now on."""
    work[_READS], work[_STEPS] = np.uint64(_READS_MAX), np.uint64(_STEPS_MAX)


@numba.njit(cache=True)
def answer(files, headers, segments, sizes, key_hash, most, begin, end, size_max, places, buffer, work):  # type: ignore[no-untyped-def]
    """How many frames of at most ``size_max`` bytes answer a query for at most ``most``, or LEFT.

    ``files`` and ``segments``: descriptors, int64, -1 for a segment that is not open; index files newest first, with
    ``headers``, (n, 5) int64, of which those of files that grow are written here. ``buffer`` uint8 with the frames from
    SCRATCH on, ``places`` int64 with where each ends; ``work`` four uint64.
    """
    refill(work)
    found = find_offsets(files, headers, sizes, key_hash, most, begin, end, places, buffer, work)
    if found == LEFT or read_frames(segments, sizes, places, found, SCRATCH, size_max, buffer, work) == LEFT:
        return LEFT
    return found
