"""Builds the ranges of a plan into new index files beside the old ones, and checks them by the audit itself.

The messages are read as the audit reads them, so what it will look for is what is put in. What is built is checked by
the flavour that it was built by, which cannot show that it was the wrong one: see ``refuse_losses``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from indexd.audit import AuditReport, AuditTask, TaskResult, audit_task, plan_audit
from indexd.audit.plan import LogProbe, flavour_at, layout_of
from indexd.audit.result import Gap
from indexd.commitlog.batcher import DispatchBatch, within
from indexd.commitlog.reader import Skipped
from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.index.entries import phy_offset_of, read_entries
from indexd.index.file import IndexService
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, Flavour, IndexHeader
from indexd.recovery.open import LogRange
from indexd.repair.plan import RepairPlan, RepairRange
from indexd.storage.disk import Disk

_HINT = "nothing was changed; --all builds the whole index anew"
# Behind the two times and the offset where the file begins.
_END_PHY_OFFSET_AT = 24
# It indexes all that any RocketMQ does.
_ALL = "5.4"
# What an entry is found to be whose key its flavour does not index.
_SIGNS = frozenset({"entry-without-key", "entry-hash"})


def refuse_losses(disk: Disk, config: Config, report: AuditReport, plan: RepairPlan) -> None:
    """CorruptDataError if a file that goes has keys of its messages that its flavour does not index.

    Never where ``--flavour`` says what is wanted. Reads only the log of files that have such findings, twice. Raises
    DiskError.
    """
    if report.plan.is_flavour_given:
        return
    gone = {name for wanted in plan.ranges for name in wanted.replaces}
    suspect = {one.file for one in report.audit.findings if one.what in _SIGNS}
    names = {file.name for file in report.plan.files if file.path in suspect} & gone
    for task in report.plan.tasks:
        if (
            task.begin >= plan.ends_at
            or FLAVOURS[task.flavour].tags
            or names.isdisjoint(one.name for one in task.files)
        ):
            continue
        counts = []
        for flavour in (task.flavour, _ALL):
            again = replace(task, end=min(task.end, plan.ends_at), flavour=flavour, stride=0, queues=False)
            part = audit_task(again, disk, config)
            counts.append(sum(one.count for one in part.orphans if one.name in names))
        if counts[0] > counts[1]:
            path = next(file.path for file in task.files if file.name in names)
            raise CorruptDataError(
                f"a repair would lose {counts[0] - counts[1]:,} keys: {path} has them, and so have their "
                f"messages, but RocketMQ {task.flavour}, which seems to have written it, does not index them",
                f"nothing was changed; say with --flavour what the broker indexes: --flavour {_ALL} loses none",
            )


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
    """Build ``wanted`` into ``folder``, which is there and has no file of its names; the caller syncs what is made.

    ``on_bytes`` is told how many bytes of log more have been read. Raises DiskError, CorruptDataError.
    """
    made, gaps = list[str](), list[Gap]()

    def names() -> Iterator[str]:
        for name in wanted.names:
            made.append(name)
            yield name
        raise CorruptDataError(
            f"the log from {wanted.begin} to {wanted.end} has more keys than the audit met",
            "audit the store again, or give --all to build the whole index anew",
        )

    service = IndexService(disk, folder, layout_of(config), FLAVOURS[_ALL], names=names())
    try:
        if wanted.before is not None:
            # Full or not: the first new file inherits its end, and nothing more is put there.
            service.load((FileMark("", wanted.before, full=True),))
        for part in _log_ranges(disk, config, plan, wanted):
            done, service.flavour = part.begin, FLAVOURS[part.flavour]
            for item in part.read(disk, config, workers):
                if isinstance(item, Skipped):
                    gaps.append(Gap(item.begin, item.end, item.reason))
                elif (batch := _clip(item, wanted, service.flavour)) is not None:
                    service.build(batch)
                on_bytes(part.position - done)
                done = part.position
        service.flush()
        return BuiltRange(tuple(made), service.entries, tuple(gaps))
    finally:
        service.close()


def mark_end(disk: Disk, config: Config, path: Path) -> None:
    """Have the last index file say that it ends one byte behind where its last message begins, and sync it.

    A broker that starts indexes the message again at which its last file says it ends (spec rocketmq-store 4.2, step
    2), and now there is none. To be called for the last file by name, once all before it and all of the tail is there;
    never for a file that another directory has a link to. Does nothing to a file without entries or so marked already.
    """
    with disk.open_write(path) as file:
        header = IndexHeader.unpack(file.pread(HEADER_SIZE, 0))
        if header.index_count <= 1:
            return
        last = phy_offset_of(read_entries(file, layout_of(config), header.index_count - 1, 1)[0])
        if header.end_phy_offset != last + 1:
            file.pwrite((last + 1).to_bytes(8, "big"), _END_PHY_OFFSET_AT)
            file.fsync()


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
    probe = LogProbe(disk, config)
    # Where the first message of the file behind each ends: it may share its keys, and counts its time from here.
    ends = [one.end if one.end >= plan.ends_at else probe.frame_end(one.end) or one.end for one in built]
    cuts = {offset for one, end in zip(built, ends, strict=True) for offset in (one.begin, one.end, end)}
    audit = plan_audit(disk, config, folder=folder, eras=plan.eras, cuts=sorted(cuts))
    old = {name for wanted in plan.ranges if wanted not in built for name in wanted.replaces}
    is_whole, kept = len(built) == len(plan.ranges), {file.name for file in plan.kept}
    for finding in audit.findings.kept if is_whole else ():
        raise CorruptDataError(f"the new index does not hold: {finding.file}: {finding.text}", _HINT)
    for file in audit.files if is_whole else ():
        if file.end >= plan.ends_at and file.name not in kept:
            raise CorruptDataError(f"the new index does not hold: {file.path} reaches behind {plan.ends_at}", _HINT)
    for wanted, end in zip(built, ends, strict=True):
        for task in audit.tasks:
            if wanted.begin <= task.begin < end:
                still = replace(
                    task,
                    end=min(task.end, end),
                    files=tuple(file for file in task.files if file.name not in old),
                    owned=tuple(name for name in task.owned if name not in old),
                )
                part = audit_task(still, disk, config, workers=workers, on_bytes=on_bytes)
                _judge(part, still, wanted, is_whole=is_whole)


def _judge(part: TaskResult, task: AuditTask, wanted: RepairRange, *, is_whole: bool) -> None:
    for finding in part.findings.kept:
        raise CorruptDataError(f"the new index does not hold: {finding.file}: {finding.text}", _HINT)
    for hole in part.holes.found:
        # The first keys of the first message may belong to a range that was not built.
        if is_whole or not wanted.begin_key or not hole.begin == hole.last == wanted.begin:
            text = f"keys of the message at {hole.begin} are missing"
            raise CorruptDataError(f"the new index does not hold: {text}", _HINT)
    if part.log_end is not None and part.log_end < task.end:
        raise CorruptDataError(f"the log ends at {part.log_end} now, not at {task.end}", _HINT)


def _log_ranges(disk: Disk, config: Config, plan: RepairPlan, wanted: RepairRange) -> Iterator[LogRange]:
    # One a flavour. With keys of the message at the end, that is read, too.
    end = wanted.end + (1 if wanted.end_key else 0)
    switches = [era.begin for era in plan.eras if wanted.begin < era.begin < end]
    for begin, stop in pairwise([wanted.begin, *switches, end]):
        aligned = wanted.aligned if begin == wanted.begin else LogProbe(disk, config).aligned(begin)
        yield LogRange(begin, stop, aligned, flavour_at(plan.eras, begin))


def _clip(batch: DispatchBatch, wanted: RepairRange, flavour: Flavour) -> DispatchBatch | None:
    # The first and last keys that belong here. Messages without keys at both ends go, too: a broker would make another
    # file for them where one is full, and it would stay empty.
    columns = batch.columns
    offsets, starts = columns.phy_offset, columns.key_start.copy()
    if wanted.end_key and offsets[-1] == wanted.end:
        starts[-1] = starts[-2] + wanted.end_key
    if wanted.begin_key and offsets[0] == wanted.begin:
        starts[0] += wanted.begin_key
    skipped = flavour.skip_mask >> (columns.sys_flag & 0xC) & 1
    keyed = np.flatnonzero((np.diff(starts) > 0) & (skipped == 0))
    if len(keyed) == 0:
        return None
    first, last = (int(offsets[row]) for row in keyed[[0, -1]])
    return within(replace(batch, columns=columns._replace(key_start=starts)), first, last + 1)
