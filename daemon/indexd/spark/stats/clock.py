"""What the store's clock did: steps back from one message to the next, and silences.

Both are counted all, and the largest are kept. Store times in ms, in the order of the log.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indexd.spark.stats.content_kernel import CLOCK, EVENT_COLUMNS

#: So many steps and so many silences are kept, the largest ones.
EVENTS_MAX = 100
_ROWS = 4096


@dataclass(frozen=True, slots=True, order=True)
class Event:
    """Between two messages: the store time of the one before, and of the one at ``phy_offset``."""

    phy_offset: int
    before: int
    after: int

    @property
    def size(self) -> int:
        """By how many ms the clock went back, or how many nothing was stored."""
        return abs(self.after - self.before)


@dataclass(frozen=True, slots=True)
class Clock:
    """The store times of a stretch; ``steps`` and ``silences`` are all, the two tuples the largest, largest first."""

    messages: bool = False
    silence: int = 0
    first: int = 0
    last: int = 0
    least: int = 0
    greatest: int = 0
    first_phy: int = 0
    last_phy: int = 0
    steps: int = 0
    silences: int = 0
    largest_steps: tuple[Event, ...] = ()
    largest_silences: tuple[Event, ...] = ()

    def merged(self, behind: Clock) -> Clock:
        """Of this stretch and the one behind it, what lies between the two included."""
        if not self.messages or not behind.messages:
            return self if self.messages else behind
        found = Clock(
            True,
            self.silence,
            self.first,
            behind.last,
            min(self.least, behind.least),
            max(self.greatest, behind.greatest),
            self.first_phy,
            behind.last_phy,
            self.steps + behind.steps,
            self.silences + behind.silences,
            largest(self.largest_steps + behind.largest_steps),
            largest(self.largest_silences + behind.largest_silences),
        )
        between = Event(behind.first_phy, self.last, behind.first)
        if between.after < between.before:
            steps = largest((*found.largest_steps, between))
            return replace(found, steps=found.steps + 1, largest_steps=steps)
        if between.size > self.silence:
            silences = largest((*found.largest_silences, between))
            return replace(found, silences=found.silences + 1, largest_silences=silences)
        return found


def largest(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The largest of them; of equals the first in the log."""
    return tuple(sorted(events, key=lambda event: (-event.size, event.phy_offset))[:EVENTS_MAX])


class Events:
    """The arrays that the kernel writes a clock and its events into."""

    def __init__(self, silence: int) -> None:
        self._silence = silence
        self.clock = np.zeros(len(CLOCK), dtype=np.int64)
        self.rows: NDArray[np.int64] = np.zeros((_ROWS, EVENT_COLUMNS), dtype=np.int64)

    def thin_out(self) -> None:
        """Keep the largest of each kind, if the rows are full."""
        if self.clock[CLOCK.index("kept_events")] < len(self.rows):
            return
        steps, silences = self._largest()
        kept = sorted((*steps, *silences))
        for row, event in enumerate(kept):
            self.rows[row] = (event.phy_offset, event.before, event.after)
        self.clock[CLOCK.index("kept_events")] = len(kept)

    def result(self) -> Clock:
        """What has been seen."""
        values = dict(zip(CLOCK, (int(value) for value in self.clock), strict=True))
        values.pop("kept_events")
        steps, silences = self._largest()
        messages = bool(values.pop("any"))
        return Clock(
            messages=messages,
            silence=self._silence,
            largest_steps=steps,
            largest_silences=silences,
            **values,
        )

    def _largest(self) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
        kept = self.rows[: int(self.clock[CLOCK.index("kept_events")])]
        events = [Event(*(int(value) for value in row)) for row in kept]
        steps = tuple(event for event in events if event.after < event.before)
        silences = tuple(event for event in events if event.after > event.before)
        return largest(steps), largest(silences)
