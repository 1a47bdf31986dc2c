"""DATA/starts: starts that have come to nothing, so that a crash loop ends by itself.

One line a start, Unix time in ms. Gone as soon as the daemon has caught up with the log, or was stopped by somebody.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from indexd.config import RecoveryConfig
from indexd.errors import CrashLoopError
from indexd.storage.disk import Disk


class Starts:
    """Counts for one data directory. Raises DiskError, and CrashLoopError when there were too many."""

    def __init__(self, disk: Disk, path: Path, config: RecoveryConfig, clock: Callable[[], float] = time.time) -> None:
        self._disk = disk
        self._path = path
        self._most = config.unclean_starts_max
        self._seconds = config.unclean_starts_seconds
        self._clock = clock
        self._is_counted = False

    def begin(self) -> None:
        """Count a start; CrashLoopError if so many others within the time have come to nothing."""
        if not self._most:
            return
        now = int(self._clock() * 1000)
        earlier = self._read()
        # One from the future is of a clock that was set back since: how old it is nobody knows.
        recent = [at for at in earlier if now - self._seconds * 1000 <= at <= now]
        if len(recent) >= self._most:
            raise CrashLoopError(
                f"{len(recent)} unclean starts within {self._seconds:g} s ended before they had caught up with the "
                f"log, so this one is not tried ({self._path})",
                f"look at the log for what ended them; then run indexd --recover, or remove {self._path}",
            )
        self._write([*recent, now])
        self._is_counted = True

    def take_back(self) -> None:
        """This start was refused for a reason that was said: no crash."""
        if self._is_counted:
            self._write(self._read()[:-1])
            self._is_counted = False

    def forget(self) -> None:
        """It has caught up, or was stopped on purpose: what happened before does not count any more."""
        if self._is_counted or self._disk.exists(self._path):
            self._disk.unlink(self._path)
            self._is_counted = False

    def _write(self, times: list[int]) -> None:
        if not times:
            self._disk.unlink(self._path)
            return
        self._disk.write_atomically(self._path, "".join(f"{at}\n" for at in times).encode("ascii"))

    def _read(self) -> list[int]:
        if not self._disk.exists(self._path):
            return []
        words = self._disk.read(self._path).split()
        return [int(word) for word in words if word.isdigit() and len(word) < 20]
