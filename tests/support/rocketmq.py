"""RocketMQ's own classes, for tests that compare with the real thing.

::

    generate(tmp_path / "store", count=2000, profile="varied")        # a store, written by DefaultMessageStore
    with start("Store", "write", *arguments(store=tmp_path / "live", count=500, hold=True)) as writer:
        writer.line(60)                                                # "ready": the store is open
        writer.figures(60)                                             # all dispatched; open until the block ends
    with Broker(tmp_path / "broker", messageIndexEnable=False) as broker:
        run("Client", "send", *arguments(namesrv=broker.namesrv, count=200, out=tmp_path / "sent.jsonl"))

A test file says ``pytestmark = REAL``, a single test ``@requires_rocketmq``. Whatever a JVM prints or logs lands in the
``home`` it was given (or beside the store), never in the tree; everything here talks to loopback only.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self, TypeVar

import pytest

from support.missing import installing, missing, requires

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


def _build(sources: Path, target: Path) -> None:
    """Maven in a directory beside the target, then a rename: the target exists whole or not at all."""
    maven = maven_path()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as name:
        place = Path(name, "java")
        shutil.copytree(sources, place, ignore=shutil.ignore_patterns("target"))
        command = [maven, "-q", "-B", "-f", str(place / "pom.xml"), "package"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        except subprocess.TimeoutExpired:
            raise RocketMQError(f"Maven did not end within {BUILD_SECONDS} s") from None
        if done.returncode != 0:
            raise RocketMQError(f"Maven failed with {done.returncode}: {(done.stdout + done.stderr)[:1500].strip()}")
        (place / "target").rename(target)


@functools.cache
def built(sources: Path = SOURCES, name: str = "rocketmq") -> tuple[str, Path] | RocketMQError:
    """java and the directory with ``classes`` and ``lib``; or why they cannot be had, found out once a process."""
    try:
        java_path = _java()
        digest = hashlib.sha256()
        for path in sorted([sources / "pom.xml", *sources.glob("src/**/*.java")]):
            digest.update(f"{path.relative_to(sources)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        target = _cache() / f"{name}-{digest.hexdigest()[:16]}"
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _build(sources, target)
    except (RocketMQError, OSError, subprocess.SubprocessError) as error:
        return error if isinstance(error, RocketMQError) else RocketMQError(f"cannot build: {error}")
    return java_path, target


def why_missing() -> str | None:
    """Why the real classes cannot be run here, or None. The first call builds them."""
    found = built()
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
    found = built()
    if isinstance(found, RocketMQError):
        raise found
    path, place = found
    user_home = f"-Duser.home={home or _spare_home()}"
    libraries = [place / "lib"] if version is None else [place / f"lib-{version}", place / "lib"]
    class_path = ":".join([str(place / "classes"), *(f"{path}/*" for path in libraries)])
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


__all__ = [
    "REAL",
    "Broker",
    "Program",
    "RocketMQError",
    "arguments",
    "generate",
    "java",
    "mqadmin",
    "requires_rocketmq",
    "run",
    "start",
    "why_missing",
]

HALTED = 137  # what Store write exit=halt ends with
BOOT_SECONDS = 90
STOP_SECONDS = 60
BROKER_CONF: dict[str, object] = {
    "brokerClusterName": "TestCluster",
    "brokerName": "test",
    "brokerId": 0,
    "brokerIP1": "127.0.0.1",
    "brokerIP2": "127.0.0.1",
    "bindAddress": "127.0.0.1",
    "mappedFileSizeCommitLog": 1 << 20,
    "mappedFileSizeConsumeQueue": 6000,
    "maxHashSlotNum": 1000,
    "maxIndexNum": 4000,
    "maxMessageSize": 262144,
    "diskMaxUsedSpaceRatio": 95,
    "fileReservedTime": 24 * 3653,
    "cleanFileForciblyEnable": False,
    "timerWheelEnable": False,
    # Its thread spins without a pause until this is over for the first time (ms; the default is 10,000).
    "transactionMetricFlushInterval": 200,
}

Test = TypeVar("Test", bound="Callable[..., Any]")


def _need_rocketmq() -> None:
    reason = why_missing()
    if reason is not None:
        missing(f"RocketMQ's own classes cannot be run: {reason}")


REAL = [pytest.mark.real, requires(_need_rocketmq)]


def requires_rocketmq(test: Test) -> Test:
    """Marks one test as ``real``: the classes are built when it starts."""
    for mark in REAL:
        test = mark(test)
    return test


def generate(store: Path, *, timeout: float = 600, **options: object) -> dict[str, Any]:
    """Runs ``Store write`` to its end and returns its figures; logs go to ``<store>.jvm`` beside the store."""
    words = arguments(store=store, **options)
    ends_with = HALTED if options.get("exit") == "halt" else 0
    home = store.with_name(store.name + ".jvm")
    return figures_of(run("Store", "write", *words, timeout=timeout, home=home, ends_with=ends_with).splitlines()[-1])


def mqadmin(namesrv: str, *args: str, home: Path | None = None, timeout: float = 60) -> str:
    """What ``mqadmin ARGS`` prints when it asks the given name server."""
    flags = (f"-Drocketmq.namesrv.addr={namesrv}",)
    return run("org.apache.rocketmq.tools.command.MQAdminStartup", *args, home=home, flags=flags, timeout=timeout)


def _free_block(count: int) -> int:
    """The first of ``count`` successive ports that nobody listens on, below those the kernel hands out itself."""
    for _ in range(200):
        first = random.randrange(20_000, 32_000 - count)
        try:
            with contextlib.ExitStack() as sockets:
                for port in range(first, first + count):
                    sockets.enter_context(socket.socket()).bind(("", port))
        except OSError:
            continue
        return first
    raise RocketMQError(f"found no {count} free ports in a row")


def _knows_a_broker(namesrv_port: int) -> bool:
    """Asks a name server (remoting request 105) for the topic that every broker which makes topics announces."""
    request = {"code": 105, "language": "JAVA", "version": 0, "opaque": 1, "flag": 0, "extFields": {"topic": "TBW102"}}
    header = json.dumps(request).encode()
    with socket.create_connection(("127.0.0.1", namesrv_port), timeout=10) as connection:
        connection.sendall(struct.pack(">II", 4 + len(header), len(header)) + header)
        with connection.makefile("rb") as answer:
            _, size = struct.unpack(">II", answer.read(8))
            return bool(json.loads(answer.read(size))["code"] == 0)


class Broker:
    """A real name server and a real broker, both on loopback, with small files; ready when the ``with`` block begins.

    ``store`` is ``home/store`` unless told otherwise; further arguments are keys of broker.conf and win over the small
    sizes in BROKER_CONF. RocketMQ's logs are in ``home/broker/logs`` and ``home/namesrv/logs``. ``stop`` ends both in
    order; ``kill`` ends the broker as kill -9 does, leaving its abort file. RocketMQ offers no way to bind its
    replication port (HA) to one address; everything else listens on loopback.
    """

    def __init__(self, home: Path, store: Path | None = None, **conf: object) -> None:
        first = _free_block(6)
        self.home = home
        self.store = store or home / "store"
        self.namesrv_port = first
        self.namesrv = f"127.0.0.1:{first}"
        self.port = first + 3  # one below is free, two below is its second listener (VIP), one above replicates (HA)
        self.address = f"127.0.0.1:{self.port}"
        self._namesrv_conf = {"listenPort": first, "bindAddress": "127.0.0.1"}
        self._conf = BROKER_CONF | {
            "namesrvAddr": self.namesrv,
            "listenPort": self.port,
            "haListenPort": self.port + 1,
            "storePathRootDir": self.store,
            "storePathCommitLog": self.store / "commitlog",
            **conf,
        }
        self._processes: list[subprocess.Popen[bytes]] = []  # in the order they were started

    def __repr__(self) -> str:
        running = sum(process.poll() is None for process in self._processes)
        return f"Broker({self.address}, namesrv={self.namesrv}, store={self.store}, {running} of 2 running)"

    def __enter__(self) -> Self:
        self.home.mkdir(parents=True, exist_ok=True)
        try:
            self._boot("org.apache.rocketmq.namesrv.NamesrvStartup", "namesrv", self._namesrv_conf)
            self._boot("org.apache.rocketmq.broker.BrokerStartup", "broker", self._conf)
            self._wait_for_route()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The broker's process id."""
        return self._processes[1].pid

    def stop(self) -> None:
        """Ends the broker as an operator would (it takes ten seconds), then the name server, which keeps nothing."""
        for process in self._processes[1:]:
            end(process, signal.SIGTERM, STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ends the broker, then the name server, with SIGKILL."""
        for process in reversed(self._processes):
            end(process, signal.SIGKILL, STOP_SECONDS)

    def mqadmin(self, *args: str) -> str:
        """What ``mqadmin ARGS`` prints, asked of this name server."""
        return mqadmin(self.namesrv, *args, home=self.home / "mqadmin")

    def _wait_for_route(self) -> None:
        """The broker says that it is up without waiting for its name server; its next try is 10 seconds later."""
        deadline = time.monotonic() + BOOT_SECONDS
        while not _knows_a_broker(self.namesrv_port):
            if time.monotonic() > deadline:
                raise RocketMQError(f"the name server knows no broker: {tail(self.home / 'broker.out')}")
            time.sleep(0.05)

    def _boot(self, main: str, name: str, conf: dict[str, Any]) -> None:
        """Starts one server and waits until it says that it is up."""
        path = self.home / f"{name}.conf"
        path.write_text("".join(f"{key}={value_of(value)}\n" for key, value in conf.items()), encoding="utf-8")
        log = self.home / f"{name}.out"
        environment = {k: v for k, v in os.environ.items() if k != "NAMESRV_ADDR"} | {"ROCKETMQ_HOME": str(self.home)}
        with log.open("wb") as out:
            command = java(main, "-c", str(path), home=self.home / name)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment
            )
        self._processes.append(process)
        deadline = time.monotonic() + BOOT_SECONDS
        while b"boot success" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RocketMQError(f"the {name} is not up, exit status {process.poll()}: {tail(log)}")
            time.sleep(0.05)
