"""A daemon beside a store that RocketMQ's own classes write at full speed, and the same writer alone, in turns."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.ground import (
    BODY_SIZE,
    DEFAULT_SIZES,
    BenchError,
    Ground,
    Report,
    Row,
    median,
    megabytes,
    per_second,
    percentile,
    progress,
)
from bench.indexd import Daemon, Usage, kernels_compiled
from bench.rebuild import same_files
from support.rocketmq import arguments, start

_STATE_SECONDS = 0.02
_USAGE_SECONDS = 0.1
_STORE_TIMESTAMP = struct.Struct(">q")
_STORE_TIMESTAMP_POSITION = 56


@dataclass(frozen=True, slots=True)
class Published:
    """One state: when it appeared, and the newest message it covers; times in seconds of the wall clock."""

    at: float
    phy_offset: int
    store_time: float
    messages: int


@dataclass(frozen=True, slots=True)
class Lag:
    """Seconds; ``tail`` is from the last message's store time to the state that covers it, ``peaks`` one a drain."""

    max: float
    p50: float
    p99: float
    tail: float
    peaks: tuple[float, ...]


class Watch(threading.Thread):
    """Samples until ``stop``; ``error`` is what ended it before."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(name="watch", daemon=True)
        self._daemon = daemon
        self._ended = threading.Event()
        self.states: list[Published] = []
        self.usages: list[tuple[float, Usage]] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """The loop of the thread."""
        identity: tuple[int, int] | None = None
        usage_due = 0.0
        try:
            while not self._ended.wait(_STATE_SECONDS):
                identity = self._look(identity)
                if time.monotonic() >= usage_due:
                    usage_due = time.monotonic() + _USAGE_SECONDS
                    self.usages.append((time.time(), self._daemon.usage()))
        except (OSError, ValueError, KeyError) as error:
            self.error = error

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self.join()

    def wait_for_offset(self, phy_offset: int, seconds: float) -> None:
        """Until a published state reaches the offset."""
        deadline = time.monotonic() + seconds
        while not self.states or self.states[-1].phy_offset < phy_offset:
            self._daemon.check_running()
            if self.error is not None:
                raise BenchError(f"indexd could not be watched: {self.error}")
            if time.monotonic() > deadline:
                raise BenchError(f"indexd did not reach offset {phy_offset} within {seconds:.0f} s: {self.states[-1:]}")
            time.sleep(_STATE_SECONDS)

    def _look(self, identity: tuple[int, int] | None) -> tuple[int, int] | None:
        # The file is replaced whole: the time of its last change is when its bytes were written.
        try:
            with (self._daemon.data / "state").open("rb") as file:
                found = os.fstat(file.fileno())
                if (found.st_ino, found.st_mtime_ns) == identity:
                    return identity
                row: dict[str, Any] = json.loads(file.read())
        except FileNotFoundError:
            return identity
        if "phyOffset" not in row:  # how far a recovery is
            return found.st_ino, found.st_mtime_ns
        at = max(found.st_mtime_ns / 1e9, row["writtenAt"] / 1000)
        self.states.append(Published(at, row["phyOffset"], row["storeTimestamp"] / 1000, row["messages"]))
        return found.st_ino, found.st_mtime_ns


def first_store_time(store: Path) -> float:
    """When the first message of the log was stored, in seconds of the wall clock."""
    with (store / "commitlog" / f"{0:020d}").open("rb") as file:
        file.seek(_STORE_TIMESTAMP_POSITION)
        millis: int = _STORE_TIMESTAMP.unpack(file.read(_STORE_TIMESTAMP.size))[0]
    return millis / 1000


def lag_of(states: list[Published], first: float, end_offset: int) -> Lag:
    """From the states of one run over a log from ``first`` to ``end_offset``; percentiles of time, not of drains."""
    covered, offset = first, 0
    moments: list[float] = []
    peaks: list[float] = []
    clock = first
    for state in states:
        if state.phy_offset <= offset:
            continue
        peaks.append(state.at - covered)
        while clock < state.at:
            moments.append(clock - covered)
            clock += _STATE_SECONDS
        covered, offset = state.store_time, state.phy_offset
        if offset >= end_offset:
            tail = state.at - state.store_time
            return Lag(max(peaks), percentile(moments, 50), percentile(moments, 99), tail, tuple(peaks))
    raise BenchError("the states of the daemon do not reach the end of the log")


NAME = "tail"
LAG_TARGET_SECONDS = 3.1
MEMORY_TARGET_BYTES = 300_000_000
_PAIRS = 2
_READY_SECONDS = 120
_CATCH_UP_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Beside:
    """What one run with a daemon showed."""

    lag: Lag
    rss: int
    anonymous: int
    cpu_share: float
    same_bytes: bool


def measure(ground: Ground, report: Report) -> None:
    """Prints the tables and leaves the verdicts."""
    if ground.java_missing is not None:
        for target in _targets():
            report.verdict(NAME, target, None, None)
        raise BenchError(f"it takes RocketMQ's own store to write at full speed: {ground.java_missing}")
    alone: list[dict[str, Any]] = []
    together: list[tuple[dict[str, Any], Beside]] = []
    with kernels_compiled(ground):
        for pair in range(_PAIRS):
            progress(f"tail: pair {pair + 1} of {_PAIRS}")
            alone.append(_write_alone(ground))
            together.append(_write_beside(ground))
    _print_lag(report, together)
    _print_writer(report, alone, [figures for figures, _ in together])
    runs = [beside for _, beside in together]
    lag, memory = max(run.lag.max for run in runs), max(run.anonymous for run in runs)
    same = all(run.same_bytes for run in runs)
    results = [
        (f"{lag:.3f} s", lag < LAG_TARGET_SECONDS),
        (megabytes(memory), memory < MEMORY_TARGET_BYTES),
        ("the same" if same else "others", same),
    ]
    for target, (measured, held) in zip(_targets(), results, strict=True):
        report.verdict(NAME, target, measured, held)


def _targets() -> tuple[str, str, str]:
    return (
        f"lag below {LAG_TARGET_SECONDS} s",
        f"anonymous memory below {megabytes(MEMORY_TARGET_BYTES)}",
        "the same bytes as RocketMQ's index",
    )


def _words(ground: Ground, store: Path) -> list[str]:
    return arguments(store=store, seconds=ground.seconds, body=BODY_SIZE, hold=True, **DEFAULT_SIZES)


def _write_alone(ground: Ground) -> dict[str, Any]:
    store = ground.work / "alone"
    os.sync()
    with start("Store", "write", *_words(ground, store), home=ground.jvm_home) as writer:
        ground.note_process(writer)
        writer.line(_READY_SECONDS)
        figures = writer.figures(ground.seconds + _CATCH_UP_SECONDS)
    shutil.rmtree(store)
    return figures


def _write_beside(ground: Ground) -> tuple[dict[str, Any], Beside]:
    store, data = ground.work / "tailed", ground.work / "tailed.data"
    (store / "commitlog").mkdir(parents=True)
    os.sync()
    with ExitStack() as stack:
        daemon = stack.enter_context(Daemon(ground, store, data))
        daemon.wait_for_event("running", _READY_SECONDS)
        watch = Watch(daemon)
        watch.start()
        stack.callback(watch.stop)
        with start("Store", "write", *_words(ground, store), home=ground.jvm_home) as writer:
            ground.note_process(writer)
            writer.line(_READY_SECONDS)
            figures = writer.figures(ground.seconds + _CATCH_UP_SECONDS)
            watch.wait_for_offset(figures["maxOffset"], _CATCH_UP_SECONDS)
            watch.stop()
            first = first_store_time(store)
    if watch.states[-1].messages != figures["count"]:
        raise BenchError(f"indexd counted {watch.states[-1].messages} of {figures['count']} messages")
    found = Beside(
        lag=lag_of(watch.states, first, figures["maxOffset"]),
        rss=max(usage.rss for _, usage in watch.usages),
        anonymous=max(usage.anonymous for _, usage in watch.usages),
        cpu_share=_cpu_share(watch, first, first + figures["seconds"]),
        same_bytes=same_files(data / "index", store / "index"),
    )
    shutil.rmtree(store)
    shutil.rmtree(data)
    return figures, found


def _cpu_share(watch: Watch, begin: float, end: float) -> float:
    inside = [(at, usage.cpu_seconds) for at, usage in watch.usages if begin <= at <= end]
    if len(inside) < 2:
        raise BenchError("the writing was over before the daemon's CPU time could be read twice")
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def _print_lag(report: Report, together: list[tuple[dict[str, Any], Beside]]) -> None:
    rows: list[Row] = [
        ("run", "lag max", "p50", "p99", "after the end", "drains", "RssAnon", "VmRSS", "CPU", "index bytes")
    ]
    for number, (_, run) in enumerate(together, 1):
        lag = run.lag
        times = [f"{seconds:.3f} s" for seconds in (lag.max, lag.p50, lag.p99, lag.tail)]
        memory = [megabytes(run.anonymous), megabytes(run.rss)]
        same = "the same" if run.same_bytes else "DIFFERENT"
        rows.append((str(number), *times, str(len(lag.peaks)), *memory, f"{run.cpu_share:.0%}", same))
    data = [
        {
            "lagMaxMs": round(run.lag.max * 1000),
            "lagP50Ms": round(run.lag.p50 * 1000),
            "lagP99Ms": round(run.lag.p99 * 1000),
            "afterEndMs": round(run.lag.tail * 1000),
            "peaksMs": [round(peak * 1000) for peak in run.lag.peaks],
            "rssAnonBytes": run.anonymous,
            "rssBytes": run.rss,
            "cpuShare": round(run.cpu_share, 4),
            "sameBytes": run.same_bytes,
            "messages": figures["count"],
            "logBytes": figures["maxOffset"],
        }
        for figures, run in together
    ]
    figures = together[-1][0]
    title = f"RocketMQ's store writes for {figures['seconds']:.0f} s, {megabytes(figures['maxOffset'])} in the last run"
    report.part(NAME, title, rows, {"runs": data})


def _print_writer(report: Report, alone: list[dict[str, Any]], together: list[dict[str, Any]]) -> None:
    rows: list[Row] = [("", "median", *(f"run {number}" for number in range(1, _PAIRS + 1)), "its own index after")]
    for text, runs in (("writer alone", alone), ("writer with indexd beside it", together)):
        rates = [float(run["messagesPerSecond"]) for run in runs]
        behind = median([run["dispatchSeconds"] - run["seconds"] for run in runs])
        rows.append((text, per_second(median(rates)), *map(per_second, rates), f"{behind:.3f} s"))
    slowdown = 1 - median([run["messagesPerSecond"] for run in together]) / median(
        [run["messagesPerSecond"] for run in alone]
    )
    rows.append(("slowdown", f"{slowdown:.1%}", *[""] * (_PAIRS + 1)))
    data = {
        "aloneMessagesPerSecond": [run["messagesPerSecond"] for run in alone],
        "besideMessagesPerSecond": [run["messagesPerSecond"] for run in together],
        "slowdown": round(slowdown, 4),
    }
    report.part("writer", f"what indexd costs it, {os.cpu_count()} processors for both", rows, data)
