"""Kill -9 over one open index file of default size, nearly full; the next start of indexd, and RocketMQ's own.

indexd has the same log and goes on being killed in turns with RocketMQ's restarts: each time it has drained messages
that no flush has made durable yet. RocketMQ is halted once, and every restart of it works on a copy of what that left.
All of it comes from the page cache, on both sides: a process was killed, not the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.ground import BenchError, Ground, Report, Row, median, megabytes, progress
from bench.indexd import Daemon, call, kernels_compiled, options
from bench.keyed import (
    ENTRIES_PER_MESSAGE,
    TOPIC,
    KeyedStore,
    Restarted,
    Sample,
    Sizes,
    append,
    count_entries,
    count_found,
    make,
    restart,
)
from bench.rebuild import same_files

NAME = "recover"
READY_TARGET_SECONDS = 2.0
_TURNS = 3
_KILLS_PER_TURN = 2
_SECONDS = 600
# How RocketMQ's store was ended and told to start again; which of indexd's times stands beside it.
_THEIRS = (
    ("safe", "killed, messageIndexSafe=true", "first"),
    ("default", "killed, default", "first"),
    ("clean", "stopped", "stopped"),
)


@dataclass(frozen=True, slots=True)
class Killed:
    """One kill -9 and the start after it.

    Seconds since the execution to the event ``running``, to the end of the first query with the right answer about what
    was durable, and about the last message of all; ``opening`` is what recovery took of the first, ``stopped`` what the
    start before took to ``running``, which followed a clean stop.
    """

    opening: float
    running: float
    first: float
    last: float
    stopped: float
    kept_entries: int
    dropped_entries: int
    delta_bytes: int


@dataclass(frozen=True, slots=True)
class After:
    """What indexd's index is after all of it: the entries ``before`` the first kill, and how many are missing now."""

    before: int
    lost: int
    found: int
    same_bytes: bool | None


def measure(ground: Ground, report: Report) -> None:
    """Prints the tables and leaves the verdicts."""
    sizes = Sizes.of(ground.messages, _TURNS * _KILLS_PER_TURN)
    store = make(ground, ground.work / "keyed", sizes)
    data = ground.work / "recover.data"
    ours = replace(store, path=ground.work / "keyed.ours")
    shutil.copytree(store.path / "commitlog", ours.path / "commitlog")
    with kernels_compiled(ground):
        with Daemon(ground, ours.path, data, *sizes.flags) as daemon:
            daemon.wait_for_offset(ours.end_offset, _SECONDS)
        same = same_files(data / "index", store.path / "index") if store.theirs else None
        before = count_entries(data / "index")
        killed, theirs = _take_turns(ground, store, ours, data)
        added = len(killed) * sizes.delta * ENTRIES_PER_MESSAGE
        after = After(before, before + added - count_entries(data / "index"), _ask_all(ground, ours, data), same)
        shutil.rmtree(store.path)
    _print_recovery(report, ours, killed, theirs, after)
    ready = median([one.first for one in killed])
    report.verdict(NAME, f"an answer within {READY_TARGET_SECONDS} s", f"{ready:.3f} s", ready < READY_TARGET_SECONDS)
    lost = after.lost + len(ours.samples) - after.found
    report.verdict(NAME, "no key lost", f"{lost} lost", lost == 0)
    if same is not None:
        report.verdict(NAME, "the same bytes as RocketMQ's index", "the same" if same else "others", same)


def _take_turns(
    ground: Ground, store: KeyedStore, ours: KeyedStore, data: Path
) -> tuple[list[Killed], dict[str, list[Restarted]]]:
    killed: list[Killed] = []
    theirs: dict[str, list[Restarted]] = {"safe": [], "default": [], "clean": []}
    end = ours.end_offset
    for turn in range(_TURNS):
        progress(f"recover: turn {turn + 1} of {_TURNS}")
        if store.theirs:
            theirs["safe"].append(restart(ground, store, safe=True))
            theirs["default"].append(restart(ground, store, safe=False))
            theirs["clean"].append(restart(ground, store, safe=False, clean=True))
        for _ in range(_KILLS_PER_TURN):
            os.sync()
            end, round_ = _kill(ground, ours, data, end, len(killed))
            killed.append(round_)
    return killed, theirs


