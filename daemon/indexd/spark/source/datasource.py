"""The data source ``rocketmq_commitlog``: a broker's log as a DataFrame, in batches and as a stream.

``spark.read.format("rocketmq_commitlog").load(STORE)``; ``columns`` has the schema, ``options`` what else may be said.
Spark finds it by its name without any code (``pyspark_rocketmq_commitlog``), wherever indexd is installed with pyspark.

A DataFrame is a snapshot: it ends where the log ended when it was planned, however often it is evaluated. A log that
was cut, written anew or has expired since is an error, and never other rows.

What is filtered is pruned by options alone. A reader that takes filters from Spark (``pushFilters``) gives wrong rows
in 4.3.0: what was pushed for one query is used for the next on the same DataFrame (spec spark 0).

A streaming query goes in micro-batches from one message's end to another's. Its offsets are ``splits``' positions,
which Spark keeps in the checkpoint. A log that was cut or written anew always ends the query (DisturbedError): rows
that were delivered are no longer in it, and only a new checkpoint says which ones a query begins with. Of one whose
begin has expired before it was read, the option ``onExpired`` says whether it ends, too, or goes on at the first
message that is there.

Options are named in any case, with or without ``_``. The source's own:

==================== ==============================================================================================
path                 the broker's storePathRootDir; what ``load(...)`` is given
columns              names between commas, ``*`` for all; default: all but ``body``
topics               names between commas: messages of these alone
startOffset          physical offset: messages that begin there or behind it
endOffset            physical offset: messages that begin before it
startTime            ms since the epoch: messages stored then or later
endTime              ms since the epoch: messages stored before it
splitSize            log of one task, default: a segment, or less when that makes too few tasks; bytes, or ``64MiB``
corrupt              ``fail`` (default) or ``skip``: unreadable bytes behind which the log goes on
config               a configuration file of indexd (TOML)
startingOffset       of a stream: ``earliest`` (default), ``latest``, or a physical offset
maxBytesPerTrigger   of a stream: log of one batch, at most; a single longer message is a batch of its own
onExpired            of a stream: ``fail`` (default) or ``skip``: segments that expired before they were read
==================== ==============================================================================================

Every key of indexd's configuration is one too: ``segmentSize`` (taken from the files where nobody gives it), ``data``
(a data directory of indexd: its sparse indexes say for sure where ``startTime`` begins), ``brokerConf``, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import pyarrow as pa
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from pydantic.alias_generators import to_camel
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from indexd.config import KEYS, Config, load, parse_size
from indexd.config.units import nearest, wrong_fields
from indexd.errors import CorruptDataError, DiskError, DisturbedError, MissingOk, UsageError
from indexd.query.by_queue_and_time import scan_start
from indexd.query.source import open_index
from indexd.spark.source.columns import DEFAULT_COLUMNS, parse_columns, spark_schema
from indexd.spark.source.rows import RowFilter, read_rows
from indexd.spark.splits import LogEnd, Position, plan_splits
from indexd.spark.tasks import quiet_gc
from indexd.storage.names import segment_base
from indexd.storage.remote import disk_for

FORMAT = "rocketmq_commitlog"


def _topics(text: str) -> frozenset[str]:
    return frozenset(word.strip() for word in text.split(","))


def _word(text: str) -> str:
    return text.strip().lower()


_Policy = Annotated[Literal["fail", "skip"], BeforeValidator(_word)]
_Offset = Annotated[int, Field(ge=0, lt=1 << 63)]
_Time = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
_Size = Annotated[int, BeforeValidator(parse_size), Field(ge=1)]


class SourceOptions(BaseModel):
    """The source's own options; offsets in bytes, times in ms, None where nothing was said. ``config``: all others."""

    model_config = ConfigDict(alias_generator=to_camel)

    path: str | None = None
    columns: Annotated[tuple[str, ...], BeforeValidator(parse_columns)] = DEFAULT_COLUMNS
    topics: Annotated[frozenset[str] | None, BeforeValidator(_topics)] = None
    start_offset: _Offset | None = None
    end_offset: _Offset | None = None
    start_time: _Time | None = None
    end_time: _Time | None = None
    split_size: _Size | None = None
    corrupt: _Policy | None = None
    config_file: Path | None = Field(None, alias="config")
    starting_offset: Annotated[Literal["earliest", "latest"] | _Offset, BeforeValidator(_word)] = "earliest"
    max_bytes_per_trigger: _Size | None = None
    on_expired: _Policy = "fail"
    _config: Config = PrivateAttr()

    @property
    def config(self) -> Config:
        """The configuration, with what the options say of it."""
        return self._config

    def time_begin(self) -> int | None:
        """Where ``start_time`` begins, as far as a data directory that somebody named says so."""
        if self.start_time is None or self.config.provenance.get("data", "default").startswith("default"):
            return None
        return begin_of_time(self.config, self.start_time)


