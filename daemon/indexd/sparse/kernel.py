"""Which messages get entries: Kafka's rule for the batches of a segment; compiled.

Offsets in here are relative to a segment's base wherever nothing else is said. ``state`` is what a segment carries from
call to call, so that the entries do not depend on how the rows are split: five int64, see ``new_state``.
"""

from __future__ import annotations

import sys

import numba
import numpy as np
from numpy.typing import NDArray

from indexd.sparse.format import NO_TIMESTAMP

if sys.byteorder != "little":  # the swaps below assume it, and every machine that runs RocketMQ has it
    raise ImportError("indexd runs on little-endian machines only")

BYTES_SINCE, MAX_TIMESTAMP, MAX_TIMESTAMP_OFFSET, LAST_TIMESTAMP, MESSAGES = range(5)

_0 = np.uint64(0)
_1 = np.uint64(1)
_2 = np.uint64(2)


def new_state() -> NDArray[np.int64]:
    """The state of a segment without messages, by the names above.

    Bytes since the last offset entry; largest timestamp and the offset that had it first; timestamp of the last time
    entry (-1: none); messages so far.
    """
    return np.array([0, NO_TIMESTAMP, 0, NO_TIMESTAMP, 0], dtype=np.int64)


@numba.njit(nogil=True, forceinline=True)
def _put(position, size, offset, timestamp, interval, state, offset_entries, time_entries, counts):  # type: ignore[no-untyped-def]
    # One row by Kafka's per-batch rule (spec 8, step 3): an entry for a row behind more than interval bytes.
    if timestamp > state[1]:
        state[1] = timestamp
        state[2] = offset
    if state[0] > interval:
        at = np.uint64(counts[0])
        offset_entries[at, _0] = offset
        offset_entries[at, _1] = position
        counts[0] += np.int64(1)
        if state[1] > state[3]:
            at = np.uint64(counts[1])
            time_entries[at, _0] = state[1]
            time_entries[at, _1] = state[2]
            state[3] = state[1]
            counts[1] += np.int64(1)
        state[0] = np.int64(0)
    state[0] += size


@numba.njit(nogil=True, cache=True, error_model="numpy")
def segment_entries(  # type: ignore[no-untyped-def]
    positions, sizes, last_offsets, timestamps, row, rows, interval, state, offset_entries, time_entries
):
    """Rows ``[row, rows)``, the batches of one segment in order: what append, and what recovery, puts into its indexes.

    All columns int64: byte position in the segment, total size, last offset relative to the base (the caller has
    checked 0 .. 2^31-1), largest timestamp. ``offset_entries`` (n, 2): relative offset, position; ``time_entries``
    (n, 2): timestamp, relative offset; both int64 of one length, filled from their front. Stops when they are full.
    Returns (first row not taken, offset entries, time entries). The roll's last time entry is ``final_time_entry``'s.

    Recovery's own rule, "bytes so far minus the position of the last indexed batch > interval", is the same number
    when it is fed from position 0 without a gap and with a new state: there is no second function for it.
    """
    counts = np.zeros(2, dtype=np.int64)
    at = np.uint64(row)
    room = np.int64(min(len(offset_entries), len(time_entries)))
    while at < np.uint64(rows) and counts[0] < room:
        _put(
            positions[at],
            sizes[at],
            last_offsets[at],
            timestamps[at],
            interval,
            state,
            offset_entries,
            time_entries,
            counts,
        )
        state[4] += np.int64(1)
        at += _1
    return np.int64(at), counts[0], counts[1]


@numba.njit(nogil=True, cache=True, error_model="numpy")
def message_entries(  # type: ignore[no-untyped-def]
    phy_offsets, sizes, store_timestamps, row, rows, base, end, interval, state, offset_entries, time_entries
):
    """The same for columns of a DispatchBatch, each message a batch of its own whose offset is its ordinal, state[4].

    Takes the rows of the segment ``[base, end)`` from ``row`` on; stops at the first row of another one as well.
    """
    counts = np.zeros(2, dtype=np.int64)
    at = np.uint64(row)
    room = np.int64(min(len(offset_entries), len(time_entries)))
    while at < np.uint64(rows) and counts[0] < room and phy_offsets[at] < end:
        _put(
            phy_offsets[at] - base,
            np.int64(sizes[at]),
            state[4],
            store_timestamps[at],
            interval,
            state,
            offset_entries,
            time_entries,
            counts,
        )
        state[4] += np.int64(1)
        at += _1
    return np.int64(at), counts[0], counts[1]


def final_time_entry(state: NDArray[np.int64]) -> tuple[int, int] | None:
    """(timestamp, relative offset) that a roll adds at the end, or None; the state takes it for written (spec 8)."""
    if state[MAX_TIMESTAMP] <= state[LAST_TIMESTAMP]:
        return None
    state[LAST_TIMESTAMP] = state[MAX_TIMESTAMP]
    return int(state[MAX_TIMESTAMP]), int(state[MAX_TIMESTAMP_OFFSET])


def load_kernels() -> None:
    """Have the rule compiled, or loaded from where it is kept."""
    numbers, sizes = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int32)
    entries = np.empty((1, 2), dtype=np.int64)
    message_entries(numbers, sizes, numbers, 0, 0, 0, 1, 0, new_state(), entries, entries)
