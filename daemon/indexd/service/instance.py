"""What a process has from its lock to its end, however often it opens its data directory: Instance, and its parts.

StageLiveness says whether the stages move. A stage gives a sign after a step that really was one: a look at the log, a
drain that was built or that the disk refused, a flush; never because time has passed. Then its next sign is due within
a limit, and within the wait that it says it will make. A stage that is overdue is stalled.

Starts counts in DATA/starts the starts that have come to nothing, so that a crash loop ends by itself: one line a
start, Unix time in ms. The file goes as soon as the daemon has caught up with the log, or was stopped by somebody.

``take_over`` follows a HUP: the keys that a running daemon takes over at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from indexd.config import Config, RecoveryConfig
from indexd.errors import CrashLoopError, IndexdError
from indexd.serve.daemon_status import DaemonStatus
from indexd.service.log import Logger, Notifier, configure_log
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles

# Keys that a HUP changes at once; any other needs a restart. Who a node is and where it listens, connects and
# publishes is settled for the life of a process.
RELOADABLE = frozenset(
    {
        "log_level", "log_format", "drain_interval", "flush_interval", "poll_min_ms", "poll_max_ms",
        "retry_max_seconds", "settle_ms", "corrupt_after_ms", "on_corrupt", "verify_crc",
        "broker_address", "broker_check_interval", "scrub_interval",
        "disk_used_max", "read_rate_max", "memory_max", "drop_cache",
    }
)  # fmt: skip
_SECTIONS = (
    "store", "reader", "queue", "index", "outputs", "flush", "recovery", "query", "log", "node", "http", "remoting",
    "mqtt", "limits",
)  # fmt: skip
#: The limit when no service manager watches.
LIMIT_SECONDS = 60.0


class StageLiveness:
    """Signs of the stages ``read``, ``build`` and ``flush``. One thread writes a stage's, any may look.

    ``watchdog``: seconds after which a service manager ends a process that is not heard of. A drain and a flush may
    take so long without any progress; a look at the log, of which there are many a second, half of it.
    """

    def __init__(self, watchdog: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        limit = watchdog or LIMIT_SECONDS
        self.limits = {"read": limit / 2, "build": limit, "flush": limit}
        self._clock, now = clock, clock()
        #: Of each stage its last sign, when the next has to come (None: nothing is asked of it), and how far it was.
        self._signs: dict[str, tuple[float, float | None, int | None]]
        self._signs = {"read": (now, now + limit, None), "build": (now, now + limit, None), "flush": (now, None, None)}

    def sign(self, stage: str, wait: float = 0.0, progress: int | None = None) -> None:
        """A step is done, or refused; the next one begins after ``wait`` seconds at the latest.

        With ``progress`` a step begins that may take long: it is alive as long as ``watch`` finds it further on.
        """
        now = self._clock()
        self._signs[stage] = now, now + wait + self.limits[stage], progress

    def watch(self, stage: str, progress: int) -> None:
        """How far the step is that has begun. Of the thread that writes the stage's signs."""
        if self._signs[stage][2] not in (None, progress):
            self.sign(stage, progress=progress)

    def rest(self, stage: str) -> None:
        """Nothing is asked of the stage until its next sign."""
        self._signs[stage] = self._clock(), None, None

    def put_off(self, seconds: float) -> None:
        """Nothing is late because the process was stopped for so long (SIGSTOP, a frozen cgroup)."""
        for name, (at, due, progress) in tuple(self._signs.items()):
            self._signs[name] = at + seconds, None if due is None else due + seconds, progress

    def stalled(self) -> dict[str, float]:
        """Each stage that is overdue, with the seconds since its last sign."""
        now, signs = self._clock(), tuple(self._signs.items())
        return {stage: round(now - at, 1) for stage, (at, due, _) in signs if due is not None and now > due}


class Starts:
    """Counts for one data directory. Raises DiskError, and CrashLoopError when there were too many."""

    def __init__(self, disk: Disk, path: Path, config: RecoveryConfig, clock: Callable[[], float] = time.time) -> None:
        self._disk, self._path, self._config, self._clock = disk, path, config, clock

    def begin(self) -> None:
        """Count a start; CrashLoopError if so many others within the time have come to nothing."""
        most, seconds = self._config.unclean_starts_max, self._config.unclean_starts_seconds
        if not most:
            return
        now = int(self._clock() * 1000)
        # One from the future is of a clock that was set back since: how old it is nobody knows.
        recent = [at for at in self._read() if now - seconds * 1000 <= at <= now]
        if len(recent) >= most:
            raise CrashLoopError(
                f"{len(recent)} unclean starts within {seconds:g} s ended before they had caught up with the "
                f"log, so this one is not tried ({self._path})",
                f"look at the log for what ended them; then run indexd --recover, or remove {self._path}",
            )
        self._write([*recent, now])

    def take_back(self) -> None:
        """This start was refused for a reason that was said: no crash."""
        self._write(self._read()[:-1])

    def forget(self) -> None:
        """It has caught up, or was stopped on purpose: what happened before does not count any more."""
        if self._disk.exists(self._path):
            self._disk.unlink(self._path)

    def _write(self, times: list[int]) -> None:
        if times:
            self._disk.write_atomically(self._path, "".join(f"{at}\n" for at in times).encode("ascii"))
        else:
            self.forget()

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
    board: DaemonStatus
    notifier: Notifier
    log: Logger = field(repr=False)
    #: A HUP came while nobody could follow it.
    is_reload_due: bool = False


def take_over(instance: Instance) -> bool:
    """What can be of a configuration that is read anew; False, and said so, if there is none."""
    instance.is_reload_due, before = False, instance.config
    try:
        found = instance.reload_config()
    except Exception as error:  # noqa: BLE001 - said; the configuration stays
        problem = error.line() if isinstance(error, IndexdError) else repr(error)
        instance.log.error("reload_refused", problem=problem)  # noqa: TRY400 - a line, no trace
        return False
    changed = changed_keys(before, found)
    instance.config = merge_reloadable(before, found)
    instance.log = configure_log(instance.config.log, instance.board.events.tap)
    instance.log.info("reloaded", changed=sorted(changed & RELOADABLE), needs_restart=sorted(changed - RELOADABLE))
    return True


def changed_keys(old: Config, new: Config) -> set[str]:
    """Keys of a daemon whose values differ between two configurations."""
    pairs = [(getattr(old, section), getattr(new, section)) for section in _SECTIONS]
    return {key for before, fresh in pairs for key in type(fresh).model_fields if vars(before)[key] != vars(fresh)[key]}


def merge_reloadable(old: Config, new: Config) -> Config:
    """``old`` with the reloadable keys of ``new``; a section in which none of them differs stays the same object."""
    changed, merged = changed_keys(old, new) & RELOADABLE, {}
    for section in _SECTIONS:
        fresh = getattr(new, section)
        if update := {key: getattr(fresh, key) for key in changed & set(type(fresh).model_fields)}:
            merged[section] = getattr(old, section).model_copy(update=update)
    return old.model_copy(update=merged)
