"""Daemon: the composition root. Opens, recovers, runs its tasks, and stops them in the order the data takes.

A stop (TERM, INT) ends the tail loop; that closes the queue; the drain empties it; the flusher makes all of it durable;
only then does the abort flag go. Where trying again harms nothing, a stage waits and tries again; any other error ends
the run and leaves the flag: whoever starts next recovers.

Scrubbing reads everything that was built, once an interval, in a thread of the lowest priority. What is damaged ends it
with DamagedError, and the opening that follows mends it; then it begins again, later each time that it finds something.
"""

from __future__ import annotations

import asyncio
import math
import signal
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import Poll, Skipped
from indexd.dispatch.reput import DiskWatermark, DispatchQueue, Item, ReputState, Throttle, pause
from indexd.errors import DiskError, IndexdError, MissingStoreError
from indexd.flush.frontier import remove_abort
from indexd.flush.pipeline import Pipeline
from indexd.index.format import FileMark
from indexd.recovery.open import Opened, reader_options
from indexd.recovery.recover import DamagedError
from indexd.service.instance import Instance, Logger, StageLiveness, take_over
from indexd.service.state import DaemonState, DirectoryWatch, EventReporter, write_state
from indexd.storage.page_cache import take_lowest_priority
from indexd.verify.scrub import Scrub

T = TypeVar("T")
_RETRY_SECONDS_MIN = 1.0
# So long the read thread looks at a quiet log before it says so.
_PATIENCE_SECONDS = 1.0
# What passes before a message is in the queue at all: polling and settling.
_READ_SECONDS = 0.1
_BEAT_SECONDS = 2.0
# A beat that is so late: the process was stopped, or the loop itself hung, which fed nobody meanwhile.
_STOPPED_SECONDS = 5.0
# An interval that a HUP has changed is followed within that time.
_SCRUB_LOOK_SECONDS = 5.0
# Names in one line of the log.
_NAMES_MAX = 20


