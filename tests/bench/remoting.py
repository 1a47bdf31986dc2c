"""Queries by key through RocketMQ's own client: of a real broker with its index on, and of the daemon beside it, over
the same store, in turn; client, broker and daemon share the processors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.ground import (
    ENTRIES,
    QUEUE_FILE_SIZE,
    SEGMENT_SIZE,
    SLOTS,
    BenchError,
    Ground,
    Report,
    Row,
    median,
    progress,
)
from bench.indexd import Daemon, kernels_compiled
from support.rocketmq import Broker, arguments, figures_of, run

NAME = "remoting"
_MESSAGES = 3000
_ROUNDS, _SECONDS = 5, 8
# Of the client, which has one connection: one by one, some at a time, and more than are answered before the next come.
_THREADS = (1, 4, 16)
_START_SECONDS = 600
_SIDES = {"one": "broker", "other": "indexd"}


def measure(ground: Ground, report: Report) -> None:
    """Prints the table and leaves the verdict."""
    if ground.java_missing is not None:
        raise BenchError(ground.java_missing)
    home, sent = ground.work / "remoting", ground.work / "remoting.sent"
    sizes = {
        "mappedFileSizeCommitLog": SEGMENT_SIZE,
        "mappedFileSizeConsumeQueue": QUEUE_FILE_SIZE,
        "maxHashSlotNum": SLOTS,
        "maxIndexNum": ENTRIES,
    }
    with kernels_compiled(ground), Broker(home, None, **sizes) as broker:
        progress(f"remoting: sending {_MESSAGES:,} times")
        words = arguments(namesrv=broker.namesrv, count=_MESSAGES, out=sent)
        rows = figures_of(run("Client", "send", *words, home=ground.jvm_home))["rows"]
        flags = ("--http", "off", "--remoting", "127.0.0.1:0")
        with Daemon(ground, broker.store, ground.work / "remoting.data", *flags) as daemon:
            daemon.wait_for_event("running", _START_SECONDS)
            daemon.wait_for_messages(rows, _START_SECONDS)
            address = str(daemon.event("listening")["remoting"])
            said = {threads: _ask(ground, broker.namesrv, address, sent, threads) for threads in _THREADS}
    table: list[Row] = [("threads", "asked", "queries a second", "least", "most", "errors", "as many")]
    totals, errors = dict.fromkeys(_SIDES.values(), 0.0), 0
    for threads, rows in said.items():
        middle: dict[str, float] = {}
        for side, name in _SIDES.items():
            # The first round is for the client's and the broker's compiler.
            found = [row for row in rows if row["asked"] == side][1:]
            rates, failed = [float(row["perSecond"]) for row in found], sum(int(row["errors"]) for row in found)
            middle[name] = median(rates)
            totals[name] += middle[name]
            errors += failed
            figures = (f"{middle[name]:,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}", str(failed))
            ratio = f"{middle[name] / middle['broker']:.2f}"
            table.append((str(threads), name, *figures, ratio))
    ratio_of_all = totals["indexd"] / totals["broker"]
    title = f"queryMessage of RocketMQ's client, {_ROUNDS - 1} rounds of {_SECONDS} s in turn"
    report.part(NAME, title, table, {"rounds": said, "errors": errors, "ratio": ratio_of_all})
    target = "at least as many queries a second as the broker's own index, over all of them"
    report.verdict(NAME, target, f"{ratio_of_all:.2f} times", ratio_of_all >= 1 and errors == 0)


def _ask(ground: Ground, one: str, other: str, sent: Path, threads: int) -> list[dict[str, Any]]:
    progress(f"remoting: {threads} threads, {_ROUNDS} rounds of {2 * _SECONDS} s")
    words = arguments(one=one, other=other, in_=sent, rounds=_ROUNDS, seconds=_SECONDS, threads=threads)
    said = run("Finder", "bench", *words, home=ground.jvm_home, timeout=_ROUNDS * _SECONDS * 2 + 120)
    return [json.loads(line) for line in said.splitlines()]
