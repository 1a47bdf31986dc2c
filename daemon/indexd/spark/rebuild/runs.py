"""Runs: what stage one of a rebuild makes of a split, written by one task and read by those of stage two.

::

    "indexdR2"                  8 bytes
    chunk, some 131072 rows     little-endian, in log order:
        MESSAGE                 one a message
        u32 keyHash             one an index entry; none of messages that the flavour leaves out
        UNIT                    the messages once more for the ConsumeQueues, sorted by bucket, those of one in log
                                order; of prepared and rolled back messages there is none
        u32 bucket start        BUCKETS + 1: the unit with which each bucket begins
        u32 crc                 BUCKETS: of the units of each bucket
    chunk table                 a CHUNK a chunk, with the CRC-32 of its parts
    topics                      JSON: the names, a character a byte
    run                         JSON: the Run itself
    trailer                     TRAILER: where these are, their CRC-32, "indexdR2"

Written from front to back, under a name that no other attempt has. The CRC-32 of the trailer is the run's: it covers
the others, and they cover every byte. A crash can leave files without a trailer, or with pages that never came: the
CRCs tell, and nothing is believed before its CRC is. A chunk is read at a time, so memory does not grow with the log.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, TypeAdapter, ValidationError

from indexd.commitlog.batcher import DispatchBatch, TopicTable
from indexd.commitlog.decoder import decode_utf8
from indexd.commitlog.evidence import Evidence
from indexd.commitlog.format import Corrupt
from indexd.commitlog.kernel import Columns
from indexd.commitlog.reader import Skipped
from indexd.commitlog.tail import AT_FIRST, NEVER, Stand, stand_of
from indexd.consumequeue.format import FLAG_INNER_BATCH, OFFSET_MAX
from indexd.errors import CorruptDataError, DiskError
from indexd.spark.source.columns import numbers
from indexd.spark.splits import Split, SplitReader
from indexd.storage.disk import Disk

MAGIC = b"indexdR2"
#: ``phy_offset`` is relative to the split's begin.
MESSAGE = np.dtype([("phy_offset", "<u4"), ("size", "<i4"), ("store_timestamp", "<i8"), ("key_count", "<u2")])
HASH = np.dtype("<u4")
UNIT = np.dtype(
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
#: ``position``: where it begins; ``end``: where the reader's last batch in it ends; then how many of each, and the
#: CRC-32 of all messages, of all hashes, and of starts and CRCs of the buckets.
CHUNK = np.dtype(
    [
        *(("position", "<i8"), ("end", "<i8")),
        *(("messages", "<i4"), ("hashes", "<i4"), ("units", "<i4")),
        *(("messages_crc", "<u4"), ("hashes_crc", "<u4"), ("table_crc", "<u4")),
    ]
)
QUEUE = np.dtype([("topic_id", "<i4"), ("queue_id", "<i4"), ("phy_offset", "<u4")])
#: Position of the chunk table; size of table, topics and run; CRC-32 of each; MAGIC.
TRAILER = struct.Struct("<Q3I3I8s")
# Rows that are collected before they are written, and keys: some 10 MiB.
ROWS_PER_CHUNK = 1 << 17
_KEYS_PER_CHUNK = 4 * ROWS_PER_CHUNK
#: A bucket is a number below this that a queue's name and id hash into.
BUCKETS = 128
_HASH_FACTOR = 0x9E3779B97F4A7C15
_HASH_SHIFT = 64 - 7
_TRANSACTION, _PREPARED, _ROLLBACK = 0xC, 0x4, 0xC
_BUCKET_TABLE = np.dtype("<u4")
_COLUMNS = {
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


class QueueSeen(NamedTuple):
    """A queue and where its first message in a run stands; a message that could begin a queue."""

    topic: bytes
    queue_id: int
    phy_offset: int


@dataclass(frozen=True, slots=True)
class Run:
    """What stage one says of a split; ``path``: the file that holds its messages, ``size`` and ``crc`` of that file.

    ``buckets``: how many units stand before each queue bucket, BUCKETS + 1 numbers. ``queue_rows``: see QUEUE.
    """

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

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
        for topic_id, queue_id, phy in np.frombuffer(self.queue_rows, dtype=QUEUE).tolist():
            yield QueueSeen(self.topics[topic_id], queue_id, self.split.begin + phy)

    @property
    def is_last(self) -> bool:
        """The log ends in this split: nothing behind it counts."""
        return self.ends_log or self.unreadable is not None

    def slim(self) -> Run:
        """Without what only the driver needs: what is sent to every task of stage two."""
        return replace(self, evidence=(), topics=(), buckets=(), queue_rows=b"", skipped=())


_RUN = TypeAdapter(Run)


def bucket_of(topic: bytes, queue_id: int) -> int:
    """The bucket of a queue; names that a Java reader takes for one are one."""
    name = zlib.crc32(decode_utf8(topic).encode("utf-8", "surrogatepass"))
    return ((name << 32 | (queue_id & 0xFFFFFFFF)) * _HASH_FACTOR & (1 << 64) - 1) >> _HASH_SHIFT


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
        # Of the reader's present table of topics: its ids -> ours.
        self._table: TopicTable | None = None
        self._ours: NDArray[np.int32] = np.zeros(0, dtype=np.int32)
        #: Of (topic id, queue id) as one number: its bucket; and those that a message was seen to begin, in order.
        self._bucket_of: dict[int, int] = {}
        self._begun: dict[int, tuple[int, int, int]] = {}
        self._buckets = np.zeros(BUCKETS + 1, dtype=np.int64)

    def __enter__(self) -> Self:
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
        queues = np.array(list(self._begun.values()), dtype=QUEUE).tobytes()
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
        topics = json.dumps([topic.decode("latin-1") for topic in run.topics]).encode()
        sections = (table, topics, _RUN.dump_json(run))
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
        position, end = self._position, self._batches[-1].end_offset
        messages = np.zeros(self._rows, dtype=MESSAGE)
        messages["phy_offset"] = self._joined("phy_offset") - self._run.split.begin
        messages["store_timestamp"] = self._joined("store_timestamp")
        messages["key_count"], hashes = self._keys_of_rows()
        sizes = self._joined("size")
        if len(sizes):  # they are read where ConsumeQueues or sparse indexes are built
            messages["size"] = sizes
        crcs = [self._write(messages.view(np.uint8).data), self._write(hashes.data)]
        units, table_crc = self._write_units(messages) if self._with_units and len(sizes) else (0, 0)
        self._chunks.append((position, end, len(messages), len(hashes), units, *crcs, table_crc))
        ends_with_entry = bool(messages["key_count"][-1])
        self._run = replace(self._run, entries=self._run.entries + len(hashes), ends_with_entry=ends_with_entry)
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

    def _write_units(self, messages: NDArray[np.void]) -> tuple[int, int]:
        # How many there are, and the CRC of starts and CRCs of the buckets.
        rows = np.empty(len(messages), dtype=UNIT)
        rows["phy_offset"], rows["size"] = messages["phy_offset"], messages["size"]
        columns = {name: self._joined(name) for name in ("queue_offset", "tags_code", "queue_id", "sys_flag")}
        columns["topic_id"] = np.concatenate([self._own_topic_ids(batch) for batch in self._batches])
        for name, column in columns.items():
            rows[name] = column
        order, starts = self._by_bucket(columns, messages["phy_offset"])
        units = rows[order]
        raw = units.view(np.uint8)
        self._write(raw.data)
        bounds = (starts.astype(np.int64) * UNIT.itemsize).tolist()
        crcs = [zlib.crc32(raw[begin:end].data) for begin, end in pairwise(bounds)]
        self._buckets += starts
        return len(units), self._write(starts.tobytes() + np.array(crcs, dtype=np.uint32).tobytes())

    def _own_topic_ids(self, batch: DispatchBatch) -> NDArray[np.int32]:
        if batch.topics is not self._table:
            self._table, self._ours = batch.topics, np.zeros(0, dtype=np.int32)
        theirs = batch.columns.topic_id[: batch.rows]
        known = len(self._ours)
        new = [batch.topics.raw_name(topic_id) for topic_id in range(known, int(theirs.max(initial=-1)) + 1)]
        if new:
            added = [self._topic_ids.setdefault(name, len(self._topic_ids)) for name in new]
            self._ours = np.array([*self._ours.tolist(), *added], dtype=np.int32)
        return self._ours[theirs]

    def _by_bucket(
        self, columns: dict[str, NDArray[Any]], phy: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        # The rows sorted by bucket, those of one in log order, and where each bucket begins; notes the new queues.
        topic_ids, queue_ids, flags = columns["topic_id"], columns["queue_id"], columns["sys_flag"]
        offsets, transaction = columns["queue_offset"], columns["sys_flag"] & _TRANSACTION
        encoded = numbers(topic_ids.astype(np.int64) << 32 | queue_ids.view(np.uint32)).dictionary_encode()
        codes, queues = encoded.indices.to_numpy(), encoded.dictionary.to_numpy().tolist()
        enters = (transaction != _PREPARED) & (transaction != _ROLLBACK)
        begins = np.flatnonzero(enters & (flags & FLAG_INNER_BATCH == 0) & (offsets >= 0) & (offsets <= OFFSET_MAX))
        first = np.full(len(queues), len(flags), dtype=np.int64)
        first[codes[begins[::-1]]] = begins[::-1]  # of several the last one stays, which is the first row
        for code in np.argsort(first).tolist():
            queue, row = queues[code], int(first[code])
            if row < len(flags) and queue not in self._begun:
                self._begun[queue] = (int(topic_ids[row]), int(queue_ids[row]), int(phy[row]))
        names = list(self._topic_ids)
        for queue in queues:
            if queue not in self._bucket_of:
                self._bucket_of[queue] = bucket_of(names[queue >> 32], queue)
        buckets = np.array([self._bucket_of[queue] for queue in queues], dtype=np.uint8)[codes]
        buckets[~enters] = BUCKETS
        starts = np.zeros(BUCKETS + 1, dtype=np.uint32)
        np.cumsum(np.bincount(buckets, minlength=BUCKETS + 1)[:BUCKETS], out=starts[1:])
        return np.argsort(buckets, kind="stable")[: int(starts[-1])], starts


class RunReader:
    """Reads the messages of ``run``; ``slim`` ones do. Raises DiskError, CorruptDataError. One owner, no locks.

    All batches of ConsumeQueues share one table of topics. Columns that a builder does not ask for are empty.
    """

    def __init__(self, disk: Disk, run: Run) -> None:
        self.run = run
        self._file = disk.open_read(run.path)
        try:
            size = self._file.size()
            if size != run.size:
                raise CorruptDataError(f"{run.path} has {size} bytes, not {run.size}")
            trailer = self._file.pread(TRAILER.size, max(size - TRAILER.size, 0))
            if len(trailer) < TRAILER.size or trailer[-8:] != MAGIC or run.crc not in (0, zlib.crc32(trailer)):
                raise CorruptDataError(f"{run.path} is no run that was written to its end")
            self.crc = zlib.crc32(trailer)
            position, *numbers, _ = TRAILER.unpack(trailer)
            self._sizes, self._crcs = numbers[:3], numbers[3:]
            self._positions = [position + sum(self._sizes[:number]) for number in range(3)]
            self._chunks = np.frombuffer(self._section(0), dtype=CHUNK)
        except BaseException:
            self._file.close()
            raise
        self._topics: TopicTable | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def __repr__(self) -> str:
        return f"RunReader({self.run.path}, {self.run.split}, messages={self.run.messages})"

    def index_batches(self, first: int, last: int) -> Iterator[tuple[DispatchBatch, int, int]]:
        """The messages of the index entries ``[first, last)`` of the run, and where to begin: (batch, row, key).

        ``row`` and ``key`` are put_batch's. A batch may go on behind ``last``, and have messages without entries.
        """
        begin = 0
        for chunk in self._chunks:
            end = begin + int(chunk["hashes"])
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
            count = int(chunk["units"])
            if not count:
                continue
            position = int(chunk["position"]) + int(chunk["messages"]) * MESSAGE.itemsize + int(chunk["hashes"]) * 4
            table_position = position + count * UNIT.itemsize
            table = self._array(_BUCKET_TABLE, BUCKETS + 1 + BUCKETS, table_position, chunk["table_crc"])
            begin, end = int(table[bucket]), int(table[bucket + 1])
            if begin == end:
                continue
            position += begin * UNIT.itemsize
            units = self._array(UNIT, end - begin, position, table[BUCKETS + 1 + bucket])
            columns = {name: units[name].astype(_COLUMNS[name]) for name in UNIT.names or ()}
            columns["phy_offset"] += self.run.split.begin
            yield self._batch(columns, int(columns["phy_offset"][-1]) + int(columns["size"][-1]))

    def sparse_batches(self) -> Iterator[DispatchBatch]:
        """All messages in log order: phy_offset, size, store_timestamp; batches end where those of the reader did."""
        for chunk in self._chunks:
            yield self._log_batch(chunk, with_keys=False)

    def check(self) -> None:
        """CorruptDataError if any byte of the messages is not as it was written."""
        for chunk in self._chunks:
            self._log_batch(chunk, with_keys=True)
        for bucket in range(BUCKETS):
            for _ in self.queue_batches(bucket):
                pass

    def read_run(self) -> Run:
        """The Run that the file says it holds; its messages are not looked at."""
        try:
            run = _RUN.validate_json(self._section(2))
        except ValidationError as error:
            raise CorruptDataError(f"{self.run.path} is no run: {error.errors()[0]['msg']}") from error
        return replace(run, path=self.run.path, size=self.run.size, crc=self.crc)

    def _log_batch(self, chunk: np.void, *, with_keys: bool) -> DispatchBatch:
        rows, position = int(chunk["messages"]), int(chunk["position"])
        messages = self._array(MESSAGE, rows, position, chunk["messages_crc"])
        columns: dict[str, NDArray[Any]] = {
            "phy_offset": messages["phy_offset"].astype(np.int64) + self.run.split.begin,
            "size": messages["size"].copy(),
            "store_timestamp": messages["store_timestamp"].copy(),
            "key_start": np.zeros(rows + 1, dtype=np.int64),
        }
        if with_keys:
            np.cumsum(messages["key_count"], out=columns["key_start"][1:])
            position += rows * MESSAGE.itemsize
            columns["key_hash"] = self._array(HASH, int(chunk["hashes"]), position, chunk["hashes_crc"])
            columns["sys_flag"] = np.zeros(rows, dtype=np.int32)
        return self._batch(columns, int(chunk["end"]))

    def _batch(self, columns: dict[str, NDArray[Any]], end: int) -> DispatchBatch:
        if self._topics is None:
            self._topics = _topic_table([name.encode("latin-1") for name in json.loads(self._section(1))])
        filled = {name: columns.get(name, np.empty(0, dtype=kind)) for name, kind in _COLUMNS.items()}
        return DispatchBatch(
            Columns(**filled), len(filled["phy_offset"]), int(filled["phy_offset"][0]), end, self._topics
        )

    def _array(self, kind: np.dtype[Any], count: int, position: int, crc: int) -> NDArray[Any]:
        raw = np.empty(count * kind.itemsize, dtype=np.uint8)
        if self._file.pread_into(raw.data, position) < len(raw) or zlib.crc32(raw.data) != crc:
            raise CorruptDataError(
                f"{self.run.path} is not as it was written", "run the rebuild again, without --resume"
            )
        return raw.view(kind)

    def _section(self, number: int) -> bytes:
        # Chunk table, topics, run.
        raw = self._array(np.dtype(np.uint8), self._sizes[number], self._positions[number], self._crcs[number])
        return raw.tobytes()


def read_run(disk: Disk, path: Path) -> Run | None:
    """The Run that a file says it holds, if it was written to its end; its messages are not looked at."""
    try:
        with RunReader(disk, Run(Split(0, 0), path, size=disk.stamp(path).size)) as reader:
            return reader.read_run()
    except CorruptDataError:
        return None
    except DiskError as error:
        if not error.is_missing:
            raise
        return None


def _topic_table(topics: Sequence[bytes]) -> TopicTable:
    # Names by id; nobody looks an id up by name.
    table = TopicTable(max(len(topics), 1), max(sum(map(len, topics)), 1))
    table.arrays.start[1 : len(topics) + 1] = np.cumsum([len(name) for name in topics])
    table.arrays.data[: table.arrays.start[len(topics)]] = np.frombuffer(b"".join(topics), dtype=np.uint8)
    table.arrays.known[0] = len(topics)
    return table
