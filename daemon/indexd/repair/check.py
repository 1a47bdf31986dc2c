"""What was built held against the log once more, by the audit itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from indexd.audit import AuditPlan, AuditTask, Part, audit_task, plan_audit
from indexd.audit.ground import LogProbe
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import CorruptDataError
from indexd.repair.plan import RepairPlan, RepairRange
from indexd.storage.disk import Disk

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
    for finding in audit.notes.findings():
        raise CorruptDataError(f"the new index does not hold: {finding.file}: {finding.text}", _HINT)
    kept = {file.name for file in plan.kept}
    for file in audit.files:
        if file.end >= plan.ends_at and file.name not in kept:
            raise CorruptDataError(f"the new index does not hold: {file.path} reaches behind {plan.ends_at}", _HINT)


def _without(task: AuditTask, old: set[str], end: int) -> AuditTask:
    # The broker is stopped: nothing grows, and nobody has to look whether it runs.
    return replace(
        task,
        end=min(task.end, end),
        files=tuple(file for file in task.files if file.name not in old),
        owned=tuple(name for name in task.owned if name not in old),
        is_tail=False,
        growing=(),
    )


def _judge(part: Part, task: AuditTask, wanted: RepairRange, *, is_whole: bool) -> None:
    for finding in part.notes.findings():
        raise CorruptDataError(f"the new index does not hold: {finding.file}: {finding.text}", _HINT)
    for hole in part.holes.kept():
        # The first keys of the first message may belong to a range that was not built.
        if is_whole or not wanted.begin_key or not hole.begin == hole.last == wanted.begin:
            text = f"keys of the message at {hole.begin} are missing"
            raise CorruptDataError(f"the new index does not hold: {text}", _HINT)
    if part.log_end is not None and part.log_end < task.end:
        raise CorruptDataError(f"the log ends at {part.log_end} now, not at {task.end}", _HINT)
