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
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import Poll, Skipped
from indexd.dispatch.queue import DispatchQueue, drain
from indexd.dispatch.reput import Pace, ReputState, Throttle, pause, poll_patiently, reput
from indexd.errors import DiskError, IndexdError, MissingStoreError
from indexd.flush.frontier import remove_abort
from indexd.flush.pipeline import Item, Progress
from indexd.index.file import IndexService
from indexd.recovery.open import Opened, reader_options
from indexd.service.around import DiskWatermark
from indexd.service.instance import Instance, Reloading, StageLiveness
from indexd.service.log import Logger
from indexd.service.scrub import Scrubbing
from indexd.service.state import DaemonState, EventReporter, Watch, write_state
from indexd.storage.page_cache import take_lowest_priority

T = TypeVar("T")
_RETRY_SECONDS_MIN = 1.0
_BEAT_SECONDS = 2.0
# A beat that is so late: the process was stopped, or the loop itself hung, which fed nobody meanwhile.
_STOPPED_SECONDS = 5.0
# A look at broker, disk and log's end is due every second and takes some two; so old it hangs.
_AROUND_SECONDS = 15.0
# An interval that a HUP has changed is followed within that time.
_SCRUB_LOOK_SECONDS = 5.0


class Daemon:
    """The running tasks around one opened data directory."""

    def __init__(self, instance: Instance, opened: Opened) -> None:
        self._instance = instance
        self._disk, self._files = instance.disk, instance.files
        self._board, self._notifier = instance.board, instance.notifier
        self._watch = Watch(instance.disk, instance.files, instance.lock, opened.pipeline.frontier)
        self.pipeline, self.reader = opened.pipeline, opened.reader
        self.queue = DispatchQueue(instance.config.queue.queue_rows, instance.config.queue.queue_bytes)
        self.reput = ReputState()
        self._tell = EventReporter(lambda: instance.log)
        self.state = DaemonState(self.reader, self.pipeline, self.queue, self.reput, self._tell)
        self._pace = Pace(0, 0, 0)
        self._throttle: Throttle | None = None
        self._stop = asyncio.Event()
        self._stop_reading = threading.Event()
        self._drained = asyncio.Event()
        self._flush_due = asyncio.Event()
        self._finished = asyncio.Event()
        self._liveness = StageLiveness(instance.notifier.watchdog_seconds)
        self._is_tailing = False
        self._reloading = Reloading(instance, self._on_reloaded)
        # One thread each, so that the order of calls on the log and on the files is theirs.
        self._threads = {name: ThreadPoolExecutor(1, name) for name in ("read", "build", "flush")}
        self._threads["scrub"] = ThreadPoolExecutor(1, "scrub", take_lowest_priority)
        self._scrubbing = Scrubbing(instance, self.pipeline, self._stop_reading)
        self._must_flush, self._flush_pause = False, _RETRY_SECONDS_MIN
        self._apply_config()

    async def run(self) -> None:
        """Until a stop; everything is durable then and the abort flag is gone."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        if self._instance.is_reload_due:
            self._on_reload()
        # Looked at by whoever asks: a loop that hangs cannot say so.
        self._board.running(lambda: {**self.state.row(), "stalled": self._liveness.stalled()})
        interval = self._instance.config.queue.drain_interval
        self._log.info("running", phy_offset=self.pipeline.built.phy_offset, drain_interval=interval)
        try:
            async with asyncio.TaskGroup() as tasks:
                for stage in (self._reput, self._drain, self._flush, self._scrub, self._watch_stages):
                    tasks.create_task(stage(), name=stage.__name__)
        finally:
            self._stop_reading.set()
            for thread in self._threads.values():
                thread.shutdown(cancel_futures=True)
        self.reader.close()
        remove_abort(self._disk, self._files.abort)
        self._instance.starts.forget()
        self._disk.unlink(self._files.state)
        self._log.info("stopped", phy_offset=self.pipeline.frontier.phy_offset, messages=self.pipeline.built.messages)

    @property
    def is_stopping(self) -> bool:
        """A signal has said stop."""
        return self._stop.is_set()

    @property
    def _index(self) -> IndexService:
        index = self.pipeline.outputs[0]
        assert isinstance(index, IndexService)
        return index

    @property
    def _log(self) -> Logger:
        return self._instance.log

    def _in(self, thread: str, call: Callable[..., T], *given: object) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads[thread], call, *given)

    # The stages.

    async def _reput(self) -> None:
        limits, hurry = self._instance.config.limits, self.queue.hurry
        self._throttle = Throttle(
            self.reader,
            self.queue,
            self._stop_reading,
            rate_max=limits.read_rate_max,
            memory_max=limits.memory_max,
            hurry=partial(asyncio.get_running_loop().call_soon_threadsafe, hurry),
            on_wait=partial(self._liveness.sign, "read"),
            log_end=lambda: self.state.meter.seen_end,
        )
        look = partial(poll_patiently, self._poll, self._pace, self.reput, self._stop_reading)
        problem = partial(self._tell.problem, "read")

        async def poll() -> Poll:
            found = await self._in("read", look)
            if not self._is_tailing:
                self._is_tailing = True
                self._notifier.ready(self._status())
            return found

        def on_event(event: Corrupt | Skipped | None) -> None:
            self._tell.log_event(event, self.reader.position)

        try:
            await reput(poll, self.queue, self._pace, self.reput, self._stop, on_event, problem)
        finally:
            self._liveness.rest("read")

    def _poll(self) -> Poll:
        # In the read thread.
        try:
            found = self._throttle.poll() if self._throttle is not None else self.reader.poll()
        except (DiskError, MissingStoreError):
            self._liveness.sign("read", self._pace.corrupt_retry_max)
            raise
        is_at_end = isinstance(found, NotYetWritten) and not self.reader.is_undecided
        self.state.meter.looked(self.reader.position, is_at_end=is_at_end)
        self._liveness.sign("read", self._pace.corrupt_retry_max if isinstance(found, Corrupt) else 0.0)
        return found

    async def _drain(self) -> None:
        await drain(self.queue, lambda: self._instance.config.queue.drain_interval, self._build)
        self._drained.set()
        self._flush_due.set()

    async def _build(self, items: list[Item]) -> None:
        started, has_items = time.monotonic(), bool(items)
        self.state.meter.take(items)
        await self._build_patiently(items)
        self.state.meter.take([])
        self._tell.problem("build", None)
        self._liveness.sign("build", self._instance.config.queue.drain_interval)
        if has_items:
            self._tell.drains += 1
            self._tell.drain_seconds = time.monotonic() - started
            self._board.drain_seconds.observe(self._tell.drain_seconds)
        if self._tell.has_rolled(self._index.counters.rolls, self.pipeline.built.phy_offset):
            self._flush_due.set()

    async def _build_patiently(self, items: list[Item]) -> None:
        seconds = _RETRY_SECONDS_MIN
        while True:
            self._liveness.sign("build", progress=self.pipeline.built.phy_offset)
            try:
                await self._in("build", self._build_now, items)
            except (DiskError, MissingStoreError) as error:
                if not can_wait(error) or self._stop.is_set():
                    raise
                # Nothing is lost: the rest of the drain stays here, the queue fills, the reader waits.
                self._tell.problem("build", error, seconds)
                self._liveness.sign("build", seconds)
                await pause(self._stop, seconds)
                seconds = min(2 * seconds, self._instance.config.reader.retry_max_seconds)
            else:
                return

    def _build_now(self, items: list[Item]) -> None:
        # In the build thread.
        try:
            if items and not self._stop.is_set():  # a stop does not depend on how full the disk may get
                self._watermark.check()
            self._look_after_files()
            self._adopt()
            removed = self.pipeline.apply(items, self.reader.log.min_offset or 0)
            if not self._stop.is_set():
                self.pipeline.detector.remember_tail(self.pipeline.built.phy_offset)
        finally:
            self._write_state()
        self._tell.expired(removed)
        for output in self.pipeline.outputs:
            self._tell.left_out(output.left_out())
        if self.reput.caught_up or self.reput.corrupt is not None:
            self._instance.starts.forget()

    def _adopt(self) -> None:
        # What a scrub has come to know goes into the next frontier.
        while self._scrubbing.adopted:
            self._index.adopt(self._scrubbing.adopted.popleft())
            self._must_flush = True

    def _look_after_files(self) -> None:
        restored = self._watch.keep_lock()
        if "build" not in self._tell.problems:  # while a drain is tried again the files are not as they were left
            self._watch.check_index(self.pipeline)
            self._watch.check_beside(self.pipeline)
        if not self._stop.is_set():  # nor on the log
            self.pipeline.detector.check()
        restored += self._watch.restore(self.pipeline)
        if restored:
            self._log.warning("restored", names=restored)
            self._must_flush = self._must_flush or bool({"frontier", "checkpoint"} & set(restored))

    def _write_state(self) -> None:
        try:
            write_state(self._disk, self._files, self._board.row())
        except DiskError as error:
            self._tell.state_written(error)
        else:
            self._tell.state_written(None)

    async def _flush(self) -> None:
        while not self._drained.is_set():
            await pause(self._flush_due, self._instance.config.flush.flush_interval)
            self._flush_due.clear()
            await self._persist(self.pipeline.progress)
        self._liveness.sign("flush", progress=self.pipeline.counters.files_synced)
        await self._in("build", self.pipeline.finish)
        self._finished.set()

    async def _persist(self, progress: Progress) -> None:
        known, frontier = self.pipeline.frontier, progress.frontier
        stands = frontier.phy_offset, frontier.uncovered, frontier.stale_head
        is_known = stands == (known.phy_offset, known.uncovered, known.stale_head)
        if is_known and not progress.has_work and not self._must_flush:
            return
        self._must_flush = False
        self._liveness.sign("flush", progress=self.pipeline.counters.files_synced)
        try:
            await self._in("flush", self.pipeline.persist, progress)
            await self._in("build", self.pipeline.persisted, progress)
        except DiskError as error:
            if not can_wait(error):
                raise
            self._liveness.rest("flush")
            self._tell.problem("flush", error, self._flush_pause)
            self._must_flush = True
            await pause(self._drained, self._flush_pause)
            self._flush_pause = min(2 * self._flush_pause, self._instance.config.reader.retry_max_seconds)
            return
        self._liveness.rest("flush")
        self._tell.problem("flush", None)
        self._flush_pause = _RETRY_SECONDS_MIN
        seconds = self.pipeline.counters.last_seconds
        self._board.flush_seconds.observe(seconds)
        self._board.events.tell("flushed", {"phy_offset": progress.phy_offset, "seconds": round(seconds, 4)})

    async def _scrub(self) -> None:
        # Nobody waits for it: a disk that refuses is read again later.
        while not self._stop.is_set():
            left = self._scrubbing.seconds_left
            if left is None or left > 0:
                await pause(self._stop, _SCRUB_LOOK_SECONDS if left is None else min(left, _SCRUB_LOOK_SECONDS))
                continue
            try:
                await self._in("scrub", self._scrubbing.run)
            except DiskError as error:
                self._tell.problem("scrub", error, self._scrubbing.seconds_left or 0.0)
            else:
                self._tell.problem("scrub", None)
                self._must_flush = True

    # What systemd hears. A stage that waits and has said so (for a disk with room, for a log that is not mounted) is
    # not stalled: to end the process would not help. A loop that hangs feeds nobody.

    async def _watch_stages(self) -> None:
        # At least four times in the shortest limit.
        seconds, last = min(_BEAT_SECONDS, self._liveness.limits["read"] / 4), time.monotonic()
        while not self._finished.is_set():
            now = time.monotonic()
            if now - last > _STOPPED_SECONDS:
                self._liveness.put_off(now - last)
            else:
                self._beat()
            last = now
            await pause(self._finished, seconds)

    def _beat(self) -> None:
        # Looks at every stage; feeds the watchdog if none is stalled. A look around that hangs is only said.
        self._look_at_around()
        self._liveness.watch("build", self.pipeline.built.phy_offset)
        self._liveness.watch("flush", self.pipeline.counters.files_synced)
        if self.queue.is_blocked:
            self._liveness.sign("read")  # it waits for the drain, and that has signs of its own
        stalled = self._liveness.stalled()
        self._tell.stalled(stalled)
        if stalled:
            return
        self._notifier.watchdog()
        if self.is_stopping or not self._is_tailing:
            self._notifier.extend(self._liveness.limits["build"])
        else:
            self._notifier.status(self._status())

    def _look_at_around(self) -> None:
        looked, is_told = self._instance.looked_around, "around" in self._tell.problems
        is_old = looked is not None and time.monotonic() - looked > _AROUND_SECONDS
        if is_old and not is_told:
            text = f"for {_AROUND_SECONDS:.0f} s and more no look at the broker, the disk and the log's end has ended"
            remedy = "see whether broker_conf, --store or --data is on a file system that hangs"
            self._tell.problem("around", IndexdError(text, remedy))
        elif is_told and not is_old:
            self._tell.problem("around", None)

    def _status(self) -> str:
        # One line: how far behind, or what is in the way.
        lag, corrupt = self.state.lag(), self.reput.corrupt
        behind = f"{lag.bytes} bytes and {lag.milliseconds} ms behind, at offset {self.pipeline.progress.phy_offset}"
        for stage, error in self._tell.problems.items():
            return f"waiting ({stage}): {error.line()}; {behind}"
        if corrupt is not None:
            return f"standing at corrupt bytes at {corrupt.offset}: {corrupt.reason}; {behind}"
        return behind

    # Signals.

    def _on_stop(self, number: int) -> None:
        self._stop_reading.set()
        self._stop.set()
        self._board.stopping()
        self._notifier.stopping()
        self._log.info("stopping", signal=signal.Signals(number).name)

    def _on_reload(self) -> None:
        if self._is_tailing:
            self._notifier.reloading()
        self._reloading.begin()

    def _on_reloaded(self, is_changed: bool) -> None:
        if is_changed:
            self._apply_config()
        if self._is_tailing and not self.is_stopping:
            self._notifier.ready(self._status())

    def _apply_config(self) -> None:
        config = self._instance.config
        self._pace.poll_min = config.reader.poll_min_ms / 1000
        self._pace.poll_max = config.reader.poll_max_ms / 1000
        self._pace.corrupt_retry_max = config.reader.retry_max_seconds
        self.reader.set_options(reader_options(config))
        self._board.disk_used_max = config.limits.disk_used_max
        self._watermark = DiskWatermark(config.store.data, config.limits.disk_used_max)
        if self._throttle is not None:
            self._throttle.set_bounds(rate_max=config.limits.read_rate_max, memory_max=config.limits.memory_max)


def can_wait(error: IndexdError) -> bool:
    """Whether the cause may go away, and waiting for that harms nothing."""
    return isinstance(error, MissingStoreError) or (isinstance(error, DiskError) and error.is_transient)
