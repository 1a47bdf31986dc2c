"""What runs beside other things: the daemon beside a store that is written, at rest, and as RocketMQ's clients ask it;
and how long short commands take from the shell.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

from bench.ground import (
    BODY_SIZE,
    DEFAULT_SIZES,
    ENTRIES,
    QUEUE_FILE_SIZE,
    SECONDS,
    SEGMENT_SIZE,
    SLOTS,
    BenchError,
    Daemon,
    Ground,
    Report,
    Row,
    Usage,
    megabytes,
    per_second,
    progress,
    same_files,
)
from support.rocketmq import Broker, arguments, figures_of, run, start

_STORE_TIMESTAMP_POSITION = 56


class Watch(threading.Thread):
    """Looks at a daemon until the end of a ``with`` block: each state that it published, its memory and CPU."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(name="watch", daemon=True)
        self._daemon, self._ended = daemon, threading.Event()
        #: When each state appeared, in seconds of the wall clock, and what it says.
        self.states: list[tuple[float, dict[str, Any]]] = []
        self.usages: list[tuple[float, Usage]] = []

    def run(self) -> None:
        """The loop of the thread."""
        written = 0
        while not self._ended.wait(0.02):
            self.usages.append((time.time(), self._daemon.usage()))
            row = self._daemon.state()
            if row.get("writtenAt", 0) != written and "phyOffset" in row:
                written = row["writtenAt"]
                self.states.append((written / 1000, row))

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def lags(self, first: float) -> list[float]:
        """One a drain: seconds from the store time of the oldest message that it covers first to its state."""
        found, covered, offset = list[float](), first, 0
        for at, row in self.states:
            if row["phyOffset"] > offset:
                found.append(at - covered)
                covered, offset = row["storeTimestamp"] / 1000, row["phyOffset"]
        return found


def measure_tail(ground: Ground, report: Report) -> None:
    """A daemon beside a store that RocketMQ's own classes write at full speed, and the same writer alone, in turns."""
    if ground.java_missing is not None:
        raise BenchError(f"it takes RocketMQ's own store to write at full speed: {ground.java_missing}")
    alone, beside = list[dict[str, Any]](), list[dict[str, Any]]()
    rows: list[Row] = [("run", "lag max", "median", "drains", "RssAnon", "VmRSS", "CPU", "index bytes")]
    lags, memory, same = list[float](), list[int](), list[bool]()
    with ground.kernels_compiled():
        for number in range(2):
            progress(f"tail: pair {number + 1} of 2")
            alone.append(_write(ground, ground.work / "alone"))
            shutil.rmtree(ground.work / "alone")
            store, data = ground.work / "tailed", ground.work / "tailed.data"
            (store / "commitlog").mkdir(parents=True)
            with Daemon(ground, store, data) as daemon:
                daemon.wait_event("running", SECONDS)
                with Watch(daemon) as watch:
                    beside.append(_write(ground, store, daemon))
                    with (store / "commitlog" / f"{0:020d}").open("rb") as file:
                        stored = os.pread(file.fileno(), 8, _STORE_TIMESTAMP_POSITION)
            first = struct.unpack(">q", stored)[0] / 1000
            if (counted := watch.states[-1][1]["messages"]) != beside[-1]["count"]:
                raise BenchError(f"indexd counted {counted} of {beside[-1]['count']} messages")
            drains = watch.lags(first)
            inside = [one for one in watch.usages if first <= one[0] <= first + beside[-1]["seconds"]]
            cpu = (inside[-1][1].cpu_seconds - inside[0][1].cpu_seconds) / (inside[-1][0] - inside[0][0])
            lags.append(max(drains))
            memory.append(max(usage.anonymous for _, usage in watch.usages))
            same.append(same_files(data / "index", store / "index"))
            sizes = megabytes(memory[-1]), megabytes(max(usage.rss for _, usage in watch.usages))
            times = f"{max(drains):.3f} s", f"{median(drains):.3f} s", str(len(drains))
            rows.append((str(number + 1), *times, *sizes, f"{cpu:.0%}", "the same" if same[-1] else "DIFFERENT"))
            shutil.rmtree(store)
            shutil.rmtree(data)
    last = beside[-1]
    title = f"RocketMQ's store writes for {last['seconds']:.0f} s, {megabytes(last['maxOffset'])} in the last run"
    report.part("tail", title, rows)
    report.verdict("tail", "lag below 3.1 s", f"{max(lags):.3f} s", max(lags) < 3.1)
    report.verdict("tail", "anonymous memory below 300 MB", megabytes(max(memory)), max(memory) < 300_000_000)
    report.verdict("tail", "the same bytes as RocketMQ's index", "the same" if all(same) else "others", all(same))
    rows, rates = [("", "median", "run 1", "run 2", "its own index after")], list[float]()
    for text, runs in (("writer alone", alone), ("writer with indexd beside it", beside)):
        each = [float(row["messagesPerSecond"]) for row in runs]
        rates.append(median(each))
        behind = median([row["dispatchSeconds"] - row["seconds"] for row in runs])
        rows.append((text, per_second(rates[-1]), *map(per_second, each), f"{behind:.3f} s"))
    rows.append(("slowdown", f"{1 - rates[1] / rates[0]:.1%}", "", "", ""))
    report.part("writer", f"what indexd costs it, {os.cpu_count()} processors for both", rows)


