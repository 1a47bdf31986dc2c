"""The drain loop: every ``interval`` seconds, or at once when the queue is full or closed, all that waits is built."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from indexd.dispatch.queue import DispatchQueue, Item


async def drain(
    queue: DispatchQueue, interval: Callable[[], float], build: Callable[[list[Item]], Awaitable[None]]
) -> None:
    """Run until the queue is closed and empty; an empty drain is built too, so that its counters stay fresh."""
    while True:
        await queue.wait_until_due(interval())
        closed = queue.closed
        items = await queue.drain()
        await build(items)
        if closed and not items:
            return
