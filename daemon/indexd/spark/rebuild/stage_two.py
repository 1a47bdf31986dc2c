"""Stage two of a rebuild: tasks that build index files, whole ConsumeQueues and sparse indexes from the runs.

Each kind of task says how it is planned, worked on in a worker, and how the driver moves what its tasks made to its
place, once it is what was planned. Tasks use the daemon's own builders, so their files are those of one process.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np

from indexd.commitlog.batcher import DispatchBatch
from indexd.commitlog.decoder import decode_utf8
from indexd.config import Config
from indexd.consumequeue.format import QueueMark, QueuesMark, is_topic_name, queue_directory
from indexd.consumequeue.store import ConsumeQueueStore, QueueCounters
from indexd.errors import IndexdError
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.index.file import IndexFile, Put
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, Flavour, IndexHeader, IndexLayout
from indexd.spark.rebuild.runs import BUCKETS, Run, bucket_of, entry_of, index_batches, log_batches, queue_batches
from indexd.sparse.format import SegmentMark, SparseMark, index_name, time_index_name
from indexd.sparse.service import SparseService
from indexd.storage.disk import Disk, DiskFile
from indexd.storage.names import next_index_name

# What an index file is called by the task that builds it.
_NAME = "index"
# Fewer rows, or messages, than this are not worth a task of their own.
_ROWS_PER_TASK = 1 << 20
_MESSAGES_PER_TASK = 1 << 20
# What a row of each kind costs a task, about, in bytes of run.
_ENTRY_COST, _UNIT_COST, _SPARSE_COST = 40, 40, 16

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

    @property
    def cost(self) -> int:
        """The slots are written whole, however few entries there are."""
        return self.entries * _ENTRY_COST + self.layout.hash_slot_num * 4

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
        if put is Put.FULL:
            return True
        if put is Put.BUFFER_FULL:
            file.write_entries()
    return False


def _ends_with_entry(runs: Sequence[Run]) -> bool:
    return next(run.ends_with_entry for run in reversed(runs) if run.messages)


@dataclass(frozen=True, slots=True)
class QueuesTask:
    """Buckets of queues that are built below ``directory``, which is not there yet or empty; ``rows`` in all of them.

    A queue lies in one bucket of every run. So a bucket's rows in log order make its files, marks and counts, whatever
    stands in the others. ``queues_max`` counts queues of all buckets, by their first message: those that have files
    begin before any that has none, so a bucket's own store is closed once it has as many as belong to it, ``queues``.
    """

    directory: Path
    buckets: tuple[int, ...]
    queues: tuple[int, ...]
    file_size: int
    rows: int

    @property
    def cost(self) -> int:
        """In bytes of run, about."""
        return self.rows * _UNIT_COST

    @staticmethod
    def plan(runs: Sequence[Run], config: Config, directory: Path) -> list[QueuesTask]:
        """Tasks for all buckets that hold rows, each below its own name in ``directory``; ``runs`` in log order."""
        known = [0] * BUCKETS
        for topic, queue_id in first_queues(runs, config.outputs.queues_max):
            known[bucket_of(topic.encode(), queue_id)] += 1
        rows = np.array([run.units for run in runs], dtype=np.int64).reshape(len(runs), BUCKETS).sum(axis=0).tolist()
        return [
            QueuesTask(
                directory / f"queues-{buckets[0]:04d}",
                tuple(buckets),
                tuple(known[bucket] for bucket in buckets),
                config.store.consume_queue_file_size,
                sum(rows[bucket] for bucket in buckets),
            )
            for buckets in _grouped(rows)
        ]

    def work(self, runs: Sequence[Run]) -> Built:
        """Build the buckets of a task from all ``runs``, durably. Raises DiskError."""
        disk = Disk()
        disk.make_dir(self.directory)
        marks: list[QueueMark] = []
        counters = QueueCounters()
        files: list[DiskFile | Path] = []
        directories: dict[Path, None] = {}
        for bucket, queues in zip(self.buckets, self.queues, strict=True):
            store = ConsumeQueueStore(disk, self.directory, self.file_size, queues)
            try:
                for run in runs:
                    for batch in queue_batches(run, bucket):
                        store.build(batch)
                mark = store.mark()
            finally:
                store.close()
            files += mark.unsynced
            directories |= dict.fromkeys(mark.directories)
            marks += mark.held.queues
            counters = _sum([counters, store.counters])
        # All buckets' together: disks sync many at a time.
        sync_files(disk, files)
        sync_dirs(disk, list(directories))
        return Built(self.directory, (tuple(marks), counters))

    @staticmethod
    def commit(
        tasks: Sequence[QueuesTask],
        built: Sequence[Built],
        directory: Path,
        runs: Sequence[Run],
        config: Config,
    ) -> tuple[QueuesMark, QueueCounters]:
        """Move the queues that the tasks have made into ``directory``, durably: in order of appearance.

        IndexdError where one is not what was planned.
        """
        disk, topics = Disk(), dict[str, None]()
        marks: dict[QueueName, QueueMark] = {}
        for task, done in zip(tasks, built, strict=True):
            mine, counted = done.mark
            if counted.messages != task.rows or len(mine) != sum(task.queues):
                raise IndexdError(
                    f"{done.directory} holds {len(mine)} queues of {counted.messages} rows, "
                    f"planned were {sum(task.queues)} of {task.rows}"
                )
            for mark in mine:
                if mark.topic not in topics:
                    disk.make_dir(directory / mark.topic, durable=False)
                    topics[mark.topic] = None
                source = queue_directory(done.directory, mark.topic, mark.queue_id)
                disk.rename(source, queue_directory(directory, mark.topic, mark.queue_id))
                marks[mark.topic, mark.queue_id] = mark
        sync_dirs(disk, [directory / topic for topic in topics])
        queues_max = config.outputs.queues_max
        first, counters = first_queues(runs, queues_max), _sum([done.mark[1] for done in built])
        if marks.keys() != set(first):
            raise IndexdError(f"{len(marks)} queues were built, and not the {len(first)} that the runs begin with")
        limit = queues_max if len(first) == queues_max and counters.left_out else None
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


def _grouped(rows: Sequence[int]) -> list[list[int]]:
    # Buckets that hold rows, neighbours together until they are worth a task.
    groups: list[list[int]] = []
    room = 0
    for bucket, count in enumerate(rows):
        if not count:
            continue
        if room <= 0:
            groups.append([])
            room = _ROWS_PER_TASK
        groups[-1].append(bucket)
        room -= count
    return groups


def _sum(counters: Sequence[QueueCounters]) -> QueueCounters:
    return QueueCounters(*(sum(column) for column in zip(*map(astuple, counters), strict=True)))


@dataclass(frozen=True, slots=True)
class SparseTask:
    """Sparse indexes of whole segments, built below ``directory``, from runs ``[first_run, last_run)``.

    Nothing is carried from one segment of the commitlog to the next, but that the next one's first message seals it: of
    all pairs the newest one alone stays open, and its task says how building goes on. ``messages`` in all of them.
    ``grows``: the last one is the log's newest with messages, and is not sealed.
    """

    directory: Path
    first_run: int
    last_run: int
    segment_size: int
    interval: int
    messages: int
    grows: bool

    @property
    def cost(self) -> int:
        """In bytes of run, about."""
        return self.messages * _SPARSE_COST

    @staticmethod
    def plan(runs: Sequence[Run], config: Config, directory: Path) -> list[SparseTask]:
        """Tasks for all segments with messages, each below its own name in ``directory``; ``runs`` in log order."""
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

    def work(self, runs: Sequence[Run]) -> Built:
        """Build the segments of a task from its part of ``runs``, all in log order, durably. Raises DiskError."""
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