def _write(ground: Ground, store: Path, daemon: Daemon | None = None) -> dict[str, Any]:
    # The figures of RocketMQ's store, once a daemon beside it has built what it wrote.
    os.sync()
    words = arguments(store=store, seconds=ground.seconds, body=BODY_SIZE, hold=True, **DEFAULT_SIZES)
    with start("Store", "write", *words, home=ground.jvm_home) as writer:
        writer.line(SECONDS)
        figures = writer.figures(ground.seconds + SECONDS)
        if daemon is not None:
            daemon.wait_offset(figures["maxOffset"])
    return figures


def measure_idle(ground: Ground, report: Report) -> None:
    """A daemon that has caught up with a store to which nothing is written."""
    store = ground.store()
    progress(f"idle: {ground.seconds} s")
    with ground.kernels_compiled(), Daemon(ground, store, ground.work / "idle.data") as daemon:
        daemon.wait_messages(ground.messages)
        time.sleep(5)
        began, first = time.monotonic(), daemon.usage()
        time.sleep(ground.seconds)
        seconds, last = time.monotonic() - began, daemon.usage()
    share = (last.cpu_seconds - first.cpu_seconds) / seconds
    cells = (f"{share:.2%}", megabytes(last.anonymous), megabytes(last.rss))
    report.part("idle", f"{seconds:.0f} s, the log at rest", [("CPU, of one processor", "RssAnon", "VmRSS"), cells])
    report.verdict("idle", "CPU below 1% of one processor", f"{share:.2%}", share < 0.01)


def measure_start(ground: Ground, report: Report) -> None:
    """How long short commands take, start of the process to its end."""
    store, data = ground.store(), ground.work / "start.data"
    with ground.kernels_compiled():
        ground.call("rebuild", "--out", str(data), store=store)
    words = ["--data", str(data), "--json", "-k", f"order-{ground.messages // 2}", "-t"]
    found = [
        name
        for name in ("TopicTest", "OrderPaid")
        if json.loads(ground.call("query-key", *words, name, store=store)[0])["phyOffsets"]
    ]
    rows: list[Row] = [("", "median", "best", "worst")]
    medians = []
    for text in ("indexd query-key", "indexd --version", "python -c pass"):
        progress(f"start: 20 runs of {text}")
        seconds = []
        for _ in range(21):
            began = time.perf_counter()
            if text == "indexd query-key":
                ground.call("query-key", *words, found[0], store=store)
            elif text == "indexd --version":
                ground.call("--version")
            else:
                subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=60)
            seconds.append(time.perf_counter() - began)
        del seconds[0]
        medians.append(median(seconds))
        rows.append((text, *(f"{value * 1000:.0f} ms" for value in (medians[-1], min(seconds), max(seconds)))))
    report.part("start", "20 runs each, the whole process", rows)
    report.verdict("start", "a query below 0.3 s", f"{medians[0] * 1000:.0f} ms", medians[0] < 0.3)


