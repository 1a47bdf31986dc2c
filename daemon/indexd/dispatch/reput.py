"""From the reader to the builders: the log is polled into a bounded queue, which is drained every few seconds.

A full queue has the reader wait: nothing is lost, the log is on disk.

Throttle slows the reading, so that the broker keeps its disk and the machine its memory. Both its bounds give way
before they could stop the index for good: the rate is never less than what the broker writes and a quarter more, and
with nothing left in the queue a batch is read whatever the memory says.

DiskWatermark has indexing stop before the broker's disk is so full that the broker minds. A broker cleans up early at
75 % (diskMaxUsedSpaceRatio), deletes what is not expired yet at 85 % (diskSpaceCleanForciblyRatio) and refuses messages
at 90 % (diskSpaceWarningLevelRatio). Below its first line the index gives way: it is derived, and can be built later.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Poll, Skipped
from indexd.errors import DiskError, IndexdError
from indexd.storage.disk import used_ratio

Item = DispatchBatch | Skipped


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits at one moment; whole, so that any thread may look at any time.

    ``since`` is when the oldest item was put (monotonic, seconds), ``store_timestamp`` that of the oldest message (ms);
    None when there is none.
    """

    rows: int = 0
    bytes: int = 0
    since: float | None = None
    store_timestamp: int | None = None


class DispatchQueue:
    """A FIFO of stretches of the log for one producer and one consumer on one event loop.

    ``rows_max`` and ``bytes_max`` bound what waits; a single batch above them passes alone.
    """

    def __init__(self, rows_max: int, bytes_max: int) -> None:
        self.rows_max, self.bytes_max = rows_max, bytes_max
        #: What waits now: another object after each change.
        self.waiting = Waiting()
        #: A ``put`` waits for room.
        self.is_blocked = False
        self.closed = False
        #: What waits is to be drained now.
        self.due = asyncio.Event()
        self._items: list[Item] = []
        self._room = asyncio.Event()
        self._is_stopped = False

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: Item) -> None:
        """Append, once there is room, or it is stopped."""
        rows, size = (item.rows, item.size) if isinstance(item, DispatchBatch) else (0, 0)
        while (
            self._items
            and not self._is_stopped
            and (self.waiting.rows + rows > self.rows_max or self.waiting.bytes + size > self.bytes_max)
        ):
            self.is_blocked = True
            self.due.set()
            self._room.clear()
            await self._room.wait()
        before = self.waiting
        self._items.append(item)
        since = time.monotonic() if before.since is None else before.since
        oldest = oldest_timestamp([item]) if before.store_timestamp is None else before.store_timestamp
        self.waiting = Waiting(before.rows + rows, before.bytes + size, since, oldest)

    def stop(self) -> None:
        """A full queue must not keep a stop waiting: what is just being put passes."""
        self._is_stopped = True
        self._room.set()

    def drain(self) -> list[Item]:
        """Everything that waits; makes room."""
        items, self._items = self._items, []
        self.waiting, self.is_blocked = Waiting(), False
        if not self.closed:
            self.due.clear()
        self._room.set()
        return items

    def close(self) -> None:
        """Nothing more will be put: the consumer drains at once and ends."""
        self.closed = True
        self.due.set()


def oldest_timestamp(items: list[Item]) -> int | None:
    """The store timestamp of the first message, ms; None if there is none."""
    times = (item.columns.store_timestamp for item in items if isinstance(item, DispatchBatch) and item.rows)
    return next((int(column[0]) for column in times), None)


@dataclass(slots=True)
class ReputState:
    """What the loop last met: ``caught_up`` at the log's end, ``corrupt``, or why the log cannot be read for now.

    ``pause`` is how long to wait before the next look.
    """

    caught_up: bool = False
    #: It was caught up once.
    has_caught_up: bool = False
    corrupt: Corrupt | None = None
    problem: IndexdError | None = None
    pause: float = 0.001


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, but no longer than until ``stop``."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return


_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
# A burst that is not paid for: what comes in while one is awake anyway.
_BURST_SECONDS = 0.1
# The pace of the broker is its log's growth over such a time, looked at so often.
_GROWTH_SECONDS = 60.0
_GROWTH_STEP_SECONDS = 5.0
_GROWTH_FACTOR = 1.25
# A wait is in pieces: whoever watches for a stall must see that this is none.
_PIECE_SECONDS = 0.5
_MEMORY_SECONDS = 0.05


