"""What a process has from its lock to its end, however often it opens its data directory: Instance, and its parts.

StageLiveness says whether the stages move. A stage gives a sign after a step that really was one: a look at the log, a
drain that was built or that the disk refused, a flush; never because time has passed. Then its next sign is due within
a limit, and within the wait that it says it will make. A stage that is overdue is stalled.

Starts counts in DATA/starts the starts that have come to nothing, so that a crash loop ends by itself: one line a
start, Unix time in ms. The file goes as soon as the daemon has caught up with the log, or was stopped by somebody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from indexd.config import Config, RecoveryConfig
from indexd.errors import CrashLoopError
from indexd.serve.board import Board
from indexd.service.log import Logger, Notifier
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles

#: The limit when no service manager watches.
LIMIT_SECONDS = 60.0
# Some thread of a running daemon reads the clock every second or two.
_STOPPED_SECONDS = 5.0


class RunningClock:
    """Seconds in which this process ran. Time in which it was stopped (SIGSTOP, a frozen cgroup) does not count.

    Nothing is late because of a stop. A stop is a gap between two readings, so some thread has to read all the time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._read = clock()
        self._stopped = 0.0

    def __call__(self) -> float:
        """Now."""
        with self._lock:
            now = self._clock()
            if now - self._read > _STOPPED_SECONDS:
                self._stopped += now - self._read
            self._read = now
            return now - self._stopped


@dataclass(frozen=True, slots=True)
class _Sign:
    # ``due``: when the next one has to come; None while nothing is asked of the stage.
    at: float
    due: float | None
    progress: int | None = None


class StageLiveness:
    """Signs of the stages ``read``, ``build`` and ``flush``. One thread writes a stage's, any may look.

    ``watchdog``: seconds after which a service manager ends a process that is not heard of. A drain and a flush may
    take so long without any progress; a look at the log, of which there are many a second, half of it.
    """

    def __init__(self, watchdog: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        limit = watchdog or LIMIT_SECONDS
        self.limits = {"read": limit / 2, "build": limit, "flush": limit}
        self._clock = clock
        now = clock()
        self._signs = {"read": _Sign(now, now + limit), "build": _Sign(now, now + limit), "flush": _Sign(now, None)}

    def __repr__(self) -> str:
        return f"StageLiveness(stalled={self.stalled()})"

    def sign(self, stage: str, wait: float = 0.0) -> None:
        """A step is done, or refused; the next one begins after ``wait`` seconds at the latest."""
        now = self._clock()
        self._signs[stage] = _Sign(now, now + wait + self.limits[stage])

    def begin(self, stage: str, progress: int) -> None:
        """A step begins that may take long: it is alive as long as ``watch`` finds it further on."""
        now = self._clock()
        self._signs[stage] = _Sign(now, now + self.limits[stage], progress)

    def watch(self, stage: str, progress: int) -> None:
        """How far the step is that has begun. Of the thread that writes the stage's signs."""
        sign = self._signs[stage]
        if sign.progress is not None and sign.progress != progress:
            self.begin(stage, progress)

    def rest(self, stage: str) -> None:
        """Nothing is asked of the stage until its next sign."""
        self._signs[stage] = _Sign(self._clock(), None)

    def stalled(self) -> dict[str, float]:
        """Each stage that is overdue, with the seconds since its last sign."""
        now = self._clock()
        signs = tuple(self._signs.items())
        return {stage: round(now - sign.at, 1) for stage, sign in signs if sign.due is not None and now > sign.due}


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


@dataclass(slots=True)
class Instance:
    """``config`` and ``log`` are replaced by a HUP; ``reload_config`` is what a HUP calls."""

    config: Config
    reload_config: Callable[[], Config]
    disk: Disk
    files: DataFiles
    lock: DirectoryLock
    starts: Starts
    board: Board
    notifier: Notifier
    log: Logger = field(repr=False)
    #: A HUP came while nobody could follow it.
    is_reload_due: bool = False
    clock: RunningClock = field(default_factory=RunningClock)
    #: When the last look around was over, by ``clock``; None while nobody looks.
    looked_around: float | None = None