_BATCH_ONLY = ("startOffset", "endOffset")
_STREAM_ONLY = ("startingOffset", "maxBytesPerTrigger", "onExpired")
_OWN = [field.alias or "" for field in SourceOptions.model_fields.values()]
_NAMES = {name.lower(): name for name in _OWN}
_KEYS = {key.replace("_", ""): key for key in KEYS}


def parse_options(options: Mapping[str, str], *, is_stream: bool) -> SourceOptions:
    """Raises UsageError for what is wrong or unknown, and what reading a configuration does."""
    texts, keys = sorted_out(options)
    for name in _BATCH_ONLY if is_stream else _STREAM_ONLY:
        if name in texts:
            hint = "use startingOffset, startTime and endTime" if is_stream else "use startOffset and endOffset"
            raise UsageError(f"{name} is no option of a {'stream' if is_stream else 'batch'}", hint)
    try:
        own = SourceOptions.model_validate(texts)
    except ValidationError as error:
        raise UsageError(wrong_fields(error)[0]) from None
    if own.corrupt is not None:
        keys["on_corrupt"] = "skip" if own.corrupt == "skip" else "stop"
    if own.path is not None:
        keys["store"] = own.path
    own._config = with_known_segment_size(load(keys, own.config_file, {}))
    if not own.config.store.commit_log_directories:
        raise UsageError("no store is given", "give load() the broker's storePathRootDir, or the option commitLogPaths")
    own.split_size = own.split_size or own.config.spark.split_size or None
    return own


def with_known_segment_size(config: Config) -> Config:
    """The configuration with the size that the log's files have, where nobody gave another."""
    if config.is_given("segment_size"):
        return config
    disk = disk_for(config)
    for directory in config.store.commit_log_directories:
        with MissingOk():
            for name, size in disk.list_dir(directory):
                if segment_base(name) is not None and size > 0:
                    store = config.store.model_copy(update={"segment_size": size})
                    return config.model_copy(update={"store": store})
    return config


def begin_of_time(config: Config, start_time: int) -> int | None:
    """The physical offset before which every message is older, by the sparse indexes of the data directory.

    A message begins there, or a segment; None where they do not tell. Raises what opening a data directory does.
    """
    with closing(open_index(disk_for(config), config)) as index:
        look = index.look()
        coverage = look.queue_coverage
        if coverage.starts_late or look.frontier.sparse is None:
            return None
        begin = max(coverage.begin, coverage.log_begin or 0)
        found = scan_start(index, look, start_time, begin)
        # What was left out when it was built may be read now.
        return min([found, *(gap.begin for gap in coverage.uncovered if gap.end > begin)])


