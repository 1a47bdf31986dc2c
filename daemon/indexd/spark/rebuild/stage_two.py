"""Stage two of a rebuild: tasks that build index files and the other outputs from the runs, and how they are committed.

An index file is a task of its own; another output is one task. Tasks use the daemon's own builders, so their files are
those of one process.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.errors import IndexdError
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.flush.registry import OUTPUTS
from indexd.index.file import IndexFile
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, Flavour, IndexHeader, IndexLayout
from indexd.index.kernel import BUFFER_FULL, FILE_FULL
from indexd.spark.rebuild.runs import Run, batches_of, entry_of, index_batches
from indexd.storage.disk import Disk
from indexd.storage.names import next_index_name

# What an index file is called by the task that builds it.
_NAME = "index"


@dataclass(frozen=True, slots=True)
class Built:
    """What a task has made durable below ``directory``: what that holds, and what its builder counted."""

    directory: Path
    mark: Any
    figures: dict[str, Any]


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
    """All of an output other than the key index, ``name`` in OUTPUTS, below ``directory``.

    One task, however long the log: reading the log takes far longer than building these from the runs.
    """

    directory: Path
    name: str
    config: Config

    def work(self, runs: Sequence[Run]) -> Built:
        """Build it from ``runs``, all of them in log order, durably. Raises DiskError."""
        disk = Disk()
        disk.make_dir(self.directory)
        (kind,) = (kind for kind in OUTPUTS if kind.name == self.name)
        output = kind.of(self.config, disk, self.directory)
        try:
            for run in runs:
                for batch in batches_of(run):
                    output.build(batch)
            mark = output.mark()
            sync_files(disk, mark.unsynced)
            sync_dirs(disk, mark.directories)
        finally:
            output.close()
        return Built(self.directory, mark.held, output.figures())


Task = IndexTask | OutputTask
