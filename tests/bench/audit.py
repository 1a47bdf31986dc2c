"""A broker's own index audited and repaired, beside the rebuild of the same index, on one log in the page cache.

The index and the ConsumeQueues are those of a rebuild, which has the bytes of RocketMQ's. An audit reads the log as a
rebuild does, and the index besides; it is all the same if it takes as long.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from bench.ground import BenchError, Ground, Report, Row, median, megabytes, per_second, progress, warm_log
from bench.indexd import INDEX_ALONE, call, kernels_compiled, options, rebuild

NAME = "audit"
_TURNS = 5
_TARGET = "messages/s of the key index at least those of a rebuild"
#: How each is called in the table, and its options.
_AUDITS = {
    "indexd audit --samples 0": ("--samples", "0"),
    "indexd audit": (),
    "indexd audit --queues": ("--queues",),
}


def measure(ground: Ground, report: Report) -> None:
    """Prints the table and leaves the verdict."""
    store = ground.work / "audited"
    store.mkdir()
    (store / "commitlog").symlink_to((ground.store() / "commitlog").resolve(), target_is_directory=True)
    built = ground.work / "audited.out"
    with kernels_compiled(ground):
        rebuild(ground, store, built)
    for name in ("index", "consumequeue"):
        (built / name).rename(store / name)
    shutil.rmtree(built)
    for flags in _AUDITS.values():
        _audit(ground, store, *flags)  # their kernels, too
    _repair(ground, store)
    with kernels_compiled(ground):
        seconds, size = _take_turns(ground, store, built)
    _print(report, ground, seconds, size)
    shutil.rmtree(store)


def _take_turns(ground: Ground, store: Path, out: Path) -> tuple[dict[str, list[float]], int]:
    names = ["indexd rebuild of the key index", *_AUDITS, "indexd repair, no index"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    size = 0
    for turn in range(_TURNS):
        progress(f"audit: turn {turn + 1} of {_TURNS}")
        warm_log(store)
        figures = rebuild(ground, store, out, *INDEX_ALONE)
        seconds[names[0]].append(figures["seconds"])
        size = figures["bytes"]
        shutil.rmtree(out)
        os.sync()
        for name, flags in _AUDITS.items():
            row = _audit(ground, store, *flags)
            if row["keys"] != row["findableKeys"] or row["messages"] != ground.messages:
                raise BenchError(f"{row['findableKeys']} of {row['keys']} keys of {row['messages']} messages are found")
            seconds[name].append(row["seconds"])
        seconds[names[-1]].append(_repair(ground, store))
        os.sync()
    return seconds, size


def _audit(ground: Ground, store: Path, *flags: str) -> dict[str, Any]:
    said, _ = call(ground, "audit", *options(ground, store), *flags, "--json")
    row: dict[str, Any] = json.loads(said.splitlines()[-1])
    return row


def _repair(ground: Ground, store: Path) -> float:
    # All of it: the audit that finds nothing, the files, the check of them, the exchange.
    shutil.rmtree(store / "index")
    (store / "index").mkdir()
    _, seconds = call(ground, "repair", *options(ground, store), "--yes", "--json")
    for left in store.glob("indexd-repair-*"):
        shutil.rmtree(left)
    return seconds


def _print(report: Report, ground: Ground, seconds: dict[str, list[float]], size: int) -> None:
    rows: list[Row] = [("", "best", "median", "best", "median", "runs")]
    for name, values in seconds.items():
        best, middle = min(values), median(values)
        rates = (per_second(ground.messages / best), per_second(ground.messages / middle))
        rows.append((name, *rates, f"{best:.3f} s", f"{middle:.3f} s", str(len(values))))
    names = list(seconds)
    ratio = min(seconds[names[0]]) / min(seconds[names[1]])
    rows.append(("audit / rebuild", f"{ratio:.2f}", *("",) * 4))
    data = {"messages": ground.messages, "logBytes": size, "seconds": seconds, "ratio": ratio}
    report.part(NAME, f"{ground.messages:,} messages, {megabytes(size)} of log", rows, data)
    report.verdict(NAME, _TARGET, f"{ratio:.2f}", ratio >= 1)
