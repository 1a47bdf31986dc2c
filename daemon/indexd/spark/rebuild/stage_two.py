"""Stage two of a rebuild: tasks that build index files, whole ConsumeQueues and sparse indexes from the runs.

Each kind of task says how it is planned, worked on in a worker, and how the driver moves what its tasks made to its
place, once it is what was planned. Tasks use the daemon's own builders, so their files are those of one process.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.decoder import decode_utf8
from indexd.config import Config
from indexd.consumequeue.format import QueueMark, QueuesMark, is_topic_name, queue_directory
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import IndexdError
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.index.file import IndexFile
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, Flavour, IndexHeader, IndexLayout
from indexd.index.kernel import BUFFER_FULL, FILE_FULL
from indexd.spark.rebuild.runs import BUCKETS, Run, bucket_of, entry_of, index_batches, log_batches, queue_batches
from indexd.sparse.format import SegmentMark, SparseMark, index_name, time_index_name
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk
from indexd.storage.names import next_index_name

# What an index file is called by the task that builds it.
_NAME = "index"

QueueName = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Built:
    """What a task has made durable below ``directory``, and what that holds."""

    directory: Path
    mark: Any


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
        return Built(self.directory, file.header)

    @staticmethod
    def commit(
        tasks: Sequence[IndexTask], built: Sequence[Built], directory: Path, _runs: object, _config: object
    ) -> tuple[FileMark, ...]:
        """Move the files into ``directory`` under names of this moment, durably.

        IndexdError for a file that does not hold here what its task wrote: executors may see another file system.
        """
        disk = Disk()
        marks: list[FileMark] = []
        for task, done in zip(tasks, built, strict=True):
            name = next_index_name(time.time(), marks[-1].name if marks else None)
            disk.rename(done.directory / _NAME, directory / name)
            with disk.open_read(directory / name) as file:
                stamp = file.stamp()
                if stamp.size != task.layout.file_size or file.pread(HEADER_SIZE, 0) != done.mark.pack():
                    raise IndexdError(f"{directory / name} does not hold what was written as {done.directory / _NAME}")
            marks.append(FileMark(name, done.mark, task.is_full, stamp.mtime_ns))
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
class QueuesTask:
    """A bucket of queues that is built below ``directory``, which is not there yet or empty; ``rows`` in it.

    A queue lies in one bucket of every run. So a bucket's rows in log order make its files, marks and counts, whatever
    stands in the others. ``queues_max`` counts queues of all buckets, by their first message: those that have files
    begin before any that has none, so a bucket's own store is closed once it has as many as belong to it, ``queues``.
    """

    directory: Path
    bucket: int
    queues: int
    file_size: int
    rows: int

    @staticmethod
    def plan(runs: Sequence[Run], config: Config, directory: Path) -> list[QueuesTask]:
        """A task a bucket that holds rows, each below its own name in ``directory``; ``runs`` in log order."""
        first = first_queues(runs, config.outputs.queues_max)
        known = Counter(bucket_of(topic.encode(), queue_id) for topic, queue_id in first)
        rows = [sum(run.units[bucket] for run in runs) for bucket in range(BUCKETS)]
        return [
            QueuesTask(
                directory / f"queues-{bucket:04d}", bucket, known[bucket], config.store.consume_queue_file_size, count
            )
            for bucket, count in enumerate(rows)
            if count
        ]

    def work(self, runs: Sequence[Run]) -> Built:
        """Build the bucket from all ``runs``, durably. Raises DiskError."""
        disk = Disk()
        disk.make_dir(self.directory)
        store = ConsumeQueueStore(disk, self.directory, self.file_size, self.queues)
        try:
            for run in runs:
                for batch in queue_batches(run, self.bucket):
                    store.build(batch)
            mark = store.mark()
        finally:
            store.close()
        sync_files(disk, mark.unsynced)
        sync_dirs(disk, mark.directories)
        return Built(self.directory, (mark.held.queues, store.counters))

    @staticmethod
    def commit(
        tasks: Sequence[QueuesTask],
        built: Sequence[Built],
        directory: Path,
        runs: Sequence[Run],
        config: Config,
    ) -> tuple[QueuesMark, Counter[str]]:
        """Move the queues that the tasks have made into ``directory``, durably: in order of appearance.

        IndexdError where one is not what was planned.
        """
        disk, topics = Disk(), set[Path]()
        marks: dict[QueueName, QueueMark] = {}
        for task, done in zip(tasks, built, strict=True):
            mine, counted = done.mark
            if counted["messages"] != task.rows or len(mine) != task.queues:
                raise IndexdError(
                    f"{done.directory} holds {len(mine)} queues of {counted['messages']} rows, "
                    f"planned were {task.queues} of {task.rows}"
                )
            for mark in mine:
                place = queue_directory(directory, mark.topic, mark.queue_id)
                disk.make_dir(place.parent, durable=False)
                topics.add(place.parent)
                disk.rename(queue_directory(done.directory, mark.topic, mark.queue_id), place)
                marks[mark.topic, mark.queue_id] = mark
        sync_dirs(disk, sorted(topics))
        queues_max = config.outputs.queues_max
        counters = sum((done.mark[1] for done in built), Counter[str]())
        first = first_queues(runs, queues_max)
        limit = queues_max if len(first) == queues_max and counters["left_out"] else None
        return QueuesMark(config.store.consume_queue_file_size, tuple(marks[name] for name in first), limit), counters


def first_queues(runs: Sequence[Run], queues_max: int) -> list[QueueName]:
    """The queues that have files, at most ``queues_max``, in order of their first message over all runs."""
    found: dict[QueueName, None] = {}
    for topic, queue_id, _ in (seen for run in runs for seen in run.queues):
        # Two names in the log may be one: bytes that are no UTF-8 read as replacement characters.
        name = decode_utf8(topic)
        if len(found) < queues_max and is_topic_name(name):
            found.setdefault((name, queue_id))
    return list(found)


@dataclass(frozen=True, slots=True)
class SparseTask:
    """The sparse indexes of a segment, built below ``directory``, from its runs ``[first_run, last_run)``.

    Nothing is carried from one segment of the commitlog to the next, but that the next one's first message seals it: of
    all pairs the newest one alone stays open, and its task says how building goes on. ``messages`` in the segment.
    ``grows``: it is the log's newest with messages, and is not sealed.
    """

    directory: Path
    first_run: int
    last_run: int
    segment_size: int
    interval: int
    messages: int
    grows: bool

    @staticmethod
    def plan(runs: Sequence[Run], config: Config, directory: Path) -> list[SparseTask]:
        """A task a segment with messages, each below its own name in ``directory``; ``runs`` in log order."""
        size, interval = config.store.segment_size, config.outputs.sparse_interval
        tasks: list[SparseTask] = []
        used = [number for number, run in enumerate(runs) if run.messages]
        for segment, group in groupby(used, key=lambda number: runs[number].split.begin // size):
            numbers = list(group)
            place, messages = directory / f"sparse-{segment:06d}", sum(runs[number].messages for number in numbers)
            grows = numbers[-1] == used[-1]
            tasks.append(SparseTask(place, numbers[0], numbers[-1] + 1, size, interval, messages, grows))
        return tasks

    def work(self, runs: Sequence[Run]) -> Built:
        """Build the pair of files from the segment's part of ``runs``, all in log order, durably. Raises DiskError."""
        disk = Disk()
        disk.make_dir(self.directory)
        service = SparseService(disk, self.directory, self.segment_size, self.interval)
        try:
            for run in runs[self.first_run : self.last_run]:
                for batch in log_batches(run):
                    service.build(batch)
            if not self.grows:
                service.seal()
            mark = service.mark()
            sync_files(disk, mark.unsynced)
            sync_dirs(disk, mark.directories)
        finally:
            service.close()
        return Built(self.directory, mark.held)

    @staticmethod
    def commit(
        tasks: Sequence[SparseTask], built: Sequence[Built], directory: Path, _runs: object, config: Config
    ) -> SparseMark:
        """Move what the tasks have made into ``directory``, durably; IndexdError where one is not what was planned."""
        disk, segments = Disk(), list[SegmentMark]()
        for task, done in zip(tasks, built, strict=True):
            messages = sum(segment.messages for segment in done.mark.segments)
            if messages != task.messages or (done.mark.active is not None) != task.grows:
                raise IndexdError(f"{done.directory} holds {done.mark}; planned was {task}")
            segments += done.mark.segments
            for segment in done.mark.segments:
                for name in (index_name(segment.base), time_index_name(segment.base)):
                    disk.rename(done.directory / name, directory / name)
        last = built[-1].mark if built else SparseMark(0)
        return SparseMark(config.outputs.sparse_interval, last.phy_offset, tuple(segments), last.active)


Task = IndexTask | QueuesTask | SparseTask
