"""Runs plain Python work as Spark tasks, one task an item, and turns what ends a job into one of indexd's own errors.

A job is a range with a partition an item, mapped in Arrow batches: nothing is shuffled. What the work raises of
indexd's own errors travels inside the failed task's text, which is all that Spark carries, and is raised again by the
driver as it was; Spark tries a failed task again where the master allows it, for those as for any other. Of everything
else the last line of the worker's traceback, or the reason that Spark gives, is what an operator can use; the rest
hangs on ``__cause__``. When the JVM itself has ended, that is what is said, whatever py4j makes of it.

Spark on this machine runs it as ``python -m indexd.spark.tasks``, in place of its own Python daemon, which forks the
workers: when a job is cancelled, another task of it failed, or the reader has enough rows, the sockets of the tasks
that still run are closed; without this each of them prints a traceback, over the one line that says what happened.
"""

from __future__ import annotations

import base64
import gc
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import cache, partial
from operator import itemgetter
from typing import Any, TypeVar

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import daemon
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from indexd.errors import DiskError, IndexdError, MissingStoreError, SparkError

Item = TypeVar("Item")
Result = TypeVar("Result")
Report = Callable[[int, int], None]
"""Told bytes done and all bytes; ``done`` never goes back."""

_CANCEL_TRIES = 30  # a second each


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
    frame = task_frame(spark, partial(_result, work), list(enumerate(items)), "item long, result binary")
    rows = run_job(spark, frame.collect, sizes=sizes, progress=progress)
    return [pickle.loads(bytes(row["result"])) for row in sorted(rows, key=itemgetter("item"))]


def task_frame(
    spark: SparkSession,
    work: Callable[[Item], Iterator[pa.RecordBatch]],
    items: Sequence[Item],
    schema: StructType | str,
) -> DataFrame:
    """The rows that `work` yields of the items, a partition an item; to be used within `run_job`."""
    # Of the items a task unpickles its own alone.
    run = partial(_run_partition, work, tuple(pickle.dumps(item) for item in items), is_local(spark))
    return spark.range(0, len(items), 1, max(len(items), 1)).mapInArrow(run, schema)


def run_job(
    spark: SparkSession, action: Callable[[], Result], *, sizes: Sequence[int] = (), progress: Report | None = None
) -> Result:
    """What `action`, a Spark action such as ``frame.collect``, returns; errors, Ctrl-C and progress as `run_tasks`.

    `sizes` are the bytes of its tasks: Spark counts tasks alone, of which each is the same part of all bytes here.
    However it ends, no task of it runs any more: the caller can remove what they wrote.
    """
    told, total = -1, sum(sizes)

    def tell(done: int, tasks: int) -> None:
        nonlocal told
        size = total * done // tasks if tasks else 0
        if progress is not None and size > told:
            told = size
            progress(size, total)

    job: Future[Result] = Future()
    watch = _Watch(spark)

    def act() -> None:
        try:
            watch.begin()
            job.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            job.set_exception(error)

    threading.Thread(target=act, name="spark-job", daemon=True).start()
    try:
        while not wait([job], 0.2).done:
            tell(*watch.tasks())
        result = job.result()
    except BaseException as error:
        # Again and again: a job that was about to start was not there to be cancelled.
        for _ in range(_CANCEL_TRIES):
            with suppress(*ENGINE_ERRORS):  # there is nothing to be cancelled any more when the JVM has ended
                watch.cancel()
            if wait([job], 1.0).done:
                break
        # A worker whose task was given up is killed after spark.python.task.killTimeout, 200 ms in a session of ours.
        time.sleep(0.5)
        if isinstance(error, ENGINE_ERRORS):
            raise job_error(error) from error
        raise
    tell(1, 1)
    return result


class _Watch:
    """One job: of a classic session by a job group, as its tags do not reach its jobs (4.3.0); of Connect by a tag."""

    def __init__(self, spark: SparkSession) -> None:
        self._name = f"indexd-{uuid.uuid4().hex}"
        self._spark, self._is_connect = spark, is_connect(spark)

    def begin(self) -> None:
        """Called in the thread that starts the job, before it does: it holds for what this thread starts."""
        if self._is_connect:
            self._spark.addTag(self._name)
        else:
            self._spark.sparkContext.setJobGroup(self._name, "indexd", interruptOnCancel=True)

    def tasks(self) -> tuple[int, int]:
        """How many are done, of how many; none are known through Connect."""
        if self._is_connect:
            return 0, 0
        tracker = self._spark.sparkContext.statusTracker()
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._name)]
        found = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        stages = [stage for stage in found if stage is not None]
        return sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages)

    def cancel(self) -> None:
        """Give the job up; nothing happens if there is none yet or any more."""
        if self._is_connect:
            self._spark.interruptTag(self._name)
        else:
            self._spark.sparkContext.cancelJobGroup(self._name)


def is_connect(spark: SparkSession) -> bool:
    """Whether this session is a client of a Connect server."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local(spark: SparkSession) -> bool:
    """Whether tasks run on this machine, below this process, so that they see what this process sees."""
    return not is_connect(spark) and str(spark.conf.get("spark.master", "")).startswith("local")


# What runs in a worker.


@cache
def quiet_gc() -> None:
    """What is loaded by now is never looked at again by the garbage collector; only the first call does anything.

    Spark's Python daemon collects garbage after every task, which takes 60 to 110 ms with numba and pyarrow loaded.
    """
    gc.collect()
    gc.freeze()


def _run_partition(
    work: Callable[[Any], Iterator[pa.RecordBatch]],
    blobs: Sequence[bytes],
    local: bool,
    batches: Iterator[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    """The work for each item whose number comes in."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            try:
                for found in work(pickle.loads(blobs[number])):
                    quiet_gc()  # by now the kernels are loaded, too
                    yield found
            except IndexdError as error:
                raise sealed(error if local else _on_this_host(error)) from None


