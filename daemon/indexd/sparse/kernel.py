"""Which messages get entries: Kafka's rule for the batches of a segment; compiled.

Offsets in here are relative to a segment's base wherever nothing else is said. ``state`` is what a segment carries from
call to call, so that the entries do not depend on how the rows are split: five int64, see ``new_state``.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from indexd.sparse.format import NO_TIMESTAMP

_, MAX_TIMESTAMP, MAX_TIMESTAMP_OFFSET, LAST_TIMESTAMP, MESSAGES = range(5)

#: Entries as they lie in the files; offsets relative.
OFFSET_ENTRY_TYPE = np.dtype([("offset", ">i4"), ("position", ">i4")])
TIME_ENTRY_TYPE = np.dtype([("timestamp", ">i8"), ("offset", ">i4")])
ENTRY_TYPES = OFFSET_ENTRY_TYPE, TIME_ENTRY_TYPE

_0 = np.uint64(0)
_1 = np.uint64(1)


def pack_entries(rows: NDArray[np.int64], entry: np.dtype[np.void]) -> bytes:
    """Entries, rows of two numbers, as the bytes of a file."""
    return np.rec.fromarrays(rows.T, dtype=entry).tobytes()


def unpack_entries(data: bytes, entry: np.dtype[np.void]) -> NDArray[np.int64]:
    """The opposite; what behind the last whole entry is no entry is left out."""
    entries = np.frombuffer(data, entry, len(data) // entry.itemsize)
    return np.stack([entries[field].astype(np.int64) for field in entry.names or ()], axis=1)


def new_state() -> NDArray[np.int64]:
    """The state of a segment without messages, by the names above.

    Bytes since the last offset entry; largest timestamp and the offset that had it first; timestamp of the last time
    entry (-1: none); messages so far.
    """
    return np.array([0, NO_TIMESTAMP, 0, NO_TIMESTAMP, 0], dtype=np.int64)


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
    at, room = np.uint64(row), np.uint64(min(len(offset_entries), len(time_entries)))
    since, largest, first, last = state[0], state[1], state[2], state[3]
    offsets = times = _0
    while at < np.uint64(rows) and offsets < room:
        # The per-batch rule (spec 8, step 3): an entry for a row behind more than interval bytes. In local variables:
        # kept in an array, or passed through a function, they cost ten times as much.
        if timestamps[at] > largest:
            largest = timestamps[at]
            first = last_offsets[at]
        if since > interval:
            offset_entries[offsets, _0] = last_offsets[at]
            offset_entries[offsets, _1] = positions[at]
            offsets += _1
            if largest > last:
                time_entries[times, _0] = largest
                time_entries[times, _1] = first
                last = largest
                times += _1
            since = np.int64(0)
        since += sizes[at]
        at += _1
    state[0], state[1], state[2], state[3] = since, largest, first, last
    state[4] += np.int64(at) - np.int64(row)
    return np.int64(at), np.int64(offsets), np.int64(times)


def final_time_entry(state: NDArray[np.int64]) -> tuple[int, int] | None:
    """(timestamp, relative offset) that a roll adds at the end, or None; the state takes it for written (spec 8)."""
    if state[MAX_TIMESTAMP] <= state[LAST_TIMESTAMP]:
        return None
    state[LAST_TIMESTAMP] = state[MAX_TIMESTAMP]
    return int(state[MAX_TIMESTAMP]), int(state[MAX_TIMESTAMP_OFFSET])
