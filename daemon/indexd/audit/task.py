"""Runs one task of an audit: decodes a stretch of the log once and compares it with the files that point into it.

It reads at a bounded rate, gives back what it brings into the page cache, and depends on nothing but its arguments: a
task may run here or on Spark. A file in log order, as brokers write them, is read window by window; one whose entries
stand elsewhere has those of the stretch sorted first: some 56 bytes an entry of them in memory meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from indexd.audit.check import FileCheck, check_file
from indexd.audit.plan import NEVER, AuditTask, LogProbe, layout_of
from indexd.audit.queues import QueueMatcher
from indexd.audit.result import Gap, Orphans, Part
from indexd.commitlog import batcher
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.format import Corrupt, NotYetWritten
from indexd.commitlog.reader import LogReader, Skipped
from indexd.commitlog.segments import list_segments
from indexd.compare.index import BEHIND_LOG, NO_KEYS, ComparedFile, Keys, Match, compare_files, keys_of
from indexd.config import Config
from indexd.errors import DiskError
from indexd.findings import Findings
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


class Rows(NamedTuple):
    """Messages ``first`` .. ``last - 1`` of a batch."""

    batch: DispatchBatch
    first: int
    last: int


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
    With workers, the files' own checks run beside the comparison, which takes them for sound meanwhile: it is made
    again for the few that are not.
    """
    layout, wait = layout_of(config), RateLimiter(config.limits.read_rate_max).wait
    with ExitStack() as stack:
        for file in task.files:
            # What reading a full file brings into the page cache goes at the end; the newest files are the broker's.
            if config.limits.drop_cache and file.is_full and file.name != task.newest:
                with suppress(DiskError):
                    opened = stack.enter_context(disk.open_read(task.folder / file.name))
                    stack.callback(ReadPages(opened, layout.file_size).give_back, layout.file_size, is_last=True)
        pool, part = stack.enter_context(ThreadPoolExecutor(1, "check")), None
        pending = [
            pool.submit(check_file, disk, task.folder, layout, file, task.log_begin, wait) for file in task.files
        ]
        if workers:
            part = _compare(task, disk, config, [FileCheck() for _ in pending], wait, workers, on_bytes)
        checks = [one.result() for one in pending]
        if part is None or not all(check is not None and check.is_sound for check in checks):
            told = (lambda _: None) if workers else on_bytes
            part = _compare(task, disk, config, checks, wait, workers, told)
    for file, check in zip(task.files, checks, strict=True):
        if check is not None and check.seen is not None and file.name in task.owned:
            part.files.append(check.seen)
            part.expired_entries += check.seen.expired
            part.findings.merge(check.findings)
            on_bytes(layout.file_size)
    return part


def _compare(
    task: AuditTask,
    disk: Disk,
    config: Config,
    checks: list[FileCheck] | list[FileCheck | None],
    wait: Callable[[int], None],
    workers: int,
    on_bytes: Callable[[int], None],
) -> Part:
    part = Part(begin=task.begin, end=task.end)
    if task.begin >= task.end:
        return part
    files: dict[ComparedFile, FileCheck] = {}
    for broker_file, check in zip(task.files, checks, strict=True):
        if check is not None:
            header, path = replace(broker_file.header, index_count=broker_file.count), task.folder / broker_file.name
            file = ComparedFile(disk, path, layout_of(config), header, Findings(), wait)
            begin, end = max(task.begin, broker_file.begin), min(task.end, broker_file.end + 1)
            file.select(begin, end, is_ordered=check.is_ordered)
            files[file] = check
    log = LogRange(task.begin, task.end, task.aligned, task.flavour, task.queues, task.log_end)
    queues, done = QueueMatcher(disk, config, wait) if task.queues else None, task.begin
    for item in log.read(disk, config, workers):
        if isinstance(item, Rows):
            keys = keys_of(*item, FLAVOURS[task.flavour].skip_mask)
            bound = int(keys.phy_offset[-1]) + 1
            _count(part, task, keys, compare_files(keys, bound, files, lambda one, numbers: files[one].finds(numbers)))
            if queues is not None:
                queues.take(*item)
        else:
            _skip(part, files, item)
        wait(log.position - done)
        on_bytes(log.position - done)
        done = log.position
    part.log_begin, part.log_end = log.log_begin, log.log_end
    part.unreadable = log.unreadable.reason if log.unreadable is not None else None
    for file in files:
        compare_files(NO_KEYS, task.end if log.log_end is None else log.log_end, [file])
        behind = file.take_below(NEVER)
        if not task.is_live:  # else the broker has written on
            file.note(behind, BEHIND_LOG, behind.number, behind.number)
            file.compared += len(behind.number)
        file.judge_times(is_growing=task.is_live and file.name == f"index/{task.newest}")
        part.findings.merge(file.findings)
        part.entries += file.compared
        if file.strays:
            part.orphans.append(Orphans(file.name.removeprefix("index/"), file.low, file.high, file.strays))
    if queues is not None:
        part.queues = queues.finish()
    part.holes.prune()
    probe = LogProbe(disk, list_segments(disk, config.store.commit_log_directories, config.store.segment_size))
    for at, hole in enumerate(part.holes.runs):
        if hole is not None:
            part.holes.runs[at] = replace(hole, end=probe.frame_end(hole.last) or hole.last)
    return part


def _count(part: Part, task: AuditTask, keys: Keys, match: Match) -> None:
    messages = len(keys.phy_offset)
    counts = np.bincount(keys.row, minlength=messages)
    lost = np.bincount(keys.row[match.is_lost], minlength=messages)
    # Keys that have an entry which no walk reaches, and no other one.
    unreachable = np.bincount(keys.row[match.is_lost & ~match.is_missing], minlength=messages)
    keyed = np.flatnonzero(counts)
    part.messages += messages
    part.keyed_messages += len(keyed)
    part.keys += len(keys.row)
    part.missing_keys += int(lost.sum())
    part.unreachable_keys += int(unreachable.sum())
    offsets = keys.phy_offset[keyed]
    part.holes.add_rows(offsets, keys.timestamp[keyed], lost[keyed], unreachable[keyed])
    if task.stride and len(offsets):
        # The first message with keys behind each multiple of the stride, and behind the begin of the task.
        before = part.samples[-1] // task.stride if part.samples else -1
        part.samples += offsets[np.diff(offsets // task.stride, prepend=before) > 0].tolist()


def _skip(part: Part, files: dict[ComparedFile, FileCheck], skipped: Skipped) -> None:
    # Entries that point there stand for themselves; those before it have had their chance.
    compare_files(NO_KEYS, skipped.begin, files)
    passed = sum(len(file.take_below(skipped.end).number) for file in files)
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
