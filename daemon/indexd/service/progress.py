"""How far a recovery is: a bar on a terminal or a log line every few seconds; for systemd; in DATA/state."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from indexd.errors import DiskError
from indexd.serve.board import Board
from indexd.service.log import Logger, Notifier
from indexd.service.state import write_state
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

_LOG_EVERY_SECONDS = 5.0
_EXPORT_EVERY_SECONDS = 1.0
#: So long nothing may be heard of a recovery until its next step: a file of the largest size on a slow disk.
STEP_SECONDS = 300.0

# No thread of its own, which there may be no memory for.
tqdm.monitor_interval = 0


class RecoveryProgress:
    """Callable as ``progress(step, done, total)``; a context manager that takes the bar away at the end."""

    def __init__(
        self,
        log: Logger,
        disk: Disk,
        files: DataFiles,
        check_stop: Callable[[], None] = lambda: None,
        board: Board | None = None,
        notifier: Notifier | None = None,
    ) -> None:
        self._log = log
        self._notifier = notifier
        self._check_stop = check_stop
        self._board = board
        self._disk, self._files = disk, files
        self._exported = time.monotonic()
        self._bar: tqdm[Any] | None = None
        self._step = ""
        self._logged = time.monotonic()

    def __call__(self, step: str, done: int, total: int) -> None:
        self._check_stop()
        if self._board is not None:
            self._board.recovering(step, done, total)
        if self._notifier is not None:
            self._notifier.extend(STEP_SECONDS)
        if sys.stderr is not None and sys.stderr.isatty():
            if self._bar is None or step != self._step:
                self._close()
                self._bar = tqdm(desc=step, total=total, unit_scale=True, leave=False, file=sys.stderr)
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._logged >= _LOG_EVERY_SECONDS:
            self._logged = time.monotonic()
            self._log.info("recovering", step=step, done=done, total=total)
        self._step = step
        if time.monotonic() - self._exported >= _EXPORT_EVERY_SECONDS:
            self._exported = time.monotonic()
            if self._notifier is not None:
                self._notifier.status(f"recovering: {step} {done} of {total} ({done / max(total, 1):.0%})")
            row: dict[str, Any] = {"pid": os.getpid(), "recovering": {"step": step, "done": done, "total": total}}
            if self._board is not None:
                row = self._board.row()
            with suppress(DiskError):  # progress is a courtesy; the recovery itself meets and reports a failing disk
                write_state(self._disk, self._files, row)

    def __enter__(self) -> RecoveryProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
