"""Rebuilds a whole data directory from a commitlog by tasks: the same files as the one-process rebuild makes.

Stage one reads each split of the log once and writes a run. The runs are chained: each has to begin where the one
before it ended, as one process would have read the log; where one does not, the log has changed meanwhile. Their sums
say which entries each index file holds. In stage two each task builds from the runs an index file, some of the queues,
or the sparse indexes, with the daemon's own builders: its files are those of one process. The driver moves what tasks
made to its place, writes checkpoint, frontier and manifest, and renames it.

Everything is made beside the target, until it is renamed at the end; what a job that failed has left, the next one
replaces::

    OUT.building/lock        as that of a data directory: one rebuild at a time
    OUT.building/runs/       what stage one makes
    OUT.building/attempts/   what stage two makes, a directory an attempt
    OUT.building/...         a data directory, once it is committed; manifest.json is its last file
"""

from __future__ import annotations

import json
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from indexd import __version__
from indexd.commitlog.batcher import AT_FIRST, NEVER, UNREADABLE_TIMESTAMP, TailState
from indexd.commitlog.format import STAMPED_SIZE
from indexd.commitlog.lookup import Evidence, FrameReader, thinned
from indexd.commitlog.segments import NOBODY, LogLimit, list_segments
from indexd.config import Config
from indexd.consumequeue.store import ConsumeQueueStore
from indexd.errors import CorruptDataError, DiskError, DisturbedError, IndexdError, UnsafeStoreError
from indexd.flush.frontier import DOUBTED, UNPROVEN, Frontier, Uncovered, add_uncovered
from indexd.flush.pipeline import OUTPUTS, sync_dirs, sync_files, write_down
from indexd.index.file import IndexFile
from indexd.index.format import FLAVOURS, HEADER_SIZE, FileMark, IndexHeader, IndexLayout
from indexd.index.kernel import BUFFER_FULL, FILE_FULL
from indexd.output import Output
from indexd.recovery.open import check_store, fresh_frontier
from indexd.recovery.rebuild import Rebuilt, built_beside
from indexd.spark.rebuild.runs import GROUPS, Run, batches_of, entry_of, index_batches, write_run
from indexd.spark.splits import Split, plan_splits
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles, next_index_name

MANIFEST = "manifest.json"
# As the daemon has it: the first frame of so many segments is kept, however close they lie.
_SEGMENTS_NOTED = 64
# Between two looks whether the broker has answered.
_PAUSE = 0.002
RunTasks = Callable[..., list[Any]]
"""tasks.run_tasks on a session, or anything that calls ``work`` for each item and returns the results in order."""


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
                first=number * room,
                entries=min(room, entries - number * room),
                is_full=number < files - 1,
            )
            for number in range(files)
        ]

    def work(self, config: Config, runs: Sequence[Run]) -> Built:
        """Build a file from ``runs``, all of them in log order, durably. Raises DiskError."""
        disk, previous, flavour = Disk(), None, FLAVOURS[config.index.flavour]
        disk.make_dir(self.directory)
        begins = [0, *accumulate(run.entries for run in runs)]
        if self.first:
            # The run of an entry; where several begin with the same number, all but the last of them are empty.
            before = bisect_right(begins, self.first - 1) - 1
            phy_offset, store_timestamp = entry_of(runs[before], self.first - 1 - begins[before])
            previous = IndexHeader(end_timestamp=store_timestamp, end_phy_offset=phy_offset)
        with closing(
            IndexFile.create(
                disk, self.directory / _NAME, IndexLayout(config.index.hash_slot_num, config.index.index_num), previous
            )
        ) as file:
            for run, begin in zip(runs, begins, strict=False):
                first = self.first - begin
                for batch, row, key in index_batches(run, max(first, 0), first + self.entries):
                    while row < batch.rows:
                        status, row, key = file.put_batch(batch, flavour, row, key)  # noqa: PLW2901 - goes on there
                        if status == FILE_FULL:
                            break
                        if status == BUFFER_FULL:
                            file.write_entries()
            if file.header.entries != self.entries:
                raise IndexdError(f"{file.path} has {file.header.entries} entries, not {self.entries}")
            if self.is_full:
                file.publish()
                file.file.fsync()
            else:
                file.flush()
        return Built(self.directory, file.header, {})


