"""A whole log in the page cache: rebuild beside RocketMQ's IndexService, audit and repair, Spark, its data source.

Like with like: where RocketMQ's program stands beside it, indexd leaves its other outputs out, as that builds the key
index alone. What Spark takes to start is left out, as it is the same for a gigabyte and a terabyte: a session's first
rebuild, with a cold JVM and cold workers, stands in a column of its own.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.ground import (
    ENTRIES_PER_MESSAGE,
    INDEX_ALONE,
    BenchError,
    Ground,
    Report,
    Row,
    megabytes,
    per_second,
    progress,
    same_files,
    warm_log,
)
from indexd.config import SparkConfig, load
from indexd.spark.rebuild.job import rebuild as build
from indexd.spark.session import open_session, slots
from indexd.spark.tasks import run_tasks
from indexd.storage.disk import Disk

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def timings(messages: int, runs: Mapping[str, Sequence[float]]) -> list[Row]:
    """Best and median of each kind of runs that there were, by their seconds."""
    rows: list[Row] = [("", "best", "median", "best", "median", "runs")]
    for name, seconds in runs.items():
        if seconds:
            both = min(seconds), median(seconds)
            rates, times = (per_second(messages / one) for one in both), (f"{one:.3f} s" for one in both)
            rows.append((name, *rates, *times, str(len(seconds))))
    return rows


def ratio_row(text: str, slower: Sequence[float], faster: Sequence[float]) -> Row:
    """How many times as fast the faster are."""
    return (text, f"{min(slower) / min(faster):.2f}", f"{min(slower) / median(faster):.2f}", "", "", "")


def _rebuilt(ground: Ground, store: Path, out: Path, *flags: str) -> dict[str, Any]:
    shutil.rmtree(out, ignore_errors=True)
    warm_log(store)
    row = ground.figures("rebuild", *flags, "--out", str(out), store=store)
    if (row["messages"], row["entries"]) != (ground.messages, ENTRIES_PER_MESSAGE * ground.messages):
        raise BenchError(f"indexd indexed {row['messages']} messages, {row['entries']} entries")
    os.sync()
    return row


def measure_rebuild(ground: Ground, report: Report) -> None:
    """The key index alone, and everything, in turns with RocketMQ's IndexService."""
    store, out, reference = ground.store(), ground.work / "out", ground.work / "reindex"
    ours, both, theirs = list[dict[str, Any]](), list[dict[str, Any]](), list[dict[str, Any]]()
    with ground.kernels_compiled():
        for turn in range(3):
            progress(f"rebuild: turn {turn + 1} of 3")
            if ground.java_missing is None:
                shutil.rmtree(reference, ignore_errors=True)
                theirs += ground.reindex(store, reference, 4)
            for _ in range(2):
                both.append(_rebuilt(ground, store, out))
                ours.append(_rebuilt(ground, store, out, *INDEX_ALONE))
    inner, everything = [row["seconds"] for row in ours], [row["seconds"] for row in both]
    whole, warm = [row["wallSeconds"] for row in ours], [row["seconds"] for row in theirs if row["round"] > 0]
    runs = {
        "RocketMQ IndexService, warm": warm,
        "RocketMQ IndexService, first round": [row["seconds"] for row in theirs if row["round"] == 0],
        "indexd, first byte read to last rename": inner,
        "indexd, the whole process": whole,
        "indexd with queues and sparse indexes": everything,
    }
    rows = timings(ground.messages, runs)
    cost, size = min(everything) / min(inner), megabytes(ours[0]["bytes"])
    if theirs:
        rows.append(ratio_row("indexd / RocketMQ", warm, inner))
        rows.append(ratio_row("indexd with everything / RocketMQ", warm, everything))
        rows.append(ratio_row("the whole process / RocketMQ", warm, whole))
        ratio, same = min(warm) / min(inner), same_files(out / "index", reference / "index")
        report.verdict("rebuild", "messages/s at least 4.0 times RocketMQ's", f"{ratio:.2f}", ratio >= 4)
        report.verdict("rebuild", "the same bytes as RocketMQ's index", "the same" if same else "others", same)
    report.verdict("rebuild", "everything in at most 1.33 times the time of the key index", f"{cost:.2f}", cost <= 1.33)
    report.part("rebuild", f"the key index alone; {ground.messages:,} messages, {size}, by {ground.made_by}", rows)


