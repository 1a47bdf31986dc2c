"""The one loop that every message of a split passes through for statistics: counts by topic and time, sizes, keys.

It stops, and says where, when an array has to be made larger or thinned out; ``content`` does that and calls again.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.bytes_kernel import find_byte
from indexd.commitlog.kernel import KEYS, TAGS, UNIQ_KEY, decode_properties
from indexd.spark.stats.parts_kernel import (
    OF_HOST,
    OF_KEY,
    OF_TAGS,
    OF_TOPIC,
    OF_UNIQ_KEY,
    bucket_of,
    fingerprint,
    frame_parts,
    mix,
)
from indexd.spark.stats.table_kernel import add

DONE, THIN, GROW, NO_FRAME = range(4)

#: The columns of a cell, what is counted by topic and bin of time.
CELL = ("messages", "bytes", "body_bytes", "keys", "without_keys", "without_any_key", "tagged", "entries")
#: Of everything: rows and entries of all messages, selected or not; compressed ones; the four transaction types.
SUMS = ("rows", "entries", "compressed", "normal", "prepared", "committed", "rolled_back")
#: The clock's own: is there a message, first and last store time, least and greatest, first and last offset, counts.
CLOCK = ("any", "first", "last", "least", "greatest", "first_phy", "last_phy", "steps", "silences", "kept_events")

#: For times of which no clock shows the hour, and for all where there are too many bins.
NO_BIN = -(1 << 63)
EVENT_COLUMNS = 3
_0 = np.uint64(0)
_1 = np.uint64(1)
_SPACE = np.uint64(0x20)
_HOUR = np.int64(3_600_000)
_HOUR_MAX = np.int64((1 << 31) - 1)
_HOUR_MIN = np.int64(-(1 << 31))
_NO_BIN = np.int64(NO_BIN)
_ANY, _FIRST, _LAST, _LEAST, _GREATEST, _FIRST_PHY, _LAST_PHY, _STEPS, _SILENCES, _KEPT = (
    np.uint64(i) for i in range(10)
)


class Cells(NamedTuple):
    """Counts by topic and time: an open hash table over (topic id, bin since 1970); ``used[0]`` are taken."""

    topic: NDArray[np.int32]
    bin: NDArray[np.int64]
    values: NDArray[np.int64]
    used: NDArray[np.int64]


class Table(NamedTuple):
    """A counting table (``table_kernel``); ``limits`` is (thin out when more are used, sampling mask)."""

    rows: NDArray[np.uint64]
    used: NDArray[np.int64]
    limits: NDArray[np.uint64]


class Wanted(NamedTuple):
    """Which messages count: selected topic ids (uint8 each), store times from begin to end, both included, ms.

    ``silence`` ms without a message is one; ``skip_mask`` says which transaction types get no index entries.
    """

    topics: NDArray[np.uint8]
    begin: np.int64
    end: np.int64
    silence: np.int64
    skip_mask: np.int64
    #: How long a bin is, in ms.
    step: np.int64
    #: Every time is counted as NO_BIN from now on: there are too many of them.
    fold_bins: bool


@numba.njit(nogil=True, forceinline=True)
def _cell_of(topic, time, topics, bins):  # type: ignore[no-untyped-def]
    # The place of a topic and bin; a free one has topic -1.
    mask = np.uint64(len(topics)) - _1
    place = mix(np.uint64(topic) << np.uint64(33) ^ np.uint64(time)) & mask
    while topics[place] >= np.int32(0) and not (np.int64(topics[place]) == topic and bins[place] == time):
        place = (place + _1) & mask
    return place


@numba.njit(nogil=True, cache=True)
def move_cells(old, new, factor):  # type: ignore[no-untyped-def]
    """Every cell that is taken into other arrays, empty and large enough; ``factor`` bins become one."""
    topics, bins, values = new.topic, new.bin, new.values
    for number in range(len(old.topic)):
        i = np.uint64(number)
        if old.topic[i] >= np.int32(0):
            time = old.bin[i] if old.bin[i] == _NO_BIN else old.bin[i] // factor
            place = _cell_of(np.int64(old.topic[i]), time, topics, bins)
            new.used[_0] += np.int64(topics[place] < np.int32(0))
            topics[place] = old.topic[i]
            bins[place] = time
            for column in range(values.shape[1]):
                values[place, np.uint64(column)] += old.values[i, np.uint64(column)]


@numba.njit(nogil=True, forceinline=True)
def _tick(clock, events, timestamp, phy, silence):  # type: ignore[no-untyped-def]
    # The store time of the next message: a step back, a silence, or neither.
    if clock[_ANY] == np.int64(0):
        clock[_ANY] = np.int64(1)
        clock[_FIRST] = clock[_LEAST] = clock[_GREATEST] = timestamp
        clock[_FIRST_PHY] = phy
    else:
        last = clock[_LAST]
        is_step = timestamp < last
        # Unsigned: times that no clock shows may be further apart than int64 holds.
        is_silence = timestamp > last and np.uint64(timestamp) - np.uint64(last) > np.uint64(silence)
        if is_step or is_silence:
            clock[_STEPS if is_step else _SILENCES] += np.int64(1)
            at = np.uint64(clock[_KEPT])
            events[at, _0] = phy
            events[at, _1] = last
            events[at, np.uint64(2)] = timestamp
            clock[_KEPT] += np.int64(1)
        clock[_LEAST] = min(clock[_LEAST], timestamp)
        clock[_GREATEST] = max(clock[_GREATEST], timestamp)
    clock[_LAST] = timestamp
    clock[_LAST_PHY] = phy


@numba.njit(nogil=True, forceinline=True)
def _count_keys(buffer, spans, topic_print, phy, keys, sample):  # type: ignore[no-untyped-def]
    # Each piece of KEYS into the table of hot keys and, where it falls into it, the sample; how many pieces.
    key_rows, keys_used, sample_rows, sample_used = keys.rows, keys.used, sample.rows, sample.used
    mask = sample.limits[_1]
    count = np.int64(0)
    i = spans[KEYS]
    end = spans[KEYS + _1]
    while i < end:
        piece = i
        i = find_byte(buffer, i, end, _SPACE)
        if i > piece:
            value = fingerprint(buffer, piece, i, topic_print ^ OF_KEY)
            add(key_rows, keys_used, value, phy)
            if value & mask == _0:
                add(sample_rows, sample_used, value, phy)
            count += np.int64(1)
        i += _1
    return count


@numba.njit(nogil=True, forceinline=True)
def _count_rest(buffer, pos, flags, spans, topic_print, phy, uniq_keys, uniq_sample, tags, hosts):  # type: ignore[no-untyped-def]
    # Unique key, tags and born host of a message; (has a unique key, has tags).
    has_uniq, has_tags = spans[UNIQ_KEY + _1] > _0, spans[TAGS + _1] > _0
    if has_uniq:
        value = fingerprint(buffer, spans[UNIQ_KEY], spans[UNIQ_KEY + _1], topic_print ^ OF_UNIQ_KEY)
        add(uniq_keys.rows, uniq_keys.used, value, phy)
        if value & uniq_sample.limits[_1] == _0:
            add(uniq_sample.rows, uniq_sample.used, value, phy)
    if has_tags:
        value = fingerprint(buffer, spans[TAGS], spans[TAGS + _1], topic_print ^ OF_TAGS)
        add(tags.rows, tags.used, value, phy)
    host = pos + np.uint64(48)
    size = np.uint64(16) if flags & np.int64(0x10) else np.uint64(4)
    add(hosts.rows, hosts.used, fingerprint(buffer, host, host + size, OF_HOST), phy)
    return has_uniq, has_tags


@numba.njit(nogil=True, forceinline=True)
def _is_over(table):  # type: ignore[no-untyped-def]
    return np.uint64(table.used[_0]) > table.limits[_0]


@numba.njit(nogil=True, forceinline=True)
def _are_over(tables):  # type: ignore[no-untyped-def]
    keys, key_sample, uniq_keys, uniq_sample, tags, hosts = tables
    if _is_over(keys) or _is_over(key_sample) or _is_over(uniq_keys):
        return True
    return _is_over(uniq_sample) or _is_over(tags) or _is_over(hosts)


@numba.njit(nogil=True, forceinline=True)
def _counted_cell(topic, timestamp, wanted, cells):  # type: ignore[no-untyped-def]
    # The counts of a topic and bin, entered where it is new.
    hour = timestamp // _HOUR
    time = timestamp // wanted.step
    if wanted.fold_bins or hour > _HOUR_MAX or hour <= _HOUR_MIN:
        time = _NO_BIN
    place = _cell_of(topic, time, cells.topic, cells.bin)
    if cells.topic[place] < np.int32(0):
        cells.topic[place] = np.int32(topic)
        cells.bin[place] = time
        cells.used[_0] += np.int64(1)
    return cells.values[place]


@numba.njit(nogil=True, cache=True)
def count_rows(buffer, base, columns, row, rows, wanted, cells, sums, bodies, clock, events, tables):  # type: ignore[no-untyped-def]
    """Count the messages from ``row`` on; returns (status, the first row that was not counted).

    ``buffer`` uint8 with its byte 0 at physical offset ``base`` (uint64). ``tables`` are, in this order, keys, their
    sample, unique keys, their sample, tags and hosts; each has room for one message's keys beyond its limit.
    """
    keys, key_sample, uniq_keys, uniq_sample, tags, hosts = tables
    phy_offsets, sizes, store_timestamps = columns.phy_offset, columns.size, columns.store_timestamp
    topic_ids, sys_flags, key_starts = columns.topic_id, columns.sys_flag, columns.key_start
    selected, begin, end, silence, skip_mask = wanted.topics, wanted.begin, wanted.end, wanted.silence, wanted.skip_mask
    limit = np.uint64(len(buffer))
    spans = np.zeros(12, dtype=np.uint64)
    row = np.uint64(row)
    while row < np.uint64(rows):
        if _are_over(tables) or np.uint64(clock[_KEPT]) + _1 > np.uint64(len(events)):
            return THIN, row
        if np.uint64(cells.used[_0]) * np.uint64(2) >= np.uint64(len(cells.topic)):
            return GROW, row
        phy, timestamp = phy_offsets[row], store_timestamps[row]
        flags, topic = np.int64(sys_flags[row]), np.int64(topic_ids[row])
        transaction = flags & np.int64(0xC)
        entries = np.int64(0)
        if (skip_mask >> transaction) & np.int64(1) == np.int64(0):
            entries = key_starts[row + _1] - key_starts[row]
        if selected[np.uint64(topic)] == np.uint8(0) or timestamp < begin or timestamp > end:
            sums[_0] += np.int64(1)
            sums[_1] += entries
            row += _1
            continue
        pos, size = np.uint64(phy) - base, np.uint64(sizes[row])
        is_frame, body_size, topic_start, topic_end, properties = frame_parts(buffer, pos, size, limit)
        if not is_frame:
            return NO_FRAME, row
        sums[_0] += np.int64(1)
        sums[_1] += entries
        sums[np.uint64(2)] += flags & np.int64(1)
        sums[np.uint64(3) + np.uint64(transaction >> np.int64(2))] += np.int64(1)
        _tick(clock, events, timestamp, phy, silence)
        bucket = bucket_of(body_size)
        bodies[_0, bucket] += np.int64(1)
        bodies[_1, bucket] += np.int64(body_size)
        decode_properties(buffer, properties, pos + size, spans)
        topic_print = fingerprint(buffer, topic_start, topic_end, OF_TOPIC)
        pieces = _count_keys(buffer, spans, topic_print, np.uint64(phy), keys, key_sample)
        has_uniq, has_tags = _count_rest(
            buffer, pos, flags, spans, topic_print, np.uint64(phy), uniq_keys, uniq_sample, tags, hosts
        )
        cell = _counted_cell(topic, timestamp, wanted, cells)
        cell[_0] += np.int64(1)
        cell[_1] += np.int64(size)
        cell[np.uint64(2)] += np.int64(body_size)
        cell[np.uint64(3)] += pieces
        cell[np.uint64(4)] += np.int64(pieces == np.int64(0))
        cell[np.uint64(5)] += np.int64(pieces == np.int64(0) and not has_uniq)
        cell[np.uint64(6)] += np.int64(has_tags)
        cell[np.uint64(7)] += entries
        row += _1
    return DONE, row
