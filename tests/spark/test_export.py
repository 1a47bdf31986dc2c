"""Exports by Spark, read by pandas, DuckDB and Spark: each sees every row as the plain decoder does, and prunes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from indexd.errors import DiskError, UnsafeStoreError
from indexd.spark.export.job import ExportRequest, export
from indexd.spark.export.parquet import Shape
from indexd.spark.source.columns import ALL_COLUMNS
from support.exporting import config_of, files_of, logged, parquet_of, row_of
from support.odd_log import odd_messages, write_odd
from support.small_log import SEGMENT_SIZE, write_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 2000
LONG = ("中" * 90).encode()
HIVE_NONE = "__HIVE_DEFAULT_PARTITION__"
HOSTILE = [
    HIVE_NONE,
    "null",
    "a=b",
    "%2F",
    "a%",
    "a+b c",
    "x'y\"z",
    "*[a]{b}?",
    "topic=..",
    "\x01\x1f",
    "a\\b",
    "día;&|<>",
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("store")
    write_log(found, COUNT)
    return found


@pytest.fixture(scope="module")
def plain(spark: SparkSession, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All columns, without partitions."""
    to = tmp_path_factory.mktemp("plain") / "out"
    request = ExportRequest(to, columns=ALL_COLUMNS, split_size=200_000)
    assert export(spark, config_of(store, to / "data"), request).rows == COUNT
    return to


