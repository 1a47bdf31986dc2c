"""What ends a job as one line; where jobs run by options; and that nothing else loads pyspark."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from py4j.protocol import Py4JError
from pyspark import SparkContext

from indexd import errors
from indexd.cli.jobs import uses_spark
from indexd.config import SparkConfig, load
from indexd.errors import CorruptDataError, DiskError, IndexdError, SparkError, SparkMissingError, UsageError
from indexd.spark.session import default_conf, missing_packages, open_session
from indexd.spark.tasks import job_error, jvm_error, quiet_print, sealed
from support.configs import HOME, no_system_file, refused, write

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
        ("ClassNotFound: Class org.apache.hadoop.fs.s3a.S3AFileSystem not found", "hadoop-aws"),
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
    process = mock.Mock()
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=process))
    process.wait.side_effect = subprocess.TimeoutExpired("java", 2)
    assert jvm_error(error) is None
    assert job_error(error).line().startswith("a job on Spark failed: ")
    process.wait.side_effect = [-signal.SIGKILL]
    found = job_error(error)
    assert (type(found), found.exit_code) == (SparkError, 70)
    assert found.line().startswith("Spark's JVM has ended (SIGKILL); start again")
    # What a task or Spark says is not the connection's end.
    assert jvm_error(text_of("KeyError: 'x'")) is None


def test_a_worker_is_silent_about_a_closed_socket_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (BrokenPipeError(), ValueError()):
        try:
            raise error
        except (BrokenPipeError, ValueError):
            quiet_print(type(error).__name__)
    quiet_print("outside")
    assert capsys.readouterr().out == "ValueError\noutside\n"


__all__ = ["no_system_file"]


def test_flags_environment_and_file(tmp_path: Path) -> None:
    file = write(tmp_path / "i.toml", '[spark]\nconf = ["spark.a=1", "spark.b = x=y "]\nsplit_size = "64MiB"\n')
    for master in ("local", "local[*]", "local[3, 4]", "local-cluster[2,1,1024]", "yarn", "spark://h:1"):
        assert load({"master": master}, None, HOME).spark.master == master
    made = load({"master": "local[3]"}, file, HOME | {"INDEXD_ENGINE": "spark"})
    assert made.spark == SparkConfig(
        engine="spark", master="local[3]", conf=(("spark.a", "1"), ("spark.b", " x=y ")), split_size=64 << 20
    )
    # The last of two of one key holds; in the environment, one a line.
    assert load({"conf": ["spark.a=1", "spark.a=2"]}, file, HOME).spark.conf == (("spark.a", "2"),)
    environ = HOME | {"INDEXD_CONF": "spark.a=1,2\n\nspark.c=3\n"}
    assert load({}, None, environ).spark.conf == (("spark.a", "1,2"), ("spark.c", "3"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"master": "localhost:7077"}, "is not a master of Spark"),
        ({"master": "sc://host"}, "is not a master of Spark"),
        *(
            ({"master": f"local{slots}"}, "is not a master of Spark")
            for slots in ("[0]", "[x]", "[]", "[-1]", "[2,0]", "[2,x]", "[99999999999]", "-cluster[2]")
        ),
        ({"remote": "spark://host"}, "is not the address of a Spark Connect server"),
        ({"remote": "sc://"}, "is not the address"),
        ({"conf": ["spark.a"]}, 'holds "spark.a": write key=value'),
        ({"conf": ["a=b"]}, 'holds "a=b": write key=value with a key of Spark'),
        ({"engine": "flink"}, "is not one of process, spark"),
        ({"split_size": "-1"}, "is not in 0 to 1TiB"),
        ({"remote": "sc://h", "master": "yarn"}, "on a master or through a Connect server, not on both"),
    ],
)
def test_what_is_refused(flags: dict[str, str], says: str) -> None:
    assert says in str(refused(flags))


def test_a_place_without_the_engine_is_a_slip() -> None:
    assert not uses_spark(load({}, None, HOME))
    assert uses_spark(load({"engine": "spark", "master": "yarn"}, None, HOME))
    assert not uses_spark(load({}, None, HOME | {"INDEXD_MASTER": "yarn"})), "it may be there for other commands"
    with pytest.raises(UsageError) as caught:
        uses_spark(load({"remote": "sc://h"}, None, HOME))
    assert caught.value.line() == "--remote is for Spark, and the engine is this process; add --engine spark"


def test_defaults_and_the_users_own_over_them(tmp_path: Path) -> None:
    local = default_conf(SparkConfig(master="local[2]"), tmp_path, "3g")
    assert (local["spark.driver.memory"], local["spark.ui.enabled"]) == ("3g", "false")
    assert local["spark.driver.host"] == local["spark.driver.bindAddress"] == "127.0.0.1"
    # Executors of a cluster have to reach the driver.
    assert "spark.driver.host" not in default_conf(SparkConfig(master="yarn"), tmp_path, "1g")
    own = (("spark.driver.memory", "8g"), ("spark.driver.extraJavaOptions", "-Xss4m"))
    conf = default_conf(SparkConfig(master="local[2]", conf=own), tmp_path, "3g")
    java = f"-Dlog4j2.configurationFile=file://{tmp_path}/log4j2.properties -Xss4m"
    assert (conf["spark.driver.memory"], conf["spark.driver.extraJavaOptions"]) == ("8g", java)


def test_packages_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_packages(remote=True) == []
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SparkMissingError) as caught, open_session(SparkConfig(), "test"):
        raise AssertionError("it opened")
    assert caught.value.exit_code == 2
    assert caught.value.line().startswith("the Spark pipeline needs pyarrow, not installed in ")
    assert caught.value.line().endswith("; pip install 'rocketmq-indexd[spark]'")
