"""Buckets of sizes, lengths and times: their bounds, and what can be said of the values in them.

Each of 0 to 7 has a bucket of its own; above, there are four for each power of two, so a bound is off by a quarter at
most (``parts_kernel.bucket_of``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

HOUR = 3_600_000
#: What a bin of store times may be long, in ms: each divides the next.
STEPS = (1000, 5000, 15_000, 30_000, 60_000, 300_000, 900_000, HOUR, 3 * HOUR, 6 * HOUR, 12 * HOUR, 24 * HOUR)
#: So many bins at most are worth telling apart.
BINS_MAX = 120


def step_for(span: int) -> int:
    """The shortest step by which ``span`` ms are few bins; beyond the list days, doubled."""
    for step in STEPS:
        if span // step < BINS_MAX:
            return step
    while span // step >= BINS_MAX:
        step *= 2
    return step


def bounds_of(bucket: int) -> tuple[int, int]:
    """The least and the greatest value of a bucket."""
    if bucket < 4:
        return bucket, bucket
    power, quarter = bucket // 4 + 1, bucket % 4
    first = (1 << power) + (quarter << (power - 2))
    return first, first + (1 << (power - 2)) - 1


def quantile(counts: NDArray[np.int64], share: float) -> int:
    """The upper bound of the bucket in which ``share`` of the counted values is reached; 0 for none."""
    total = int(counts.sum())
    if not total:
        return 0
    at = int(np.searchsorted(np.cumsum(counts), share * total, side="left"))
    return bounds_of(min(at, len(counts) - 1))[1]


def used(counts: NDArray[np.int64]) -> tuple[int, int]:
    """The first bucket that counts anything, and the one behind the last; (0, 0) for none."""
    places = np.flatnonzero(counts)
    return (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
