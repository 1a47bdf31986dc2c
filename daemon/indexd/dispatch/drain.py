"""The drain loop: every ``interval`` seconds, or at once when the queue is full or closed, all that waits is built.

The interval is what a message waits at most until it can be found: the next drain begins so early that it should be
over by then, going by how long the last one took.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from indexd.dispatch.queue import DispatchQueue, Item

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
