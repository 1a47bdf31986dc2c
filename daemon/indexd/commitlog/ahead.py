"""ReadAhead: large stretches of the log, each ending at a head that was seen before the stretch was read.

Only for catching up, when much is left. A head some MiB ahead is looked for FIRST, then everything up to it is read. If
the frames then lead exactly there, the head is theirs, and they were complete when it was seen: one read is enough.
A stretch stands on its own, so with workers the next ones are read and decoded while this one is built.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import Batcher
from indexd.commitlog.cursor import SegmentCursor
from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.format import FRAME_SIZE_MIN
from indexd.commitlog.heads_kernel import find_frame, store_timestamp_at
from indexd.commitlog.kernel import Rules

# How much is searched for a head: longer than most frames. A longer frame there costs a second read, nothing else.
_PROBE_SIZE = 32 << 10
_TIMESTAMP_END = 76
# Stretches that are decoded and not taken yet.
_DEPTH = 6


class _Tools:
    """What one worker reads into and decodes with."""

    def __init__(self, read_size: int) -> None:
        self.probe = np.empty(_PROBE_SIZE, dtype=np.uint8)
        self.buffer = np.empty(read_size, dtype=np.uint8)
        self.batcher = Batcher(read_size // FRAME_SIZE_MIN + 1)


class _Head(NamedTuple):
    """A head that was seen: its offset and store timestamp."""

    offset: int
    timestamp: int

    def ends(self, batch: DispatchBatch) -> bool:
        """Whether ``batch`` leads exactly to this head, its times never falling: no frame of it is of an older log."""
        times = batch.columns.store_timestamp[: batch.rows]
        rising = bool((times[1:] >= times[:-1]).all()) and int(times[-1]) <= self.timestamp
        return rising and batch.end_offset == self.offset


class ReadAhead:
    """Reads from a cursor's open segment; ``stop`` must be called before that is closed."""

    def __init__(self, cursor: SegmentCursor, read_size: int, workers: int) -> None:
        self._cursor = cursor
        self._read_size = max(read_size, 2 * _PROBE_SIZE)
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, "ahead") if workers else None
        self._tools: SimpleQueue[_Tools] = SimpleQueue()
        self._lock = threading.Lock()
        self._running: deque[Future[DispatchBatch | None]] = deque()
        self._held: int | None = None
        self._is_stopping = False
        self._sum_up = False

    def take(self, position: int, rules: Rules, *, sum_up: bool = False) -> DispatchBatch | None:
        """The messages from ``position`` on, or None when they cannot be had this way: read in the ordinary one.

        ``sum_up`` as for Batcher.decode.
        """
        self._sum_up = sum_up
        if self._tools.empty() and not self._running:
            for _ in range(max(self._workers, 1)):
                self._tools.put(_Tools(self._read_size))
        if self._pool is None:
            return self._stretch(position, rules)
        with self._lock:
            if not self._running:
                self._start(position, rules)
            future = self._running.popleft()
            if self._held is not None:
                held, self._held = self._held, None
                self._start(held, rules)
        batch = future.result()
        if batch is None or batch.begin_offset != position:
            self.stop()
            return None
        return batch

    def stop(self) -> None:
        """Until no worker reads any more; what they have read is forgotten."""
        with self._lock:
            self._is_stopping = True
            running = list(self._running)
        for future in running:
            future.exception()
        with self._lock:
            self._running.clear()
            self._held = None
            self._is_stopping = False

    def _start(self, position: int, rules: Rules) -> None:
        assert self._pool is not None
        self._running.append(self._pool.submit(self._stretch, position, rules))

    def _start_behind(self, position: int, rules: Rules) -> None:
        # The next stretch begins where this one ends, which is known as soon as this one is read.
        with self._lock:
            if self._pool is None or self._is_stopping:
                return
            if len(self._running) < _DEPTH:
                self._start(position, rules)
            else:
                self._held = position

    def _stretch(self, position: int, rules: Rules) -> DispatchBatch | None:
        tools = self._tools.get()
        try:
            segment = self._cursor.segment
            head = self._read(position, tools.probe, tools.buffer)
            if segment is None or head is None:
                return None
            self._start_behind(head.offset, rules)
            size = head.offset - position
            found = tools.batcher.decode(tools.buffer, size, position, segment.end, rules, sum_up=self._sum_up)
            batch = found.batch
            return batch if batch is not None and head.ends(batch) else None
        finally:
            self._tools.put(tools)

    def _read(self, position: int, probe: NDArray[np.uint8], buffer: NDArray[np.uint8]) -> _Head | None:
        segment = self._cursor.segment
        at = position + self._read_size - _PROBE_SIZE
        if segment is None or at + _PROBE_SIZE > segment.end:
            return None
        count = self._cursor.read_into(probe, at)
        found = int(find_frame(probe, np.uint64(0), np.uint64(count), np.uint64(at)))
        if found + _TIMESTAMP_END > count:
            return None
        head = _Head(at + found, int(store_timestamp_at(probe, np.uint64(found))))
        size = head.offset - position
        return head if self._cursor.read_into(buffer[:size], position) == size else None
