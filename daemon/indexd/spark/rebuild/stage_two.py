"""Stage two of a rebuild: tasks that build index files and the other outputs from the runs, and how they are committed.

A task builds an index file, some of the queues, or the sparse indexes. Tasks use the daemon's own
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
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import IndexdError
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.index.file import IndexFile
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, Flavour, IndexHeader, IndexLayout
from indexd.index.kernel import BUFFER_FULL, FILE_FULL
from indexd.output import Output
from indexd.spark.rebuild.runs import GROUPS, Run, batches_of, entry_of, index_batches
from indexd.storage.disk import Disk
from indexd.storage.names import next_index_name

# What an index file is called by the task that builds it.
_NAME = "index"


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
    last one may be empty. ``is_full``: another one follows.
    """

    directory: Path
    config: Config
    first: int
    entries: int
    is_full: bool

    @staticmethod
    def plan(runs: Sequence[Run], config: Config, directory: Path) -> list[IndexTask]:
        """A task a file, each below its own name in ``directory``; ``runs`` in log order."""
        used = [run for run in runs if run.messages]
        if not used:
            return []
        room, entries = config.index.index_num - 1, sum(run.entries for run in runs)
        files = max(-(-entries // room), 1)
        if entries == files * room and not used[-1].ends_with_entry:
            files += 1
        return [
            IndexTask(
                directory / f"index-{number:06d}",
                config,
                first=number * room,
                entries=min(room, entries - number * room),
                is_full=number < files - 1,
            )
            for number in range(files)
        ]

    def work(self, runs: Sequence[Run]) -> Built:
        """Build a file from ``runs``, all of them in log order, durably. Raises DiskError."""
        disk, previous, flavour = Disk(), None, FLAVOURS[self.config.index.flavour]
        disk.make_dir(self.directory)
        begins = [0, *accumulate(run.entries for run in runs)]
        if self.first:
            # The run of an entry; where several begin with the same number, all but the last of them are empty.
            before = bisect_right(begins, self.first - 1) - 1
            phy_offset, store_timestamp = entry_of(runs[before], self.first - 1 - begins[before])
            previous = IndexHeader(end_timestamp=store_timestamp, end_phy_offset=phy_offset)
        layout = IndexLayout(self.config.index.hash_slot_num, self.config.index.index_num)
        file = IndexFile.create(disk, self.directory / _NAME, layout, previous)
        try:
            for run, begin in zip(runs, begins, strict=False):
                first = self.first - begin
                for batch, row, key in index_batches(run, max(first, 0), first + self.entries):
                    if _put_batch(file, flavour, batch, row, key):
                        break
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
            stamp, layout = file.stamp(), IndexLayout(task.config.index.hash_slot_num, task.config.index.index_num)
            if stamp.size != layout.file_size or file.pread(HEADER_SIZE, 0) != done.mark.pack():
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


@dataclass(frozen=True, slots=True)
class OutputTask:
    """An output other than the key index, or its queues of these ``groups``, below ``directory``."""

    directory: Path
    kind: type[Output[Any]]
    config: Config
    groups: range | None = None

    @staticmethod
    def plan(kind: type[Output[Any]], config: Config, directory: Path, parts: int) -> list[OutputTask]:
        """Tasks for all of it, each below its own name in ``directory``: of queues so many ``parts``, 64 at most."""
        if kind is not ConsumeQueueStore:
            return [OutputTask(directory / kind.name, kind, config)]
        bounds = sorted({GROUPS * number // parts for number in range(parts + 1)})
        return [
            OutputTask(directory / f"{kind.name}-{first:02d}-{end:02d}", kind, config, range(first, end))
            for first, end in pairwise(bounds)
        ]

    def work(self, runs: Sequence[Run]) -> Built:
        """Build it from all ``runs``, in log order, durably. Raises DiskError."""
        disk = Disk()
        disk.make_dir(self.directory)
        output = self.kind.of(self.config, disk, self.directory)
        try:
            for run in runs:
                for batch in batches_of(run, groups=self.groups):
                    output.build(batch)
            mark = output.mark()
            sync_files(disk, mark.unsynced)
            sync_dirs(disk, mark.directories)
        finally:
            output.close()
        begins = output.begins if isinstance(output, ConsumeQueueStore) else ()
        return Built(self.directory, mark.held, output.figures(), begins)


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
    mark = built[0].mark
    if len(built) > 1:
        queues = sorted(pair for one in built for pair in zip(one.begins, one.mark.queues, strict=True))
        mark = mark._replace(queues=tuple(queue for _, queue in queues))
    return mark


Task = IndexTask | OutputTask
