"""Builds the Java programs under ``tests/real/java`` and runs a JVM on them; ``support.rocketmq`` is the way in.

They are built once per change of their source, with the libraries they need, into ``$INDEXD_TEST_CACHE`` (else
``$XDG_CACHE_HOME/indexd-tests``, else ``~/.cache/indexd-tests``). Everything a JVM prints or logs lands in ``home``.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.missing import installing

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator

SOURCES = Path(__file__).resolve().parent.parent / "real" / "java"
OLDEST_JAVA = 17
_INSTALL_JDK = installing(f"openjdk-{OLDEST_JAVA}-jdk-headless")
EARLIER = "5.3.3"
OLD_CLIENT = "4.9.8"
JVM_FLAGS = (
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "-Dfile.encoding=UTF-8",
    "-Xmx2g",
)
#: Those of a test live for seconds; scripts/bench measures them as they are run elsewhere.
FRUGAL = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")
BUILD_SECONDS = 900


class RocketMQError(Exception):
    """One of the programs could not be built, or did not do what it was asked; the message quotes its output."""


# --- building ---------------------------------------------------------------------------------------------------


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if found is None or not Path(found).exists():
        raise RocketMQError(f"no JDK: found no java in {'JAVA_HOME' if home else 'the PATH'}; {_INSTALL_JDK}")
    said = subprocess.run([found, "-version"], capture_output=True, text=True, check=False, timeout=60).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version[1]) < OLDEST_JAVA:
        raise RocketMQError(f"no JDK {OLDEST_JAVA} or later: {found} says {said.strip()!r}; {_INSTALL_JDK}")
    if not Path(found).resolve().with_name("javac").exists():
        raise RocketMQError(f"{found} belongs to no JDK: there is no javac beside it; {_INSTALL_JDK}")
    return found


def maven_path() -> str:
    """Maven; RocketMQError if there is none."""
    found = shutil.which("mvn")
    if found is None:
        raise RocketMQError(f"no mvn in the PATH; {installing('maven')}")
    return found


def _cache() -> Path:
    own = os.environ.get("INDEXD_TEST_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "indexd-tests"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(target: Path) -> None:
    """Maven in a directory beside the target, then a rename: the target exists whole or not at all."""
    maven = maven_path()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as name:
        place = Path(name, "java")
        shutil.copytree(SOURCES, place, ignore=shutil.ignore_patterns("target"))
        command = [maven, "-q", "-B", "-f", str(place / "pom.xml"), "package"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            raise RocketMQError(f"Maven did not end within {BUILD_SECONDS} s") from None
        if done.returncode != 0:
            raise RocketMQError(f"Maven failed with {done.returncode}: {(done.stdout + done.stderr)[:1500].strip()}")
        (place / "target").rename(target)


@functools.cache
def _ready() -> tuple[str, Path] | RocketMQError:
    """java and the directory with ``classes`` and ``lib``; or why they cannot be had, found out once a process."""
    try:
        java_path = _java()
        digest = hashlib.sha256()
        for path in sorted([SOURCES / "pom.xml", *SOURCES.glob("src/**/*.java")]):
            digest.update(f"{path.relative_to(SOURCES)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        target = _cache() / f"rocketmq-{digest.hexdigest()[:16]}"
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _build(target)
    except (RocketMQError, OSError, subprocess.SubprocessError) as error:
        return error if isinstance(error, RocketMQError) else RocketMQError(f"cannot build: {error}")
    return java_path, target


def why_missing() -> str | None:
    """Why the real classes cannot be run here, or None. The first call builds them."""
    found = _ready()
    return str(found) if isinstance(found, RocketMQError) else None


# --- running ----------------------------------------------------------------------------------------------------


def arguments(**options: object) -> list[str]:
    """``name=value`` words: ``index_safe`` is index-safe, ``in_`` is in, ``set_X`` is RocketMQ's own setting X."""
    return [f"{_name(name)}={value_of(value)}" for name, value in options.items()]


