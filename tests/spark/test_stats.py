"""Statistics as tasks of Spark: the same as without it, however the log is split; and the command."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from indexd.cli.main import main
from indexd.errors import CorruptDataError
from indexd.spark.stats.collect import collect, spark_run
from indexd.spark.stats.content import Selection
from indexd.spark.stats.report import to_report
from indexd.storage.disk import Disk
from support.small_log import messages
from support.stats import SEGMENT_SIZE, Log, plain_run, written_log
from support.strategies import Sample

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COUNT = 1500


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    samples = [Sample(spec) for spec in islice(messages(3), COUNT)]
    return written_log(tmp_path_factory.mktemp("log"), samples, hash_slot_num=300, index_num=800)


def plain_report(log: Log, split_size: int) -> dict[str, Any]:
    return to_report(collect(plain_run, Disk(), log.config, Selection(), split_size=split_size, top=5))


@pytest.mark.parametrize("split_size", [40_000, 1 << 20])
def test_spark_counts_what_one_process_does(spark: SparkSession, log: Log, split_size: int) -> None:
    stages: list[str] = []
    run = spark_run(spark, stages.append)
    found = to_report(collect(run, Disk(), log.config, Selection(), split_size=split_size, top=5))
    assert found == plain_report(log, 9_000)
    assert found["messages"] == COUNT
    assert len(found["index"]["files"]) > 3
    assert stages == ["count", "chains"]


def flags(log: Log) -> list[str]:
    config = log.config
    return [
        *("--store", str(config.store.store), "--data", str(config.store.data), "--segment-size", str(SEGMENT_SIZE)),
        *("--hash-slot-num", "300", "--index-num", "800"),
    ]


def test_the_command_prints_one_object_and_writes_tables_and_a_page(
    spark: SparkSession, log: Log, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to, page = tmp_path / "tables", tmp_path / "page.html"
    with pytest.raises(SystemExit) as ended:
        main(
            [
                "stats",
                *flags(log),
                "--split-size",
                "20000",
                "--top",
                "5",
                "--json",
                "--to",
                str(to),
                "--report",
                str(page),
            ]
        )
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == plain_report(log, 9_000)
    assert spark.read.parquet(str(to / "topic_hours.parquet")).groupBy().sum("messages").collect()[0][0] == COUNT
    assert "<title>Commitlog of" in page.read_text(encoding="utf-8")


def test_the_command_speaks_and_selects(spark: SparkSession, log: Log, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["stats", *flags(log), "-t", "OrderPaid", "--quick", "--split-size", "30000"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "OrderPaid" in shown
    assert "TopicTest" not in shown
    assert "The index" not in shown


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["-b", "2", "-e", "1"], 2, "swap -b and -e"),
        (["--top", "0"], 2, "not from 1 to 1000"),
        (["--silence", "soon"], 2, "is not a duration"),
        (["--to", "s3://bucket/x"], 2, "no path of this machine"),
        (["--report", "{store}/page.html"], 3, "lies inside the store"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    log: Log, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    words = [word.replace("{store}", str(log.config.store.store)) for word in words]
    with pytest.raises(SystemExit) as ended:
        main(["stats", *flags(log), *words])
    assert ended.value.code == code
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_log_that_is_damaged_in_the_middle_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    log = written_log(tmp_path, [Sample(spec) for spec in islice(messages(4), 300)])
    path = next(iter(sorted((log.config.store.store or tmp_path).joinpath("commitlog").iterdir())))
    with path.open("r+b") as file:
        file.seek(log.offsets[100] + 4)
        file.write(b"\xff\xff\xff\xff")
    with pytest.raises(CorruptDataError, match="corrupt at offset"):
        collect(spark_run(spark, lambda _: None), Disk(), log.config, Selection(), split_size=1 << 20)
