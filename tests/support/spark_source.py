"""The data source as Spark uses it, without Spark: readers made of options, pickled for each task."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark import cloudpickle
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes

from indexd.spark.source.datasource import CommitLogSource, CommitLogStreamReader
from support.rows import plain

ALL = ReadAllAvailable()
_dumps: Callable[[object], bytes] = cloudpickle.dumps  # it has no types


def source(store: Path, **options: Any) -> CommitLogSource:
    return CommitLogSource({"path": str(store), "settlems": "1"} | {name: str(text) for name, text in options.items()})


def reader(store: Path, **options: Any) -> DataSourceReader:
    made = source(store, **options)
    return made.reader(made.schema())


def read(reader: DataSourceReader) -> list[dict[str, Any]]:
    """Every row, as Spark would read it: the reader is pickled for each task."""
    found: list[dict[str, Any]] = []
    for partition in reader.partitions() or [InputPartition(None)]:
        copy = pickle.loads(_dumps(reader))
        for batch in copy.read(pickle.loads(_dumps(partition))):
            found += [plain(row) for row in batch.to_pylist()]
    return found


def stream(store: Path, **options: Any) -> CommitLogStreamReader:
    given = {"path": str(store), "settlems": "1", "columns": "phyOffset"}
    made_of = CommitLogSource(given | {name: str(text) for name, text in options.items()})
    made = made_of.streamReader(made_of.schema())
    assert isinstance(made, CommitLogStreamReader)
    return made


def kept(offset: dict[str, Any]) -> dict[str, Any]:
    """An offset out of the checkpoint."""
    found: dict[str, Any] = json.loads(json.dumps(offset))
    return found


def rows_between(reader: CommitLogStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[int]:
    found: list[int] = []
    for partition in reader.partitions(kept(start), kept(end)):
        for batch in reader.read(partition):
            found += batch["phyOffset"].to_pylist()
    return found


def run(
    reader: CommitLogStreamReader, start: dict[str, Any], limit: ReadLimit = ALL
) -> tuple[dict[str, Any], list[int]]:
    """Batches until there is no more: where it stands then, and the rows."""
    rows: list[int] = []
    while True:
        end = reader.latestOffset(kept(start), limit)
        if end == start:
            return end, rows
        assert end["offset"] > start["offset"]
        found = rows_between(reader, start, end)
        if isinstance(limit, ReadMaxBytes) and len(found) > 1:
            assert found[-1] - found[0] < limit.max_bytes
        rows += found
        start = end
