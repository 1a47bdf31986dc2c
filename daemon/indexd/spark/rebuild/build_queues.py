"""Stage two of a rebuild, ConsumeQueues: tasks that put the rows of whole queues, as one process does.

A queue lies in one bucket of every run. So a bucket's rows in log order make its files, marks and counts, whatever
stands in the others. ``queues_max`` counts queues of all buckets, by their first message: those that have files begin
before any that has none, so a bucket's own store is closed once it has as many as belong to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np

from indexd.commitlog.decoder import decode_utf8
from indexd.config import Config
from indexd.consumequeue.format import QueueMark, QueuesMark, is_topic_name, queue_directory
from indexd.consumequeue.store import ConsumeQueueStore, QueueCounters
from indexd.errors import DisturbedError, IndexdError
from indexd.flush.pipeline import sync_dirs, sync_files
from indexd.spark.rebuild.runs import BUCKETS, Run, RunReader, bucket_of
from indexd.storage.disk import Disk, DiskFile

# Fewer rows than this are not worth a task of their own.
_ROWS_PER_TASK = 1 << 20

QueueName = tuple[str, int]


@dataclass(frozen=True, slots=True)
class QueuesTask:
    """Buckets that are built below ``directory``, which is not there yet or empty; ``rows`` in all of them.

    ``queues``: how many queues of each bucket have files.
    """

    directory: Path
    buckets: tuple[int, ...]
    queues: tuple[int, ...]
    file_size: int
    rows: int


@dataclass(frozen=True, slots=True)
class QueuesBuilt:
    """What a task has made durable below ``directory``: TOPIC/QUEUE/FILE of each mark; ``counters`` of its rows."""

    directory: Path
    marks: tuple[QueueMark, ...]
    counters: QueueCounters


@dataclass(frozen=True, slots=True)
class QueuesResult:
    """What all tasks come to: for the frontier, and in numbers."""

    mark: QueuesMark
    counters: QueueCounters


def plan(runs: Sequence[Run], config: Config, directory: Path) -> list[QueuesTask]:
    """Tasks for all buckets that hold rows, each below its own name in ``directory``; ``runs`` in log order."""
    check_runs(runs)
    known = [0] * BUCKETS
    for topic, queue_id in first_queues(runs, config.outputs.queues_max):
        known[bucket_of(topic.encode(), queue_id)] += 1
    starts = np.array([run.buckets for run in runs], dtype=np.int64).reshape(len(runs), BUCKETS + 1)
    rows = np.diff(starts, axis=1).sum(axis=0).tolist()
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


def check_runs(runs: Sequence[Run]) -> None:
    """DisturbedError for a stretch that expired while it was read: everything before it would have to go again."""
    for run in runs:
        for gap in run.skipped:
            if gap.is_expired:
                raise DisturbedError(f"the log up to {gap.end} expired while it was read")


def first_queues(runs: Sequence[Run], queues_max: int) -> list[QueueName]:
    """The queues that have files, at most ``queues_max``, in order of their first message over all runs."""
    found: dict[QueueName, None] = {}
    topics: dict[bytes, str] = {}
    for run in runs:
        topics |= {raw: decode_utf8(raw) for raw in run.topics if raw not in topics}
        for seen in run.queues:
            if len(found) == queues_max:
                return list(found)
            # Two names in the log may be one: bytes that are no UTF-8 read as replacement characters.
            topic = topics[seen.topic]
            if is_topic_name(topic):
                found.setdefault((topic, seen.queue_id))
    return list(found)


def work(runs: Sequence[Run], task: QueuesTask) -> QueuesBuilt:
    """Build the buckets of a task from all ``runs``, durably. Raises DiskError, and what reading a run does."""
    disk = Disk()
    disk.make_dir(task.directory)
    marks: list[QueueMark] = []
    counters = QueueCounters()
    files: list[DiskFile | Path] = []
    directories: dict[Path, None] = {}
    for bucket, queues in zip(task.buckets, task.queues, strict=True):
        store = ConsumeQueueStore(disk, task.directory, task.file_size, queues)
        try:
            for run in runs:
                with RunReader(disk, run) as reader:
                    for batch in reader.queue_batches(bucket):
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
    return QueuesBuilt(task.directory, tuple(marks), counters)


def collect(
    runs: Sequence[Run], tasks: Sequence[QueuesTask], built: Sequence[QueuesBuilt], config: Config
) -> QueuesResult:
    """What the tasks come to together, queues in order of appearance; IndexdError where one is not what was planned."""
    marks: dict[QueueName, QueueMark] = {}
    for task, done in zip(tasks, built, strict=True):
        mine = {(mark.topic, mark.queue_id): mark for mark in done.marks}
        if done.counters.messages != task.rows or len(mine) != sum(task.queues) or mine.keys() & marks.keys():
            raise IndexdError(
                f"{done.directory} holds {len(mine)} queues of {done.counters.messages} rows, "
                f"planned were {sum(task.queues)} of {task.rows}"
            )
        marks |= mine
    queues_max = config.outputs.queues_max
    first = first_queues(runs, queues_max)
    if marks.keys() != set(first):
        raise IndexdError(f"{len(marks)} queues were built, and not the {len(first)} that the runs begin with")
    # What enters no queue may not be in the runs.
    counters = replace(_sum([done.counters for done in built]), messages=sum(run.messages for run in runs))
    limit = queues_max if len(first) == queues_max and counters.left_out else None
    mark = QueuesMark(config.store.consume_queue_file_size, tuple(marks[name] for name in first), limit)
    return QueuesResult(mark, counters)


def commit(disk: Disk, built: Sequence[QueuesBuilt], directory: Path) -> None:
    """Move the queues that the tasks have made into ``directory``, durably; topics have queues of several tasks."""
    disk.make_dir(directory)
    topics: dict[str, None] = {}
    for done in built:
        for mark in done.marks:
            if mark.topic not in topics:
                disk.make_dir(directory / mark.topic, durable=False)
                topics[mark.topic] = None
            source = queue_directory(done.directory, mark.topic, mark.queue_id)
            disk.rename(source, queue_directory(directory, mark.topic, mark.queue_id))
    sync_dirs(disk, [directory / topic for topic in topics])
    disk.sync_dir(directory)


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
