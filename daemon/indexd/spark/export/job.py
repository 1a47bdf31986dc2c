"""Export: messages of the log as Parquet, a task a split, visible all at once (``target``).

The files have the columns of ``columns.SCHEMA`` under the same names and types, rows in the log's order; their
key-value metadata says ``indexd.schema.version``. Times are int64, ms since the epoch, as the log has them. With
partitions the topic is in the directory's name and not in the files; ``day`` is the UTC day of storeTimestamp and is
only there. Nothing is exported twice by trying again: an export that ended badly has left nothing, and ``append``
goes on where the last export of the same store ended, if the log is still the same (``append``).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from indexd.config import Config
from indexd.config.load import check_outside
from indexd.config.units import RemotePath
from indexd.errors import UsageError
from indexd.recovery.open import check_store
from indexd.spark.export.append import Continuation, OnExpired, continued
from indexd.spark.export.export_task import ExportTask, SplitExported, export_nothing, export_split, written_columns
from indexd.spark.export.parquet import FILE_SIZE_MIN, Shape
from indexd.spark.export.partitions import SOURCES
from indexd.spark.export.target import Export, Manifest, Target
from indexd.spark.source.batch import plan
from indexd.spark.source.columns import DEFAULT_COLUMNS, SCHEMA_VERSION
from indexd.spark.source.options import SourceOptions, with_known_segment_size
from indexd.spark.source.rows import Keep, check_end
from indexd.spark.splits import Split, check_chain
from indexd.spark.tasks import Report, run_tasks
from indexd.storage.disk import Disk
from indexd.storage.names import DataFiles
from indexd.storage.remote import disk_for

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Mode = Literal["error", "overwrite", "append"]
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """What is asked for; ``begin`` and ``end`` are the first and the last store time, ms, None for no bound.

    ``mode`` says what to do with a target that holds an export: refuse, replace it, add to it; ``on_expired``, whether
    to add when messages behind it have expired. ``split_size`` is how many bytes of log a task reads, about; None: a
    segment.
    """

    to: Path
    mode: Mode = "error"
    columns: tuple[str, ...] = DEFAULT_COLUMNS
    topics: frozenset[str] | None = None
    begin: int | None = None
    end: int | None = None
    shape: Shape = field(default_factory=Shape)
    split_size: int | None = None
    on_expired: OnExpired = "fail"

    @property
    def selection(self) -> dict[str, Any]:
        """Which messages, as the manifest keeps it."""
        topics = None if self.topics is None else sorted(self.topics)
        return {"topics": topics, "begin": self.begin, "end": self.end}

    @property
    def keep(self) -> Keep:
        """The same for the reader, whose end is the first time that is not taken."""
        end = None if self.end is None or self.end >= _INT64_MAX else self.end + 1
        return Keep(self.topics, self.begin, end)

    def source_options(self, config: Config, begin: int | None) -> SourceOptions:
        """The part of the log that has to be read from physical offset ``begin`` on, as the data source is asked."""
        return SourceOptions(
            config=config,
            columns=self.columns,
            topics=self.topics,
            start_offset=begin,
            end_offset=None,
            start_time=self.keep.start_time,
            end_time=self.keep.end_time,
            time_slack=None,
            split_size=self.split_size,
            starting_offset="earliest",
            max_bytes_per_trigger=None,
            on_expired="fail",
        )


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export came to: rows and files of this export alone, and the log's bytes ``[begin_offset, end_offset)``.

    ``missing_topics`` were asked for and have no message there. ``expired`` are the log's bytes ``[first, end)`` that
    had expired before any export into this target read them.
    """

    job: str
    rows: int
    files: int
    bytes: int
    partitions: int
    begin_offset: int
    end_offset: int
    missing_topics: tuple[str, ...]
    expired: tuple[int, int] | None
    seconds: float


def export(spark: SparkSession, config: Config, request: ExportRequest, progress: Report | None = None) -> Exported:
    """Export on whatever ``spark`` runs on; ``progress`` is told bytes of log.

    Raises UsageError for what cannot be asked for, UnsafeStoreError where ``append`` cannot go on, BusyError where
    another export writes the same target, and what reading the log and writing the target do; in all of these cases
    the target is as it was.
    """
    started = time.monotonic()
    check_store(config)
    check_outside(config, request.to, "--to")
    check_request(request)
    config = with_known_segment_size(config)
    target = Target(request.to)
    with target.opened():
        before = _manifest_before(target, request)
        start = _start(config, request, before)
        splits = _plan(config, request, start.begin)
        task = ExportTask(config, request.to, target.job, request.columns, request.keep, request.shape)
        target.begin()
        sizes = [split.size for split in splits]
        done = run_tasks(spark, partial(export_split, task), splits, sizes=sizes, progress=progress)
        _check_chain(splits, done)
        missing = _missing_topics(request, done)
        parts = [part for found in done for part in found.parts]
        rows = sum(part.rows for part in parts)
        if not (parts or before.exports or request.shape.partition_by):
            parts = [export_nothing(task)]
        found = Export(
            job=target.job,
            store=_store(config),
            begin_offset=splits[0].begin if splits else start.begin or 0,
            end_offset=done[-1].next_offset if splits else start.begin or 0,
            selection=request.selection,
            rows=rows,
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            files=tuple((part.name, part.rows, part.size) for part in parts),
            last_message=next((split.last_message for split in reversed(done) if split.last_message), start.last),
            expired_bytes=start.expired_bytes,
        )
        target.commit(parts, before.with_export(found))
    return Exported(
        job=found.job,
        rows=rows,
        files=len(parts),
        bytes=sum(part.size for part in parts),
        partitions=len({part.partition for part in parts}),
        begin_offset=found.begin_offset,
        end_offset=found.end_offset,
        missing_topics=missing,
        expired=start.expired,
        seconds=time.monotonic() - started,
    )


