"""A real Kafka broker's own log directory: checked, rebuilt, and read again by the broker on the rebuilt indexes.

Sealed segments that were written in one run of a broker have exactly the bytes that recovery gives them: its counter of
bytes since the last entry begins at 0 at a start, so what grows over a restart has its entries further apart.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.daemon import compile_kernels, indexd_here
from support.kafka_broker import REAL, KafkaBroker

pytestmark = REAL

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


def indexes(directory: Path, *, sealed: bool) -> dict[str, bytes]:
    """Every index of the partitions; with ``sealed`` not those of each partition's newest segment."""
    found = {}
    for partition in sorted(path for path in directory.iterdir() if path.is_dir()):
        bases = sorted(path.stem for path in partition.glob("*.log")) or sorted(
            {path.stem for path in partition.glob("*.index")}
        )
        for base in bases[:-1] if sealed else bases:
            for suffix in SUFFIXES:
                path = partition / (base + suffix)
                if path.exists():
                    found[f"{partition.name}/{path.name}"] = path.read_bytes()
    return found


def damage(directory: Path) -> None:
    """Take the indexes away, some of each kind in its own way."""
    indexes = [path for suffix in SUFFIXES for path in directory.glob("*-0/*" + suffix)]
    for number, path in enumerate(sorted(indexes)):
        size = path.stat().st_size
        if number % 4 == 0:
            path.unlink()
        elif number % 4 == 1:
            path.write_bytes(bytes(size))
        elif number % 4 == 2:
            path.write_bytes(path.read_bytes()[: size // 2 + 1])
        else:
            path.write_bytes(b"\x7f" * size)


def wait_until_compacted(partition: Path) -> None:
    """Of some 4 MiB with 300 keys the cleaner leaves little beside the newest segment."""
    deadline = time.monotonic() + 30
    while sum(path.stat().st_size for path in sorted(partition.glob("*.log"))[:-1]) > 1 << 20:
        assert time.monotonic() < deadline, list(partition.iterdir())
        time.sleep(0.2)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[KafkaBroker, dict[str, dict[str, Any]]]:
    """A broker after one run that ended cleanly, and what it answered; while it ran, nobody else may look."""
    compile_kernels()
    broker = KafkaBroker(tmp_path_factory.mktemp("kafka"))
    with broker:
        send(broker, **dict(zip(TOPICS, (2500, 2400, 1500, 2300, 2600), strict=True)))
        answers = read(broker)
        wait_until_compacted(broker.log_directory / "compacted-0")
        for place in (broker.log_directory, broker.log_directory / "plain-0"):
            for command in (("check", place), ("rebuild", place), ("rebuild", "--out", broker.home / "out", place)):
                code, rows, error = indexd(*command)
                assert (code, rows) == (BUSY, [])
                assert f"is locked by process {broker.pid}" in error
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
    rebuilt = indexes(tmp_path / "out", sealed=False)
    own = indexes(broker.log_directory, sealed=False)
    assert len(rebuilt) >= 2 * 3 * len(TOPICS)
    assert {name for name in rebuilt if rebuilt[name] != own[name]} == set()


def test_a_broker_answers_from_rebuilt_indexes(
    stopped: tuple[KafkaBroker, dict[str, dict[str, Any]]],
) -> None:
    """After a clean stop it believes what it finds."""
    broker, answers = stopped
    own = indexes(broker.log_directory, sealed=False)
    damage(broker.log_directory)
    assert indexd("check", broker.log_directory)[0] == 1
    assert indexd("rebuild", broker.log_directory)[0] == 0
    preallocated = broker.log_directory / "preallocated-0"
    assert indexd("rebuild", preallocated, "--interval", 1000)[0] == 0
    assert indexd("check", broker.log_directory)[0] == 0
    rebuilt = indexes(broker.log_directory, sealed=False)
    assert {name for name in own if own[name] != rebuilt[name]} == set()
    with broker:
        assert read(broker) == answers
    assert indexd("check", broker.log_directory)[0] == 0


def test_a_broker_that_was_killed(stopped: tuple[KafkaBroker, dict[str, dict[str, Any]]]) -> None:
    broker, _ = stopped
    with broker:
        send(broker, **{"plain": 1200, "tx-made": 1100})
        answers = read(broker)
        broker.kill()
    code, rows, _ = indexd("check", broker.log_directory)
    assert (code, {row["what"] for row in rows[:-1]} - {"left_alone"}) == (0, {"not_closed"})
    damage(broker.log_directory)
    assert indexd("rebuild", broker.log_directory)[0] == 0
    assert indexd("check", broker.log_directory)[0] == 0
    ours = indexes(broker.log_directory, sealed=True)
    with broker:  # its own recovery goes over what the last run may have touched
        assert read(broker) == answers
    theirs = indexes(broker.log_directory, sealed=True)
    assert {name for name in ours if ours[name] != theirs.get(name) and not name.startswith("preallocated")} == set()
    assert indexd("check", broker.log_directory)[0] == 0