class Daemon:
    """The running tasks around one opened data directory."""

    def __init__(self, instance: Instance, opened: Opened) -> None:
        self._instance, self._board, self._notifier = instance, instance.board, instance.notifier
        self.pipeline, self.reader = opened.pipeline, opened.reader
        self._watch = DirectoryWatch(instance.disk, instance.files, opened.pipeline.frontier)
        self.queue = DispatchQueue(instance.config.queue.queue_rows, instance.config.queue.queue_bytes)
        self.reput = ReputState()
        self._tell = EventReporter(lambda: instance.log)
        self.state = DaemonState(
            self.reader, self.pipeline, self.queue, self.reput, self._tell, instance.board.drain_seconds
        )
        self._stop = asyncio.Event()
        self._stop_reading = threading.Event()
        self._drained = asyncio.Event()
        self._flush_due = asyncio.Event()
        self._finished = asyncio.Event()
        self._liveness = StageLiveness(instance.notifier.watchdog_seconds)
        self._is_tailing = self._must_flush = False
        self._rolls = 0
        # One thread each, so that the order of calls on the log and on the files is theirs.
        self._threads = {name: ThreadPoolExecutor(1, name) for name in ("read", "build", "flush")}
        self._threads["scrub"] = ThreadPoolExecutor(1, "scrub", take_lowest_priority)
        self._scrubbing = Scrubbing(instance, self.pipeline, self._stop_reading)
        self._throttle = Throttle(
            self.reader,
            self.queue,
            self._stop_reading,
            hurry=lambda: self._loop.call_soon_threadsafe(self.queue.due.set),
            on_wait=partial(self._liveness.sign, "read"),
            log_end=lambda: self.state.meter.seen_end,
        )
        self._apply_config()

    async def run(self) -> None:
        """Until a stop; everything is durable then and the abort flag is gone."""
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop, number)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_reload)
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
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self._stop_reading.set()
            for thread in self._threads.values():
                thread.shutdown(cancel_futures=True)
        self.reader.close()
        remove_abort(self._instance.disk, self._instance.files.abort)
        self._instance.starts.forget()
        self._instance.disk.unlink(self._instance.files.state)
        self._log.info("stopped", phy_offset=self.pipeline.frontier.phy_offset, messages=self.pipeline.built.messages)

    @property
    def is_stopping(self) -> bool:
        """A signal has said stop."""
        return self._stop.is_set()

    @property
    def _log(self) -> Logger:
        return self._instance.log

    def _in(self, thread: str, call: Callable[..., T], *given: object) -> Awaitable[T]:
        return self._loop.run_in_executor(self._threads[thread], call, *given)

    def _done(self, stage: str) -> int:
        # How far a step that takes long has come.
        return self.pipeline.built.phy_offset if stage == "build" else self.pipeline.files_synced

    async def _retry(self, stage: str, step: Callable[[], Awaitable[None]], stop: asyncio.Event) -> None:
        # Until it is done. Nothing is lost: the rest of a drain stays here, the queue fills, the reader waits. What a
        # stop needs is not tried again; reading just ends.
        seconds = _RETRY_SECONDS_MIN
        while True:
            self._liveness.sign(stage, progress=self._done(stage))
            try:
                await step()
            except (DiskError, MissingStoreError) as error:
                if not can_wait(error) or (stop.is_set() and stage != "read"):
                    raise
                self._tell.problem(stage, error, seconds)
                self._liveness.sign(stage, seconds)
                await pause(stop, seconds)
                seconds = min(2 * seconds, self._instance.config.reader.retry_max_seconds)
            else:
                self._tell.problem(stage, None)
                return

    # The stages.

    async def _reput(self) -> None:
        # The tail loop. inotify says nothing of stores through a mapping, so the log is polled. Corrupt bytes are read
        # again, later each time: nothing behind them is read.
        seconds = _RETRY_SECONDS_MIN
        try:
            while not self._stop.is_set():
                await self._retry("read", self._read, self._stop)
                if self.reput.corrupt is None:
                    seconds = _RETRY_SECONDS_MIN
                else:
                    await pause(self._stop, seconds)
                    seconds = min(2 * seconds, self._instance.config.reader.retry_max_seconds)
        finally:
            self.queue.close()
            self._liveness.rest("read")

    async def _read(self) -> None:
        # The next range of the log goes on the queue.
        if self._stop.is_set():
            return
        found = await self._in("read", self._poll)
        if not self._is_tailing:
            self._is_tailing = True
            self._notifier.ready(self._status())
        corrupt = found if isinstance(found, Corrupt) else None
        if corrupt != self.reput.corrupt:
            self.reput.corrupt = corrupt
            self._tell.log_event(corrupt, self.reader.position)
        if self.reput.caught_up and not self.reput.has_caught_up:
            # What came while nobody indexed has waited long enough.
            self.reput.has_caught_up = True
            self.queue.due.set()
        if isinstance(found, Skipped):
            self._tell.log_event(found, self.reader.position)
        if isinstance(found, (DispatchBatch, Skipped)):
            await self.queue.put(found)

    def _poll(self) -> Poll:
        # In the read thread, which wakes more seldom than the event loop would: until there is something, or for a
        # second; the pause doubles while the log is quiet.
        state, give_up, reader = self.reput, time.monotonic() + _PATIENCE_SECONDS, self._instance.config.reader
        while True:
            try:
                found = self._throttle.poll()
            except (DiskError, MissingStoreError) as error:
                state.caught_up, state.problem = False, error
                raise
            state.caught_up, state.problem = isinstance(found, NotYetWritten), None
            is_at_end = state.caught_up and not self.reader.is_undecided
            self.state.meter.looked(self.reader.position, is_at_end=is_at_end)
            self._liveness.sign("read", reader.retry_max_seconds if isinstance(found, Corrupt) else 0.0)
            shortest = reader.poll_min_ms / 1000
            if not state.caught_up:
                state.pause = shortest
                return found
            is_patient = state.has_caught_up and time.monotonic() < give_up
            if not is_patient or self._stop_reading.wait(max(state.pause, shortest)):
                return found
            state.pause = min(2 * state.pause, reader.poll_max_ms / 1000)

    async def _drain(self) -> None:
        # Every interval, or at once when the queue is full or closed, all that waits is built. The interval is what a
        # message waits at most until it can be found: the next drain begins so early that it should be over by then,
        # going by how long the last one took. An empty one is built too, so that its figures stay fresh.
        begun, took, is_closed = time.monotonic(), 0.0, False
        while not is_closed:
            seconds = self._instance.config.queue.drain_interval
            due = begun + max(seconds - _READ_SECONDS - took, seconds / 2)
            await pause(self.queue.due, max(due - time.monotonic(), 0.0))
            is_closed, begun = self.queue.closed, time.monotonic()
            await self._build(self.queue.drain())
            took = time.monotonic() - begun
        self._drained.set()
        self._flush_due.set()

    async def _build(self, items: list[Item]) -> None:
        started, has_items = time.monotonic(), bool(items)
        self.state.meter.take(items)
        await self._retry("build", partial(self._in, "build", self._build_now, items), self._stop)
        self._liveness.sign("build", self._instance.config.queue.drain_interval)
        if has_items:
            self._board.drain_seconds.observe(time.monotonic() - started)
        if rolled := self.pipeline.index.rolls - self._rolls:
            self._rolls += rolled
            self._log.info("rolled", files=rolled, phy_offset=self.pipeline.built.phy_offset)
            self._flush_due.set()

    def _build_now(self, items: list[Item]) -> None:
        # In the build thread.
        try:
            if items and not self._stop.is_set():  # a stop does not depend on how full the disk may get
                self._watermark.check()
            self._look_after_files()
            while self._scrubbing.adopted:
                # What a scrub has come to know goes into the next frontier.
                self.pipeline.index.adopt(self._scrubbing.adopted.popleft())
                self._must_flush = True
            removed = self.pipeline.apply(items, self.reader.log.min_offset or 0)
            self.state.meter.take([])
            if not self._stop.is_set():
                self.pipeline.detector.remember_tail(self.pipeline.built.phy_offset)
        finally:
            self._write_state()
        if removed:
            self._log.info("expired_files", files=len(removed), names=removed[:_NAMES_MAX])
        for output in self.pipeline.outputs:
            self._tell.left_out(output.left_out())
        if self.reput.caught_up or self.reput.corrupt is not None:
            self._instance.starts.forget()

    def _look_after_files(self) -> None:
        lock = self._instance.lock
        restored = [self._instance.files.lock.name] if lock.renew() else []
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
        problem = None
        try:
            write_state(self._instance.disk, self._instance.files, self._board.row())
        except DiskError as error:
            problem = error
        self._tell.state_written(problem)

    async def _flush(self) -> None:
        while not self._drained.is_set():
            await pause(self._flush_due, self._instance.config.flush.flush_interval)
            self._flush_due.clear()
            if self._must_flush or self.pipeline.is_ahead:
                self._must_flush = False
                await self._retry("flush", self._persist, self._drained)
                self._liveness.rest("flush")
        self._liveness.sign("flush", progress=self._done("flush"))
        await self._in("build", self.pipeline.finish)
        self._finished.set()

    async def _persist(self) -> None:
        progress = self.pipeline.progress
        await self._in("flush", self.pipeline.persist, progress)
        await self._in("build", self.pipeline.persisted, progress)
        seconds = self.pipeline.last_seconds
        self._board.flush_seconds.observe(seconds)
        self._board.events.tell("flushed", {"phy_offset": progress.frontier.phy_offset, "seconds": round(seconds, 4)})

    async def _scrub(self) -> None:
        # Nobody waits for it: a disk that refuses is read again later.
        while not self._stop.is_set():
            left = self._scrubbing.seconds_left
            if left > 0:
                await pause(self._stop, min(left, _SCRUB_LOOK_SECONDS))
                continue
            try:
                await self._in("scrub", self._scrubbing.run)
            except DiskError as error:
                self._tell.problem("scrub", error, self._scrubbing.seconds_left)
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
        # Looks at every stage; feeds the watchdog if none is stalled.
        for stage in ("build", "flush"):
            self._liveness.watch(stage, self._done(stage))
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

    def _status(self) -> str:
        # One line: how far behind, or what is in the way.
        row, corrupt = self.state.row(), self.reput.corrupt
        behind = (
            f"{row['dispatchBehindBytes']} bytes and {row['dispatchBehindMilliseconds']} ms behind, "
            f"at offset {row['phyOffset']}"
        )
        for stage, error in self._tell.problems.items():
            return f"waiting ({stage}): {error.line()}; {behind}"
        if corrupt is not None:
            return f"standing at corrupt bytes at {corrupt.offset}: {corrupt.reason}; {behind}"
        return behind

    # Signals.

    def _on_stop(self, number: int) -> None:
        self._stop_reading.set()
        self._stop.set()
        self.queue.stop()
        self._board.stopping()
        self._notifier.stopping()
        self._log.info("stopping", signal=signal.Signals(number).name)

    def _on_reload(self) -> None:
        if self._is_tailing:
            self._notifier.reloading()
        if take_over(self._instance):
            self._apply_config()
        if self._is_tailing and not self.is_stopping:
            self._notifier.ready(self._status())

    def _apply_config(self) -> None:
        config = self._instance.config
        self.reader.options = reader_options(config)
        self._board.disk_used_max = config.limits.disk_used_max
        self._watermark = DiskWatermark(config.store.data, config.limits.disk_used_max)
        self._throttle.set_bounds(rate_max=config.limits.read_rate_max, memory_max=config.limits.memory_max)


