"""From frames to Arrow's buffers: where each part of a message stands, and many parts copied one behind the other.

``locate`` looks into frames that a decoder has accepted, read a second time: so it trusts none of them, and says when
one is another now. It copies nothing but numbers; ``gather`` then copies one column after the other into buffers of
the exact size. What is inside the properties, ``texts_kernel`` finds.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from indexd.commitlog import format as frame
from indexd.commitlog.bytes_kernel import hash_utf8, load_u32, load_u64, load_word, same_bytes, signed_32
from indexd.commitlog.fields_kernel import find_topic_id
from indexd.commitlog.heads_kernel import store_timestamp_at
from indexd.commitlog.kernel import walk

LOCATED = 0
#: The table of hosts has no room for another, or the pairs and keys none for another row.
NO_ROOM = 1
#: The frame at the row is not the one that was decoded.
CHANGED = 2


class Spans(NamedTuple):
    """Where the parts of each row stand in the frames, from the first byte to behind the last; absent ones are empty.

    Row r has the pairs ``pair_start[r]`` to ``pair_start[r + 1]``, each a name and a value, and so the pieces of KEYS.
    """

    born_timestamp: NDArray[np.int64]
    reconsume_times: NDArray[np.int32]
    prepared_offset: NDArray[np.int64]
    born_host: NDArray[np.int32]
    store_host: NDArray[np.int32]
    body: NDArray[np.uint32]
    body_end: NDArray[np.uint32]
    properties: NDArray[np.uint32]
    properties_end: NDArray[np.uint32]
    uniq_key: NDArray[np.uint32]
    uniq_key_end: NDArray[np.uint32]
    tags: NDArray[np.uint32]
    tags_end: NDArray[np.uint32]
    pair_start: NDArray[np.int32]
    name: NDArray[np.uint32]
    name_end: NDArray[np.uint32]
    value: NDArray[np.uint32]
    value_end: NDArray[np.uint32]
    key_start: NDArray[np.int32]
    key: NDArray[np.uint32]
    key_end: NDArray[np.uint32]
    is_slow: NDArray[np.uint8]


_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)
_3 = np.uint64(3)
_4 = np.uint64(4)
_8 = np.uint64(8)
_LOW_32 = np.uint64(0xFFFFFFFF)
_BYTE = np.uint64(0xFF)
_NIBBLE = np.uint64(0xF)
_MAGIC_V1 = np.uint64(frame.MAGIC_V1)
_MAGIC_V2 = np.uint64(frame.MAGIC_V2)
_BORN_V6 = np.uint64(frame.FLAG_BORN_HOST_V6)
_STORE_V6 = np.uint64(frame.FLAG_STORE_HOST_V6)
_ANY_V6 = _BORN_V6 | _STORE_V6
_HOST_V6 = np.uint64(20)
_FRAME_SIZE_MIN = np.uint64(frame.FRAME_SIZE_MIN)
_HEX = np.frombuffer(b"0123456789ABCDEF", dtype=np.uint8)


@numba.njit(nogil=True, forceinline=True)
def _is_same_host(buffer, start, before, size):  # type: ignore[no-untyped-def]
    return load_word(buffer, start) == load_word(buffer, before) and (
        size == _8 or same_bytes(buffer, start, buffer, before, size)
    )


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
def locate(frames, base, phy_offsets, sizes, store_timestamps, want_hosts, spans, hosts):  # type: ignore[no-untyped-def]
    """Fixed fields, hosts, body and properties of the messages at ``phy_offsets`` of ``frames`` (uint8) into ``spans``.

    ``frames[0]`` stands at physical offset ``base`` (uint64); offsets int64, sizes int32 and times int64 are those that
    were decoded. ``hosts``: TopicArrays of the hosts met so far, by their bytes as stored. Returns (LOCATED, NO_ROOM
    for another host, or CHANGED; rows done).
    """
    # Taken out of their tuples once: a field of a tuple costs two reference counts at every access.
    born_timestamps, reconsume_times, prepared = spans.born_timestamp, spans.reconsume_times, spans.prepared_offset
    born_hosts, store_hosts, bodies, body_ends = spans.born_host, spans.store_host, spans.body, spans.body_end
    all_properties, properties_ends = spans.properties, spans.properties_end
    host_table, host_starts, host_data, hosts_known = hosts.table, hosts.start, hosts.data, hosts.known
    row, rows = _0, np.uint64(len(phy_offsets))
    born_before, store_before, flags_before = _0, _0, _0
    born_id, store_id = np.int64(-1), np.int64(-1)
    while row < rows:
        pos, size = np.uint64(phy_offsets[row]) - base, np.uint64(sizes[row])
        is_same, flags, body, body_end, properties = _open_frame(frames, base, pos, size, store_timestamps[row])
        if not is_same:
            return CHANGED, row
        born_size = _HOST_V6 if flags & _BORN_V6 else _8
        store_size = _HOST_V6 if flags & _STORE_V6 else _8
        born, stored = pos + np.uint64(48), pos + np.uint64(56) + born_size
        if want_hosts:
            if flags & _ANY_V6 != flags_before:
                flags_before = flags & _ANY_V6
                born_id = store_id = np.int64(-1)
            if born_id < np.int64(0) or not _is_same_host(frames, born, born_before, born_size):
                hashed = hash_utf8(frames, born, born + born_size, _0) & _LOW_32
                born_id = find_topic_id(
                    frames, born, born + born_size, hashed, host_table, host_starts, host_data, hosts_known
                )
            if store_id < np.int64(0) or not _is_same_host(frames, stored, store_before, store_size):
                hashed = hash_utf8(frames, stored, stored + store_size, _0) & _LOW_32
                store_id = find_topic_id(
                    frames, stored, stored + store_size, hashed, host_table, host_starts, host_data, hosts_known
                )
            if born_id < np.int64(0) or store_id < np.int64(0):
                return NO_ROOM, row
            born_before, store_before = born, stored
            born_hosts[row], store_hosts[row] = np.int32(born_id), np.int32(store_id)
        born_timestamps[row] = np.int64(load_u64(frames, pos + np.uint64(40)))
        reconsume_times[row] = np.int32(signed_32(load_u32(frames, stored + store_size)))
        prepared[row] = np.int64(load_u64(frames, stored + store_size + _4))
        bodies[row], body_ends[row] = np.uint32(body), np.uint32(body_end)
        all_properties[row], properties_ends[row] = np.uint32(properties), np.uint32(pos + size)
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


@numba.njit(nogil=True, cache=True)
def offset_ids(hosts, store_hosts, phy_offsets, offsets, data):  # type: ignore[no-untyped-def]
    """Offset message ids (spec 9.7) into ``data`` and their ``offsets`` (int32): hex of the host as stored and the
    physical offset; the bytes written. ``data`` has room for 56 bytes a row.
    """
    at = _0
    row, rows = _0, np.uint64(len(phy_offsets))
    offsets[0] = 0
    while row < rows:
        host = np.uint64(store_hosts[row])
        i, last = np.uint64(hosts.start[host]), np.uint64(hosts.start[host + _1])
        while i < last:
            byte = np.uint64(hosts.data[i])
            data[at] = _HEX[byte >> _4]
            data[at + _1] = _HEX[byte & _NIBBLE]
            at += _2
            i += _1
        offset = np.uint64(phy_offsets[row])
        shift = np.uint64(64)
        while shift > _0:
            shift -= _4
            data[at] = _HEX[(offset >> shift) & _NIBBLE]
            at += _1
        row += _1
        offsets[row] = np.int32(at)
    return at
