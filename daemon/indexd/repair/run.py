"""One repair from the first look to the last write: audit, plan, build beside, check, exchange."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indexd.audit import AuditOptions, AuditReport, audit_here
from indexd.audit.part import Gap
from indexd.audit.plan import index_folder
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import UnsafeStoreError
from indexd.repair.broker_stopped import BrokerStopped
from indexd.repair.build import BuiltRange
from indexd.repair.plan import RepairPlan, RepairRange, plan_repair
from indexd.repair.swap import Undone, index_timestamp_of, settle, to_undo, undo, unfinished
from indexd.repair.work import OnProgress, Work, stamps_of
from indexd.storage.disk import Disk


@dataclass(frozen=True, slots=True)
class RepairOptions:
    """``everything`` is built again, sound files, too; no range is begun that would not end within ``seconds_max``."""

    everything: bool = False
    seconds_max: float | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """What there is to do, and why; ``notes`` are lines about what else a person should know beforehand.

    ``unfinished`` are lines about what an interrupted repair has left and ``look`` may not touch.
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

    ``left`` were not reached in time.
    ``index_timestamp`` is the checkpoint's indexMsgTimestamp now, ms; ``had_checkpoint``: there was one before.
    """

    planned: Planned
    is_declined: bool
    folder: Path | None
    built: tuple[BuiltRange, ...]
    left: tuple[RepairRange, ...]
    index_timestamp: int | None
    had_checkpoint: bool
    seconds: float

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
            "leftOut": [{"beginOffset": gap.begin, "endOffset": gap.end, "reason": gap.reason} for gap in self.gaps],
            "indexMsgTimestamp": self.index_timestamp,
            "hadCheckpoint": self.had_checkpoint,
            "seconds": round(self.seconds, 3),
        }


def look(disk: Disk, config: Config, options: RepairOptions, on_audit: OnProgress) -> Planned:
    """What a repair would do; takes no lock and makes nothing, so beside a running broker, too."""
    store = index_folder(config).parent
    planned = _plan(disk, config, options, on_audit)
    lock = planned.report.standing.lock
    notes = [f"a broker has the store open ({lock.how}): it has to be stopped"] if lock.alive else []
    return Planned(planned.report, planned.plan, (*planned.notes, *notes), tuple(unfinished(disk, store)))


def repair(
    disk: Disk,
    config: Config,
    options: RepairOptions,
    confirm: Callable[[Planned], bool],
    on_progress: OnProgress,
) -> Repaired:
    """Mend STORE/index with the broker kept away; ``confirm`` is asked before anything of the store is touched.

    ``on_progress`` gets (bytes done, bytes in all), of the audit first and, after ``confirm``, of what is built.
    Raises UnsafeStoreError, BusyError, CorruptDataError when what was built does not hold, DiskError. However it ends,
    the store is as before or repaired.
    """
    began = time.monotonic()
    store = index_folder(config).parent
    list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    with BrokerStopped(disk, store) as stopped:
        _check_place(store)
        notes = settle(disk, store)
        if stopped.has_made_lock:
            notes.append("there was no lock file: this is a copy, or no broker since 4.2 has opened it; one is made")
        stamps = stamps_of(disk, store / "index")
        found = _plan(disk, config, options, on_progress)
        planned = Planned(found.report, found.plan, (*notes, *found.notes))
        work = Work(disk, config, store, found.report, found.plan, stopped, on_progress)
        deadline = None if options.seconds_max is None else began + options.seconds_max
        if found.plan.is_needed:
            work.check_space()
        is_wanted = found.plan.is_needed and confirm(planned)
        is_done = is_wanted and work.run(stamps, deadline)
        return Repaired(
            planned=planned,
            is_declined=found.plan.is_needed and not is_wanted,
            folder=work.folder.path if is_done and work.folder is not None else None,
            built=tuple(work.built) if is_done else (),
            left=tuple(found.plan.ranges[len(work.built) :]),
            index_timestamp=index_timestamp_of(disk, store / "checkpoint"),
            had_checkpoint=found.report.standing.checkpoint is not None,
            seconds=time.monotonic() - began,
        )


def take_back(disk: Disk, config: Config, confirm: Callable[[Path, int], bool]) -> Undone | None:
    """Undo the newest repair; ``confirm`` is told its folder and how many entries the broker has put since.

    None when it says no. Raises UnsafeStoreError, BusyError, DiskError.
    """
    store = index_folder(config).parent
    with BrokerStopped(disk, store):
        settle(disk, store)
        folder, _, entries = to_undo(disk, store)
        return undo(disk, store) if confirm(folder.path, entries) else None


def _plan(disk: Disk, config: Config, options: RepairOptions, on_audit: OnProgress) -> Planned:
    report = audit_here(config, disk, AuditOptions(samples=0), on_audit)
    in_pieces = options.seconds_max is not None
    plan = plan_repair(disk, config, report, everything=options.everything, in_pieces=in_pieces)
    notes = []
    if report.standing.checkpoint is None:
        notes.append(
            "there is no checkpoint: one is made that vouches for the index alone; after an unclean stop the broker "
            "reads the whole log again, which takes long and harms nothing"
        )
    return Planned(report, plan, tuple(notes))


def _check_place(store: Path) -> None:
    index = store / "index"
    if index.is_symlink() or index.is_mount():
        kind = "symbolic link" if index.is_symlink() else "mount point"
        raise UnsafeStoreError(
            f"{index} is a {kind}: it cannot be exchanged in one step",
            "repair a copy of the store, and copy its index back",
        )
