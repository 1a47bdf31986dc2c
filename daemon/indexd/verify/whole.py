"""What stands in a data directory at one moment, and whether somebody works in it.

Queues and sparse indexes: each one's own check, and both against the log, batch by batch.

What a verification came to.

Composes a verification: the records, then each output's own check, then the log if asked.

Works beside a daemon. What it finds counts only if nobody came, went or flushed meanwhile; otherwise it looks again,
at what the frontier names then: files expire, and recovery cuts them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from indexd.commitlog.batcher import QUEUE_COLUMNS, DispatchBatch, before
from indexd.commitlog.segments import list_segments
from indexd.config import Config
from indexd.consumequeue.check import Difference, QueueComparison, check_queues
from indexd.consumequeue.format import UNIT_SIZE, Unit
from indexd.consumequeue.recover import plan as plan_queues
from indexd.errors import DiskError, IndexdError
from indexd.findings import Findings
from indexd.flush.frontier import Frontier, Uncovered
from indexd.index.check import Condition, Place, check_file
from indexd.index.format import FLAVOURS, FileMark, IndexHeader
from indexd.query.source import check_as_built, known_frontier
from indexd.sparse.check import SparseComparison, check_sparse
from indexd.sparse.format import SparseMark
from indexd.storage.disk import Disk
from indexd.storage.lock import owner_pid
from indexd.storage.names import DataFiles, is_index_name
from indexd.verify.deep import compare
from indexd.verify.records import check_checkpoint, check_frontier, sound_queues


@dataclass(frozen=True, slots=True)
class Ground:
    """``owner`` holds the lock; while it ``is_opening``, recovery may be at work. ``sizes`` of the index files by name.

    ``is_unclean``: no one holds the lock, and the last one who did was killed.
    """

    frontier: Frontier
    owner: int | None
    is_opening: bool
    is_unclean: bool
    sizes: dict[str, int]

    @property
    def is_at_rest(self) -> bool:
        """Nobody works there, and the last one who did has stopped cleanly."""
        return self.owner is None and not self.is_unclean

    def condition(self, mark: FileMark) -> Condition:
        """What may be asked of a file: a full one never changes again."""
        if mark.full or self.is_at_rest:
            return Condition.AT_REST
        return Condition.CUT_SHORT if self.is_unclean or self.is_opening else Condition.GROWING

    def same_as(self, other: Ground) -> bool:
        """Whether nobody came, went or wrote a frontier between the two looks."""
        return (self.frontier, self.owner, self.is_opening, self.is_unclean) == (
            other.frontier,
            other.owner,
            other.is_opening,
            other.is_unclean,
        )

    def notes(self) -> list[str]:
        """What is not asked because of who works there, or was killed there."""
        if self.is_unclean:
            return [
                "the last stop was unclean: indexd --recover or the next start mends it; "
                "of the open file only the entries that the frontier names were checked"
            ]
        if self.is_opening:
            return [f"indexd, pid {self.owner}, is opening the directory: of the open file only entries were checked"]
        if self.owner is not None:
            return [f"indexd, pid {self.owner}, is at work: what it has built since the last flush was not checked"]
        return []


def look(disk: Disk, files: DataFiles) -> Ground:
    """What stands there now. Raises UsageError without a frontier, CorruptDataError for one that cannot be read."""
    owner = owner_pid(files.lock)
    unclean = owner is None and disk.exists(files.abort)
    frontier = known_frontier(disk, files)
    try:
        sizes = {name: size for name, size in disk.list_dir(files.index) if is_index_name(name)}
    except DiskError as error:
        if not error.is_missing:
            raise
        sizes = {}
    return Ground(frontier, owner, owner is not None and not _is_building(disk, files, owner), unclean, sizes)


def _is_building(disk: Disk, files: DataFiles, owner: int) -> bool:
    # A daemon writes where it stands at each drain, from the first one behind its recovery on.
    try:
        row = json.loads(disk.read(files.state))
    except (DiskError, ValueError):
        return False
    return isinstance(row, dict) and row.get("pid") == owner and "phyOffset" in row


_COLUMNS = QUEUE_COLUMNS | {"phy_offset", "store_timestamp", "sys_flag"}


def check_beside(disk: Disk, files: DataFiles, ground: Ground, on_bytes: Callable[[int], None]) -> Findings:
    """What the files say of themselves and of the frontier; of an output that is not built, that nothing is there."""
    found, frontier = Findings(), ground.frontier
    queues = sound_queues(frontier)
    found.merge(
        check_queues(
            disk,
            files.consumequeue,
            frontier.queue_file_size,
            queues,
            is_at_rest=ground.is_at_rest,
            is_owned=not ground.is_at_rest or len(queues) < len(frontier.queues or ()),
            on_bytes=on_bytes,
        )
    )
    found.merge(
        check_sparse(
            disk,
            files.sparse,
            frontier.segment_size,
            frontier.sparse or SparseMark(0),
            is_at_rest=ground.is_at_rest,
            is_owned=not ground.is_at_rest,
            on_bytes=on_bytes,
        )
    )
    return found


class BesideComparison:
    """Takes the log from ``begin``, the first offset of a segment, to where the frontier ends.

    ``left_out`` says in words what was not compared.
    """

    def __init__(self, config: Config, disk: Disk, files: DataFiles, ground: Ground, begin: int) -> None:
        frontier = ground.frontier
        self._files, self._frontier = files, frontier
        self._queues: QueueComparison | None = None
        self._sparse: SparseComparison | None = None
        self.findings = Findings()
        self.left_out: list[str] = []
        reason = _not_comparable(ground)
        if reason is not None:
            self.left_out.append(f"queues and sparse indexes were not compared: {reason}")
            return
        if frontier.queues is not None:
            self._queues = _queue_comparison(config, disk, files, frontier, begin)
        if frontier.sparse is not None:
            self._sparse = SparseComparison(disk, files.sparse, frontier.segment_size, frontier.sparse, begin)

    @property
    def is_over(self) -> bool:
        """It does not want any more of the log."""
        return self._queues is None and self._sparse is None

    def take(self, batch: DispatchBatch) -> None:
        """The next stretch of the log."""
        if self.is_over:
            return
        batch = _covered(before(batch, self._frontier.phy_offset), self._frontier.left_out)
        if self._queues is not None:
            self._queues.differs(batch)
        if self._sparse is not None:
            self._add_sparse(self._sparse, batch)

    def give_up(self, reason: str) -> None:
        """The log cannot be read there: what it comes to behind that nobody knows."""
        if not self.is_over:
            self.left_out.append(f"queues and sparse indexes were not compared from there on: {reason}")
        self._end(is_whole=False)

    def finish(self) -> None:
        """The log has been given to its end."""
        sparse = self._frontier.sparse
        if sparse is not None and sparse.phy_offset > self._frontier.phy_offset:
            self.left_out.append("the growing pair of sparse indexes: the disk refused before all of a drain was built")
        elif self._sparse is not None:
            self._add_sparse(self._sparse, None)
        self._end(is_whole=True)

    def _end(self, *, is_whole: bool) -> None:
        if self._sparse is not None and self._sparse.gone:
            names = self._sparse.gone
            self.left_out.append(f"{len(names)} files of sparse indexes, {names[0]} first: they are not there")
        if self._queues is not None:
            self._add_queues(self._queues, is_whole=is_whole)
        self._queues = self._sparse = None

    def _add_queues(self, queues: QueueComparison, *, is_whole: bool) -> None:
        rows = [("unit-log", found) for found in queues.differences]
        if is_whole:
            # What a drain that waits for the disk has written lies behind the frontier's physical offset.
            end = self._frontier.phy_offset
            rows += [("unit-log", found) for found in queues.more() if min(found.phy_offsets, default=0) < end]
            rows += [("queue-min", found) for found in queues.hidden()]
        broken = 0
        for what, found in rows:
            if not queues.is_whole(found):
                broken += 1
                continue
            name = f"consumequeue/{found.path.relative_to(self._files.consumequeue)}"
            text = _words(found) if what == "unit-log" else f"{_unit(found.found)} is in the log, and called expired"
            self.findings.add(name, found.position, what, text)
        if broken:
            self.left_out.append(f"{broken} queues were not compared to their ends: some of their files are not there")

    def _add_sparse(self, sparse: SparseComparison, batch: DispatchBatch | None) -> None:
        for found in sparse.finish() if batch is None else sparse.take(batch):
            self.findings.add(f"sparse/{found.name}", found.position, "entry-log", found.text)


def _not_comparable(ground: Ground) -> str | None:
    frontier = ground.frontier
    if frontier.queues is None and frontier.sparse is None:
        return None
    if ground.is_opening:
        return f"indexd, pid {ground.owner}, is opening the directory"
    if frontier.filled_offset < frontier.phy_offset:
        return f"they are filled up to {frontier.filled_offset} only"
    return None


def _queue_comparison(
    config: Config, disk: Disk, files: DataFiles, frontier: Frontier, begin: int
) -> QueueComparison | None:
    # Of each queue, what it holds of messages before ``begin`` is not asked.
    marks, size = sound_queues(frontier), frontier.queue_file_size
    if size < 1:
        return None
    held = plan_queues(disk, files.consumequeue, size, marks, begin, is_cut=True, is_unclean=False, log_begin=begin)
    most = frontier.queues_limit or config.outputs.queues_max
    return QueueComparison(disk, files.consumequeue, size, most, held.marks, marks)


def _covered(batch: DispatchBatch, gaps: tuple[Uncovered, ...]) -> DispatchBatch:
    # Without the messages that were passed over when the outputs were built; keys are left out.
    offsets = batch.columns.phy_offset[: batch.rows]
    is_covered = np.ones(batch.rows, dtype=np.bool_)
    for gap in gaps:
        first, last = offsets.searchsorted((gap.begin, gap.end))
        is_covered[first:last] = False
    if is_covered.all():
        return batch
    kept = {name: getattr(batch.columns, name)[: batch.rows][is_covered] for name in _COLUMNS}
    return replace(batch, columns=batch.columns._replace(**kept), rows=int(is_covered.sum()), crc=None)


def _words(found: Difference) -> str:
    return f"the unit is {_unit(found.found)}, by the log it is {_unit(found.wanted)}"


def _unit(unit: Unit | None) -> str:
    return "none" if unit is None else f"phy offset {unit.phy_offset}, size {unit.size}, tags code {unit.tags_code}"


@dataclass(slots=True)
class Compared:
    """How much was held against the log: messages and entries; what could not be, and why (``left_out``, in words).

    ``gave_up`` are files with so many findings that the rest of them was not looked at.
    """

    messages: int = 0
    entries: int = 0
    expired_entries: int = 0
    left_out_entries: int = 0
    left_out: list[str] = field(default_factory=list)
    gave_up: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """``findings`` are what does not hold; ``notes`` what was not asked, and why. ``bytes`` are those of the files.

    ``units`` of ``queues``, and ``segments`` with sparse indexes.
    """

    findings: Findings = field(default_factory=Findings)
    notes: list[str] = field(default_factory=list)
    files: int = 0
    entries: int = 0
    bytes: int = 0
    queues: int = 0
    units: int = 0
    segments: int = 0
    seconds: float = 0.0
    compared: Compared | None = None

    def to_json(self) -> dict[str, Any]:
        """The summary: the last line of ``--json``."""
        row: dict[str, Any] = {
            "kind": "summary",
            "files": self.files,
            "entries": self.entries,
            "bytes": self.bytes,
            "consumeQueues": self.queues,
            "consumeQueueUnits": self.units,
            "sparseSegments": self.segments,
            "seconds": round(self.seconds, 3),
            "findings": len(self.findings),
            "counts": dict(sorted(self.findings.counts.items())),
            "notes": self.notes,
            "deep": self.compared is not None,
        }
        if self.compared is not None:
            row |= {
                "comparedMessages": self.compared.messages,
                "comparedEntries": self.compared.entries,
                "expiredEntries": self.compared.expired_entries,
                "leftOutEntries": self.compared.left_out_entries,
                "leftOut": self.compared.left_out,
                "gaveUp": self.compared.gave_up,
            }
        return row


OnProgress = Callable[[int, int], None]

_LOOKS = 5
_PAUSE = 0.2
_DEFAULT = "default"


def verify(config: Config, disk: Disk, *, deep: bool, on_progress: OnProgress) -> Report:
    """Read everything again; ``on_progress`` gets (bytes done, bytes in all). Raises IndexdError where it cannot."""
    started = time.monotonic()
    files = DataFiles(config.store.data)
    ground = look(disk, files)
    config = _as_built(config, ground.frontier)
    progress = _Progress(on_progress, ground.frontier, deep=deep)
    report = Report()
    ground = _Outputs(disk, files, config, report, progress).check(ground)
    report.notes += ground.notes()
    if deep and report.findings.counts["frontier"]:
        report.notes.append("the frontier contradicts itself: nothing was compared with the log")
    elif deep:
        report.compared = compare(config, disk, ground, report.findings, progress)
        report.notes += report.compared.left_out
    report.notes = list(dict.fromkeys(report.notes))
    report.seconds = time.monotonic() - started
    return report


class _Progress:
    # Bytes of index files, then of log.
    def __init__(self, on_progress: OnProgress, frontier: Frontier, *, deep: bool) -> None:
        self._on_progress = on_progress
        self._done = 0
        self._total = len(frontier.index) * frontier.layout.file_size
        self._total += sum(UNIT_SIZE * (mark.max_offset - mark.first_offset) for mark in frontier.queues or ())
        if deep:
            self._total += frontier.phy_offset - frontier.begin_offset

    def __call__(self, more: int) -> None:
        self._done += more
        self._on_progress(self._done, max(self._total, self._done))


class _Outputs:
    # Each output's own check, on ground that may move.
    def __init__(
        self, disk: Disk, files: DataFiles, config: Config, report: Report, on_bytes: Callable[[int], None]
    ) -> None:
        self._disk, self._files, self._config = disk, files, config
        self._report, self._on_bytes = report, on_bytes
        # Files without findings need no second look while the frontier says the same of them.
        self._sound: dict[FileMark, IndexHeader | None] = {}

    def check(self, ground: Ground) -> Ground:
        """Fill the report; the ground that it speaks of."""
        for left in reversed(range(_LOOKS)):
            found = self._check_once(ground)
            if len(found) == 0 or left == 0:
                break
            now = look(self._disk, self._files)
            if ground.is_opening:
                time.sleep(_PAUSE)  # recovery cuts a file and gives it its size again: it looks short for a moment
            elif now.same_as(ground):
                break
            ground = now
        report, marks = self._report, ground.frontier.index
        report.findings.merge(found)
        report.files, report.entries = len(marks), sum(mark.header.entries for mark in marks)
        report.bytes = len(marks) * ground.frontier.layout.file_size
        queues, sparse = ground.frontier.queues or (), ground.frontier.sparse
        report.queues, report.units = (
            len(queues),
            sum(mark.max_offset - max(mark.first_offset, mark.begin_offset) for mark in queues),
        )
        report.segments = len(sparse.segments) if sparse is not None else 0
        return ground

    def _check_once(self, ground: Ground) -> Findings:
        found, frontier = Findings(), ground.frontier
        if not check_frontier(frontier, found, is_at_rest=ground.is_at_rest):
            # With a layout that cannot be, every file would be read as what it is not.
            return found
        check_checkpoint(self._disk, self._files, ground, found)
        # Nothing expired before the first entry of all, so nothing was inherited there.
        begin = frontier.index[0].header.begin_phy_offset if frontier.index else 0
        before = IndexHeader() if begin == frontier.begin_offset else None
        for mark in frontier.index:
            if mark not in self._sound or self._sound[mark] != before:
                wrong = self._check_file(ground, mark, before)
                found.merge(wrong)
                if len(wrong) == 0:
                    self._sound[mark] = before
            before = mark.header
        found.merge(check_beside(self._disk, self._files, ground, self._on_bytes))
        if ground.is_at_rest:
            for name in sorted(set(ground.sizes) - {mark.name for mark in frontier.index}):
                found.add(f"index/{name}", 0, "file-unnamed", "the frontier does not name it, and no daemon runs")
        return found

    def _check_file(self, ground: Ground, mark: FileMark, before: IndexHeader | None) -> Findings:
        frontier = ground.frontier
        place = Place(
            f"index/{mark.name}", mark, before, frontier.layout, FLAVOURS[frontier.flavour], ground.condition(mark)
        )
        try:
            with self._disk.open_read(self._files.index / mark.name) as file:
                return check_file(file, place, self._on_bytes)
        except DiskError as error:
            if not error.is_missing:
                raise
        missing = Findings()
        begin = self._log_begin()
        if begin is not None and mark.full and mark.header.end_phy_offset < begin:
            self._report.notes.append(f"{place.name} is gone, and only named messages that have expired")
        else:
            missing.add(place.name, 0, "file-missing", "the frontier names it, but it is not there")
        return missing

    def _log_begin(self) -> int | None:
        store = self._config.store
        try:
            return list_segments(self._disk, store.commit_log_directories, store.segment_size).min_offset
        except IndexdError:
            return None


def _as_built(config: Config, frontier: Frontier) -> Config:
    # What the data directory was built with holds where nothing was given; something else that was given is an error.
    check_as_built(config, frontier)
    store: dict[str, object] = {}
    if config.store.store is None and not config.store.commit_log_paths:
        store["commit_log_paths"] = tuple(Path(path) for path in frontier.commit_log_paths)
    if config.provenance.get("segment_size", _DEFAULT) == _DEFAULT:
        store["segment_size"] = frontier.segment_size
    index = {
        "flavour": frontier.flavour,
        "hash_slot_num": frontier.layout.hash_slot_num,
        "index_num": frontier.layout.index_num,
    }
    # Whatever is asked for now, the log has to be decoded for all that is there.
    outputs = {"consume_queue": frontier.queues is not None, "sparse": frontier.sparse is not None}
    return config.model_copy(
        update={
            "store": config.store.model_copy(update=store),
            "index": config.index.model_copy(update=index),
            "outputs": config.outputs.model_copy(update=outputs),
        }
    )
