"""How far a job is: tasks that are done, told as bytes.

A classic session is asked (StatusTracker), a Connect server tells (progress handler). Neither counts bytes; but tasks
are started in order and the sizes of their items are known.

Plain Python work as Spark tasks: one task an item, results in the items' order.

A job is a range with a partition an item, mapped in Arrow batches: nothing is shuffled, and of each result only its
pickle crosses the wire. What the work raises of indexd's own errors travels inside the failed task's text and is raised
again by the driver as it was; Spark tries a failed task again where the master allows it, for those as for any other.

Spark's own Python daemon, which forks the workers, silent about a worker whose task was given up.

Run by Spark on this machine as ``python -m indexd.spark.tasks``. When a job is cancelled, another task of it failed,
or the reader has enough rows, the sockets of the tasks that still run are closed; without this each of them prints a
traceback, over the one line that says what happened or over nothing at all.
"""

from __future__ import annotations

import gc
import pickle
import socket
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pyarrow as pa
from pyspark import cloudpickle, daemon

from indexd.errors import DiskError, IndexdError, MissingStoreError
from indexd.spark.failures import ENGINE_ERRORS, job_error, sealed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.connect.shell.progress import ProgressHandler

Report = Callable[[int, int], None]
"""Told bytes done and all bytes; ``done`` never goes back."""


