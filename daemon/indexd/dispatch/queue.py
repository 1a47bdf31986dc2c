"""DispatchQueue: what was read and is not built yet, and the loop that drains it.

A full queue has the reader wait: nothing is lost, the log is on disk. Every ``interval`` seconds, or at once when the
queue is full or closed, all that waits is built. The interval is what a message waits at most until it can be found:
the next drain begins so early that it should be over by then, going by how long the last one took.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.reader import Skipped

Item = DispatchBatch | Skipped


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits at one moment; whole, so that any thread may look at any time.

    ``since`` is when the oldest item was put (monotonic, seconds), ``store_timestamp`` that of the oldest message (ms);
    None when there is none.
    """

    items: int = 0
    rows: int = 0
    bytes: int = 0
    since: float | None = None
    store_timestamp: int | None = None


_NOTHING = Waiting()


class DispatchQueue:
    """A FIFO of stretches of the log for one producer and one consumer on one event loop.

    ``rows_max`` and ``bytes_max`` bound what waits; a single batch above them passes alone.
    """

    def __init__(self, rows_max: int, bytes_max: int) -> None:
        self.rows_max = rows_max
        self.bytes_max = bytes_max
        #: What waits now: another object after each change.
        self.waiting = _NOTHING
        #: A ``put`` waits for room.
        self.is_blocked = False
        self._items: deque[tuple[float, Item]] = deque()
        self._changed = asyncio.Condition()
        self._full = asyncio.Event()
        self.closed = False

    def __repr__(self) -> str:
        return f"DispatchQueue(items={len(self._items)}, rows={self.rows}, bytes={self.bytes}, closed={self.closed})"

    def __len__(self) -> int:
        return len(self._items)

    @property
    def rows(self) -> int:
        """Messages that wait."""
        return self.waiting.rows

    @property
    def bytes(self) -> int:
        """Bytes of their arrays."""
        return self.waiting.bytes

    async def put(self, item: Item) -> None:
        """Append, once there is room."""
        rows, size = _weight(item)
        async with self._changed:
            try:
                while self._items and (self.rows + rows > self.rows_max or self.bytes + size > self.bytes_max):
                    self.is_blocked = True
                    self._full.set()
                    await self._changed.wait()
            finally:
                self.is_blocked = False
            self._items.append((time.monotonic(), item))
            before = self.waiting
            first = self._items[0][0] if before.since is None else before.since
            oldest = oldest_timestamp([item]) if before.store_timestamp is None else before.store_timestamp
            self.waiting = Waiting(before.items + 1, before.rows + rows, before.bytes + size, first, oldest)

    async def wait_until_due(self, seconds: float) -> None:
        """Return after ``seconds``, or at once when the queue is full or closed."""
        if self.closed:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._full.wait()
        except TimeoutError:
            return

    async def drain(self) -> list[Item]:
        """Everything that waits; makes room."""
        async with self._changed:
            items = [item for _, item in self._items]
            self._items.clear()
            self.waiting = _NOTHING
            if not self.closed:
                self._full.clear()
            self._changed.notify_all()
        return items

    def hurry(self) -> None:
        """Let the consumer drain what is there now: the next wait does not last."""
        self._full.set()

    def close(self) -> None:
        """Nothing more will be put: the consumer drains at once and ends."""
        self.closed = True
        self._full.set()


def oldest_timestamp(items: Iterable[Item]) -> int | None:
    """The store timestamp of the first message, ms; None if there is none."""
    return next(
        (int(item.columns.store_timestamp[0]) for item in items if isinstance(item, DispatchBatch) and item.rows), None
    )


def _weight(item: Item) -> tuple[int, int]:
    return (item.rows, item.size) if isinstance(item, DispatchBatch) else (0, 0)


# What passes before a message is in the queue at all: polling and settling.
_READ_SECONDS = 0.1


async def drain(
    queue: DispatchQueue, interval: Callable[[], float], build: Callable[[list[Item]], Awaitable[None]]
) -> None:
    """Run until the queue is closed and empty; an empty drain is built too, so that its counters stay fresh."""
    begun = time.monotonic()
    took = 0.0
    while True:
        seconds = interval()
        due = begun + max(seconds - _READ_SECONDS - took, seconds / 2)
        await queue.wait_until_due(max(due - time.monotonic(), 0.0))
        closed = queue.closed
        begun = time.monotonic()
        items = await queue.drain()
        await build(items)
        took = time.monotonic() - begun
        if closed and not items:
            return
