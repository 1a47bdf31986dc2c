"""Stage two of a rebuild: tasks that build index files and the other outputs from the runs, and how they are committed.

A task builds an index file, some of the queues, or the sparse indexes of some segments. Tasks use the daemon's own
builders, so their files are those of one process.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.consumequeue.format import QueuesMark
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import IndexdError
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.index.file import IndexFile
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, Flavour, IndexHeader, IndexLayout
from indexd.index.kernel import BUFFER_FULL, FILE_FULL
from indexd.output import Output
from indexd.spark.rebuild.runs import GROUPS, Run, batches_of, entry_of, index_batches
from indexd.sparse.format import SparseMark
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from indexd.storage.names import next_index_name

# What an index file is called by the task that builds it.
_NAME = "index"
# Fewer messages than this are not worth a task of their own.
_MESSAGES_PER_TASK = 1 << 20


@dataclass(frozen=True, slots=True)
class Built:
    """What a task has made durable below ``directory``: what that holds, and what its builder counted.

    ``begins``: of each queue, where its first message stands.
    """

    directory: Path
    mark: Any
    figures: dict[str, Any]
    begins: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class IndexTask:
    """An index file of ``entries`` entries, the first of which is entry ``first`` of all runs; below ``directory``.

    A full file has N-1 entries, so file k holds the entries from k * (N-1) on, whatever messages they are of: one whose
    keys straddle two files goes on in the second. The only thing that a file takes from the one before it is where that
    ended, which its last entry says. A further file is begun by the next message, even if that has no entries: so the
    last one may be empty.

    ``first_run``, ``last_run``: the runs that hold them, ``run_first`` being the number of the first run's first entry.
    ``previous``: (run, entry of it) with which the file before this one ends. ``is_full``: another one follows.
    """

    directory: Path
    layout: IndexLayout
    flavour: str
    first: int
    entries: int
    first_run: int
    last_run: int
    run_first: int
    previous: tuple[int, int] | None
    is_full: bool

    @staticmethod
    def plan(runs: Sequence[Run], config: Config, directory: Path) -> list[IndexTask]:
        """A task a file, each below its own name in ``directory``; ``runs`` in log order."""
        if not any(run.messages for run in runs):
            return []
        layout = IndexLayout(config.index.hash_slot_num, config.index.index_num)
        room = layout.index_num - 1
        begins = [0, *accumulate(run.entries for run in runs)]
        entries = begins[-1]
        files = max(-(-entries // room), 1)
        if entries == files * room and not _ends_with_entry(runs):
            files += 1
        tasks = []
        for number in range(files):
            first, last = number * room, min((number + 1) * room, entries)
            # The run of an entry; where several begin with the same number, all but the last of them are empty.
            first_run = bisect_right(begins, first) - 1
            before = bisect_right(begins, first - 1) - 1
            tasks.append(
                IndexTask(
                    directory=directory / f"index-{number:06d}",
                    layout=layout,
                    flavour=config.index.flavour,
                    first=first,
                    entries=last - first,
                    first_run=first_run,
                    last_run=bisect_right(begins, last - 1) if last > first else first_run,
                    run_first=begins[first_run],
                    previous=(before, first - 1 - begins[before]) if number else None,
                    is_full=number < files - 1,
                )
            )
        return tasks

    def work(self, runs: Sequence[Run]) -> Built:
        """Build a file from ``runs``, all of them in log order, durably. Raises DiskError."""
        disk, previous, run_first = Disk(), None, self.run_first
        disk.make_dir(self.directory)
        if self.previous is not None:
            phy_offset, store_timestamp = entry_of(runs[self.previous[0]], self.previous[1])
            previous = IndexHeader(end_timestamp=store_timestamp, end_phy_offset=phy_offset)
        file = IndexFile.create(disk, self.directory / _NAME, self.layout, previous)
        try:
            for run in runs[self.first_run : self.last_run]:
                first, last = self.first - run_first, self.first + self.entries - run_first
                for batch, row, key in index_batches(run, max(first, 0), last):
                    if _put_batch(file, FLAVOURS[self.flavour], batch, row, key):
                        break
                run_first += run.entries
            if file.header.entries != self.entries:
                raise IndexdError(f"{file.path} has {file.header.entries} entries, not {self.entries}")
            if self.is_full:
                file.publish()
                file.file.fsync()
            else:
                file.flush()
        finally:
            file.close()
        return Built(self.directory, file.header, {})


def commit_index(tasks: Sequence[IndexTask], built: Sequence[Built], directory: Path) -> tuple[FileMark, ...]:
    """Move the files into ``directory`` under names of this moment, durably.

    IndexdError for a file that does not hold here what its task wrote: executors may see another file system.
    """
    disk = Disk()
    disk.make_dir(directory)
    marks: list[FileMark] = []
    for task, done in zip(tasks, built, strict=True):
        name = next_index_name(time.time(), marks[-1].name if marks else None)
        disk.rename(done.directory / _NAME, directory / name)
        with disk.open_read(directory / name) as file:
            stamp = file.stamp()
            if stamp.size != task.layout.file_size or file.pread(HEADER_SIZE, 0) != done.mark.pack():
                raise IndexdError(f"{directory / name} does not hold what was written as {done.directory / _NAME}")
        marks.append(FileMark(name, done.mark, task.is_full, stamp.mtime_ns))
    disk.sync_dir(directory)
    return tuple(marks)


def _put_batch(file: IndexFile, flavour: Flavour, batch: DispatchBatch, row: int, key: int) -> bool:
    # Whether the file is full.
    while row < batch.rows:
        put, row, key = file.put_batch(batch, flavour, row, key)
        if put == FILE_FULL:
            return True
        if put == BUFFER_FULL:
            file.write_entries()
    return False


def _ends_with_entry(runs: Sequence[Run]) -> bool:
    return next(run.ends_with_entry for run in reversed(runs) if run.messages)


@dataclass(frozen=True, slots=True)
class OutputTask:
    """A part of an output other than the key index, or all of it, below ``directory``; from ``runs``, by their numbers.

    Queues are divided by ``groups``: a task reads what its queues need. Sparse indexes are divided between segments:
    nothing is carried from one to the next, but that the next one's first message seals it. So a part that is not
    ``is_last`` is sealed at its end.
    """

    directory: Path
    kind: type[Output[Any]]
    config: Config
    runs: range
    groups: range | None = None
    is_last: bool = True

    @staticmethod
    def plan(kind: type[Output[Any]], runs: Sequence[Run], config: Config, directory: Path) -> list[OutputTask]:
        """Tasks for all of it, each below its own name in ``directory``; ``runs`` in log order."""
        groups, bounds = [0, GROUPS], [0, len(runs)]
        if kind is ConsumeQueueStore:
            count = min(sum(run.messages for run in runs) // _MESSAGES_PER_TASK + 1, GROUPS)
            groups = [GROUPS * number // count for number in range(count + 1)]
        elif kind is SparseService:
            bounds[1:1] = _segment_bounds(runs, config.store.segment_size)
        return [
            OutputTask(
                directory / f"{kind.name}-{first:06d}-{group:02d}",
                kind,
                config,
                range(first, end),
                range(group, group_end) if kind is ConsumeQueueStore else None,
                is_last=end == len(runs),
            )
            for first, end in pairwise(bounds)
            for group, group_end in pairwise(groups)
        ]

    def work(self, runs: Sequence[Run]) -> Built:
        """Build it from all ``runs``, in log order, durably. Raises DiskError."""
        disk = Disk()
        disk.make_dir(self.directory)
        output = self.kind.of(self.config, disk, self.directory)
        try:
            for number in self.runs:
                for batch in batches_of(runs[number], groups=self.groups):
                    output.build(batch)
            if isinstance(output, SparseService) and not self.is_last:
                output.seal()
            mark = output.mark()
            sync_files(disk, mark.unsynced)
            sync_dirs(disk, mark.directories)
        finally:
            output.close()
        begins = output.begins if isinstance(output, ConsumeQueueStore) else ()
        return Built(self.directory, mark.held, output.figures(), begins)


def _segment_bounds(runs: Sequence[Run], segment_size: int) -> list[int]:
    # Where parts begin, but the first: with a segment, and there are messages in each.
    bounds, messages, left = [], 0, sum(run.messages for run in runs)
    for number, run in enumerate(runs):
        begins_segment = number and run.split.begin // segment_size > runs[number - 1].split.begin // segment_size
        if begins_segment and messages >= _MESSAGES_PER_TASK and left:
            bounds.append(number)
            messages = 0
        messages += run.messages
        left -= run.messages
    return bounds


def commit_output(built: Sequence[Built], directory: Path) -> Any:
    """Move what the parts of an output have made into ``directory``, durably; what all of them hold."""
    disk = Disk()
    disk.make_dir(directory)
    for one in built:
        disk.sync_dir(one.directory)  # or it is not there: executors may see another file system
        for path in sorted(one.directory.rglob("*")):
            target = directory / path.relative_to(one.directory)
            if path.is_dir():
                disk.make_dir(target, durable=False)
            else:
                disk.rename(path, target)
    sync_dirs(disk, [directory, *(path for path in directory.rglob("*") if path.is_dir())])
    marks = [one.mark for one in built]
    if isinstance(marks[0], QueuesMark):
        queues = sorted(pair for one in built for pair in zip(one.begins, one.mark.queues, strict=True))
        return marks[0]._replace(queues=tuple(mark for _, mark in queues))
    if isinstance(marks[0], SparseMark):
        return marks[-1]._replace(segments=tuple(segment for mark in marks for segment in mark.segments))
    return marks[0]


Task = IndexTask | OutputTask