class Progress:
    """Tasks done -> bytes done, without a session: nothing is told twice, and nothing goes back."""

    def __init__(self, sizes: Sequence[int], report: Report | None) -> None:
        self._sums = [0, *accumulate(sizes)]
        self._report = report
        self._told = -1

    def tasks_done(self, done: int, tasks: int) -> None:
        """`done` of `tasks` tasks; where there are not as many as sizes, each is the same part of all bytes."""
        if tasks == len(self._sums) - 1:
            self._tell(self._sums[done])
        elif tasks:
            self._tell(self._sums[-1] * done // tasks)

    def finish(self) -> None:
        """All are done."""
        self._tell(self._sums[-1])

    def _tell(self, size: int) -> None:
        if self._report is not None and size > self._told:
            self._told = size
            self._report(size, self._sums[-1])


class JobWatch(ABC):
    """One job: told apart from others, looked at while it runs, and cancelled."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress = progress
        self._name = name

    @abstractmethod
    def begin(self) -> None:
        """Called in the thread that starts the job, before it does."""

    @abstractmethod
    def poll(self) -> None:
        """Tell what is done by now; called now and then in the thread that waits."""

    @abstractmethod
    def cancel(self) -> None:
        """Give the job up; nothing happens if there is none yet or any more."""

    def finish(self) -> None:
        """Tell that all is done."""
        self._progress.finish()


class ClassicWatch(JobWatch):
    """By a job group: the tags of a classic session do not reach its jobs, seen with 4.3.0."""

    def __init__(self, progress: Progress, name: str, spark: SparkSession) -> None:
        super().__init__(progress, name)
        self._context = spark.sparkContext

    def begin(self) -> None:
        self._context.setJobGroup(self._name, "indexd", interruptOnCancel=True)

    def poll(self) -> None:
        tracker = self._context.statusTracker()
        done = tasks = 0
        for job in tracker.getJobIdsForGroup(self._name):
            found = tracker.getJobInfo(job)
            for stage in found.stageIds if found else ():
                info = tracker.getStageInfo(stage)
                if info is not None:
                    done += info.numCompletedTasks
                    tasks += info.numTasks
        self._progress.tasks_done(done, tasks)

    def cancel(self) -> None:
        self._context.cancelJobGroup(self._name)


class ConnectWatch(JobWatch):
    """By a tag, and by what the server tells in the thread of the job; the thread that waits passes it on."""

    def __init__(self, progress: Progress, name: str, spark: SparkSession) -> None:
        super().__init__(progress, name)
        self._spark = spark
        self._heard = (0, 0)

    def begin(self) -> None:
        self._spark.addTag(self._name)  # holds for what this thread starts

    def __call__(self, stages: Iterable[Any] | None, *_: object, **__: object) -> None:
        """The client's progress handler: what it calls."""
        heard = list(stages or ())
        self._heard = (sum(stage.num_completed_tasks for stage in heard), sum(stage.num_tasks for stage in heard))

    def poll(self) -> None:
        self._progress.tasks_done(*self._heard)

    def cancel(self) -> None:
        self._spark.interruptTag(self._name)


@contextmanager
def watch_job(spark: SparkSession, name: str, sizes: Sequence[int], report: Report | None) -> Iterator[JobWatch]:
    """A watch on the one job that is started meanwhile; no other job has its `name`, and `sizes` are bytes a task."""
    progress = Progress(sizes, report)
    if not is_connect(spark):
        yield ClassicWatch(progress, name, spark)
        return
    watch = ConnectWatch(progress, name, spark)
    spark.registerProgressHandler(cast("ProgressHandler", watch))
    try:
        yield watch
    finally:
        spark.removeProgressHandler(cast("ProgressHandler", watch))


def is_connect(spark: SparkSession) -> bool:
    """Whether this session is a client of a Connect server."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


Item = TypeVar("Item")
Result = TypeVar("Result")

_POLL_SECONDS = 0.2
_CANCEL_TRIES = 30  # a second each
_KILL_SECONDS = (
    0.5  # a worker whose task was given up is killed after spark.python.task.killTimeout, 200 ms in a session of ours
)
_RESULT_SCHEMA = "item long, result binary"

_quiet = False


def run_tasks(
    spark: SparkSession,
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    sizes: Sequence[int] = (),
    progress: Report | None = None,
) -> list[Result]:
    """``[work(item) for item in items]``, each call a task of its own on whatever `spark` runs on.

    `work` is a function of a module that the executors can import, or a ``functools.partial`` of one; items and results
    are pickled. `progress` is told bytes done and their sum, by `sizes`, the bytes of each item. Raises the IndexdError
    that a task raised, SparkError for anything else that ended the job; KeyboardInterrupt cancels the job first.
    """
    if not items:
        return []
    frame = task_frame(spark, partial(_result_row, work), list(enumerate(items)), _RESULT_SCHEMA)
    rows = run_job(spark, frame.collect, sizes=sizes, progress=progress)
    results: list[Any] = [None] * len(items)
    for row in rows:
        results[row["item"]] = pickle.loads(bytes(row["result"]))
    return results


def task_frame(
    spark: SparkSession, work: Callable[[Item], Iterable[pa.RecordBatch]], items: Sequence[Item], schema: str
) -> DataFrame:
    """A DataFrame of what ``work(item)`` yields for each item, each call a task of its own as in `run_tasks`."""
    blobs = tuple(pickle.dumps(item) for item in items)
    run = partial(_run_partition, _pickled(work), blobs, is_local(spark))
    return spark.range(0, len(items), 1, max(len(items), 1)).mapInArrow(run, schema)


def run_job(
    spark: SparkSession, action: Callable[[], Result], *, sizes: Sequence[int] = (), progress: Report | None = None
) -> Result:
    """What `action`, a Spark action such as ``frame.collect``, returns; errors, Ctrl-C and progress as `run_tasks`.

    `sizes` are the bytes of the tasks of its first stage. However it ends, no task of it runs any more: the caller can
    remove what they wrote.
    """
    outcome: list[tuple[bool, Any]] = []
    ended = threading.Event()  # not Thread.join: interrupted, it takes the thread for ended
    with watch_job(spark, f"indexd-{uuid.uuid4().hex}", sizes, progress) as watch:

        def act() -> None:
            try:
                watch.begin()
                outcome.append((True, action()))
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                outcome.append((False, error))
            finally:
                ended.set()

        threading.Thread(target=act, name="spark-job", daemon=True).start()
        try:
            while not ended.wait(_POLL_SECONDS):
                watch.poll()
        except BaseException as error:
            _cancel(watch, ended)
            if isinstance(error, ENGINE_ERRORS):
                raise job_error(error) from error
            raise
        done, value = outcome[0]
        if done:
            watch.finish()
            result: Result = value
            return result
    time.sleep(_KILL_SECONDS)
    if isinstance(value, ENGINE_ERRORS):
        raise job_error(value) from value
    raise value


def _cancel(watch: JobWatch, ended: threading.Event) -> None:
    # Again and again: a job that was about to start was not there to be cancelled.
    for _ in range(_CANCEL_TRIES):
        with suppress(*ENGINE_ERRORS):  # there is nothing to be cancelled any more when the JVM has ended
            watch.cancel()
        if ended.wait(1.0):
            break
    time.sleep(_KILL_SECONDS)


def _pickled(work: object) -> bytes:
    # By value what the executors could not import: a function of a script, a lambda.
    dumped: bytes = cloudpickle.dumps(work)  # type: ignore[no-untyped-call]  # it ships no types
    return dumped


def is_local(spark: SparkSession) -> bool:
    """Whether tasks run on this machine, below this process, so that they see what this process sees."""
    return not is_connect(spark) and str(spark.conf.get("spark.master", "")).startswith("local")


def quiet_gc() -> None:
    """Once a worker process: what is loaded by now is never looked at again by the garbage collector.

    Spark's Python daemon collects garbage after every task, which takes 60 to 110 ms with numba and pyarrow loaded.
    """
    global _quiet
    if not _quiet:
        _quiet = True
        gc.collect()
        gc.freeze()


def _run_partition(
    work_blob: bytes, blobs: Sequence[bytes], local: bool, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """In a worker: the work for each item whose number comes in."""
    work = pickle.loads(work_blob)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            try:
                yield from work(pickle.loads(blobs[number]))
            except IndexdError as error:
                raise sealed(error if local else _on_this_host(error)) from None
            quiet_gc()  # behind the first item: by now the kernels are loaded, too


def _result_row(work: Callable[[Any], Any], item: tuple[int, Any]) -> Iterator[pa.RecordBatch]:
    result = pickle.dumps(work(item[1]))
    columns = [pa.array([item[0]], pa.int64()), pa.array([result], pa.binary())]
    yield pa.RecordBatch.from_arrays(columns, ["item", "result"])


def _on_this_host(error: IndexdError) -> IndexdError:
    error.args = (f"{error.args[0]} (on executor {socket.gethostname()})", *error.args[1:])
    if isinstance(error, MissingStoreError) or (isinstance(error, DiskError) and error.is_missing):
        error.hint = "every executor has to see this path: use a shared file system or an object store"
    return error


_ENDED = 1  # as for any worker that cannot go on: its process is not used again


def quiet_worker(sock: socket.socket, authenticated: bool) -> int:
    """One task, as pyspark's own; what it writes into a closed socket is nobody's any more."""
    try:
        return _worker(sock, authenticated)
    except BrokenPipeError:
        return _ENDED


def quiet_print(*words: object, **more: Any) -> None:
    """What pyspark's daemon prints, but for the traceback of a closed socket, inside whose ``except`` it is called."""
    if not isinstance(sys.exc_info()[1], BrokenPipeError):
        print(*words, **more)  # noqa: T201 - it stands for pyspark's own


_worker = daemon.worker

if __name__ == "__main__":
    daemon.worker = quiet_worker
    vars(daemon)["print"] = quiet_print  # before the builtin, for that module alone
    daemon.manager()