def can_wait(error: IndexdError) -> bool:
    """Whether the cause may go away, and waiting for that harms nothing."""
    return isinstance(error, MissingStoreError) or (isinstance(error, DiskError) and error.is_transient)


# Bytes a second: an index file of 420 MB in 13 s, 2.7 TB in a day.
_RATE_MAX = 32 << 20
# Behind one that was broken off by damage or by the disk.
_AGAIN_SECONDS_MIN = 60.0


class _StoppedError(Exception):
    """The daemon stops, or is opened again."""


class Scrubbing:
    """``run`` is for a thread of its own; ``adopted`` is emptied by the building thread."""

    def __init__(self, instance: Instance, pipeline: Pipeline, stop: threading.Event) -> None:
        self._instance, self._pipeline, self._stop = instance, pipeline, stop
        #: Full index files whose checksums became known.
        self.adopted: deque[FileMark] = deque()
        self._ahead = 0.0

    @property
    def seconds_left(self) -> float:
        """Until the next one is due; without an end when there is to be none."""
        interval, row = self._instance.config.recovery.scrub_interval, self._instance.board.scrub
        if not interval:
            return math.inf
        now, last = time.time(), self._pipeline.scrubbed_at
        due = 0.0 if last is None or last > now * 1000 else last / 1000 + interval
        tries = row["brokenOff"]
        if tries:
            due = max(due, row["endedAt"] / 1000 + min(_AGAIN_SECONDS_MIN * 2 ** min(tries - 1, 20), interval))
        return max(due - now, 0.0)

    def run(self) -> None:
        """One scrub, if nothing ends it. Raises DamagedError, DiskError."""
        began, board, pipeline = time.time(), self._instance.board, self._pipeline
        scrub = Scrub(
            self._instance.disk,
            self._instance.files,
            pipeline.outputs,
            lambda: pipeline.frontier,
            self._on_bytes,
            self.adopted.append,
        )
        self._show(beganAt=int(began * 1000))
        before = board.scrub["bytes"]
        try:
            checked = scrub.run()
        except (_StoppedError, DamagedError, DiskError) as error:
            if self._stop.is_set():
                return
            damaged, broken_off = board.scrub["damaged"] + isinstance(error, DamagedError), board.scrub["brokenOff"] + 1
            self._show(endedAt=int(time.time() * 1000), damaged=damaged, brokenOff=broken_off)
            raise
        pipeline.scrubbed_at = int(began * 1000)
        self._show(endedAt=int(time.time() * 1000), brokenOff=0)
        size, seconds = board.scrub["bytes"] - before, round(time.time() - began, 3)
        self._instance.log.info("scrubbed", files=checked, bytes=size, seconds=seconds, checksums=scrub.adopted)

    def _show(self, **figures: int) -> None:
        self._instance.board.scrub = {**self._instance.board.scrub, **figures}

    def _on_bytes(self, size: int) -> None:
        self._show(bytes=self._instance.board.scrub["bytes"] + size)
        self._ahead = max(self._ahead, time.monotonic() - 1) + size / _RATE_MAX
        if self._stop.wait(max(self._ahead - time.monotonic(), 0.0)):
            raise _StoppedError