_AUDITS = {
    "indexd audit --samples 0": ("--samples", "0"),
    "indexd audit": (),
    "indexd audit --queues": ("--queues",),
}


def measure_audit(ground: Ground, report: Report) -> None:
    """A broker's own index audited and repaired, beside the rebuild of the same index.

    Index and ConsumeQueues are those of a rebuild, which has the bytes of RocketMQ's. An audit reads the log as a
    rebuild does, and the index besides; it is all the same if it takes as long.
    """
    store, built = ground.work / "audited", ground.work / "audited.out"
    store.mkdir()
    (store / "commitlog").symlink_to(ground.store() / "commitlog", target_is_directory=True)
    _rebuilt(ground, store, built)
    for name in ("index", "consumequeue"):
        (built / name).rename(store / name)
    first, last = "indexd rebuild of the key index", "indexd repair, no index"
    seconds: dict[str, list[float]] = {name: [] for name in (first, *_AUDITS, last)}
    for turn in range(-1, 5):  # one before, which compiles
        progress(f"audit: turn {turn + 1} of 5")
        with ground.kernels_compiled() if turn >= 0 else nullcontext():
            found = {first: _rebuilt(ground, store, built, *INDEX_ALONE)["seconds"]}
            for name, flags in _AUDITS.items():
                row = ground.figures("audit", *flags, store=store)
                if row["keys"] != row["findableKeys"] or row["messages"] != ground.messages:
                    raise BenchError(f"{row['findableKeys']} of {row['keys']} keys are found: {row}")
                found[name] = row["seconds"]
            # All of it: the audit that finds nothing, the files, the check of them, the exchange.
            shutil.rmtree(store / "index")
            (store / "index").mkdir()
            found[last] = ground.call("repair", "--yes", "--json", store=store)[1]
        for left in store.glob("indexd-repair-*"):
            shutil.rmtree(left)
        if turn >= 0:
            for name, one in found.items():
                seconds[name].append(one)
    shutil.rmtree(store)
    plain = seconds["indexd audit --samples 0"]
    rows = [*timings(ground.messages, seconds), ratio_row("audit / rebuild", seconds[first], plain)]
    report.part("audit", f"{ground.messages:,} messages", rows)
    ratio, target = min(seconds[first]) / min(plain), "messages/s of the key index at least those of a rebuild"
    report.verdict("audit", target, f"{ratio:.2f}", ratio >= 1)


def measure_spark(ground: Ground, report: Report) -> None:
    """The rebuild on Spark beside the one of one process and RocketMQ's; of five times the messages of other parts."""
    # More than 4 GiB of log where the other parts have 3,000,000 messages.
    ours = Ground(ground.work / "large", 5 * ground.messages, ground.seconds)
    work, store = ours.work, ours.store()
    seconds: dict[str, list[float]] = {"RocketMQ IndexService, warm (the key index alone)": [], "one process": []}
    warm, process = seconds.values()
    starts = {}
    with ours.kernels_compiled():
        pass  # those of one process, on a small store; the tasks have some of their own
    _rebuild_in_a_session(ours, work / "small", work / "small.spark", "local[1]")
    with ours.kernels_compiled():
        for turn in range(3):
            progress(f"spark: turn {turn + 1} of 3, RocketMQ and one process")
            if ground.java_missing is None:
                shutil.rmtree(work / "reindex", ignore_errors=True)
                warm += [row["seconds"] for row in ours.reindex(store, work / "reindex", 2)[1:]]
            process.append(_rebuilt(ours, store, work / "process")["seconds"])
        for master in ("local[1]", "local[2]"):
            progress(f"spark: {master}")
            starts[master], *seconds[master] = _rebuild_in_a_session(ours, store, work / master, master)
    same = _outputs(work / "process") == _outputs(work / "local[2]")
    rows = timings(ours.messages, seconds)
    rows += [(f"{name}, from the start of Spark", "", "", f"{one:.2f} s", "", "1") for name, one in starts.items()]
    rows.append(ratio_row("local[2] / one process", process, seconds["local[2]"]))
    rows.append(ratio_row("local[2] / local[1]", seconds["local[1]"], seconds["local[2]"]))
    report.part("spark", f"all outputs; {ours.messages:,} messages", rows)
    ratio, target = min(process) / min(seconds["local[2]"]), "on local[2] at least 0.6 of the messages/s of one process"
    report.verdict("spark", target, f"{ratio:.2f}", ratio >= 0.6)
    report.verdict("spark", "the same bytes by either engine", "the same" if same else "others", same)


