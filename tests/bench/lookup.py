"""Lookups and appends in process: Kafka's OffsetIndex and TimeIndex and RocketMQ's ConsumeQueue, and ours, in turns.

Both sides get the same entries and the same targets and must come to the same files and the same answers. indexd looks
a batch up in a kernel, Kafka one target after the other: that is what each of them has. Opening files is no part of it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench import lookup_data
from bench.ground import QUEUE_FILE_SIZE, Ground, progress
from bench.indexd import kernels_compiled, rebuild
from bench.lookup_data import BASE, INDEX_SIZE, TARGETS, LookupData
from bench.report import BenchError, Report, Row, median, per_second
from support.kafka_real import _ready
from support.rocketmq_jvm import RocketMQError, figures_of, run

NAME = "lookup"
TOPIC, QUEUE_ID = "TopicTest", 0
_JAVA = Path(__file__).parent / "java"
_KAFKA_VERSION = "4.1.2"
_TURNS = 3
_ROUNDS = 8  # of each turn; Java compiles again and again in the first ones, which do not count
_COLD_ROUNDS = 3
_SECONDS = 300
_QUEUE_TARGETS = 100_000
_TESTS = Path(__file__).parent.parent
_STEPS = (("append", "appends"), ("random", "random lookups"), ("end", "lookups near the end"))

Figures = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sides:
    """The rounds that count, of both; ``theirs`` is empty where their classes cannot be run."""

    theirs: Figures
    ours: Figures

    def seconds(self, name: str) -> tuple[list[float], list[float]]:
        """Of one step, theirs and ours."""
        return [row[name] for row in self.theirs], [row[name] for row in self.ours]


def measure(ground: Ground, report: Report) -> None:
    """Prints the tables and leaves the verdicts."""
    _measure_indexes(ground, report)
    _measure_queue(ground, report)


def _measure_indexes(ground: Ground, report: Report) -> None:
    missing = _why_no_kafka()
    rows: list[Row] = [("", "best", "median", "best", "median", "best", "median")]
    data: dict[str, Any] = {"targets": TARGETS, "kafkaVersion": None if missing else _KAFKA_VERSION}
    entries = []
    for kind, name in (("offset", "OffsetIndex"), ("time", "TimeIndex")):
        made = lookup_data.make(kind, ground.work / f"lookup-{kind}")
        sides = _take_turns(ground, made, kafka=missing is None)
        entries.append(f"{made.entries:,}")
        for step, text in _STEPS:
            theirs, ours = sides.seconds(step)
            count = made.entries if step == "append" else TARGETS
            rows.append((f"{name}, {text}", *_rates(theirs, count), *_rates(ours, count), *_ratios(theirs, ours)))
            _leave_verdict(report, f"{name}, {text}", theirs, ours)
        single = [1 / row["python"] for row in sides.ours]
        rows.append((f"{name}, one by one in Python", "", "", *map(per_second, (max(single), median(single))), "", ""))
        opened = [row["open"] for row in sides.ours]
        rows.append(
            (f"{name}, from its bytes to a table", "", "", *(f"{1e3 * s:.1f} ms" for s in _best(opened)), "", "")
        )
        data[kind] = {"entries": made.entries, "kafka": _numbers(sides.theirs), "indexd": _numbers(sides.ours)}
        shutil.rmtree(made.directory)
    rows[0] = ("", *(f"{side} {word}" for side in ("Kafka", "indexd", "ratio") for word in ("best", "median")))
    title = f"{' offset and '.join(entries)} time entries (10 MiB each), {TARGETS:,} targets"
    same = "" if missing else f", the same files and answers; Kafka {_KAFKA_VERSION}"
    report.part(NAME, title + same, rows, data)
    if missing is not None:
        report.failure(NAME, f"Kafka's own classes cannot be run: {missing}")


def _leave_verdict(report: Report, text: str, theirs: list[float], ours: list[float]) -> None:
    ratio = median(theirs) / median(ours) if theirs else None
    target = f"{text}: faster than Kafka's"
    report.verdict(NAME, target, None if ratio is None else f"{ratio:.2f}", None if ratio is None else ratio > 1)


def _take_turns(ground: Ground, data: LookupData, *, kafka: bool) -> Sides:
    words = [data.kind, str(data.directory)]
    sides = Sides([], [])
    for turn in range(_TURNS):
        progress(f"lookup: {data.kind} index, turn {turn + 1} of {_TURNS}")
        if kafka:
            program = [str(_JAVA / "KafkaIndexes.java"), *words, str(BASE), str(INDEX_SIZE), str(_ROUNDS)]
            sides.theirs.extend(_said(ground, _kafka(*program)))
        sides.ours.extend(_said(ground, _batches(*words, str(_ROUNDS))))
    _check_equal(sides, "file", *(f"{name}Answers" for name in lookup_data.TARGET_FILES))
    return sides


def _measure_queue(ground: Ground, report: Report) -> None:
    data, targets = ground.work / "lookup.data", ground.work / "queue-targets"
    with kernels_compiled(ground):
        rebuild(ground, ground.store(), data)
    root = data / "consumequeue"
    sides = Sides([], [])
    words = ["queue", str(data), TOPIC, str(QUEUE_ID), str(targets)]
    lookup_data.write(targets, np.zeros(1, np.int64))
    units = _said(ground, _batches(*words, str(_COLD_ROUNDS + 1)))[0]["units"]
    lookup_data.write(targets, np.random.default_rng(1).integers(0, units, _QUEUE_TARGETS))
    for turn in range(_TURNS):
        progress(f"lookup: ConsumeQueue, turn {turn + 1} of {_TURNS}")
        if ground.java_missing is None:
            program = [str(root), TOPIC, str(QUEUE_ID), str(QUEUE_FILE_SIZE), str(targets), str(_ROUNDS)]
            said = run(str(_JAVA / "ConsumeQueues.java"), *program, home=ground.jvm_home, timeout=_SECONDS)
            sides.theirs.extend([figures_of(line) for line in said.splitlines()][_COLD_ROUNDS:])
        sides.ours.extend(_said(ground, _batches(*words, str(_ROUNDS))))
    _check_equal(sides, "units", "orderAnswers", "singleAnswers")
    _print_queue(report, sides, units)
    shutil.rmtree(data)


def _print_queue(report: Report, sides: Sides, units: int) -> None:
    order, single = sides.seconds("order")[0], sides.seconds("single")[0]
    rows: list[Row] = [("", "RocketMQ best", "median", "indexd best", "median", "ratio best", "median")]
    for text, theirs, ours, count in (
        ("all in order, as an array", order, "order", units),
        ("at random offsets, as an array", single, "gather", _QUEUE_TARGETS),
        ("all in order, one by one in Python", [], "batches", units),
        ("at random offsets, one by one in Python", [], "single", _QUEUE_TARGETS),
    ):
        taken = [row[ours] for row in sides.ours]
        rows.append((text, *_rates(theirs, count), *_rates(taken, count), *_ratios(theirs, taken)))
    data = {
        "units": units,
        "targets": _QUEUE_TARGETS,
        "rocketmq": _numbers(sides.theirs),
        "indexd": _numbers(sides.ours),
    }
    title = f"one queue of {units:,} units, {_QUEUE_TARGETS:,} targets; RocketMQ: iterateFrom, get"
    report.part("units", title, rows, data)


def _kafka(*program: str) -> list[str]:
    java, built = _ready(_KAFKA_VERSION)
    return [java, "-Xmx1g", "-cp", f"{built / 'lib'}/*", *program]


def _batches(*words: str) -> list[str]:
    return [sys.executable, "-m", "bench.batches", *words]


def _said(ground: Ground, command: Sequence[str]) -> Figures:
    """The rounds that count of a program that prints one a line."""
    own = {"PYTHONPATH": str(_TESTS), "NUMBA_CACHE_DIR": str(ground.work / "kernels")}
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
        env=ground.environment() | own,
    )
    if done.returncode != 0:
        raise BenchError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines()][_COLD_ROUNDS:]


def _check_equal(sides: Sides, *names: str) -> None:
    for name in names:
        if len({row[name] for row in (*sides.theirs, *sides.ours)}) != 1:
            raise BenchError(f"the two sides do not agree about {name}")


def _why_no_kafka() -> str | None:
    try:
        _ready(_KAFKA_VERSION)
    except (RocketMQError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None


def _numbers(figures: Figures) -> Figures:
    """Without the digests, which have been compared."""
    return [{name: value for name, value in row.items() if not isinstance(value, str)} for row in figures]


def _best(values: Sequence[float]) -> tuple[float, float]:
    return min(values), median(values)


def _rates(seconds: Sequence[float], count: int) -> tuple[str, str]:
    if not seconds:
        return "", ""
    best, middle = _best(seconds)
    return per_second(count / best), per_second(count / middle)


def _ratios(theirs: Sequence[float], ours: Sequence[float]) -> tuple[str, str]:
    if not theirs:
        return "", ""
    return f"{min(theirs) / min(ours):.2f}", f"{median(theirs) / median(ours):.2f}"
