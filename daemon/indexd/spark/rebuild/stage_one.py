"""Stage one of a rebuild: a task reads one split of the log once and writes a run; the driver chains the runs.

A task also notes the evidence of its split, as the daemon does while it builds. A run that an earlier rebuild has left
is taken over when it was made of the same, is whole, and the log still says what was noted of it.

Each run has to begin where the one before it ended, as one process would have read the log. Splits are planned where
messages begin, but a log is another process's memory: it is cut, written on, and holds bytes that are no frame. What
does not chain is read again from where the run before it stands.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from indexd.commitlog.evidence import Evidence, FrameReader, thinned
from indexd.commitlog.reader import Skipped
from indexd.commitlog.segments import SegmentList, list_segments
from indexd.commitlog.tail import AT_FIRST, UNREADABLE_TIMESTAMP, Stand
from indexd.config import Config
from indexd.errors import CorruptDataError, DisturbedError, UnsafeStoreError
from indexd.flush.frontier import DOUBTED, UNPROVEN, Uncovered, add_uncovered
from indexd.flush.watch import LogChangeDetector
from indexd.index.format import FLAVOURS
from indexd.spark.rebuild.runs import Run, RunReader, RunWriter, read_run
from indexd.spark.splits import Split, SplitReader
from indexd.storage.disk import Disk
from indexd.storage.remote import disk_for

_SUFFIX = ".run"


@dataclass(frozen=True, slots=True)
class StageOne:
    """What all tasks share. ``directory`` of the runs; ``token``: what ``token_file`` holds while the job runs."""

    config: Config
    directory: Path
    token_file: Path
    token: str
    identity: str


@dataclass(frozen=True, slots=True)
class SplitTask:
    """A split, and a run of it that was left, if any."""

    split: Split
    left: Path | None = None


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A split that is corrupt from ``offset`` on: an error, unless the log turns out to end before it."""

    split: Split
    offset: int
    error: CorruptDataError


def work(stage: StageOne, task: SplitTask) -> Run | Unreadable:
    """The run of a split. Raises what reading the log does, and DiskError."""
    out = Disk()
    if not out.exists(stage.token_file) or out.read(stage.token_file) != stage.token.encode():
        raise UnsafeStoreError(
            f"{stage.directory} is not what the driver sees under this name",
            "give an --out on a file system that the driver and all executors share",
        )
    disk = disk_for(stage.config)
    run = _left(disk, stage, task)
    if run is not None:
        return run
    split = task.split
    path = stage.directory / f"{split.begin:020d}-{split.end:020d}.{uuid.uuid4().hex[:12]}{_SUFFIX}"
    reader = SplitReader(disk, stage.config, split)
    try:
        return _read(disk, stage, reader, path)
    except CorruptDataError as error:
        out.unlink(path)
        return Unreadable(split, reader.next_offset, error)
    except BaseException:
        out.unlink(path)
        raise


def left_runs(disk: Disk, directory: Path) -> Iterator[tuple[Split, Path]]:
    """The runs that a directory holds, whole ones or not, by what their names say."""
    for name, _ in disk.list_dir(directory):
        begin, _, end = name.partition(".")[0].partition("-")
        if name.endswith(_SUFFIX) and begin.isdecimal() and end.isdecimal():
            yield Split(int(begin), int(end)), directory / name


def _read(disk: Disk, stage: StageOne, reader: SplitReader, path: Path) -> Run:
    config = stage.config
    flavour = FLAVOURS[config.index.flavour]
    witness = LogChangeDetector(disk, lambda: _log(disk, config))
    messages = 0
    with RunWriter(
        Disk(), path, reader.split, skip_mask=flavour.skip_mask, with_units=config.outputs.consume_queue
    ) as writer:
        for item in reader:
            writer.put(item)
            if not isinstance(item, Skipped) and item.rows:
                messages += item.rows
                witness.saw(item, messages)
        return writer.close(reader, identity=stage.identity, evidence=witness.points())


def _left(disk: Disk, stage: StageOne, task: SplitTask) -> Run | None:
    run = read_run(Disk(), task.left) if task.left is not None else None
    if run is None or run.split != task.split or run.identity != stage.identity:
        return None
    # What ends before its split does ended with the log, which may have grown.
    if run.is_last or run.next_offset != run.split.end:
        return None
    if run.skipped and stage.config.reader.on_corrupt != "skip":
        return None
    with FrameReader(disk, _log(disk, stage.config)) as frames:
        if not all(frames.holds(point) for point in (*run.evidence[:1], *run.evidence[-1:])):
            return None
    try:
        with RunReader(Disk(), run) as reader:
            reader.check()
    except CorruptDataError:
        return None
    return run


