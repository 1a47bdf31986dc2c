"""Runs one task of an audit: decodes a stretch of the log once and compares it with the files that point into it.

It reads at a bounded rate, gives back what it brings into the page cache, and depends on nothing but its arguments: a
task may run here or on Spark.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from indexd.audit.match import FileCheck, FileEntries, Matcher, Rows, check_file
from indexd.audit.plan import NEVER, AuditTask, BrokerFile, LogProbe, layout_of
from indexd.audit.queues import QueueMatcher
from indexd.audit.result import Gap, Part
from indexd.commitlog import batcher
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import DiskError, MissingOk
from indexd.index.format import FLAVOURS
from indexd.recovery.open import decode_rules, reader_options
from indexd.recovery.whole_log import once
from indexd.storage.disk import Disk
from indexd.storage.page_cache import ReadPages

_PAUSE = 0.002
# So long the reader waits in all for what stands at the end of the log to be decided.
_TAIL_SECONDS = 1.0
# A burst that is not paid for.
_BURST_SECONDS = 0.1


class RateLimiter:
    """So many bytes a second at most, over all threads that ask; no limit for 0."""

    def __init__(
        self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], object] = time.sleep
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._lock = threading.Lock()
        # When all that was asked for until now would have been read at the allowed rate.
        self._paid_at = clock()

    def wait(self, size: int) -> None:
        """Wait until so many bytes more may be read."""
        if not self._rate:
            return
        with self._lock:
            now = self._clock()
            self._paid_at = max(self._paid_at, now - _BURST_SECONDS) + size / self._rate
            left = self._paid_at - now
        if left > 0:
            self._sleep(left)


@dataclass(slots=True)
class LogRange:
    """Messages that start in ``[begin, end)``, read from ``aligned`` on: the start of a message or of a segment.

    While iterated, ``position`` is how far all is known; in the end ``log_end`` is set if the log ends inside, and
    ``unreadable`` if it ends in bytes that are no frame. ``log_begin``: where the log began when it was read. It goes
    on to ``stop`` at most: a log may grow for ever.
    """

    begin: int
    end: int
    aligned: int
    flavour: str
    want_queue: bool = False
    stop: int = NEVER
    position: int = 0
    log_end: int | None = None
    unreadable: Corrupt | None = None
    log_begin: int | None = None

    def read(self, disk: Disk, config: Config, workers: int) -> Iterator[Rows | Skipped]:
        """Rows in the order of the log; Skipped for what could not be read, cut to the range."""
        kind = FLAVOURS[self.flavour]
        rules = decode_rules(config)._replace(
            want_uniq_key=kind.uniq_key, want_tags=kind.tags, want_queue=self.want_queue
        )
        options = replace(once(reader_options(config)), skip_corrupt=True, check_tail=False, workers=workers)
        reader = LogReader(disk, config.store.commit_log_directories, rules, options)
        reader.refresh()
        reader.position, self.position = self.aligned, self.begin
        left = _TAIL_SECONDS
        try:
            while reader.position < self.end:
                poll = reader.poll()
                self.log_begin = reader.log.min_offset
                if isinstance(poll, DispatchBatch):
                    offsets = poll.columns.phy_offset[: poll.rows]
                    first, last = (int(offsets.searchsorted(bound)) for bound in (self.begin, self.end))
                    if first < last:
                        yield Rows(poll, first, last)
                    self.position = max(self.begin, min(reader.position, self.end))
                elif isinstance(poll, Skipped):
                    begin, end = max(poll.begin, self.begin), min(poll.end, self.end)
                    if begin < end:
                        yield replace(poll, begin=begin, end=end)
                        self.position = end
                elif isinstance(poll, NotYetWritten) and reader.is_undecided and left > 0:
                    left -= _PAUSE
                    time.sleep(_PAUSE)
                else:
                    self.unreadable = poll if isinstance(poll, Corrupt) else None
                    break
                if reader.position >= self.stop:
                    break
            if reader.position < self.end:
                self.log_end = max(reader.position, self.begin)
        finally:
            reader.close()


def audit_task(
    task: AuditTask, disk: Disk, config: Config, *, workers: int = 0, on_bytes: Callable[[int], None] = lambda _: None
) -> Part:
    """Decode the log of a task and compare; ``config`` is the one that the plan was made with.

    ``workers`` threads read ahead; ``on_bytes`` is told how many bytes more have been read. Raises what reading raises.
    With workers, the files' own checks run beside the comparison, which takes them for sound meanwhile: it begins again
    for the few that are not.
    """
    layout, wait = layout_of(config), RateLimiter(config.limits.read_rate_max).wait
    with ExitStack() as stack:
        for file in task.files:
            _give_back_later(stack, disk, config, task, file)
        run = _Comparison(task, disk, config, wait)
        pool = stack.enter_context(ThreadPoolExecutor(1, "check"))
        pending = [
            pool.submit(check_file, disk, task.folder, layout, file, task.log_begin, wait) for file in task.files
        ]
        part = run.compare([FileCheck() for _ in pending], pending, workers, on_bytes) if workers else None
        checks = [one.result() for one in pending]
        if part is None or not all(check is not None and check.is_sound for check in checks):
            part = run.compare(checks, [], workers, (lambda _: None) if workers else on_bytes)
        assert part is not None
    for file, check in zip(task.files, checks, strict=True):
        if check is not None and check.seen is not None and file.name in task.owned:
            part.files.append(check.seen)
            part.expired_entries += check.seen.expired
            part.notes.merge([check.notes])
            on_bytes(layout.file_size)
    return part


def _give_back_later(stack: ExitStack, disk: Disk, config: Config, task: AuditTask, file: BrokerFile) -> None:
    # What reading a full file brings into the page cache goes at the end; the newest files are the broker's.
    if not config.limits.drop_cache or not file.is_full or file.name == task.newest:
        return
    with suppress(DiskError):
        opened, size = stack.enter_context(disk.open_read(task.folder / file.name)), layout_of(config).file_size
        stack.callback(ReadPages(opened, size).give_back, size, is_last=True)


class _Comparison:
    def __init__(self, task: AuditTask, disk: Disk, config: Config, wait: Callable[[int], None]) -> None:
        self._task, self._disk, self._config, self._wait = task, disk, config, wait

    def compare(
        self,
        checks: list[FileCheck | None] | list[FileCheck],
        pending: list[Future[FileCheck | None]],
        workers: int,
        on_bytes: Callable[[int], None],
    ) -> Part | None:
        """What the task comes to; None as soon as one of the ``pending`` checks shows a file that is not sound."""
        task, part = self._task, Part(begin=self._task.begin, end=self._task.end)
        if task.begin >= task.end:
            return part
        with ExitStack() as stack:
            files = [
                entries
                for file, check in zip(task.files, checks, strict=True)
                if check is not None and (entries := self._open(stack, file, check)) is not None
            ]
            log = LogRange(task.begin, task.end, task.aligned, task.flavour, task.queues, task.log_end)
            matcher, done = Matcher(part, task.flavour, files), task.begin
            queues = QueueMatcher(self._disk, self._config, self._wait) if task.queues else None
            for item in log.read(self._disk, self._config, workers):
                if isinstance(item, Rows):
                    matcher.take(item)
                    self._sample(part, item, matcher.missing)
                    if queues is not None:
                        queues.take(item.batch, item.first, item.last)
                else:
                    _skip(part, files, item)
                self._wait(log.position - done)
                on_bytes(log.position - done)
                done = log.position
                if any(one.done() and not ((check := one.result()) and check.is_sound) for one in pending):
                    return None
            part.log_begin, part.log_end = log.log_begin, log.log_end
            part.unreadable = log.unreadable.reason if log.unreadable is not None else None
            for entries in files:
                entries.finish(part, task.end if log.log_end is None else log.log_end, is_live=task.is_live)
            if queues is not None:
                part.queues = queues.finish()
            self._end_holes(part)
        return part

    def _open(self, stack: ExitStack, file: BrokerFile, check: FileCheck) -> FileEntries | None:
        task = self._task
        with MissingOk():
            entries = FileEntries(self._disk, task.folder, layout_of(self._config), file, check.findable, self._wait)
            stack.callback(entries.close)
            entries.select(task.begin, task.end, is_ordered=check.is_ordered)
            return entries
        return None

    def _sample(self, part: Part, rows: Rows, missing: NDArray[np.int32]) -> None:
        # The first message with keys behind each multiple of the stride, and behind the begin of the task.
        if not self._task.stride:
            return
        stride, at = self._task.stride, slice(rows.first, rows.last)
        offsets = rows.batch.columns.phy_offset[at][missing[at] >= 0]
        if len(offsets):
            before = part.samples[-1] // stride if part.samples else -1
            part.samples += offsets[np.diff(offsets // stride, prepend=before) > 0].tolist()

    def _end_holes(self, part: Part) -> None:
        # Where the last message of each hole ends.
        holes = part.holes
        holes.prune()
        if holes.found:
            store = self._config.store
            probe = LogProbe(self._disk, list_segments(self._disk, store.commit_log_directories, store.segment_size))
            holes.found = [replace(hole, end=probe.frame_end(hole.last) or hole.last) for hole in holes.found]


def _skip(part: Part, files: list[FileEntries], skipped: Skipped) -> None:
    # Entries that point there stand for themselves; those before it have had their chance.
    passed = 0
    for entries in files:
        entries.orphan_below(skipped.begin)
        passed += len(entries.take_below(skipped.end)[0])
    gap = Gap(skipped.begin, skipped.end, skipped.reason, passed)
    if skipped.is_expired:
        part.expired_entries += passed
        part.expired.append(gap)
    else:
        part.left_out_entries += passed
        part.gaps.append(gap)


def load_kernels(config: Config) -> None:
    """Compile the decoder, or load it from where it is kept: seconds, or half a second. The rest comes when needed."""
    batcher.load_kernels(decode_rules(config))
