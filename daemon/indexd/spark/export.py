"""Exports messages of the log as Parquet, by Spark's own writer and committer.

Rows come from ``source``, a task a split; ``DataFrame.write`` makes the files, the partitions and the commit. Every
file says in the metadata of its first column what it was exported from: the store, the selection, and how far the log
was read (``LogEnd.position``). ``append`` reads it back and goes on there, if the log is still the same.

Spark moves the files of a job to their place when all tasks have ended. An export that was killed before or while it
did has left ``_temporary``, whose files carry the job's id in their names, as those that were moved do: the next export
removes both. ``_SUCCESS`` is written last.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow.parquet as pq

from indexd.config import Config
from indexd.config.load import check_outside
from indexd.config.units import RemotePath
from indexd.errors import CorruptDataError, DisturbedError, UnsafeStoreError, UsageError
from indexd.recovery.open import check_store
from indexd.spark.source.columns import DEFAULT_COLUMNS, SCHEMA_VERSION, spark_schema
from indexd.spark.source.log_end import LogEnd
from indexd.spark.source.options import Policy, begin_of_time, with_known_segment_size
from indexd.spark.source.rows import Keep, RowReader, check_end
from indexd.spark.splits import Split
from indexd.spark.tasks import ENGINE_ERRORS, Report, is_connect, is_local, run_job, task_frame
from indexd.storage.disk import Disk
from indexd.storage.lock import DirectoryLock
from indexd.storage.names import DataFiles
from indexd.storage.remote import disk_for

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

Mode = Literal["error", "overwrite", "append"]
#: Partition -> the column that it is made of.
PARTITIONS = {"topic": "topic", "day": "storeTimestamp"}
_FACTS = "indexd"
_TEMPORARY = "_temporary"
_PART = re.compile(r"part-\d+-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})[.-]c\d+\.(?:\w+\.)?parquet")
_GLOB = re.compile(r"([\[\]{}*?\\])")
_INT64_MAX = 2**63 - 1
# Store times of which the calendar of four digits has a day: 0001-01-01 to 9999-12-31.
# Directories have one name for the empty topic and for none, Hive's; and no system's names hold a NUL.
_TOPIC = "nullif(nullif(replace(topic, char(0), '\ufffd'), ''), '__HIVE_DEFAULT_PARTITION__')"
_DAY = (
    "case when storeTimestamp between -62135596800000 and 253402300799999 "
    "then cast(date_from_unix_date(cast(floor(storeTimestamp / 86400000) as int)) as string) end"
)


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What is asked for; ``begin`` and ``end`` are the first and the last store time, ms, None for no bound.

    ``mode`` says what to do with a target that holds an export: refuse, replace it, add to it; ``on_expired``, whether
    to add when messages behind it have expired. ``split_size``: bytes of log a task reads, about; None: a segment.
    """

    to: Path
    mode: Mode = "error"
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    topics: frozenset[str] | None = None
    begin: int | None = None
    end: int | None = None
    compression: str = "zstd"
    partition_by: tuple[str, ...] = ()
    max_records_per_file: int = 0
    split_size: int | None = None
    on_expired: Policy = "fail"

    @property
    def keep(self) -> Keep:
        """The same for the reader, whose end is the first time that is not taken."""
        end = None if self.end is None or self.end >= _INT64_MAX else self.end + 1
        return Keep(self.topics, self.begin, end)

    @property
    def written_columns(self) -> tuple[str, ...]:
        """The columns that the files hold: a topic that names their directory is read from there."""
        return tuple(name for name in self.columns if name not in self.partition_by)


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export came to: rows and files of this export alone, and the log's bytes ``[begin_offset, end_offset)``.

    ``missing_topics`` were asked for and have no message there. ``expired`` are the log's bytes ``[first, end)`` that
    had expired before any export into this target read them. Through Connect the files are not looked at: None.
    """

    job: str | None
    rows: int
    files: int | None
    bytes: int | None
    partitions: int | None
    begin_offset: int
    end_offset: int
    missing_topics: tuple[str, ...]
    expired: tuple[int, int] | None
    seconds: float


def check_request(request: ExportRequest) -> None:
    """UsageError for what no log and no target could make right."""
    to = request.to
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
    if isinstance(to, RemotePath):
        if "@" in to.parts[1] or "?" in to.parts[1]:
            raise UsageError(f"--to {to} holds options", "give them to Hadoop: --conf spark.hadoop.fs.s3a.endpoint=...")
    elif Disk().exists(to) and not to.is_dir():
        raise UsageError(f"--to {to} is a file", "name a directory that is empty or not there")


def export(spark: SparkSession, config: Config, request: ExportRequest, progress: Report | None = None) -> Exported:
    """Export on whatever ``spark`` runs on; ``progress`` is told bytes of log.

    Raises UsageError for what cannot be asked for, UnsafeStoreError where ``append`` cannot go on, BusyError where
    another export writes the same directory, and what reading the log and the job raise; then nothing was added.
    """
    started = time.monotonic()
    check_store(config)
    check_outside(config, request.to, "--to")
    check_request(request)
    config = with_known_segment_size(config)
    with _opened(spark, request) as target:
        earlier = target.facts() if target is not None else None
        if target is not None:
            target.begin()
        log_end = LogEnd(disk_for(config), config)
        log_end.refresh()
        facts = _facts(config, request)
        begin, expired = _begin(log_end, request, facts, earlier)
        end = log_end.from_here(log_end.first)
        if end.corrupt is not None:
            raise CorruptDataError(
                f"the log is corrupt at offset {end.offset}: {end.corrupt.reason}", "give --on-corrupt skip to go on"
            )
        facts["log"] = log_end.position(end)
        if end.message is None and earlier is not None:
            facts["log"] = {**earlier["log"], "offset": end.offset}
        splits = log_end.plan(max(begin, _time_begin(config, request) or 0), end.offset, request.split_size)
        rows, missing = 0, sorted(request.topics or ())
        if splits or earlier is None:
            frame = task_frame(spark, _rows_of(config, request), splits, spark_schema(_read_columns(request)))
            rows, missing = _write(spark, request, frame, facts, [split.size for split in splits], progress)
        if request.topics and not rows and request.mode != "append":
            raise UsageError(
                f"no message of {', '.join(missing)} is in the log, or none in that time",
                "look at the topics with indexd stats; nothing was written",
            )
        found = Exported(None, rows, None, None, None, begin, end.offset, tuple(missing), expired, 0.0)
        if target is not None:
            found = target.finish(found)
    return replace(found, seconds=time.monotonic() - started)


def _facts(config: Config, request: ExportRequest) -> dict[str, Any]:
    # What an export that is added to has to have in common with the one that adds.
    return {
        "version": SCHEMA_VERSION,
        "columns": list(request.columns),
        "partitionBy": list(request.partition_by),
        "store": ",".join(str(path.resolve()) for path in config.store.commit_log_directories),
        "topics": None if request.topics is None else sorted(request.topics),
        "begin": request.begin,
        "end": request.end,
    }


def _begin(
    log_end: LogEnd, request: ExportRequest, facts: dict[str, Any], earlier: dict[str, Any] | None
) -> tuple[int, tuple[int, int] | None]:
    """Where to go on, and the log bytes that have expired before; behind ``earlier`` for one that appends."""
    if earlier is None or request.mode != "append":
        return log_end.first, None
    other = [name for name, value in facts.items() if earlier.get(name) != value]
    if other:
        raise UsageError(
            f"{request.to} holds an export with another {' and '.join(other)}",
            "append with the same --store, --columns, --partition-by, --topics, -b and -e, or to another directory",
        )
    offset, first = earlier["log"]["offset"], log_end.first
    if first > offset:
        if request.on_expired == "fail":
            raise UnsafeStoreError(
                f"the log begins at {first}, and {request.to} holds what it had up to {offset}: {first - offset} bytes"
                " between them have expired before they were exported",
                "give --on-expired skip to go on without them, or export anew with --mode overwrite",
            )
        return first, (offset, first)
    try:
        log_end.check_same(earlier["log"])
    except DisturbedError as error:
        raise UnsafeStoreError(
            f"{request.to}: {error}", "export anew with --mode overwrite, or into another directory"
        ) from None
    return offset, None


def _time_begin(config: Config, request: ExportRequest) -> int | None:
    # A data directory says where a time begins; one in which nothing was built yet is no reason to stop.
    if request.begin is None or not Disk().exists(DataFiles(config.store.data).frontier):
        return None
    return begin_of_time(disk_for(config), config, request.begin)


def _read_columns(request: ExportRequest) -> tuple[str, ...]:
    # Also what partitions, their order and the count of topics are made of.
    more = [PARTITIONS[name] for name in request.partition_by]
    more += ["phyOffset"] * bool(request.partition_by) + ["topic"] * bool(request.topics)
    return tuple(dict.fromkeys((*request.columns, *more)))


def _rows_of(config: Config, request: ExportRequest) -> Callable[[Split], Iterator[pa.RecordBatch]]:
    return partial(_read_split, config, _read_columns(request), request.keep)


def _read_split(config: Config, columns: tuple[str, ...], keep: Keep, split: Split) -> Iterator[pa.RecordBatch]:
    reader = RowReader(disk_for(config), config, split, columns, keep)
    yield from reader
    check_end(split, reader.split_reader.next_offset)


def _write(
    spark: SparkSession,
    request: ExportRequest,
    frame: DataFrame,
    facts: dict[str, Any],
    sizes: list[int],
    progress: Report | None,
) -> tuple[int, list[str]]:
    """Run the job; its rows, and the topics without any."""
    from pyspark.sql import Observation, functions  # noqa: PLC0415 - where there is a session, it is there

    topics, columns, by = sorted(request.topics or ()), request.written_columns, request.partition_by
    seen = Observation()
    counts = [functions.count_if(functions.col("topic") == topic).alias(str(at)) for at, topic in enumerate(topics)]
    frame = frame.observe(seen, functions.count(functions.lit(1)).alias("rows"), *counts)
    if "topic" in by:
        frame = frame.withColumn("topic", functions.expr(_TOPIC))
    if "day" in by:
        frame = frame.withColumn("day", functions.expr(_DAY))
    if by:
        frame = frame.sortWithinPartitions(*by, "phyOffset")
    frame = frame.select(*columns, *by).withMetadata(columns[0], {_FACTS: json.dumps(facts)})
    writer = frame.write.mode("error" if is_connect(spark) else "append")
    writer = writer.option("compression", request.compression).option("maxRecordsPerFile", request.max_records_per_file)
    if not is_connect(spark):
        writer = writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")  # Target.finish does
    run_job(spark, lambda: writer.partitionBy(*by).parquet(hadoop_uri(request.to)), sizes=sizes, progress=progress)
    found = seen.get
    return int(found["rows"]), [topic for at, topic in enumerate(topics) if not found[str(at)]]


def hadoop_uri(to: Path) -> str:
    """The place as Hadoop's file systems name it, which take no percent escapes."""
    if not isinstance(to, RemotePath) or to.scheme == "file":
        return f"file:{to.resolve()}"
    return f"{'s3a' if to.scheme == 's3' else to.scheme}://{to.parts[1]}/{'/'.join(to.names)}"


