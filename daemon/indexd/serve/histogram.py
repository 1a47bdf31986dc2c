"""Histogram: how long things took, as Prometheus counts it. Any thread may write, any may read."""

from __future__ import annotations

import threading
from bisect import bisect_left

# Seconds. Drains take milliseconds, a flush on a busy disk seconds.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Counts by upper bound, the last of all that is longer; ``total`` is their sum in seconds."""

    def __init__(self, bounds: tuple[float, ...] = BOUNDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Histogram({self.count}, {self.total:.3f} s)"

    @property
    def count(self) -> int:
        """How many were observed."""
        return sum(list(self.counts))

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count one, or so many that took as long; what is exactly a bound belongs to it."""
        with self._lock:
            self.counts[bisect_left(self.bounds, seconds)] += times
            self.total += seconds * times

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as Prometheus writes it, how many took no longer); the last is ``+Inf``."""
        found, count = [], 0
        for bound, own in zip((*map(str, self.bounds), "+Inf"), list(self.counts), strict=True):
            count += own
            found.append((bound, count))
        return found