def check_request(request: ExportRequest) -> None:
    """UsageError for what no log and no target could make right."""
    shape = request.shape
    if request.begin is not None and request.end is not None and request.begin > request.end:
        raise UsageError(
            f"the first store time {request.begin} is behind the last one, {request.end}", "-b comes first"
        )
    for name in shape.partition_by:
        if name not in SOURCES:
            raise UsageError(f"{name} is no partition", f"there are {', '.join(SOURCES)}")
    if len(set(shape.partition_by)) < len(shape.partition_by):
        raise UsageError("a partition is given twice", "name each once")
    if not written_columns(request.columns, shape.partition_by):
        raise UsageError("no column is left for the files", "give more --columns, or fewer partitions")
    if shape.file_size < FILE_SIZE_MIN:
        raise UsageError(f"files of {shape.file_size} bytes are too small", f"give at least {FILE_SIZE_MIN}")
    if not isinstance(request.to, RemotePath) and Disk().exists(request.to) and not request.to.is_dir():
        raise UsageError(f"--to {request.to} is a file", "name a directory that is empty or not there")


def _manifest_before(target: Target, request: ExportRequest) -> Manifest:
    """What the target will hold besides this export; UsageError where the mode does not allow what is there."""
    fresh = Manifest(SCHEMA_VERSION, request.columns, request.shape.partition_by)
    there = target.manifest
    foreign = target.foreign_file()
    if foreign is not None:
        raise UsageError(
            f"{target.path} holds {foreign}, which no export has written", "give an empty directory, or a new one"
        )
    if there is None or request.mode == "overwrite":
        return fresh
    if request.mode == "error":
        raise UsageError(f"{target.path} holds an export", "give --mode append or --mode overwrite, or another --to")
    if (there.schema_version, there.columns, there.partition_by) != (
        SCHEMA_VERSION,
        request.columns,
        request.shape.partition_by,
    ):
        raise UsageError(
            f"{target.path} holds other columns or partitions: {','.join(there.columns)}"
            f" by {','.join(there.partition_by) or 'none'}, schema version {there.schema_version}",
            "append with the same --columns and --partition-by, or give --mode overwrite",
        )
    return there


def _start(config: Config, request: ExportRequest, before: Manifest) -> Continuation:
    """Behind what the target already has of this store."""
    store = _store(config)
    earlier = [done for done in before.exports if done.store == store]
    return continued(disk_for(config), config, request.to, earlier, request.selection, request.on_expired)


def _plan(config: Config, request: ExportRequest, begin: int | None) -> list[Split]:
    splits = plan(disk_for(config), request.source_options(_with_known_data(config), begin))
    if begin is not None and request.begin is None and splits and splits[0].begin > begin:
        # What holds no message is read, too: only the reader knows the blank end of a segment from what is missing.
        splits.insert(0, Split(begin, splits[0].begin))
    return splits


def _with_known_data(config: Config) -> Config:
    # A data directory says where a time begins; one in which nothing was built yet is no reason to stop.
    if Disk().exists(DataFiles(config.store.data).frontier):
        return config
    return config.model_copy(update={"provenance": {**config.provenance, "data": "default"}})


def _store(config: Config) -> str:
    return ",".join(str(path.resolve()) for path in config.store.commit_log_directories)


def _check_chain(splits: Sequence[Split], done: Sequence[SplitExported]) -> None:
    for number in check_chain(splits, [found.next_offset for found in done]):
        check_end(splits[number], done[number].next_offset)


def _missing_topics(request: ExportRequest, done: Sequence[SplitExported]) -> tuple[str, ...]:
    """Topics without a message; UsageError when it is all of them, so that a typo never replaces an export."""
    if request.topics is None:
        return ()
    found = {topic for split in done for topic in split.topic_rows}
    missing = tuple(sorted(request.topics - found))
    if not found and request.mode != "append":
        raise UsageError(
            f"no message of {', '.join(missing)} is in the log, or none in that time",
            "look at the topics with indexd stats; nothing was written",
        )
    return missing