def _kill(ground: Ground, ours: KeyedStore, data: Path, end: int, number: int) -> tuple[int, Killed]:
    flags = ours.sizes.flags
    with Daemon(ground, ours.path, data, *flags) as daemon:
        stopped = daemon.wait_for_event("running", _SECONDS)
        daemon.wait_for_offset(end, _SECONDS)
        end, newest = append(ours, end, number)
        daemon.wait_for_offset(end, _SECONDS)
        state = daemon.state()
        if state is None or state["durableOffset"] >= end:
            raise BenchError(f"indexd flushed before it could be killed: {state}")
        daemon.kill()
    with Daemon(ground, ours.path, data, *flags) as daemon:
        running = daemon.wait_for_event("running", _SECONDS)
        first = _ask_until_right(ground, daemon, ours, ours.samples[number])
        covered = daemon.wait_for_offset(end, _SECONDS)
        last = _ask_until_right(ground, daemon, ours, newest)
        row = daemon.event("recovered")
        progress(f"recover: running after {running:.3f} s, answers {first:.3f} s, covers all {covered:.3f} s")
    return end, Killed(
        opening=row["seconds"],
        running=running,
        first=first,
        last=last,
        stopped=stopped,
        kept_entries=row["kept_entries"],
        dropped_entries=row["dropped_entries"],
        delta_bytes=end - row["phy_offset"],
    )


def _ask_until_right(ground: Ground, daemon: Daemon, store: KeyedStore, sample: Sample) -> float:
    words = ["query-key", *options(ground, store.path), "--data", str(daemon.data), "--json"]
    deadline = time.perf_counter() + _SECONDS
    while time.perf_counter() < deadline:
        said, _ = call(ground, *words, *store.sizes.flags, "-t", TOPIC, "-k", sample.key)
        seconds = time.perf_counter() - daemon.began
        if sample.phy_offset in json.loads(said.splitlines()[-1])["phyOffsets"]:
            return seconds
        daemon.check_running()
    raise BenchError(f"indexd does not find the key {sample.key}")


def _ask_all(ground: Ground, store: KeyedStore, data: Path) -> int:
    """How many of the samples indexd finds."""
    questions = ground.work / "questions"
    questions.write_text("".join(f"{TOPIC}\t{one.key}\t64\t0\t{1 << 60}\n" for one in store.samples))
    words = ["query-key", *options(ground, store.path), "--data", str(data), "--json", "--batch", str(questions)]
    said, _ = call(ground, *words, *store.sizes.flags)
    return count_found(store.samples, [json.loads(line)["phyOffsets"] for line in said.splitlines()])


def _print_recovery(
    report: Report, store: KeyedStore, killed: list[Killed], theirs: dict[str, list[Restarted]], after: After
) -> None:
    samples = len(store.samples)
    rows: list[Row] = [("", "best", "median", "entries after", "keys found", "runs")]
    data: dict[str, Any] = {"entriesBefore": after.before, "sampledKeys": samples, "sameBytes": after.same_bytes}
    ours = {name: [getattr(one, name) for one in killed] for name in ("opening", "running", "first", "last", "stopped")}
    left = (f"{after.before - after.lost:,}", f"{after.found / samples:.1%}")
    for name, text, cells in (
        ("opening", "killed, recovery alone", ("", "")),
        ("running", "killed, to the event running", ("", "")),
        ("first", "killed, to the first answer", left),
        ("last", "killed, to the first answer about the delta", ("", "")),
        ("stopped", "stopped, to the event running", ("", "")),
    ):
        rows.append(_row(f"indexd, {text}", ours[name], *cells))
    for name, text, beside in _THEIRS:
        runs = theirs[name]
        if runs:
            inner, whole = [one.inner_seconds for one in runs], [one.seconds for one in runs]
            left = (f"{runs[0].entries:,}", f"{runs[0].found / samples:.1%}")
            rows.append(_row(f"RocketMQ, {text}, load and start", inner))
            rows.append(_row(f"RocketMQ, {text}, the whole process", whole, *left))
            ratio = min(whole) / min(ours[beside]), median(whole) / median(ours[beside])
            rows.append((f"  as many times indexd's {beside}", *(f"{value:.2f}" for value in ratio), "", "", ""))
            entries, found = [one.entries for one in runs], [one.found for one in runs]
            data["rocketmq" + name.capitalize()] = {
                "innerSeconds": inner,
                "seconds": whole,
                "entriesAfter": entries,
                "sampledKeysFound": found,
                "ratio": ratio[0],
                "ratioOfMedian": ratio[1],
            }
    data["indexd"] = {f"{name}Seconds": values for name, values in ours.items()} | {
        "entriesLost": after.lost,
        "sampledKeysFound": after.found,
        "keptEntries": [one.kept_entries for one in killed],
        "droppedEntries": [one.dropped_entries for one in killed],
        "deltaMessages": store.sizes.delta,
        "deltaBytes": [one.delta_bytes for one in killed],
    }
    sizes = store.sizes
    filled = f"{after.before:,} entries in one open file of {megabytes(sizes.file_size)}"
    delta = f"{sizes.delta * ENTRIES_PER_MESSAGE:,} more not flushed"
    log = f"{megabytes(store.end_offset)} of log in segments of {megabytes(sizes.segment)}"
    report.part(NAME, f"{filled}, {delta}, {log}", rows, data)


def _row(text: str, seconds: Sequence[float], entries: str = "", found: str = "") -> Row:
    return (text, f"{min(seconds):.3f} s", f"{median(seconds):.3f} s", entries, found, str(len(seconds)))
