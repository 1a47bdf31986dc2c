"""Stage two of a rebuild, the key index: a task builds one index file, as IndexService does.

A full file has N-1 entries, so file k holds the entries from k * (N-1) on, whatever messages they are of: one whose
keys straddle two files goes on in the second. The only thing that a file takes from the one before it is where that
ended, which its last entry says. A further file is begun by the next message, even if that has no entries: so the last
one may be empty.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from indexd.commitlog.batcher import DispatchBatch
from indexd.config import Config
from indexd.errors import IndexdError
from indexd.index.file import IndexFile, Put
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, Flavour, IndexHeader, IndexLayout
from indexd.spark.rebuild.runs import Run, RunReader
from indexd.storage.disk import Disk
from indexd.storage.names import next_index_name

_NAME = "index"


@dataclass(frozen=True, slots=True)
class IndexTask:
    """The file of ``entries`` entries, the first of which is entry ``first`` of all runs; below ``directory``.

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


@dataclass(frozen=True, slots=True)
class IndexBuilt:
    """A file that was made durable below ``directory``, and its header."""

    directory: Path
    header: IndexHeader


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


def _ends_with_entry(runs: Sequence[Run]) -> bool:
    return next(run.ends_with_entry for run in reversed(runs) if run.messages)


def work(runs: Sequence[Run], task: IndexTask) -> IndexBuilt:
    """Build a file from ``runs``, all of them in log order, durably. Raises DiskError, and what reading a run does."""
    disk = Disk()
    disk.make_dir(task.directory)
    file = IndexFile.create(disk, task.directory / _NAME, task.layout, _previous(disk, runs, task))
    try:
        _put(disk, runs, task, file)
        if file.header.entries != task.entries:
            raise IndexdError(f"{file.path} has {file.header.entries} entries, not {task.entries}")
        if task.is_full:
            file.publish()
            file.file.fsync()
        else:
            file.flush()
    finally:
        file.close()
    return IndexBuilt(task.directory, file.header)


def _previous(disk: Disk, runs: Sequence[Run], task: IndexTask) -> IndexHeader | None:
    if task.previous is None:
        return None
    run, entry = task.previous
    with RunReader(disk, runs[run]) as reader:
        phy_offset, store_timestamp = reader.entry(entry)
    return IndexHeader(end_timestamp=store_timestamp, end_phy_offset=phy_offset)


def _put(disk: Disk, runs: Sequence[Run], task: IndexTask, file: IndexFile) -> None:
    flavour = FLAVOURS[task.flavour]
    run_first = task.run_first
    for run in runs[task.first_run : task.last_run]:
        first, last = task.first - run_first, task.first + task.entries - run_first
        with RunReader(disk, run) as reader:
            for batch, row, key in reader.index_batches(max(first, 0), last):
                if _put_batch(file, flavour, batch, row, key):
                    return
        run_first += run.entries


def _put_batch(file: IndexFile, flavour: Flavour, batch: DispatchBatch, row: int, key: int) -> bool:
    # Whether the file is full.
    while row < batch.rows:
        put, row, key = file.put_batch(batch, flavour, row, key)
        if put is Put.FULL:
            return True
        if put is Put.BUFFER_FULL:
            file.write_entries()
    return False


def collect(tasks: Sequence[IndexTask], built: Sequence[IndexBuilt]) -> None:
    """IndexdError where a file is not what was planned, or ends before the one before it."""
    previous = IndexHeader()
    for task, done in zip(tasks, built, strict=True):
        header = done.header
        if header.entries != task.entries or header.end_phy_offset < previous.end_phy_offset:
            raise IndexdError(f"{done.directory} has the header {header}, and {task} was planned behind {previous}")
        previous = header


def commit(
    disk: Disk,
    tasks: Sequence[IndexTask],
    built: Sequence[IndexBuilt],
    directory: Path,
    clock: Callable[[], float] = time.time,
) -> tuple[FileMark, ...]:
    """Move the files into ``directory`` under names of this moment, durably.

    Raises IndexdError for a file that does not hold here what its task wrote: executors may see another file system.
    """
    disk.make_dir(directory)
    marks: list[FileMark] = []
    for task, done in zip(tasks, built, strict=True):
        name = next_index_name(clock(), marks[-1].name if marks else None)
        disk.rename(done.directory / _NAME, directory / name)
        with disk.open_read(directory / name) as file:
            stamp = file.stamp()
            if stamp.size != task.layout.file_size or file.pread(HEADER_SIZE, 0) != done.header.pack():
                raise IndexdError(f"{directory / name} does not hold what was written as {done.directory / _NAME}")
        marks.append(FileMark(name, done.header, task.is_full, stamp.mtime_ns))
    disk.sync_dir(directory)
    return tuple(marks)
