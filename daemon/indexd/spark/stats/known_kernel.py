"""The second pass: how often the texts occur that a first one has found to be frequent; compiled."""
# mypy: allow-untyped-decorators

from __future__ import annotations

import numba
import numpy as np

from indexd.commitlog.bytes_kernel import find_byte
from indexd.commitlog.kernel import KEYS, TAGS, UNIQ_KEY, decode_properties
from indexd.spark.stats.content_kernel import DONE, NO_FRAME
from indexd.spark.stats.parts_kernel import (
    OF_HOST,
    OF_KEY,
    OF_TAGS,
    OF_TOPIC,
    OF_UNIQ_KEY,
    fingerprint,
    frame_parts,
)
from indexd.spark.stats.table_kernel import COUNT, PRINT, find_place

_0 = np.uint64(0)
_1 = np.uint64(1)
_SPACE = np.uint64(0x20)


@numba.njit(nogil=True, forceinline=True)
def _count_known(known, value):  # type: ignore[no-untyped-def]
    place = find_place(known, value)
    if known[place, PRINT] == value:
        known[place, COUNT] += _1


@numba.njit(nogil=True, cache=True)
def count_known(buffer, base, columns, rows, wanted, known):  # type: ignore[no-untyped-def]
    """Count the fingerprints that the table ``known`` holds, and no other; DONE or NO_FRAME, and the row."""
    phy_offsets, sizes, store_timestamps = columns.phy_offset, columns.size, columns.store_timestamp
    topic_ids, sys_flags = columns.topic_id, columns.sys_flag
    limit = np.uint64(len(buffer))
    spans = np.zeros(12, dtype=np.uint64)
    row = _0
    while row < np.uint64(rows):
        timestamp = store_timestamps[row]
        if (
            wanted.topics[np.uint64(topic_ids[row])] == np.uint8(0)
            or timestamp < wanted.begin
            or timestamp > wanted.end
        ):
            row += _1
            continue
        pos, size = np.uint64(phy_offsets[row]) - base, np.uint64(sizes[row])
        is_frame, _, topic_start, topic_end, properties = frame_parts(buffer, pos, size, limit)
        if not is_frame:
            return NO_FRAME, row
        decode_properties(buffer, properties, pos + size, spans)
        topic_print = fingerprint(buffer, topic_start, topic_end, OF_TOPIC)
        i = spans[KEYS]
        end = spans[KEYS + _1]
        while i < end:
            piece = i
            i = find_byte(buffer, i, end, _SPACE)
            if i > piece:
                _count_known(known, fingerprint(buffer, piece, i, topic_print ^ OF_KEY))
            i += _1
        if spans[UNIQ_KEY + _1] > _0:
            value = fingerprint(buffer, spans[UNIQ_KEY], spans[UNIQ_KEY + _1], topic_print ^ OF_UNIQ_KEY)
            _count_known(known, value)
        if spans[TAGS + _1] > _0:
            _count_known(known, fingerprint(buffer, spans[TAGS], spans[TAGS + _1], topic_print ^ OF_TAGS))
        host = pos + np.uint64(48)
        host_size = np.uint64(16) if np.int64(sys_flags[row]) & np.int64(0x10) else np.uint64(4)
        _count_known(known, fingerprint(buffer, host, host + host_size, OF_HOST))
        row += _1
    return DONE, row
