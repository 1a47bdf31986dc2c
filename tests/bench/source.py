"""The Spark data source: rows a second on two cores, beside the same kernels without Spark; start-up is not counted."""

from __future__ import annotations

import shutil
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
    warm_log(store)
    sizes = [path.stat().st_size for path in (store / "commitlog").iterdir()]
    with _session() as spark:
        rows = _count(spark, store)
        found = {name: _take_turns(spark, store, columns) for name, columns in (("narrow", _NARROW), ("wide", _WIDE))}
    shutil.rmtree(store)
    table: list[Row] = [("", "best", "median", "runs")]
    data: dict[str, Any] = {"rows": rows, "logBytes": sum(sizes)}
    for name, ways in found.items():
        for way, runs in ways.items():
            rates = [rows / seconds for seconds in runs]
            table.append((f"{name}: {way}", per_second(max(rates)), per_second(median(rates)), str(len(runs))))
            data[f"{name}: {way}"] = [round(seconds, 4) for seconds in runs]
    report.part(NAME, f"{rows:,} messages, {megabytes(sum(sizes))} of log, {SLOTS} slots", table, data)
    for name, target in _TARGETS.items():
        best = max(rows / seconds for seconds in found[name]["data source, noop"])
        report.verdict(NAME, f"{name} columns at least {per_second(target)}", per_second(best), best >= target)


def _take_turns(spark: SparkSession, store: Path, columns: str) -> dict[str, list[float]]:
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

        ways: dict[str, Callable[[], None]] = {
            f"kernels alone, {SLOTS} processes": raw,
            "data source, noop": noop,
            "data source, groupBy in Spark": grouped,
        }
        found: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(_TURNS + 1):
            progress(f"source: turn {turn} of {_TURNS}")
            for way, work in ways.items():
                began = time.perf_counter()
                work()
                if turn:  # the first one compiles, loads and warms
                    found[way].append(time.perf_counter() - began)
    return found


def _read(work: tuple[Path, str, Split]) -> int:
    from indexd.storage.disk import Disk
    from support.rows import record_batches

    store, columns, split = work
    options = parse_options({"path": str(store), "columns": columns}, is_stream=False)
    return sum(batch.num_rows for batch in record_batches(Disk(), options.config, split, options.columns))


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
