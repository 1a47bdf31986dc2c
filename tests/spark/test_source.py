"""The data source in Spark: the log as a table and as a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.testing import assertSchemaEqual

from indexd.spark.source.columns import ALL_COLUMNS
from indexd.spark.source.datasource import spark_schema
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.rows import plain, rows_of_log
from support.small_log import SEGMENT_SIZE, write_log


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    with CommitLogWriter(path / "commitlog", SEGMENT_SIZE) as writer:
        writer.append(FrameSpec("", body=bytes(range(256)), born_host=("::1", 5), store_host=("fe80::1", 10911)))
        writer.append(FrameSpec("L" + "x" * 199, properties={"KEYS": "ключ é😀 \0", "n": "\0"}, sys_flag=0xC))
        writer.append(FrameSpec("T"), raw_properties=b"KEYS\x01\xed\xa0\x80 b\x02n\x011\x02n\x012\x02")
        end = writer.max_offset
    write_log(path, 3000, start_offset=end)
    return path


@pytest.fixture(scope="module")
def rows(store: Path) -> list[dict[str, Any]]:
    return rows_of_log(store / "commitlog")


def log(spark: SparkSession, store: Path, **options: object) -> DataFrame:
    return spark.read.format("rocketmq_commitlog").options(**{k: str(v) for k, v in options.items()}).load(str(store))


def collected(frame: DataFrame) -> list[dict[str, Any]]:
    found = [plain(row.asDict()) for row in frame.collect()]
    return sorted(found, key=lambda row: row["phyOffset"]) if "phyOffset" in frame.columns else found


def test_every_column_of_every_message(spark: SparkSession, store: Path, rows: list[dict[str, Any]]) -> None:
    frame = log(spark, store, columns="*", splitSize=SEGMENT_SIZE // 2)
    assertSchemaEqual(frame.schema, spark_schema(ALL_COLUMNS))
    assert collected(frame) == rows


def test_it_is_found_without_code_in_sql_too(spark: SparkSession, store: Path, rows: list[dict[str, Any]]) -> None:
    spark.sql(f"create temporary view log using rocketmq_commitlog options (path '{store}', columns 'topic,tags')")
    found = spark.sql("select count(*) n, count(tags) t from log where topic = 'OrderPaid'").collect()[0]
    spark.catalog.dropTempView("log")
    paid = [row for row in rows if row["topic"] == "OrderPaid"]
    assert (found["n"], found["t"]) == (len(paid), sum(row["tags"] is not None for row in paid))


def test_errors_say_what_and_what_to_do(spark: SparkSession, store: Path) -> None:
    with pytest.raises(AnalysisException, match=r"(?s)there is no column 'bodi'.*did you mean body\?"):
        log(spark, store, columns="bodi")


COLUMNS = "phyOffset,topic,properties"


def test_available_now_in_steps_and_again_with_another_limit(spark: SparkSession, tmp_path: Path) -> None:
    store, checkpoint, out = (tmp_path / name for name in ("store", "checkpoint", "out"))

    def run(size: int) -> int:
        """To the end of the log; how many batches had rows."""
        stream = spark.readStream.format("rocketmq_commitlog").option("columns", COLUMNS).option("settleMs", "1")
        frame = stream.option("maxBytesPerTrigger", str(size)).load(str(store))
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(checkpoint))
        query = writer.trigger(availableNow=True).start(str(out))
        assert query.awaitTermination(60)
        rows = spark.read.parquet(str(out)).select("phyOffset").collect()
        assert sorted(row["phyOffset"] for row in rows) == [
            row["phyOffset"] for row in rows_of_log(store / "commitlog")
        ]
        return sum(json.loads(progress.json)["numInputRows"] > 0 for progress in query.recentProgress)

    write_log(store, 1500)
    assert run(SEGMENT_SIZE // 2) >= 2
    # A batch that was planned and not finished is replayed as it was, whatever the limit is by now.
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink()
    write_log(store, 3000)
    run(SEGMENT_SIZE)
