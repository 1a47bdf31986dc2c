"""Parquet files of bounded size, of any number of partitions, in bounded memory.

Rows wait until there are as many bytes of them as a row group should have. Without partitions they are written then.
With partitions they are sorted by partition, and the largest partitions go to their files until half of the memory is
free again; small ones wait for more of their kind. Of thousands of partitions only ``open_max`` files are open at a
time: the one that was not written to for longest is finished, and its partition's next rows begin another file.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from indexd.spark.export.outputs import Output
from indexd.spark.export.partitions import Partitioner

#: Bytes of Arrow rows in a row group, at most: what a reader needs at once of one file.
ROW_GROUP_SIZE = 64 << 20
#: Bytes of rows that wait, with partitions. As much again is needed while they are sorted.
PENDING_SIZE = 128 << 20
FILE_SIZE_MIN = 64 << 10
# Columns, by Parquet's names for their leaves, whose values repeat. A dictionary of the others costs time and space.
_REPEATING = [
    "size", "topic", "queueId", "storeTimestamp", "bornTimestamp", "bornHost", "storeHost", "sysFlag",
    "transactionType", "reconsumeTimes", "preparedTransactionOffset", "tags", "tagsCode", "properties.key_value.key",
]  # fmt: skip
# What the footer and the page index say of a column of a row group, about.
_FOOTER_SIZE = 250


@dataclass(frozen=True, slots=True)
class Part:
    """A finished file: its name below the target, the partition that it is of, its rows and bytes."""

    name: str
    partition: str
    rows: int
    size: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How files look: compression (``zstd``, ``snappy``, ``none``), sizes in bytes, partitions in their order."""

    compression: str = "zstd"
    file_size: int = 256 << 20
    partition_by: tuple[str, ...] = ()
    pending_size: int = PENDING_SIZE
    row_group_size: int = ROW_GROUP_SIZE


class PartWriter:
    """Takes record batches, makes files by ``create(partition)``; ``close`` returns all of them.

    A file is as large as ``shape.file_size`` allows, but at least one row group; a group is at most a quarter of it.
    """

    def __init__(self, create: Callable[[str], Output], schema: pa.Schema, shape: Shape, open_max: int) -> None:
        """``schema`` is that of the files: columns of the rows that are not in it are left out."""
        self._create = create
        self._schema = schema
        self._shape = shape
        self._open_max = open_max
        self._partitioner = Partitioner(shape.partition_by)
        self._group_size = max(min(shape.row_group_size, shape.file_size // 4), 1)
        self._pending_size = max(shape.pending_size, self._group_size) if shape.partition_by else self._group_size
        self._pending: list[pa.Table] = []
        self._bytes = 0
        self._open: OrderedDict[str, _OpenPart] = OrderedDict()
        self._parts: list[Part] = []
        #: Bytes written of a byte of rows, as far as is known.
        self._ratio = 1.0

    def __repr__(self) -> str:
        return f"PartWriter({len(self._parts)} parts, {len(self._open)} open, {self._bytes} bytes wait)"

    def put(self, batch: pa.RecordBatch) -> None:
        """Rows, behind all before them."""
        self._pending.append(pa.Table.from_batches([batch]))
        self._bytes += batch.nbytes
        if self._bytes >= self._pending_size:
            self._write_out(self._pending_size // 2)

    def close(self, *, at_least_one: bool = False) -> list[Part]:
        """Write what waits, finish every file, and return them; ``at_least_one`` may be a file without rows."""
        self._write_out(0)
        if at_least_one and not self._open and not self._parts:
            self._part("", 0)
        for partition in list(self._open):
            self._finish(partition)
        return self._parts

    def discard(self) -> None:
        """Close the files that are not finished, after an error."""
        for part in self._open.values():
            part.discard()

    def _write_out(self, keep: int) -> None:
        # At most `keep` bytes go on waiting.
        if not self._pending:
            return
        groups = self._partitioner.split(pa.concat_tables(self._pending))
        self._pending, waiting = [], sum(rows.nbytes for _, rows in groups)
        kept = []
        for partition, rows in sorted(groups, key=lambda group: -group[1].nbytes):
            if waiting <= keep:
                kept.append(rows)
                continue
            waiting -= rows.nbytes
            self._write(partition, rows.select(self._schema.names))
        if kept:
            # A copy: slices would keep all of the rows that they were cut out of.
            self._pending.append(pa.concat_tables(kept).take(pa.array(np.arange(sum(rows.num_rows for rows in kept)))))
        self._bytes = waiting

    def _write(self, partition: str, rows: pa.Table) -> None:
        count = -(-rows.nbytes // self._group_size)
        step = -(-rows.num_rows // count)
        for first in range(0, rows.num_rows, step):
            group = rows.slice(first, step)
            part = self._part(partition, int(group.nbytes * self._ratio))
            part.write(group)
            self._ratio = part.ratio
            if part.size >= self._shape.file_size:
                self._finish(partition)

    def _part(self, partition: str, growth: int) -> _OpenPart:
        part = self._open.get(partition)
        if part is not None and part.rows and part.size + growth > self._shape.file_size:
            self._finish(partition)
            part = None
        if part is None:
            while len(self._open) >= self._open_max:
                self._finish(next(iter(self._open)))
            part = self._open[partition] = _OpenPart(self._create(partition), self._schema, self._shape)
        self._open.move_to_end(partition)
        return part

    def _finish(self, partition: str) -> None:
        part = self._open[partition]
        size = part.finish()
        del self._open[partition]
        self._parts.append(Part(part.output.name, partition, part.rows, size))


class _OpenPart:
    def __init__(self, output: Output, schema: pa.Schema, shape: Shape) -> None:
        self.output = output
        self.rows = 0
        self._bytes = 0
        self._footer = 0
        self._columns = len(schema.names)
        self._writer = pq.ParquetWriter(
            output.sink, schema, compression=shape.compression, use_dictionary=_REPEATING, write_page_index=True
        )

    @property
    def size(self) -> int:
        """Bytes written so far, and those that the footer will have."""
        return int(self.output.sink.tell()) + self._footer

    @property
    def ratio(self) -> float:
        """Bytes written of a byte of rows."""
        return self.size / self._bytes if self._bytes else 1.0

    def write(self, rows: pa.Table) -> None:
        """One row group."""
        self._writer.write_table(rows, row_group_size=max(rows.num_rows, 1))
        self.rows += rows.num_rows
        self._bytes += rows.nbytes
        self._footer += self._columns * _FOOTER_SIZE

    def finish(self) -> int:
        self._writer.close()
        return self.output.finish()

    def discard(self) -> None:
        self.output.discard()
