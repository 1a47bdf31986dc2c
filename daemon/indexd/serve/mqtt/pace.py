"""How often: a state, a try to connect, a line of the log. The time is an argument, in seconds of any clock."""

from __future__ import annotations

import random

#: Between two tries.
PAUSE_SECONDS = (1.0, 60.0)
# A connection that stood this long makes the next pause a short one again.
_STEADY_SECONDS = 60.0
# Between two states, however much happens.
_STATE_SECONDS_MIN = 1.0
# The same reason is said again.
_SAY_SECONDS = 600.0


class Backoff:
    """Pauses of 1 to 60 s that grow while nothing holds; random, so that many nodes do not come back at once."""

    def __init__(self) -> None:
        self._last = PAUSE_SECONDS[0]

    def pause(self, connected_seconds: float) -> float:
        """How long to wait now, after a connection that stood so long (0: there was none)."""
        shortest, longest = PAUSE_SECONDS
        if connected_seconds >= _STEADY_SECONDS:
            self._last = shortest
        self._last = min(random.uniform(shortest, 3 * self._last), longest)
        return self._last


class StatePace:
    """When the next state is due: at the interval, and soon after something changed."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._at = float("-inf")
        self._shown: object = None

    def is_due(self, shown: object, now: float) -> bool:
        """Whether to publish now; ``shown`` is what a change of is worth it."""
        age = now - self._at
        return age >= self._interval or (shown != self._shown and age >= _STATE_SECONDS_MIN)

    def published(self, shown: object, now: float) -> None:
        """It is."""
        self._shown, self._at = shown, now


class Said:
    """Whether a reason is worth a line: when it is another than the last, and else every ten minutes."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self._at = 0.0

    def is_worth(self, reason: str, now: float) -> bool:
        """True: write the line; it counts as written."""
        if reason == self._reason and now - self._at < _SAY_SECONDS:
            return False
        self._reason, self._at = reason, now
        return True

    def forget(self) -> None:
        """It has been mended: the same reason is news again."""
        self._reason = None