class Throttle:
    """``poll`` in place of the reader's own, in the read thread; ``stop`` ends any wait at once.

    ``rate_max`` in bytes a second and ``memory_max`` in bytes, 0 for none; ``hurry`` asks for a drain, ``on_wait`` is
    called for each piece of a wait; ``log_end`` says how far the log goes now, 0 where that is not known.
    """

    def __init__(
        self,
        reader: LogReader,
        queue: DispatchQueue,
        stop: threading.Event,
        *,
        rate_max: int = 0,
        memory_max: int = 0,
        hurry: Callable[[], object] = lambda: None,
        on_wait: Callable[[], object] = lambda: None,
        log_end: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader, self._queue, self._stop, self._clock = reader, queue, stop, clock
        self._rate_max, self._memory_max = rate_max, memory_max
        self._hurry, self._on_wait, self._log_end = hurry, on_wait, log_end
        # When what was read so far would have been read at the allowed rate.
        self._paid_at = clock()
        self._ends: deque[tuple[float, int]] = deque()

    def set_bounds(self, *, rate_max: int, memory_max: int) -> None:
        """Others from now on; what is waited for under the old ones is over. From any thread."""
        self._rate_max, self._memory_max = rate_max, memory_max
        self._paid_at = self._clock()

    def poll(self) -> Poll:
        """What the reader's ``poll`` returns, once it may read."""
        # With an empty queue waiting helps nobody: then it is what the process needs at least.
        while (
            self._memory_max
            and len(self._queue)
            and resident_bytes() > self._memory_max
            and not self._stop.wait(_MEMORY_SECONDS)
        ):
            self._hurry()
            self._on_wait()
        if not self._rate_max:
            return self._reader.poll()
        while (left := self._paid_at - self._clock()) > 0 and not self._stop.wait(min(left, _PIECE_SECONDS)):
            self._on_wait()
        began = self._reader.position
        found = self._reader.poll()
        now = self._clock()
        self._paid_at = max(self._paid_at, now - _BURST_SECONDS)
        if isinstance(found, NotYetWritten):
            self._paid_at = now - _BURST_SECONDS  # caught up: nothing is owed
        elif isinstance(found, DispatchBatch) and (rate := self.rate()):
            self._paid_at += (found.end_offset - began) / rate
        return found

    def rate(self) -> float:
        """Bytes of log a second that may be read now."""
        now, end = self._clock(), self._log_end()
        if end and (not self._ends or now - self._ends[-1][0] >= _GROWTH_STEP_SECONDS):
            self._ends.append((now, end))
            while now - self._ends[0][0] > _GROWTH_SECONDS:
                self._ends.popleft()
        if len(self._ends) < 2:
            return float(self._rate_max)
        (first, was), (last, is_now) = self._ends[0], self._ends[-1]
        return max(float(self._rate_max), _GROWTH_FACTOR * (is_now - was) / (last - first))


def resident_bytes() -> int:
    """Bytes of memory that this process holds now (RSS); 0 where it cannot be told, as without a free descriptor."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - so often that a Path would count
            return int(file.read().split()[1]) * _PAGE_SIZE
    except OSError:
        return 0


# How far it has to fall below the mark before indexing goes on: an index file that is allocated must not undo it.
_HYSTERESIS = 0.01


class DiskWatermark:
    """Whether the data directory's file system is too full to index; remembers that it was."""

    def __init__(self, data: Path, used_max: float) -> None:
        self._data, self._used_max = data, used_max
        #: Indexing has to wait, as of the last check.
        self.is_over = False

    def check(self) -> None:
        """Raise DiskError, a transient one, while it is fuller than ``used_max``, and then until it is 1 % less full.

        A ``used_max`` of 1 means never.
        """
        ratio = used_ratio(self._data)
        self.is_over = self._used_max < 1 and ratio > self._used_max - (_HYSTERESIS if self.is_over else 0.0)
        if self.is_over:
            text = f"its file system is {ratio:.1%} full and disk_used_max is {self._used_max:.1%}"
            raise DiskError("index into", self._data, OSError(errno.ENOSPC, text))