class _File(NamedTuple):
    name: str
    job: str
    size: int
    modified: int


@contextmanager
def _opened(spark: SparkSession, request: ExportRequest) -> Iterator[_Target | None]:
    """The target, which no other export of this machine has open; None through Connect, which shows no files."""
    if is_connect(spark):
        if request.mode != "error":
            raise UsageError(
                f"--mode {request.mode} has to look at {request.to}, which Spark Connect does not let it",
                "run it with --master, or export into a new directory",
            )
        yield None
        return
    with _locked(request.to.resolve()):
        target = _Target(spark, request)
        try:
            yield target
        except BaseException:
            with suppress(*ENGINE_ERRORS):
                target.undo()
            raise


@contextmanager
def _locked(to: Path) -> Iterator[None]:
    if isinstance(to, RemotePath):
        yield
        return
    Disk().make_dir(to)
    lock = DirectoryLock(to / "_lock")
    lock.acquire()
    try:
        yield
    finally:
        if [path.name for path in to.iterdir()] == ["_lock"]:
            with suppress(OSError):
                (to / "_lock").unlink()
                to.rmdir()
        lock.release()


class _Target:
    """The directory that is exported to, seen through Spark's own file system; raises what py4j does.

    What an export that was killed has left is removed before anything else. UsageError for files that no export wrote,
    and for an export where the mode allows none.
    """

    def __init__(self, spark: SparkSession, request: ExportRequest) -> None:
        self._spark = spark
        self._request = request
        self._uri = hadoop_uri(request.to)
        root = self._path("")
        self._fs = root.getFileSystem(spark._jsc.hadoopConfiguration())
        self._root = self._fs.makeQualified(root).toString().rstrip("/")
        self._before = self._recover()
        self._was_whole = bool(self._fs.exists(self._path("_SUCCESS")))
        if not self._before:
            return
        if request.mode == "error":
            raise UsageError(f"{request.to} holds an export", "give --mode append or --mode overwrite, or another --to")
        if request.mode == "append" and not self._was_whole:
            raise UnsafeStoreError(
                f"{request.to} has no _SUCCESS: an export into it was killed at its end", "give --mode overwrite"
            )

    def facts(self) -> dict[str, Any] | None:
        """What the newest file was exported from; None without files. UsageError for files that do not say it."""
        if not self._before:
            return None
        newest = max(self._before, key=lambda file: file.modified)
        path = _GLOB.sub(r"\\\1", f"{self._root}/{newest.name}")
        found = self._spark.read.parquet(path).schema.fields[0].metadata.get(_FACTS)
        if found is None:
            raise self._foreign(newest.name)
        facts: dict[str, Any] = json.loads(found)
        return facts

    def begin(self) -> None:
        """From here on nothing counts until ``finish``, of an export that is replaced neither."""
        if self._request.mode == "overwrite":
            self._fs.delete(self._path("_SUCCESS"), False)

    def finish(self, found: Exported) -> Exported:
        """The job is committed: remove what it replaces, write _SUCCESS, and say what it has made."""
        new = self._new_files()
        self._check_seen(found.rows, new)
        if self._request.mode == "overwrite":
            self._remove(self._before)
        self._succeed()
        return replace(
            found,
            job=new[0].job if new else None,
            files=len(new),
            bytes=sum(file.size for file in new),
            partitions=len({file.name.rpartition("/")[0] for file in new}),
        )

    def undo(self) -> None:
        """Remove what the job has made; what was there before counts again."""
        self._remove(self._new_files())
        if self._was_whole:
            self._succeed()

    def _check_seen(self, rows: int, new: list[_File]) -> None:
        # What executors wrote to a disk of their own, Spark's committer does not miss.
        to = self._request.to.resolve()
        if is_local(self._spark) or isinstance(to, RemotePath):
            return
        held = sum(pq.read_metadata(to / file.name).num_rows for file in new)
        if held != rows:
            raise UnsafeStoreError(
                f"{to} holds {held} of the {rows} messages that executors wrote",
                "give a --to on a file system that the driver and all executors share",
            )

    def _succeed(self) -> None:
        self._fs.create(self._path("_SUCCESS"), True).close()

    def _new_files(self) -> list[_File]:
        known = {file.job for file in self._before}
        return [file for file in self._files() if file.job not in known]

    def _recover(self) -> list[_File]:
        files = self._files(with_temporary=True)
        killed = {file.job for file in files if file.name.startswith(_TEMPORARY)}
        self._remove([file for file in files if file.job in killed])
        self._fs.delete(self._path(_TEMPORARY), True)
        return [file for file in files if file.job not in killed]

    def _files(self, *, with_temporary: bool = False) -> list[_File]:
        found: list[_File] = []
        if not self._fs.exists(self._path("")):
            return found
        listed = self._fs.listFiles(self._path(""), True)
        while listed.hasNext():
            status = listed.next()
            name = status.getPath().toString()[len(self._root) + 1 :]
            part = _PART.fullmatch(name.rpartition("/")[2])
            if name.startswith(_TEMPORARY):
                if not with_temporary or part is None:
                    continue
            elif name.startswith(("_", ".")):
                continue
            if part is None:
                raise self._foreign(name)
            found.append(_File(name, part[1], int(status.getLen()), int(status.getModificationTime())))
        return found

    def _foreign(self, name: str) -> UsageError:
        return UsageError(
            f"{self._request.to} holds {name}, which no export has written", "give an empty directory, or a new one"
        )

    def _remove(self, files: list[_File]) -> None:
        for file in files:
            self._fs.delete(self._path(file.name), False)

    def _path(self, name: str) -> Any:
        uri = f"{self._uri}/{name}" if name else self._uri
        jvm: Any = self._spark._jvm
        return jvm.org.apache.hadoop.fs.Path(uri)
