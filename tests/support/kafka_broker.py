"""A real Kafka broker, for tests that compare with what it writes: one node, KRaft, loopback only.

::

    with KafkaBroker(tmp_path / "kafka") as broker:                        # formatted at the first start
        broker.traffic("send", "plain,2000,7,segment.bytes=1048576")
    broker.log_directory / "plain-0"                                       # stopped cleanly

It is fetched from Maven Central with the program under ``tests/real/java-kafka``, once per change of that; the jars
are kept where those of ``support.rocketmq`` are. What the broker logs is in ``home/broker-N.log``.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Self

import pytest

from support.missing import missing, requires
from support.rocketmq import BUILD_SECONDS, RocketMQError, _cache, _java, _locked, end, maven_path

SOURCES = Path(__file__).resolve().parent.parent / "real" / "java-kafka"
BOOT_SECONDS = 60
STOP_SECONDS = 60
TRAFFIC_SECONDS = 120
JVM_FLAGS = ("-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dfile.encoding=UTF-8")
_CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qk"


class KafkaError(Exception):
    """The broker could not be built or started, or the program failed; the message quotes its output."""


@functools.cache
def _ready() -> tuple[str, Path] | KafkaError:
    """java and the directory with ``classes`` and ``lib``; or why they cannot be had, found out once a process."""
    try:
        java_path = _java()
        digest = hashlib.sha256()
        for path in sorted([SOURCES / "pom.xml", *SOURCES.glob("src/**/*.java")]):
            digest.update(f"{path.relative_to(SOURCES)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        target = _cache() / f"kafka-{digest.hexdigest()[:16]}"
        with _locked(target.with_suffix(".lock")):
            if not target.exists():
                _build(target)
    except (KafkaError, RocketMQError, OSError, subprocess.SubprocessError) as error:
        return KafkaError(f"cannot build: {error}")
    return java_path, target


def _build(target: Path) -> None:
    """Maven in a directory beside the target, then a rename: the target exists whole or not at all."""
    maven = maven_path()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as name:
        place = Path(name, "java")
        shutil.copytree(SOURCES, place, ignore=shutil.ignore_patterns("target"))
        command = [maven, "-q", "-B", "-f", str(place / "pom.xml"), "package"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        if done.returncode != 0:
            raise KafkaError(f"Maven failed with {done.returncode}: {(done.stdout + done.stderr)[:1500].strip()}")
        (place / "target").rename(target)


def _need_kafka() -> None:
    found = _ready()
    if isinstance(found, KafkaError):
        missing(f"a Kafka broker cannot be run: {found}")


REAL = [pytest.mark.real, requires(_need_kafka)]


def _free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as other:
        one.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


class KafkaBroker:
    """Running inside a ``with`` block, which ends it cleanly; it may be entered again, on the same log directory."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log_directory = home / "logs"
        self.port, self._controller_port = _free_ports()
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"KafkaBroker(127.0.0.1:{self.port}, {self.log_directory})"

    def __enter__(self) -> Self:
        properties = self.home / "server.properties"
        if not self._starts:
            self.log_directory.mkdir(parents=True)
            properties.write_text("".join(f"{key}={value}\n" for key, value in self._settings().items()))
            self._run("kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(properties))
        self._starts += 1
        with self._log().open("wb") as log:
            command = self._java("kafka.Kafka", str(properties))
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            end(self._process, signal.SIGTERM, STOP_SECONDS)

    @property
    def pid(self) -> int:
        """Of the process that was started last."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """End it as kill -9 does."""
        if self._process is not None:
            end(self._process, signal.SIGKILL, STOP_SECONDS)

    def traffic(self, command: str, *args: str) -> dict[str, dict[str, Any]]:
        """Runs the program ``Traffic`` against it; what it says of each topic."""
        said = self._run("Traffic", command, f"127.0.0.1:{self.port}", *args)
        rows = [json.loads(line) for line in said.splitlines()]
        return {row["topic"]: row for row in rows}

    def _settings(self) -> dict[str, object]:
        return {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{self._controller_port}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self.port}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": self.log_directory,
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "log.retention.ms": -1,  # what is sent pretends to be old
            "group.initial.rebalance.delay.ms": 0,
            "log.cleaner.backoff.ms": 200,
            "log.cleaner.dedupe.buffer.size": 8 << 20,
            "log.initial.task.delay.ms": 1000,
        }

    def _java(self, main: str, *args: str) -> list[str]:
        found = _ready()
        if isinstance(found, KafkaError):
            raise found
        path, built = found
        flags = [*JVM_FLAGS, f"-Djava.io.tmpdir={self.home}", f"-Duser.home={self.home}"]
        return [path, *flags, "-cp", f"{built / 'classes'}:{built / 'lib'}/*", main, *args]

    def _log(self) -> Path:
        return self.home / f"broker-{self._starts}.log"

    def _run(self, main: str, *args: str) -> str:
        done = subprocess.run(
            self._java(main, *args),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TRAFFIC_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise KafkaError(
                f"{main} {' '.join(args)} ended with {done.returncode}: {(done.stdout + done.stderr)[-3000:]}"
            )
        return done.stdout

    def _wait(self) -> None:
        """Until the broker says that it is up; it takes connections before that, and refuses what they ask."""
        deadline = time.monotonic() + BOOT_SECONDS
        while b"Kafka Server started" not in self._log().read_bytes():
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = self._log().read_text(errors="replace").splitlines()[-30:]
                raise KafkaError(f"the broker is not up, exit status {self._process.poll()}:\n" + "\n".join(tail))
            time.sleep(0.05)
