"""Real clusters on loopback, from the jars that pyspark brings: a standalone master with workers, and a Connect server.

Each part is a process that is started here and ended by its pid. What uses one is a process of its own, too: a classic
session is one a process, and the tests' own is local::

    with Standalone(folder, workers=2) as cluster:
        out = output_of(start(sys.executable, "-c", SCRIPT, *cluster.flags))
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil  # type: ignore[import-untyped]  # it ships no types
import pyspark

from indexd.cli.jobs import spark_session
from indexd.cli.output import common_options, load_config
from indexd.spark.session import require_java, write_shim
from support.daemon import environment
from support.mosquitto import free_port

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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


class Process:
    """One JVM: its output in a file, its end by its pid."""

    def __init__(self, command: list[str], log: Path, env: Mapping[str, str]) -> None:
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                cwd=log.parent,
            )
        self.pid = self._process.pid

    def wait_for_words(self, words: str) -> None:
        """Until its output holds them."""
        wait_for(f"{words!r} in {self.log}", lambda: self._says(words))

    def _says(self, words: str) -> bool:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        assert self._process.poll() is None, f"it ended:\n{text[-4000:]}"
        return words in text

    def kill(self) -> None:
        """SIGKILL for it and for what it started: executors, Python workers."""
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self.pid).children(recursive=True)
            self._process.kill()
            for process in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._process.wait()


class Standalone:
    """A master and workers of one core each; for a ``with`` block.

    ``flags`` are for commands of indexd: they name the master, and what a driver on loopback has to be told.
    """

    def __init__(self, folder: Path, *, workers: int = 2) -> None:
        self._folder = folder
        self._count = workers
        self._started = 0
        self.workers: list[Process] = []
        port = free_port()
        self.url = f"spark://{LOOPBACK}:{port}"
        self.conf = {
            "spark.driver.host": LOOPBACK,
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.extraJavaOptions": FRUGAL,
            "spark.executor.extraJavaOptions": FRUGAL,
            "spark.executor.memory": "512m",
            "spark.pyspark.python": sys.executable,
            "spark.sql.shuffle.partitions": "2",
        }
        self.flags = ["--master", self.url]
        for item in self.conf.items():
            self.flags += ["--conf", "=".join(item)]

    def __enter__(self) -> Self:
        port = self.url.rpartition(":")[2]
        self._master = self._start("master", "--host", LOOPBACK, "--port", port, "--webui-port", "0")
        try:
            self._master.wait_for_words("New state: ALIVE")
            for _ in range(self._count):
                self.add_worker(wait=False)
            for worker in self.workers:
                worker.wait_for_words("Successfully registered with master")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.workers, self._master):
            process.kill()

    def add_worker(self, *, wait: bool = True) -> Process:
        """One more."""
        options = ["--host", LOOPBACK, "--webui-port", "0", "--cores", "1", "--memory", "600m"]
        options += ["--work-dir", str(self._folder / f"work{self._started}")]
        worker = self._start("worker", *options, self.url)
        self.workers.append(worker)
        if wait:
            worker.wait_for_words("Successfully registered with master")
        return worker

    def kill_executor(self, worker: Process) -> None:
        """SIGKILL for one that runs; the worker starts another."""

        def executors() -> list[psutil.Process]:
            below = psutil.Process(worker.pid).children()
            return [one for one in below if any("CoarseGrainedExecutor" in word for word in _words(one))]

        wait_for("an executor", lambda: bool(executors()))
        executors()[0].kill()

    def _start(self, kind: str, *options: str) -> Process:
        number, self._started = self._started, self._started + 1
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}.{kind.title()}", *options]
        small = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": FRUGAL}
        return Process(command, self._folder / f"{kind}{number}.log", spark_environment() | small)


def _words(process: psutil.Process) -> list[str]:
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return words


class ConnectServer:
    """A Spark Connect server over local[2]; for a ``with`` block. ``flags`` are for commands of indexd."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "connect.log"
        self._port = free_port()
        self.url = f"sc://{LOOPBACK}:{self._port}"
        self.flags = ["--remote", self.url]

    def __enter__(self) -> Self:
        conf = {
            "spark.connect.grpc.binding.address": LOOPBACK,
            "spark.connect.grpc.binding.port": str(self._port),
            "spark.driver.host": LOOPBACK,
            "spark.driver.bindAddress": LOOPBACK,
            "spark.driver.extraJavaOptions": FRUGAL,
            "spark.sql.shuffle.partitions": "2",
            "spark.ui.enabled": "false",
        }
        command = [str(SPARK_HOME / "bin" / "spark-submit"), "--master", "local[2]"]
        for item in conf.items():
            command += ["--conf", "=".join(item)]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
        self.process = Process(command, self._log, spark_environment())
        try:
            self.process.wait_for_words("Spark Connect server started at")
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()


@contextmanager
def session_of(flags: Sequence[str]) -> Iterator[SparkSession]:
    """``--master ... --conf ...`` as words of a command line."""
    config = load_config(common_options().parse_args(list(flags)))
    with spark_session(config, "tests") as spark:
        yield spark


def read_source(spark: SparkSession, store: Path, split_size: int) -> dict[str, Any]:
    """What the data source finds in ``store``, and what it says of one that is not there."""
    log = spark.read.format("rocketmq_commitlog").option("columns", "phyOffset,topic,keys")
    log = log.option("splitSize", str(split_size))
    rows = log.load(str(store)).collect()
    missing = ""
    try:
        log.load(str(store / "nothing")).count()
    except Exception as error:  # noqa: BLE001 - whichever Spark makes of it, the line is what counts
        missing = str(error)
    return {"rows": sorted([row["phyOffset"], row["topic"], row["keys"]] for row in rows), "missing": missing}
