"""Lag: how far what can be found is behind the log, in bytes, milliseconds and messages. Any thread, no locks.

Each figure is read once, what is built before what waits and what waits before what was read; so nothing is counted
negative, and what passes from one to the other meanwhile is counted as behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from indexd.commitlog.reader import LogReader
from indexd.dispatch.queue import DispatchQueue, Item, Waiting, oldest_timestamp
from indexd.dispatch.reput import ReputState
from indexd.flush.flusher import Progress

# The tail loop looks many times a second; if it has not for so long, the log may have gone on unseen.
_FRESH_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Lag:
    """``log_end``: how far the log goes, as far as is known; the rest is behind it, ``milliseconds`` by the clock."""

    log_end: int
    bytes: int
    milliseconds: int
    messages: int


class LagMeter:
    """What is known of the log's end and of what is on its way; ``measure`` makes a Lag of it."""

    def __init__(self, messages: int, clock: Callable[[], float] = time.time) -> None:
        #: Messages that were built before the reader began.
        self._messages = messages
        self._clock = clock
        self._started = clock()
        #: The log's end by a look that did not read it; the reader's own look is exact and counts when it is there.
        self.seen_end = 0
        #: Where whole messages stand that the reader may not believe, for some time; None: nowhere.
        self.held_at: int | None = None
        # When the reader last stood at the end of the log, and when it looked at all; Unix time.
        self._at_end: float | None = None
        self._is_at_end = self._is_waiting = False
        self._looked = self._started
        self._taken = Waiting()

    def __repr__(self) -> str:
        return f"LagMeter(seen_end={self.seen_end}, at_end={self._at_end})"

    @property
    def is_at_end(self) -> bool:
        """The reader's last look found it at the end of the log."""
        return self._is_at_end

    @property
    def is_waiting(self) -> bool:
        """The reader's last look, just now, found nothing that it may take."""
        return self._is_waiting and self._clock() - self._looked <= _FRESH_SECONDS

    def looked(self, position: int, *, is_at_end: bool) -> None:
        """The reader has looked at the log and stands at ``position``; in its thread.

        It is not at the end where it is held.
        """
        self._looked = now = self._clock()
        self._is_waiting = is_at_end
        self._is_at_end = is_at_end and position != self.held_at
        if self._is_at_end:
            self._at_end, self.seen_end = now, position

    def take(self, items: list[Item]) -> None:
        """These are being built; none: all that was taken is."""
        self._taken = Waiting(len(items), store_timestamp=oldest_timestamp(items)) if items else Waiting()

    def measure(self, built: Progress, queue: DispatchQueue, reader: LogReader, reput: ReputState) -> Lag:
        """How far ``built`` is behind.

        Exact while the reader stands at the end of the log. While it is behind, the bytes are those up to
        ``seen_end``; the milliseconds are at most: since it last stood at the end or, if that is later, since the
        newest message that it read; and what it has not read counts as messages of the size of those it has read.
        """
        taken, waiting = self._taken, queue.waiting
        counters, position, newest = reader.counters, reader.position, reader.newest_timestamp
        read_messages, read_bytes = counters.messages, counters.bytes
        now = self._clock()
        end = max(self.seen_end, position)
        behind = max(end - built.phy_offset, 0)
        messages = max(self._messages + read_messages - built.messages, 0)
        if end > position:
            mean = read_bytes / read_messages if read_messages else 0.0
            messages += round((end - position) / mean) if mean else 0
        known = [stamp for stamp in (taken.store_timestamp, waiting.store_timestamp) if stamp is not None]
        if known:
            millis = int(now * 1000) - min(known)
        elif (
            end > position
            or (behind > 0 and not self._is_at_end)  # what was read a moment ago is not waiting yet
            or reput.problem is not None
            or now - self._looked > _FRESH_SECONDS
        ):
            since = max(self._at_end or 0.0, newest / 1000)
            millis = int((now - (since if since > 0 else self._started)) * 1000)
        else:
            millis = 0
        return Lag(end, behind, max(millis, 0), messages)
