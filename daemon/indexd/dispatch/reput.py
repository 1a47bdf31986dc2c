"""From the reader to the builders: the log is polled into a bounded queue, which is drained every few seconds.

inotify says nothing of stores through a mapping, so the log is polled; the pause doubles while it is quiet. A full
queue has the reader wait: nothing is lost, the log is on disk. Every ``interval`` seconds, or at once when the queue is
full or closed, all that waits is built. The interval is what a message waits at most until it can be found: the next
drain begins so early that it should be over by then, going by how long the last one took.

Throttle slows the reading, so that the broker keeps its disk and the machine its memory. Both its bounds give way
before they could stop the index for good: the rate is never less than what the broker writes and a quarter more, and
with nothing left in the queue a batch is read whatever the memory says.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Poll, Skipped
from indexd.config import ReaderConfig
from indexd.errors import DiskError, IndexdError, MissingStoreError

Item = DispatchBatch | Skipped
_RETRY_SECONDS_MIN = 1.0
_PATIENCE_SECONDS = 1.0
# What passes before a message is in the queue at all: polling and settling.
_READ_SECONDS = 0.1


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


async def drain(
    queue: DispatchQueue, interval: Callable[[], float], build: Callable[[list[Item]], Awaitable[None]]
) -> None:
    """Run until the queue is closed and empty; an empty drain is built too, so that its counters stay fresh."""
    begun, took = time.monotonic(), 0.0
    while True:
        seconds = interval()
        due = begun + max(seconds - _READ_SECONDS - took, seconds / 2)
        await pause(queue.due, max(due - time.monotonic(), 0.0))
        closed, begun = queue.closed, time.monotonic()
        await build(queue.drain())
        if closed:
            return
        took = time.monotonic() - begun


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


def poll_patiently(poll: Callable[[], Poll], config: ReaderConfig, state: ReputState, stop: threading.Event) -> Poll:
    """In the read thread: poll until there is something, or for a second; the pause doubles while the log is quiet.

    Here and not on the event loop, which would wake four times for each look at a quiet log.
    """
    give_up, shortest = time.monotonic() + _PATIENCE_SECONDS, config.poll_min_ms / 1000
    while True:
        found = poll()
        state.caught_up = isinstance(found, NotYetWritten)
        if not state.caught_up:
            state.pause = shortest
            return found
        if not state.has_caught_up or time.monotonic() >= give_up or stop.wait(max(state.pause, shortest)):
            return found
        state.pause = min(2 * state.pause, config.poll_max_ms / 1000)


async def reput(
    poll: Callable[[], Awaitable[Poll]],
    queue: DispatchQueue,
    retry_max: Callable[[], float],
    state: ReputState,
    stop: asyncio.Event,
    on_event: Callable[[Corrupt | Skipped | None], None],
    on_problem: Callable[[IndexdError | None, float], None],
) -> None:
    """Run until ``stop``, then close the queue. ``on_event`` hears of corruption met, left (None) and passed over.

    ``on_problem`` hears of a log that cannot be read for now, with the seconds until the next try, and of its end.
    """
    retry = _RETRY_SECONDS_MIN
    try:
        while not stop.is_set():
            found: Poll | None = None
            problem: IndexdError | None = None
            try:
                found = await poll()
            except (DiskError, MissingStoreError) as error:
                problem, state.caught_up = error, False
            if problem is not None or state.problem is not None:
                on_problem(problem, retry)
            state.problem = problem
            corrupt = found if isinstance(found, Corrupt) else None
            if found is not None and corrupt != state.corrupt:
                state.corrupt = corrupt
                on_event(corrupt)
            if state.caught_up and not state.has_caught_up:
                # What came while nobody indexed has waited long enough.
                state.has_caught_up = True
                queue.due.set()
            if isinstance(found, Skipped):
                on_event(found)
            if isinstance(found, (DispatchBatch, Skipped)):
                await queue.put(found)
            if problem is None and corrupt is None:
                retry = _RETRY_SECONDS_MIN
            else:
                await pause(stop, retry)
                retry = min(2 * retry, retry_max())
    finally:
        queue.close()


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
        self._reader = reader
        self._queue = queue
        self._stop = stop
        self._rate_max = rate_max
        self._memory_max = memory_max
        self._hurry = hurry
        self._on_wait = on_wait
        self._log_end = log_end
        self._clock = clock
        # When what was read so far would have been read at the allowed rate.
        self._paid_at = clock()
        self._ends: deque[tuple[float, int]] = deque()

    def set_bounds(self, *, rate_max: int, memory_max: int) -> None:
        """Others from now on; what is waited for under the old ones is over. From any thread."""
        self._rate_max, self._memory_max = rate_max, memory_max
        self._paid_at = self._clock()

    def poll(self) -> Poll:
        """What the reader's ``poll`` returns, once it may read."""
        if self._memory_max:
            self._wait_for_memory()
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

    def _wait_for_memory(self) -> None:
        # With an empty queue waiting helps nobody: then it is what the process needs at least.
        while (
            self._memory_max
            and len(self._queue)
            and resident_bytes() > self._memory_max
            and not self._stop.wait(_MEMORY_SECONDS)
        ):
            self._hurry()
            self._on_wait()


def resident_bytes() -> int:
    """Bytes of memory that this process holds now (RSS); 0 where it cannot be told, as without a free descriptor."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - so often that a Path would count
            return int(file.read().split()[1]) * _PAGE_SIZE
    except OSError:
        return 0
