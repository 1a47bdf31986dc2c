"""Exports messages of the log as Parquet, by Spark's own writer and committer.

Rows come from ``source``, a task a split; ``DataFrame.write`` makes the files and the partitions in a directory beside
the target, ``TARGET.building``, which gets the target's name when all is there: so the target is there whole or not at
all, and what a killed export has left is replaced by the next one. Every file says in the metadata of its first column
what it was exported from: the store and the selection.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
from pyspark.sql import Observation, SparkSession, functions

from indexd.config import Config
from indexd.config.load import check_outside
from indexd.config.units import RemotePath
from indexd.errors import UnsafeStoreError, UsageError
from indexd.recovery.open import check_store
from indexd.spark.source.columns import DEFAULT_COLUMNS, SCHEMA_VERSION, spark_schema
from indexd.spark.source.datasource import begin_of_time, with_known_segment_size
from indexd.spark.source.rows import RowFilter, read_rows
from indexd.spark.splits import LogEnd, Split, plan_splits
from indexd.spark.tasks import ENGINE_ERRORS, Report, is_connect, is_local, run_job, task_frame
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles, building_of
from indexd.storage.remote import disk_for

#: Partition -> the column that it is made of.
PARTITIONS = {"topic": "topic", "day": "storeTimestamp"}
_FACTS = "indexd"
# Directories have one name for the empty topic and for none, Hive's; and no system's names hold a NUL.
_TOPIC = "nullif(nullif(replace(topic, char(0), '\ufffd'), ''), '__HIVE_DEFAULT_PARTITION__')"
# Store times of which the calendar of four digits has a day: 0001-01-01 to 9999-12-31.
_DAY = (
    "case when storeTimestamp between -62135596800000 and 253402300799999 "
    "then cast(date_from_unix_date(cast(floor(storeTimestamp / 86400000) as int)) as string) end"
)


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What is asked for; ``begin`` and ``end`` are the first and the last store time, ms, None for no bound.

    ``mode`` says what to do with a target that holds an export: refuse, or replace it.
    """

    to: Path
    mode: Literal["error", "overwrite"] = "error"
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    topics: frozenset[str] | None = None
    begin: int | None = None
    end: int | None = None
    compression: str = "zstd"
    partition_by: tuple[str, ...] = ()
    max_records_per_file: int = 0

    @property
    def written_columns(self) -> tuple[str, ...]:
        """The columns that the files hold: a topic that names their directory is read from there."""
        return tuple(name for name in self.columns if name not in self.partition_by)

    @property
    def read_columns(self) -> tuple[str, ...]:
        """Also what partitions, their order and the count of topics are made of."""
        more = [PARTITIONS[name] for name in self.partition_by]
        more += ["phyOffset"] * bool(self.partition_by) + ["topic"] * bool(self.topics)
        return tuple(dict.fromkeys((*self.columns, *more)))


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export came to, of the log's bytes ``[begin_offset, end_offset)``.

    ``missing_topics`` were asked for and have no message there. Through Connect the files are not looked at: None.
    """

    rows: int
    begin_offset: int
    end_offset: int
    missing_topics: tuple[str, ...]
    seconds: float
    files: int | None = None
    bytes: int | None = None
    partitions: int | None = None


def check_request(request: ExportRequest) -> None:
    """UsageError for what no log and no target could make right."""
    if request.begin is not None and request.end is not None and request.begin > request.end:
        raise UsageError(
            f"the first store time {request.begin} is behind the last one, {request.end}", "-b comes first"
        )
    for name in request.partition_by:
        if name not in PARTITIONS:
            raise UsageError(f"{name} is no partition", f"there are {', '.join(PARTITIONS)}")
    if len(set(request.partition_by)) < len(request.partition_by):
        raise UsageError("a partition is given twice", "name each once")
    if not request.written_columns:
        raise UsageError("no column is left for the files", "give more --columns, or fewer partitions")
    if isinstance(request.to, RemotePath):
        if "@" in request.to.parts[1] or "?" in request.to.parts[1]:
            raise UsageError(
                f"--to {request.to} holds options", "give them to Hadoop: --conf spark.hadoop.fs.s3a.endpoint=..."
            )
    elif Disk().exists(request.to) and not request.to.is_dir():
        raise UsageError(f"--to {request.to} is a file", "name a directory that is empty or not there")


def export(spark: SparkSession, config: Config, request: ExportRequest, progress: Report | None = None) -> Exported:
    """Export on whatever ``spark`` runs on; ``progress`` is told bytes of log.

    Raises UsageError for what cannot be asked for, BusyError where another export writes the same directory, and what
    reading the log and the job raise; then the target is as it was.
    """
    started = time.monotonic()
    check_store(config)
    check_outside(config, request.to, "--to")
    check_request(request)
    config = with_known_segment_size(config)
    disk = disk_for(config)
    with ExitStack() as stack:
        target, place = None, request.to.resolve()
        if not isinstance(place, RemotePath):  # an object store knows no locks
            path = place.with_name(f"{place.name}.lock")
            Disk().make_dir(path.parent)
            lock = DirectoryLock(path)
            lock.acquire()
            stack.callback(lock.release)
            stack.callback(path.unlink, missing_ok=True)
        if not is_connect(spark):
            target = _Target(spark, request)
            stack.callback(target.close)
        elif request.mode != "error":
            raise UsageError(
                f"--mode {request.mode} has to look at {request.to}, which Spark Connect does not let it",
                "run it with --master, or export into a new directory",
            )
        log_end, begin = LogEnd(disk, config), None
        # A data directory says where a time begins; one in which nothing was built yet is no reason to stop.
        if request.begin is not None and Disk().exists(DataFiles(config.store.data).frontier):
            begin = begin_of_time(config, request.begin)
        planned = plan_splits(disk, config, size=config.spark.split_size or None, begin=begin)
        end = log_end.behind(planned)
        splits = end.cut_off(planned)
        to = target.building if target is not None else hadoop_uri(request.to)
        rows, missing = _write(spark, config, request, to, splits, progress)
        if request.topics and not rows:
            raise UsageError(
                f"no message of {', '.join(missing)} is in the log, or none in that time",
                "look at the topics with indexd stats; nothing was written",
            )
        figures = {} if target is None else target.finish(rows)
    return Exported(rows, log_end.first, end.offset, tuple(missing), time.monotonic() - started, **figures)


def _write(
    spark: SparkSession,
    config: Config,
    request: ExportRequest,
    to: str,
    splits: list[Split],
    progress: Report | None,
) -> tuple[int, list[str]]:
    """Run the job; its rows, and the topics without any."""
    topics, columns, by = sorted(request.topics or ()), request.written_columns, request.partition_by
    last = None if request.end is None else request.end + 1
    work = partial(read_rows, config, request.read_columns, RowFilter(request.topics, request.begin, last))
    frame = task_frame(spark, work, splits, spark_schema(request.read_columns))
    seen = Observation()
    counts = [functions.count_if(functions.col("topic") == topic).alias(str(at)) for at, topic in enumerate(topics)]
    frame = frame.observe(seen, functions.count(functions.lit(1)).alias("rows"), *counts)
    if "topic" in by:
        frame = frame.withColumn("topic", functions.expr(_TOPIC))
    if "day" in by:
        frame = frame.withColumn("day", functions.expr(_DAY))
    if by:
        frame = frame.sortWithinPartitions(*by, "phyOffset")
    facts = {
        "version": SCHEMA_VERSION,
        "columns": list(request.columns),
        "partitionBy": list(by),
        "store": ",".join(str(path.resolve()) for path in config.store.commit_log_directories),
        "topics": None if request.topics is None else topics,
        "begin": request.begin,
        "end": request.end,
    }
    frame = frame.select(*columns, *by).withMetadata(columns[0], {_FACTS: json.dumps(facts)})
    writer = frame.write.mode("error" if is_connect(spark) else "overwrite").partitionBy(*by)
    writer = writer.option("compression", request.compression).option("maxRecordsPerFile", request.max_records_per_file)
    run_job(spark, lambda: writer.parquet(to), sizes=[split.size for split in splits], progress=progress)
    found = seen.get
    return int(found["rows"]), [topic for at, topic in enumerate(topics) if not found[str(at)]]


def hadoop_uri(to: Path) -> str:
    """The place as Hadoop's file systems name it, which take no percent escapes."""
    if not isinstance(to, RemotePath) or to.scheme == "file":
        return f"file:{to.resolve()}"
    return f"{'s3a' if to.scheme == 's3' else to.scheme}://{to.parts[1]}/{'/'.join(to.names)}"


