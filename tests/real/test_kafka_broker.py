"""A real Kafka broker's own log directory: checked, rebuilt, and read again by the broker on the rebuilt indexes.

Sealed segments that were written in one run of a broker have exactly the bytes that recovery gives them: its counter of
bytes since the last entry begins at 0 at a start, so what grows over a restart has its entries further apart.

The broker is one node, KRaft, loopback only. It is fetched from Maven Central with the program under ``java-kafka``,
once per change of that; the jars are kept where those of ``support.rocketmq`` are. What it logs is in
``home/broker.log``.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.daemon import compile_kernels, indexd_here
from support.missing import missing, requires
from support.mosquitto import free_port
from support.rocketmq import RocketMQError, built, end
from support.serving import wait_for

SOURCES = Path(__file__).with_name("java-kafka")
BOOT_SECONDS = STOP_SECONDS = 60
TRAFFIC_SECONDS = 120
JVM_FLAGS = ("-Xmx512m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Dfile.encoding=UTF-8")
_CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qk"


def _built() -> tuple[str, Path]:
    found = built(SOURCES, "kafka")
    if isinstance(found, RocketMQError):
        missing(f"a Kafka broker cannot be run: {found}")
    return found


pytestmark = [pytest.mark.real, requires(_built)]


class KafkaBroker:
    """Runs inside a ``with`` block of ``running``, again and again on the same log directory."""

    def __init__(self, home: Path) -> None:
        self.home, self.log_directory, self.port = home, home / "logs", free_port()
        self.log_directory.mkdir(parents=True)
        controller, self._properties = free_port(), home / "server.properties"
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{controller}",
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
        self._properties.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))
        self._run("kafka.tools.StorageTool", "format", "-t", _CLUSTER_ID, "-c", str(self._properties))

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """From when it says that it is up; it takes connections before that, and refuses what they ask."""
        path = self.home / "broker.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                self._java("kafka.Kafka", str(self._properties)), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

        def is_up() -> bool:
            assert process.poll() is None, path.read_text(errors="replace")[-3000:]
            return b"Kafka Server started" in path.read_bytes()

        try:
            wait_for(is_up, BOOT_SECONDS)
            yield process
        finally:
            end(process, signal.SIGTERM, STOP_SECONDS)

    def traffic(self, command: str, *args: str) -> dict[str, dict[str, Any]]:
        """Runs the program ``Traffic`` against it; what it says of each topic."""
        said = self._run("Traffic", command, f"127.0.0.1:{self.port}", *args)
        return {row["topic"]: row for row in map(json.loads, said.splitlines())}

    def _java(self, main: str, *args: str) -> list[str]:
        path, place = _built()
        flags = [*JVM_FLAGS, f"-Djava.io.tmpdir={self.home}", f"-Duser.home={self.home}"]
        return [path, *flags, "-cp", f"{place / 'classes'}:{place / 'lib'}/*", main, *args]

    def _run(self, main: str, *args: str) -> str:
        command = self._java(main, *args)
        done = subprocess.run(command, capture_output=True, text=True, timeout=TRAFFIC_SECONDS, check=False)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return done.stdout


BUSY = 5
SUFFIXES = (".index", ".timeindex")
SEGMENT = "segment.bytes=1048576"
TOPICS = {
    "plain": (SEGMENT,),
    "appended": (SEGMENT, "message.timestamp.type=LogAppendTime"),
    "tx-made": (SEGMENT, "compression.type=lz4"),
    "preallocated": (SEGMENT, "preallocate=true", "index.interval.bytes=1000"),
    "compacted": (SEGMENT, "cleanup.policy=compact", "min.cleanable.dirty.ratio=0.01"),
}
BEGIN = 1_700_000_000_000


def indexd(*args: object) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, the JSON lines, standard error."""
    done = indexd_here("kafka", *args, "--json")
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def read(broker: KafkaBroker) -> dict[str, dict[str, Any]]:
    """What a consumer sees, and the offsets that the broker finds by time; not of what is compacted meanwhile."""
    return broker.traffic("read", str(BEGIN - 500), str(BEGIN + 25_000), "1700", "plain", "tx-made", "preallocated")


def send(broker: KafkaBroker, **counts: int) -> None:
    """So many messages to each topic, which is made when it is not there."""
    words = [",".join((topic, str(count), str(count % 97), *TOPICS[topic])) for topic, count in counts.items()]
    assert {topic: row["sent"] for topic, row in broker.traffic("send", *words).items()} == counts