@pytest.fixture(scope="module")
def hostile(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Topics of which each would be another directory, or none, if they were not escaped; and two days."""
    root = tmp_path_factory.mktemp("hostile")
    messages = [message for message in odd_messages(600, 14) if message.topic != LONG]
    for number, topic in enumerate(HOSTILE * 4):
        messages.append(type(messages[0])(topic.encode(), time=number * 5_000_000))
    write_odd(root / "store", messages, SEGMENT_SIZE)
    request = ExportRequest(root / "out", shape=Shape(partition_by=("topic", "day")), columns=("phyOffset", "topic"))
    export(spark, config_of(root / "store", root / "data"), request)
    rows = []
    for message in logged(root / "store"):
        day = pd.Timestamp(message.store_timestamp, unit="ms").date().isoformat()
        rows.append({"phyOffset": message.phy_offset, "topic": message.topic or None, "day": day})
    return root / "out", rows


def _wanted(store: Path) -> list[dict[str, Any]]:
    return [row_of(message) for message in logged(store)]


def test_pandas_reads_every_row(plain: Path, store: Path) -> None:
    frame = pd.read_parquet(plain).sort_values("phyOffset")
    rows = frame.to_dict("records")
    for row in rows:
        row["keys"], row["properties"] = list(row["keys"]), dict(row["properties"])
    assert rows == _wanted(store)
    assert list(frame.columns) == list(ALL_COLUMNS)


def test_duckdb_reads_every_row(plain: Path, store: Path) -> None:
    with duckdb.connect() as db:
        found = db.sql(f"select * from read_parquet('{plain}/**/*.parquet') order by phyOffset")
        names = found.columns
        rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    for row in rows:
        if "key" in row["properties"]:
            row["properties"] = dict(zip(row["properties"]["key"], row["properties"]["value"], strict=True))
    assert rows == _wanted(store)


def test_spark_reads_every_row(spark: SparkSession, plain: Path, store: Path) -> None:
    frame = spark.read.parquet(str(plain)).orderBy("phyOffset")
    rows = [row.asDict() for row in frame.collect()]
    assert [row | {"body": bytes(row["body"])} for row in rows] == _wanted(store)
    assert frame.columns == list(ALL_COLUMNS)


def _order(row: dict[str, Any]) -> int:
    return int(row["phyOffset"])


def test_any_topic_is_a_partition_for_pandas(hostile: tuple[Path, list[dict[str, Any]]]) -> None:
    to, rows = hostile
    # pyarrow, and so pandas, undoes the escapes first and asks for Hive's none then.
    wanted = [row | {"topic": None if row["topic"] == HIVE_NONE else row["topic"]} for row in rows]
    # Without it the directories' names become a categorical, which can have no nulls over several files.
    hive = ds.partitioning(pa.schema([("topic", pa.string()), ("day", pa.string())]), flavor="hive")
    frame = pd.read_parquet(to, partitioning=hive)
    found = frame.where(frame.notna(), None).to_dict("records")
    assert sorted(found, key=_order) == sorted(wanted, key=_order)
    some = pd.read_parquet(to, partitioning=hive, filters=[("topic", "==", "a=b")])
    assert set(some["phyOffset"]) == {row["phyOffset"] for row in wanted if row["topic"] == "a=b"}
    # What most will type, where all topics have names.
    odd = [path for path in to.iterdir() if path.name.endswith("HIVE_DEFAULT_PARTITION__")]
    assert len(odd) == 2
    for path in odd:
        path.rename(to / f"_{path.name}")
    named = pd.read_parquet(to)
    for path in odd:
        (to / f"_{path.name}").rename(path)
    assert sorted(named["topic"]) == sorted(row["topic"] for row in wanted if row["topic"] is not None)


def test_any_topic_is_a_partition_for_duckdb(hostile: tuple[Path, list[dict[str, Any]]]) -> None:
    to, wanted = hostile
    read = f"read_parquet('{to}/**/*.parquet', hive_partitioning = true, hive_types_autocast = false)"
    with duckdb.connect() as db:
        rows = db.sql(f"select phyOffset, topic, day from {read}").fetchall()
        plan = db.sql(f"explain analyze select phyOffset from {read} where topic = 'a=b'").fetchall()[0][1]
    found = [dict(zip(("phyOffset", "topic", "day"), row, strict=True)) for row in rows]
    assert sorted(found, key=_order) == sorted(wanted, key=_order)
    assert f"/{len(parquet_of(to))}" in plan.replace(" ", "").replace("│", "")


def test_any_topic_is_a_partition_for_spark(spark: SparkSession, hostile: tuple[Path, list[dict[str, Any]]]) -> None:
    to, wanted = hostile
    frame = spark.read.parquet(str(to)).selectExpr("phyOffset", "topic", "cast(day as string) as day")
    rows = [row.asDict() for row in frame.collect()]
    assert sorted(rows, key=_order) == sorted(wanted, key=_order)
    some = frame.where("topic = 'a=b' and day = '2023-11-14'")
    assert len(some.inputFiles()) == len(parquet_of(to))  # those of the source; which are read, the plan says
    assert {row["phyOffset"] for row in some.collect()} == {
        row["phyOffset"] for row in wanted if row["topic"] == "a=b" and row["day"] == "2023-11-14"
    }
    plan = some._jdf.queryExecution().executedPlan().toString()  # classic only, as this session is
    assert "PartitionFilters: [isnotnull(topic" in plan


def test_only_the_files_of_a_partition_are_read(hostile: tuple[Path, list[dict[str, Any]]]) -> None:
    to, wanted = hostile
    data = ds.dataset(to, partitioning="hive", format="parquet")
    found = list(data.get_fragments(ds.field("topic") == "a=b"))
    assert 0 < len(found) < len(parquet_of(to))
    assert sum(fragment.count_rows() for fragment in found) == sum(row["topic"] == "a=b" for row in wanted)


def test_a_task_that_fails_leaves_the_target_as_it_was(spark: SparkSession, plain: Path, tmp_path: Path) -> None:
    """A segment in the middle is damaged: the tasks of the others have written their files by then."""
    store, to = tmp_path / "store", tmp_path / "out"
    write_log(store, COUNT)
    config = config_of(store, tmp_path / "data")
    request = ExportRequest(to, split_size=300_000)
    last = sorted((store / "commitlog").iterdir())[1]
    good = last.read_bytes()
    export(spark, config, request)
    before = {name: (to / name).read_bytes() for name in files_of(to)}
    last.write_bytes(good[:100_000] + b"\xff" * 5000 + good[105_000:])
    for mode in ("overwrite", "error"):
        place = to if mode == "overwrite" else tmp_path / "new"
        with pytest.raises(Exception, match="corrupt") as caught:
            export(spark, config, ExportRequest(place, mode=mode, split_size=300_000))  # type: ignore[arg-type]
        assert "\n" not in caught.value.line()  # type: ignore[attr-defined]
    assert {name: (to / name).read_bytes() for name in files_of(to)} == before
    assert not (tmp_path / "new").exists()
    last.write_bytes(good)
    assert export(spark, config, ExportRequest(to, mode="overwrite", split_size=300_000)).rows == COUNT


def test_a_worker_that_cannot_write_is_one_line(spark: SparkSession, store: Path, tmp_path: Path) -> None:
    with pytest.raises((DiskError, UnsafeStoreError)) as caught:
        export(spark, config_of(store, tmp_path / "data"), ExportRequest(Path("/proc/out")))
    assert "/proc/out" in caught.value.line()


def test_the_manifest_names_what_is_there(plain: Path) -> None:
    manifest = json.loads((plain / "_manifest.json").read_text())
    (done,) = manifest["exports"]
    assert sorted(name for name, _, _ in done["files"]) == [path.name for path in parquet_of(plain)]
    assert sum(rows for _, rows, _ in done["files"]) == done["rows"] == COUNT
    assert all(os.stat(plain / name).st_size == size for name, _, size in done["files"])  # noqa: PTH116 - a name
