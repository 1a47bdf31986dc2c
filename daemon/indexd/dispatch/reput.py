"""The tail loop: poll the log, put what is there into the queue, wait 1 to 50 ms when there is nothing.

inotify says nothing of stores through a mapping, so the log is polled; the pause doubles while it is quiet.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import Poll
from indexd.commitlog.reading import Skipped
from indexd.dispatch.queue import DispatchQueue
from indexd.errors import DiskError, IndexdError, MissingStoreError

_CORRUPT_RETRY_SECONDS = 1.0
_PATIENCE_SECONDS = 1.0


@dataclass(slots=True)
class Pace:
    """How often to poll, in seconds; may be replaced while the loop runs."""

    poll_min: float
    poll_max: float
    corrupt_retry_max: float


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
    polls: int = 0
    pause: float = 0.001


def poll_patiently(poll: Callable[[], Poll], pace: Pace, state: ReputState, stop: threading.Event) -> Poll:
    """In the read thread: poll until there is something, or for a second; the pause doubles while the log is quiet.

    Here and not on the event loop, which would wake four times for each look at a quiet log.
    """
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while True:
        found = poll()
        state.polls += 1
        state.caught_up = isinstance(found, NotYetWritten)
        if not state.caught_up:
            state.pause = pace.poll_min
            return found
        if not state.has_caught_up or time.monotonic() >= give_up or stop.wait(max(state.pause, pace.poll_min)):
            return found
        state.pause = min(2 * state.pause, pace.poll_max)


async def reput(
    poll: Callable[[], Awaitable[Poll]],
    queue: DispatchQueue,
    pace: Pace,
    state: ReputState,
    stop: asyncio.Event,
    on_event: Callable[[Corrupt | Skipped | None], None],
    on_problem: Callable[[IndexdError | None, float], None],
) -> None:
    """Run until ``stop``, then close the queue. ``on_event`` hears of corruption met, left (None) and passed over.

    ``on_problem`` hears of a log that cannot be read for now, with the seconds until the next try, and of its end.
    """
    retry = _CORRUPT_RETRY_SECONDS
    try:
        while not stop.is_set():
            try:
                found = await poll()
            except (DiskError, MissingStoreError) as error:
                state.problem, state.caught_up = error, False
                on_problem(error, retry)
                await pause(stop, retry)
                retry = min(2 * retry, pace.corrupt_retry_max)
                continue
            if state.problem is not None:
                state.problem, retry = None, _CORRUPT_RETRY_SECONDS
                on_problem(None, 0.0)
            if state.corrupt is not None and not isinstance(found, Corrupt):
                state.corrupt, retry = None, _CORRUPT_RETRY_SECONDS
                on_event(None)
            if state.caught_up and not state.has_caught_up:
                # What came while nobody indexed has waited long enough.
                state.has_caught_up = True
                queue.hurry()
            if isinstance(found, (DispatchBatch, Skipped)):
                if isinstance(found, Skipped):
                    on_event(found)
                await _put(queue, found, stop)
            elif isinstance(found, Corrupt):
                if state.corrupt != found:
                    state.corrupt = found
                    on_event(found)
                await pause(stop, retry)
                retry = min(2 * retry, pace.corrupt_retry_max)
    finally:
        queue.close()


async def _put(queue: DispatchQueue, item: DispatchBatch | Skipped, stop: asyncio.Event) -> None:
    # A full queue must not keep a stop waiting: what is not put is read again after the next start.
    putting = asyncio.ensure_future(queue.put(item))
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({putting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if putting.done():
            await putting
    finally:
        putting.cancel()
        stopping.cancel()


async def pause(stop: asyncio.Event, seconds: float) -> None:
    """Wait, but no longer than until ``stop``."""
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        return
