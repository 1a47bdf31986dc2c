"""Plain Python work as Spark tasks: one task an item, results in the items' order.

A job is a range with a partition an item, mapped in Arrow batches: nothing is shuffled, and of each result only its
pickle crosses the wire. What the work raises of indexd's own errors travels inside the failed task's text and is raised
again by the driver as it was; Spark tries a failed task again where the master allows it, for those as for any other.
"""

from __future__ import annotations

import gc
import pickle
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from pyspark import cloudpickle

from indexd.errors import DiskError, IndexdError, MissingStoreError
from indexd.spark.failures import ENGINE_ERRORS, job_error, sealed
from indexd.spark.progress import JobWatch, Report, is_connect, watch_job

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    blobs = tuple(pickle.dumps(item) for item in items)
    run = partial(_run_partition, _pickled(work), blobs, is_local(spark))
    frame = spark.range(0, len(items), 1, len(items)).mapInArrow(run, _RESULT_SCHEMA)
    rows = run_job(spark, frame.collect, sizes=sizes, progress=progress)
    results: list[Any] = [None] * len(items)
    for row in rows:
        results[row["item"]] = pickle.loads(bytes(row["result"]))
    return results


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
                result = work(pickle.loads(blobs[number]))
            except IndexdError as error:
                raise sealed(error if local else _on_this_host(error)) from None
            quiet_gc()  # behind the first item: by now the kernels are loaded, too
            yield pa.RecordBatch.from_arrays(
                [pa.array([number], pa.int64()), pa.array([pickle.dumps(result)], pa.binary())], ["item", "result"]
            )


def _on_this_host(error: IndexdError) -> IndexdError:
    error.args = (f"{error.args[0]} (on executor {socket.gethostname()})", *error.args[1:])
    if isinstance(error, MissingStoreError) or (isinstance(error, DiskError) and error.is_missing):
        error.hint = "every executor has to see this path: use a shared file system or an object store"
    return error
