"""A repair from the first look to the last write: audit, plan, build beside, check, exchange; and its undo.

The broker of the store is stopped and stays so: broker_stopped holds its own lock from the first look to the last
write. check_place and check_room look, before anything is read or built, whether folders can be exchanged there and
whether there is room.
"""

from __future__ import annotations

import errno
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from indexd.audit import AuditOptions, AuditReport, audit_here
from indexd.audit.plan import index_folder, is_index_file, layout_of
from indexd.audit.report import NO_MESSAGE, OnProgress
from indexd.audit.result import Gap
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.errors import DiskError, UnsafeStoreError
from indexd.output import ProgressReporter
from indexd.repair.build import BuiltRange, build_range, check_built, mark_end, refuse_losses
from indexd.repair.plan import RepairPlan, RepairRange, plan_repair
from indexd.repair.swap import RepairFolder, index_timestamp_of, settle, swap, to_undo, undo
from indexd.storage.disk import Disk, Stamp
from indexd.storage.lock import StoreLock, look_at_lock

# Manifest, checkpoint and directories.
_SPARE_SIZE = 1 << 20
_ENTRY_SIZE = 20
_COPY_SIZE = 1 << 20


@dataclass(frozen=True, slots=True)
class PlannedRepair:
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
    ``index_timestamp`` is the checkpoint's indexMsgTimestamp now, ms.
    """

    planned: PlannedRepair
    is_declined: bool
    settled: tuple[str, ...]
    folder: Path | None
    built: tuple[BuiltRange, ...]
    left: tuple[RepairRange, ...]
    index_timestamp: int | None
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
            "settled": list(self.settled),
            "keysBehind": self.planned.plan.keys_behind,
            "leftOut": [{"beginOffset": gap.begin, "endOffset": gap.end, "reason": gap.reason} for gap in self.gaps],
            "indexMsgTimestamp": self.index_timestamp,
            "hadCheckpoint": self.planned.report.state.checkpoint is not None,
            "seconds": round(self.seconds, 3),
        }


_STOP_IT = "stop the broker first; indexd repair --plan says beside a running one what there is to do"
# What may stand in place of a lock file that can be taken.
_NO_LOCK_FILE = frozenset({errno.EROFS, errno.EISDIR, errno.ELOOP, errno.EMLINK})
_MAKE_IT = (
    "nothing was changed; the lock is a plain file of the broker's: move what is no such thing away, free space there, "
    "give this user the right, remount the file system read-write, or repair a copy of the store"
)


def check_place(store: Path) -> None:
    """UnsafeStoreError where STORE/index cannot change places with another folder, or the checkpoint be replaced."""
    index, checkpoint = store / "index", store / "checkpoint"
    for path, is_right in ((index, index.is_dir() and not index.is_mount()), (checkpoint, checkpoint.is_file())):
        if path.is_symlink() or (path.exists() and not is_right):
            what = "symbolic link" if path.is_symlink() else "mount point or no such thing as a broker has there"
            raise UnsafeStoreError(
                f"{path} is a {what}: a repair puts another one in its place",
                "move it away, and what it leads to there, or repair a copy of the store and copy its index back",
            )


def check_room(disk: Disk, store: Path, size: int) -> None:
    """UnsafeStoreError unless ``size`` bytes, and those of a manifest and a checkpoint, can be written beside."""
    free = disk.free(store)
    if free < size + _SPARE_SIZE:
        raise UnsafeStoreError(
            f"up to {size + _SPARE_SIZE:,} bytes are written beside the index, and {free:,} are free",
            "free space on that file system; nothing was changed",
        )


@contextmanager
def broker_stopped(disk: Disk, store: Path) -> Iterator[StoreLock]:
    """Hold the broker's own lock. UnsafeStoreError if a broker runs, loads, or may do so; BusyError beside another
    repair.
    """
    lock = StoreLock(store / "lock")
    _refuse_alive(store)
    # What is made here belongs to whoever makes it, and the broker has to write to it.
    owner = store.stat().st_uid
    if os.geteuid() not in (0, owner):
        raise UnsafeStoreError(
            f"{store} belongs to user {owner}: a broker could not write to what this user makes there",
            "run as that user, or as root",
        )
    try:
        is_taken = lock.take()
    except DiskError as error:
        if not (error.is_forbidden or error.is_full or error.errno in _NO_LOCK_FILE):
            raise
        raise UnsafeStoreError(str(error), _MAKE_IT) from error
    if not is_taken:
        _refuse_alive(store)
        raise UnsafeStoreError(f"{store / 'lock'} is locked by another process", _STOP_IT)
    try:
        if lock.is_new:
            disk.give(store / "lock", store)
        _refuse_loading(lock, store)
        yield lock
    finally:
        lock.release()


def _refuse_loading(lock: StoreLock, store: Path) -> None:
    # It will not come to its start, and has perhaps changed something.
    pid = lock.other()
    if pid is not None:
        raise UnsafeStoreError(f"a broker, pid {pid}, has begun to load {store}", _STOP_IT)


def _refuse_alive(store: Path) -> None:
    found = look_at_lock(store / "lock")
    if found.alive is None:
        raise UnsafeStoreError(f"whether a broker has {store} open cannot be told: {found.why}", _STOP_IT)
    if found.alive:
        why = f": {found.why}" if found.why else ""
        raise UnsafeStoreError(f"a broker, pid {found.pid or 'unknown'}, has {store} open{why}", _STOP_IT)


def look(disk: Disk, config: Config, on_audit: OnProgress, *, everything: bool) -> PlannedRepair:
    """What a repair would do; takes no lock and makes nothing, so beside a running broker, too."""
    check_place(index_folder(config).parent)
    planned = _plan(disk, config, on_audit, everything=everything)
    lock = planned.report.state.lock
    notes = [f"a broker has the store open ({lock.how}): it has to be stopped"] if lock.alive else []
    return replace(planned, notes=(*planned.notes, *notes))


def repair(
    disk: Disk,
    config: Config,
    confirm: Callable[[PlannedRepair], bool],
    on_progress: OnProgress,
    *,
    everything: bool = False,
    seconds_max: float | None = None,
) -> Repaired:
    """Mend STORE/index with the broker kept away; ``confirm`` is asked before anything of the store is touched, but for
    a lock file where there is none.

    ``on_progress`` gets (bytes done, bytes in all), of the audit first and, after ``confirm``, of what is built.
    ``everything`` is built again, sound files, too; no range is begun that would not end within ``seconds_max``.
    Raises UnsafeStoreError, BusyError, CorruptDataError when what was built does not hold, DiskError. However it ends,
    the store is as before or repaired.
    """
    began, store = time.monotonic(), index_folder(config).parent
    list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    with broker_stopped(disk, store) as lock:
        check_place(store)
        # What is looked at must be what is exchanged.
        stamps = _stamps(disk, store)
        planned = _plan(disk, config, on_progress, everything=everything)
        plan = planned.plan
        if lock.is_new:
            note = "there was no lock file: this is a copy, or no broker since 4.2 has opened it; one is made"
            planned = replace(planned, notes=(note, *planned.notes))
        full = {file.name for file in planned.report.plan.files if file.is_readable and file.is_full}
        if plan.is_needed:
            # One more, for the copy of a last file that is full.
            copies = 1 + sum(file.name not in full for file in plan.kept)
            check_room(disk, store, plan.bytes_to_write + copies * layout_of(config).file_size)
        is_wanted = planned.is_needed and confirm(planned)
        settled, _ = settle(disk, store) if is_wanted else ((), ())
        folder, built = None, list[BuiltRange]()
        if is_wanted and plan.is_needed:
            deadline = began + (math.inf if seconds_max is None else seconds_max)
            folder, built = _mend(disk, config, plan, lock, stamps, full, deadline, on_progress)
        return Repaired(
            planned=planned,
            is_declined=planned.is_needed and not is_wanted,
            settled=tuple(settled),
            folder=folder.path if folder is not None else None,
            built=tuple(built),
            left=tuple(plan.ranges[len(built) :]),
            index_timestamp=index_timestamp_of(disk, store),
            seconds=time.monotonic() - began,
        )


def _mend(
    disk: Disk,
    config: Config,
    plan: RepairPlan,
    lock: StoreLock,
    stamps: dict[str, Stamp],
    full: set[str],
    deadline: float,
    on_progress: OnProgress,
) -> tuple[RepairFolder | None, list[BuiltRange]]:
    # Build, check, exchange; None when there is not even time for the first range, and nothing was changed.
    index = index_folder(config)
    store = index.parent
    if not disk.exists(index):
        disk.make_dir(index)
        disk.give(index, store)
    folder = RepairFolder.make(disk, store, time.time())
    with ExitStack() as unless_built:
        unless_built.callback(folder.remove)
        progress = ProgressReporter(on_progress, plan.bytes_to_read)
        built = _build(disk, config, folder, plan, progress, deadline)
        if plan.ranges and not built:
            return None, []
        kept = _complete(disk, config, store, folder, plan, built, full)
        check_built(disk, config, folder.index, plan, plan.ranges[: len(built)], progress)
        _refuse_loading(lock, store)
        if _stamps(disk, store) != stamps:
            raise UnsafeStoreError(
                f"{index} was changed by somebody else meanwhile: nothing was exchanged",
                "let nothing else write there, and run indexd repair again",
            )
        unless_built.pop_all()
    try:
        swap(disk, store, folder, kept, plan.left_out)
    except UnsafeStoreError:
        folder.remove()
        raise
    except DiskError as error:
        error.hint = (
            f"{error.hint}; run indexd repair again before the broker starts: it finishes this or takes it back"
        )
        raise
    return folder, built


def take_back(disk: Disk, config: Config, confirm: Callable[[Path, int], bool]) -> tuple[Path | None, int]:
    """Undo the newest repair; ``confirm`` is told its folder and how many entries the broker has put since.

    How the folder is called now, None when it says no, and these entries. Raises UnsafeStoreError, BusyError,
    DiskError.
    """
    store = index_folder(config).parent
    with broker_stopped(disk, store):
        check_place(store)
        folder, entries = to_undo(disk, store)
        check_room(disk, store, 0)
        if not confirm(folder.path, entries):
            return None, 0
        undo(disk, store, folder)
        return folder.undone, entries


def carry(disk: Disk, source: Path, target: Path, *, will_change: bool) -> bool:
    """Have ``source`` as ``target``, too, durable but for its name. What changes there must not change here.

    Whether ``target`` is a file of its own: else its owner and rights are those of ``source``, and stay so.
    """
    if not will_change:
        disk.link(source, target)
        # A broker that was killed has left it in the page cache, perhaps.
        with disk.open_read(target) as file:
            file.fsync()
        return False
    with disk.open_read(source) as old, disk.open_write(target, create=True) as new:
        for position in range(0, old.size(), _COPY_SIZE):
            new.pwrite(old.pread(_COPY_SIZE, position), position)
        new.fsync()
    return True


def _plan(disk: Disk, config: Config, on_audit: OnProgress, *, everything: bool) -> PlannedRepair:
    report = audit_here(config, disk, AuditOptions(samples=0), on_audit)
    if report.entries_without_log:
        # Sound or not: without the log nobody can tell, and every file of it would go.
        places = ", ".join(map(str, config.store.commit_log_directories))
        raise UnsafeStoreError(
            NO_MESSAGE.format(report.entries_without_log),
            f"mount it at {places}, or say with --commit-log-paths where the log is; if it is gone for good, move "
            f"{index_folder(config)} away; nothing was changed",
        )
    plan = plan_repair(disk, config, report, everything=everything)
    refuse_losses(disk, config, report, plan)
    no_checkpoint = (
        "there is no checkpoint: a repair makes one that vouches for the index alone; after an unclean stop the "
        "broker reads the whole log again, which takes long and harms nothing"
    )
    notes = [no_checkpoint] if report.state.checkpoint is None and plan.is_needed else []
    lines, left_alone = settle(disk, index_folder(config).parent, only_look=True)
    return PlannedRepair(report, plan, (*left_alone, *notes), tuple(lines))


def _build(
    disk: Disk, config: Config, folder: RepairFolder, plan: RepairPlan, progress: ProgressReporter, deadline: float
) -> list[BuiltRange]:
    # The first ranges of the plan, as many as there is time for.
    sizes = [min(one.end, plan.ends_at) - one.begin + one.keys * _ENTRY_SIZE for one in plan.ranges]
    built: list[BuiltRange] = []
    for wanted, size in zip(plan.ranges, sizes, strict=True):
        seconds = plan.estimated_seconds * size / max(sum(sizes), 1)
        if time.monotonic() + seconds > deadline:
            break
        built.append(build_range(disk, config, folder.index, plan, wanted, progress))
    return built


def _complete(
    disk: Disk,
    config: Config,
    store: Path,
    folder: RepairFolder,
    plan: RepairPlan,
    built: list[BuiltRange],
    full: set[str],
) -> tuple[str, ...]:
    # Old files beside the new ones; the last of all is the one that the broker goes on with. All of it is durable then.
    left = plan.ranges[len(built) :]
    kept = sorted({*(file.name for file in plan.kept), *(name for wanted in left for name in wanted.replaces)})
    own = {name for one in built for name in one.files}
    last = max((*kept, *own), default=None)
    for name in kept:
        if carry(disk, store / "index" / name, folder.index / name, will_change=name == last or name not in full):
            own.add(name)
    if last is not None:
        mark_end(disk, config, folder.index / last)
    # As most index files have them: one that somebody has put back may have others, and a foreign one says nothing.
    old = [store / "index" / name for name, _ in disk.list_dir(store / "index") if is_index_file(name)]
    log = list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    like = old or [segment.path for segment in log.segments[-1:]] or [store]
    rights = Counter(path.stat().st_mode for path in like).most_common(1)[0][0]
    # A link is the old index's file, too: what is changed there would be changed for an undo.
    for name in sorted(own):
        with disk.open_read(folder.index / name) as file:
            disk.give(folder.index / name, store, rights)
            file.fsync()
    disk.give(folder.index, store / "index")
    disk.sync_dir(folder.index)
    disk.sync_dir(folder.path)
    return tuple(kept)


def _stamps(disk: Disk, store: Path) -> dict[str, Stamp]:
    return disk.stamps(store / "index") if disk.exists(store / "index") else {}
