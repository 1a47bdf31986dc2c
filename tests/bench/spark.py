"""The rebuild on Spark beside the one of one process and RocketMQ's IndexService, on one log in the page cache.

Start-up is left out, as it is the same for a gigabyte and a terabyte: a session's first rebuild does not count; how
long it takes from the start of the session stands beside. Two slots of this machine are all there is: the table says
how it scales from one to two, and what a task costs that does nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.ground import BenchError, Ground, Report, Row, megabytes, per_second, progress, warm_log
from bench.indexd import kernels_compiled, rebuild
from bench.rebuild import reindex, same_files
from indexd.config import load
from indexd.spark.rebuild.job import rebuild as build
from indexd.spark.session import SparkOptions, open_session, slots
from indexd.spark.tasks import run_tasks
from indexd.storage.disk import Disk

NAME = "spark"
#: Of the messages of the other parts: more than 4 GB of log where those have 3,000,000 messages.
_SHARE = 5
MASTERS = ("local[1]", "local[2]")
_TURNS = 3
RATIO_TARGET = 0.6
_TARGET = f"on local[2] at least {RATIO_TARGET} of the messages/s of one process"
_TASKS = 200


def measure(ground: Ground, report: Report) -> None:
    """Prints the table and leaves the verdict."""
    work = ground.work / NAME
    work.mkdir()
    ours = Ground(work, _SHARE * ground.messages, ground.seconds)
    store = ours.store()
    try:
        with kernels_compiled(ours):
            pass  # those of one process, on a small store; the tasks have some of their own
        _rebuild_in_a_session(work / "small", work / "small.spark", MASTERS[0])
        with kernels_compiled(ours):
            figures = _take_turns(ours, store)
        equal = _same_trees(work / "process", work / "local[2]")
        task_seconds, start_seconds = _task_cost()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    _print(report, ours, figures, equal, task_seconds, start_seconds)


def _take_turns(ground: Ground, store: Path) -> dict[str, list[dict[str, Any]]]:
    figures: dict[str, list[dict[str, Any]]] = {"rocketmq": [], "process": []}
    for turn in range(_TURNS):
        progress(f"spark: turn {turn + 1} of {_TURNS}, RocketMQ and one process")
        if ground.java_missing is None:
            figures["rocketmq"] += reindex(ground, store, ground.work / "reindex", rounds=2)[1:]
        out = ground.work / "process"
        shutil.rmtree(out, ignore_errors=True)
        warm_log(store)
        figures["process"].append(_checked(ground, rebuild(ground, store, out)))
        os.sync()
    for master in MASTERS:
        progress(f"spark: {master}")
        figures[master] = [_checked(ground, row) for row in _rebuild_in_a_session(store, ground.work / master, master)]
    return figures


def _checked(ground: Ground, figures: dict[str, Any]) -> dict[str, Any]:
    if figures["messages"] != ground.messages:
        raise BenchError(f"{figures['messages']} messages were indexed, not {ground.messages}")
    return figures


def _rebuild_in_a_session(store: Path, out: Path, master: str) -> list[dict[str, Any]]:
    # The first rebuild, with a cold JVM and cold workers, is what a user waits for; the others are what a log costs.
    config = load({"store": str(store), "data": str(out.with_name("data"))}, None, {})
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    with open_session(replace(SparkOptions(), master=master), "bench") as spark:
        for _ in range(_TURNS + 1):
            shutil.rmtree(out, ignore_errors=True)
            if rows:
                warm_log(store)
            found, _ = build(config, Disk(), out, partial(run_tasks, spark), lambda *_: None, slots=slots(spark))
            first = rows[0]["wallSeconds"] if rows else time.perf_counter() - began
            rows.append(
                {
                    "messages": found.messages,
                    "bytes": found.bytes,
                    "seconds": found.seconds,
                    "wallSeconds": first,
                }
            )
            os.sync()
    return rows[1:]


def _same_trees(one: Path, other: Path) -> bool:
    same = same_files(one / "index", other / "index")
    for folder in ("consumequeue", "sparse"):
        left, right = (
            {path.relative_to(place): path for path in sorted((place / folder).rglob("*")) if path.is_file()}
            for place in (one, other)
        )
        same = (
            same
            and left.keys() == right.keys()
            and all(left[name].read_bytes() == right[name].read_bytes() for name in left)
        )
    return same


def _nothing(item: int) -> int:
    return item


def _task_cost() -> tuple[float, float]:
    # Seconds of a task that does nothing, two at a time; and what a session takes before its first job is done.
    sys.stderr.flush()
    began = time.perf_counter()
    with open_session(replace(SparkOptions(), master="local[2]"), "bench") as spark:
        run_tasks(spark, _nothing, list(range(2)))
        start = time.perf_counter() - began
        best = float("inf")
        for _ in range(3):
            began = time.perf_counter()
            run_tasks(spark, _nothing, list(range(_TASKS)))
            best = min(best, time.perf_counter() - began)
    return best / _TASKS, start


def _print(
    report: Report,
    ground: Ground,
    figures: dict[str, list[dict[str, Any]]],
    equal: bool,
    task_seconds: float,
    start_seconds: float,
) -> None:
    names = {
        "rocketmq": "RocketMQ IndexService, warm (the key index alone)",
        "process": "indexd rebuild, one process",
        "local[1]": "indexd rebuild --engine spark --master local[1]",
        "local[2]": "indexd rebuild --engine spark --master local[2]",
    }
    best = {name: min(row["seconds"] for row in rows) for name, rows in figures.items() if rows}
    whole = {
        name: min(row.get("wallSeconds", row["seconds"]) for row in rows) for name, rows in figures.items() if rows
    }
    size = figures["process"][0]["bytes"]
    rows: list[Row] = [("", "best", "", "from the start", "log")]
    for name, seconds in best.items():
        rows.append(
            (
                names[name],
                per_second(ground.messages / seconds),
                f"{seconds:.2f} s",
                f"{whole[name]:.2f} s",
                f"{size / seconds / 1e9:.2f} GB/s",
            )
        )
    ratio, scale = best["process"] / best["local[2]"], best["local[1]"] / best["local[2]"]
    rows.append(("local[2] / one process", f"{ratio:.2f}", "", "", ""))
    rows.append(("local[2] / local[1]", f"{scale:.2f}", "", "", ""))
    if "rocketmq" in best:
        rows.append(("local[2] / RocketMQ", f"{best['rocketmq'] / best['local[2]']:.2f}", "", "", ""))
    rows.append(("a task that does nothing", f"{1000 * task_seconds:.1f} ms", "", "", ""))
    rows.append(("a session and its first job", f"{start_seconds:.1f} s", "", "", ""))
    data = {
        "messages": ground.messages,
        "logBytes": size,
        "seconds": best,
        "wallSeconds": whole,
        "ratio": ratio,
        "scale": scale,
        "taskSeconds": task_seconds,
        "startSeconds": start_seconds,
    }
    report.part(NAME, f"all outputs; {ground.messages:,} messages, {megabytes(size)} of log", rows, data)
    report.verdict(NAME, _TARGET, f"{ratio:.2f}", ratio >= RATIO_TARGET)
    report.verdict(NAME, "the same bytes by either engine", "the same" if equal else "others", equal)
