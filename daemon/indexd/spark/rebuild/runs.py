"""RunReader: what a run file holds, as the batches that builders take; nothing of it is believed before its CRC is.

A chunk is read at a time, so memory does not grow with the log. What a run is: see run_format.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.dispatch import DispatchBatch, TopicTable
from indexd.commitlog.kernel import Columns
from indexd.errors import CorruptDataError, DiskError
from indexd.spark.rebuild.run_format import (
    CHUNK,
    LOG_COLUMNS,
    MAGIC,
    TRAILER,
    UNIT_ROW,
    QueueSeen,
    Run,
    bucket_of,
    unpack_topics,
)
from indexd.spark.rebuild.run_writer import RunWriter
from indexd.spark.rebuild.runs_kernel import BUCKETS
from indexd.storage.disk import Disk, DiskFile

__all__ = ["BUCKETS", "QueueSeen", "Run", "RunReader", "RunWriter", "bucket_of", "read_run"]

_BUCKET_TABLE_SIZE = 4 * (BUCKETS + 1 + BUCKETS)
_TYPES = {
    "phy_offset": np.int64,
    "size": np.int32,
    "store_timestamp": np.int64,
    "queue_offset": np.int64,
    "batch_size": np.int32,
    "queue_id": np.int32,
    "topic_id": np.int32,
    "tags_code": np.int64,
    "sys_flag": np.int32,
    "key_start": np.int64,
    "key_hash": np.uint32,
}


class _Sections:
    """An open run file, its trailer believed: the sections behind the chunks, read when they are asked for."""

    def __init__(self, file: DiskFile, size: int, crc: int | None) -> None:
        self.file = file
        trailer = file.pread(TRAILER.size, max(size - TRAILER.size, 0))
        self.crc = zlib.crc32(trailer)
        if len(trailer) < TRAILER.size or trailer[-8:] != MAGIC or (crc is not None and crc != self.crc):
            raise CorruptDataError(f"{file.path} is no run that was written to its end")
        position, *numbers, _ = TRAILER.unpack(trailer)
        self._sizes, self._crcs = numbers[:4], numbers[4:]
        self._positions = [position + sum(self._sizes[:number]) for number in range(4)]

    def read(self, number: int) -> bytes:
        """Chunk table, topics, queues, facts."""
        data = self.file.pread(self._sizes[number], self._positions[number])
        return _believed(data, self._crcs[number], self.file.path)


class RunReader:
    """Reads the messages of ``run``; ``slim`` ones do. Raises DiskError, CorruptDataError. One owner, no locks.

    All batches of ConsumeQueues share one table of topics. Columns that a builder does not ask for are empty.
    """

    def __init__(self, disk: Disk, run: Run) -> None:
        self.run = run
        self._file = disk.open_read(run.path)
        try:
            if self._file.size() != run.size:
                raise CorruptDataError(f"{run.path} has {self._file.size()} bytes, not {run.size}")
            self._sections = _Sections(self._file, run.size, run.crc)
            self._chunks = np.frombuffer(self._sections.read(0), dtype=CHUNK)
        except BaseException:
            self._file.close()
            raise
        self._topics: TopicTable | None = None

    def __enter__(self) -> RunReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RunReader({self.run.path}, {self.run.split}, messages={self.run.messages})"

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def index_batches(self, first: int, last: int) -> Iterator[tuple[DispatchBatch, int, int]]:
        """The messages of the index entries ``[first, last)`` of the run, and where to begin: (batch, row, key).

        ``row`` and ``key`` are put_batch's. A batch may go on behind ``last``, and have messages without entries.
        """
        begin = 0
        for chunk in self._chunks:
            end = begin + int(chunk["keys"])
            if begin < last and end > first:
                batch = self._log_batch(chunk, with_keys=True)
                key = max(first - begin, 0)
                row = int(np.searchsorted(batch.columns.key_start, key, side="right")) - 1
                yield batch, row, key
            begin = end

    def entry(self, number: int) -> tuple[int, int]:
        """(physical offset, store timestamp) of the message of an index entry of the run."""
        batch, row, _ = next(self.index_batches(number, number + 1))
        return int(batch.columns.phy_offset[row]), int(batch.columns.store_timestamp[row])

    def queue_batches(self, bucket: int) -> Iterator[DispatchBatch]:
        """The messages of one bucket in log order, with the columns that ConsumeQueues are built from."""
        for chunk in self._chunks:
            if not chunk["units"]:
                continue
            position = self._units_position(chunk)
            table_position = position + int(chunk["units"]) * UNIT_ROW.itemsize
            table = self._bytes(_BUCKET_TABLE_SIZE, table_position, chunk["table_crc"])
            numbers = np.frombuffer(table, dtype=np.uint32)
            begin, end = int(numbers[bucket]), int(numbers[bucket + 1])
            if begin == end:
                continue
            size = (end - begin) * UNIT_ROW.itemsize
            data = self._bytes(size, position + begin * UNIT_ROW.itemsize, numbers[BUCKETS + 1 + bucket])
            yield self._queue_batch(np.frombuffer(data, dtype=UNIT_ROW))

    def sparse_batches(self) -> Iterator[DispatchBatch]:
        """All messages in log order: phy_offset, size, store_timestamp; batches end where those of the reader did."""
        for chunk in self._chunks:
            yield self._log_batch(chunk, with_keys=False)

    def check(self) -> None:
        """CorruptDataError if any byte of the messages is not as it was written."""
        for chunk in self._chunks:
            for with_keys in (True, False):
                self._log_batch(chunk, with_keys=with_keys)
        for bucket in range(BUCKETS):
            for _ in self.queue_batches(bucket):
                pass

    def _log_batch(self, chunk: np.void, *, with_keys: bool) -> DispatchBatch:
        rows, position = int(chunk["rows"]), int(chunk["position"])
        columns: dict[str, NDArray[Any]] = {}
        for (name, kind), crc in zip(LOG_COLUMNS, chunk["crcs"], strict=False):
            count = int(chunk["sizes"]) if name == "size" else rows
            if name != ("size" if with_keys else "key_count"):
                columns[name] = self._column(np.dtype(kind), count, position, crc)
            position += count * np.dtype(kind).itemsize
        columns["phy_offset"] = columns["phy_offset"].astype(np.int64) + self.run.split.begin
        columns["key_start"] = np.zeros(rows + 1, dtype=np.int64)
        if with_keys:
            np.cumsum(columns.pop("key_count"), out=columns["key_start"][1:])
            columns["key_hash"] = self._column(np.dtype("<u4"), int(chunk["keys"]), position, chunk["crcs"][-1])
            columns["sys_flag"] = np.zeros(rows, dtype=np.int32)
        return self._batch(columns, rows, int(chunk["end"]))

    def _queue_batch(self, units: NDArray[np.void]) -> DispatchBatch:
        columns = {name: units[name].astype(_TYPES[name]) for name in units.dtype.names or ()}
        columns["phy_offset"] += self.run.split.begin
        end = int(columns["phy_offset"][-1]) + int(columns["size"][-1])
        return self._batch(columns, len(units), end)

    def _batch(self, columns: dict[str, NDArray[Any]], rows: int, end: int) -> DispatchBatch:
        if self._topics is None:
            self._topics = _topic_table(unpack_topics(self._sections.read(1)))
        filled = {name: columns.get(name, np.empty(0, dtype=kind)) for name, kind in _TYPES.items()}
        begin = int(filled["phy_offset"][0]) if rows else end
        return DispatchBatch(Columns(**filled), rows, begin, end, self._topics)

    def _units_position(self, chunk: np.void) -> int:
        rows, sizes, keys = int(chunk["rows"]), int(chunk["sizes"]), int(chunk["keys"])
        row_size = sum(np.dtype(kind).itemsize for name, kind in LOG_COLUMNS if name != "size")
        return int(chunk["position"]) + rows * row_size + 4 * sizes + 4 * keys

    def _column(self, kind: np.dtype[Any], count: int, position: int, crc: int) -> NDArray[Any]:
        column = np.empty(count, dtype=kind)
        found = self._file.pread_into(column.view(np.uint8).data, position)
        if found < column.nbytes or zlib.crc32(column.data) != crc:
            raise _damaged(self.run.path)
        return column

    def _bytes(self, size: int, position: int, crc: int) -> bytes:
        return _believed(self._file.pread(size, position), crc, self.run.path)


def read_run(disk: Disk, path: Path) -> Run | None:
    """The Run that a file says it holds, if it was written to its end; its messages are not looked at."""
    try:
        with disk.open_read(path) as file:
            size = file.size()
            sections = _Sections(file, size, None)
            run = Run.from_facts(sections.read(3), path)
            topics, queue_rows = unpack_topics(sections.read(1)), sections.read(2)
    except CorruptDataError:
        return None
    except DiskError as error:
        if not error.is_missing:
            raise
        return None
    fields = {name: getattr(run, name) for name in run.__dataclass_fields__}
    return Run(**fields | {"topics": topics, "queue_rows": queue_rows, "size": size, "crc": sections.crc})


def _topic_table(topics: tuple[bytes, ...]) -> TopicTable:
    # Names by id; nobody looks an id up by name.
    table = TopicTable(max(len(topics), 1), max(sum(map(len, topics)), 1))
    table.arrays.start[1 : len(topics) + 1] = np.cumsum([len(name) for name in topics])
    table.arrays.data[: table.arrays.start[len(topics)]] = np.frombuffer(b"".join(topics), dtype=np.uint8)
    table.arrays.known[0] = len(topics)
    return table


def _believed(data: bytes, crc: int, path: Path) -> bytes:
    if zlib.crc32(data) != crc:
        raise _damaged(path)
    return data


def _damaged(path: Path) -> CorruptDataError:
    return CorruptDataError(f"{path} is not as it was written", "run the rebuild again, without --resume")
