"""The data source ``rocketmq_commitlog``: a broker's log as a DataFrame, in batches and as a stream.

``spark.read.format("rocketmq_commitlog").load(STORE)``; ``columns`` has the schema, ``options`` what else may be said.
Spark finds it by its name without any code (``pyspark_rocketmq_commitlog``), wherever indexd is installed with pyspark.

What is filtered is pruned by options alone. A reader that takes filters from Spark (``pushFilters``) gives wrong rows
in 4.3.0: what was pushed for one query is used for the next on the same DataFrame (spec spark 0).

A streaming query over a log that grows: micro-batches from one message's end to another's.

An offset is ``{"offset": n, "message": m, "crc": c}``: everything before physical offset n has been read, m is where
the last message before it begins, and c the CRC-32 of that frame (its first 64 KiB). Spark keeps it in the checkpoint,
so that after any restart it is known whether the log is still the one that was read: m and c are left out where a
segment has just begun. What they cannot show is a log that was cut before m while its bytes still stand; it shows when
the broker writes over them.

A cut log, or one that was written anew, always ends the query (DisturbedError): rows that were delivered are no longer
in it, and only a new checkpoint says which ones a query begins with. Of one whose begin has expired before it was read,
the option ``onExpired`` says whether it ends, too, or goes on at the first message that is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from indexd.errors import CorruptDataError, DiskError, DisturbedError, UsageError
from indexd.spark.source.batch import RowTask, machine_slots
from indexd.spark.source.columns import arrow_schema, parse_columns
from indexd.spark.source.log_end import End, LogEnd
from indexd.spark.source.options import FORMAT, check_names, explained, parse_options, time_range
from indexd.spark.splits import Split, plan_splits
from indexd.storage.remote import disk_for

if TYPE_CHECKING:
    from collections.abc import Sequence


def spark_schema(columns: Sequence[str]) -> StructType:
    """The schema of these columns as Spark has it; the same as the batches', nullability included."""
    return from_arrow_schema(arrow_schema(columns))


class CommitLogSource(DataSource):
    """What Spark makes of ``format("rocketmq_commitlog")`` and its options."""

    @classmethod
    def name(cls) -> str:
        """What ``format`` is given."""
        return FORMAT

    def schema(self) -> StructType:
        """The columns that the options ask for; nothing of the log is looked at."""
        with explained():
            check_names(self.options)
            return spark_schema(parse_columns(self.options.get("columns")))

    def reader(self, schema: StructType) -> DataSourceReader:
        """For one DataFrame."""
        from indexd.spark.source.batch import CommitLogReader  # noqa: PLC0415 - numba: who lists sources does without

        with explained():
            return CommitLogReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """For one streaming query."""

        with explained():
            return CommitLogStreamReader(self.options, schema)


Offset = dict[str, Any]
_NEW_CHECKPOINT = "start with a new checkpointLocation; startingOffset says where"


class CommitLogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """In the driver's planner process, for as long as the query runs; pickled to the workers before it is used."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = parse_options(options, is_stream=True)
        self._task = RowTask(self._options, schema)
        self._disk = disk_for(self._options.config)
        self._log_end: LogEnd | None = None
        #: Where availableNow ends.
        self._until: int | None = None
        #: The furthest that the log is known to reach, from which the next look for its end begins.
        self._known_end: int | None = None

    @property
    def _end(self) -> LogEnd:
        if self._log_end is None:
            self._log_end = LogEnd(self._disk, self._options.config)
        return self._log_end

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Where a new query begins: ``startingOffset``, or later where ``startTime`` allows it."""
        with explained():
            self._end.refresh()
            first = self._first()
            where = self._options.starting_offset
            if where == "latest":
                return self._offset(self._end.from_here(first))
            if isinstance(where, int):
                first = self._first_message(where)
            begin, _ = time_range(self._disk, self._options, self._end)
            return {"offset": max(first, begin or 0)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """``maxBytesPerTrigger``."""
        most = self._options.max_bytes_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxBytes(most)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """The end of the next batch; ``start`` itself when there is nothing new."""
        with explained():
            found = self._batch_end(start, limit)
            self._known_end = max(self._known_end or 0, found["offset"])
            return found

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802 - Spark's name
        """Where the log ends by now: less the end of the last batch, it is how far the query lags behind, in bytes.

        Never before the end of a batch. None only where nothing could be read yet.
        """
        try:
            self._end.refresh()
            known = max(self._known_end or 0, self._first())
            self._known_end = max(known, self._end.from_here(known).offset)
        except (DiskError, CorruptDataError):
            pass  # the query itself will say what is wrong
        return None if self._known_end is None else {"offset": self._known_end}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """The query ends where the log ends now."""
        with explained():
            self._end.refresh()
            self._until = self._end.from_here(self._first()).offset

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The splits of a batch: the same messages each time it is asked for."""
        with explained():
            self._end.refresh()
            self._check_same(start)
            self._check_same(end)
            begin = self._not_expired(start["offset"])
            return [InputPartition(split) for split in self._plan(begin, end["offset"])]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a split."""
        return self._task.read(partition.value)

    def stop(self) -> None:
        """Nothing is kept open."""

    def _batch_end(self, start: Offset, limit: ReadLimit) -> Offset:
        self._end.refresh()
        self._check_same(start)
        begin = self._not_expired(start["offset"])
        end = self._until
        if isinstance(limit, ReadMaxBytes):
            end = begin + limit.max_bytes if end is None else min(end, begin + limit.max_bytes)
        if end is not None and self._until is not None and begin >= self._until:
            return start
        found = self._end.from_here(begin, end)
        if found.offset > begin:
            return self._offset(found)
        if found.corrupt is not None:
            raise CorruptDataError(
                f"the log is corrupt at offset {found.offset}: {found.corrupt.reason}",
                "give the option corrupt=skip to go on at the next frame that proves itself",
            )
        return start if begin == start["offset"] else {"offset": begin}

    def _first(self) -> int:
        return self._end.log.min_offset or 0

    def _first_message(self, where: int) -> int:
        # The first message at or behind ``where``.
        first = self._not_expired(where)
        if first != where:
            return first
        splits = plan_splits(self._disk, self._options.config, begin=where)
        if splits:
            return splits[0].begin
        end = self._end.from_here(self._first()).offset
        if where <= end:
            return end
        raise UsageError(f"startingOffset is {where}, and the log ends at {end}", "give a smaller one, or latest")

    def _plan(self, begin: int, end: int) -> list[Split]:
        if begin >= end:
            return []
        config, size = self._options.config, self._options.split_size
        splits = plan_splits(self._disk, config, size=size, slots=machine_slots(), begin=begin, end=end)
        if not splits or splits[0].begin >= end:
            return [Split(begin, end)]
        # What holds no message is read, too: only the reader knows a blank record from bytes that are no frame.
        if splits[0].begin > begin:
            splits.insert(0, Split(begin, splits[0].begin))
        last = splits[-1]
        splits[-1] = Split(last.begin, min(last.end, end))
        return splits if last.end >= end else [*splits, Split(last.end, end)]

    def _offset(self, end: End) -> Offset:
        crc = None if end.message is None else self._end.evidence(end.message)
        return {"offset": end.offset} if crc is None else {"offset": end.offset, "message": end.message, "crc": crc}

    def _check_same(self, offset: Offset) -> None:
        # Is the log still the one that was read up to here?
        log, where = self._end.log, offset["offset"]
        if log.segments and where > log.segments[-1].end:
            raise DisturbedError(f"the log was cut: it ends at {log.segments[-1].end}, before {where}", _NEW_CHECKPOINT)
        message = offset.get("message")
        if message is None or message < self._first():
            return
        if self._end.evidence(message) != offset.get("crc"):
            raise _changed(where)

    def _not_expired(self, where: int) -> int:
        first = self._first()
        if where >= first:
            return where
        if self._options.on_expired == "fail":
            raise DisturbedError(
                f"the messages from {where} on have expired before they were read: the log begins at {first}",
                "give the option onExpired=skip to go on there, or start with a new checkpointLocation",
            )
        return first


def _changed(where: int) -> DisturbedError:
    return DisturbedError(f"the log was cut or written anew before {where}, up to where it was read", _NEW_CHECKPOINT)