def _result(work: Callable[[Any], object], item: tuple[int, object]) -> Iterator[pa.RecordBatch]:
    number, result = item[0], pickle.dumps(work(item[1]))
    yield pa.RecordBatch.from_arrays(
        [pa.array([number], pa.int64()), pa.array([result], pa.binary())], ["item", "result"]
    )


def _on_this_host(error: IndexdError) -> IndexdError:
    error.args = (f"{error.args[0]} (on executor {socket.gethostname()})", *error.args[1:])
    if isinstance(error, MissingStoreError) or (isinstance(error, DiskError) and error.is_missing):
        error.hint = "every executor has to see this path: use a shared file system or an object store"
    return error


# What ended a job.

_CONNECTION_ERRORS = (ConnectionRefusedError, ConnectionResetError, EOFError)  # py4j lets them through as they are
ENGINE_ERRORS: tuple[type[Exception], ...] = (PySparkException, Py4JError, *_CONNECTION_ERRORS)
"""What pyspark raises when a job, the session or the connection to it fails."""

_SEALED = re.compile(r"\[sealed:([A-Za-z0-9+/=]+)\]")
_RAISED = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?([A-Z]\w*(?:Error|Exception|Interrupt): .*)$", re.MULTILINE)
_REASON = re.compile(r"most recent failure: [^\n]*?\(([^\s)]+) executor [^)]*\): ([^\n]*)")
_LINE_MAX = 400  # characters: a reason is a line, not a plan
# What Spark's text holds, what to say, and what to do.
_KNOWN = (
    (
        r"No module named '(?:indexd|pyspark_rocketmq)",
        "the workers of Spark cannot import indexd",
        "install the same rocketmq-indexd in the Python of every executor, or ship it with spark.archives",
    ),
    (
        r"PYTHON_VERSION_MISMATCH.*",
        "the workers of Spark run another Python than this one: {}",
        "give the executors the same minor version, with --conf spark.pyspark.python=...",
    ),
    (
        r"Class org\.apache\.hadoop\.fs\.s3a\.S3AFileSystem not found|No FileSystem for scheme \"\w+\"",
        "Spark cannot write there: {}",
        "give it Hadoop's connector, for s3:// with --conf spark.jars.packages=org.apache.hadoop:hadoop-aws:VERSION",
    ),
)


class TaskError(Exception):
    """What a worker raises in an IndexdError's place: its line, and the whole of it in a form that survives as text."""


def sealed(error: IndexdError) -> TaskError:
    """To be raised by a worker ``from None``; `job_error` opens it in the driver."""
    return TaskError(f"[sealed:{base64.b64encode(pickle.dumps(error)).decode()}] {error.line()}")


def job_error(error: BaseException) -> IndexdError:
    """`error`, one of ENGINE_ERRORS, as what it means; to be raised ``from`` it."""
    if ended := jvm_error(error):
        return ended
    text = str(error)
    if seal := _SEALED.search(text):
        opened = pickle.loads(base64.b64decode(seal[1]))
        assert isinstance(opened, IndexdError)
        return opened
    for pattern, line, hint in _KNOWN:
        if known := re.search(pattern, text):
            return SparkError(line.format(_one_line(known[0])), hint)
    return SparkError(f"a job on Spark failed: {_reason(text)}")


def jvm_error(error: BaseException) -> SparkError | None:
    """What `error` means when the JVM that this process started has ended; None when it has not, or there is none."""
    if not isinstance(error, (Py4JError, *_CONNECTION_ERRORS)) or isinstance(error, Py4JJavaError):
        return None
    # Not imported: a Connect client need not have it.
    context = getattr(sys.modules.get("pyspark.core.context"), "SparkContext", None)
    process = getattr(getattr(context, "_gateway", None), "proc", None)
    if process is None:
        return None
    try:
        code = process.wait(2.0)  # it may be seen to be gone a little after its sockets are
    except subprocess.TimeoutExpired:
        return None
    how = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
    return SparkError(
        f"Spark's JVM has ended ({how})", "start again; if the kernel killed it for want of memory, dmesg says so"
    )


def _reason(text: str) -> str:
    raised = [said for said in _RAISED.findall(text.partition("\n\tat ")[0]) if "SparkException" not in said]
    if "Traceback (most recent call last)" in text and raised:
        return _one_line(raised[-1])
    if lost := _REASON.search(text):
        return _one_line(f"{lost[2]} (on {lost[1]})")
    if causes := re.findall(r"^Caused by: (.*)$", text, re.MULTILINE):
        return _one_line(causes[-1])
    return _one_line(next((line for line in text.splitlines() if line.strip()), "without a word"))


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LINE_MAX else f"{text[:_LINE_MAX]}..."


# In place of Spark's own Python daemon.

_ENDED = 1  # as for any worker that cannot go on: its process is not used again
_worker = daemon.worker


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


if __name__ == "__main__":
    daemon.worker = quiet_worker
    vars(daemon)["print"] = quiet_print  # before the builtin, for that module alone
    daemon.manager()