_ROUNDS, _ROUND_SECONDS = 5, 8


def measure_remoting(ground: Ground, report: Report) -> None:
    """Queries by key through RocketMQ's own client: of a real broker with its index on, and of the daemon beside it,
    over the same store, in turn; client, broker and daemon share the processors.
    """
    if ground.java_missing is not None:
        raise BenchError(ground.java_missing)
    home, sent, said = ground.work / "remoting", ground.work / "remoting.sent", dict[int, list[dict[str, Any]]]()
    sizes = {
        "mappedFileSizeCommitLog": SEGMENT_SIZE,
        "mappedFileSizeConsumeQueue": QUEUE_FILE_SIZE,
        "maxHashSlotNum": SLOTS,
        "maxIndexNum": ENTRIES,
        "transactionMetricFlushInterval": 10_000,  # as by default
    }
    with ground.kernels_compiled(), Broker(home, None, **sizes) as broker:
        progress("remoting: sending 3,000 times")
        words = arguments(namesrv=broker.namesrv, count=3000, out=sent)
        count = figures_of(run("Client", "send", *words, home=ground.jvm_home))["rows"]
        data = ground.work / "remoting.data"
        with Daemon(ground, broker.store, data, "--http", "off", "--remoting", "127.0.0.1:0") as daemon:
            daemon.wait_messages(count)
            address = str(daemon.wait_event("listening")["remoting"])
            # Of the client, which has one connection: one by one, some at a time, more than come between two answers.
            for threads in (1, 4, 16):
                progress(f"remoting: {threads} threads, {_ROUNDS} rounds of {2 * _ROUND_SECONDS} s")
                sides = {"one": broker.namesrv, "other": address}
                words = arguments(**sides, in_=sent, rounds=_ROUNDS, seconds=_ROUND_SECONDS, threads=threads)
                timeout = _ROUNDS * _ROUND_SECONDS * 2 + 120
                lines = run("Finder", "bench", *words, home=ground.jvm_home, timeout=timeout).splitlines()
                said[threads] = [json.loads(line) for line in lines]
    rows: list[Row] = [("threads", "asked", "queries a second", "least", "most", "errors", "as many")]
    totals, errors = {"one": 0.0, "other": 0.0}, 0
    for threads, answers in said.items():
        middle = {}
        for side, name in (("one", "broker"), ("other", "indexd")):
            # The first round is for the client's and the broker's compiler.
            found = [row for row in answers if row["asked"] == side][1:]
            rates, failed = [float(row["perSecond"]) for row in found], sum(int(row["errors"]) for row in found)
            middle[side] = median(rates)
            totals[side] += middle[side]
            errors += failed
            cells = *(f"{rate:,.0f}" for rate in (middle[side], min(rates), max(rates))), str(failed)
            rows.append((str(threads), name, *cells, f"{middle[side] / middle['one']:.2f}"))
    ratio = totals["other"] / totals["one"]
    title = f"queryMessage of RocketMQ's client, {_ROUNDS - 1} rounds of {_ROUND_SECONDS} s in turn"
    report.part("remoting", title, rows)
    target = "at least as many queries a second as the broker's own index, over all of them"
    report.verdict("remoting", target, f"{ratio:.2f} times", ratio >= 1 and errors == 0)


PARTS = {"tail": measure_tail, "start": measure_start, "idle": measure_idle, "remoting": measure_remoting}