def _name(name: str) -> str:
    if name.startswith("set_"):
        return "set." + name[4:]
    return name.removesuffix("_").replace("_", "-")


def value_of(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


@functools.cache
def _spare_home() -> Path:
    home = Path(tempfile.mkdtemp(prefix="indexd-rocketmq-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    return home


def java(
    main: str, *args: str, home: Path | None = None, flags: tuple[str, ...] = (), version: str | None = None
) -> list[str]:
    """The command line of a main class; ``home`` becomes Java's user.home, where RocketMQ puts its logs.

    ``version``: the store's classes are of that one, EARLIER, or the client's of OLD_CLIENT, instead of those that the
    programs are compiled against.
    """
    found = _ready()
    if isinstance(found, RocketMQError):
        raise found
    path, built = found
    user_home = f"-Duser.home={home or _spare_home()}"
    libraries = [built / "lib"] if version is None else [built / f"lib-{version}", built / "lib"]
    class_path = ":".join([str(built / "classes"), *(f"{path}/*" for path in libraries)])
    frugal = FRUGAL if "PYTEST_VERSION" in os.environ else ()
    return [path, *JVM_FLAGS, *frugal, user_home, *flags, "-cp", class_path, main, *args]


def _log(main: str, home: Path | None) -> Path:
    place = home or _spare_home()
    place.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=place, prefix=f"{main.rpartition('.')[2]}-", suffix=".log")
    os.close(handle)
    return Path(name)


def tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if "|-INFO in org.apache" not in line]
    return f"(all of it in {log})\n" + "\n".join(lines[-30:])


def run(
    main: str,
    *args: str,
    timeout: float = 600,
    home: Path | None = None,
    flags: tuple[str, ...] = (),
    version: str | None = None,
    ends_with: int = 0,
) -> str:
    """Runs a program to its end and returns its standard output. Raises RocketMQError unless it ends as expected.

    ``version`` as for ``java``.
    """
    log = _log(main, home)
    with log.open("wb") as errors:
        done = subprocess.run(
            java(main, *args, home=home, flags=flags, version=version),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            encoding="utf-8",
            timeout=timeout,
            check=False,
        )
    if done.returncode != ends_with:
        raise RocketMQError(f"{main} {' '.join(args)} ended with {done.returncode}: {done.stdout}{tail(log)}")
    return done.stdout


class Program(subprocess.Popen[str]):
    """A running program. As a context manager it closes its input, waits for it to end, and kills it if it does not."""

    def __init__(self, main: str, args: tuple[str, ...], home: Path | None, version: str | None) -> None:
        self.log = _log(main, home)
        with self.log.open("wb") as errors:
            super().__init__(
                java(main, *args, home=home, version=version),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
            )

    def line(self, timeout: float) -> str:
        """The next line of its standard output; RocketMQError, and the program killed, when none comes in time."""
        assert self.stdout is not None
        watchdog = threading.Timer(timeout, self.kill)
        watchdog.start()
        try:
            line = self.stdout.readline()
        finally:
            watchdog.cancel()
        if not line.endswith("\n"):
            raise RocketMQError(f"{self.args!r} said {line!r} and ended with {self.wait(60)}: {tail(self.log)}")
        return line.rstrip("\n")

    def figures(self, timeout: float) -> dict[str, Any]:
        """The next line, which is a JSON object."""
        return figures_of(self.line(timeout))

    def __exit__(self, *_: object) -> None:
        assert self.stdin is not None
        assert self.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        end(self, None, 60)
        self.stdout.close()


def start(main: str, *args: str, home: Path | None = None, version: str | None = None) -> Program:
    """Starts a program and returns at once; use it in a ``with`` block. ``version`` as for ``java``."""
    return Program(main, args, home, version)


def figures_of(line: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def end(process: subprocess.Popen[Any], first: signal.Signals | None, seconds: float) -> None:
    """Waits for a process of ours to end, after a first signal if one is given, and kills it if it does not."""
    if process.poll() is None and first is not None:
        process.send_signal(first)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(60)
