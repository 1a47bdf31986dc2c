"""Real clusters on loopback, from the jars that pyspark brings: a standalone master with workers, and a Connect server.

Each part is a process that is started here and ended by its pid. What uses one is a process of its own, too: a classic
session is one a process, and the tests' own is local::

    with standalone(folder) as (flags, workers):
        out = output_of(start(sys.executable, "-c", SCRIPT, *flags))
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pyspark
from pyspark.sql import SparkSession

from indexd.cli.jobs import spark_session
from indexd.cli.output import common_options, load_config
from indexd.spark.session import require_java, write_shim
from support.daemon import environment
from support.mosquitto import free_port

SPARK_HOME = Path(pyspark.__file__).parent
TESTS = Path(__file__).resolve().parents[1]
LOOPBACK = "127.0.0.1"
# Less of two cores for the compilers of many short-lived JVMs.
FRUGAL = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
WAIT_SECONDS = 300.0
# What pyspark's own daemon, below the driver's JVM, may say when that is done with a planning worker before the worker
# is. On a local master indexd's daemon takes its place, and the tests there allow no word.
_BROKEN_PIPE = re.compile(
    r"Traceback \(most recent call last\):\n(  File \"[^\"]*pyspark/daemon\.py\", line \d+, in \w+\n)*"
    r"(BrokenPipeError: \[Errno 32\] Broken pipe\n)?"
)


def wait_for(what: str, found: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    """Return once ``found()``; AssertionError when that takes too long."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)


def start(*words: object) -> subprocess.Popen[str]:
    """A process of its own, which can import ``support``; see :func:`output_of`."""
    pipe = subprocess.PIPE
    command = list(map(str, words))
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, encoding="utf-8", env=spark_environment()
    )


def output_of(process: subprocess.Popen[str], timeout: float = WAIT_SECONDS) -> str:
    """What it prints until it ends, which has to be well, and quiet on standard error."""
    try:
        out, errors = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert _BROKEN_PIPE.sub("", errors) == "", errors
    return out


@functools.cache
def _java_home() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="tests-java-")
    write_shim(Path(folder.name), require_java(None, os.environ))
    return folder


def spark_environment() -> dict[str, str]:
    """What every process of a cluster is started with: the tests' own environment, and small, quiet JVMs."""
    return {
        **environment(),
        "JAVA_HOME": _java_home().name,
        "PYTHONPATH": str(TESTS),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": LOOPBACK,
    }


@contextmanager
def _jvm(command: list[str], log: Path, ready: str, **more: str) -> Iterator[psutil.Process]:
    """A JVM once its output, in a file, holds these words; killed behind the block, with all that it started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=spark_environment() | more,
            cwd=log.parent,
        )

    def is_ready() -> bool:
        text = log.read_text(encoding="utf-8", errors="replace")
        assert process.poll() is None, f"it ended:\n{text[-4000:]}"
        return ready in text

    try:
        wait_for(f"{ready!r} in {log}", is_ready)
        yield psutil.Process(process.pid)
    finally:
        below = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for one in below:  # executors, Python workers
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def _flags(conf: Mapping[str, str]) -> list[str]:
    return [word for item in conf.items() for word in ("--conf", "=".join(item))]


@contextmanager
def standalone(folder: Path) -> Iterator[tuple[list[str], list[psutil.Process]]]:
    """A master and two workers of one core each: what names them to commands of indexd, and the workers."""
    port = str(free_port())
    url = f"spark://{LOOPBACK}:{port}"
    conf = {
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.extraJavaOptions": FRUGAL,
        "spark.executor.extraJavaOptions": FRUGAL,
        "spark.executor.memory": "512m",
        "spark.pyspark.python": sys.executable,
        "spark.sql.shuffle.partitions": "2",
    }
    small = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": FRUGAL}
    command = [str(SPARK_HOME / "bin" / "spark-class")]
    master = [*command, "org.apache.spark.deploy.master.Master", "--host", LOOPBACK, "--port", port]
    worker = [*command, "org.apache.spark.deploy.worker.Worker", "--host", LOOPBACK, "--cores", "1"]
    with ExitStack() as stack:
        stack.enter_context(_jvm([*master, "--webui-port", "0"], folder / "master.log", "New state: ALIVE", **small))
        workers = []
        for number in range(2):
            options = ["--webui-port", "0", "--memory", "600m", "--work-dir", str(folder / f"work{number}"), url]
            log, ready = folder / f"worker{number}.log", "Successfully registered with master"
            workers.append(stack.enter_context(_jvm([*worker, *options], log, ready, **small)))
        yield ["--master", url, *_flags(conf)], workers


def kill_executor(worker: psutil.Process) -> None:
    """SIGKILL for one that runs; the worker starts another."""

    def executors() -> list[psutil.Process]:
        return [one for one in worker.children() if "java" in one.name()]

    wait_for("an executor", lambda: bool(executors()))
    executors()[0].kill()


@contextmanager
def connect_server(folder: Path) -> Iterator[list[str]]:
    """A Spark Connect server over local[2]: what names it to commands of indexd."""
    port = str(free_port())
    conf = {
        "spark.connect.grpc.binding.address": LOOPBACK,
        "spark.connect.grpc.binding.port": port,
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.driver.extraJavaOptions": FRUGAL,
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }
    command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[2]", *_flags(conf)]
    command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    with _jvm(command, folder / "connect.log", "Spark Connect server started at"):
        yield ["--remote", f"sc://{LOOPBACK}:{port}"]


@contextmanager
def session_of(flags: Sequence[str]) -> Iterator[SparkSession]:
    """``--master ... --conf ...`` as words of a command line."""
    config = load_config(common_options().parse_args(list(flags)))
    with spark_session(config, "tests") as spark:
        yield spark


def read_source(spark: SparkSession, store: Path, split_size: int) -> list[list[Any]]:
    """What the data source finds in ``store``."""
    log = spark.read.format("rocketmq_commitlog").option("columns", "phyOffset,topic,keys")
    rows = log.option("splitSize", str(split_size)).load(str(store)).collect()
    return sorted([row["phyOffset"], row["topic"], row["keys"]] for row in rows)
