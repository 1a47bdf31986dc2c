"""How far a recovery is: a bar on a terminal or a log line every few seconds; for systemd; in DATA/state.

``indexd --recover``: verify every file against its header and the log, mend, catch up with the log, and end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import CorruptDataError, DiskError
from indexd.flush.flusher import Building
from indexd.flush.frontier import remove_abort
from indexd.recovery.compare import WholeLog, once
from indexd.recovery.open import Opened, check_store, reader_options
from indexd.serve.board import Board
from indexd.service.log import Logger, Notifier, configure_log
from indexd.service.start import open_for_run
from indexd.service.state import write_state
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
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


def recover_now(config: Config) -> dict[str, Any]:
    """Do it and say what was done; raises IndexdError. The data directory is as after a clean stop then."""
    log = configure_log(config.log)
    disk = Disk()
    check_store(config)
    list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    disk.make_dir(config.store.data)
    files = DataFiles(config.store.data)
    lock = DirectoryLock(files.lock)
    lock.acquire()
    try:
        started = time.monotonic()
        opened = open_for_run(config, disk, files, log, forced=True)
        opened.reader.set_options(once(reader_options(config)))
        log_left = WholeLog(opened.reader)
        entries = opened.outputs.index.counters.entries
        messages = opened.outputs.messages
        with RecoveryProgress(log, disk, files) as progress:
            problem = _catch_up(opened, log_left, progress)
        Building(opened.outputs, opened.flusher).finish()
        remove_abort(disk, files.abort)
        disk.unlink(files.state)
        disk.unlink(files.starts)
        if problem is not None:
            raise problem
        return {
            "data": str(files.data),
            "reasons": opened.recovered.reasons,
            "keptFiles": len(opened.recovered.files),
            "keptEntries": opened.recovered.kept_entries,
            "droppedEntries": opened.recovered.dropped_entries,
            "deletedFiles": list(opened.recovered.deleted_files),
            "rewrittenFiles": opened.recovered.rewritten_files,
            "refilledBytes": opened.refilled_bytes,
            "rebuiltEntries": opened.outputs.index.counters.entries - entries,
            "rebuiltMessages": opened.outputs.messages - messages,
            "beginOffset": opened.outputs.begin_offset,
            "phyOffset": opened.outputs.phy_offset,
            "unreadableAt": log_left.unreadable and log_left.unreadable.offset,
            "seconds": round(time.monotonic() - started, 3),
        }
    finally:
        lock.release()


def _catch_up(opened: Opened, log: WholeLog, progress: RecoveryProgress) -> CorruptDataError | None:
    reader, outputs = opened.reader, opened.outputs
    begin = reader.position
    try:
        for item in log:
            outputs.apply(item)
            total = reader.log.segments[-1].end - begin if reader.log.segments else 0
            progress("index", outputs.phy_offset - begin, total)
    except CorruptDataError as error:
        return CorruptDataError(f"{error}; everything before it is indexed", error.hint)
    finally:
        reader.close()
    return None
