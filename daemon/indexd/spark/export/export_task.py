"""What a task of an export does: the rows of one split, those that were asked for, into Parquet files."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from indexd.config import Config
from indexd.spark.export.append import last_message
from indexd.spark.export.outputs import Output
from indexd.spark.export.parquet import Part, PartWriter, Shape
from indexd.spark.export.partitions import SOURCES
from indexd.spark.export.target import LastMessage, target_files
from indexd.spark.source.columns import arrow_schema
from indexd.spark.source.rows import Keep, RowReader
from indexd.spark.splits import Split
from indexd.storage.remote import disk_for


@dataclass(frozen=True, slots=True)
class ExportTask:
    """The same for all splits: from where, which rows and columns, where to and how."""

    config: Config
    target: Path
    job: str
    columns: tuple[str, ...]
    keep: Keep
    shape: Shape

    @property
    def read_columns(self) -> tuple[str, ...]:
        """What is read: also that which only partitions are made of."""
        more = (*(SOURCES[name] for name in self.shape.partition_by), *(("topic",) if self.keep.topics else ()))
        return self.columns + tuple(name for name in dict.fromkeys(more) if name not in self.columns)

    @property
    def schema(self) -> pa.Schema:
        """That of the files: without the topic where a directory says it."""
        return arrow_schema(written_columns(self.columns, self.shape.partition_by))


@dataclass(frozen=True, slots=True)
class SplitExported:
    """What became of a split: where reading ended, its files, and the rows of each topic where topics were named.

    ``last_message`` is the last one that was read, asked for or not; None if there was none, or it has expired since.
    """

    next_offset: int
    parts: tuple[Part, ...]
    topic_rows: dict[str, int]
    last_message: LastMessage | None = None


def written_columns(columns: tuple[str, ...], partition_by: tuple[str, ...]) -> tuple[str, ...]:
    """The columns that the files hold: a topic that names their directory is read from there."""
    return tuple(name for name in columns if name not in partition_by)


def export_split(task: ExportTask, split: Split) -> SplitExported:
    """Write the files of a split under names that only this attempt has. Raises what reading and writing do."""
    files = target_files(task.target)
    attempt = uuid.uuid4().hex[:8]
    count = 0

    def create(partition: str) -> Output:
        nonlocal count
        count += 1
        return files.create(task.job, f"{partition}part-{split.begin:020d}-{task.job}-{attempt}-{count:04d}.parquet")

    disk = disk_for(task.config)
    reader = RowReader(disk, task.config, split, task.read_columns, task.keep)
    writer = PartWriter(create, task.schema, task.shape, files.open_max)
    topic_rows: dict[str, int] = {}
    try:
        for batch in reader:
            writer.put(batch)
            if task.keep.topics:
                for found in batch["topic"].value_counts():
                    topic = found["values"].as_py()
                    topic_rows[topic] = topic_rows.get(topic, 0) + found["counts"].as_py()
        last = last_message(disk, task.config, reader.last_message)
        parts = writer.close()
    except BaseException:
        writer.discard()
        raise
    return SplitExported(reader.next_offset, tuple(parts), topic_rows, last)


def export_nothing(task: ExportTask) -> Part:
    """A file without rows, so that readers of an export of nothing find the columns."""
    files = target_files(task.target)
    name = f"part-{0:020d}-{task.job}-{uuid.uuid4().hex[:8]}-0000.parquet"
    writer = PartWriter(lambda _: files.create(task.job, name), task.schema, task.shape, files.open_max)
    return writer.close(at_least_one=True)[0]
