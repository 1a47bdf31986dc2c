"""DispatchQueue: what was read and is not built yet. Full means wait: nothing is lost, the log is on disk."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.reading import Skipped

Item = DispatchBatch | Skipped


class DispatchQueue:
    """A FIFO of stretches of the log for one producer and one consumer on one event loop.

    ``rows_max`` and ``bytes_max`` bound what waits; a single batch above them passes alone.
    """

    def __init__(self, rows_max: int, bytes_max: int) -> None:
        self.rows_max = rows_max
        self.bytes_max = bytes_max
        self.rows = 0
        self.bytes = 0
        self._items: deque[tuple[float, Item]] = deque()
        self._changed = asyncio.Condition()
        self._full = asyncio.Event()
        self.closed = False

    def __repr__(self) -> str:
        return f"DispatchQueue(items={len(self._items)}, rows={self.rows}, bytes={self.bytes}, closed={self.closed})"

    def __len__(self) -> int:
        return len(self._items)

    @property
    def oldest_seconds(self) -> float:
        """How long the oldest item has been waiting."""
        return time.monotonic() - self._items[0][0] if self._items else 0.0

    async def put(self, item: Item) -> None:
        """Append, once there is room."""
        rows, size = _weight(item)
        async with self._changed:
            while self._items and (self.rows + rows > self.rows_max or self.bytes + size > self.bytes_max):
                self._full.set()
                await self._changed.wait()
            self._items.append((time.monotonic(), item))
            self.rows += rows
            self.bytes += size

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
            self.rows = self.bytes = 0
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


def _weight(item: Item) -> tuple[int, int]:
    return (item.rows, item.size) if isinstance(item, DispatchBatch) else (0, 0)
