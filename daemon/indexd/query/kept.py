"""Kept: what was made of a file or directory, made again only when that has changed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from indexd.errors import DiskError
from indexd.storage.disk import Disk, Stamp

T = TypeVar("T")
# A change so soon after another may leave the same time of the last write: the kernel's clock for that goes in steps of
# up to 10 ms. What is younger is not kept.
_SETTLED_NS = 50_000_000


class Kept(Generic[T]):
    """The value that ``make`` gives for ``path``; ``times_made`` tells whether it is still the one seen before."""

    def __init__(self, disk: Disk, path: Path, make: Callable[[], T]) -> None:
        self.times_made = 0
        self._disk = disk
        self._path = path
        self._make = make
        self._stamp: Stamp | None = None
        self._value: T

    def __repr__(self) -> str:
        return f"Kept({self._path}, times_made={self.times_made})"

    def get(self) -> T:
        """The value as it is now; raises what ``make`` raises."""
        now = time.time_ns()
        try:
            stamp = self._disk.stamp(self._path)
        except DiskError:
            return self._make_again(None)  # whatever is wrong with it, ``make`` says it better
        if self._stamp is not None and stamp == self._stamp:
            return self._value
        return self._make_again(stamp if now - stamp.mtime_ns > _SETTLED_NS else None)

    def forget(self) -> None:
        """Make it again next time."""
        self._stamp = None

    def _make_again(self, stamp: Stamp | None) -> T:
        self._stamp = None
        self._value = self._make()
        self._stamp = stamp
        self.times_made += 1
        return self._value
