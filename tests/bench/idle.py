"""A daemon that has caught up with a store to which nothing is written."""

from __future__ import annotations

import time

from bench.ground import Ground, Report, Row, megabytes, progress
from bench.indexd import Daemon, kernels_compiled

NAME = "idle"
CPU_TARGET = 0.01
_CATCH_UP_SECONDS = 600
_REST_SECONDS = 5


def measure(ground: Ground, report: Report) -> None:
    """Prints the table and leaves the verdict."""
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
    report.part(NAME, f"{seconds:.0f} s, the log at rest", rows, data)
    report.verdict(NAME, f"CPU below {CPU_TARGET:.0%} of one processor", f"{share:.2%}", share < CPU_TARGET)
