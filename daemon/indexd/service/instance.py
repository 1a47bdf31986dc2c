"""Instance: what a process has from its lock to its end, however often it opens its data directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from indexd.config import Config
from indexd.serve.board import Board
from indexd.service.log import Logger
from indexd.service.notify import Notifier
from indexd.service.pulse import RunningClock
from indexd.service.starts import Starts
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles


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