def indexes(directory: Path, *, sealed: bool = False) -> dict[str, bytes]:
    """Every index of the partitions; with ``sealed`` not those of each partition's newest segment."""
    found = {}
    for path in [path for suffix in SUFFIXES for path in directory.glob(f"*/*{suffix}")]:
        newest = max(path.parent.glob("*.log"), default=path)
        if not sealed or path.stem != newest.stem:
            found[f"{path.parent.name}/{path.name}"] = path.read_bytes()
    return found


def damage(directory: Path) -> None:
    """Take the indexes away, or what is in them."""
    for number, path in enumerate(sorted(path for suffix in SUFFIXES for path in directory.glob("*-0/*" + suffix))):
        if number % 3 == 0:
            path.unlink()
        else:
            path.write_bytes(bytes([0x7F * (number % 3 - 1)]) * path.stat().st_size)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[KafkaBroker, dict[str, dict[str, Any]]]:
    """A broker after one run that ended cleanly, and what it answered; while it ran, nobody else may look."""
    compile_kernels()
    broker = KafkaBroker(tmp_path_factory.mktemp("kafka"))
    with broker.running() as process:
        send(broker, **dict(zip(TOPICS, (2500, 2400, 1500, 2300, 2600), strict=True)))
        answers = read(broker)
        compacted = broker.log_directory / "compacted-0"
        # Of some 4 MiB with 300 keys the cleaner leaves little beside the newest segment.
        wait_for(lambda: sum(path.stat().st_size for path in sorted(compacted.glob("*.log"))[:-1]) <= 1 << 20, 30)
        for place in (broker.log_directory, broker.log_directory / "plain-0"):
            for command in (("check", place), ("rebuild", place), ("rebuild", "--out", broker.home / "out", place)):
                code, rows, error = indexd(*command)
                assert (code, rows) == (BUSY, [])
                assert f"is locked by process {process.pid}" in error
    return broker, answers


def test_a_clean_directory_and_its_rebuilding(
    stopped: tuple[KafkaBroker, dict[str, dict[str, Any]]], tmp_path: Path
) -> None:
    broker, _ = stopped
    code, rows, _ = indexd("check", broker.log_directory)
    assert (code, rows[-1]["findings"]) == (0, 0)
    # The cleaner leaves the files that it has replaced for a minute.
    assert {row["what"] for row in rows[:-1]} <= {"left_alone"}
    assert rows[-1]["partitions"] >= len(TOPICS) + 1  # and the cluster's own
    assert rows[-1]["batches"] > 1000
    for topic in TOPICS:
        interval = 1000 if topic == "preallocated" else 4096
        out = tmp_path / "out"
        partition = broker.log_directory / f"{topic}-0"
        assert indexd("rebuild", partition, "--interval", interval, "--out", out / partition.name)[0] == 0
    rebuilt = indexes(tmp_path / "out")
    own = indexes(broker.log_directory)
    assert len(rebuilt) >= 2 * 3 * len(TOPICS)
    assert {name for name in rebuilt if rebuilt[name] != own[name]} == set()


def test_a_broker_answers_from_rebuilt_indexes(
    stopped: tuple[KafkaBroker, dict[str, dict[str, Any]]],
) -> None:
    """After a clean stop it believes what it finds."""
    broker, answers = stopped
    own = indexes(broker.log_directory)
    damage(broker.log_directory)
    assert indexd("check", broker.log_directory)[0] == 1
    assert indexd("rebuild", broker.log_directory)[0] == 0
    preallocated = broker.log_directory / "preallocated-0"
    assert indexd("rebuild", preallocated, "--interval", 1000)[0] == 0
    assert indexd("check", broker.log_directory)[0] == 0
    rebuilt = indexes(broker.log_directory)
    assert {name for name in own if own[name] != rebuilt[name]} == set()
    with broker.running():
        assert read(broker) == answers
    assert indexd("check", broker.log_directory)[0] == 0


def test_a_broker_that_was_killed(stopped: tuple[KafkaBroker, dict[str, dict[str, Any]]]) -> None:
    broker, _ = stopped
    with broker.running() as process:
        send(broker, **{"plain": 1200, "tx-made": 1100})
        answers = read(broker)
        process.kill()
    code, rows, _ = indexd("check", broker.log_directory)
    assert (code, {row["what"] for row in rows[:-1]} - {"left_alone"}) == (0, {"not_closed"})
    damage(broker.log_directory)
    assert indexd("rebuild", broker.log_directory)[0] == 0
    assert indexd("check", broker.log_directory)[0] == 0
    ours = indexes(broker.log_directory, sealed=True)
    with broker.running():  # its own recovery goes over what the last run may have touched
        assert read(broker) == answers
    theirs = indexes(broker.log_directory, sealed=True)
    assert {name for name in ours if ours[name] != theirs.get(name) and not name.startswith("preallocated")} == set()
    assert indexd("check", broker.log_directory)[0] == 0
