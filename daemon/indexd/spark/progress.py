"""How far a job is: tasks that are done, told as bytes.

A classic session is asked (StatusTracker), a Connect server tells (progress handler). Neither counts bytes; but tasks
are started in order and the sizes of their items are known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
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
