"""What ConsumeQueues and sparse indexes cost a rebuild: one of everything, and one of the key index alone, in turns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from bench.ground import Ground, Report, Row, median, megabytes, per_second, progress, warm_log, write_store
from bench.indexd import INDEX_ALONE, kernels_compiled, rebuild

NAME = "queues"
RATIO_TARGET = 1.33
_PAIRS = 6
_MANY_PAIRS = 3
_MANY_QUEUES = 1000
_MANY_SHARE = 10  # one in so many messages makes the store of many queues
_LEAST_MESSAGES = 1000


def measure(ground: Ground, report: Report) -> None:
    """Prints the tables and leaves the verdict."""
    many = ground.work / "many-queues"
    messages = max(_LEAST_MESSAGES, ground.messages // _MANY_SHARE)
    with kernels_compiled(ground):
        everything, alone = _take_turns(ground, ground.store(), _PAIRS)
        progress(f"queues: writing {messages:,} messages in {_MANY_QUEUES:,} queues")
        write_store(many, messages, queues=_MANY_QUEUES)
        many_everything, many_alone = _take_turns(ground, many, _MANY_PAIRS)
    shutil.rmtree(many)
    ratio = _print(report, NAME, "8 queues", everything, alone)
    _print(report, "many", f"{_MANY_QUEUES:,} queues", many_everything, many_alone)
    target = f"a rebuild of everything at most {RATIO_TARGET} times one of the key index"
    report.verdict(NAME, target, f"{ratio:.2f}", ratio <= RATIO_TARGET)


def _take_turns(ground: Ground, store: Path, pairs: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    # Which of the two comes first changes from pair to pair; the first pair of all is there to warm up.
    everything: list[dict[str, Any]] = []
    alone: list[dict[str, Any]] = []
    out = ground.work / "queues.out"
    for pair in range(pairs + 1):
        progress(f"queues: {store.name}, pair {pair} of {pairs}")
        turns = [(everything, ()), (alone, INDEX_ALONE)]
        for figures, flags in turns if pair % 2 else reversed(turns):
            warm_log(store)
            figures.append(rebuild(ground, store, out, *flags))
            shutil.rmtree(out)
            os.sync()
    return everything[1:], alone[1:]


def _print(
    report: Report, name: str, queues: str, everything: list[dict[str, Any]], alone: list[dict[str, Any]]
) -> float:
    messages = everything[0]["messages"]
    rows: list[Row] = [("", "best", "median", "best", "median", "runs")]
    data: dict[str, Any] = {"messages": messages, "logBytes": everything[0]["bytes"]}
    ratios: dict[str, float] = {}
    for key, text in (("seconds", ""), ("wallSeconds", ", the whole process")):
        taken = [[row[key] for row in figures] for figures in (alone, everything)]
        for title, values in zip(("the key index alone", "everything"), taken, strict=True):
            best, middle = min(values), median(values)
            rates = (per_second(messages / best), per_second(messages / middle))
            rows.append((title + text, *rates, f"{best:.3f} s", f"{middle:.3f} s", str(len(values))))
        ratios[key] = median(taken[1]) / median(taken[0])
        rows.append(
            (f"  as many times{text}", "", "", f"{min(taken[1]) / min(taken[0]):.2f}", f"{ratios[key]:.2f}", "")
        )
        data |= {f"{key}Alone": taken[0], f"{key}Everything": taken[1], f"{key}RatioOfMedian": ratios[key]}
    title = f"{messages:,} messages in {queues}, {megabytes(everything[0]['bytes'])} of log, rebuilt with and without"
    report.part(name, f"{title} ConsumeQueues and sparse indexes", rows, data)
    return ratios["seconds"]
