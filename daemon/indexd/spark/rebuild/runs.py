"""The bytes of a run, what stage one of a rebuild makes of a split, and the Run that says what it came to.

::

    "indexdR1"                  8 bytes
    chunk, some 131072 rows     column after column, little-endian, one row a message, in log order:
        u32 phyOffset           relative to the split's begin
        i32 size                only where ConsumeQueues or sparse indexes are built
        i64 storeTimestamp
        u16 keyCount            index entries of the message; none where the flavour leaves it out
        u32 keyHash             one an entry
        UNIT_ROW                the rows once more for the ConsumeQueues, sorted by bucket, those of one in log
                                order; of prepared and rolled back messages there is none
        u32 bucket start        BUCKETS + 1: the row with which each bucket begins
        u32 crc                 BUCKETS: of the rows of each bucket
    chunk table                 a CHUNK a chunk, with the CRC-32 of each column
    topics                      u32 count, count x u32 length, the names
    queues                      a QUEUE_ROW a queue that begins here, in the order of their first rows
    facts                       JSON: the rest of a Run
    trailer                     TRAILER: where these are, their CRC-32, "indexdR1"

Written by one task, from front to back, under a name that no other attempt has; read by tasks of stage two. The CRC-32
of the trailer is the run's: it covers the others, and they cover every byte. A crash can leave files without a trailer,
or with pages that never came: the CRCs tell.

RunReader: what a run file holds, as the batches that builders take; nothing of it is believed before its CRC is.

A chunk is read at a time, so memory does not grow with the log. What a run is: see run_format.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.evidence import Evidence
from indexd.commitlog.format import Corrupt
from indexd.commitlog.kernel import Columns
from indexd.commitlog.reader import Skipped
from indexd.commitlog.tail import AT_FIRST, NEVER, Stand
from indexd.errors import CorruptDataError, DiskError
from indexd.spark.rebuild.run_writer import RunWriter
from indexd.spark.rebuild.runs_kernel import BUCKET_SHIFT, BUCKETS, HASH_FACTOR
from indexd.spark.splits import Split
from indexd.storage.disk import Disk, DiskFile

MAGIC = b"indexdR1"
#: What a row is in the log's order, by column.
LOG_COLUMNS = (("phy_offset", "<u4"), ("size", "<i4"), ("store_timestamp", "<i8"), ("key_count", "<u2"))
UNIT_ROW = np.dtype(
    [
        ("phy_offset", "<u4"),
        ("size", "<i4"),
        ("queue_offset", "<i8"),
        ("tags_code", "<i8"),
        ("queue_id", "<i4"),
        ("topic_id", "<i4"),
        ("sys_flag", "u1"),
    ]
)
#: ``position``: where its first column begins; ``end``: where the reader's last batch in it ends; ``sizes``, ``keys``,
#: ``units``: how long these columns are; ``table_crc``: of bucket starts and CRCs.
CHUNK = np.dtype(
    [
        ("position", "<i8"),
        ("end", "<i8"),
        ("rows", "<i4"),
        ("sizes", "<i4"),
        ("keys", "<i4"),
        ("units", "<i4"),
        ("crcs", "<u4", (len(LOG_COLUMNS) + 1,)),
        ("table_crc", "<u4"),
    ]
)
QUEUE_ROW = np.dtype([("topic_id", "<i4"), ("queue_id", "<i4"), ("phy_offset", "<u4")])
#: Position of the chunk table, size in bytes of table, topics, queues and facts, CRC-32 of each.
TRAILER = struct.Struct("<Q4I4I8s")


class QueueSeen(NamedTuple):
    """A queue and where its first message in a run stands; a message that could begin a queue."""

    topic: bytes
    queue_id: int
    phy_offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """What stage one says of a split; ``path``: the file that holds its messages, ``size`` and ``crc`` of that file.

    ``buckets``: how many rows stand before each queue bucket, BUCKETS + 1 numbers. ``queue_rows``: see QUEUE_ROW.
    """

    split: Split
    path: Path
    #: What it was built from and how, as the driver calls it: a run is taken over only by a rebuild of the same.
    identity: str = ""
    #: Where the reader stands: the split's end, unless the log ends before.
    next_offset: int = 0
    #: Where the last batch or gap ends; -1 if there was none. One process would say so of the log's end.
    phy_offset: int = -1
    #: Where the last batch ends; -1 if there was none.
    batch_end: int = -1
    messages: int = 0
    entries: int = 0
    #: The last message has an entry.
    ends_with_entry: bool = False
    #: Of the last message, ms; 0 if there is none.
    store_timestamp: int = 0
    #: Where the first message begins, None without one; of the last, ms; what all of them by themselves come to.
    first_offset: int | None = None
    last_timestamp: int = NEVER
    stand: Stand = AT_FIRST
    ends_log: bool = False
    skipped: tuple[Skipped, ...] = ()
    unreadable: Corrupt | None = None
    evidence: tuple[Evidence, ...] = ()
    topics: tuple[bytes, ...] = ()
    buckets: tuple[int, ...] = (0,) * (BUCKETS + 1)
    queue_rows: bytes = b""
    size: int = 0
    crc: int = 0

    @property
    def queues(self) -> Iterator[QueueSeen]:
        """The queues that a message of the run could begin, in the order of those messages."""
        for topic_id, queue_id, phy in np.frombuffer(self.queue_rows, dtype=QUEUE_ROW).tolist():
            yield QueueSeen(self.topics[topic_id], queue_id, self.split.begin + phy)

    @property
    def is_last(self) -> bool:
        """The log ends in this split: nothing behind it counts."""
        return self.ends_log or self.unreadable is not None

    def slim(self) -> Run:
        """Without what only the driver needs: what is sent to every task of stage two."""
        return replace(self, evidence=(), topics=(), buckets=(), queue_rows=b"", skipped=())

    def facts(self) -> bytes:
        """JSON of what the file does not hold elsewhere."""
        unreadable = self.unreadable
        row = {
            "split": list(astuple(self.split)),
            "identity": self.identity,
            "nextOffset": self.next_offset,
            "phyOffset": self.phy_offset,
            "batchEnd": self.batch_end,
            "messages": self.messages,
            "entries": self.entries,
            "endsWithEntry": self.ends_with_entry,
            "storeTimestamp": self.store_timestamp,
            "firstOffset": self.first_offset,
            "lastTimestamp": self.last_timestamp,
            "stand": list(self.stand),
            "endsLog": self.ends_log,
            "skipped": [list(astuple(gap)) for gap in self.skipped],
            "unreadable": unreadable and [unreadable.offset, unreadable.reason, str(unreadable.path or "")],
            "evidence": [list(astuple(point)) for point in self.evidence],
            "buckets": list(self.buckets),
        }
        return json.dumps(row).encode()

    @classmethod
    def from_facts(cls, data: bytes, path: Path) -> Run:
        """The opposite of ``facts``; CorruptDataError for what it does not make."""
        try:
            row: Any = json.loads(data)
            bad = row["unreadable"]
            return cls(
                split=Split(*row["split"]),
                path=path,
                identity=row["identity"],
                next_offset=row["nextOffset"],
                phy_offset=row["phyOffset"],
                batch_end=row["batchEnd"],
                messages=row["messages"],
                entries=row["entries"],
                ends_with_entry=row["endsWithEntry"],
                store_timestamp=row["storeTimestamp"],
                first_offset=row["firstOffset"],
                last_timestamp=row["lastTimestamp"],
                stand=Stand(*row["stand"]),
                ends_log=row["endsLog"],
                skipped=tuple(Skipped(*gap) for gap in row["skipped"]),
                unreadable=bad and Corrupt(bad[0], bad[1], Path(bad[2]) if bad[2] else None),
                evidence=tuple(Evidence(*point) for point in row["evidence"]),
                buckets=tuple(row["buckets"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptDataError(f"{path} is no run: {error!r}") from error


def bucket_of(topic: bytes, queue_id: int) -> int:
    """The bucket of a queue; names that a Java reader takes for one are one."""
    key = topic_hash(topic) << 32 | (queue_id & 0xFFFFFFFF)
    return (key * HASH_FACTOR & (1 << 64) - 1) >> BUCKET_SHIFT


def topic_hash(topic: bytes) -> int:
    """32 bits of a topic's name as Java reads it."""
    return zlib.crc32(decode_utf8(topic).encode("utf-8", "surrogatepass"))


def pack_topics(topics: tuple[bytes, ...]) -> bytes:
    """As the drawing says."""
    return struct.pack(f"<I{len(topics)}I", len(topics), *map(len, topics)) + b"".join(topics)


def unpack_topics(data: bytes) -> tuple[bytes, ...]:
    """The opposite, of bytes whose CRC held."""
    (count,) = struct.unpack_from("<I", data)
    names, at = [], 4 + 4 * count
    for size in struct.unpack_from(f"<{count}I", data, 4):
        names.append(data[at : at + size])
        at += size
    return tuple(names)


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
