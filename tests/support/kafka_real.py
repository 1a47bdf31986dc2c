"""Kafka's own OffsetIndex and TimeIndex, driven by command lines: the program under ``tests/real/kafka-index-check``.

It is built by Maven once for each version and change of its source, beside what ``support.rocketmq`` builds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support.missing import missing
from support.rocketmq import BUILD_SECONDS, RocketMQError, _cache, _java, _locked, maven_path

SOURCES = Path(__file__).resolve().parent.parent / "real" / "kafka-index-check"
VERSIONS = ("4.1.2", "4.4.0")
_FLAGS = ("-Xshare:auto", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m")


@functools.cache
def _ready(version: str) -> tuple[str, Path]:
    """java and the directory with ``classes`` and ``lib``; RocketMQError if they cannot be had."""
    java = _java()
    digest = hashlib.sha256(version.encode())
    for path in sorted([SOURCES / "pom.xml", *SOURCES.glob("src/**/*.java")]):
        digest.update(path.read_bytes())
    target = _cache() / f"kafka-index-check-{digest.hexdigest()[:16]}"
    with _locked(target.with_suffix(".lock")):
        if not target.exists():
            _build(version, target)
    return java, target


def _build(version: str, target: Path) -> None:
    maven = maven_path()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as name:
        place = Path(name, "java")
        shutil.copytree(SOURCES, place, ignore=shutil.ignore_patterns("target"))
        command = [maven, "-q", "-B", "-f", str(place / "pom.xml"), f"-Dkafka.version={version}", "package"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS)
        if done.returncode != 0:
            raise RocketMQError(f"Maven failed with {done.returncode}: {(done.stdout + done.stderr)[:1500].strip()}")
        (place / "target").rename(target)


def require(version: str) -> None:
    """The test needs that version's classes."""
    try:
        _ready(version)
    except (RocketMQError, OSError, subprocess.SubprocessError) as error:
        missing(f"Kafka's own classes cannot be run: {error}")


def answers(version: str, directory: Path, lines: Sequence[str], timeout: float = 120) -> list[dict[str, Any]]:
    """What Kafka's classes answer to each line, in files of ``directory``."""
    java, built = _ready(version)
    done = subprocess.run(
        [java, *_FLAGS, "-cp", f"{built / 'classes'}:{built / 'lib'}/*", "KafkaIndexCheck", "script", str(directory)],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["cmd"] for row in found] == list(lines)
    return found
