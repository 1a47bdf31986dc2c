"""The plan of an audit: stretches of the log that together cover it exactly once, each with the files to compare.

A stretch ends where an index file begins, where the part of the log begins that no file points into, and where the
flavour changes. So there is a task a file, as a rule, with one file to read, and the message that straddles two files
belongs to the second of them. Where no file points, a segment is a task. Little is read for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from indexd.audit.flavour import FlavourRange, detect_flavours
from indexd.audit.gentle import ScatteredDisk
from indexd.audit.ground import BrokerFile, LogProbe, list_index, look_at
from indexd.audit.notes import Notes
from indexd.audit.queues.ground import QueuesGround, QueuesTask
from indexd.commitlog.segments import SegmentList, list_segments
from indexd.commitlog.split_points import SplitPoints
from indexd.config import Config
from indexd.errors import UnsafeStoreError, UsageError
from indexd.index.format import IndexLayout
from indexd.recovery.open import decode_rules, reader_options
from indexd.storage.disk import Disk

#: Behind every offset: the last stretch goes on to the end of the log, wherever that is.
NEVER = 1 << 62
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class AuditTask:
    """Messages that start in ``[begin, end)``; the first of them stands at ``aligned`` or is reached from there.

    ``files`` may point into it; ``owned`` are the names of those whose own check belongs to this task. With ``is_tail``
    no file that was there when the audit began points behind it, and ``growing`` are those that a broker may be
    writing: it may have put the messages of this stretch there since. ``end_timestamps`` are those of all files, oldest
    name first. ``size`` is what there is to read, roughly: bytes; ``log_end`` as in the plan. Messages whose keys have
    one of the hashes in ``samples`` are written down; ``queues`` are compared, too, if they are asked for.
    """

    begin: int
    end: int
    aligned: int
    log_begin: int
    flavour: str
    files: tuple[BrokerFile, ...]
    owned: tuple[str, ...]
    names: tuple[str, ...]
    end_timestamps: tuple[int, ...]
    is_tail: bool
    growing: tuple[BrokerFile, ...]
    size: int
    folder: Path
    log_end: int
    samples: tuple[int, ...] = ()
    queues: QueuesTask | None = None

    @property
    def with_queues(self) -> bool:
        """Whether its part says something about the ConsumeQueues."""
        return self.queues is not None


@dataclass(slots=True)
class AuditPlan:
    """``tasks`` in the order of the log; ``files`` in the broker's order, that of their names.

    ``log_end`` is where the last segment ends, written or not. A stretch is cut at a segment after ``piece_size``
    bytes. ``notes`` are findings about names and sizes; ``queues`` are the ConsumeQueues, if they are asked for.
    """

    folder: Path
    log_begin: int
    log_end: int
    files: tuple[BrokerFile, ...]
    eras: tuple[FlavourRange, ...]
    is_flavour_given: bool
    layout: IndexLayout
    piece_size: int = NEVER
    tasks: list[AuditTask] = field(default_factory=list)
    notes: Notes = field(default_factory=Notes)
    queues: QueuesGround | None = None

    @property
    def size(self) -> int:
        """Bytes that all tasks will read, roughly."""
        return sum(task.size for task in self.tasks)


def index_folder(config: Config) -> Path:
    """The broker's index folder. Raises UsageError without a store, UnsafeStoreError for one that is not read."""
    store = config.store.store
    if store is None:
        raise UsageError("no store is given", "say --store DIR (the broker's storePathRootDir), or --broker-conf FILE")
    if config.broker.enable_dledger_commit_log:
        raise UnsafeStoreError(
            "the broker keeps a DLedger log (enableDLegerCommitLog), which is not read",
            "point --store at a broker that runs without it",
        )
    return store / "index"


def layout_of(config: Config) -> IndexLayout:
    """Slots and entries as the broker has them configured."""
    return IndexLayout(config.index.hash_slot_num, config.index.index_num)


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
    folder, layout, disk = folder or index_folder(config), layout_of(config), ScatteredDisk(disk)
    # The log first: what is written behind it meanwhile may be indexed already, and that harms nothing.
    log = list_segments(disk, config.store.commit_log_directories, config.store.segment_size)
    notes = Notes()
    sizes = list_index(disk, folder, notes)
    is_given = all(config.provenance.get(key, _DEFAULT) != _DEFAULT for key in ("hash_slot_num", "index_num"))
    files = look_at(disk, folder, sizes, layout, LogProbe(disk, log), is_layout_given=is_given)
    _judge_names(files, sizes, layout, notes)
    given = config.provenance.get("flavour", _DEFAULT) != _DEFAULT
    if not (eras or given):
        eras = detect_flavours(disk, config, folder, layout, files)
    eras = eras or (FlavourRange(0, config.index.flavour),)
    log_end = log.segments[-1].end if log.segments else 0
    plan = AuditPlan(folder, log.min_offset or 0, log_end, tuple(files), tuple(eras), given, layout, notes=notes)
    plan.piece_size = NEVER if size is None else size
    cutter = _Cutter(disk, config, log, plan)
    try:
        cutter.cut(size, cuts)
    finally:
        cutter.close()
    return plan


