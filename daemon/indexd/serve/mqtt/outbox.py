"""Outbox: the events that wait until somebody takes them, at most so many: the oldest go, and are counted."""

from __future__ import annotations

from collections import deque

from indexd.serve.events import Event, Events

# As often as the index is flushed, and nobody's concern at once.
_ROUTINE = "flush"


class Outbox:
    """Used by one thread. Those that were taken are under way until they are published or given back."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._waiting: deque[Event] = deque()
        self._under_way = 0
        self.last = 0
        #: The number of the newest event that is worth a state.
        self.notable = 0
        self.published = 0
        self.dropped = 0

    def __repr__(self) -> str:
        return f"Outbox({self.waiting} waiting, {self.published} published, {self.dropped} dropped)"

    @property
    def waiting(self) -> int:
        """Those that are not published yet, those under way included."""
        return len(self._waiting) + self._under_way

    def collect(self, events: Events) -> None:
        """Take over what is new; what ``events`` itself could not keep counts as dropped."""
        for event in events.since(self.last):
            self.dropped += event.number - self.last - 1
            self.last = event.number
            if event.kind != _ROUTINE:
                self.notable = event.number
            self._waiting.append(event)
        self._trim()

    def take(self, count_max: int) -> list[Event]:
        """The oldest, in order; each list ends in ``confirm`` or ``give_back``."""
        taken = [self._waiting.popleft() for _ in range(min(count_max, len(self._waiting)))]
        self._under_way += len(taken)
        return taken

    def confirm(self, taken: list[Event]) -> None:
        """The broker has them."""
        self._under_way -= len(taken)
        self.published += len(taken)

    def give_back(self, taken: list[Event]) -> None:
        """They may not have arrived: they wait again, before all others."""
        self._under_way -= len(taken)
        self._waiting.extendleft(reversed(taken))
        self._trim()

    def _trim(self) -> None:
        while len(self._waiting) > self._waiting_max:
            self._waiting.popleft()
            self.dropped += 1
