"""Daemon: the composition root. Opens, recovers, runs its tasks, and stops them in the order the data takes.

A stop (TERM, INT) ends the tail loop; that closes the queue; the drain empties it; the flusher makes all of it durable;
only then does the abort flag go. Where trying again harms nothing, a stage waits and tries again; any other error ends
the run and leaves the flag: whoever starts next recovers.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from indexd.commitlog.format import Corrupt
from indexd.commitlog.reading import Skipped
from indexd.config import Config
from indexd.dispatch.drain import drain
from indexd.dispatch.queue import DispatchQueue, Item
from indexd.dispatch.reput import Pace, ReputState, pause, poll_patiently, reput
from indexd.errors import DiskError, IndexdError, MissingStoreError
from indexd.flush.abort import remove_abort
from indexd.flush.building import Building
from indexd.flush.flusher import Progress
from indexd.recovery.open import Opened
from indexd.recovery.settings import reader_options
from indexd.serve.board import Board
from indexd.service.log import Logger, configure_log
from indexd.service.reload import RELOADABLE, changed_keys, merge_reloadable
from indexd.service.starts import Starts
from indexd.service.state import state_row, write_state
from indexd.service.watch import Watch
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles

_RETRY_SECONDS_MIN = 1.0
# Names in one line of the log.
_NAMES_MAX = 20


class Daemon:
    """The running tasks around one opened data directory."""

    def __init__(
        self,
        config: Config,
        reload_config: Callable[[], Config],
        disk: Disk,
        files: DataFiles,
        opened: Opened,
        log: Logger,
        watch: Watch,
        starts: Starts,
        board: Board,
    ) -> None:
        self.config = config
        self._board = board
        self._reload_config = reload_config
        self._disk = disk
        self._files = files
        self._log = log
        self._watch = watch
        self._starts = starts
        self.building = Building(opened.outputs, opened.flusher)
        self.outputs = opened.outputs
        self.flusher = opened.flusher
        self.reader = opened.reader
        self.queue = DispatchQueue(config.queue.queue_rows, config.queue.queue_bytes)
        self.reput = ReputState()
        self._pace = Pace(0, 0, 0)
        self._stop = asyncio.Event()
        self._stop_reading = threading.Event()
        self._drained = asyncio.Event()
        self._flush_due = asyncio.Event()
        # One thread each, so that the order of calls on the log and on the files is theirs.
        self._read_thread = ThreadPoolExecutor(1, "read")
        self._build_thread = ThreadPoolExecutor(1, "build")
        self._flush_thread = ThreadPoolExecutor(1, "flush")
        self._state_failed = False
        self._rolls = 0
        # Stage -> what keeps it waiting.
        self.problems: dict[str, IndexdError] = {}
        self._left_out: set[str] = set()
        self._must_flush = False
        self._flush_pause = _RETRY_SECONDS_MIN
        self._apply_config()

    async def run(self) -> None:
        """Until a stop; everything is durable then and the abort flag is gone."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        self._board.running(self.state)
        self._log.info("running", phy_offset=self.outputs.phy_offset, drain_interval=self.config.queue.drain_interval)
        try:
            async with asyncio.TaskGroup() as tasks:
                for stage in (self._reput, self._drain, self._flush):
                    tasks.create_task(stage(), name=stage.__name__)
        finally:
            self._stop_reading.set()
            for thread in (self._read_thread, self._build_thread, self._flush_thread):
                thread.shutdown(cancel_futures=True)
        self.reader.close()
        remove_abort(self._disk, self._files.abort)
        self._starts.forget()
        self._disk.unlink(self._files.state)
        self._log.info("stopped", phy_offset=self.flusher.frontier.phy_offset, messages=self.outputs.messages)

    @property
    def is_stopping(self) -> bool:
        """A signal has said stop."""
        return self._stop.is_set()

    # The stages.

    async def _reput(self) -> None:
        loop = asyncio.get_running_loop()
        look = partial(poll_patiently, self.reader.poll, self._pace, self.reput, self._stop_reading)
        poll = partial(loop.run_in_executor, self._read_thread, look)
        problem = partial(self._on_problem, "read")
        await reput(poll, self.queue, self._pace, self.reput, self._stop, self._on_log_event, problem)

    async def _drain(self) -> None:
        await drain(self.queue, lambda: self.config.queue.drain_interval, self._build)
        self._drained.set()
        self._flush_due.set()

    async def _build(self, items: list[Item]) -> None:
        loop = asyncio.get_running_loop()
        started = time.monotonic()
        seconds = _RETRY_SECONDS_MIN
        while True:
            try:
                await loop.run_in_executor(self._build_thread, self._build_now, items)
                break
            except (DiskError, MissingStoreError) as error:
                if not can_wait(error) or self._stop.is_set():
                    raise
                # Nothing is lost: the rest of the drain stays here, the queue fills, the reader waits.
                self._on_problem("build", error, seconds)
                await pause(self._stop, seconds)
                seconds = min(2 * seconds, self.config.reader.retry_max_seconds)
        self._on_problem("build", None)
        if items:
            self._board.drain_seconds.observe(time.monotonic() - started)
        rolls, self._rolls = self.outputs.index.counters.rolls - self._rolls, self.outputs.index.counters.rolls
        if rolls:
            self._log.info("rolled", files=rolls, phy_offset=self.outputs.phy_offset)
            self._flush_due.set()

    def _build_now(self, items: list[Item]) -> None:
        # In the build thread.
        try:
            self._look_after_files()
            removed = self.building.apply(items, self.reader.log.min_offset or 0)
            if not self._stop.is_set():
                self.outputs.remember_log()
        finally:
            self._write_state()
        if removed:
            self._log.info("expired_files", files=len(removed), names=removed[:_NAMES_MAX])
        self._say_left_out()
        if self.reput.caught_up or self.reput.corrupt is not None:
            self._starts.forget()

    def _say_left_out(self) -> None:
        # Once a reason, when the first such message comes; how many there are stands in the state.
        queues = self.outputs.queues
        if queues is None:
            return
        counters = queues.counters
        for reason, count in (
            ("its topic is no folder's name", counters.nameless),
            ("queues_max is reached, or its queue offset is none that a file can hold", counters.left_out),
            ("its topic has batch consume queues, which are not built", counters.batch_messages),
        ):
            if count and reason not in self._left_out:
                self._left_out.add(reason)
                self._log.warning("left_out", reason=reason, hint="it is found by key, and in no consume queue")

    def _look_after_files(self) -> None:
        restored = self._watch.keep_lock()
        if "build" not in self.problems:  # while a drain is tried again the files are not as they were left
            self._watch.check_index(self.building)
            self._watch.check_beside(self.building)
        if not self._stop.is_set():  # a stop does not depend on the log
            self.outputs.check_log()
        restored += self._watch.restore(self.building)
        if restored:
            self._log.warning("restored", names=restored)
            self._must_flush = self._must_flush or bool({"frontier", "checkpoint"} & set(restored))

    def state(self) -> dict[str, Any]:
        """Where it stands right now; from any thread."""
        return state_row(self.reader, self.building, self.queue, self.reput, self.problems)

    def _write_state(self) -> None:
        try:
            write_state(self._disk, self._files, self._board.row())
            self._state_failed = False
        except DiskError as error:
            # Queries then go by the frontier; say so once, not at every drain.
            if not self._state_failed:
                self._log.error("state_not_written", problem=error.line())
            self._state_failed = True

    async def _flush(self) -> None:
        while not self._drained.is_set():
            try:
                async with asyncio.timeout(self.config.flush.flush_interval):
                    await self._flush_due.wait()
            except TimeoutError:
                pass
            self._flush_due.clear()
            await self._persist(self.building.progress)
        await asyncio.get_running_loop().run_in_executor(self._build_thread, self.building.finish)

    async def _persist(self, progress: Progress) -> None:
        if progress.phy_offset == self.flusher.frontier.phy_offset and not has_work(progress) and not self._must_flush:
            return
        self._must_flush = False
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._flush_thread, self.building.persist, progress)
            await loop.run_in_executor(self._build_thread, self.building.persisted, progress)
        except DiskError as error:
            if not can_wait(error):
                raise
            self._on_problem("flush", error, self._flush_pause)
            self._must_flush = True
            await pause(self._drained, self._flush_pause)
            self._flush_pause = min(2 * self._flush_pause, self.config.reader.retry_max_seconds)
            return
        self._on_problem("flush", None)
        self._flush_pause = _RETRY_SECONDS_MIN
        seconds = self.flusher.counters.last_seconds
        self._board.flush_seconds.observe(seconds)
        self._board.events.tell("flushed", {"phy_offset": progress.phy_offset, "seconds": round(seconds, 4)})

    # Signals and events.

    def _on_stop(self, number: int) -> None:
        self._stop_reading.set()
        self._stop.set()
        self._log.info("stopping", signal=signal.Signals(number).name)

    def _on_reload(self) -> None:
        try:
            fresh = self._reload_config()
        except IndexdError as error:
            self._log.error("reload_refused", problem=error.line())
            return
        changed = changed_keys(self.config, fresh)
        merged = merge_reloadable(self.config, fresh)
        self.config = merged
        self._apply_config()
        self._log = configure_log(merged.log, self._board.events.tap)
        self._log.info("reloaded", changed=sorted(changed & RELOADABLE), needs_restart=sorted(changed - RELOADABLE))

    def _apply_config(self) -> None:
        reader = self.config.reader
        self._pace.poll_min = reader.poll_min_ms / 1000
        self._pace.poll_max = reader.poll_max_ms / 1000
        self._pace.corrupt_retry_max = reader.retry_max_seconds
        self.reader.set_options(reader_options(self.config))

    def _on_problem(self, stage: str, error: IndexdError | None, retry_seconds: float = 0.0) -> None:
        if error is not None:
            self.problems[stage] = error
            self._log.error("degraded", stage=stage, problem=error.line(), retry_seconds=retry_seconds)
        elif self.problems.pop(stage, None) is not None:
            self._log.info("healed", stage=stage)

    def _on_log_event(self, event: Corrupt | Skipped | None) -> None:
        if event is None:
            self._log.info("corrupt_left", offset=self.reader.position)
        elif isinstance(event, Corrupt):
            self._log.error(
                "corrupt",
                offset=event.offset,
                file=str(event.path),
                reason=event.reason,
                hint="indexing waits here and reads again; --on-corrupt skip goes on at the next proven frame",
            )
        else:
            self._log.warning(
                "skipped", begin=event.begin, end=event.end, bytes=event.end - event.begin, reason=event.reason
            )


def has_work(progress: Progress) -> bool:
    """Whether there is something to write down besides how far the log was read."""
    return progress.has_expired or any(file.is_write_full for file in progress.index.unsynced)


def can_wait(error: IndexdError) -> bool:
    """Whether the cause may go away, and waiting for that harms nothing."""
    return isinstance(error, MissingStoreError) or (isinstance(error, DiskError) and error.is_transient)