def _rebuild_in_a_session(ground: Ground, store: Path, out: Path, master: str) -> list[float]:
    # From the start of the session to the end of the first rebuild; then each of three more.
    config = load({"store": str(store), "data": str(out.with_name("data"))}, None, {})
    began, found = time.perf_counter(), list[float]()
    with open_session(SparkConfig(master=master), "bench") as spark:
        for _ in range(4):
            shutil.rmtree(out, ignore_errors=True)
            if found:
                warm_log(store)
            row, _ = build(config, Disk(), out, partial(run_tasks, spark), lambda *_: None, slots=slots(spark))
            if store.name == "store" and row.messages != ground.messages:
                raise BenchError(f"{row.messages} messages were indexed, not {ground.messages}")
            found.append(row.seconds if found else time.perf_counter() - began)
            os.sync()
    return found


def _outputs(data: Path) -> list[tuple[str, bytes]]:
    # Names of index files tell the time and differ.
    folders = (data / name for name in ("index", "consumequeue", "sparse"))
    paths = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
    return [("" if path.parent.name == "index" else str(path.relative_to(data)), path.read_bytes()) for path in paths]


_COLUMNS = {
    "narrow": ("phyOffset,size,queueId,storeTimestamp", 4e6),
    "wide": ("phyOffset,size,queueId,storeTimestamp,topic,body,properties", 1.5e6),
}


def measure_source(ground: Ground, report: Report) -> None:
    """The Spark data source: rows a second on two cores."""
    store = ground.store()
    warm_log(store)
    seconds: dict[str, list[float]] = {}
    with open_session(SparkConfig(master="local[2]"), "bench", memory="2g") as spark:
        rows = _frame(spark, store, "size").count()
        for turn in range(4):
            progress(f"source: turn {turn} of 3")
            for name, work in _ways(spark, store).items():
                began = time.perf_counter()
                work()
                if turn:  # the first one compiles, loads and warms
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
    report.part("source", f"{rows:,} messages, 2 slots", timings(rows, seconds))
    for name, (_, target) in _COLUMNS.items():
        best = rows / min(seconds[f"{name}: data source, noop"])
        report.verdict("source", f"{name} columns at least {per_second(target)}", per_second(best), best >= target)


def _ways(spark: SparkSession, store: Path) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {}
    for name, (columns, _) in _COLUMNS.items():
        frame = _frame(spark, store, columns)
        ways[f"{name}: data source, noop"] = frame.write.format("noop").mode("overwrite").save
        ways[f"{name}: data source, groupBy in Spark"] = frame.groupBy("queueId").count().collect
    return ways


def _frame(spark: SparkSession, store: Path, columns: str) -> Any:
    return spark.read.format("rocketmq_commitlog").option("columns", columns).load(str(store))


PARTS = {
    "rebuild": measure_rebuild,
    "audit": measure_audit,
    "source": measure_source,
    "spark": measure_spark,
}
