"""The data source in a real session: found by its name, the rows of the log, and never others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import functions
from pyspark.testing import assertSchemaEqual

from indexd.spark.source.columns import ALL_COLUMNS
from indexd.spark.source.datasource import spark_schema
from support.commitlog_writer import CommitLogWriter, FrameSpec
from support.rows import plain, rows_of_log
from support.small_log import SEGMENT_SIZE, write_log

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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


def test_a_schema_of_ones_own(spark: SparkSession, store: Path, rows: list[dict[str, Any]]) -> None:
    wanted = "keys array<string>, phyOffset long, properties map<string, string>"
    frame = spark.read.schema(wanted).format("rocketmq_commitlog").load(str(store))
    assert collected(frame) == [{name: row[name] for name in ("keys", "phyOffset", "properties")} for row in rows]


def test_a_filter_leaves_the_next_count_alone(spark: SparkSession, store: Path, rows: list[dict[str, Any]]) -> None:
    # What a reader lets Spark push stays pushed in 4.3.0, on this DataFrame and on a join with itself.
    frame, middle = log(spark, store, columns="phyOffset,topic"), rows[1000]["phyOffset"]
    assert frame.filter(functions.col("phyOffset") >= middle).count() == len(rows) - 1000
    assert frame.count() == len(rows)
    few = frame.filter(functions.col("phyOffset") < middle)
    assert frame.join(few, "phyOffset", "left").count() == len(rows)
    assert few.count() == 1000


def test_what_is_pruned_by_options(spark: SparkSession, store: Path, rows: list[dict[str, Any]]) -> None:
    begin, end = rows[500]["phyOffset"], rows[2500]["phyOffset"]
    frame = log(spark, store, columns="phyOffset", startOffset=begin, endOffset=end, topics="OrderPaid,订单主题")
    expected = [row for row in rows[500:2500] if row["topic"] in ("OrderPaid", "订单主题")]
    assert [row["phyOffset"] for row in collected(frame)] == [row["phyOffset"] for row in expected]


def test_an_empty_log_has_a_schema_and_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "commitlog").mkdir()
    frame = log(spark, tmp_path)
    assert frame.count() == 0
    assert frame.columns[0] == "phyOffset"


def test_a_data_frame_is_a_snapshot(spark: SparkSession, tmp_path: Path) -> None:
    write_log(tmp_path, 100)
    frame = log(spark, tmp_path, columns="phyOffset")
    assert frame.count() == 100
    write_log(tmp_path, 250)
    assert frame.count() == 100
    assert log(spark, tmp_path, columns="phyOffset").count() == 250
    (tmp_path / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(PySparkException, match="DisturbedError"):
        frame.count()


def test_errors_say_what_and_what_to_do(spark: SparkSession, store: Path, tmp_path: Path) -> None:
    with pytest.raises(AnalysisException, match=r"(?s)there is no column 'bodi'.*did you mean body\?"):
        log(spark, store, columns="bodi")
    with pytest.raises(AnalysisException, match=r"(?s)there is no commitlog at .*storePathRootDir"):
        log(spark, tmp_path).count()
