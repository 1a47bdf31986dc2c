"""How long short commands take from the shell, start of the process to its end; and what a daemon at rest takes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable

from bench.ground import BenchError, Ground, Report, Row, median, megabytes, progress
from bench.indexd import Daemon, call, kernels_compiled, options, rebuild

NAME = "start"
QUERY_TARGET_SECONDS = 0.3
_RUNS = 20
_TOPICS = ("TopicTest", "OrderPaid")


def measure(ground: Ground, report: Report) -> None:
    """Prints the table and leaves the verdict."""
    store, data = ground.store(), ground.work / "start.data"
    with kernels_compiled(ground):
        rebuild(ground, store, data)
    key = f"order-{ground.messages // 2}"
    words = ["query-key", *options(ground, store), "--data", str(data), "--json", "-k", key, "-t"]
    topic = next((topic for topic in _TOPICS if _hits(call(ground, *words, topic)[0])), None)
    if topic is None:
        raise BenchError(f"no topic of {_TOPICS} has the key {key}")
    progress(f"start: {_RUNS} runs each")
    environment = ground.environment()

    def python() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True, timeout=60, env=environment)
        return time.perf_counter() - began

    commands: list[tuple[str, str, Callable[[], float]]] = [
        ("indexd query-key", "queryKey", lambda: call(ground, *words, topic)[1]),
        ("indexd --version", "version", lambda: call(ground, "--version")[1]),
        ("python -c pass", "python", python),
    ]
    rows: list[Row] = [("", "median", "best", "worst")]
    figures: dict[str, object] = {}
    taken: dict[str, float] = {}
    for text, name, command in commands:
        command()
        seconds = [command() for _ in range(_RUNS)]
        taken[name] = median(seconds)
        rows.append((text, *(f"{value * 1000:.0f} ms" for value in (taken[name], min(seconds), max(seconds)))))
        figures[f"{name}Seconds"] = [round(value, 4) for value in seconds]
    report.part(NAME, f"{_RUNS} runs each, the whole process", rows, figures)
    query = taken["queryKey"]
    report.verdict(
        NAME, f"a query below {QUERY_TARGET_SECONDS} s", f"{query * 1000:.0f} ms", query < QUERY_TARGET_SECONDS
    )


def _hits(said: str) -> int:
    return len(json.loads(said.splitlines()[-1])["phyOffsets"])


CPU_TARGET = 0.01
_CATCH_UP_SECONDS = 600
_REST_SECONDS = 5


def measure_idle(ground: Ground, report: Report) -> None:
    """A daemon that has caught up with a store to which nothing is written."""
    store = ground.store()
    progress(f"idle: {ground.seconds} s")
    with kernels_compiled(ground), Daemon(ground, store, ground.work / "idle.data") as daemon:
        daemon.wait_for_messages(ground.messages, _CATCH_UP_SECONDS)
        time.sleep(_REST_SECONDS)
        began, first = time.monotonic(), daemon.usage()
        time.sleep(ground.seconds)
        seconds, last = time.monotonic() - began, daemon.usage()
    share = (last.cpu_seconds - first.cpu_seconds) / seconds
    rows: list[Row] = [
        ("CPU, of one processor", "RssAnon", "VmRSS"),
        (f"{share:.2%}", megabytes(last.anonymous), megabytes(last.rss)),
    ]
    data = {"cpuShare": round(share, 5), "rssAnonBytes": last.anonymous, "rssBytes": last.rss, "seconds": seconds}
    report.part("idle", f"{seconds:.0f} s, the log at rest", rows, data)
    report.verdict("idle", f"CPU below {CPU_TARGET:.0%} of one processor", f"{share:.2%}", share < CPU_TARGET)
