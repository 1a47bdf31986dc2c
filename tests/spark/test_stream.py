"""The stream in a real session: micro-batches, checkpoints, restarts, and what ends a query."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from support.commitlog_writer import CommitLogWriter
from support.rows import rows_of_log
from support.small_log import SEGMENT_SIZE, messages, write_log

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

COLUMNS = "phyOffset,topic,properties"


class Query:
    """A query into Parquet, whose checkpoint stays when it is started again."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.root, self.store = spark, root, root / "store"

    def start(self, trigger: dict[str, Any] | None = None, **options: object) -> StreamingQuery:
        given = {"columns": COLUMNS, "settleMs": "1"} | {name: str(text) for name, text in options.items()}
        frame = self.spark.readStream.format("rocketmq_commitlog").options(**given).load(str(self.store))
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(self.root / "checkpoint"))
        return writer.trigger(**(trigger or {"availableNow": True})).start(str(self.root / "out"))

    def run(self, **options: object) -> list[dict[str, Any]]:
        """To the end of the log; the progress of each batch that had rows."""
        query = self.start(**options)
        assert query.awaitTermination(60)
        return [progress for progress in map(as_dict, query.recentProgress) if progress["numInputRows"]]

    def rows(self) -> list[int]:
        found = self.spark.read.parquet(str(self.root / "out")).select("phyOffset").collect()
        return sorted(row["phyOffset"] for row in found)

    def offsets(self) -> list[int]:
        return [row["phyOffset"] for row in rows_of_log(self.store / "commitlog")]


def as_dict(progress: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(progress.json)
    return found


@pytest.fixture
def query(spark: SparkSession, tmp_path: Path) -> Query:
    return Query(spark, tmp_path)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_available_now_in_steps_and_again_with_another_limit(query: Query) -> None:
    write_log(query.store, 1500)
    batches = query.run(maxBytesPerTrigger=SEGMENT_SIZE // 2)
    assert len(batches) >= 2
    assert query.rows() == query.offsets()
    # A batch that was planned and not finished is replayed as it was, whatever the limit is by now.
    last = max((query.root / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink()
    write_log(query.store, 3000)
    query.run(maxBytesPerTrigger=SEGMENT_SIZE)
    assert query.rows() == query.offsets()


def test_a_growing_log_is_followed_and_the_lag_is_told(query: Query) -> None:
    endless = messages(9)
    with CommitLogWriter(query.store / "commitlog", SEGMENT_SIZE) as writer:
        started = query.start({"processingTime": "100 milliseconds"}, maxBytesPerTrigger=SEGMENT_SIZE)
        try:
            for count in (1, 400, 1500):
                for _ in range(count):
                    writer.append(next(endless))
                until(lambda: stands_at(started) == writer.max_offset)
            source = as_dict(started.lastProgress)["sources"][0]
            assert source["latestOffset"]["offset"] <= writer.max_offset
        finally:
            started.stop()
    assert query.rows() == query.offsets()


def stands_at(query: StreamingQuery) -> int | None:
    assert query.exception() is None
    if query.lastProgress is None:
        return None
    end = as_dict(query.lastProgress)["sources"][0]["endOffset"]
    return None if end is None else int(end["offset"])


def test_a_log_that_is_another_by_now_ends_the_query(query: Query) -> None:
    write_log(query.store, 500)
    query.run()
    write_log(query.store, 600, seed=2)
    with pytest.raises(StreamingQueryException, match="the log was cut or written anew"):
        query.run()


def test_what_expired_ends_the_query_or_is_skipped(query: Query) -> None:
    write_log(query.store, 300)
    query.run()
    read = query.rows()
    write_log(query.store, 4000)
    (query.store / "commitlog" / f"{0:020d}").unlink()
    with pytest.raises(StreamingQueryException, match="expired before they were read"):
        query.run()
    query.run(onExpired="skip")
    assert query.rows() == read + query.offsets()
