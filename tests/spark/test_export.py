"""Exports by Spark, read by pandas, DuckDB and Spark: each sees every row as the plain decoder does, and prunes."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from indexd.errors import BusyError, CorruptDataError, SparkError, UnsafeStoreError, UsageError
from indexd.spark import export as exporting
from indexd.spark.export import Exported, ExportRequest, export
from indexd.spark.source.columns import ALL_COLUMNS, DEFAULT_COLUMNS
from indexd.storage.lock import DirectoryLock
from support.beside_log import odd_messages, write_odd
from support.rows import config_of, logged, rows_of_log
from support.small_log import BASE_TIME, SEGMENT_SIZE, write_log

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
    request = ExportRequest(to, columns=ALL_COLUMNS)
    assert export(spark, config_of(store, data=to / "data", split_size=200_000), request).rows == COUNT
    return to


@pytest.fixture(scope="module")
def hostile(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Topics of which each would be another directory, or none, if they were not escaped; and two days."""
    root = tmp_path_factory.mktemp("hostile")
    messages = [message for message in odd_messages(600, 14) if message.topic != LONG]
    for number, topic in enumerate(HOSTILE * 4):
        messages.append(type(messages[0])(topic.encode(), time=number * 5_000_000))
    write_odd(root / "store", messages, SEGMENT_SIZE)
    request = ExportRequest(root / "out", partition_by=("topic", "day"), columns=("phyOffset", "topic"))
    export(spark, config_of(root / "store", data=root / "data"), request)
    return root / "out", [
        {
            "phyOffset": message.phy_offset,
            "topic": None if message.topic in ("", HIVE_NONE) else message.topic.replace("\0", "\ufffd"),
            "day": pd.Timestamp(message.store_timestamp, unit="ms").date().isoformat(),
        }
        for message in logged(root / "store")
    ]


def test_pandas_reads_every_row(plain: Path, store: Path) -> None:
    frame = pd.read_parquet(plain).sort_values("phyOffset")
    rows = frame.to_dict("records")
    for row in rows:
        row["keys"], row["properties"] = list(row["keys"]), dict(row["properties"])
    assert rows == rows_of_log(store / "commitlog")
    assert list(frame.columns) == list(ALL_COLUMNS)


def test_any_topic_is_a_partition_for_duckdb(hostile: tuple[Path, list[dict[str, Any]]]) -> None:
    to, wanted = hostile
    read = f"read_parquet('{to}/**/*.parquet', hive_partitioning = true, hive_types_autocast = false)"
    with duckdb.connect() as db:
        rows = db.sql(f"select phyOffset, topic, day from {read}").fetchall()
        plan = db.sql(f"explain analyze select phyOffset from {read} where topic = 'a=b'").fetchall()[0][1]
    found = [dict(zip(("phyOffset", "topic", "day"), row, strict=True)) for row in rows]
    assert sorted(found, key=itemgetter("phyOffset")) == wanted
    assert f"/{len(parquet_of(to))}" in plan.replace(" ", "").replace("│", "")


def parquet_of(target: Path) -> list[Path]:
    """The files that readers see, in the log's order within a partition."""
    return sorted(target.rglob("*.parquet"))


def run(spark: SparkSession, store: Path, to: Path, **asked: Any) -> Exported:
    request = ExportRequest(to, **{"columns": ("phyOffset",)} | asked)
    return export(spark, config_of(store, data=to.parent / "data", split_size=200_000), request)


def offsets_in(to: Path) -> list[int]:
    return sorted(offset for path in parquet_of(to) for offset in pq.read_table(path)["phyOffset"].to_pylist())


def offsets_of(store: Path) -> list[int]:
    return [message.phy_offset for message in logged(store)]


def content(to: Path) -> dict[str, bytes]:
    """Everything below it, by name."""
    return {path.relative_to(to).as_posix(): path.read_bytes() for path in sorted(to.rglob("*")) if path.is_file()}


def test_what_it_says_is_what_is_there(spark: SparkSession, store: Path, tmp_path: Path) -> None:
    begin, end, to = BASE_TIME + 4000, BASE_TIME + 30_000, tmp_path / "a [b]{c}*%20"
    topics = frozenset({"OrderPaid", "订单主题", "NoSuchTopic"})
    found = run(spark, store, to, topics=topics, begin=begin, end=end, max_records_per_file=50, compression="snappy")
    wanted = [m for m in logged(store) if m.topic in topics and begin <= m.store_timestamp <= end]
    assert offsets_in(to) == [message.phy_offset for message in wanted]
    assert (found.rows, found.missing_topics, found.partitions) == (len(wanted), ("NoSuchTopic",), 1)
    assert (found.begin_offset, found.end_offset) == (0, logged(store)[-1].phy_offset + logged(store)[-1].size)
    files = parquet_of(to)
    assert (found.files, found.bytes) == (len(files), sum(path.stat().st_size for path in files))
    for path in files:
        assert pq.read_metadata(path).num_rows <= 50
        assert pq.read_metadata(path).row_group(0).column(0).compression == "SNAPPY"
    by = run(spark, store, tmp_path / "by", partition_by=("topic", "day"), columns=DEFAULT_COLUMNS)
    assert by.partitions == len({message.topic for message in logged(store)})
    for table in (pq.ParquetFile(path).read() for path in parquet_of(tmp_path / "by")):
        assert table.column_names == [name for name in DEFAULT_COLUMNS if name != "topic"]
        assert table["phyOffset"].to_pylist() == sorted(table["phyOffset"].to_pylist())


