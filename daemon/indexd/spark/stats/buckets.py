"""Buckets of sizes and lengths: their bounds, and what can be said of the values in them.

Each of 0 to 7 has a bucket of its own; above, there are four for each power of two, so a bound is off by a quarter at
most (``parts_kernel.bucket_of``).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