def _log(disk: Disk, config: Config) -> SegmentList:
    return list_segments(disk, config.store.commit_log_directories, config.store.segment_size)


# As the daemon has it: the first frame of so many segments is kept, however close they lie.
_SEGMENTS_NOTED = 64


def chain(found: Sequence[Run | Unreadable], begin: int, end: int, segment_size: int) -> tuple[list[Run], Split | None]:
    """The runs that one process would have made of log bytes ``[begin, end)``, and a split that is missing among them.

    Runs that stand elsewhere do not count. Raises the error of a split that could not be read where it is needed, and
    DisturbedError for a run that came to nothing.
    """
    at = {item.split.begin: item for item in found}
    runs: list[Run] = []
    position = begin
    while position < end:
        item = at.get(position)
        if item is None:
            return runs, _missing(position, at, end, segment_size)
        if runs and position % segment_size and _begins_badly(item):
            # A message was to begin there: whoever comes from the one before knows what does.
            if runs[-1].split.end >= item.split.end:
                break
            return runs, Split(runs[-1].split.begin, item.split.end)
        if isinstance(item, Unreadable):
            raise item.error
        runs.append(item)
        # Where others were planned behind it, the end of the log is looked at once more.
        if item.unreadable is not None or (item.ends_log and (item.split.end >= end or item.next_offset == position)):
            break
        if item.next_offset <= position:
            raise DisturbedError(f"the log at {position} changed while it was read", "run it again")
        position = item.next_offset
    return runs, None


def _begins_badly(item: Run | Unreadable) -> bool:
    if isinstance(item, Unreadable):
        return item.offset == item.split.begin
    return bool(item.skipped) and item.skipped[0].begin == item.split.begin


def _missing(position: int, begins: dict[int, Run | Unreadable], end: int, segment_size: int) -> Split:
    segment_end = position - position % segment_size + segment_size
    later = min((begin for begin in begins if begin > position), default=end)
    return Split(position, min(later, segment_end, end))


def evidence_of(runs: Sequence[Run], segment_size: int) -> tuple[Evidence, ...]:
    """The evidence of all runs as that of one log, thinned as the daemon thins it."""
    points: list[Evidence] = []
    messages = 0
    for run in runs:
        points += (replace(point, messages=messages + point.messages) for point in run.evidence)
        messages += run.messages
    if not points:
        return ()
    newest = points[-1].phy_offset // segment_size * segment_size
    bases = range(newest - (_SEGMENTS_NOTED - 1) * segment_size, newest + 1, segment_size)
    return thinned(points, points[-1].phy_offset, bases)


def uncovered_of(runs: Sequence[Run], stand: Stand = AT_FIRST) -> tuple[Uncovered, ...]:
    """What was passed over and what nobody can prove, as one process writes it down."""
    gaps: tuple[Uncovered, ...] = ()
    for run in runs:
        for gap in run.skipped:
            gaps = add_uncovered(gaps, Uncovered(gap.begin, gap.end, gap.reason))
    if stand.unproven_from is not None:
        end = max(run.batch_end for run in runs)
        reason = DOUBTED if stand.newest == UNREADABLE_TIMESTAMP else UNPROVEN
        gaps = add_uncovered(gaps, Uncovered(stand.unproven_from, end, reason))
    return gaps


def stand_behind(runs: Sequence[Run], segment_size: int) -> Stand:
    """What one process knows of suspects at the end: those before the last segment that is in use are none."""
    newest = runs[-1].split.begin // segment_size if runs else 0
    stand = AT_FIRST
    for run in runs:
        if run.first_offset is None:
            continue
        if run.split.begin // segment_size < newest:
            stand = Stand(run.last_timestamp)
        else:
            stand = stand.after(run.first_offset, run.stand)
            passed = [gap.end for gap in run.skipped if not gap.is_expired]
            if passed:
                first = passed[0] if stand.unproven_from is None else min(passed[0], stand.unproven_from)
                stand = Stand(UNREADABLE_TIMESTAMP, first)
    return stand
