"""The data source ``rocketmq_commitlog``: a broker's log as a DataFrame, in batches and as a stream.

``spark.read.format("rocketmq_commitlog").load(STORE)``; ``columns`` has the schema, ``options`` what else may be said.
Spark finds it by its name without any code (``pyspark_rocketmq_commitlog``), wherever indexd is installed with pyspark.

A DataFrame is a snapshot: it ends where the log ended when it was planned, however often it is evaluated. A log that
was cut, written anew or has expired since is an error, and never other rows.

What is filtered is pruned by options alone. A reader that takes filters from Spark (``pushFilters``) gives wrong rows
in 4.3.0: what was pushed for one query is used for the next on the same DataFrame (spec spark 0).

A streaming query goes in micro-batches from one message's end to another's. Its offsets are ``log_end``'s positions,
which Spark keeps in the checkpoint. A log that was cut or written anew always ends the query (DisturbedError): rows
that were delivered are no longer in it, and only a new checkpoint says which ones a query begins with. Of one whose
begin has expired before it was read, the option ``onExpired`` says whether it ends, too, or goes on at the first
message that is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from indexd.errors import CorruptDataError, DiskError, DisturbedError, UsageError
from indexd.spark.source.columns import parse_columns, spark_schema
from indexd.spark.source.log_end import LogEnd, Position
from indexd.spark.source.options import FORMAT, SourceOptions, parse_options, sorted_out
from indexd.spark.splits import Split, plan_splits
from indexd.storage.remote import disk_for


class CommitLogSource(DataSource):
    """What Spark makes of ``format("rocketmq_commitlog")`` and its options."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return FORMAT

    def schema(self) -> StructType:
        """The columns that the options ask for; nothing of the log is looked at."""
        sorted_out(self.options)
        return spark_schema(parse_columns(self.options.get("columns")))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For one DataFrame."""
        return CommitLogReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """For one streaming query."""
        return CommitLogStreamReader(self.options, schema)


class _Rows:
    """Pickled to the workers as it is: options and a schema, nothing open. A user's own schema casts the columns."""

    is_stream = False

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = parse_options(options, is_stream=self.is_stream)
        self._columns = parse_columns(",".join(schema.names))
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a split; of none at all where Spark makes a partition of an empty list."""
        return _read(self._options, self._columns, self._schema, partition.value)


class CommitLogReader(_Rows, DataSourceReader):
    """For one DataFrame."""

    def partitions(self) -> Sequence[InputPartition]:
        """One a split, planned by the driver; the last one ends where the log does now."""
        options, disk = self._options, disk_for(self._options.config)
        begin, end = max(options.start_offset or 0, options.time_begin(disk) or 0), options.end_offset
        if end is not None and begin >= end:
            return []
        splits = plan_splits(disk, options.config, size=options.split_size, begin=begin, end=end)
        return [InputPartition(split) for split in LogEnd(disk, options.config).trimmed(splits)]


def _read(
    options: SourceOptions, columns: tuple[str, ...], schema: StructType, split: Split | None
) -> Iterator[pa.RecordBatch]:
    # In a worker: all rows of a split, in the schema that was asked for, or an error.
    from indexd.spark.source.rows import RowFilter, read_rows  # noqa: PLC0415 - numba: planning does without
    from indexd.spark.tasks import quiet_gc  # noqa: PLC0415 - the same

    if split is None:
        return
    keep = RowFilter(options.topics, options.start_time, options.end_time)
    wanted = to_arrow_schema(schema, timezone="UTC")
    for batch in read_rows(options.config, columns, keep, split):
        cast = [column.cast(field.type) for column, field in zip(batch.columns, wanted, strict=True)]
        yield pa.RecordBatch.from_arrays(cast, schema=wanted)
        quiet_gc()  # behind the first batch: by now the kernels are loaded, too


class CommitLogStreamReader(_Rows, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """In the driver's planner process, for as long as the query runs; pickled to the workers before it is used."""

    is_stream = True
    _log_end: LogEnd | None = None
    #: Where availableNow ends.
    _until: int | None = None

    def initialOffset(self) -> Position:  # noqa: N802 - Spark's name
        """Where a new query begins: ``startingOffset``, or later where ``startTime`` allows it."""
        log_end, where = self._refreshed(), self._options.starting_offset
        if where == "latest":
            return log_end.position(log_end.from_here(log_end.first))
        first = self._first_message(log_end, where) if isinstance(where, int) else log_end.first
        return {"offset": max(first, self._options.time_begin(disk_for(self._options.config)) or 0)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """``maxBytesPerTrigger``."""
        most = self._options.max_bytes_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxBytes(most)

    def latestOffset(self, start: Position, limit: ReadLimit) -> Position:  # noqa: N802 - Spark's name
        """The end of the next batch; ``start`` itself when there is nothing new."""
        log_end = self._checked(start)
        begin, end = self._not_expired(log_end, start["offset"]), self._until
        if end is not None and begin >= end:
            return start
        if isinstance(limit, ReadMaxBytes):
            end = begin + limit.max_bytes if end is None else min(end, begin + limit.max_bytes)
        found = log_end.from_here(begin, end)
        if found.offset > begin:
            return log_end.position(found)
        if found.corrupt is not None:
            raise CorruptDataError(
                f"the log is corrupt at offset {found.offset}: {found.corrupt.reason}",
                "give the option corrupt=skip to go on at the next frame that proves itself",
            )
        return start if begin == start["offset"] else {"offset": begin}

    def reportLatestOffset(self) -> Position | None:  # noqa: N802 - Spark's name
        """Where the log ends by now: less the end of the last batch, it is how far the query lags behind, in bytes.

        None where it cannot be read: the query itself will say why.
        """
        try:
            log_end = self._refreshed()
            return {"offset": log_end.from_here(log_end.first).offset}
        except (DiskError, CorruptDataError):
            return None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """The query ends where the log ends now."""
        log_end = self._refreshed()
        self._until = log_end.from_here(log_end.first).offset

    def partitions(self, start: Position, end: Position) -> Sequence[InputPartition]:
        """The splits of a batch: the same messages each time it is asked for."""
        log_end = self._checked(start)
        log_end.check_same(end)
        begin = self._not_expired(log_end, start["offset"])
        return [InputPartition(split) for split in log_end.plan(begin, end["offset"], self._options.split_size)]

    def _refreshed(self) -> LogEnd:
        if self._log_end is None:
            self._log_end = LogEnd(disk_for(self._options.config), self._options.config)
        self._log_end.refresh()
        return self._log_end

    def _checked(self, start: Position) -> LogEnd:
        log_end = self._refreshed()
        log_end.check_same(start)
        return log_end

    def _first_message(self, log_end: LogEnd, where: int) -> int:
        # The first message at or behind ``where``.
        first = self._not_expired(log_end, where)
        splits = plan_splits(disk_for(self._options.config), self._options.config, begin=first)
        if splits:
            return splits[0].begin
        end = log_end.from_here(log_end.first).offset
        if where <= end:
            return end
        raise UsageError(f"startingOffset is {where}, and the log ends at {end}", "give a smaller one, or latest")

    def _not_expired(self, log_end: LogEnd, where: int) -> int:
        if where < log_end.first and self._options.on_expired == "fail":
            raise DisturbedError(
                f"the messages from {where} on have expired before they were read: the log begins at {log_end.first}",
                "give the option onExpired=skip to go on there, or start with a new checkpointLocation",
            )
        return max(where, log_end.first)
