"""A repair from the first look to the last write: audit, plan, build beside, check, exchange; and its undo."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from indexd.audit import AuditOptions, AuditReport, audit_here
from indexd.audit.plan import index_folder
from indexd.audit.report import NO_MESSAGE
from indexd.audit.result import Gap
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import UnsafeStoreError
from indexd.repair.broker import BrokerStopped, check_place, check_room
from indexd.repair.build import BuiltRange, OnProgress, Work, refuse_losses, stamps_of
from indexd.repair.plan import RepairPlan, plan_repair
from indexd.repair.ranges import RepairRange
from indexd.repair.swap import (
    RepairFolder,
    Undone,
    index_timestamp_of,
    settle,
    to_undo,
    undo,
    unfinished,
)
from indexd.storage.disk import Disk


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """``everything`` is built again, sound files, too; no range is begun that would not end within ``seconds_max``."""

    everything: bool = False
    seconds_max: float | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """What there is to do, and why; ``notes`` are lines about what else a person should know beforehand.

    ``unfinished`` are lines about what an interrupted repair has left, to be removed or finished.
    """

    report: AuditReport
    plan: RepairPlan
    notes: tuple[str, ...]
    unfinished: tuple[str, ...] = ()

    @property
    def is_needed(self) -> bool:
        """Whether a repair would do anything."""
        return self.plan.is_needed or bool(self.unfinished)


@dataclass(frozen=True, slots=True)
class Repaired:
    """What was done: nothing where ``folder``, which holds the old index, is None, or if it ``is_declined``.

    ``left`` were not reached in time. ``settled``: what was done about earlier repairs that were interrupted, in lines.
    ``index_timestamp`` is the checkpoint's indexMsgTimestamp now, ms; ``had_checkpoint``: there was one before.
    ``folders`` of repairs that can be undone lie beside the index now.
    """

    planned: Planned
    is_declined: bool
    settled: tuple[str, ...]
    folder: Path | None
    built: tuple[BuiltRange, ...]
    left: tuple[RepairRange, ...]
    index_timestamp: int | None
    had_checkpoint: bool
    seconds: float
    folders: int = 0

    @property
    def gaps(self) -> list[Gap]:
        """Parts of the log that could not be read."""
        return [gap for built in self.built for gap in built.gaps]

    def to_json(self) -> dict[str, Any]:
        """The last line of ``--json``."""
        return {
            "kind": "repair",
            "repaired": self.folder is not None,
            "folder": None if self.folder is None else str(self.folder),
            "builtRanges": len(self.built),
            "builtFiles": [name for built in self.built for name in built.files],
            "builtEntries": sum(built.entries for built in self.built),
            "leftRanges": len(self.left),
            "settled": list(self.settled),
            "keysBehind": self.planned.plan.keys_behind,
            "leftOut": [{"beginOffset": gap.begin, "endOffset": gap.end, "reason": gap.reason} for gap in self.gaps],
            "indexMsgTimestamp": self.index_timestamp,
            "hadCheckpoint": self.had_checkpoint,
            "folders": self.folders,
            "seconds": round(self.seconds, 3),
        }


def look(disk: Disk, config: Config, options: RepairOptions, on_audit: OnProgress) -> Planned:
    """What a repair would do; takes no lock and makes nothing, so beside a running broker, too."""
    check_place(index_folder(config).parent)
    planned = _plan(disk, config, options, on_audit)
    lock = planned.report.state.lock
    notes = [f"a broker has the store open ({lock.how}): it has to be stopped"] if lock.alive else []
    return replace(planned, notes=(*planned.notes, *notes))


def repair(
    disk: Disk,
    config: Config,
    options: RepairOptions,
    confirm: Callable[[Planned], bool],
    on_progress: OnProgress,
) -> Repaired:
    """Mend STORE/index with the broker kept away; ``confirm`` is asked before anything of the store is touched, but for
    a lock file where there is none.

    ``on_progress`` gets (bytes done, bytes in all), of the audit first and, after ``confirm``, of what is built.
    Raises UnsafeStoreError, BusyError, CorruptDataError when what was built does not hold, DiskError. However it ends,
    the store is as before or repaired.
    """
    began = time.monotonic()
    store = index_folder(config).parent
    list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    with BrokerStopped(disk, store) as stopped:
        check_place(store)
        stamps = stamps_of(disk, store / "index")
        planned = _plan(disk, config, options, on_progress)
        plan = planned.plan
        if stopped.has_made_lock:
            note = "there was no lock file: this is a copy, or no broker since 4.2 has opened it; one is made"
            planned = replace(planned, notes=(note, *planned.notes))
        work = Work(disk, config, store, planned.report, plan, stopped, on_progress)
        deadline = None if options.seconds_max is None else began + options.seconds_max
        if plan.is_needed:
            work.check_space()
        is_wanted = planned.is_needed and confirm(planned)
        settled = settle(disk, store) if is_wanted else []
        is_done = is_wanted and plan.is_needed and work.run(stamps, deadline)
        return Repaired(
            planned=planned,
            is_declined=planned.is_needed and not is_wanted,
            settled=tuple(settled),
            folder=work.folder.path if is_done and work.folder is not None else None,
            built=tuple(work.built) if is_done else (),
            left=tuple(plan.ranges[len(work.built) :]),
            index_timestamp=index_timestamp_of(disk, store / "checkpoint"),
            had_checkpoint=planned.report.state.checkpoint is not None,
            seconds=time.monotonic() - began,
            folders=len(RepairFolder.all_of(disk, store)),
        )


def take_back(disk: Disk, config: Config, confirm: Callable[[Path, int], bool]) -> Undone | None:
    """Undo the newest repair; ``confirm`` is told its folder and how many entries the broker has put since.

    None when it says no. Raises UnsafeStoreError, BusyError, DiskError.
    """
    store = index_folder(config).parent
    with BrokerStopped(disk, store):
        check_place(store)
        found = to_undo(disk, store)
        check_room(disk, store, 0)
        if not confirm(found.folder.path, found.entries):
            return None
        if not found.is_back:
            settle(disk, store)
        return undo(disk, store)


def _plan(disk: Disk, config: Config, options: RepairOptions, on_audit: OnProgress) -> Planned:
    report = audit_here(config, disk, AuditOptions(samples=0), on_audit)
    if report.entries_without_log:
        # Sound or not: without the log nobody can tell, and every file of it would go.
        places = ", ".join(map(str, config.store.commit_log_directories))
        raise UnsafeStoreError(
            NO_MESSAGE.format(report.entries_without_log),
            f"mount it at {places}, or say with --commit-log-paths where the log is; if it is gone for good, move "
            f"{index_folder(config)} away; nothing was changed",
        )
    in_pieces = options.seconds_max is not None
    plan = plan_repair(disk, config, report, everything=options.everything, in_pieces=in_pieces)
    refuse_losses(disk, config, report, plan)
    notes = []
    if report.state.checkpoint is None and plan.is_needed:
        notes.append(
            "there is no checkpoint: a repair makes one that vouches for the index alone; after an unclean stop the "
            "broker reads the whole log again, which takes long and harms nothing"
        )
    lines, left_alone = unfinished(disk, index_folder(config).parent)
    return Planned(report, plan, (*left_alone, *notes), tuple(lines))
