"""What a failed job says, from what Spark says of it; and bytes done from tasks done."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from py4j.protocol import Py4JError
from pyspark import SparkContext

from indexd import errors
from indexd.errors import CorruptDataError, DiskError, IndexdError, SparkError, UsageError
from indexd.spark import session
from indexd.spark.tasks import job_error, jvm_error, quiet_print, sealed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TRACEBACK = """An error occurred while calling o1.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 3 in stage 0.0 failed 1 times, most recent \
failure: Lost task 3.0 in stage 0.0 (TID 3) (host7 executor driver): org.apache.spark.api.python.PythonException: \
Traceback (most recent call last):
  File "/x/worker.py", line 1, in main
    process()
{last}

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
Caused by: java.lang.IllegalStateException: what Java says of it
"""


def text_of(last: str) -> Exception:
    return Exception(TRACEBACK.format(last=last))


ERRORS = [
    UsageError("no"),
    CorruptDataError("a frame\nof two lines", "a hint of its own"),
    DiskError("read", Path("/segment"), OSError(5, "Input/output error")),
    errors.BusyError("busy"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_ours_survive_pickling_and_sealing(error: IndexdError) -> None:
    for again in (
        pickle.loads(pickle.dumps(error)),
        job_error(text_of(f"indexd.spark.tasks.TaskError: {sealed(error)}")),
    ):
        assert type(again) is type(error)
        assert again.line() == error.line()
        assert vars(again) == vars(error)


def test_every_error_of_ours_survives() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, IndexdError)]
    assert len(kinds) > 10
    for kind in kinds:
        error = kind.__new__(kind, "text")
        error.hint = "hint"
        assert job_error(text_of(f"x: {sealed(error)}")).line() == "text; hint"


def test_one_that_was_not_sealed_is_known_by_its_class() -> None:
    found = job_error(text_of("indexd.errors.UnsafeStoreError: the store is DLedger's"))
    assert type(found) is errors.UnsafeStoreError
    assert found.line() == "the store is DLedger's; check --store"
    found = job_error(text_of("indexd.errors.DiskError: cannot read /x: Input/output error"))
    assert type(found) is DiskError
    assert found.exit_code == 70


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TRACEBACK.format(last="KeyError: 'x'"), "a job on Spark failed: KeyError: 'x'"),
        (
            "Job aborted due to stage failure: Task 1 in stage 4.0 failed 4 times, most recent failure: "
            "Lost task 1.3 in stage 4.0 (TID 9) (10.0.0.7 executor 2): "
            "ExecutorLostFailure (executor 2 exited): Container killed",
            "a job on Spark failed: ExecutorLostFailure (executor 2 exited): Container killed (on 10.0.0.7)",
        ),
        (TRACEBACK.format(last="ModuleNotFoundError: No module named 'indexd'"), "cannot import indexd"),
        ("[PYTHON_VERSION_MISMATCH] Python in worker has different version (3, 12)", "run another Python"),
        ("\n\n[UNRESOLVED_COLUMN] no x\n== plan", "a job on Spark failed: [UNRESOLVED_COLUMN] no x"),
        ("", "a job on Spark failed: without a word"),
        ("x" * 10_000, "xxx..."),
    ],
)
def test_of_anything_else_the_reason(text: str, says: str) -> None:
    found = job_error(Exception(text))
    assert type(found) is SparkError
    assert says in found.line()
    assert len(found.line()) < 700


@given(st.text())
def test_whatever_spark_says_is_one_line(text: str) -> None:
    assert "\n" not in job_error(Exception(text)).line()


LOST = [
    ConnectionRefusedError(111, "Connection refused"),
    EOFError(),
    Py4JError("An error occurred while calling o1.x"),
]


@pytest.mark.parametrize("error", LOST, ids=lambda error: type(error).__name__)
def test_a_jvm_that_has_ended_is_what_is_said(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
    monkeypatch.setattr("indexd.spark.tasks._END_SECONDS", 0.01)
    try:
        assert jvm_error(error) is None
        assert job_error(error).line().startswith("a job on Spark failed: ")
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    found = job_error(error)
    assert (type(found), found.exit_code) == (SparkError, 70)
    assert found.line().startswith("Spark's JVM has ended (SIGKILL); start again")
    # What a task or Spark says is not the connection's end.
    assert jvm_error(text_of("KeyError: 'x'")) is None

    def stop() -> None:
        warnings.warn("Unable to cleanly shutdown Spark JVM process.", RuntimeWarning, stacklevel=1)
        raise error

    session._stop(cast("SparkSession", SimpleNamespace(stop=stop)))
    monkeypatch.setattr(SparkContext, "_gateway", None)
    with pytest.raises(type(error)):
        session._stop(cast("SparkSession", SimpleNamespace(stop=stop)))


def test_a_worker_is_silent_about_a_closed_socket_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (BrokenPipeError(), ValueError()):
        try:
            raise error
        except (BrokenPipeError, ValueError):
            quiet_print(type(error).__name__)
    quiet_print("outside")
    assert capsys.readouterr().out == "ValueError\noutside\n"
