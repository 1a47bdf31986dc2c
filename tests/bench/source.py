"""The Spark data source: rows a second on two cores, beside the same kernels without Spark; start-up is not counted.

``python -m bench.source --gib 4`` measures it alone, on a log of that size, which is kept where ``--store`` says.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.ground import Ground, Report, Row, median, megabytes, per_second, progress, warm_log, write_store
from indexd.spark.source.options import parse_options
from indexd.storage.names import segment_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from indexd.spark.splits import Split

NAME = "source"
SLOTS = 2
_TURNS = 3
# Of the messages of the other parts: some 4 GiB.
_BYTES_PER_MESSAGE = 1432
_SEGMENT_SIZE = 256 << 20
# Of most frames that it makes, and less: the first segment has to become full.
_FRAME_SIZE = 270
_NARROW = "phyOffset,size,queueId,storeTimestamp"
_WIDE = f"{_NARROW},topic,body,properties"
_TARGETS = {"narrow": 4e6, "wide": 1.5e6}


def measure(ground: Ground, report: Report) -> None:
    """Prints the table and leaves the verdicts: of a log of 4 GiB where the other parts have 3,000,000 messages."""
    store = ground.work / NAME
    progress(f"{NAME}: writing a log")
    write_large_store(store, _BYTES_PER_MESSAGE * ground.messages)
    try:
        measure_store(store, report)
    finally:
        shutil.rmtree(store)


def measure_store(store: Path, report: Report) -> None:
    """The same for any store."""
    warm_log(store)
    sizes = [path.stat().st_size for path in (store / "commitlog").iterdir()]
    with _session() as spark:
        rows = _count(spark, store)
        found = {name: _take_turns(spark, store, columns) for name, columns in (("narrow", _NARROW), ("wide", _WIDE))}
    table: list[Row] = [("", "best", "median", "CPU", "runs")]
    data: dict[str, Any] = {"rows": rows, "logBytes": sum(sizes)}
    for name, ways in found.items():
        for way, runs in ways.items():
            rates = [rows / seconds for seconds, _ in runs]
            cpu = min(cpu for _, cpu in runs) / rows * 1e9
            words = (f"{name}: {way}", per_second(max(rates)), per_second(median(rates)), f"{cpu:.0f} ns/row")
            table.append((*words, str(len(runs))))
            data[f"{name}: {way}"] = [round(seconds, 4) for seconds, _ in runs]
    report.part(NAME, f"{rows:,} messages, {megabytes(sum(sizes))} of log, {SLOTS} slots", table, data)
    for name, target in _TARGETS.items():
        best = max(rows / seconds for seconds, _ in found[name]["data source, noop"])
        report.verdict(NAME, f"{name} columns at least {per_second(target)}", per_second(best), best >= target)


def _take_turns(spark: SparkSession, store: Path, columns: str) -> dict[str, list[tuple[float, float]]]:
    options = parse_options({"path": str(store), "columns": columns}, is_stream=False)
    from indexd.spark.source.datasource import plan  # compiles, which is not to be measured
    from indexd.storage.disk import Disk

    splits = plan(Disk(), options)

    def noop() -> None:
        _frame(spark, store, columns).write.format("noop").mode("overwrite").save()

    def grouped() -> None:
        _frame(spark, store, columns).groupBy("queueId").count().collect()

    with get_context("spawn").Pool(SLOTS) as pool:

        def raw() -> None:
            pool.map(_read, [(store, columns, split) for split in splits], chunksize=1)

        def raw_alone() -> None:
            for split in splits:
                _read((store, columns, split))

        ways: dict[str, Callable[[], None]] = {
            "kernels alone, one process": raw_alone,
            f"kernels alone, {SLOTS} processes": raw,
            "data source, noop": noop,
            "data source, groupBy in Spark": grouped,
        }
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(_TURNS + 1):
            progress(f"source: turn {turn} of {_TURNS}")
            for way, work in ways.items():
                timed = _timed(work)
                if turn:  # the first one compiles, loads and warms
                    found[way].append(timed)
    return found


def _read(work: tuple[Path, str, Split]) -> int:
    from indexd.storage.disk import Disk
    from support.rows import record_batches

    store, columns, split = work
    options = parse_options({"path": str(store), "columns": columns}, is_stream=False)
    return sum(batch.num_rows for batch in record_batches(Disk(), options.config, split, options.columns))


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    # (seconds, CPU seconds of this process and all that it has started).
    cpu, began = _cpu_seconds(), time.perf_counter()
    work()
    return time.perf_counter() - began, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text("ascii", "replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents[int(path.name)], ticks[int(path.name)] = int(fields[1]), int(fields[11]) + int(fields[12])

    def is_ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and is_ours(parents[pid]))

    return sum(ticks[pid] for pid in ticks if is_ours(pid)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _session() -> Iterator[SparkSession]:
    from indexd.spark.session import SparkOptions, open_session

    with open_session(SparkOptions(master=f"local[{SLOTS}]"), "bench", memory="2g") as spark:
        yield spark


def _frame(spark: SparkSession, store: Path, columns: str) -> Any:
    return spark.read.format("rocketmq_commitlog").option("columns", columns).load(str(store))


def _count(spark: SparkSession, store: Path) -> int:
    return int(_frame(spark, store, "size").count())


def write_large_store(store: Path, size: int) -> None:
    """A log of about ``size`` bytes by the built-in writer: one segment, and copies of it at their own offsets."""
    write_store(store, _SEGMENT_SIZE // _FRAME_SIZE, segment_size=_SEGMENT_SIZE)
    first = store / "commitlog" / segment_name(0)
    for path in sorted((store / "commitlog").iterdir())[1:]:
        path.unlink()
    data = np.fromfile(first, dtype=np.uint8)
    positions = _positions(data)
    for number in range(1, max(size // _SEGMENT_SIZE, 1)):
        offsets = (positions + number * _SEGMENT_SIZE).astype(">u8").view(np.uint8).reshape(-1, 8)
        for byte in range(8):
            data[positions + 28 + byte] = offsets[:, byte]
        data.tofile(store / "commitlog" / segment_name(number * _SEGMENT_SIZE))


def _positions(data: Any) -> Any:
    found, at = [], 0
    while int.from_bytes(data[at + 4 : at + 8].tobytes(), "big") not in (0, 0xCBD43194):
        found.append(at)
        at += int.from_bytes(data[at : at + 4].tobytes(), "big")
    return np.array(found, dtype=np.int64)


def main() -> int:
    """Measure the data source alone."""
    parser = argparse.ArgumentParser(prog="python -m bench.source")
    parser.add_argument("--gib", type=float, default=1.0, help="log to read (default: %(default)s)")
    parser.add_argument("--store", type=Path, help="where the log is, or is made and kept (default: removed again)")
    args = parser.parse_args()
    report = Report(as_json=False, hidden={})
    report.note(f"Python {platform.python_version()}, load average {os.getloadavg()[0]:.1f}")
    store = args.store or Path(tempfile.mkdtemp(prefix="bench-source-"))
    try:
        if not (store / "commitlog").exists():
            progress(f"writing {args.gib} GiB")
            write_large_store(store, int(args.gib * (1 << 30)))
        measure_store(store, report)
    finally:
        if args.store is None:
            shutil.rmtree(store, ignore_errors=True)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
