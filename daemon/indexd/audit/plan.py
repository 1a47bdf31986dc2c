"""Plans an audit: stretches of the log that together cover it exactly once, each with the index files to compare.

A stretch ends where an index file begins and where the flavour changes. So there is a task a file, as a rule, with one
file to read, and the message that straddles two files belongs to the second of them. Where no file points, a segment is
a task.

Of a broker at work the end of the log is fixed first, then it is given a moment to index what stands before that, and
only then the index is looked at: so what is missing is not only late, and no task has to wait for anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from indexd.audit.files import (
    BrokerFile,
    LogProbe,
    detect_flavours,
    flavour_at,
    index_folder,
    layout_of,
    list_index,
    look_at,
    note_names,
    scattered,
)
from indexd.audit.result import FlavourRange, Notes
from indexd.commitlog import segments
from indexd.commitlog.segments import SegmentList, list_segments
from indexd.config import Config
from indexd.config.units import RemotePath
from indexd.errors import DiskError
from indexd.index.format import HEADER_SIZE, IndexHeader, IndexLayout
from indexd.storage.disk import Disk
from indexd.storage.lock import look_at_lock

#: Behind every offset: the last stretch goes on to the end of the log, wherever that is.
NEVER = 1 << 62
_DEFAULT = "default"
# A broker dispatches a message some milliseconds after it was written.
_PATIENCE = 2.0
_PAUSE = 0.05
_QUIET = 6


@dataclass(frozen=True, slots=True)
class AuditTask:
    """Messages that start in ``[begin, end)``; the first of them stands at ``aligned`` or is reached from there.

    ``files`` may point into it; ``owned`` are the names of those whose own check belongs to this task; ``newest`` is
    the last file of all. ``size`` is what there is to read, roughly: bytes. A message every ``stride`` bytes is noted
    for the sample, none with 0; ``queues``: its ConsumeQueue units are compared, too.
    """

    begin: int
    end: int
    aligned: int
    log_begin: int
    log_end: int
    flavour: str
    files: tuple[BrokerFile, ...]
    owned: tuple[str, ...]
    newest: str
    size: int
    folder: Path
    is_live: bool
    stride: int = 0
    queues: bool = False


@dataclass(slots=True)
class AuditPlan:
    """``tasks`` in the order of the log; ``files`` in the broker's order, that of their names.

    ``log_end`` is where the log of a broker at work (``is_live``) ended, or where the last segment does; ``written`` is
    about where its bytes end. A stretch with a file is cut at a segment after ``piece_size`` bytes. ``notes`` are
    findings about names and sizes.
    """

    folder: Path
    log_begin: int
    log_end: int
    written: int
    files: tuple[BrokerFile, ...]
    eras: tuple[FlavourRange, ...]
    is_flavour_given: bool
    layout: IndexLayout
    piece_size: int = NEVER
    is_live: bool = False
    tasks: list[AuditTask] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)


def is_live(store: Path) -> bool:
    """Whether a broker is at work, or may be: it locks STORE/lock, which is asked for and never taken. No copy is."""
    return not isinstance(store, RemotePath) and look_at_lock(store / "lock", None).alive is not False


def plan_audit(
    disk: Disk,
    config: Config,
    *,
    size: int | None = None,
    cuts: Sequence[int] = (),
    folder: Path | None = None,
    eras: Sequence[FlavourRange] = (),
) -> AuditPlan:
    """Look at index and log, and cut the work into tasks; ``folder`` holds the index files, else STORE/index does.

    With ``size`` (bytes) long stretches with a file are cut at segments, too; each piece reads its file again. ``cuts``
    are further offsets at which messages begin; ``eras``, if given, are not asked for. Raises UsageError,
    UnsafeStoreError, MissingStoreError, DiskError.
    """
    folder, layout, store, disk = folder or index_folder(config), layout_of(config), config.store, scattered(disk)
    log = list_segments(disk, store.commit_log_directories, store.segment_size)
    log_begin, log_end = log.min_offset or 0, log.segments[-1].end if log.segments else 0
    live = store.store is not None and is_live(store.store)
    written = segments.log_end(disk, log, log_begin)
    if live:
        _wait_for_dispatch(disk, folder, written)
    notes = Notes()
    sizes = list_index(disk, folder, notes)
    is_given = all(config.provenance.get(key, _DEFAULT) != _DEFAULT for key in ("hash_slot_num", "index_num"))
    probe = LogProbe(disk, log)
    files = look_at(disk, folder, sizes, layout, probe, is_layout_given=is_given)
    note_names(files, sizes, layout, notes)
    if live:
        # The last indexed message may lack some of its keys still.
        log_end = min(max([written, *(file.end for file in files)]), log_end)
    given = config.provenance.get("flavour", _DEFAULT) != _DEFAULT
    if not (eras or given):
        eras = detect_flavours(disk, config, folder, layout, files)
    eras = eras or (FlavourRange(0, config.index.flavour),)
    plan = AuditPlan(folder, log_begin, log_end, written, tuple(files), tuple(eras), given, layout, is_live=live)
    plan.notes, plan.piece_size = notes, NEVER if size is None else size
    _cut(plan, log, probe, size, cuts)
    return plan


def _wait_for_dispatch(disk: Disk, folder: Path, log_end: int) -> None:
    # Until the newest index file reaches there, or has not changed for a while.
    deadline, quiet, before = time.monotonic() + _PATIENCE, 0, b""
    while time.monotonic() < deadline and quiet < _QUIET:
        header, names = b"", list(list_index(disk, folder))
        if names:
            try:
                with disk.open_read(folder / names[-1]) as file:
                    header = file.pread(HEADER_SIZE, 0).ljust(HEADER_SIZE, b"\0")
            except DiskError as error:
                if not error.is_missing:
                    raise
        if header and IndexHeader.unpack(header).end_phy_offset >= log_end:
            return
        quiet, before = quiet + 1 if header == before else 0, header
        time.sleep(_PAUSE)


def _cut(plan: AuditPlan, log: SegmentList, probe: LogProbe, size: int | None, cuts: Sequence[int]) -> None:
    files = [file for file in plan.files if file.is_readable and file.entries]
    # Where a stretch begins, and from where its first message is reached.
    aligned = {plan.log_begin: plan.log_begin}
    for offset in (*(file.begin for file in files), *(era.begin for era in plan.eras), *cuts):
        if plan.log_begin < offset < plan.log_end:
            aligned[offset] = probe.aligned(offset)
    for segment in log.segments:
        before = max(begin for begin in aligned if begin <= segment.base)
        wanted = size if any(file.points_into(segment.base, segment.end) for file in files) else 0
        if wanted is not None and segment.base - before >= wanted and segment.base < plan.log_end:
            aligned.setdefault(segment.base, segment.base)
    owned: set[str] = set()
    last = max(plan.log_end, plan.log_begin) if plan.is_live else NEVER
    for begin, end in pairwise([*sorted(aligned), last]):
        inside = tuple(sorted((file for file in plan.files if file.points_into(begin, end)), key=_order))
        fresh = tuple(file.name for file in inside if file.name not in owned)
        owned.update(fresh)
        plan.tasks.append(
            AuditTask(
                begin=begin,
                end=end,
                aligned=aligned[begin],
                log_begin=plan.log_begin,
                log_end=plan.log_end,
                flavour=flavour_at(plan.eras, begin),
                files=inside,
                owned=fresh,
                newest=plan.files[-1].name if plan.files else "",
                size=max(min(end, plan.log_end) - begin, 0) + len(fresh) * plan.layout.file_size,
                folder=plan.folder,
                is_live=plan.is_live,
            )
        )
    # Files that point to no part of the log are checked by themselves.
    alone = sorted((file for file in plan.files if file.is_readable and file.name not in owned), key=_order)
    plan.tasks[:0] = [
        replace(plan.tasks[0], end=plan.log_begin, files=(file,), owned=(file.name,), size=plan.layout.file_size)
        for file in alone
    ]


def _order(file: BrokerFile) -> tuple[int, str]:
    return file.begin, file.name
