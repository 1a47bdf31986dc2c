"""Builds the ranges of a plan into new index files beside the old ones, and checks them by the audit itself.

The messages are read as the audit reads them, so what it will look for is what is put in. Full files are synced by a
thread of its own while the next one is built. What is built is checked by the flavour that it was built by, which
cannot show that it was the wrong one; refuse_losses asks the old entries: one of a key that its message has, and that
this RocketMQ indexes nowhere, was put by another.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from indexd.audit import AuditPlan, AuditReport, AuditTask, Part, audit_task, plan_audit
from indexd.audit.match import FileCheck, FileEntries, Rows, check_file
from indexd.audit.plan import BrokerFile, LogProbe, is_index_file, layout_of
from indexd.audit.result import FlavourRange, Gap
from indexd.audit.task import LogRange
from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.reader import Skipped
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import CorruptDataError, DiskError, UnsafeStoreError
from indexd.index.entries import phy_offset_of, read_entries
from indexd.index.file import IndexService
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, Flavour, IndexHeader
from indexd.repair.broker import BrokerStopped, check_room
from indexd.repair.plan import RepairPlan, findings_by_file
from indexd.repair.ranges import RepairRange
from indexd.repair.swap import RepairFolder, swap
from indexd.storage.disk import Disk, DiskFile, Stamp

# Behind the two times and the offset where the file begins.
_END_PHY_OFFSET_AT = 24


@dataclass(frozen=True, slots=True)
class BuiltRange:
    """``files`` are the names of what was made, oldest first, none where the log has no keys; ``gaps``: unreadable."""

    files: tuple[str, ...]
    entries: int
    gaps: tuple[Gap, ...]


def build_range(
    disk: Disk,
    config: Config,
    folder: Path,
    plan: RepairPlan,
    wanted: RepairRange,
    on_bytes: Callable[[int], None],
    *,
    workers: int = 2,
) -> BuiltRange:
    """Build ``wanted`` into ``folder``, which is there and has no file of its names; files and folder are synced.

    ``on_bytes`` is told how many bytes of log more have been read. Raises DiskError, CorruptDataError.
    """
    builder = _Builder(disk, config, folder, wanted)
    try:
        for part in _log_ranges(disk, config, plan, wanted):
            done = part.begin
            for item in part.read(disk, config, workers):
                builder.take(item, FLAVOURS[part.flavour])
                on_bytes(part.position - done)
                done = part.position
        return builder.finish()
    finally:
        builder.close()


def mark_end(disk: Disk, config: Config, path: Path) -> None:
    """Have the last index file say that it ends one byte behind where its last message begins, and sync it.

    A broker that starts indexes the message again at which its last file says it ends (spec rocketmq-store 4.2, step
    2), and now there is none. To be called for the last file by name, once all before it and all of the tail is there;
    never for a file that another directory has a link to. Does nothing to a file without entries or so marked already.
    """
    layout = layout_of(config)
    with disk.open_write(path) as file:
        header = IndexHeader.unpack(file.pread(HEADER_SIZE, 0))
        if header.index_count <= 1:
            return
        last = phy_offset_of(read_entries(file, layout, header.index_count - 1, 1)[0])
        if header.end_phy_offset != last + 1:
            file.pwrite((last + 1).to_bytes(8, "big"), _END_PHY_OFFSET_AT)
            file.fsync()


def _log_ranges(disk: Disk, config: Config, plan: RepairPlan, wanted: RepairRange) -> Iterator[LogRange]:
    # One a flavour. With keys of the message at the end, that is read, too.
    end = wanted.end + (1 if wanted.end_key else 0)
    switches = [era.begin for era in plan.eras if wanted.begin < era.begin < end]
    for begin, stop in pairwise([wanted.begin, *switches, end]):
        flavour = [era.flavour for era in plan.eras if era.begin <= begin][-1]
        aligned = wanted.aligned if begin == wanted.begin else aligned_at(disk, config, begin)
        yield LogRange(begin, stop, aligned, flavour)


def aligned_at(disk: Disk, config: Config, offset: int) -> int:
    """From where messages at ``offset`` are read: there, if one is, else the begin of its segment."""
    log = list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    return LogProbe(disk, log).aligned(offset)


class _Builder:
    def __init__(self, disk: Disk, config: Config, folder: Path, wanted: RepairRange) -> None:
        self._disk, self._folder, self._wanted = disk, folder, wanted
        self._service = IndexService(disk, folder, layout_of(config), FLAVOURS["5.4"], names=self._names())
        self._made: list[str] = []
        self._gaps: list[Gap] = []
        if wanted.before is not None:
            # Full or not: the first new file inherits its end, and nothing more is put there.
            self._service.load((FileMark("", wanted.before, full=True),))
        self._thread = ThreadPoolExecutor(1, "sync")
        self._syncing: tuple[Future[None], tuple[DiskFile, ...]] | None = None

    def take(self, item: Rows | Skipped, flavour: Flavour) -> None:
        if isinstance(item, Skipped):
            self._gaps.append(Gap(item.begin, item.end, item.reason))
            return
        batch = self._clip(item, flavour)
        if batch is None:
            return
        self._service.flavour = flavour
        self._service.build(batch)
        rolled = self._service.rolled
        if rolled and (self._syncing is None or rolled[-1] not in self._syncing[1]):
            self._synced()
            rolled = self._service.rolled
            self._syncing = self._thread.submit(_sync, rolled), rolled

    def finish(self) -> BuiltRange:
        self._synced()
        self._service.flush()
        _sync(self._service.rolled)
        self._disk.sync_dir(self._folder)
        return BuiltRange(tuple(self._made), self._service.counters.entries, tuple(self._gaps))

    def close(self) -> None:
        self._thread.shutdown()
        self._service.close()

    def _synced(self) -> None:
        if self._syncing is not None:
            running, files = self._syncing
            running.result()
            self._service.close_rolled(files)
            self._syncing = None

    def _names(self) -> Iterator[str]:
        for name in self._wanted.names:
            self._made.append(name)
            yield name
        raise CorruptDataError(
            f"the log from {self._wanted.begin} to {self._wanted.end} has more keys than the audit met",
            "audit the store again, or give --all to build the whole index anew",
        )

    def _clip(self, rows: Rows, flavour: Flavour) -> DispatchBatch | None:
        # The first and last keys that belong here. Messages without keys at both ends go, too: a broker would make
        # another file for them where one is full, and it would stay empty.
        batch, columns, wanted = rows.batch, rows.batch.columns, self._wanted
        part = slice(rows.first, rows.last)
        offsets = columns.phy_offset[part]
        starts = columns.key_start[rows.first : rows.last + 1].copy()
        if wanted.end_key and offsets[-1] == wanted.end:
            starts[-1] = starts[-2] + wanted.end_key
        if wanted.begin_key and offsets[0] == wanted.begin:
            starts[0] += wanted.begin_key
        skipped = flavour.skip_mask >> (columns.sys_flag[part] & 0xC) & 1
        keyed = np.flatnonzero((np.diff(starts) > 0) & (skipped == 0))
        if len(keyed) == 0:
            return None
        first, behind = int(keyed[0]), int(keyed[-1]) + 1
        kept = columns._replace(
            phy_offset=offsets[first:behind],
            store_timestamp=columns.store_timestamp[part][first:behind],
            sys_flag=columns.sys_flag[part][first:behind],
            key_start=starts[first : behind + 1],
        )
        return replace(batch, columns=kept, rows=behind - first)


def _sync(files: tuple[DiskFile, ...]) -> None:
    for file in files:
        file.fsync()


_HINT = "nothing was changed; --all builds the whole index anew"


def check_built(
    disk: Disk,
    config: Config,
    folder: Path,
    plan: RepairPlan,
    built: Sequence[RepairRange],
    on_bytes: Callable[[int], None],
    *,
    workers: int = 2,
) -> None:
    """Audit ``folder``, the whole new index, where ``built`` ranges are: not one finding, and every key is findable.

    Old files of ranges that were not built stand in ``folder``, too; they are not looked at. ``on_bytes`` as
    for ``build_range``, log and files. Raises CorruptDataError with the first thing that does not hold.
    """
    ends = _message_ends(disk, config, plan, built)
    cuts = {offset for wanted in built for offset in (wanted.begin, wanted.end, ends[wanted])}
    audit = plan_audit(disk, config, folder=folder, eras=plan.eras, cuts=sorted(cuts))
    old = {name for wanted in plan.ranges if wanted not in built for name in wanted.replaces}
    is_whole = len(built) == len(plan.ranges)
    if is_whole:
        _judge_names(audit, plan)
    for wanted in built:
        for task in audit.tasks:
            if wanted.begin <= task.begin < ends[wanted]:
                still = _without(task, old, ends[wanted])
                _judge(
                    audit_task(still, disk, config, workers=workers, on_bytes=on_bytes),
                    still,
                    wanted,
                    is_whole=is_whole,
                )


def _message_ends(disk: Disk, config: Config, plan: RepairPlan, built: Sequence[RepairRange]) -> dict[RepairRange, int]:
    # Where the first message of the file behind each ends: it may share its keys, and counts its time from here.
    log = list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    probe = LogProbe(disk, log)
    return {
        wanted: wanted.end if wanted.end >= plan.ends_at else probe.frame_end(wanted.end) or wanted.end
        for wanted in built
    }


def _judge_names(audit: AuditPlan, plan: RepairPlan) -> None:
    for finding in audit.notes.first:
        raise CorruptDataError(f"the new index does not hold: {finding.file}: {finding.text}", _HINT)
    kept = {file.name for file in plan.kept}
    for file in audit.files:
        if file.end >= plan.ends_at and file.name not in kept:
            raise CorruptDataError(f"the new index does not hold: {file.path} reaches behind {plan.ends_at}", _HINT)


def _without(task: AuditTask, old: set[str], end: int) -> AuditTask:
    return replace(
        task,
        end=min(task.end, end),
        files=tuple(file for file in task.files if file.name not in old),
        owned=tuple(name for name in task.owned if name not in old),
    )


def _judge(part: Part, task: AuditTask, wanted: RepairRange, *, is_whole: bool) -> None:
    for finding in part.notes.first:
        raise CorruptDataError(f"the new index does not hold: {finding.file}: {finding.text}", _HINT)
    for hole in part.holes.found:
        # The first keys of the first message may belong to a range that was not built.
        if is_whole or not wanted.begin_key or not hole.begin == hole.last == wanted.begin:
            text = f"keys of the message at {hole.begin} are missing"
            raise CorruptDataError(f"the new index does not hold: {text}", _HINT)
    if part.log_end is not None and part.log_end < task.end:
        raise CorruptDataError(f"the log ends at {part.log_end} now, not at {task.end}", _HINT)


OnProgress = Callable[[int, int], None]
_ENTRY_SIZE = 20


def stamps_of(disk: Disk, index: Path) -> dict[str, Stamp]:
    """The index as it is: what was looked at must be what is exchanged. Empty where there is none."""
    return disk.stamps(index) if disk.exists(index) else {}


class Work:
    """Made when the lock is held and nothing was looked at; ``run`` once it is wanted.

    ``built`` belong to the first ranges of the plan, in its order.
    """

    def __init__(
        self,
        disk: Disk,
        config: Config,
        store: Path,
        report: AuditReport,
        plan: RepairPlan,
        stopped: BrokerStopped,
        on_build: OnProgress,
    ) -> None:
        self._disk, self._config, self._store, self._stopped = disk, config, store, stopped
        self._plan, self._index = plan, store / "index"
        self._full = {file.name for file in report.plan.files if file.is_readable and file.is_full}
        self._on_build, self._done = on_build, 0
        self.folder: RepairFolder | None = None
        self.built: list[BuiltRange] = []

    def check_space(self) -> None:
        """UnsafeStoreError without room for everything that will be written."""
        plan = self._plan
        # One more, for the copy of a last file that is full.
        copies = 1 + sum(file.name not in self._full for file in plan.kept)
        check_room(self._disk, self._store, plan.bytes_to_write + copies * layout_of(self._config).file_size)

    def run(self, stamps: dict[str, Stamp], deadline: float | None) -> bool:
        """Build, check, exchange; False when there is not even time for the first range, and nothing was changed."""
        disk, store = self._disk, self._store
        if not disk.exists(self._index):
            disk.make_dir(self._index)
            disk.give(self._index, store)
        folder = self.folder = RepairFolder.make(disk, store, time.time())
        try:
            is_begun = self._build(folder, deadline)
            if is_begun:
                kept = self._complete(folder)
                check_built(disk, self._config, folder.index, self._plan, self._reached, self._read)
                self._stopped.check()
                self._check_unchanged(stamps)
        except BaseException:
            folder.remove()
            raise
        if not is_begun:
            folder.remove()
            return False
        self._swap(folder, kept)
        return True

    @property
    def _reached(self) -> tuple[RepairRange, ...]:
        return self._plan.ranges[: len(self.built)]

    def _build(self, folder: RepairFolder, deadline: float | None) -> bool:
        for wanted in self._plan.ranges:
            if deadline is not None and time.monotonic() + self._seconds(wanted) > deadline:
                break
            self.built.append(build_range(self._disk, self._config, folder.index, self._plan, wanted, self._read))
        return bool(self.built) or not self._plan.ranges

    def _complete(self, folder: RepairFolder) -> tuple[str, ...]:
        # Old files beside the new ones; the last of all is the one that the broker goes on with.
        disk, store, plan = self._disk, self._store, self._plan
        left = plan.ranges[len(self.built) :]
        kept = sorted({*(file.name for file in plan.kept), *(name for wanted in left for name in wanted.replaces)})
        new = [name for built in self.built for name in built.files]
        last = max((*kept, *new), default=None)
        own = set(new)
        for name in kept:
            will_change = name == last or name not in self._full
            if carry(disk, self._index / name, folder.index / name, will_change=will_change):
                own.add(name)
        if last is not None:
            mark_end(disk, self._config, folder.index / last)
        # A link is the old index's file, too: what is changed there would be changed for an undo.
        rights = self._rights()
        for name in sorted(own):
            with disk.open_read(folder.index / name) as file:
                disk.give(folder.index / name, store, rights)
                file.fsync()
        disk.give(folder.index, self._index)
        disk.sync_dir(folder.index)
        disk.sync_dir(folder.path)
        return tuple(kept)

    def _rights(self) -> int:
        # As most index files have them: one that somebody has put back may have others, and a foreign one says nothing.
        names = [name for name, _ in self._disk.list_dir(self._index) if is_index_file(name)]
        modes = Counter((self._index / name).stat().st_mode for name in names)
        if modes:
            return modes.most_common(1)[0][0]
        store = self._config.store
        log = list_segments(self._disk, store.commit_log_directories, store.segment_size)
        return (log.segments[-1].path if log.segments else self._store).stat().st_mode

    def _check_unchanged(self, stamps: dict[str, Stamp]) -> None:
        if stamps_of(self._disk, self._index) != stamps:
            raise UnsafeStoreError(
                f"{self._index} was changed by somebody else meanwhile: nothing was exchanged",
                "let nothing else write there, and run indexd repair again",
            )

    def _swap(self, folder: RepairFolder, kept: tuple[str, ...]) -> None:
        try:
            swap(self._disk, self._store, folder, kept, self._plan.left_out)
        except UnsafeStoreError:
            folder.remove()
            raise
        except DiskError as error:
            error.hint = (
                f"{error.hint}; run indexd repair again before the broker starts: it finishes this or takes it back"
            )
            raise

    def _seconds(self, wanted: RepairRange) -> float:
        plan = self._plan
        sizes = {one: min(one.end, plan.ends_at) - one.begin + one.keys * _ENTRY_SIZE for one in plan.ranges}
        return plan.estimated_seconds * sizes[wanted] / max(sum(sizes.values()), 1)

    def _read(self, size: int) -> None:
        self._done += size
        self._on_build(self._done, self._plan.bytes_to_read)


# It indexes all that any RocketMQ does.
_ALL = "5.4"
# What an entry is found to be whose key its flavour does not index.
_SIGNS = frozenset({"entry-without-key", "entry-hash"})


def refuse_losses(disk: Disk, config: Config, report: AuditReport, plan: RepairPlan) -> None:
    """CorruptDataError if a file that goes has keys of its messages that its flavour does not index.

    Never where ``--flavour`` says what is wanted. Reads only the log of files that have such findings, twice. Raises
    DiskError.
    """
    if report.audit.is_flavour_given:
        return
    gone, whats = {name for wanted in plan.ranges for name in wanted.replaces}, findings_by_file(report)
    for file in report.plan.files:
        if file.name not in gone or not whats.get(file.path, set()) & _SIGNS:
            continue
        for begin, end, flavour in _ranges_by_flavour(report, plan, file):
            counts = [_orphans(disk, config, report, file, LogRange(begin, end, 0, name)) for name in (flavour, _ALL)]
            if counts[0] > counts[1]:
                raise CorruptDataError(
                    f"a repair would lose {counts[0] - counts[1]:,} keys: {file.path} has them, and so have their "
                    f"messages, but RocketMQ {flavour}, which seems to have written it, does not index them",
                    f"nothing was changed; say with --flavour what the broker indexes: --flavour {_ALL} loses none",
                )


def _ranges_by_flavour(report: AuditReport, plan: RepairPlan, file: BrokerFile) -> Iterator[tuple[int, int, str]]:
    for era, behind in pairwise([*report.audit.eras, FlavourRange(plan.ends_at, _ALL)]):
        begin, end = max(era.begin, file.begin, report.audit.log_begin), min(behind.begin, file.end + 1, plan.ends_at)
        if begin < end and not FLAVOURS[era.flavour].tags:
            yield begin, end, era.flavour


def _orphans(disk: Disk, config: Config, report: AuditReport, file: BrokerFile, log: LogRange) -> int:
    # Entries that are of no key of any message, as the flavour of the range has it.
    folder, layout = report.plan.folder, report.plan.layout
    check = check_file(disk, folder, layout, file, report.audit.log_begin) or FileCheck()
    entries = FileEntries(disk, folder, layout, file, check.findable)
    log.aligned = aligned_at(disk, config, log.begin)
    try:
        entries.select(log.begin, log.end, is_ordered=check.is_ordered)
        for item in log.read(disk, config, 0):
            if isinstance(item, Rows):
                taken = np.zeros(max(item.batch.keys, 1), dtype=np.uint8)
                entries.match(item, FLAVOURS[log.flavour].skip_mask, taken)
        return int(entries.orphans[2])
    finally:
        entries.close()


_COPY_SIZE = 1 << 20
# What a file system says that cannot give a file a second name, or not this one.
_NO_LINK = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV})


def carry(disk: Disk, source: Path, target: Path, *, will_change: bool) -> bool:
    """Have ``source`` as ``target``, too, durable but for its name. What changes there must not change here.

    Whether ``target`` is a file of its own: else its owner and rights are those of ``source``, and stay so.
    """
    if not will_change:
        try:
            disk.link(source, target)
        except DiskError as error:
            if error.errno not in _NO_LINK:
                raise
        else:
            # A broker that was killed has left it in the page cache, perhaps.
            with disk.open_read(target) as file:
                file.fsync()
            return False
    _copy(disk, source, target)
    return True


def _copy(disk: Disk, source: Path, target: Path) -> None:
    with disk.open_read(source) as old, disk.open_write(target, create=True) as new:
        size = old.size()
        new.allocate(size)
        for position in range(0, size, _COPY_SIZE):
            data = old.pread(_COPY_SIZE, position)
            if data != bytes(len(data)):
                new.pwrite(data, position)
        new.fsync()
