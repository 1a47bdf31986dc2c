"""A DataFrame of the log: splits planned once, each read by a task.

A DataFrame is a snapshot: it ends where the log ended when it was planned, however often it is evaluated. A log that
was cut, written anew or has expired since is an error, and never other rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from indexd.errors import UsageError
from indexd.spark.source.columns import ALL_COLUMNS, arrow_schema
from indexd.spark.source.log_end import LogEnd
from indexd.spark.source.options import SourceOptions, explained, parse_options, time_range
from indexd.spark.source.rows import Keep, RowReader, check_end
from indexd.spark.splits import Split, plan_splits
from indexd.spark.tasks import quiet_gc
from indexd.storage.disk import Disk
from indexd.storage.remote import disk_for


class CommitLogReader(DataSourceReader):
    """Pickled to the workers as it is: options and a schema, nothing open."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = parse_options(options, is_stream=False)
        self._task = RowTask(self._options, schema)

    def partitions(self) -> Sequence[InputPartition]:
        """One a split, planned by the driver."""
        with explained():
            return [InputPartition(split) for split in plan(disk_for(self._options.config), self._options)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a split; of none at all where Spark makes a partition of an empty list."""
        return self._task.read(partition.value)


class RowTask:
    """Reads splits in a worker, in the schema that was asked for: that of the options, or the user's own."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._config = options.config
        self._keep = Keep(options.topics, options.start_time, options.end_time)
        self._columns = _columns_of(schema)
        wanted = to_arrow_schema(schema, timezone="UTC")
        own = arrow_schema(self._columns)
        self._cast_to = None if wanted.equals(own) else wanted
        if self._cast_to is not None:
            _check_types(own, wanted)

    def read(self, split: Split | None) -> Iterator[pa.RecordBatch]:
        """Its rows, all of them or an error. Raises what RowReader does, and DisturbedError."""
        if split is None:
            return
        with explained():
            reader = RowReader(disk_for(self._config), self._config, split, self._columns, self._keep)
            for batch in reader:
                yield batch if self._cast_to is None else _cast(batch, self._cast_to)
                quiet_gc()  # behind the first batch: by now the kernels are loaded, too
            check_end(split, reader.next_offset)


def plan(disk: Disk, options: SourceOptions) -> list[Split]:
    """The splits of what the options ask for; the last one ends where the log does now."""
    config, log_end = options.config, LogEnd(disk, options.config)
    begin, end = time_range(disk, options, log_end)
    if options.start_offset is not None:
        begin = max(options.start_offset, begin or 0)
    if options.end_offset is not None:
        end = options.end_offset if end is None else min(options.end_offset, end)
    if begin is not None and end is not None and begin >= end:
        return []
    splits = plan_splits(disk, config, size=options.split_size, slots=machine_slots(), begin=begin, end=end)
    return until_end(splits, log_end) if splits else []


def until_end(splits: list[Split], log_end: LogEnd) -> list[Split]:
    """The same splits, the last one without what the log does not hold yet."""
    last = splits[-1]
    log_end.refresh()
    segment = log_end.log.at(last.begin)
    if segment is None or last.end < segment.end or log_end.is_closed(segment):
        return splits
    found = log_end.from_here(last.begin, last.end)
    if found.corrupt is not None:
        return splits  # the task that meets it says so, or passes over it
    return [*splits[:-1], replace(last, end=found.offset)] if found.offset > last.begin else splits[:-1]


def machine_slots() -> int:
    """How many tasks at once to plan for: right for local masters; elsewhere splitSize says it better."""
    return len(os.sched_getaffinity(0))


def _columns_of(schema: StructType) -> tuple[str, ...]:
    known = {name.lower(): name for name in ALL_COLUMNS}
    for name in schema.names:
        if name.lower() not in known:
            raise UsageError(f"there is no column {name[:64]!r}", f"there are {', '.join(ALL_COLUMNS)}")
    return tuple(known[name.lower()] for name in schema.names)


def _check_types(own: pa.Schema, wanted: pa.Schema) -> None:
    # A schema of the user's own may choose columns and allow nulls, and nothing else.
    for mine, theirs in zip(own, wanted, strict=True):
        if _nullable(mine.type) != _nullable(theirs.type):
            raise UsageError(
                f"the column {mine.name} is {mine.type}, not {theirs.type}",
                "choose columns with the option columns, and cast them afterwards",
            )


def _nullable(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_list(kind):
        return pa.list_(kind.value_type)
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, kind.item_type)
    return kind


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    columns = [column.cast(field.type) for column, field in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
