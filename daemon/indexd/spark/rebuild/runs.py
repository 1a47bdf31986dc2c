"""RunWriter: the messages of one split -> one run file, a chunk at a time.

RunReader: what a run file holds, as the batches that builders take; nothing of it is believed before its CRC is.

A chunk is read at a time, so memory does not grow with the log. What a run is: see run_format.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.evidence import Evidence
from indexd.commitlog.kernel import Columns
from indexd.commitlog.reader import Skipped
from indexd.commitlog.tail import stand_of
from indexd.errors import CorruptDataError, DiskError
from indexd.spark.rebuild.run_format import (
    CHUNK,
    LOG_COLUMNS,
    MAGIC,
    QUEUE_ROW,
    TRAILER,
    UNIT_ROW,
    QueueSeen,
    Run,
    bucket_of,
    pack_topics,
    topic_hash,
    unpack_topics,
)
from indexd.spark.rebuild.runs_kernel import BUCKETS, first_rows, sort_rows
from indexd.spark.splits import Split, SplitReader
from indexd.storage.disk import Disk, DiskFile

# Rows that are collected before they are written, and keys: some 10 MiB.
ROWS_PER_CHUNK = 1 << 17
_KEYS_PER_CHUNK = 4 * ROWS_PER_CHUNK
_FOUND_MAX = 4096


class RunWriter:
    """Writes ``path``, which must not be there, front to back. Raises DiskError; one owner, no locks.

    ``skip_mask``: transaction types that get no index entries (Flavour). ``with_units``: for ConsumeQueues, too.
    """

    def __init__(self, disk: Disk, path: Path, split: Split, *, skip_mask: int = 0, with_units: bool = True) -> None:
        self._run = Run(split, path)
        self._skip_mask = skip_mask
        self._with_units = with_units
        self._disk = disk
        self._file = disk.open_write(path, create=True)
        self._file.pwrite(MAGIC, 0)
        self._position = len(MAGIC)
        self._batches: list[DispatchBatch] = []
        self._rows = self._keys = 0
        self._chunks: list[tuple[Any, ...]] = []
        self._skipped: list[Skipped] = []
        self._topic_ids: dict[bytes, int] = {}
        self._topic_hashes: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        # Of the reader's present table of topics: its ids -> ours.
        self._table: TopicTable | None = None
        self._ours: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        self._queue_table: NDArray[np.uint64] = np.zeros(1024, dtype=np.uint64)
        self._queues_known = np.zeros(1, dtype=np.int64)
        self._queue_rows: list[NDArray[np.void]] = []
        self._buckets = np.zeros(BUCKETS + 1, dtype=np.int64)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __repr__(self) -> str:
        return f"RunWriter({self._run.path}, {self._run.split}, messages={self._run.messages})"

    def put(self, item: DispatchBatch | Skipped) -> None:
        """Take the next stretch of the split."""
        if isinstance(item, Skipped):
            self._skipped.append(item)
            self._run = replace(self._run, phy_offset=item.end)
            return
        if not item.rows:
            return
        rows, columns, first = item.rows, item.columns, self._run.first_offset
        stand = self._run.stand.after(
            item.begin_offset, stand_of(columns.store_timestamp[:rows], columns.phy_offset[:rows])
        )
        self._run = replace(
            self._run,
            first_offset=item.begin_offset if first is None else first,
            last_timestamp=item.last_store_timestamp,
            stand=stand,
            phy_offset=item.end_offset,
            batch_end=item.end_offset,
            messages=self._run.messages + item.rows,
            store_timestamp=item.last_store_timestamp or self._run.store_timestamp,
        )
        self._batches.append(item)
        self._rows += item.rows
        self._keys += item.keys
        if self._rows >= ROWS_PER_CHUNK or self._keys >= _KEYS_PER_CHUNK:
            self._write_chunk()

    def close(self, reader: SplitReader, *, identity: str = "", evidence: Sequence[Evidence] = ()) -> Run:
        """Write what is left, and say what the split came to. ``reader`` has been read to its end."""
        self._write_chunk()
        queues = np.concatenate([np.zeros(0, dtype=QUEUE_ROW), *self._queue_rows]).tobytes()
        run = replace(
            self._run,
            identity=identity,
            next_offset=reader.next_offset,
            ends_log=reader.ends_log,
            unreadable=reader.unreadable,
            skipped=tuple(self._skipped),
            evidence=tuple(evidence),
            topics=tuple(self._topic_ids),
            buckets=tuple(self._buckets.tolist()),
            queue_rows=queues,
        )
        table = np.array(self._chunks, dtype=CHUNK).tobytes()
        sections = (table, pack_topics(run.topics), queues, run.facts())
        trailer = TRAILER.pack(self._position, *map(len, sections), *map(zlib.crc32, sections), MAGIC)
        for data in (*sections, trailer):
            self._write(data)
        self._file.close()
        return replace(run, size=self._position, crc=zlib.crc32(trailer))

    def _write(self, data: Any) -> int:
        # The CRC-32 of what is written; zlib takes what pwrite takes.
        view = memoryview(data).cast("B")
        self._file.pwrite(view, self._position)
        self._position += len(view)
        return zlib.crc32(view)

    def _write_chunk(self) -> None:
        if not self._batches:
            return
        position, rows, end = self._position, self._rows, self._batches[-1].end_offset
        phy = (self._joined("phy_offset") - self._run.split.begin).astype(np.uint32)
        sizes = self._joined("size")
        counts, hashes = self._keys_of_rows()
        crcs = [self._write(phy.data), self._write(sizes.data)]
        crcs += [self._write(self._joined("store_timestamp").data), self._write(counts.data)]
        crcs.append(self._write(hashes.data))
        units, table_crc = self._write_units(phy, sizes) if self._with_units and len(sizes) else (0, 0)
        self._chunks.append((position, end, rows, len(sizes), len(hashes), units, tuple(crcs), table_crc))
        self._run = replace(self._run, entries=self._run.entries + len(hashes), ends_with_entry=bool(counts[-1]))
        self._batches.clear()
        self._rows = self._keys = 0

    def _joined(self, name: str) -> NDArray[Any]:
        return np.concatenate([getattr(batch.columns, name)[: batch.rows] for batch in self._batches])

    def _keys_of_rows(self) -> tuple[NDArray[np.uint16], NDArray[np.uint32]]:
        # Messages that the flavour leaves out have no keys here.
        counts = np.concatenate([np.diff(batch.columns.key_start[: batch.rows + 1]) for batch in self._batches])
        hashes = np.concatenate([batch.columns.key_hash[: batch.keys] for batch in self._batches])
        if self._skip_mask:
            is_skipped = (self._skip_mask >> (self._joined("sys_flag") & 0xC) & 1).astype(np.bool_)
            if is_skipped.any():
                hashes = hashes[~np.repeat(is_skipped, counts)]
                counts[is_skipped] = 0
        return counts.astype(np.uint16), hashes

    def _write_units(self, phy: NDArray[np.uint32], sizes: NDArray[np.int32]) -> tuple[int, int]:
        # How many rows, and the CRC of starts and CRCs of the buckets.
        topic_ids = np.concatenate([self._own_topic_ids(batch) for batch in self._batches])
        queue_ids, sys_flags = self._joined("queue_id"), self._joined("sys_flag")
        queue_offsets = self._joined("queue_offset")
        self._find_queues(topic_ids, queue_ids, sys_flags, queue_offsets, phy)
        starts, order = np.zeros(BUCKETS + 1, dtype=np.uint32), np.empty(len(phy), dtype=np.uint32)
        buckets = np.empty(len(phy), dtype=np.uint8)
        sort_rows(topic_ids, queue_ids, sys_flags, self._topic_hashes, buckets, starts, order)
        order = order[: int(starts[-1])]
        units = np.empty(len(order), dtype=UNIT_ROW)
        for name, column in (
            ("phy_offset", phy),
            ("size", sizes),
            ("queue_offset", queue_offsets),
            ("tags_code", self._joined("tags_code")),
            ("queue_id", queue_ids),
            ("topic_id", topic_ids),
            ("sys_flag", sys_flags),
        ):
            units[name] = column[order]
        raw = units.view(np.uint8)
        self._write(raw.data)
        bounds = (starts.astype(np.int64) * UNIT_ROW.itemsize).tolist()
        crcs = [zlib.crc32(raw[begin:end].data) for begin, end in pairwise(bounds)]
        self._buckets += starts
        return len(order), self._write(starts.tobytes() + np.array(crcs, dtype=np.uint32).tobytes())

    def _own_topic_ids(self, batch: DispatchBatch) -> NDArray[np.int32]:
        if batch.topics is not self._table:
            self._table, self._ours = batch.topics, np.zeros(0, dtype=np.int32)
        theirs = batch.columns.topic_id[: batch.rows]
        known = len(self._ours)
        new = [batch.topics.raw_name(topic_id) for topic_id in range(known, int(theirs.max(initial=-1)) + 1)]
        if new:
            added = [self._topic_ids.setdefault(name, len(self._topic_ids)) for name in new]
            self._ours = np.array([*self._ours.tolist(), *added], dtype=np.int32)
            unhashed = list(self._topic_ids)[len(self._topic_hashes) :]
            self._topic_hashes = np.append(
                self._topic_hashes, np.array(list(map(topic_hash, unhashed)), dtype=np.uint32)
            )
        return self._ours[theirs]

    def _find_queues(
        self,
        topic_ids: NDArray[np.int32],
        queue_ids: NDArray[np.int32],
        sys_flags: NDArray[np.int32],
        queue_offsets: NDArray[np.int64],
        phy: NDArray[np.uint32],
    ) -> None:
        found = np.empty(_FOUND_MAX, dtype=np.uint32)
        row = 0
        while row < len(topic_ids):
            next_row, count = first_rows(
                topic_ids, queue_ids, sys_flags, queue_offsets, row, self._queue_table, self._queues_known, found
            )
            row = int(next_row)
            rows = found[: int(count)]
            new = np.empty(len(rows), dtype=QUEUE_ROW)
            new["topic_id"], new["queue_id"], new["phy_offset"] = topic_ids[rows], queue_ids[rows], phy[rows]
            self._queue_rows.append(new)
            if 2 * int(self._queues_known[0]) >= len(self._queue_table):
                self._grow()

    def _grow(self) -> None:
        # Twice the size, with the same queues: found again, as rows of their own.
        known = np.concatenate(self._queue_rows)
        self._queue_table = np.zeros(2 * len(self._queue_table), dtype=np.uint64)
        self._queues_known[:] = 0
        nothing = np.zeros(len(known), dtype=np.int32)
        topic_ids, queue_ids = known["topic_id"].copy(), known["queue_id"].copy()
        found = np.empty(len(known), dtype=np.uint32)
        offsets = np.zeros(len(known), dtype=np.int64)
        first_rows(topic_ids, queue_ids, nothing, offsets, 0, self._queue_table, self._queues_known, found)


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
