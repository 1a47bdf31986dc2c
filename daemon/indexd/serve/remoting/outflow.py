"""Outflow: the bytes that leave a connection, and whether its client takes them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

#: Without a byte of an answer being taken.
UNTAKEN_SECONDS = 60.0
# What TLS is given at once. It passes all of that on to a buffer below, which it neither counts nor waits for; only
# what comes while that one is full is counted, and said to be too much.
_TLS_SIZE = 1 << 16


class Outflow:
    """Over one transport. Bytes for TLS wait here until it takes more; ``on_resume``: answers are taken again."""

    def __init__(self, transport: asyncio.Transport, *, is_tls: bool, on_resume: Callable[[], None]) -> None:
        self._transport, self._is_tls, self._on_resume = transport, is_tls, on_resume
        self._waiting: deque[memoryview] = deque()
        self._waiting_size = 0
        self._is_paused = self._is_ending = False
        self._written = self._taken = 0
        self._taken_at = asyncio.get_running_loop().time()

    @property
    def is_stalled(self) -> bool:
        """Whether what was written has to be taken before more is."""
        return self._is_paused or bool(self._waiting)

    def write(self, data: bytes) -> None:
        """It leaves as the client takes it."""
        self._written += len(data)
        if not self._is_tls or (len(data) <= _TLS_SIZE and not self.is_stalled):
            self._transport.write(data)
            return
        self._waiting.append(memoryview(data))
        self._waiting_size += len(data)
        self._pour()

    def weigh(self) -> int:
        """Bytes that were not taken; over TLS it may be twice as much as TLS is given at once that is not seen."""
        return self._waiting_size + self._transport.get_write_buffer_size()

    def set_paused(self, is_paused: bool) -> None:
        """As the transport says."""
        self._is_paused = is_paused
        self._pour()
        if not is_paused and not self.is_stalled:
            self._on_resume()

    def is_stuck(self, now: float, untaken: int) -> bool:
        """Whether nothing of ``untaken`` bytes was taken for long, by looks that come every second or so."""
        taken = self._written - untaken
        if untaken == 0 or taken > self._taken:
            self._taken, self._taken_at = taken, now
        return now - self._taken_at > UNTAKEN_SECONDS

    def close(self) -> None:
        """Close when all is taken."""
        self._is_ending = True
        self._pour()

    def _pour(self) -> None:
        while self._waiting and not self._is_paused:
            data = self._waiting.popleft()
            if len(data) > _TLS_SIZE:
                self._waiting.appendleft(data[_TLS_SIZE:])
                data = data[:_TLS_SIZE]
            self._waiting_size -= len(data)
            self._transport.write(data)  # which may pause it
        if self._is_ending and not self._waiting:
            self._transport.close()
