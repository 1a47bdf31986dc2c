"""One task of an audit: a stretch of the log decoded once, and the files that point into it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Self

import numpy as np

from indexd.audit.chains import Chained
from indexd.audit.checked import SOUND, Checked, check_file
from indexd.audit.entries import EntrySource
from indexd.audit.gentle import IndexPages
from indexd.audit.ground import BrokerFile, LogProbe, list_index
from indexd.audit.kernel import WITHOUT_MESSAGE
from indexd.audit.live import is_live
from indexd.audit.match import Matched, Matcher, ends_before
from indexd.audit.part import Gap, Part
from indexd.audit.plan import NEVER, AuditTask, layout_of
from indexd.audit.queue_watch import QueueWatcher
from indexd.audit.queues.seen import QueuesSeen
from indexd.audit.samples.draw import SampleWatcher
from indexd.audit.stretch import Rows, Stretch
from indexd.commitlog.reader import Skipped
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import DiskError
from indexd.index.format import IndexHeader
from indexd.storage.disk import Disk


def _silent(_: int) -> None:
    pass


def audit_task(
    task: AuditTask, disk: Disk, config: Config, *, workers: int = 0, on_bytes: Callable[[int], None] = _silent
) -> Part:
    """Decode the log of a task and compare; ``config`` is the one that the plan was made with.

    ``workers`` threads read ahead; ``on_bytes`` is told how many bytes more have been read. Raises what reading raises.
    With workers, the files' own checks run beside the comparison, which takes them for sound meanwhile: it begins again
    for the few that are not.
    """
    layout = layout_of(config)
    part: Part | None = None
    with _Audit(task, disk, config, workers, on_bytes) as audit, ThreadPoolExecutor(1, "chains") as thread:
        pending = [thread.submit(check_file, disk, layout, task, file) for file in task.files]
        if workers:
            with suppress(_InVainError):
                part = audit.run([SOUND for _ in pending], pending)
        checks = [one.result() for one in pending]
    if part is None or not all(check.is_sound for check in checks):
        with _Audit(task, disk, config, workers, _silent if workers else on_bytes) as audit:
            part = audit.run(checks, [])
    for check in checks:
        if check.seen is not None:
            part.files.append(check.seen)
            part.expired_entries += check.seen.expired
            part.notes.merge(check.notes)
            on_bytes(layout.file_size)
    return part


class _InVainError(Exception):
    # A file turned out not to be what it was taken for.
    pass


class _Audit:
    def __init__(
        self, task: AuditTask, disk: Disk, config: Config, workers: int, on_bytes: Callable[[int], None]
    ) -> None:
        self._task, self._disk, self._config, self._on_bytes = task, disk, config, on_bytes
        self._folder, self._layout, self._workers = task.folder, layout_of(config), workers
        self._part = Part(task.begin, task.end)
        self._matched: list[Matched] = []
        # What is in memory already is looked at before anybody reads.
        self._pages = [IndexPages(disk, config, self._folder, file, task.names[-1]) for file in task.files]
        self._pending: list[Future[Checked]] = []
        # Files that the broker has made since the audit began, and those it was writing then.
        self._known = set(task.names)
        self._is_live = task.is_tail and config.store.store is not None and is_live(disk, config.store.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for matched in self._matched:
            matched.source.close()
        for pages in self._pages:
            pages.close()

    def run(self, checks: list[Checked], pending: list[Future[Checked]]) -> Part:
        """Compare; ``pending`` are checks under way that ``checks`` are taken for: _InVainError if one is not."""
        task, self._pending = self._task, pending
        for file, check, pages in zip(task.files, checks, self._pages, strict=True):
            if check.chained is not None:
                self._open(file, check.chained, pages)
        if task.begin < task.end:
            self._compare(self._workers)
        return self._part

    def _open(self, file: BrokerFile, chained: Chained, pages: IndexPages) -> None:
        task = self._task
        try:
            source = EntrySource(self._disk, self._folder, self._layout, file, chained.findable)
        except DiskError as error:
            if not error.is_missing:
                raise
            return
        source.pages = pages
        source.select(task.begin, task.end, is_ordered=chained.is_ordered)
        self._matched.append(Matched(source))

    def _compare(self, workers: int) -> None:
        task, part = self._task, self._part
        if self._is_live:
            self._matched += self._growing()
        stretch = Stretch(task.begin, task.end, task.aligned, task.flavour, want_queue=task.with_queues)
        stretch.enough = max([task.log_end, *(file.end + 1 for file in task.files)])
        watchers = self._watchers()
        matcher = Matcher(part, task.flavour, self._matched, self._arrivals if self._is_live else None)
        done = task.begin
        for item in stretch.read(self._disk, self._config, workers):
            if isinstance(item, Rows):
                matcher.take(item)
            else:
                self._skip(item)
            for watcher in watchers:
                (watcher.take(item) if isinstance(item, Rows) else watcher.skip(item))
            self._on_bytes(stretch.position - done)
            done = stretch.position
            if any(one.done() and not one.result().is_sound for one in self._pending):
                raise _InVainError
        matcher.close()
        self._finish(stretch)
        for watcher in watchers:
            watcher.close()

    def _watchers(self) -> list[SampleWatcher | QueueWatcher]:
        task, part = self._task, self._part
        watchers: list[SampleWatcher | QueueWatcher] = []
        if task.samples:
            watchers.append(SampleWatcher(part, task.samples, task.flavour))
        if task.queues is not None:
            part.queues = QueuesSeen()
            watchers.append(QueueWatcher(self._disk, self._config, task, part, is_live=self._is_live))
        return watchers

    def _skip(self, skipped: Skipped) -> None:
        # Entries that point there stand for themselves; those before it have had their chance.
        part, passed = self._part, 0
        for matched in self._matched:
            matched.strays_below(skipped.begin, WITHOUT_MESSAGE, self._layout, part)
            passed += matched.pass_over(skipped.end)
        gap = Gap(skipped.begin, skipped.end, skipped.reason, passed)
        if skipped.is_expired:
            part.expired_entries += passed
            part.expired.append(gap)
        else:
            part.left_out_entries += passed
            part.gaps.append(gap)

    def _finish(self, stretch: Stretch) -> None:
        task, part = self._task, self._part
        part.log_begin, part.log_end = stretch.log_begin, stretch.log_end
        part.unreadable = stretch.unreadable.reason if stretch.unreadable is not None else None
        for matched in self._matched:
            end = task.end if stretch.log_end is None else stretch.log_end
            matched.strays_below(end, WITHOUT_MESSAGE, self._layout, part)
            matched.strays_below(NEVER, None, self._layout, part)
            matched.say(self._layout, part)
            if not matched.source.grows:
                self._judge_times(matched)
        part.holes.close(self._message_ends([hole.last for hole in part.holes.kept()]))

    def _judge_times(self, matched: Matched) -> None:
        before = ends_before(self._task, matched.source.file.name)
        matched.judge_times(self._layout, self._part, before, is_settled=matched.source.is_settled())

    def _message_ends(self, offsets: list[int]) -> dict[int, int]:
        if not offsets:
            return {}
        store = self._config.store
        probe = LogProbe(self._disk, list_segments(self._disk, store.commit_log_directories, store.segment_size))
        return {offset: probe.frame_end(offset) or offset for offset in offsets}

    # What a working broker adds.

    def _growing(self) -> list[Matched]:
        return [matched for file in self._task.growing for matched in self._follow(file)]

    def _arrivals(self) -> list[Matched]:
        names = [name for name in list_index(self._disk, self._folder) if name not in self._known]
        files = [BrokerFile(name, IndexHeader(), 1, 0, -1, is_full=False) for name in names]
        return [matched for file in files for matched in self._follow(file)]

    def _follow(self, file: BrokerFile) -> list[Matched]:
        try:
            source = EntrySource(self._disk, self._folder, self._layout, file, np.empty(0, dtype=np.uint8))
        except DiskError as error:
            if not error.is_missing:
                raise
            return []
        source.follow(self._task.begin)
        self._known.add(file.name)
        return [Matched(source)]
