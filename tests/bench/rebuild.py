"""A whole index from a log in the page cache: ``indexd rebuild`` and RocketMQ's IndexService, in turns.

Like with like: indexd leaves its other outputs out, as RocketMQ's program builds the key index alone. What it takes
with them stands beside it.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.ground import (
    DEFAULT_SIZES,
    ENTRIES_PER_MESSAGE,
    BenchError,
    Ground,
    Report,
    Row,
    median,
    megabytes,
    per_second,
    progress,
    warm_log,
)
from bench.indexd import INDEX_ALONE, kernels_compiled, rebuild
from support.rocketmq import arguments, figures_of, run

NAME = "rebuild"
RATIO_TARGET = 4.0
OUTPUTS_TARGET = 1.33
_TARGET = f"messages/s at least {RATIO_TARGET} times RocketMQ's"
_TURNS = 3
_RUNS_PER_TURN = 2
_ROUNDS = 4  # of RocketMQ in one JVM; the first is cold and does not count


def measure(ground: Ground, report: Report) -> None:
    """Prints the table and leaves the verdict."""
    store = ground.store()
    out, reference = ground.work / "out", ground.work / "reindex"
    with kernels_compiled(ground):
        ours, everything, theirs = _take_turns(ground, store, out, reference)
    _check_counts(ground, [*ours, *everything], theirs)
    equal = None if ground.java_missing else same_files(out / "index", reference / "index")
    rows, data = _table(ours, everything, theirs, equal)
    figures = ours[-1]
    title = f"{figures['messages']:,} messages, {figures['entries']:,} entries, {megabytes(figures['bytes'])} of log"
    report.part(NAME, f"the key index alone; {title}, by {ground.made_by}", rows, data)
    ratio = data["ratio"]
    report.verdict(
        NAME, _TARGET, None if ratio is None else f"{ratio:.2f}", None if ratio is None else ratio >= RATIO_TARGET
    )
    cost = data["ratioOfOutputs"]
    target = f"everything in at most {OUTPUTS_TARGET} times the time of the key index"
    report.verdict(NAME, target, f"{cost:.2f}", cost <= OUTPUTS_TARGET)
    if equal is not None:
        report.verdict(NAME, "the same bytes as RocketMQ's index", "the same" if equal else "others", equal)


def _take_turns(
    ground: Ground, store: Path, out: Path, reference: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    ours: list[dict[str, Any]] = []
    everything: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for turn in range(_TURNS):
        progress(f"rebuild: turn {turn + 1} of {_TURNS}")
        if ground.java_missing is None:
            theirs += reindex(ground, store, reference)
        for _ in range(_RUNS_PER_TURN):
            for figures, flags in ((everything, ()), (ours, INDEX_ALONE)):
                shutil.rmtree(out, ignore_errors=True)
                warm_log(store)
                figures.append(rebuild(ground, store, out, *flags))
            os.sync()
    return ours, everything, theirs


def same_files(one: Path, other: Path) -> bool:
    """Whether the index files of two directories are the same, byte for byte; their names tell the time and differ."""
    left, right = (sorted(path for path in place.iterdir() if path.name.isdecimal()) for place in (one, other))
    return len(left) == len(right) > 0 and all(
        filecmp.cmp(a, b, shallow=False) for a, b in zip(left, right, strict=True)
    )


def reindex(ground: Ground, store: Path, reference: Path, rounds: int = _ROUNDS) -> list[dict[str, Any]]:
    """RocketMQ's IndexService in one JVM; the figures of each round."""
    shutil.rmtree(reference, ignore_errors=True)
    warm_log(store)
    words = arguments(store=store, index=reference, rounds=rounds, **DEFAULT_SIZES)
    said = run("Store", "reindex", *words, home=ground.jvm_home, timeout=300 + ground.messages * rounds / 10_000)
    os.sync()
    return [figures_of(line) for line in said.splitlines()]


def _check_counts(ground: Ground, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for row in ours:
        if row["messages"] != ground.messages or row["entries"] != ENTRIES_PER_MESSAGE * ground.messages:
            raise BenchError(f"indexd indexed {row['messages']} messages, {row['entries']} entries")
    for row in theirs:
        if row["messages"] != ground.messages:
            raise BenchError(f"RocketMQ indexed {row['messages']} messages")


def _table(
    ours: list[dict[str, Any]],
    everything: list[dict[str, Any]],
    theirs: list[dict[str, Any]],
    equal: bool | None,
) -> tuple[list[Row], dict[str, Any]]:
    messages = ours[0]["messages"]
    warm = [row["seconds"] for row in theirs if row["round"] > 0]
    cold = [row["seconds"] for row in theirs if row["round"] == 0]
    inner = [row["seconds"] for row in ours]
    wall = [row["wallSeconds"] for row in ours]
    both = [row["seconds"] for row in everything]
    rows: list[Row] = [("", "best", "median", "best", "median", "runs")]
    data: dict[str, Any] = {"messages": messages, "entries": ours[0]["entries"], "logBytes": ours[0]["bytes"]}
    lines = [
        ("RocketMQ IndexService, warm", "rocketmqWarm", warm),
        ("RocketMQ IndexService, first round", "rocketmqCold", cold),
        ("indexd, first byte read to last rename", "indexd", inner),
        ("indexd, the whole process", "indexdProcess", wall),
        ("indexd with queues and sparse indexes", "indexdEverything", both),
    ]
    for text, name, values in lines:
        if values:
            best, middle = min(values), median(values)
            seconds = (f"{best:.3f} s", f"{middle:.3f} s")
            rows.append((text, per_second(messages / best), per_second(messages / middle), *seconds, str(len(values))))
        data[f"{name}Seconds"] = [round(value, 6) for value in values]
    ratios: list[tuple[str, Sequence[float], Sequence[float]]] = [
        ("indexd / RocketMQ", warm, inner),
        ("indexd with everything / RocketMQ", warm, both),
        ("the whole process / RocketMQ", warm, wall),
    ]
    for text, slower, faster in ratios:
        if slower:
            ratio = min(slower) / min(faster), min(slower) / median(faster)
            rows.append((text, *(f"{value:.2f}" for value in ratio), *_blank(3)))
    if equal is not None:
        rows.append(("index files, byte for byte", "the same" if equal else "DIFFERENT", *_blank(4)))
    data |= {
        "ratio": min(warm) / min(inner) if warm else None,
        "ratioOfMedian": min(warm) / median(inner) if warm else None,
        "ratioOfEverything": min(warm) / min(both) if warm else None,
        "ratioOfProcess": min(warm) / min(wall) if warm else None,
        "ratioOfOutputs": min(both) / min(inner),
        "sameBytes": equal,
    }
    return rows, data


def _blank(count: int) -> tuple[str, ...]:
    return ("",) * count