def sorted_out(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str | None]]:
    """The source's own options, and keys of the configuration; UsageError for what is neither."""
    own: dict[str, str] = {}
    keys: dict[str, str | None] = {}
    for option, text in options.items():
        name = option.lower().replace("_", "")
        if name in _NAMES:
            own[_NAMES[name]] = text
        elif name in _KEYS:
            keys[_KEYS[name]] = text
        elif name == "paths":
            # What Spark makes of load([a, b]).
            raise UsageError(
                f"one store is loaded at a time, not {text[:256]}",
                "load each and union them; the directories of one store's log are the option commitLogPaths",
            )
        else:
            otherwise = f"there are {', '.join(_OWN)}, and every key of indexd's configuration"
            hint = nearest(option, (*_OWN, *KEYS), otherwise)
            raise UsageError(f"there is no option {option[:64]!r} of {FORMAT}", hint)
    return own, keys


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

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._options = parse_options(options, is_stream=isinstance(self, DataSourceStreamReader))
        self._columns = parse_columns(",".join(schema.names))
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """In a worker: all rows of a split, in the schema that was asked for, or an error.

        Of no split at all where Spark makes a partition of an empty list.
        """
        if partition.value is None:
            return
        options, wanted = self._options, to_arrow_schema(self._schema, timezone="UTC")
        keep = RowFilter(options.topics, options.start_time, options.end_time)
        for batch in read_rows(options.config, self._columns, keep, partition.value):
            cast = [column.cast(field.type) for column, field in zip(batch.columns, wanted, strict=True)]
            yield pa.RecordBatch.from_arrays(cast, schema=wanted)
            quiet_gc()  # behind the first batch: by now the kernels are loaded, too


class CommitLogReader(_Rows, DataSourceReader):
    """For one DataFrame."""

    def partitions(self) -> Sequence[InputPartition]:
        """One a split, planned by the driver; the last one ends where the log does now."""
        options, disk = self._options, disk_for(self._options.config)
        begin = max(options.start_offset or 0, options.time_begin() or 0)
        splits = plan_splits(disk, options.config, size=options.split_size, begin=begin, end=options.end_offset)
        end = LogEnd(disk, options.config).behind(splits)
        return [InputPartition(split) for split in end.cut_off(splits)]


class CommitLogStreamReader(_Rows, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """In the driver's planner process, for as long as the query runs; pickled to the workers before it is used."""

    #: Where availableNow ends.
    _until: int | None = None

    def initialOffset(self) -> Position:  # noqa: N802 - Spark's name
        """Where a new query begins: ``startingOffset``, or later where ``startTime`` allows it."""
        log_end, where = self._log_end(), self._options.starting_offset
        if where == "latest":
            return log_end.position(log_end.now())
        first = self._first_message(log_end, where) if isinstance(where, int) else log_end.first
        return {"offset": max(first, self._options.time_begin() or 0)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """``maxBytesPerTrigger``."""
        most = self._options.max_bytes_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxBytes(most)

    def latestOffset(self, start: Position, limit: ReadLimit) -> Position:  # noqa: N802 - Spark's name
        """The end of the next batch; ``start`` itself when there is nothing new."""
        log_end = self._log_end(start)
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
            return {"offset": self._log_end().now().offset}
        except (DiskError, CorruptDataError):
            return None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """The query ends where the log ends now."""
        self._until = self._log_end().now().offset

    def partitions(self, start: Position, end: Position) -> Sequence[InputPartition]:
        """The splits of a batch: the same messages each time it is asked for."""
        log_end = self._log_end(start, end)
        begin = self._not_expired(log_end, start["offset"])
        return [InputPartition(split) for split in log_end.plan(begin, end["offset"], self._options.split_size)]

    def _log_end(self, *known: Position) -> LogEnd:
        # As the log is now; DisturbedError if it is no longer the one that was read up to these positions.
        log_end = LogEnd(disk_for(self._options.config), self._options.config)
        for position in known:
            log_end.check_same(position)
        return log_end

    def _first_message(self, log_end: LogEnd, where: int) -> int:
        # The first message at or behind ``where``.
        first = self._not_expired(log_end, where)
        splits = plan_splits(disk_for(self._options.config), self._options.config, begin=first)
        if splits:
            return splits[0].begin
        end = log_end.now().offset
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