class _Target:
    """The directory that is exported to, seen through Spark's own file system; raises what py4j does.

    UsageError where there is an export and the mode allows none, and for files that no export wrote.
    """

    def __init__(self, spark: SparkSession, request: ExportRequest) -> None:
        self._spark, self._to, self._is_whole = spark, request.to, False
        uri = hadoop_uri(request.to).rstrip("/")
        self.building = f"{uri}.building"
        jvm: Any = spark._jvm
        make = jvm.org.apache.hadoop.fs.Path
        self._place, self._beside = make(uri), make(self.building)
        self._fs = self._place.getFileSystem(spark._jsc.hadoopConfiguration())
        names: list[str] = []
        if self._fs.exists(self._place):
            names = sorted(one.getPath().getName() for one in self._fs.listStatus(self._place))
        foreign = [name for name in names if not re.match(r"\.?(_SUCCESS|part-)|(topic|day)=", name)]
        if names and not foreign:
            fields = spark.read.parquet(re.sub(r"([\[\]{}*?\\])", r"\\\1", uri)).schema.fields
            foreign = [] if any(_FACTS in one.metadata for one in fields) else names
        if foreign:
            raise UsageError(
                f"{self._to} holds {foreign[-1]}, which no export has written", "give an empty directory, or a new one"
            )
        if names and request.mode == "error":
            raise UsageError(f"{self._to} holds an export", "give --mode overwrite, or another --to")

    def finish(self, rows: int) -> dict[str, int]:
        """All is written: give it the target's name, in place of what is there, and count it."""
        files, root = [], self._fs.makeQualified(self._beside).toString()
        listed = self._fs.listFiles(self._beside, True)
        while listed.hasNext():
            status = listed.next()
            name = status.getPath().toString().removeprefix(root).lstrip("/")
            if name.endswith(".parquet"):
                files.append((name, int(status.getLen())))
        to = building_of(self._to.resolve())
        if not is_local(self._spark) and not isinstance(self._to, RemotePath):
            # What executors wrote to a disk of their own, Spark's committer does not miss.
            held = sum(pq.read_metadata(to / name).num_rows for name, _ in files)
            if held != rows:
                raise UnsafeStoreError(
                    f"{to} holds {held} of the {rows} messages that executors wrote",
                    "give a --to on a file system that the driver and all executors share",
                )
        self._is_whole = True
        self._fs.delete(self._place, True)
        if not self._fs.rename(self._beside, self._place):
            raise UnsafeStoreError(f"{self.building} could not be renamed to {self._to}", "rename it, it is whole")
        folders = {name.rpartition("/")[0] for name, _ in files}
        return {"files": len(files), "bytes": sum(size for _, size in files), "partitions": len(folders)}

    def close(self) -> None:
        """Remove what an export that failed has made; what cannot be removed the next one replaces."""
        if self._is_whole:
            return
        with suppress(*ENGINE_ERRORS):
            self._fs.delete(self._beside, True)
