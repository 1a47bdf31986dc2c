"""How far a rebuild is: bytes, rate and time left, on standard error when that is a terminal."""

from __future__ import annotations

import sys

from tqdm import tqdm

# No thread of its own, which there may be no memory for.
tqdm.monitor_interval = 0


class ProgressBar:
    """A bar of bytes; shows nothing when standard error is no terminal."""

    def __init__(self, text: str) -> None:
        self._bar = tqdm(
            desc=text, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, disable=not sys.stderr.isatty()
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def to(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes."""
        self._bar.total = max(total, done)
        self._bar.update(done - self._bar.n)