def test_an_empty_log_gives_a_file_with_the_columns(spark: SparkSession, tmp_path: Path) -> None:
    store, to = tmp_path / "store", tmp_path / "out"
    (store / "commitlog").mkdir(parents=True)
    found = run(spark, store, to, columns=DEFAULT_COLUMNS)
    assert (found.rows, found.end_offset) == (0, 0)
    assert [pq.read_schema(path).names for path in parquet_of(to)] == [list(DEFAULT_COLUMNS)]
    write_log(store, 100)
    assert run(spark, store, to, mode="overwrite", columns=DEFAULT_COLUMNS).rows == 100


def test_a_job_that_fails_leaves_the_target_as_it_was(spark: SparkSession, tmp_path: Path) -> None:
    """A segment in the middle is damaged: the tasks of the others have written their files by then."""
    store, to = tmp_path / "store", tmp_path / "out"
    write_log(store, COUNT)
    middle = sorted((store / "commitlog").iterdir())[1]
    good = middle.read_bytes()
    run(spark, store, to)
    before = content(to)
    middle.write_bytes(good[:100_000] + b"\xff" * 5000 + good[105_000:])
    with pytest.raises(CorruptDataError) as caught:
        run(spark, store, to, mode="overwrite")
    assert "\n" not in caught.value.line()
    middle.write_bytes(good)
    with pytest.raises(UsageError, match="no message of NoSuchTopic"):
        run(spark, store, to, mode="overwrite", topics=frozenset({"NoSuchTopic"}), end=1)
    assert content(to) == before
    assert run(spark, store, to, mode="overwrite").rows == COUNT
    assert offsets_in(to) == offsets_of(store)


def test_what_cannot_be_written_is_one_line(spark: SparkSession, store: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    write_odd(odd, [message for message in odd_messages(900, 14) if message.topic == LONG], SEGMENT_SIZE)
    with pytest.raises(SparkError, match=r"Mkdirs failed to create|too long") as caught:
        run(spark, odd, tmp_path / "out", partition_by=("topic",))
    assert "\n" not in caught.value.line()


def test_a_target_that_holds_something_is_refused(spark: SparkSession, store: Path, tmp_path: Path) -> None:
    to, left = tmp_path / "out", tmp_path / "out.building"
    # What a killed export has left does not count.
    left.mkdir()
    pq.write_table(pa.table({"phyOffset": [1]}), left / "part-0.parquet")
    run(spark, store, to)
    assert (offsets_in(to), left.exists()) == (offsets_of(store), False)
    with pytest.raises(UsageError, match="holds an export"):
        run(spark, store, to)
    lock = DirectoryLock(tmp_path / "out.lock")
    lock.acquire()
    with pytest.raises(BusyError):
        run(spark, store, to, mode="overwrite")
    lock.release()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").touch()
    alien = "part-00000-01234567-0123-0123-0123-0123456789ab-c000.snappy.parquet"
    (tmp_path / "alien").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "alien" / alien)
    for name, mine, says in (("mine", "letter.txt", "letter.txt"), ("alien", alien, "no export has written")):
        with pytest.raises(UsageError, match=says):
            run(spark, store, tmp_path / name, mode="overwrite")
        assert mine in content(tmp_path / name)


def test_what_executors_wrote_elsewhere_is_missed(
    spark: SparkSession, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = tmp_path / "out"
    monkeypatch.setattr(exporting, "is_local", lambda _: False)
    assert run(spark, store, to).rows == COUNT
    before, run_it = content(to), exporting.run_job

    def lose_one(*given: Any, **more: Any) -> None:
        run_it(*given, **more)
        parquet_of(tmp_path / "out.building")[0].unlink()

    monkeypatch.setattr(exporting, "run_job", lose_one)
    with pytest.raises(UnsafeStoreError, match=rf"holds \d+ of the {COUNT} messages") as caught:
        run(spark, store, to, mode="overwrite")
    assert "all executors share" in caught.value.line()
    assert content(to) == before
