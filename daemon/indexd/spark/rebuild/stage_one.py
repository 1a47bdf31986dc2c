"""Stage one of a rebuild: a task reads one split of the log once and writes a run.

It also notes the evidence of its split, as the daemon does while it builds. A run that an earlier rebuild has left is
taken over when it was made of the same, is whole, and the log still says what was noted of it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from indexd.commitlog.evidence import FrameReader
from indexd.commitlog.reading import Skipped
from indexd.commitlog.segments import SegmentList, list_segments
from indexd.config import Config
from indexd.errors import CorruptDataError, UnsafeStoreError
from indexd.flush.witness import Witness
from indexd.index.flavour import FLAVOURS
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
    witness = Witness(disk, lambda: _log(disk, config))
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