def _judge_names(files: Sequence[BrokerFile], sizes: dict[str, int], layout: IndexLayout, notes: Notes) -> None:
    latest: BrokerFile | None = None
    for file in files:
        if not file.is_readable:
            size = sizes[file.name]
            text = f"{size} bytes, not {layout.file_size}: the broker takes its slots and entries for others"
            notes.add(file.path, min(size, layout.file_size), "file-size", text)
        elif file.entries:
            # One that begins before it and ends behind it holds messages twice; that is another matter.
            if latest is not None and file.end < latest.end:
                text = f"its entries end at {file.end}, those of {latest.name} at {latest.end}"
                notes.add(file.path, 0, "file-order", f"the name sorts behind that of a newer file: {text}")
            else:
                latest = file


class _Cutter:
    def __init__(self, disk: Disk, config: Config, log: SegmentList, plan: AuditPlan) -> None:
        self._log, self._plan = log, plan
        self._file_size = layout_of(config).file_size
        self._files = [file for file in plan.files if file.is_readable and file.entries]
        store = config.store
        self._points = SplitPoints(
            disk,
            store.commit_log_directories,
            store.segment_size,
            decode_rules(config),
            drop_behind=reader_options(config).drop_behind,
        )
        # Where a stretch begins, and from where its first message is reached.
        self._aligned: dict[int, int] = {}

    def close(self) -> None:
        self._points.close()

    def cut(self, size: int | None, cuts: Sequence[int]) -> None:
        plan = self._plan
        self._aligned[plan.log_begin] = plan.log_begin
        for offset in (*(file.begin for file in self._files), *(era.begin for era in plan.eras), *cuts):
            if plan.log_begin < offset < plan.log_end:
                self._aligned[offset] = self._first_at(offset) or self._log_at(offset)
        for file in self._files:
            self._cut_behind(file.end)
        self._cut_at_segments(size)
        begins = sorted(self._aligned)
        last_end = max((file.end for file in self._files), default=-1)
        for begin, end in zip(begins, [*begins[1:], NEVER], strict=True):
            plan.tasks.append(self._task(begin, end, is_tail=end > last_end))
        self._give_files()

    def _cut_behind(self, offset: int) -> None:
        # The first message behind the last one of a file, unless another file goes on there.
        plan = self._plan
        if not plan.log_begin <= offset < plan.log_end or not self._points.is_closed(offset):
            return  # to the end of the segment being written it is not far, and what is behind there is hard to tell
        behind = self._first_at(offset + 1)
        if behind is None:
            segment = self._log.after(offset)
            behind = segment.base if segment is not None else None
        if behind is not None and not any(file.begin <= behind <= file.end for file in self._files):
            self._aligned[behind] = behind

    def _cut_at_segments(self, size: int | None) -> None:
        for segment in self._log.segments:
            before = max(begin for begin in self._aligned if begin <= segment.base)
            wanted = size if any(file.points_into(segment.base, segment.end) for file in self._files) else 0
            if wanted is not None and segment.base - before >= wanted:
                self._aligned.setdefault(segment.base, segment.base)

    def _first_at(self, offset: int) -> int | None:
        segment = self._log.at(offset)
        return self._points.at(offset, segment.base) if segment is not None else None

    def _log_at(self, offset: int) -> int:
        segment = self._log.at(offset) or self._log.after(offset)
        return min(segment.base, offset) if segment is not None else offset

    def _task(self, begin: int, end: int, *, is_tail: bool) -> AuditTask:
        plan = self._plan
        era = [era for era in plan.eras if era.begin <= begin][-1]
        return AuditTask(
            begin=begin,
            end=end,
            aligned=self._aligned[begin],
            log_begin=plan.log_begin,
            flavour=era.flavour,
            files=tuple(sorted((f for f in plan.files if f.points_into(begin, end)), key=_order)),
            owned=(),
            names=tuple(file.name for file in plan.files),
            end_timestamps=tuple(file.header.end_timestamp for file in plan.files),
            is_tail=is_tail,
            growing=tuple(file for file in plan.files if file.is_readable and not file.is_full) if is_tail else (),
            size=max(min(end, plan.log_end) - begin, 0),
            folder=plan.folder,
            log_end=plan.log_end,
        )

    def _give_files(self) -> None:
        # Each file's own check goes to the first task that reads it anyway, or to a task of its own.
        plan = self._plan
        owned: dict[str, int] = {}
        for number, task in enumerate(plan.tasks):
            for file in task.files:
                owned.setdefault(file.name, number)
        nowhere = replace(plan.tasks[0], end=plan.log_begin, files=(), is_tail=False, size=0)
        alone = [file for file in plan.files if file.is_readable and file.name not in owned]
        plan.tasks = [
            replace(task, owned=names, size=task.size + len(names) * self._file_size)
            for number, task in enumerate(plan.tasks)
            for names in [tuple(name for name, owner in owned.items() if owner == number)]
        ]
        plan.tasks[:0] = [
            replace(nowhere, files=(file,), owned=(file.name,), growing=(), size=self._file_size)
            for file in sorted(alone, key=_order)
        ]


def _order(file: BrokerFile) -> tuple[int, str]:
    return file.begin, file.name
