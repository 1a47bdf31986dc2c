"""Queries by key through RocketMQ's own client: of a real broker with its index on, and of the daemon beside it, over
the same store, in turn; client, broker and daemon share the processors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.ground import ENTRIES, QUEUE_FILE_SIZE, SEGMENT_SIZE, SLOTS, Ground, progress
from bench.indexd import Daemon, kernels_compiled
from bench.report import BenchError, Report, Row, median
from support.rocketmq import Broker
from support.rocketmq_jvm import arguments, figures_of, run

NAME = "remoting"
_MESSAGES = 3000
_ROUNDS, _SECONDS, _THREADS = 4, 8, 4
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
            said = _ask(ground, broker.namesrv, address, sent)
    # The first round is for the client's and the broker's compiler.
    found = {name: [row for row in said if row["asked"] == side][1:] for side, name in _SIDES.items()}
    rates = {name: [float(row["perSecond"]) for row in rounds] for name, rounds in found.items()}
    errors = {name: sum(int(row["errors"]) for row in rounds) for name, rounds in found.items()}
    table: list[Row] = [("asked", "queries a second", "least", "most", "errors")]
    for name, values in rates.items():
        figures = (f"{median(values):,.0f}", f"{min(values):,.0f}", f"{max(values):,.0f}")
        table.append((name, *figures, str(errors[name])))
    ratio = median(rates["indexd"]) / median(rates["broker"])
    title = f"queryMessage of RocketMQ's client, {_THREADS} threads, {_ROUNDS - 1} rounds of {_SECONDS} s in turn"
    report.part(NAME, title, table, {"perSecond": rates, "errors": errors, "ratio": ratio})
    target = "at least as many queries a second as the broker's own index"
    report.verdict(NAME, target, f"{ratio:.2f} times", ratio >= 1 and not any(errors.values()))


def _ask(ground: Ground, one: str, other: str, sent: Path) -> list[dict[str, Any]]:
    progress(f"remoting: {_ROUNDS} rounds of {2 * _SECONDS} s")
    words = arguments(one=one, other=other, in_=sent, rounds=_ROUNDS, seconds=_SECONDS, threads=_THREADS)
    said = run("Finder", "bench", *words, home=ground.jvm_home, timeout=_ROUNDS * _SECONDS * 2 + 120)
    return [json.loads(line) for line in said.splitlines()]
