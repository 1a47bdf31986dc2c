"""One task of an audit: a stretch of the log decoded once, and the files that point into it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from indexd.audit.chains import Chained, check_chains
from indexd.audit.entries import EntrySource
from indexd.audit.gentle import IndexPages
from indexd.audit.ground import BrokerFile, LogProbe, list_index
from indexd.audit.kernel import WITHOUT_MESSAGE
from indexd.audit.live import is_live
from indexd.audit.match import Matched, Matcher, ends_before
from indexd.audit.part import FileSeen, Gap, Part
from indexd.audit.plan import NEVER, AuditTask, layout_of
from indexd.audit.queue_watch import QueueWatcher
from indexd.audit.queues.seen import QueuesSeen
from indexd.audit.samples.draw import SampleWatcher
from indexd.audit.stretch import Rows, Stretch
from indexd.commitlog.reading import Skipped
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
    """
    audit = _Audit(task, disk, config, on_bytes)
    try:
        return audit.run(workers)
    finally:
        audit.close()


class _Audit:
    def __init__(self, task: AuditTask, disk: Disk, config: Config, on_bytes: Callable[[int], None]) -> None:
        self._task, self._disk, self._config, self._on_bytes = task, disk, config, on_bytes
        self._folder, self._layout = task.folder, layout_of(config)
        self._part = Part(task.begin, task.end)
        self._matched: list[Matched] = []
        self._pages: list[IndexPages] = []
        # Files that the broker has made since the audit began, and those it was writing then.
        self._known = set(task.names)
        self._is_live = task.is_tail and config.store.store is not None and is_live(disk, config.store.store)

    def close(self) -> None:
        for matched in self._matched:
            matched.source.close()
        for pages in self._pages:
            pages.close()

    def run(self, workers: int) -> Part:
        task, part = self._task, self._part
        for file in task.files:
            self._open(file)
        if task.begin < task.end:
            self._compare(workers)
        return part

    def _open(self, file: BrokerFile) -> None:
        task, part = self._task, self._part
        is_owner = file.name in task.owned
        pages = IndexPages(self._disk, self._config, self._folder, file, task.names[-1])
        self._pages.append(pages)
        try:
            notes = part.notes if is_owner else None
            chained = check_chains(self._disk, self._folder, self._layout, file, task.log_begin, notes)
            source = EntrySource(self._disk, self._folder, self._layout, file, chained.findable)
        except DiskError as error:
            if not error.is_missing:
                raise
            return  # it has expired; and if not, its messages are a hole now
        if is_owner:
            part.files.append(_seen(file, chained, source))
            part.expired_entries += chained.expired
            self._on_bytes(self._layout.file_size)
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
        part = self._part
        for matched in self._matched:
            matched.strays_below(skipped.begin, WITHOUT_MESSAGE, self._layout, part)
            passed = matched.pass_over(skipped.end)
            if skipped.is_expired:
                part.expired_entries += passed
            else:
                part.left_out_entries += passed
        if not skipped.is_expired:
            part.gaps.append(Gap(skipped.begin, skipped.end, skipped.reason))

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


def _seen(file: BrokerFile, chained: Chained, source: EntrySource) -> FileSeen:
    header = file.header
    return FileSeen(
        name=file.name,
        entries=file.entries,
        begin=file.begin,
        end=file.end,
        begin_timestamp=header.begin_timestamp,
        end_timestamp=header.end_timestamp,
        used_slots=chained.used_slots,
        used_slot_count=header.used_slot_count,
        expired=chained.expired,
        unreachable=chained.unreachable,
        header_count=header.entries,
        header_end=header.end_phy_offset,
        first_time_difference=source.first_time_difference() if file.entries else 0,
        is_full=file.is_full,
    )
