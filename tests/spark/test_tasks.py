"""Work as tasks: order, errors that come back as themselves, progress, Ctrl-C, and a quiet garbage collector."""

from __future__ import annotations

import _thread
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from indexd.errors import CorruptDataError, DiskError, IndexdError, SparkError
from support import spark_work

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_results_come_in_the_order_of_the_items(spark: SparkSession) -> None:
    from indexd.spark.tasks import run_tasks

    items = list(range(20, 0, -1))
    assert run_tasks(spark, spark_work.square, items) == [item * item for item in items]
    assert run_tasks(spark, spark_work.square, []) == []
    assert run_tasks(spark, lambda item: item * 2, [7]) == [14]


def test_an_item_is_a_task_of_its_own(spark: SparkSession) -> None:
    from indexd.spark.tasks import run_tasks

    def partition(_: int) -> int:
        from pyspark import TaskContext

        context = TaskContext.get()
        assert context is not None
        return context.partitionId()

    assert run_tasks(spark, partition, range(9)) == list(range(9))


def test_our_errors_come_back_as_they_were(spark: SparkSession) -> None:
    from indexd.spark.tasks import run_tasks

    with pytest.raises(DiskError) as caught:
        run_tasks(spark, spark_work.raise_ours, range(5))
    error = caught.value
    assert error.line() == "cannot open /no/such/segment: No such file or directory; check the path"
    assert error.is_missing
    assert error.path == Path("/no/such/segment")
    with pytest.raises(CorruptDataError) as corrupt:
        run_tasks(spark, spark_work.raise_corrupt, range(2))
    assert corrupt.value.line() == "split 1 does not hold; look at it"
    with pytest.raises(IndexdError) as plain:
        run_tasks(spark, spark_work.raise_plain, [0])
    assert type(plain.value) is IndexdError


def test_what_is_a_defect_ends_in_one_line_that_names_it(spark: SparkSession) -> None:
    from indexd.spark.tasks import run_tasks

    with pytest.raises(SparkError) as caught:
        run_tasks(spark, spark_work.raise_internal, [0])
    assert str(caught.value) == "a job on Spark failed: KeyError: 'a key that nobody has'"
    assert caught.value.exit_code == 70
    with pytest.raises(SparkError, match="Python worker exited unexpectedly"):
        run_tasks(spark, spark_work.die, range(2))
    # And the session is as good as before.
    assert run_tasks(spark, spark_work.square, [3]) == [9]


def test_errors_of_spark_itself_are_ours_too(spark: SparkSession) -> None:
    from indexd.spark.tasks import run_job

    with pytest.raises(SparkError, match="TABLE_OR_VIEW_NOT_FOUND"):
        run_job(spark, lambda: spark.table("nobody").collect())


def test_progress_is_told_in_bytes_and_never_goes_back(spark: SparkSession) -> None:
    from indexd.spark.tasks import run_tasks

    told: list[tuple[int, int]] = []
    work = partial(spark_work.wait, seconds=0.3)
    run_tasks(spark, work, range(8), sizes=[10] * 8, progress=lambda done, size: told.append((done, size)))
    assert told[-1] == (80, 80)
    assert all(size == 80 for _, size in told)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert any(0 < done < 80 for done, _ in told)


def test_an_interrupt_cancels_the_job(spark: SparkSession, tmp_path: Path) -> None:
    from indexd.spark.tasks import run_tasks

    interrupted: list[float] = []

    def interrupt() -> None:
        deadline = time.monotonic() + 60
        while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1.0)
        interrupted.append(time.monotonic())
        _thread.interrupt_main()

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        run_tasks(spark, partial(spark_work.touch_then_wait, tmp_path, seconds=0.5), range(60))
    interrupter.join()
    assert time.monotonic() - interrupted[0] < 10
    begun = len(list(tmp_path.iterdir()))
    assert 0 < begun < 20
    time.sleep(1.5)
    assert len(list(tmp_path.iterdir())) == begun, "tasks went on"
    assert run_tasks(spark, spark_work.square, [3]) == [9]


def test_garbage_is_frozen_once_a_worker(spark: SparkSession) -> None:
    """Without it Spark's daemon spends 60 to 110 ms behind every task on objects that never go."""
    from indexd.spark.tasks import run_tasks

    run_tasks(spark, spark_work.where, range(6))
    seen: dict[object, set[object]] = {}
    for row in run_tasks(spark, spark_work.where, range(12)):
        seen.setdefault(row["pid"], set()).add(row["frozen"])
    # Every worker has frozen what it had loaded; had one done so twice, its numbers would differ.
    assert any(counts - {0} for counts in seen.values())
    for counts in seen.values():
        assert len(counts - {0}) <= 1
        assert all(isinstance(count, int) and (count == 0 or count > 10_000) for count in counts)
