"""Rebuilds a whole data directory from a commitlog by tasks: the same files as the one-process rebuild makes.

Stage one reads each split of the log once and writes a run. The runs are chained; their sums say which entries each
index file holds. Stage two builds each index file, queue and sparse index from the runs, with the builders that the
daemon has. The driver moves what the tasks made to its place, writes checkpoint, frontier and manifest, and renames it.

Everything is made beside the target, until it is renamed at the end::

    OUT.building/lock        as that of a data directory: one rebuild at a time
    OUT.building/job         a word that executors have to find there
    OUT.building/runs/       what stage one makes; kept when a job fails, for one that resumes
    OUT.building/attempts/   what stage two makes, a directory an attempt
    OUT.building/...         a data directory, once it is committed; manifest.json is its last file
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from indexd import __version__
from indexd.commitlog.evidence import FrameReader
from indexd.commitlog.segments import list_segments
from indexd.commitlog.tail import NEVER, UNREADABLE_TIMESTAMP, LogLimit, Stand, ask_what_stands
from indexd.config import Config
from indexd.config.load import check_outside
from indexd.errors import CorruptDataError, DiskError, DisturbedError, IndexdError, UnsafeStoreError
from indexd.flush.frontier import Frontier
from indexd.flush.pipeline import write_down
from indexd.index.format import FileMark
from indexd.recovery.open import check_store, frame_size_max, fresh_frontier
from indexd.recovery.rebuild import Rebuilt, check_target
from indexd.spark.rebuild import stage_one
from indexd.spark.rebuild.runs import MAGIC, Run
from indexd.spark.rebuild.stage_one import (
    SplitTask,
    StageOne,
    chain,
    evidence_of,
    left_runs,
    stand_behind,
    uncovered_of,
)
from indexd.spark.rebuild.stage_two import Built, IndexTask, QueuesResult, QueuesTask, SparseTask, Task
from indexd.spark.splits import Split, plan_splits
from indexd.sparse.format import SparseMark
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles, building_of

MANIFEST = "manifest.json"


class JobDirectory:
    """One rebuild's, from ``open`` to ``finish`` or ``abandon``, locked between. Raises DiskError, BusyError."""

    def __init__(self, disk: Disk, out: Path) -> None:
        self._disk = disk
        self.out = out.resolve()
        self.path = building_of(out)
        self.files = DataFiles(self.path)
        self.runs = self.path / "runs"
        self.attempts = self.path / "attempts"
        self.token_file = self.path / "job"
        self.token = uuid.uuid4().hex
        self._lock = DirectoryLock(self.files.lock)

    def __repr__(self) -> str:
        return f"JobDirectory({self.path})"

    def open(self, *, resume: bool) -> None:
        """Take the lock and leave nothing of an earlier rebuild, but its runs to one that resumes."""
        self._disk.make_dir(self.path)
        self._lock.acquire()
        try:
            kept = {self.files.lock, self.runs} if resume else {self.files.lock}
            for path in sorted(self.path.iterdir()):
                if path not in kept:
                    self._remove(path)
            for directory in (self.runs, self.attempts):
                self._disk.make_dir(directory)
            self._disk.write_atomically(self.token_file, self.token.encode())
        except BaseException:
            self._lock.release()
            raise

    def finish(self, manifest: dict[str, Any]) -> None:
        """All is committed and durable below ``path``: write the manifest, and give the directory its name."""
        for path in (self.runs, self.attempts, self.token_file):
            self._remove(path)
        self._disk.write_atomically(self.path / MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")
        self._disk.unlink(self.files.lock)
        if self._disk.exists(self.out):
            self._disk.remove_dir(self.out)
        self._disk.rename(self.path, self.out)
        self._disk.sync_dir(self.out.parent)
        self._lock.release()

    def abandon(self) -> bool:
        """The job failed: leave what can be resumed and nothing else. What cannot be removed stays for the next one.

        Whether there is anything to be resumed.
        """
        kept = False
        try:
            # First, so that a task that starts only now ends at once.
            self._disk.unlink(self.token_file)
            kept = any(left_runs(self._disk, self.runs))
            if kept:
                self._remove(self.attempts)
            else:
                self._disk.remove_tree(self.path)
        except (DiskError, OSError):
            pass
        finally:
            self._lock.release()
        return kept

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            self._disk.remove_tree(path)
        else:
            self._disk.unlink(path)


RunTasks = Callable[..., list[Any]]
"""tasks.run_tasks on a session, or anything that calls ``work`` for each item and returns the results in order."""
# Splits that did not chain are read again one after the other; a log that changes so often is not to be rebuilt now.
_MENDS_MAX = 1000


@dataclass(frozen=True, slots=True)
class SparkRebuilt:
    """What a rebuild came to; how many tasks it took, and how many of the runs had been left by an earlier one."""

    rebuilt: Rebuilt
    tasks: int
    resumed: int


def rebuild(
    config: Config,
    disk: Disk,
    out: Path,
    run_tasks: RunTasks,
    on_progress: Callable[[int, int], None],
    *,
    slots: int,
    resume: bool = False,
    log_limit: LogLimit | None = None,
) -> SparkRebuilt:
    """Build ``out`` from the store, which ``disk`` reads; ``on_progress`` gets (bytes done, bytes in all).

    ``log_limit`` is asked about suspects, and about unreadable bytes, by this process alone.
    ``slots``: how many tasks run at a time. When it fails, finished runs are kept for one with ``resume``; that takes
    over those that were made with the same configuration of a log that has not changed.
    """
    store = check_store(config)
    check_outside(config, out, "--out")
    check_target(Disk(), out)
    job = JobDirectory(Disk(), out)
    job.open(resume=resume)
    try:
        started = time.monotonic()
        found = _Rebuild(config, disk, store, job, run_tasks, on_progress, log_limit).run(slots, resume=resume)
        seconds = time.monotonic() - started
    except BaseException as error:
        if job.abandon() and isinstance(error, IndexdError):
            error.hint = "; ".join(filter(None, [error.hint, "--resume goes on with what is finished"]))
        raise
    return replace(found, rebuilt=replace(found.rebuilt, seconds=seconds))


class _Rebuild:
    """One rebuild; half of the log's bytes count as done when they are read, and half when they are built from."""

    def __init__(
        self,
        config: Config,
        disk: Disk,
        store: Path,
        job: JobDirectory,
        run_tasks: RunTasks,
        on_progress: Callable[[int, int], None],
        log_limit: LogLimit | None,
    ) -> None:
        self._log_limit = log_limit
        # Where the broker says that its log ends, once it was asked.
        self._vouched: int | None = None
        self._config = config
        self._disk = disk
        self._store = store
        self._job = job
        self._run_tasks = run_tasks
        self._on_progress = on_progress
        self._tasks = 0
        self._size = 0

    def run(self, slots: int, *, resume: bool) -> SparkRebuilt:
        config, store = self._config, self._config.store
        begin = list_segments(self._disk, store.commit_log_directories, store.segment_size).min_offset or 0
        splits = plan_splits(self._disk, config, size=config.spark.split_size or None, slots=slots)
        left = dict(left_runs(Disk(), self._job.runs)) if resume else {}
        self._size = sum(split.size for split in splits)
        runs = self._stage_one(splits, left, begin)
        index, queues, sparse = self._stage_two(runs)
        ends = [run.phy_offset for run in runs if run.phy_offset >= 0]
        stand = stand_behind(runs, store.segment_size)
        if self._vouched is not None:
            stand = Stand(_last_timestamp(runs) if stand.newest == UNREADABLE_TIMESTAMP else stand.newest)
        frontier = replace(
            fresh_frontier(config, self._store).with_outputs(
                index=index, consumeQueue=queues.mark if queues is not None else None, sparse=sparse
            ),
            begin_offset=begin,
            phy_offset=ends[-1] if ends else begin,
            store_timestamp=next((run.store_timestamp for run in reversed(runs) if run.store_timestamp), 0),
            messages=sum(run.messages for run in runs),
            uncovered=uncovered_of(runs, stand),
            newest_timestamp=stand.newest if stand.newest != NEVER else None,
            stale_head=self._stale_head(ends[-1] if ends else begin),
            evidence=evidence_of(runs, store.segment_size),
        )
        write_down(Disk(), self._job.files, frontier)
        rebuilt = Rebuilt(
            messages=frontier.messages,
            entries=sum(run.entries for run in runs),
            bytes=frontier.phy_offset - begin,
            seconds=0.0,
            files=len(index),
            begin_offset=begin,
            phy_offset=frontier.phy_offset,
            skipped_bytes=sum(gap.end - gap.begin for gap in frontier.uncovered if not gap.is_unproven),
            unproven_bytes=sum(gap.end - gap.begin for gap in frontier.uncovered if gap.is_unproven),
            left_out_messages=queues.counters.without_unit if queues is not None else 0,
            unreadable=runs[-1].unreadable if runs else None,
        )
        self._job.finish(_manifest(frontier, runs, self._tasks))
        return SparkRebuilt(rebuilt, self._tasks, sum(run.path in left.values() for run in runs))

    def _stage_one(self, splits: Sequence[Split], left: dict[Split, Path], begin: int) -> list[Run]:
        # Runs that chain; what does not is read again.
        config, job = self._config, self._job
        segment_size, end = config.store.segment_size, splits[-1].end if splits else begin
        identity = _identity(config, self._store)
        work = partial(stage_one.work, StageOne(config, job.runs, job.token_file, job.token, identity))
        tasks = [SplitTask(split, left.get(split)) for split in splits]
        found = self._in_tasks(work, tasks, [split.size for split in splits], 0, self._size // 2)
        for _ in range(_MENDS_MAX):
            problem, runs, missing = None, list[Run](), None
            try:
                runs, missing = chain(found, begin, end, segment_size)
            except CorruptDataError as error:
                problem = error
            if missing is None and self._vouched is None and (problem or _is_doubtful(runs, segment_size)):
                self._vouched = None if self._log_limit is None else self._log_limit.ask(end)
                if self._vouched is not None and self._vouched < end:
                    end = self._vouched
                    found = [item for item in found if item.split.end <= end]
                    continue
            if problem is not None:
                raise problem
            if missing is None:
                _check_seen(runs)
                return runs
            found += self._in_tasks(work, [SplitTask(missing)], [missing.size], self._size // 2, self._size // 2)
        raise DisturbedError("the log changes faster than it can be read", "run the rebuild again")

    def _stale_head(self, end: int) -> bytes | None:
        if self._log_limit is None or self._vouched != end:
            return None
        store = self._config.store
        log = list_segments(self._disk, store.commit_log_directories, store.segment_size)
        with FrameReader(self._disk, log) as frames:
            return ask_what_stands(self._log_limit, frames, end)

    def _stage_two(self, runs: Sequence[Run]) -> tuple[tuple[FileMark, ...], QueuesResult | None, SparseMark | None]:
        config, job, disk = self._config, self._job, Disk()
        index = IndexTask.plan(runs, config, job.attempts)
        queues = QueuesTask.plan(runs, config, job.attempts) if config.outputs.consume_queue else []
        sparse = SparseTask.plan(runs, config, job.attempts) if config.outputs.sparse else []
        built = self._largest_first(runs, [*index, *queues, *sparse])
        queues_at, sparse_at = len(index), len(index) + len(queues)
        index_built, queues_built, sparse_built = built[:queues_at], built[queues_at:sparse_at], built[sparse_at:]
        # First whether all is what was planned; then it is moved.
        IndexTask.check(index, index_built)
        queues_done = sparse_done = None
        if config.outputs.consume_queue:
            queues_done = QueuesTask.collect(runs, queues, queues_built, config)
        if config.outputs.sparse:
            sparse_done = SparseTask.collect(sparse, sparse_built, config)
        mark = IndexTask.commit(disk, index, index_built, job.files.index)
        if config.outputs.consume_queue:
            QueuesTask.commit(disk, queues_built, job.files.consumequeue)
        if config.outputs.sparse:
            SparseTask.commit(disk, sparse_built, job.files.sparse)
        return mark, queues_done, sparse_done

    def _largest_first(self, runs: Sequence[Run], tasks: Sequence[Task]) -> list[Any]:
        # None is left when all others are done. Results in the order of ``tasks``.
        order = sorted(range(len(tasks)), key=lambda number: -tasks[number].cost)
        work = partial(_build, tuple(run.slim() for run in runs))
        half = self._size // 2
        ordered = [tasks[number] for number in order]
        built = self._in_tasks(work, ordered, [task.cost for task in ordered], half, self._size - half)
        found = dict(zip(order, built, strict=True))
        return [found[number] for number in range(len(tasks))]

    def _in_tasks(
        self, work: Callable[[Any], Any], items: Sequence[Any], sizes: Sequence[int], done: int, share: int
    ) -> list[Any]:
        # ``share`` of all bytes count as done behind it, ``done`` of them before.
        self._tasks += len(items)

        def tell(now: int, total: int) -> None:
            self._on_progress(done + (share * now // total if total else share), self._size)

        return self._run_tasks(work, items, sizes=sizes, progress=tell)


def _last_timestamp(runs: Sequence[Run]) -> int:
    return next((run.last_timestamp for run in reversed(runs) if run.first_offset is not None), NEVER)


def _is_doubtful(runs: Sequence[Run], segment_size: int) -> bool:
    # Whether the log ends in what the broker alone knows.
    is_unproven = stand_behind(runs, segment_size).unproven_from is not None
    return is_unproven or (bool(runs) and runs[-1].unreadable is not None)


def _build(runs: Sequence[Run], task: Task) -> Built:
    """The work of stage two, below a name that no other attempt has."""
    directory = task.directory.with_name(f"{task.directory.name}.{uuid.uuid4().hex[:12]}")
    return replace(task, directory=directory).work(runs)


def _check_seen(runs: Sequence[Run]) -> None:
    disk = Disk()
    for run in runs:
        if not disk.exists(run.path) or disk.stamp(run.path).size != run.size:
            raise UnsafeStoreError(
                f"{run.path}, which an executor wrote, is not there for the driver",
                "give an --out on a file system that the driver and all executors share",
            )


def _identity(config: Config, store: Path) -> str:
    """What a run depends on besides its split: runs of another identity are not taken over."""
    flavour, outputs, reader = config.index.flavour, config.outputs, config.reader
    facts = (
        MAGIC.decode(),
        __version__,
        str(store),
        [str(path.resolve()) for path in config.store.commit_log_directories],
        config.store.segment_size,
        flavour,
        (outputs.consume_queue, outputs.sparse),
        (reader.verify_crc, frame_size_max(config)),
        config.store.delay_levels_ms,
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _manifest(frontier: Frontier, runs: Sequence[Run], tasks: int) -> dict[str, Any]:
    """What was there when the directory was renamed: the last file that is written, for people and for scripts."""
    return {
        "format": 1,
        "version": __version__,
        "engine": "spark",
        "beginOffset": frontier.begin_offset,
        "phyOffset": frontier.phy_offset,
        "messages": frontier.messages,
        "splits": len(runs),
        "tasks": tasks,
        "index": [{"name": mark.name, "entries": mark.header.entries} for mark in frontier.index],
        "queues": None if frontier.queues is None else len(frontier.queues),
        "sparseSegments": None if frontier.sparse is None else len(frontier.sparse.segments),
    }