def commit_index(
    tasks: Sequence[IndexTask], built: Sequence[Built], directory: Path, layout: IndexLayout
) -> tuple[FileMark, ...]:
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
            if stamp.size != layout.file_size or file.pread(HEADER_SIZE, 0) != done.mark.pack():
                raise IndexdError(f"{directory / name} does not hold what was written as {done.directory / _NAME}")
        marks.append(FileMark(name, done.mark, task.is_full, stamp.mtime_ns))
    disk.sync_dir(directory)
    return tuple(marks)


@dataclass(frozen=True, slots=True)
class OutputTask:
    """An output other than the key index, or its queues of these ``groups``, below ``directory``."""

    directory: Path
    kind: type[Output[Any]]
    groups: range | None = None

    @staticmethod
    def plan(kind: type[Output[Any]], directory: Path, parts: int) -> list[OutputTask]:
        """Tasks for all of it, each below its own name in ``directory``: of queues so many ``parts``, 64 at most."""
        if kind is not ConsumeQueueStore:
            return [OutputTask(directory / kind.name, kind)]
        bounds = sorted({GROUPS * number // parts for number in range(parts + 1)})
        return [
            OutputTask(directory / f"{kind.name}-{first:02d}-{end:02d}", kind, range(first, end))
            for first, end in pairwise(bounds)
        ]

    def work(self, config: Config, runs: Sequence[Run]) -> Built:
        """Build it from all ``runs``, in log order, durably. Raises DiskError."""
        disk = Disk()
        disk.make_dir(self.directory)
        with closing(self.kind.of(config, disk, self.directory)) as output:
            for run in runs:
                for batch in batches_of(run, groups=self.groups):
                    output.build(batch)
            mark = output.mark()
            sync_files(disk, mark.unsynced)
            sync_dirs(disk, mark.directories)
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


def chain(splits: Sequence[Split], found: Sequence[Run | CorruptDataError], begin: int) -> list[Run]:
    """The runs that one process would have made of the log from ``begin`` on, which these splits are, up to its end.

    Raises the error of a split that could not be read before that, and DisturbedError where a run does not end where
    the next one begins.
    """
    runs: list[Run] = []
    for split, run in zip(splits, found, strict=True):
        if split.begin != begin:
            raise DisturbedError(f"the log at {begin} changed while it was read", "run the rebuild again")
        if isinstance(run, CorruptDataError):
            raise run
        runs.append(run)
        if run.ends_log or run.unreadable is not None:
            break
        begin = run.next_offset
    return runs


def evidence_of(runs: Sequence[Run], segment_size: int) -> tuple[Evidence, ...]:
    """The evidence of all runs as that of one log, thinned as the daemon thins it."""
    points: list[Evidence] = []
    messages = 0
    for run in runs:
        points += (replace(point, messages=messages + point.messages) for point in run.evidence)
        messages += run.messages
    if not points:
        return ()
    newest = points[-1].phy_offset // segment_size * segment_size
    bases = range(newest - (_SEGMENTS_NOTED - 1) * segment_size, newest + 1, segment_size)
    return thinned(points, points[-1].phy_offset, bases)


def uncovered_of(runs: Sequence[Run], stand: TailState = AT_FIRST) -> tuple[Uncovered, ...]:
    """What was passed over and what nobody can prove, as one process writes it down."""
    gaps: tuple[Uncovered, ...] = ()
    for run in runs:
        for gap in run.skipped:
            gaps = add_uncovered(gaps, Uncovered(gap.begin, gap.end, gap.reason))
    if stand.unproven_from is not None:
        end = max(run.chunks[-1][0] for run in runs if run.chunks)
        reason = DOUBTED if stand.newest == UNREADABLE_TIMESTAMP else UNPROVEN
        gaps = add_uncovered(gaps, Uncovered(stand.unproven_from, end, reason))
    return gaps


def stand_behind(runs: Sequence[Run], segment_size: int) -> TailState:
    """What one process knows of suspects at the end: those before the last segment that is in use are none."""
    newest = runs[-1].split.begin // segment_size if runs else 0
    stand = AT_FIRST
    for run in runs:
        if run.first_offset is None:
            continue
        if run.split.begin // segment_size < newest:
            stand = TailState(run.last_timestamp)
        else:
            stand = stand.after(run.first_offset, run.stand)
            passed = [gap.end for gap in run.skipped if not gap.is_expired]
            if passed:
                first = passed[0] if stand.unproven_from is None else min(passed[0], stand.unproven_from)
                stand = TailState(UNREADABLE_TIMESTAMP, first)
    return stand


def rebuild(
    config: Config,
    disk: Disk,
    out: Path,
    run_tasks: RunTasks,
    on_progress: Callable[[int, int], None],
    *,
    slots: int,
    log_limit: LogLimit = NOBODY,
) -> tuple[Rebuilt, int]:
    """Build ``out`` from the store, which ``disk`` reads; ``on_progress`` gets (bytes done, bytes in all).

    Returns what it came to, and how many tasks it took.

    ``log_limit`` is asked about suspects, and about unreadable bytes, by this process alone.
    ``slots``: how many tasks run at a time. When it fails, nothing is left.
    """
    store, started = check_store(config), time.monotonic()
    with built_beside(config, Disk(), out) as files:
        job = _Rebuild(config, disk, store, files, run_tasks, on_progress, log_limit)
        try:
            found = job.run(slots)
        except BaseException:
            # What cannot be removed the next one removes.
            with suppress(DiskError, OSError):
                Disk().remove_tree(files.data)
            raise
    return replace(found, seconds=time.monotonic() - started), job.tasks


class _Rebuild:
    """One rebuild; half of the log's bytes count as done when they are read, and half when they are built from."""

    def __init__(
        self,
        config: Config,
        disk: Disk,
        store: Path,
        files: DataFiles,
        run_tasks: RunTasks,
        on_progress: Callable[[int, int], None],
        log_limit: LogLimit,
    ) -> None:
        self._config, self._disk, self._store, self._log_limit = config, disk, store, log_limit
        self._files, self._run_tasks, self._on_progress = files, run_tasks, on_progress
        # Where the broker says that its log ends, once it was asked.
        self._vouched: int | None = None
        self.tasks = self._size = 0

    def run(self, slots: int) -> Rebuilt:
        """Everything but the rename."""
        config, segment_size, files, disk = self._config, self._config.store.segment_size, self._files, Disk()
        begin = list_segments(self._disk, config.store.commit_log_directories, segment_size).min_offset or 0
        splits = plan_splits(self._disk, config, size=config.spark.split_size or None, slots=slots)
        self._size = sum(split.size for split in splits)
        runs_in, attempts = files.data / "runs", files.data / "attempts"
        for path in (runs_in, attempts):
            disk.make_dir(path)
        runs = self._stage_one(runs_in, splits, begin)
        marks, left_out = self._stage_two(runs, attempts, 2 * slots)
        ends = [run.phy_offset for run in runs if run.phy_offset >= 0]
        stand = stand_behind(runs, segment_size)
        if self._vouched is not None:
            last = next((run.last_timestamp for run in reversed(runs) if run.first_offset is not None), NEVER)
            stand = TailState(last if stand.newest == UNREADABLE_TIMESTAMP else stand.newest)
        frontier = replace(
            fresh_frontier(config, self._store).with_outputs(**marks),
            begin_offset=begin,
            phy_offset=ends[-1] if ends else begin,
            store_timestamp=next((run.store_timestamp for run in reversed(runs) if run.store_timestamp), 0),
            messages=sum(run.messages for run in runs),
            uncovered=uncovered_of(runs, stand),
            newest_timestamp=stand.newest if stand.newest != NEVER else None,
            stale_head=self._stale_head(ends[-1] if ends else begin),
            evidence=evidence_of(runs, segment_size),
        )
        write_down(disk, files, frontier)
        for path in (runs_in, attempts):
            disk.remove_tree(path)
        manifest = json.dumps(_manifest(frontier, len(runs), self.tasks), indent=1)
        disk.write_atomically(files.data / MANIFEST, manifest.encode() + b"\n")
        return Rebuilt(
            messages=frontier.messages,
            entries=sum(run.entries for run in runs),
            bytes=frontier.phy_offset - begin,
            seconds=0.0,
            files=len(marks["index"]),
            begin_offset=begin,
            phy_offset=frontier.phy_offset,
            skipped_bytes=sum(gap.end - gap.begin for gap in frontier.uncovered if not gap.is_unproven),
            unproven_bytes=sum(gap.end - gap.begin for gap in frontier.uncovered if gap.is_unproven),
            left_out_messages=left_out,
            unreadable=runs[-1].unreadable if runs else None,
        )

    def _stage_one(self, directory: Path, splits: list[Split], begin: int) -> list[Run]:
        read, half = partial(write_run, self._config, directory), self._size // 2
        found = self._in_tasks(read, splits, 0, half)
        problem, runs, end = None, list[Run](), splits[-1].end if splits else begin
        try:
            runs = chain(splits, found, begin)
        except CorruptDataError as error:
            problem = error
        is_unproven = stand_behind(runs, self._config.store.segment_size).unproven_from is not None
        # Where the log ends in what the broker alone knows.
        if problem or is_unproven or (runs and runs[-1].unreadable is not None):
            self._vouched = self._log_limit.ask(end)
            if self._vouched is not None and self._vouched < end:
                splits = [split for split in splits if split.end <= self._vouched]
                last = Split(splits[-1].end if splits else begin, self._vouched)
                again = [last] if last.size else []
                found = found[: len(splits)] + self._in_tasks(read, again, half, 0)
                problem, runs = None, chain(splits + again, found, begin)
        if problem is not None:
            raise problem
        for run in runs:
            if not (run.path / "topics").exists():  # the last that is written
                raise UnsafeStoreError(
                    f"{run.path}, which an executor wrote, is not there for the driver",
                    "give an --out on a file system that the driver and all executors share",
                )
        return runs

    def _stale_head(self, end: int) -> bytes | None:
        if self._vouched != end:
            return None
        store = self._config.store
        log = list_segments(self._disk, store.commit_log_directories, store.segment_size)
        with FrameReader(self._disk, log) as frames:
            head = frames.read(end, end + STAMPED_SIZE)
        while head and self._log_limit.ask(end, head) == end:
            if self._log_limit.ends_at(end, head):
                return head
            time.sleep(_PAUSE)
        return None

    def _stage_two(self, runs: Sequence[Run], attempts: Path, parts: int) -> tuple[dict[str, Any], int]:
        # What each output holds, by its name in the frontier, and how many messages were left out.
        config, half = self._config, self._size // 2
        files = IndexTask.plan(runs, config, attempts)
        kinds = [kind for kind in OUTPUTS[1:] if kind.is_wanted(config)]
        others = [task for kind in kinds for task in OutputTask.plan(kind, attempts, parts)]
        # Without what only the driver needs: they are sent to every task.
        build = partial(_build, config, tuple(replace(run, evidence=(), skipped=[]) for run in runs))
        made = self._in_tasks(build, [*others, *files], half, self._size - half)
        layout = IndexLayout(config.index.hash_slot_num, config.index.index_num)
        marks: dict[str, Any] = {"index": commit_index(files, made[len(others) :], self._files.index, layout)}
        left_out = 0
        for kind in kinds:
            ours = [built for task, built in zip(others, made, strict=False) if task.kind is kind]
            if len(ours) > 1 and sum(len(built.begins) for built in ours) >= config.outputs.queues_max:
                # Which queues there are when no further ones are taken is known to whoever sees all of them.
                ours = self._in_tasks(build, OutputTask.plan(kind, attempts, 1), self._size, 0)
            marks[kind.name] = commit_output(ours, self._files.data / kind.folder)
            figures = [built.figures for built in ours]
            left_out += sum(one.get("batchMessages", 0) + one.get("leftOutMessages", 0) for one in figures)
        return marks, left_out

    def _in_tasks(self, work: Callable[[Any], Any], items: Sequence[Any], done: int, share: int) -> list[Any]:
        # ``share`` of all bytes count as done behind it, ``done`` of them before.
        self.tasks += len(items)
        return self._run_tasks(
            work,
            items,
            sizes=[1] * len(items),
            progress=lambda now, total: self._on_progress(done + share * now // total, self._size),
        )


def _build(config: Config, runs: Sequence[Run], task: IndexTask | OutputTask) -> Built:
    """The work of stage two, below a name that no other attempt has."""
    directory = task.directory.with_name(f"{task.directory.name}.{uuid.uuid4().hex[:12]}")
    return replace(task, directory=directory).work(config, runs)


def _manifest(frontier: Frontier, splits: int, tasks: int) -> dict[str, Any]:
    """What was there when the directory was renamed: the last file that is written, for people and for scripts."""
    return {
        "format": 1,
        "version": __version__,
        "engine": "spark",
        "beginOffset": frontier.begin_offset,
        "phyOffset": frontier.phy_offset,
        "messages": frontier.messages,
        "splits": splits,
        "tasks": tasks,
        "index": [{"name": mark.name, "entries": mark.header.entries} for mark in frontier.index],
        "queues": None if frontier.queues is None else len(frontier.queues),
        "sparseSegments": None if frontier.sparse is None else len(frontier.sparse.segments),
    }
