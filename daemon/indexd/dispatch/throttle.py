"""Throttle: the tail loop's reading, slowed so that the broker keeps its disk and the machine its memory.

Both bounds give way before they could stop the index for good: the rate is never less than what the broker writes and
a quarter more, and with nothing left in the queue a stretch is read whatever the memory says.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from indexd.commitlog.dispatch import DispatchBatch
from indexd.commitlog.format import NotYetWritten
from indexd.commitlog.reader import LogReader, Poll
from indexd.dispatch.queue import DispatchQueue

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
        #: Seconds that reading has waited, for the rate and for memory.
        self.rate_seconds = 0.0
        self.memory_seconds = 0.0

    def set_bounds(self, *, rate_max: int, memory_max: int) -> None:
        """Others from now on; what is waited for under the old ones is over. From any thread."""
        self._rate_max, self._memory_max = rate_max, memory_max
        self._paid_at = self._clock()

    def poll(self) -> Poll:
        """What the reader's ``poll`` returns, once it may read."""
        if self._memory_max:
            self.memory_seconds += self._wait_for_memory()
        if not self._rate_max:
            return self._reader.poll()
        self.rate_seconds += self._wait_until_paid()
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

    def _wait_until_paid(self) -> float:
        began = self._clock()
        while (left := self._paid_at - self._clock()) > 0 and not self._stop.wait(min(left, _PIECE_SECONDS)):
            self._on_wait()
        return self._clock() - began

    def _wait_for_memory(self) -> float:
        # With an empty queue waiting helps nobody: then it is what the process needs at least.
        began = self._clock()
        while (
            self._memory_max
            and len(self._queue)
            and resident_bytes() > self._memory_max
            and not self._stop.wait(_MEMORY_SECONDS)
        ):
            self._hurry()
            self._on_wait()
        return self._clock() - began


def resident_bytes() -> int:
    """Bytes of memory that this process holds now (RSS); 0 where it cannot be told, as without a free descriptor."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - so often that a Path would count
            return int(file.read().split()[1]) * _PAGE_SIZE
    except OSError:
        return 0
