"""Stage two of a rebuild, sparse indexes: tasks that build whole segments, as one process does.

Nothing is carried from one segment of the commitlog to the next, but that the next one's first message seals it: of all
pairs the newest one alone stays open, and its task says how building goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from indexd.config import Config
from indexd.errors import IndexdError
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.spark.rebuild.runs import Run, RunReader
from indexd.sparse.format import ActiveMark, SegmentMark, SparseMark, index_name, time_index_name
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk

# Fewer messages than this are not worth a task of their own.
_MESSAGES_PER_TASK = 1 << 20


@dataclass(frozen=True, slots=True)
class SparseTask:
    """Whole segments, built below ``directory``, which is not there yet or empty, from runs ``[first_run, last_run)``.

    ``messages`` in all of them. ``grows``: the last one is the log's newest with messages, and is not sealed.
    """

    directory: Path
    first_run: int
    last_run: int
    segment_size: int
    interval: int
    messages: int
    grows: bool


@dataclass(frozen=True, slots=True)
class SparseBuilt:
    """What a task has made durable: both files of each mark in ``directory``; ``phy_offset``: where it ends."""

    directory: Path
    segments: tuple[SegmentMark, ...]
    active: ActiveMark | None
    phy_offset: int


def plan(runs: Sequence[Run], config: Config, directory: Path) -> list[SparseTask]:
    """Tasks for all segments that hold messages, each below its own name in ``directory``; ``runs`` in log order."""
    segment_size = config.store.segment_size
    groups: list[list[int]] = []
    room = 0
    for _, part in groupby(enumerate(runs), key=lambda item: item[1].split.begin // segment_size):
        numbers = [number for number, run in part if run.messages]
        if numbers and room <= 0:
            groups.append([])
            room = _MESSAGES_PER_TASK
        if numbers:
            groups[-1] += numbers
            room -= sum(runs[number].messages for number in numbers)
    return [
        SparseTask(
            directory / f"sparse-{number:06d}",
            group[0],
            group[-1] + 1,
            segment_size,
            config.outputs.sparse_interval,
            sum(runs[at].messages for at in group),
            number == len(groups) - 1,
        )
        for number, group in enumerate(groups)
    ]


def work(runs: Sequence[Run], task: SparseTask) -> SparseBuilt:
    """Build the segments of a task from its part of ``runs``, all in log order, durably.

    Raises DiskError, and what reading a run does.
    """
    disk = Disk()
    disk.make_dir(task.directory)
    service = SparseService(disk, task.directory, task.segment_size, task.interval)
    end = 0
    try:
        for run in runs[task.first_run : task.last_run]:
            with RunReader(disk, run) as reader:
                for batch in reader.sparse_batches():
                    service.build(batch)
                    end = int(batch.columns.phy_offset[batch.rows - 1]) + int(batch.columns.size[batch.rows - 1])
        if not task.grows:
            service.seal()
        progress = service.mark()
        sync_files(disk, progress.unsynced)
        sync_dirs(disk, progress.directories)
    finally:
        service.close()
    return SparseBuilt(task.directory, progress.held.segments, progress.held.active, end)


def collect(tasks: Sequence[SparseTask], built: Sequence[SparseBuilt], config: Config) -> SparseMark:
    """What the tasks come to together; IndexdError where one is not what was planned."""
    for task, done in zip(tasks, built, strict=True):
        messages = sum(segment.messages for segment in done.segments)
        if messages != task.messages or (done.active is not None) != task.grows:
            raise IndexdError(
                f"{done.directory} holds {messages} messages in {len(done.segments)} segments, "
                f"the last one {'not ' * (done.active is None)}growing; planned were {task.messages}, "
                f"{'not ' * (not task.grows)}growing"
            )
    segments = tuple(segment for done in built for segment in done.segments)
    bases = [segment.base for segment in segments]
    if bases != sorted(set(bases)):
        raise IndexdError(f"sparse indexes were built out of order or twice: {bases}")
    last = built[-1] if built else None
    return SparseMark(
        config.outputs.sparse_interval,
        last.phy_offset if last is not None else 0,
        segments,
        last.active if last is not None else None,
    )


def commit(disk: Disk, built: Sequence[SparseBuilt], directory: Path) -> None:
    """Move what the tasks have made into ``directory``, durably."""
    disk.make_dir(directory)
    for done in built:
        for segment in done.segments:
            for name in (index_name(segment.base), time_index_name(segment.base)):
                disk.rename(done.directory / name, directory / name)
    disk.sync_dir(directory)
