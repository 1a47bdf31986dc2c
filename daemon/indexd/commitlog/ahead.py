"""ReadAhead: large stretches of the log, each ending at a head that was seen before the stretch was read.

Only for catching up, when much is left. A head some MiB ahead is looked for FIRST, then everything up to it is read. If
the frames then lead exactly there, the head is theirs, and they were complete when it was seen: one read is enough.
With ``overlap`` the next stretch is read by a thread while this one is decoded.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.cursor import SegmentCursor
from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.heads_kernel import find_frame, store_timestamp_at

# How much is searched for a head: longer than most frames. A longer frame there costs a second read, nothing else.
_PROBE_SIZE = 32 << 10
_TIMESTAMP_END = 76


class Ahead(NamedTuple):
    """The bytes of ``[begin, end)`` at the front of ``buffer``, and the store timestamp of the head at ``end``."""

    begin: int
    end: int
    buffer: NDArray[np.uint8]
    timestamp: int

    def vouches_for(self, batch: DispatchBatch) -> bool:
        """Whether ``batch`` leads exactly to the head, its times never falling: no frame in it is of an older log."""
        times = batch.columns.store_timestamp[: batch.rows]
        rising = bool((times[1:] >= times[:-1]).all()) and int(times[-1]) <= self.timestamp
        return rising and batch.end_offset == self.end


class ReadAhead:
    """Reads from a cursor's open segment; ``wait`` must be called before that is closed."""

    def __init__(self, cursor: SegmentCursor, read_size: int, *, overlap: bool) -> None:
        self._cursor = cursor
        self._read_size = max(read_size, 2 * _PROBE_SIZE)
        self._probe = np.empty(_PROBE_SIZE, dtype=np.uint8)
        self._buffers = [np.empty(self._read_size, dtype=np.uint8) for _ in range(2 if overlap else 1)]
        self._turn = 0
        self._thread = ThreadPoolExecutor(1, "ahead") if overlap else None
        self._pending: Future[Ahead | None] | None = None

    def take(self, position: int) -> Ahead | None:
        """The stretch from ``position`` on, or None when no head is found ahead: read in the ordinary way then."""
        found = self.wait()
        if found is None or found.begin != position:
            found = self._read(position)
        if found is not None and self._thread is not None:
            self._pending = self._thread.submit(self._read, found.end)
        return found

    def wait(self) -> Ahead | None:
        """Until no thread reads; what it has read."""
        pending, self._pending = self._pending, None
        return pending.result() if pending is not None else None

    def _read(self, position: int) -> Ahead | None:
        segment = self._cursor.segment
        at = position + self._read_size - _PROBE_SIZE
        if segment is None or at + _PROBE_SIZE > segment.end:
            return None
        count = self._cursor.read_into(self._probe, at)
        head = at + int(find_frame(self._probe, np.uint64(0), np.uint64(count), np.uint64(at)))
        if head + _TIMESTAMP_END > at + count:
            return None
        timestamp = int(store_timestamp_at(self._probe, np.uint64(head - at)))
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[self._turn]
        size = self._cursor.read_into(buffer[: head - position], position)
        return Ahead(position, head, buffer, timestamp) if size == head - position else None
